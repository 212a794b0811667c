"""Artifacts of a trainer's policy: films, grids, figures of its curves, and models in the tracker."""

from __future__ import annotations

import copy
import math
import tempfile
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rl8x import keys
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.checkpoint import Checkpoint, CheckpointError, read
from rl8x.checkpoint.manager import CheckpointManager
from rl8x.conditions.base import nearest_metrics
from rl8x.distributed import ranks
from rl8x.drawing import LIGHT, draw_panels, finite_curve
from rl8x.envs import Env
from rl8x.envs.parameters import inherited_config, parsed
from rl8x.output import described
from rl8x.policy import Policy
from rl8x.randomization.distributions import PerCopy
from rl8x.tracking import MemoryTracker, MLflowTracker, Tracker, TrackingError
from rl8x.tracking.runs import RunReader
from rl8x.tracking.secrets import logger
from rl8x.trainers.evaluation import Evaluations, check_evaluation_name
from rl8x.trainers.grid import RETURNS, grid_name, log_grid, measure_grid
from rl8x.trainers.record import Record
from rl8x.trainers.train_step import TrainStep
from rl8x.video import Film, check_pictures, film, make_filmed

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

_log = logger(__name__)
FILMS: Final = "films"
"""The folder of films among a run's artifacts."""
LAST: Final = "last"
BEST: Final = "best"
_GROUPS: Final = (keys.EVAL_PREFIX, "episodes/", "returns/")
_FILE: Final = "policy.safetensors"
# Default curves of `plot`, by label; the first of these groups for which the run has a metric.
_CURVES: Final[tuple[dict[str, str], ...]] = (
    {
        "episodes of the training": "episodes/returns/mean",
        "evaluations": "eval/returns/mean",
        "horizons in evaluations": "eval/horizon_returns/mean",
    },
    {"horizons of the training": "returns/mean"},
)
_PANELS_IN_A_ROW: Final = 3


# -- models


def check_models(policy: Policy, tracker: Tracker) -> None:
    """Raise `TypeError` if the policy cannot be saved, or the tracker keeps no models."""
    if not hasattr(tracker, "log_model"):
        raise TypeError(f"log_models: {type(tracker).__name__} keeps no models; it has no method `log_model`.")
    policy.to_bytes()


def log_policy(tracker: Tracker, policy: Policy, **about: Any) -> None:
    """Log a policy as a model; `about` are further arguments of `MLflowTracker.log_model`."""
    from rl8x.tracking.artifacts import describe_model

    policy = copy.deepcopy(policy).cpu()
    with tempfile.TemporaryDirectory() as folder:
        path = policy.save(Path(folder) / _FILE)
        tracker.log_model(path, describe_model(policy), **about)  # type: ignore[attr-defined]


def stored_run(checkpoint: Checkpoint, tracking_uri: str | None) -> tuple[RunReader, str]:
    """Find a checkpoint's run, which may have ended, in the MLflow store; return a reader of the store and its ID."""
    run, reader = checkpoint.metadata["run"], RunReader(tracking_uri)
    record = reader.run_of_journal(str(run["handle"])) if run["id"] is None else reader.run(run["id"])
    if record is None:
        raise TrackingError(f"MLflow does not have the run of {checkpoint.path}: `rl8x sync` sends what it lacks")
    return reader, record.id


def log_to_run(checkpoint: Checkpoint, policy: Policy, stored: tuple[RunReader, str], **about: Any) -> str:
    """Log a checkpoint's policy as a model of its run, `stored` as `stored_run` returns it; return the model's ID."""
    from rl8x.tracking.artifacts import describe_model, model_about

    run, (reader, run_id) = checkpoint.metadata["run"], stored
    about |= {"key": f"{run['key']}/{checkpoint.path.name}/{about['name']}", **about_policy(checkpoint)}
    with tempfile.TemporaryDirectory() as folder:
        path = policy.save(Path(folder) / _FILE)
        described = model_about(describe_model(policy), **about)
        with reader.store() as store:
            return store.log_model(run_id, path, described)


