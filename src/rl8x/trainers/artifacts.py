"""What a run shows of its policy: films, models of its tracker (the last, the best, the current one), its curves."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rl8x import keys
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.checkpoint import Checkpoint, CheckpointError
from rl8x.drawing import LIGHT, Curve, draw_panels
from rl8x.envs import Env
from rl8x.envs.env_config import inherited_config
from rl8x.names import did_you_mean
from rl8x.policy import Policy
from rl8x.tracking import MemoryTracker, MLflowTracker, Tracker
from rl8x.tracking.reading import RunReader
from rl8x.video import Film, check_pictures, film, make_filmed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILMS: Final = "films"
"""The folder of films among a run's artifacts."""
LAST: Final = "last"
BEST: Final = "best"
_GROUPS: Final = (keys.EVAL_PREFIX, "episodes/", "returns/")
_FILE: Final = "policy.safetensors"
# What one panel shows of returns, where nothing is named; the first line of which a run has any.
_RETURNS: Final[tuple[dict[str, str], ...]] = (
    {
        "episodes of the training": "episodes/returns/mean",
        "evaluations": "eval/returns/mean",
        "horizons in evaluations": "eval/horizon_returns/mean",
    },
    {"horizons of the training": "returns/mean"},
)
_PANELS_IN_A_ROW: Final = 3


# -- films


def make_film_env(algorithm: GenericAlgorithmBase[Any], evaluated: Env | None, copies: int) -> Env:
    """Make an environment to film in by the training's factory, or by copying that of evaluations or training.

    A simulator of Gymnasium's is made again so that it renders, where it does not. A copied environment has as many
    copies as its original.
    """
    if algorithm.env_factory is not None:
        return make_filmed(algorithm.env_factory, copies, device=algorithm.device, seed=algorithm.seed)
    known = algorithm.env if evaluated is None else evaluated
    if known is None:
        raise ValueError("there is nothing to film: the algorithm trains without an environment. Give an `eval_env`.")
    twin = None
    if getattr(known.unwrapped, "takes_render_mode", False) and known.render_mode is None:
        again: Any = known
        twin = again.another(copies, seed=algorithm.seed, render_mode="rgb_array")
    if twin is None:
        check_pictures(known)
        twin = known.another(seed=algorithm.seed)
    if twin is None:
        raise ValueError(
            f"{type(known.unwrapped).__name__} can neither be copied nor made again, to film in. Build the algorithm "
            "from a class or a factory."
        )
    return twin


def play(
    algorithm: GenericAlgorithmBase[Any],
    env: Env,
    path: str | Path | None,
    env_config: Mapping[str, Any],
    copies: int,
    **options: Any,
) -> Film:
    """Film the current policy in what `make_film_env` made; moving parameters are drawn from the training's ranges."""
    try:
        config = inherited_config(env_config, copies)
        if env.num_copies != copies:  # one that was copied may have more than are seen
            rows = [i % copies for i in range(env.num_copies)]
            config = {name: tuple(v[i] for i in rows) if isinstance(v, tuple) else v for name, v in config.items()}
        training = None if algorithm.env is None else algorithm.env.parameter_state
        env.parameter_state.configure_for_evaluation(config, training)
        suffix, reset_every = ".gif" if path is None else Path(path).suffix, algorithm.state_reset_every
        made = film(algorithm.policy, env, shown=copies, state_reset_every=reset_every, suffix=suffix, **options)
    finally:
        env.close()
    if path is not None:
        made.save(path)
    return made


def log_film(tracker: Tracker, film: Film, counters: Mapping[str, int]) -> None:
    """Keep a film as an artifact, named after the step of the trainer."""
    with tempfile.TemporaryDirectory() as folder:
        path = film.save(Path(folder) / f"step-{counters[keys.STEPS]:08d}{film.suffix}")
        tracker.log_artifact(path, FILMS)


# -- models


