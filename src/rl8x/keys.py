"""Names that every part shares: the keys of a rollout, the counters, and the metrics.

Slot t of a rollout holds what was known before acting and what acting led to. Everything is time-major,
`[horizon + 1, num_envs, ...]`; scalars have no trailing 1:

    obs, starts (the observation begins an episode), the policy's state
    actions, rewards, terminated, truncated, episode_returns, episode_lengths, valid, ended, metrics/*, sources/*
    for a replay: next_obs (that of the next slot; before the reset where an episode ended)
    learned from at once: values, PPO's logp, final_values (of the observation before the reset, where a time limit
    truncated)

Slot `horizon` holds the next `obs`, `starts` and `values`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Final

OBS: Final = "obs"
NEXT_OBS: Final = "next_obs"
STARTS: Final = "starts"
ACTIONS: Final = "actions"
NEXT_ACTIONS: Final = "next_actions"
"""In rows of a data set, for algorithms that need it: the recorded action on `next_obs`."""
LOGP: Final = "logp"
PARAMS: Final = "params"
"""The parameters of the distributions that acted, by number."""
VALUES: Final = "values"
REWARDS: Final = "rewards"
TERMINATED: Final = "terminated"
TRUNCATED: Final = "truncated"
FINAL_PREFIX: Final = "final_"
"""Prefix of keys for tensors from before a reset, such as `final_values`."""
FINAL_OBS: Final = "final_obs"
FINAL_VALUES: Final = "final_values"
ADVANTAGES: Final = "advantages"
RETURNS: Final = "returns"
DISCOUNTS: Final = "discounts"
"""Factor of the value of `next_obs` in a target: 0 after a termination."""
EPISODE_RETURNS: Final = "episode_returns"
EPISODE_LENGTHS: Final = "episode_lengths"
VALID: Final = "valid"
ENDED: Final = "ended"
"""Where a copy's episode ends, if its agents end and appear individually; see `envs.Step`."""

COLLECTS: Final = "algorithm/collects"
STEPS: Final = "algorithm/steps"
UPDATES: Final = "algorithm/updates"
ENV_STEPS: Final = "env/steps"
COPY_STEPS: Final = "env/copy_steps"
"""Steps of copies, in environments with several agents, where `env/steps` counts steps of agents."""
ENV_EPISODES: Final = "env/episodes"
COUNTERS: Final = (COLLECTS, STEPS, UPDATES, ENV_STEPS, ENV_EPISODES)

EPISODES_ENDED: Final = "episodes/ended"
METRICS: Final = "metrics"
SOURCES: Final = "sources"
"""Extra results of drawing an episode's parameters; see `envs.Step`."""
ACTION_MASK: Final = "action_mask"
"""The part of a `Dict` observation that says which actions are legal."""

EVAL_PREFIX: Final = "eval/"
INFO_PREFIX: Final = "episodes/info/"
AGENTS_PREFIX: Final = "episodes/agents/"


@functools.cache
def summary(group: str) -> tuple[str, ...]:
    """Name the four statistics that summarise a quantity, for example `returns/mean`."""
    return tuple(f"{group}/{statistic}" for statistic in ("min", "max", "mean", "std"))


def info_metrics(names: Iterable[str]) -> tuple[str, ...]:
    """Name the means over episodes of an environment's own metrics, for example `episodes/info/success/mean`."""
    return tuple(f"{INFO_PREFIX}{name}/mean" for name in names)


def agent_metrics(names: Iterable[str]) -> tuple[str, ...]:
    """Name the mean return of each agent of a copy, for example `episodes/agents/agent_0/returns/mean`."""
    return tuple(f"{AGENTS_PREFIX}{name}/returns/mean" for name in names)


def parameter_metrics(names: Iterable[str]) -> tuple[str, ...]:
    """Name the metrics of drawn parameters: statistics of their values, and the bounds of moving ranges."""
    return tuple(f"env_config/{name}/{each}" for name in names for each in ("mean", "min", "max", "low", "high"))


COLLECT_METRICS: Final = (
    *summary("returns"),
    *summary("rewards"),
    *summary("episodes/returns"),
    *summary("episodes/lengths"),
    EPISODES_ENDED,
)
TRAINED_RETURNS: Final = ("episodes/returns/mean", "returns/mean")
"""The mean returns of a training row, of whole episodes and of horizons: the first one present is its score."""
EVALUATED_RETURNS: Final = (f"{EVAL_PREFIX}returns/mean", f"{EVAL_PREFIX}horizon_returns/mean")
"""The same for an evaluation."""
TRAINER_METRICS: Final = (
    *COUNTERS,
    *COLLECT_METRICS,
    "profiling/collect_ms",
    "profiling/step_ms",
    "profiling/eval_ms",
    "profiling/tracking_ms",
    "profiling/env_steps_per_s",
    "memory/process_mb",
    "memory/device_mb",
)
