"""The trainer without `run()`: its parts, `step()`, `eval()`, its state, and `resume()`."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any, Final, Generic, Self, TypeVar

from rl8x import keys
from rl8x.algorithms.base import GenericAlgorithmBase, refuse_inference_mode
from rl8x.checkpoint import Checkpoint, CheckpointError, CheckpointsLike
from rl8x.checkpoint.find import spool_of
from rl8x.checkpoint.metadata import SavedRun, checked_state
from rl8x.checkpoint.ranks import RANKS, num_ranks, of_rank
from rl8x.config.describe import unwritable
from rl8x.config.spec import RunOptions, RunSpec, TrainerSpec
from rl8x.distributed import ranks
from rl8x.envs import Env
from rl8x.envs.env_config import AnyEnvConfig, parsed
from rl8x.names import did_you_mean
from rl8x.output import described
from rl8x.tracking import MLflowTracker, NullTracker, Tracker
from rl8x.tracking.protocol import status_of
from rl8x.trainers.artifacts import check_models
from rl8x.trainers.callbacks import Callback, check_callbacks, declared_by
from rl8x.trainers.evaluation import EpisodeEvaluator, Evaluations, check_evaluation_name, in_group, make_evaluator
from rl8x.trainers.non_finite import OnNonFinite
from rl8x.trainers.ranks import begin, check_same, warn_of_other_number
from rl8x.trainers.record import Record
from rl8x.trainers.resume import (
    Origin,
    after_restart,
    handle_for,
    is_restart,
    newest,
    prepare,
    set_torch_generators,
    unfinished,
    with_generators_of,
)
from rl8x.trainers.signals import interruption
from rl8x.trainers.statistics import EvalStats, Timer, TrainStats
from rl8x.trainers.train_step import TrainStep

AlgorithmT = TypeVar("AlgorithmT", bound=GenericAlgorithmBase[Any])
TrainerState = dict[str, int]
# Metrics of collecting, which algorithms without an environment do not have.
_COLLECTED = {*keys.COLLECT_METRICS, "profiling/env_steps_per_s"}
_GIVEN_ENV: Final = "the evaluation environment was an instance or a factory"
EvalEnv = str | bool | Env | Callable[..., Env] | None


class TrainerBase(Generic[AlgorithmT]):
    """Trains an algorithm one `step()` or `eval()` at a time; `GenericTrainerBase` adds `run()`.

    Attributes:
        evaluator: Plays whole episodes in a separate environment; None if `eval()` does not use one.
        evaluations: The `env_config`, the schedule and the metric names of `eval()`.
        record: Writes the run to its tracker and its checkpoints.
        train_step: Makes the steps, and has the latest row and evaluation.
        origin: The checkpoint that was resumed from, until a `run()` has continued it; otherwise None.
        planned: The options of the next `run()` where none are given: those of a spec or a checkpoint, once.
        saved_run: State of the `run()` in that checkpoint, which the next `run()` continues, or None.
    """

    def __init__(
        self,
        algorithm: AlgorithmT,
        *,
        tracker: Tracker | None = None,
        eval_env: EvalEnv = "auto",
        num_eval_envs: int | None = None,
        checkpoints: CheckpointsLike = None,
        on_non_finite: OnNonFinite = "stop",
        log_models: bool = False,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """Prepare a trainer; nothing is tracked or saved before the first `run()` or `step()`.

        Args:
            algorithm: The algorithm that is trained.
            tracker: Stores params and metrics; None is MLflow, or nothing if MLflow is not installed.
            eval_env: The environment of `eval()`. True, an instance or a factory: a separate environment, in which
                whole episodes are played. False or None: the training environment, for the horizons from one reset to
                the next (`horizons_per_env_reset`). `"auto"`: a separate one for episodic tasks, made as the training's
                or copied from it, and the training environment for tasks that never end. Returns of whole episodes are
                `eval/returns/*`; if an episodic task is evaluated in the training environment, sums over its horizons
                are `eval/horizon_returns/*`. An algorithm that learns from a data set is evaluated only if one is
                given.
            num_eval_envs: Copies, and so episodes, of a separate evaluation environment that the trainer makes; None is
                the training's number, but at most 128. An instance that can only be copied keeps its number.
            checkpoints: When and where the run is saved: a `Checkpoints`, a path, or True for the defaults; False never
                saves. None saves by the defaults if the tracker keeps the run on a disk, in a folder beside it.
            on_non_finite: What to do if observations, actions, rewards, losses, gradients or weights are not finite.
                `"stop"` ends the run as FAILED with a diagnosis. `"skip"` restores the weights before the step, and
                `"rollback"` those of the last checkpoint; both then continue, in new episodes if collected numbers were
                not finite, and stop after ten such steps in a row.
            log_models: Whether a `run()` ends by logging the policy as a model: the `last`, and the `best` if
                `checkpoints` have a `best_metric`, each with the metrics of its step. See `log_model`.
            callbacks: Called with the trainer and each row of statistics, after it was tracked and before the
                conditions judge it. A callback with an attribute `metric_names`, a list of names, may return values for
                them by name, which are tracked and join the row. What `trainer.eval()` measures in a callback joins the
                row too. It ends the run by `trainer.stop("why")`.

        Raises:
            TypeError: If an argument has a wrong type.
            ValueError: If an argument is not legal, or an environment to evaluate in does not fit.
        """
        if not isinstance(algorithm, GenericAlgorithmBase):
            raise TypeError(
                f"a trainer needs an algorithm, such as PPOConfig().build(CartPole); got {algorithm!r:.200}."
            )
        refuse_inference_mode()
        # A look at the protocol's properties, as `isinstance` takes it, would look for the store.
        if tracker is not None and not callable(getattr(type(tracker), "log_metrics", None)):
            raise TypeError(f"`tracker` must keep runs, as MLflowTracker(...) does; got {tracker!r:.200}.")
        self.algorithm = algorithm
        begin(algorithm)
        algorithm.plan_execution(math.inf)
        self.evaluator: EpisodeEvaluator | None = make_evaluator(algorithm, eval_env, num_eval_envs)
        self.evaluations = Evaluations(algorithm, self.evaluator, warns=eval_env == "auto")
        self.callbacks: tuple[Callback, ...] = ()
        check_callbacks(callbacks, self.metric_names)
        self.callbacks = tuple(callbacks)
        own = eval_env if eval_env is None or isinstance(eval_env, bool | str) else unwritable(_GIVEN_ENV)
        options: Any = {"eval_env": own, "num_eval_envs": num_eval_envs, "log_models": log_models}
        self.options = TrainerSpec(**options, on_non_finite=on_non_finite)
        if ranks().is_first:
            self.tracker = default_tracker() if tracker is None else tracker
            if log_models:
                check_models(algorithm.policy, self.tracker)
        else:
            self.tracker, checkpoints = NullTracker(), False
        own_env = None if self.evaluator is None else self.evaluator.env
        self.record = Record(algorithm, self.tracker, checkpoints, self.options, own_env, self.evaluations.num_envs)
        self.checkpoints = self.record.checkpoints
        best = self.checkpoints.best_metric
        if best is not None and best not in self.metric_names:
            near = did_you_mean(best, self.metric_names)
            raise ValueError(f"Checkpoints: `best` must be a metric of this trainer; got {best!r}.{near}")
        self.train_step = TrainStep(algorithm, self.record, on_non_finite)
        self.origin: Origin | None = None
        self.planned = RunOptions()
        self.saved_run: SavedRun | None = None
        self.stop_reason: str | None = None
        self.ending: list[str] = []

    def step(self, *, env_config: AnyEnvConfig | None = None) -> TrainStats:
        """Collect experience and update the policy once; track the row of metrics.

        Args:
            env_config: Values for the environment's parameters, applied if a reset is due; None keeps those of
                training, whatever an evaluation had in between. Or a function of the trainer's `known`.

        Returns:
            The row, with the metrics of the latest evaluation; an `eval()` before the next step updates them.

        Raises:
            ValueError: If the `env_config` is not legal, or would never apply.
            NonFiniteError: If numbers are not finite and `on_non_finite` is "stop".
            RuntimeError: If called within a `run()` of this trainer or in a callback, in `torch.inference_mode()`, or
                in a process that was forked after the run began.
        """
        if self.train_step.is_in_progress:
            raise RuntimeError("a step of this trainer is in progress: a callback cannot make another one.")
        self._check_place()
        try:
            self.train_step.begin()
            stats = self.train_step.finish(self.train_step.make_row(env_config), self)
        except SystemExit as error:  # a callback's; of one in the loop around nobody hears
            self.record.close(status_of(error), interruption(error), self.train_step.eval_row)
            raise
        self.train_step.open_row = stats
        asked = ranks().share("whether a callback ends the loop", self.train_step.take_stop())
        stats.stop_reason = next(filter(None, asked), None)
        self.stop_reason = stats.stop_reason or self.stop_reason
        return stats

    def _check_place(self) -> None:
        """Raise where nothing can be learned, or the run is another process's.

        Raises:
            RuntimeError: In `torch.inference_mode()`, and in a process that was forked after the run began.
        """
        refuse_inference_mode()
        self.record.check_process()

    def __iter__(self) -> Iterator[TrainStats]:
        """Yield the rows of `step()` after `step()`, until `stop()` is called."""
        stats = None
        while stats is None or stats.stop_reason is None:
            try:
                stats = self.step()
            except KeyboardInterrupt:
                self.record.close("KILLED", "interrupted", self.train_step.eval_row)
                raise
            yield stats

    def eval(
        self, *, env_config: Mapping[str, Any] | None = None, deterministic: bool = True, name: str | None = None
    ) -> EvalStats:
        """Evaluate the current policy and track the metrics under `eval/`.

        The metrics join the row that `step()` returned last, as fresh ones, so that a condition that is asked about
        this row counts the evaluation, once. Before the first step they join the next row.

        Args:
            env_config: Values for the environment's parameters in this evaluation; None takes the run's
                `eval_env_config`, or else the training's values.
            deterministic: Whether the policy takes its most likely action rather than a sample.
            name: The metrics are `eval/<name>/...`. None: they are `eval/...`; with another `env_config` than the
                run's, they are tracked under a name made from it, such as `eval/gravity 50/...`. An evaluation with a
                name never replaces the run's own.

        Raises:
            RuntimeError: If the training environment is used and is not at a reset, or there is no environment; and as
                `step` does.
            ValueError: If `env_config` could not be applied, or MLflow does not take the name.
        """
        self._check_place()
        if name is not None:
            check_evaluation_name(name)
        tracked_name = self.evaluations.config_name(env_config) if name is None else name
        with Timer(self.algorithm.device) as timer:
            stats = self.evaluations.measure(env_config, deterministic=deterministic)
        spent = {"profiling/eval_ms": timer.elapsed_ms}
        own, tracked = (in_group(stats, group) for group in (name, tracked_name))
        self.train_step.take_evaluation(own, tracked | spent, is_of_run=tracked_name is None)
        return EvalStats(own | spent)

    def evaluate_now(self) -> Mapping[str, float] | None:
        """Evaluate for `Confirmed`, and return the metrics; None if no evaluation can be made at this step."""
        return self.eval() if self.evaluations.is_their_turn else None

    @property
    def state(self) -> TrainerState:
        """The running counters by metric name: collects, steps, updates, environment steps and episodes."""
        return self.algorithm.counters

    @property
    def known(self) -> dict[str, float]:
        """What an `env_config` may depend on: metrics of the latest row and evaluation, and the counters."""
        return self.train_step.known

    @property
    def metric_names(self) -> frozenset[str]:
        """Every metric that a row of this trainer may have."""
        env, names = self.algorithm.env, {*keys.TRAINER_METRICS}
        if env is None:
            names -= _COLLECTED
        else:
            names |= {*keys.info_metrics(env.metric_names), *keys.parameter_metrics(env.parameters)}
        evaluated = {keys.EVAL_PREFIX + name for name in self.evaluations.measured}
        return frozenset(names | {*self.algorithm.metrics} | evaluated | declared_by(self.callbacks))

    def evaluation_name(self, name: str) -> str | None:
        """Return the metric of evaluations that measures the same as a metric of a training row.

        Args:
            name: The metric of a training row.

        Returns:
            Its name; None if evaluations do not measure that.
        """
        return self.evaluations.name_of(name)

    @property
    def params(self) -> dict[str, Any]:
        """The params of the run: hyperparameters, physics, run options, versions and the machine."""
        return self.record.params

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on."""
        return {
            "algorithm": self.algorithm.state_dict(),
            "evaluator": None if self.evaluator is None else self.evaluator.state_dict(),
            **self.train_step.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        Args:
            state: What `state_dict` returned.
        """
        self.algorithm.load_state_dict(state["algorithm"])
        if self.evaluator is not None and state["evaluator"] is not None:
            self.evaluator.load_state_dict(state["evaluator"])
        self.train_step.load_state_dict(state)

    def plan(self, spec: RunSpec) -> None:
        """Have the next `run()` take the options of a spec where none are given.

        Args:
            spec: The spec, whose other parts are taken to be as this trainer's.
        """
        trust = spec.trusted or self.record.spec.trusted
        self.planned, self.record.spec = spec.run, dataclasses.replace(self.record.spec, trust=trust)

    @classmethod
    def resume(
        cls,
        source: str | Path,
        *,
        auto: bool = False,
        algorithm: AlgorithmT | None = None,
        overrides: Mapping[str, Any] | None = None,
        tracker: Tracker | None = None,
        eval_env: EvalEnv | EllipsisType = ...,
        callbacks: Sequence[Callback] = (),
        checkpoints: CheckpointsLike | EllipsisType = ...,
        trust: bool = False,
    ) -> Self:
        """Make a trainer from a checkpoint; its next `run()` continues the saved run, to the same bits.

        Args:
            source: Path of a checkpoint or of a run's folder of checkpoints, or the run's name or ID in MLflow.
            auto: Take the run's newest good checkpoint if the one that is meant is damaged.
            algorithm: An algorithm built as the saved one was; None builds it from the checkpoint, which needs an
                environment and a model that can be imported by name.
            overrides: Hyperparameters to change from now on; the tracked run records them.
            tracker: Stores params and metrics; None is the saved run's, if that was MLflow or a `NullTracker`. Any
                other tracker must be given.
            eval_env: The environment of `eval()`, see the class; `...` keeps the saved choice.
            callbacks: Called with the trainer and each row of statistics, see the class.
            checkpoints: When and where the run is saved, see the class; `...` is as before, in the same folder.
            trust: Whether to trust the checkpoint as your own code. It may then name modules to be imported, whose code
                runs, and a store that you have not named; otherwise only names of modules that are already imported, or
                of rl8x, torch and Gymnasium, are used.

        Raises:
            CheckpointError: If there is no such checkpoint or it cannot be used; the message names the newest good one.

        Returns:
            The trainer, at the checkpoint's step.
        """
        checkpoint, origin, options = prepare(
            source,
            auto=auto,
            algorithm=algorithm,
            overrides=overrides,
            tracker=tracker,
            eval_env=eval_env,
            checkpoints=checkpoints,
            trust=trust,
        )
        trainer = cls(callbacks=callbacks, **options)
        spec = dataclasses.replace(checkpoint.spec, trust=trust)
        if eval_env is not ... or checkpoints is not ...:
            own: Any = {"checkpoints": trainer.record.spec.trainer.checkpoints} if checkpoints is not ... else {}
            own |= {"eval_env": trainer.options.eval_env} if eval_env is not ... else {}
            spec = dataclasses.replace(spec, trainer=dataclasses.replace(spec.trainer, **own), trust=trust)
        trainer.record.spec = spec
        trainer.go_on_from(checkpoint, origin)
        return trainer

    def go_on_from(self, checkpoint: Checkpoint, origin: Origin) -> None:
        """Restore a checkpoint, with its folder and its tracked run; the next `run()` continues its run.

        Args:
            checkpoint: The checkpoint.
            origin: How it was found.

        Raises:
            CheckpointError: If it does not fit this trainer.
        """
        algorithm, metadata = self.algorithm, checkpoint.metadata
        check_same(checkpoint)
        self.origin = origin
        try:
            state = checked_state(checkpoint.state)
            self._load_rank(checkpoint.state)
            if origin.overrides.keys() & {"lr", "lr_schedule"}:
                algorithm.set_lr(None)
            self.saved_run = state["run"]
            self.checkpoints.go_on_from(checkpoint, origin.known)
        except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            reason = " ".join(described(error).split())
            raise CheckpointError(
                f"the checkpoint {checkpoint.path} does not fit this trainer: {reason:.300}"
            ) from error
        algorithm.seed = metadata["resolved"]["config"].get("seed", algorithm.seed)
        self.planned = checkpoint.spec.run if self.saved_run is not None else RunOptions()
        evaluated_under = self.planned.eval_env_config and parsed(self.planned.eval_env_config)
        if self.saved_run is not None:
            self.evaluations.env_config = evaluated_under
        if isinstance(self.tracker, MLflowTracker):
            self.tracker.resumed_spool = spool_of(checkpoint.path.parent, metadata)
            self.tracker.names_before = metadata["run"]["names"] or {}
        self.record.resume(handle_for(metadata["run"], self.tracker), origin.tags, state["results"], evaluated_under)

    def _load_rank(self, state: Mapping[str, Any]) -> None:
        """Restore the state of this rank from a checkpoint; a rank that it does not have joins with rank 0's."""
        saved, others = {name: state[name] for name in ("trainer", "torch_generators")}, state.get(RANKS) or {}
        warn_of_other_number(num_ranks(state), self.algorithm)
        if ranks().rank < num_ranks(state):
            own = of_rank(saved, others, ranks().rank)
            if num_ranks(state) != ranks().size:  # evaluations have other shares: they begin anew
                own = {**own, "trainer": {**own["trainer"], "evaluator": None}}
            self.load_state_dict(with_generators_of(self.algorithm.device, own["trainer"], own["torch_generators"]))
            set_torch_generators(own["torch_generators"], self.algorithm.device)
            return
        self.algorithm.join(saved["trainer"]["algorithm"])
        self.train_step.load_state_dict(saved["trainer"])

    def go_on_after_restart(self) -> None:
        """Restore the last checkpoint of the same job after torchrun has restarted it, if there is one."""
        if not is_restart() or self.origin is not None or self.algorithm.counters[keys.STEPS] > 0:
            return
        resolved = self.record.resolved
        if self.algorithm.config.seed is None:  # the one that was drawn then is meant
            resolved = {**resolved, "config": {**resolved["config"], "seed": None}}
        own_folder = unfinished(self.record.spec, resolved, self.checkpoints.root) if ranks().is_first else None
        folder = ranks().first("the run to go on with", None if own_folder is None else str(own_folder))
        if folder is not None:
            self.go_on_from(*after_restart(Path(folder), self.algorithm))

    def go_on_from_newest(self) -> None:
        """Restore the newest checkpoint, which another process has written since this trainer resumed an older one.

        Raises:
            CheckpointError: If another was asked for, or the trainer has stepped already.
        """
        own_folder = self.checkpoints.directory
        folder = ranks().first("the run's folder", None if own_folder is None else str(own_folder))
        origin, directory = self.origin, None if folder is None else Path(folder)
        if origin is None or directory is None or origin.named or self.algorithm.counters[keys.STEPS] != origin.steps:
            raise self.checkpoints.outrun_error()
        self.go_on_from(*newest(directory, origin, self.algorithm))


def default_tracker() -> Tracker:
    """Return a tracker to MLflow; if MLflow is not installed, warn and return one that stores nothing."""
    if importlib.util.find_spec("mlflow") is not None:
        return MLflowTracker()
    warnings.warn(
        "MLflow is not installed: this run is not tracked. `pip install mlflow`, or pass tracker=NullTracker().",
        stacklevel=3,
    )
    return NullTracker()
