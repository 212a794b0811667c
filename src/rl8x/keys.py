"""Names that every part shares: the keys of a rollout, the counters, and the metrics.

Time, in one place. Slot t of a rollout holds what was known before acting and what acting led to:

    obs_t, starts_t (obs_t begins an episode), the policy's state before acting
    action_t, logp_t, value_t
    reward_t, terminated_t, truncated_t, final_obs_t (the observation before any reset)

Slot `horizon` holds the next observation, the next starts and the next policy state. Everything is stored time-major,
`[horizon + 1, num_envs, ...]`; scalars have no trailing 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

OBS: Final = "obs"
STARTS: Final = "starts"
ACTIONS: Final = "actions"
LOGP: Final = "logp"
VALUES: Final = "values"
REWARDS: Final = "rewards"
TERMINATED: Final = "terminated"
TRUNCATED: Final = "truncated"
FINAL_OBS: Final = "final_obs"
FINAL_VALUES: Final = "final_values"
ADVANTAGES: Final = "advantages"
RETURNS: Final = "returns"
STATES: Final = "states"
EPISODE_RETURNS: Final = "episode_returns"
EPISODE_LENGTHS: Final = "episode_lengths"
VALID: Final = "valid"

COLLECTS: Final = "algorithm/collects"
STEPS: Final = "algorithm/steps"
UPDATES: Final = "algorithm/updates"
ENV_STEPS: Final = "env/steps"
ENV_EPISODES: Final = "env/episodes"
COUNTERS: Final = (COLLECTS, STEPS, UPDATES, ENV_STEPS, ENV_EPISODES)

EPISODES_ENDED: Final = "episodes/ended"
METRICS: Final = "metrics"
ACTION_MASK: Final = "action_mask"
"""The part of a `Dict` observation that says which actions are legal."""

EVAL_PREFIX: Final = "eval/"
INFO_PREFIX: Final = "episodes/info/"
BEST_PREFIX: Final = "best/"


def summary(group: str) -> tuple[str, ...]:
    """Name the four figures that summarise a quantity, for example `returns/mean`."""
    return tuple(f"{group}/{figure}" for figure in ("min", "max", "mean", "std"))


def info_metrics(names: Iterable[str]) -> tuple[str, ...]:
    """Name the means over episodes of figures that an environment tells, for example `episodes/info/success/mean`."""
    return tuple(f"{INFO_PREFIX}{name}/mean" for name in names)


COLLECT_METRICS: Final = (
    *summary("returns"),
    *summary("rewards"),
    *summary("episodes/returns"),
    *summary("episodes/lengths"),
    EPISODES_ENDED,
)
PROFILING_METRICS: Final = (
    "profiling/collect_ms",
    "profiling/step_ms",
    "profiling/eval_ms",
    "profiling/tracking_ms",
    "profiling/env_steps_per_s",
)
MEMORY_METRICS: Final = ("memory/process_mb", "memory/device_mb")
TRAINER_METRICS: Final = (*COUNTERS, *COLLECT_METRICS, *PROFILING_METRICS, *MEMORY_METRICS)
