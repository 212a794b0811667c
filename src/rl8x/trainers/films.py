"""Films of a trainer's policy, in an environment that is not used for training."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl8x import keys
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.envs import Env, GymnasiumEnv
from rl8x.envs.env_config import inherited_config
from rl8x.tracking import Tracker
from rl8x.video import Film, check_pictures, film, make_filmed

FOLDER = "films"
"""The folder of films among a run's artifacts."""


def make_film_env(algorithm: GenericAlgorithmBase[Any], evaluated: Env | None, copies: int) -> Env:
    """Make an environment to film in by the training's factory, or by copying that of evaluations or training.

    A simulator of Gymnasium's is made again so that it renders, where it does not.

    Args:
        algorithm: The algorithm that is trained.
        evaluated: The evaluation environment, or None.
        copies: Copies to make with a factory; a copied environment has as many as its original.

    Raises:
        ValueError: If none can be made, or it cannot be rendered.
    """
    if algorithm.env_factory is not None:
        return make_filmed(algorithm.env_factory, copies, device=algorithm.device, seed=algorithm.seed)
    known = algorithm.env if evaluated is None else evaluated
    if known is None:
        raise ValueError("there is nothing to film: the algorithm trains without an environment. Give an `eval_env`.")
    twin = None
    if isinstance(known, GymnasiumEnv) and known.render_mode is None:
        twin = known.another(copies, seed=algorithm.seed, render_mode="rgb_array")
    if twin is None:
        check_pictures(known)
        twin = known.another(seed=algorithm.seed)
    if twin is None:
        raise ValueError(
            f"{type(known).__name__} can neither be copied nor made again, to film in. Build the algorithm from a "
            "class or a factory."
        )
    return twin


def film_policy(
    algorithm: GenericAlgorithmBase[Any], env: Env, env_config: Mapping[str, Any], copies: int, **options: Any
) -> Film:
    """Film the current policy.

    Args:
        algorithm: The algorithm that is trained.
        env: An environment that `make_film_env` made.
        env_config: Values for the environment's parameters, in any form that a reset takes; moving parameters are drawn
            from their current ranges in training.
        copies: Copies that are shown.
        **options: Further options of `rl8x.video.film`.
    """
    config = inherited_config(env_config, copies)
    if env.num_envs != copies:  # one that was copied may have more than are seen
        rows = [i % copies for i in range(env.num_envs)]
        config = {name: [v[i] for i in rows] if isinstance(v, list) else v for name, v in config.items()}
    env.configure_for_evaluation(config, algorithm.env)
    reset_every = algorithm.state_reset_every
    return film(algorithm.policy, env, shown=copies, state_reset_every=reset_every, **options)


def log_film(tracker: Tracker, film: Film, counters: Mapping[str, int]) -> None:
    """Keep a film as an artifact, named after the step of the trainer."""
    with tempfile.TemporaryDirectory() as folder:
        path = film.save(Path(folder) / f"step-{counters[keys.STEPS]:08d}{film.suffix}")
        tracker.log_artifact(path, FOLDER)
