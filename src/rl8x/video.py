"""Watching a policy: one copy of an environment, rendered frame by frame into a video file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from rl8x.envs.base import Env
from rl8x.execution import Execution
from rl8x.policy import Policy
from rl8x.rollouts.collector import Collector

# Built-in environments, and Gymnasium's of the same task, observations and actions
_TWINS: Final = {
    "CartPole": "CartPole-v1",
    "Pendulum": "Pendulum-v1",
    "MountainCar": "MountainCar-v0",
    "MountainCarContinuous": "MountainCarContinuous-v0",
    "Acrobot": "Acrobot-v1",
}


def record_video(
    policy: Policy,
    env: Env,
    path: str | Path,
    *,
    max_steps: int = 1000,
    fps: float | None = None,
    deterministic: bool = True,
    seed: int = 0,
) -> int:
    """Play an episode and write what `env.render()` shows of the first copy.

    Args:
        policy: The policy that acts.
        env: An environment made with `render_mode="rgb_array"`, such as
            `GymnasiumEnv("CartPole-v1", 1, render_mode="rgb_array")`. It is reset.
        path: The file; its ending says the format: `.mp4`, or `.gif` where there is no ffmpeg.
        max_steps: Where to stop when the episode does not end.
        fps: Frames a second; None is the environment's own, else 30.
        deterministic: Whether the policy takes its most likely action rather than a sample.
        seed: Seeds the environment and the samples.

    Returns:
        How many frames were written.

    Raises:
        RuntimeError: If imageio is not installed.
        ValueError: If the environment renders no frames.
    """
    try:
        import imageio.v2 as imageio
    except ImportError as error:
        raise RuntimeError("Writing a video needs imageio. Install it with: pip install 'rl8x[video]'") from error
    rate = fps or env.metadata.get("render_fps") or 30
    options: dict[str, Any] = {"duration": 1000 / rate, "loop": 0} if Path(path).suffix == ".gif" else {"fps": rate}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with imageio.get_writer(path, **options) as writer:
        for frame in frames(policy, env, max_steps=max_steps, deterministic=deterministic, seed=seed):
            writer.append_data(frame)
            count += 1
    return count


def frames(
    policy: Policy, env: Env, *, max_steps: int = 1000, deterministic: bool = True, seed: int = 0
) -> Iterator[np.ndarray]:
    """Play an episode and yield what is seen of the first copy before each action, `[height, width, 3]`, uint8.

    The frame after the last action is not among them, because the copy has begun the next episode by then.

    Args:
        policy: The policy that acts.
        env: An environment made with `render_mode="rgb_array"`. It is reset.
        max_steps: Where to stop when the episode does not end.
        deterministic: Whether the policy takes its most likely action rather than a sample.
        seed: Seeds the environment and the samples.

    Raises:
        ValueError: If the environment renders no frames.
    """
    generator = torch.Generator(policy.device).manual_seed(seed)
    collector = Collector(env, policy, generator, Execution("eager", "fp32", policy.device))
    collector.reset(seed=seed)
    yield _frame(env)
    for after in itertools.islice(collector.play(deterministic=deterministic, noise_steps=1), max_steps - 1):
        if bool(after.step.terminated[0] | after.step.truncated[0]):
            return
        yield _frame(env)


def _frame(env: Env) -> np.ndarray:
    """Return the picture of the first copy."""
    if type(env).render is Env.render:
        raise ValueError(_draws_nothing(type(env).__name__))
    rendered: Any = env.render() if env.render_mode is not None else None
    if isinstance(rendered, tuple | list):
        rendered = rendered[0]
    frame = rendered.cpu().numpy() if isinstance(rendered, torch.Tensor) else np.asarray(rendered)
    frame = frame[0] if frame.ndim == 4 else frame
    if frame.ndim != 3:
        raise ValueError(
            f"{type(env).__name__} renders no frames; got {rendered!r:.60}. Make it with render_mode='rgb_array'."
        )
    return frame


def _draws_nothing(name: str) -> str:
    """Say what is possible where an environment has no pictures: Gymnasium's of the same task takes the same policy."""
    instead = "give it a `render` that returns a picture of each copy, and a `render_mode`"
    if name in _TWINS:
        made = f'GymnasiumEnv("{_TWINS[name]}", 1, render_mode="rgb_array")'
        instead = f"built-in environments draw nothing. Record the policy in the same task, {made}"
    return f"{name} cannot be rendered: {instead}."
