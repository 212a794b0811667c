"""The trainer without its loop: its parts, its evaluations, its state, and going on from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import psutil

from rl8x import keys
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.checkpoint import Checkpoint, CheckpointError, CheckpointsLike, read
from rl8x.checkpoint.find import spool_of
from rl8x.checkpoint.ranks import RANKS, num_ranks, of_rank
from rl8x.distributed import ranks
from rl8x.envs import Env
from rl8x.names import did_you_mean
from rl8x.output import described
from rl8x.tracking import MLflowTracker, NullTracker, Tracker
from rl8x.tracking.secrets import logger
from rl8x.trainers import non_finite
from rl8x.trainers.callbacks import Callback, check_callbacks, declared_metrics
from rl8x.trainers.evaluation import Evaluations, check_evaluation_name, in_group
from rl8x.trainers.evaluator import EpisodeEvaluator, make_evaluator
from rl8x.trainers.films import film_policy, make_film_env
from rl8x.trainers.models import BEST, LAST, check_models, log_policy, model_metrics, policy_at
from rl8x.trainers.non_finite import OnNonFinite
from rl8x.trainers.plotting import plot_run
from rl8x.trainers.ranks import begin, warn_of_other_number
from rl8x.trainers.record import Record, default_tracker
from rl8x.trainers.resume import Origin, handle_for, prepare, set_torch_generators
from rl8x.trainers.statistics import EvalStats, Timer, TrainStats
from rl8x.video import Film

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_log = logger(__name__)
AlgorithmT = TypeVar("AlgorithmT", bound=GenericAlgorithmBase[Any])
TrainerState = dict[str, int]
# What a row has of collects: nothing where there is no environment.
_COLLECTED = {*keys.COLLECT_METRICS, "profiling/env_steps_per_s"}
EvalEnv = str | bool | Env | Callable[..., Env] | None


class TrainerBase(Generic[AlgorithmT]):
    """Drives an algorithm: `step()`, `eval()`, and `run()` until a condition stops it.

    Args:
        algorithm: What is trained.
        tracker: Where params and metrics go; None is MLflow, or nothing where MLflow is not installed.
        eval_env: Where `eval()` plays. True, an instance or a factory: an environment of its own, in which whole
            episodes are played at any time. False or None: the training environment, under the rule of
            `horizons_per_env_reset`. `"auto"`: an own one for episodic tasks, made as the training's or a copy of it,
            the training environment for tasks that never end. Whole episodes are `eval/returns/*`; where an episodic
            task is played in the training environment, the sums over its horizons are `eval/horizon_returns/*`. An
            algorithm that trains without an environment is evaluated in one that is given.
        num_eval_envs: Copies, and so episodes, of an own evaluation environment that the trainer makes; None is the
            training's number, at most 128, but that of an instance that can only be copied.
        checkpoints: When and where the run is saved: a `Checkpoints`, a path, or True for the defaults; False never
            saves. None saves by the defaults where the tracker keeps the run on a disk, in a folder beside it.
        on_non_finite: What happens when observations, actions, rewards, losses, gradients or weights are not finite.
            `"stop"` ends the run as FAILED with a diagnosis. `"skip"` takes back the step's update, and `"rollback"`
            goes back to the weights of the last checkpoint; both then go on, in new episodes where what was gathered
            was not finite, and stop after ten such steps in a row.
        log_models: Whether a `run()` ends with the policy in the tracker as a model: the `last`, and where
            `checkpoints` go by a metric the `best`, each with the metrics of its step. See `log_model`.
        callbacks: Called with the trainer and each row of statistics, after it was tracked and before the conditions
            see it. One with an attribute `metric_names`, a list of names, may return values for them by name: they are
            tracked and join the row. What `trainer.eval()` measures in a callback joins the row too.

    Attributes:
        checkpoints: The manager of its checkpoints.
        evaluator: What `eval()` plays in; None where that is the training environment, or none.
        evaluations: Under what `eval()` plays, when, and how its metrics are called.
        tracker: Where params and metrics go.
        record: What its tracker and its checkpoints keep of the run beside rows and state.
        origin: How it came to go on from a checkpoint; None where it does not, or has done so in a `run()`.
        stop_reason: Why the last `run()` stopped.
        ending: Where that run is, what of it has not arrived there, and how to go on with it, in lines for a user.

    Raises:
        TypeError: If the algorithm is none, or another argument of another kind.
        ValueError: If an argument is not legal, or an environment to evaluate in does not fit.
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
        if not isinstance(algorithm, GenericAlgorithmBase):
            raise TypeError(
                f"a trainer needs an algorithm, such as PPOConfig().build(CartPole); got {algorithm!r:.200}."
            )
        # A look at the protocol's properties, as `isinstance` takes it, would look for the store.
        if tracker is not None and not callable(getattr(type(tracker), "log_metrics", None)):
            raise TypeError(f"`tracker` must keep runs, as MLflowTracker(...) does; got {tracker!r:.200}.")
        self.algorithm = algorithm
        begin(algorithm)
        algorithm.execution.plan(algorithm.seconds_per_step, math.inf)
        self.evaluator: EpisodeEvaluator | None = make_evaluator(algorithm, eval_env, num_eval_envs)
        self.evaluations = Evaluations(algorithm, self.evaluator, warns=eval_env == "auto")
        self.callbacks: tuple[Callback, ...] = ()
        check_callbacks(callbacks, self.metric_names)
        self.callbacks = tuple(callbacks)
        self.options: dict[str, Any] = {
            "eval_env": eval_env if eval_env is None or isinstance(eval_env, bool | str) else "given",
            "num_eval_envs": num_eval_envs,
            "on_non_finite": on_non_finite,
            "log_models": log_models,
        }
        if ranks().is_first:
            self.tracker = default_tracker() if tracker is None else tracker
            if log_models:
                check_models(algorithm.policy, self.tracker)
        else:
            self.tracker, checkpoints = NullTracker(), False
        eval_env_made = None if self.evaluator is None else self.evaluator.env
        self.record = Record(algorithm, self.tracker, checkpoints, self.options, eval_env_made)
        self.checkpoints = self.record.checkpoints
        best = None if self.checkpoints.options is None else self.checkpoints.options.best
        if best is not None and best not in self.metric_names:
            near = did_you_mean(best, self.metric_names)
            raise ValueError(f"Checkpoints: `best` must be a metric of this trainer; got {best!r}.{near}")
        self.origin: Origin | None = None
        self.stop_reason: str | None = None
        self.ending: list[str] = []
        self._guard = non_finite.Guard(on_non_finite)
        self._process = psutil.Process()
        self._saved_run: Mapping[str, Any] | None = None
        self._eval_row: dict[str, float] = {}
        self._row: dict[str, float] = {}
        self._judged_next: TrainStats | None = None
        self._evaluated: dict[str, float] = {}
        self._runs = self._asked_to_save = self._calls_back = False

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
        """Make a trainer that goes on where a run was saved; its next `run()` goes on with that run, to the same bits.

        Args:
            source: Path of a checkpoint, or of a run's folder of them; or the run's name or ID in MLflow.
            auto: Take the run's newest good checkpoint where the one that is meant is damaged.
            algorithm: Built as the saved one was; None builds it from what the checkpoint says, which needs an
                environment and a model that are attributes of modules.
            overrides: Hyperparameters to be different from now on; the tracked run records them.
            tracker: Where params and metrics go; None is where they went, which MLflow and `NullTracker` can be asked
                for again: any other tracker must be given.
            eval_env: Where `eval()` plays, see the class; `...` is as it was.
            callbacks: Called with the trainer and each row of statistics, see the class.
            checkpoints: When and where the run is saved, see the class; `...` is as before, in the same folder.
            trust: Whether the checkpoint is as trustworthy as your own code. It may then name modules to be imported,
                whose code runs, and a store that you have not named; without it only what is imported already, or
                rl8x's, torch's or Gymnasium's own, is taken from it.

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
        trainer.go_on_from(checkpoint, origin)
        return trainer

    def go_on_from(self, checkpoint: Checkpoint, origin: Origin) -> None:
        """Take over the state of a checkpoint, its folder and its tracked run; the next `run()` goes on with its run.

        Args:
            checkpoint: The checkpoint.
            origin: How it was found.

        Raises:
            CheckpointError: If it does not fit this trainer.
        """
        algorithm, state, metadata = self.algorithm, checkpoint.state, checkpoint.metadata
        self.origin = origin
        try:
            self._load_rank(state)
            self._saved_run = state["run"]
            self.checkpoints.go_on_from(checkpoint, origin.known)
        except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            reason = " ".join(described(error).split())
            raise CheckpointError(
                f"the checkpoint {checkpoint.path} does not fit this trainer: {reason:.300}"
            ) from error
        self.record.run_file = metadata.get("run_file")
        algorithm.seed = metadata["build"]["config"].get("seed", algorithm.seed)
        evaluated_under = None if self._saved_run is None else self._saved_run["options"]["eval_env_config"]
        if self._saved_run is not None:
            self.evaluations.env_config = evaluated_under
        if isinstance(self.tracker, MLflowTracker):
            self.tracker.resumed_spool = spool_of(checkpoint.path.parent, metadata)
        self.record.resume(
            handle_for(metadata["run"], self.tracker), origin.tags, state.get("results", {}), evaluated_under
        )

    def _load_rank(self, state: Mapping[str, Any]) -> None:
        """Take over what a checkpoint's state has of this rank; a rank that it does not have joins the first one's."""
        saved, others = {name: state[name] for name in ("trainer", "torch_generators")}, state.get(RANKS) or {}
        warn_of_other_number(num_ranks(state), self.algorithm)
        if ranks().rank < num_ranks(state):
            own = of_rank(saved, others, ranks().rank)
            if num_ranks(state) != ranks().size:  # evaluations have other shares: they begin anew
                own = {**own, "trainer": {**own["trainer"], "evaluator": None}}
            self.load_state_dict(own["trainer"])
            set_torch_generators(own["torch_generators"], self.algorithm.device)
            return
        self.algorithm.join(saved["trainer"]["algorithm"])
        self._load_rows(saved["trainer"])

    @property
    def state(self) -> TrainerState:
        """The running counters by metric name: collects, steps, updates, environment steps and episodes."""
        return self.algorithm.counters

    @property
    def known(self) -> dict[str, float]:
        """The numbers that an `env_config` may go by: metrics of the latest row and evaluation, and the counters."""
        return {**self._row, **self._eval_row, **self.state}

    @property
    def metric_names(self) -> frozenset[str]:
        """Every metric that a row of this trainer may have."""
        env, names = self.algorithm.env, {*keys.TRAINER_METRICS}
        if env is None:
            names -= _COLLECTED
        else:
            names |= {*keys.info_metrics(env.metric_names), *keys.parameter_metrics(env.parameters)}
        evaluated = {keys.EVAL_PREFIX + name for name in self.evaluations.measured}
        return frozenset(names | {*self.algorithm.metrics} | evaluated | self._declared)

    @property
    def _declared(self) -> set[str]:
        return {name for callback in self.callbacks for name in declared_metrics(callback)}

    def evaluation_name(self, name: str) -> str | None:
        """Name the metric of an evaluation that measures what another does in a training row.

        Args:
            name: The metric of a training row.

        Returns:
            The name; None where no evaluation measures that.
        """
        return self.evaluations.name_of(name)

    # -- one step, one evaluation

    def eval(
        self, *, env_config: Mapping[str, Any] | None = None, deterministic: bool = True, name: str | None = None
    ) -> EvalStats:
        """Evaluate the present policy and track the metrics under `eval/`.

        What `step()` has just returned takes the metrics in, as fresh: in a loop of one's own a condition that is then
        asked about that row counts this evaluation, and once.

        Args:
            env_config: Values for the environment's parameters in this evaluation; None are those under which the run
                evaluates, else the training's.
            deterministic: Whether the policy takes its most likely action rather than a sample.
            name: The metrics are `eval/<name>/...`. None: they are `eval/...`; where `env_config` is not the one under
                which the run evaluates, they are tracked under a name made of it, such as `eval/gravity 50/...`. What
                has a name never replaces the run's own evaluation.

        Raises:
            RuntimeError: If the training environment is used and is not at a reset, or there is no environment.
            ValueError: If `env_config` could not be applied, or MLflow does not take the name.
        """
        if name is not None:
            check_evaluation_name(name)
        tracked_name = self.evaluations.config_name(env_config) if name is None else name
        with Timer(self.algorithm.device) as timer:
            stats = self.evaluations.measure(env_config, deterministic=deterministic)
        spent = {"profiling/eval_ms": timer.elapsed_ms}
        own, tracked = (in_group(stats, group) for group in (name, tracked_name))
        if tracked_name is None:
            self._eval_row = own
            if self._judged_next is not None:
                self._judged_next.add(own)
        self.record.log(tracked | spent, trains=False)
        self._evaluated |= tracked | spent
        return EvalStats(own | spent)

    def play(
        self,
        path: str | Path | None = None,
        *,
        copies: int | None = None,
        env_config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Film:
        """Film the present policy, in an environment of its own; a notebook shows what is returned.

        Args:
            path: A file to write too, whose ending says the format; None makes a GIF.
            copies: Copies side by side; None are as many as a list in `env_config` has values, else one.
            env_config: Values for the environment's parameters; None are those under which the run evaluates.
            **options: `episodes`, `deterministic`, `seed`, `max_steps`, `fps`, `columns` and `captions`, as
                `rl8x.video.film` takes them.

        Raises:
            ValueError: If the environment has no pictures or cannot be made again, or an option is not legal.
        """
        lists = [len(value) for value in (env_config or {}).values() if isinstance(value, list | tuple)]
        copies = max(lists, default=1) if copies is None else copies
        suffix = ".gif" if path is None else Path(path).suffix
        env = self.make_film_env(copies)
        try:
            config = self.evaluations.runs_config() if env_config is None else env_config
            film = film_policy(self.algorithm, env, config, copies, suffix=suffix, **options)
        finally:
            env.close()
        if path is not None:
            film.save(path)
        return film

    def make_film_env(self, copies: int) -> Env:
        """Make an environment of its own to film in.

        Args:
            copies: Its copies.

        Raises:
            ValueError: If the environment has no pictures or cannot be made again.
        """
        return make_film_env(self.algorithm, None if self.evaluator is None else self.evaluator.env, copies)

    def plot(self, *metrics: str) -> Figure:
        """Draw what the run has logged so far; a notebook shows the figure.

        Args:
            metrics: A panel for each; none are the returns of training and evaluations.

        Returns:
            The figure.

        Raises:
            ValueError: If the tracker keeps no metrics, or has none of these so far.
        """
        return plot_run(self.tracker, metrics, sorted(self.metric_names), self.algorithm.clock)

    def save(self) -> Path | None:
        """Write a checkpoint now and wait until it is on the disk: for loops over `step()`; `run()` saves by itself.

        Within a `run()`, as in a callback, it is written after the step in progress, once the conditions have seen it.

        Returns:
            The checkpoint's folder; None where the trainer has no checkpoints or the disk refused, and in a `run()`.
        """
        if self._runs:
            self._asked_to_save = True
            return None
        self.record.open(trains=False)
        self.checkpoints.begin()
        self.record.save(self.state_dict(), None)
        return self.checkpoints.end()

    def log_model(self, name: str = LAST, *, register: str | None = None, alias: str | None = None) -> None:
        """Keep the present policy in the tracker as a model, with the latest metrics; of several ranks the first does.

        Args:
            name: What the model is called.
            register: A name in MLflow's model registry of which it becomes a version.
            alias: What that version is called: with `register="cartpole"` and `alias="champion"` the model is
                `models:/cartpole@champion` from then on.

        Raises:
            TypeError: If the policy has no form in a file, or the tracker keeps no models.
        """
        if not ranks().is_first:
            return
        check_models(self.algorithm.policy, self.tracker)
        self.record.open(trains=False)
        metrics = model_metrics({**self._row, **self._eval_row})
        step = self.algorithm.counters[self.algorithm.clock]
        about = {"name": name, "step": step, "metrics": metrics, "register": register, "alias": alias}
        log_policy(self.tracker, self.algorithm.policy, **about)

    def _log_models(self) -> None:
        """Log the last policy, and the best where checkpoints go by a metric; what cannot be is warned of."""
        path = self.checkpoints.best_path
        try:
            self.log_model(LAST)
            if path is not None:
                policy, about = policy_at(read(path), self.algorithm)
                log_policy(self.tracker, policy, name=BEST, **about)
        except (CheckpointError, OSError) as error:
            _log.warning("rl8x: not all policies are logged as models: %s", error)

    def evaluate_now(self) -> Mapping[str, float] | None:
        """Evaluate, track, and return the metrics, for a condition that wants to be confirmed; None out of turn."""
        return self.eval() if self.evaluations.is_their_turn else None

    # -- tracking

    def close(self) -> None:
        """End the tracked run of a loop over `step()`; `run()` does so itself."""
        self.record.close("FINISHED", self.stop_reason, self._eval_row)

    @property
    def params(self) -> dict[str, Any]:
        """The params of the run: hyperparameters, physics, run options, versions and the machine."""
        return self.record.params

    # -- saving

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next step depends on."""
        return {
            "algorithm": self.algorithm.state_dict(),
            "evaluator": None if self.evaluator is None else self.evaluator.state_dict(),
            "eval_row": dict(self._eval_row),
            "row": dict(self._row),
            "compiled_since": self.algorithm.execution.compiled_since,
            "non_finite_in_a_row": self._guard.in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken.

        Args:
            state: The state that it returned.
        """
        self.algorithm.load_state_dict(state["algorithm"])
        if self.evaluator is not None and state["evaluator"] is not None:
            self.evaluator.load_state_dict(state["evaluator"])
        self._load_rows(state)

    def _load_rows(self, state: Mapping[str, Any]) -> None:
        self._eval_row = dict(state["eval_row"])
        self._row = dict(state.get("row", {}))
        self.algorithm.execution.compiled_since = state.get("compiled_since")
        self._guard.in_a_row = state.get("non_finite_in_a_row", 0)
