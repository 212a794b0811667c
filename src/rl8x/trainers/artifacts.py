"""What a run keeps of its policy: films of it, and the last, the best or the current one as a model of its tracker."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rl8x import keys
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.checkpoint import Checkpoint
from rl8x.checkpoint.tree import CheckpointError
from rl8x.envs import Env, GymnasiumEnv
from rl8x.envs.env_config import inherited_config
from rl8x.policy import Policy
from rl8x.tracking import Tracker
from rl8x.video import Film, check_pictures, film, make_filmed

FILMS: Final = "films"
"""The folder of films among a run's artifacts."""
LAST: Final = "last"
BEST: Final = "best"
_GROUPS: Final = (keys.EVAL_PREFIX, "episodes/", "returns/")
_FILE: Final = "policy.safetensors"


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
    if isinstance(known.unwrapped, GymnasiumEnv) and known.render_mode is None:
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


def film_policy(
    algorithm: GenericAlgorithmBase[Any], env: Env, env_config: Mapping[str, Any], copies: int, **options: Any
) -> Film:
    """Film the current policy in what `make_film_env` made; moving parameters are drawn from their ranges in training.

    `options` are further ones of `rl8x.video.film`.
    """
    config = inherited_config(env_config, copies)
    if env.num_envs != copies:  # one that was copied may have more than are seen
        rows = [i % copies for i in range(env.num_envs)]
        config = {name: [v[i] for i in rows] if isinstance(v, list) else v for name, v in config.items()}
    training = None if algorithm.env is None else algorithm.env.parameter_state
    env.parameter_state.configure_for_evaluation(config, training)
    reset_every = algorithm.state_reset_every
    return film(algorithm.policy, env, shown=copies, state_reset_every=reset_every, **options)


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