def about_policy(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the step and the metrics of the policy in a checkpoint, as arguments of `log_policy`."""
    best, counters = checkpoint.state["best"], checkpoint.metadata["counters"]
    metrics = model_metrics(checkpoint.state["trainer"], counters, None if best is None else best["metric"])
    return {"step": counters[checkpoint.metadata["resolved"]["clock"]], "metrics": metrics}


def model_metrics(latest: Mapping[str, Any], counters: Mapping[str, int], best: str | None = None) -> dict[str, float]:
    """Return the finite mean returns and episode metrics in a `TrainStep`'s state, and the metric `best`."""
    # An evaluation before the last step measured another policy.
    evaluation, is_of_this = latest["eval_row"], latest["evaluated_at"] == counters[keys.STEPS]
    own = {name: value for name, value in latest["row"].items() if name not in evaluation}
    row = {**own, **evaluation} if is_of_this else own
    return {
        name: value
        for name, value in row.items()
        if math.isfinite(value) and (name == best or (name.startswith(_GROUPS) and name.endswith("/mean")))
    }


# -- methods of a trainer


def _histories(tracker: Tracker, names: Sequence[str]) -> Mapping[str, Any]:
    """Return the steps and values of each metric in `names` that the tracker's run has."""
    if isinstance(tracker, MemoryTracker):
        rows = {name: tracker.history(name) for name in names}
        return {name: tuple(zip(*points, strict=True)) for name, points in rows.items() if points}
    if not isinstance(tracker, MLflowTracker):
        raise ValueError(
            f"there is nothing to draw: a {type(tracker).__name__} keeps no metrics to read back. Track the run in "
            "MLflow, or give the trainer a MemoryTracker."
        )
    tracker.flush()
    run_id = tracker.run_id
    if run_id is None:
        raise ValueError(f"there is nothing to draw: {tracker.location} has no such run yet.")
    reader = RunReader(tracker.tracking_uri)
    histories = reader.histories([reader.run(run_id)], names)
    return {name: runs[run_id] for name, runs in histories.items() if run_id in runs}


class Shows:
    """Mixin of a trainer's methods that film, plot, log and evaluate its policy on grids."""

    algorithm: GenericAlgorithmBase[Any]
    tracker: Tracker
    checkpoints: CheckpointManager
    evaluations: Evaluations
    record: Record
    train_step: TrainStep

    @property
    @abstractmethod
    def metric_names(self) -> frozenset[str]:
        """Every metric that a row of this trainer may have."""

    def play(
        self,
        path: str | Path | None = None,
        *,
        copies: int | None = None,
        env_config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Film:
        """Film the current policy in a separate environment; notebooks display the returned film.

        Args:
            path: A file to write the film to, in the format of its suffix; None makes a GIF in memory.
            copies: Copies shown side by side; None takes the length of a list in `env_config`, else one.
            env_config: Values for the environment's parameters; None takes those of the run's evaluations.
            **options: `episodes`, `deterministic`, `seed`, `max_steps`, `fps`, `columns` and `captions` of
                `rl8x.video.film`.

        Raises:
            ValueError: If the environment cannot be rendered or made again, or an option is not legal.
        """
        given = None if env_config is None else parsed(env_config)
        lists = [len(value.values) for value in (given or {}).values() if isinstance(value, PerCopy)]
        copies = max(lists, default=1) if copies is None else copies
        algorithm, env = self.algorithm, self._film_env(copies)
        try:
            config = inherited_config(self.evaluations.runs_config() if given is None else given, copies)
            if env.num_copies != copies:  # a twin may have more copies than the film shows
                rows = [i % copies for i in range(env.num_copies)]
                for name, value in config.items():
                    if isinstance(value, PerCopy):
                        config[name] = PerCopy(tuple(value.values[i] for i in rows))
            # Moving parameters are drawn from the training's ranges.
            training = None if algorithm.env is None else algorithm.env.parameter_state
            env.parameter_state.configure_for_evaluation(config, training)
            suffix = ".gif" if path is None else Path(path).suffix
            made = film(algorithm.policy, env, shown=copies, suffix=suffix, **options)
        finally:
            env.close()
        if path is not None:
            made.save(path)
        return made

    def _film_env(self, copies: int) -> Env:
        """Make an environment to film in with the factory, else a twin, which may have more copies than asked for."""
        algorithm = self.algorithm
        if algorithm.env_factory is not None:
            return make_filmed(algorithm.env_factory, copies, device=algorithm.device, seed=algorithm.seed)
        known = self.evaluations.env_in_use
        if known is None:
            raise ValueError("there is nothing to film: the algorithm trains without an environment. Give an eval_env.")
        twin = None
        if getattr(known.unwrapped, "takes_render_mode", False) and known.render_mode is None:
            again: Any = known  # a simulator, made again with rendering
            twin = again.another(copies, seed=algorithm.seed, render_mode="rgb_array")
        if twin is None:
            check_pictures(known)
            twin = known.another(seed=algorithm.seed)
        if twin is None:
            raise ValueError(
                f"{type(known.unwrapped).__name__} can neither be copied nor made again, to film in. Build the "
                "algorithm from a class or a factory."
            )
        return twin

    def _log_film(self) -> None:
        """Log a film as an artifact, named after the step."""
        made = self.play()
        with tempfile.TemporaryDirectory() as folder:
            path = made.save(Path(folder) / f"step-{self.algorithm.counters[keys.STEPS]:08d}{made.suffix}")
            self.tracker.log_artifact(path, FILMS)

    def evaluate_grid(
        self, grid: Mapping[str, Any], *, episodes: int = 10, name: str | None = None, seed: int = 0
    ) -> pandas.DataFrame:
        """Evaluate the current policy in every cell of a grid of physics, all cells in one batch.

        The run gets three metrics: the mean over the cells, the worst cell and the best (`grid/<name>/mean`,
        `worst_cell`, `best_cell`). It also gets one artifact, `grids/<name>/step-...`, with the table and its figure.

        Args:
            grid: Values of the environment's parameters, whose combinations are the cells: numbers, lists or arrays of
                numbers, `{"linspace": [low, high, count]}` or `{"geomspace": ...}`. Others have their defaults.
            episodes: Episodes in each cell. The policy takes its most likely actions.
            name: What the grid is called in the run; None takes its parameters' names.
            seed: Seed of the episodes' random numbers; with the same seed every policy meets the same episodes.

        Returns:
            A row for each cell: its parameters, `episodes`, `returns` (mean), `returns_std`, `returns_min` and
            `lengths` (mean). `rl8x.trainers.plot_grid` draws it.

        Raises:
            RuntimeError: If there is no environment to evaluate in.
            ValueError: If the environment has no such parameter or value, its episodes never end, or it cannot be made
                again; or an option is not legal.
        """
        if name is not None:
            check_evaluation_name(name)
        frame = measure_grid(self.algorithm, self.evaluations, grid, episodes, seed)
        returns, name = frame[RETURNS], name or grid_name(frame)
        values = {"mean": returns.mean(), "worst_cell": returns.min(), "best_cell": returns.max()}
        metrics = {f"grid/{name}/{key}": float(value) for key, value in values.items()}
        self.train_step.take_evaluation(metrics, metrics, is_of_run=False)
        if ranks().is_first:
            log_grid(self.tracker, frame, name, self.algorithm.counters[keys.STEPS])
        return frame

    def plot(self, *metrics: str) -> Figure:
        """Plot what the run has logged so far; notebooks display the figure.

        Args:
            metrics: One panel each; by default the returns of training and of evaluations.

        Returns:
            The figure.

        Raises:
            ValueError: If the tracker keeps no metrics, or none of these was logged so far.
        """
        named = [{name: name} for name in metrics]
        wanted = [name for group in named or _CURVES for name in group.values()]
        found = _histories(self.tracker, wanted)
        histories = {name: points for name, points in found.items() if np.isfinite(points[1]).any()}
        for name in metrics:
            if name not in histories:
                known = self.metric_names
                hint = " It has no value yet." if name in known else nearest_metrics(name, known)
                raise ValueError(f"this run has no metric {name!r}.{hint}")
        panels = named or [group for group in _CURVES if histories.keys() & set(group.values())][:1]
        if not panels:
            raise ValueError("this run has logged no returns yet: draw it once it has made some steps.")
        curves = [
            {label: finite_curve(*histories[name]) for label, name in group.items() if name in histories}
            for group in panels
        ]
        words = "transitions of training" if self.algorithm.clock == keys.ENV_STEPS else "updates"
        return draw_panels(curves, [*metrics] or ["mean return"], words, LIGHT, width=_PANELS_IN_A_ROW)

    def log_model(self, name: str = LAST, *, register: str | None = None, alias: str | None = None) -> None:
        """Log the current policy as a model, with the metrics of its step; with several ranks, rank 0 does.

        Args:
            name: The model's name, without `/ : . % " '`.
            register: A name in MLflow's model registry; the model becomes its next version.
            alias: The version's alias: with `register="cartpole"` and `alias="champion"` the model is then
                `models:/cartpole@champion`.

        Raises:
            TypeError: If the policy cannot be written to a file, or the tracker keeps no models.
            ValueError: If MLflow would refuse one of the names.
        """
        if not ranks().is_first:
            return
        algorithm = self.algorithm
        check_models(algorithm.policy, self.tracker)
        self.record.open(trains=False)
        metrics = model_metrics(self.train_step.state_dict(), algorithm.counters)
        about = {"step": algorithm.counters[algorithm.clock], "metrics": metrics}
        log_policy(self.tracker, algorithm.policy, name=name, register=register, alias=alias, **about)

    def _log_models(self) -> None:
        """Log the last policy, and the best if there is a `best_metric`; warn if one cannot be logged."""
        path = self.checkpoints.best_path
        try:
            self.log_model(LAST)
            if path is not None:
                best, policy = read(path), copy.deepcopy(self.algorithm.policy)
                policy.load_state_dict(best.state["trainer"]["algorithm"]["policy"])
                log_policy(self.tracker, policy, name=BEST, **about_policy(best))
        except (CheckpointError, OSError, KeyError) as error:  # a user's algorithm may store its policy elsewhere
            _log.warning("rl8x: not all policies are logged as models: %s", described(error))