def check_models(policy: Policy, tracker: Tracker) -> None:
    """Raise `TypeError` if the policy cannot be saved, or the tracker keeps no models."""
    if not hasattr(tracker, "log_model"):
        raise TypeError(f"log_models: {type(tracker).__name__} keeps no models; it has no method `log_model`.")
    policy.to_bytes()


def log_policy(tracker: Tracker, policy: Policy, **about: Any) -> None:
    """Log a policy as a model; `about` are further arguments of `MLflowTracker.log_model`."""
    from rl8x.tracking.policy_model import describe_model

    policy = copy.deepcopy(policy).cpu()
    with tempfile.TemporaryDirectory() as folder:
        path = policy.save(Path(folder) / _FILE)
        tracker.log_model(path, describe_model(policy), **about)  # type: ignore[attr-defined]


def policy_at(checkpoint: Checkpoint, policy: Policy) -> Policy:
    """Return a copy of a run's policy as a checkpoint of the run has it, where built-in algorithms keep it."""
    policy = copy.deepcopy(policy)
    try:
        policy.load_state_dict(checkpoint.state["trainer"]["algorithm"]["policy"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{checkpoint.path} does not have the policy under `policy` ({error!r:.100})") from None
    return policy


def about_policy(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return step and metrics of the policy in a checkpoint, as arguments of `log_policy`."""
    saved, best, metadata = checkpoint.state["trainer"], checkpoint.state["best"], checkpoint.metadata
    # A condition may have evaluated after the row was made.
    metrics = model_metrics({**saved["row"], **saved["eval_row"]}, None if best is None else best["metric"])
    return {"step": metadata["counters"][metadata["resolved"]["clock"]], "metrics": metrics}


def model_metrics(row: Mapping[str, float], best: str | None = None) -> dict[str, float]:
    """Return the metrics of a row that say how good a policy is: mean returns, those of evaluations, and `best`."""
    return {
        name: value
        for name, value in row.items()
        if math.isfinite(value) and (name == best or (name.startswith(_GROUPS) and name.endswith("/mean")))
    }


# -- learning curves


def plot_run(tracker: Tracker, metrics: Sequence[str], known: Sequence[str], clock: str) -> Figure:
    """Draw learning curves.

    Args:
        tracker: What has the run.
        metrics: One panel each; none are the returns, of the training and of evaluations in one panel.
        known: Every metric that a row may have.
        clock: The counter that metrics are plotted against.
    """
    named = [{name: name} for name in metrics]
    wanted = [name for group in named or _RETURNS for name in group.values()]
    histories = {name: points for name, points in _histories(tracker, wanted).items() if np.isfinite(points[1]).any()}
    for name in metrics:
        if name not in histories:
            hint = did_you_mean(name, known) if name not in known else " It has no value yet."
            raise ValueError(f"this run has no metric {name!r}.{hint}")
    panels = named or [group for group in _RETURNS if histories.keys() & set(group.values())][:1]
    if not panels:
        raise ValueError("this run has logged no returns yet: draw it once it has made some steps.")
    curves = [
        {label: finite_curve(*histories[name]) for label, name in group.items() if name in histories}
        for group in panels
    ]
    words = "transitions of training" if clock == keys.ENV_STEPS else "updates"
    return draw_panels(curves, [*metrics] or ["mean return"], words, LIGHT, width=_PANELS_IN_A_ROW)


def finite_curve(steps: Any, values: Any) -> Curve:
    """Return the finite points of a line, without a band."""
    steps, values = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    finite = np.isfinite(values)
    nothing = np.full(int(finite.sum()), np.nan)
    return Curve(steps[finite], values[finite], nothing, nothing)


def _histories(tracker: Tracker, names: Sequence[str]) -> Mapping[str, Any]:
    """Return steps and values of the metrics that a tracker's run has, by name."""
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
    histories = RunReader(tracker.tracking_uri).histories([run_id], names)
    return {name: runs[run_id] for name, runs in histories.items() if run_id in runs}
