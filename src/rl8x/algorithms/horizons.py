"""Horizons of the training environment: resets, statistics, and evaluations between two resets.

The statistics include flags of non-finite quantities, named `finite/` and the quantity.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from rl8x import keys
from rl8x.algorithms.hyperparameters import flatten_params
from rl8x.distributed import ranks
from rl8x.envs import Env
from rl8x.envs.parameters import AnyEnvConfig, called_with, shown_value
from rl8x.envs.team import Team
from rl8x.policy import Policy
from rl8x.rollouts.collector import Collector
from rl8x.rollouts.statistics import Number, Stats, pool, rollout_stats
from rl8x.rollouts.step import Rollout, under
from rl8x.trees import names_of


@dataclasses.dataclass(frozen=True)
class ResetSchedule:
    """When the training environment is reset: k > 0 before every k-th collect, k < 0 once, before the first."""

    every: int

    @property
    def once(self) -> bool:
        """Whether the environment is reset only once."""
        return self.every < 0

    def is_due(self, collects: int) -> bool:
        """Return whether the collect after this many collects begins with a reset."""
        return collects == 0 if self.once else collects % self.every == 0

    def until_due(self, collects: int) -> int:
        """Return the number of collects before the next that begins with a reset; 0 if there is only one reset."""
        return 0 if self.once else -collects % self.every


@dataclasses.dataclass(eq=False, repr=False)
class Horizons:
    """The horizons that an algorithm's policy plays in the training environment."""

    collector: Collector
    rollout: Rollout
    counters: dict[str, int]
    resets: ResetSchedule
    _: dataclasses.KW_ONLY
    start_seed: int | None = None
    summarise: Callable[[Mapping[str, Tensor], int, Team | None], Stats] = rollout_stats

    def __post_init__(self) -> None:
        self.env: Env = self.collector.env
        self.row: Mapping[str, float] = {}  # metrics that the `env_config` of the next collect may depend on
        if self.env.team is not None:
            self.counters.setdefault(keys.COPY_STEPS, 0)
        if self.start_seed is not None:
            self._check_random_start()

    # -- between horizons

    def reset_is_due(self) -> bool:
        """Whether the next collect begins by resetting the environment."""
        return self.resets.is_due(self.counters[keys.COLLECTS])

    def reset_if_due(self, env_config: AnyEnvConfig | None) -> bool:
        """Update the environment's parameter distributions by counters and metrics, and reset it if due."""
        is_due, state = self.reset_is_due(), self.env.parameter_state
        if callable(env_config):
            self.env.steer_config(called_with(env_config, {**self.row, **self.counters}))
        elif is_due:
            state.configure(env_config)
        if state.curricula:
            state.update_from_metrics({**self.row, **self.counters})
        if is_due:
            self._check_moves()
            self.collector.reset()
            if self.start_seed is not None:  # first episodes count as begun at random times, `[0, time_limit)`
                env, device = self.env, self.env.device
                generator = torch.Generator(device).manual_seed(self.start_seed)
                assert env.time_limit is not None
                elapsed = torch.randint(env.time_limit, (env.num_copies,), generator=generator, device=device)
                env.set_elapsed(elapsed if env.team is None else env.team.for_agents(elapsed))
            return True
        if not callable(env_config):
            self.check_applies(env_config)
        return False

    def check_applies(self, env_config: Mapping[str, Any] | None) -> None:
        """Raise if no reset will apply an `env_config`, or if its moving distributions can never move."""
        if self.reset_is_due():
            self._check_moves(env_config)
            return
        state = self.env.parameter_state
        if env_config is not None and self.resets.once and state.resolve(env_config).config != state.current.config:
            raise ValueError(
                "This `env_config` would never apply: the environment was reset once, at the first collect "
                "(`horizons_per_env_reset` < 0). Give it to the first collect, or use horizons_per_env_reset=1."
            )

    def _check_moves(self, env_config: Mapping[str, Any] | None = None) -> None:
        """Raise if parameters depend on ends of episodes and none will end; None checks the current configuration."""
        if not self.resets.once or self.env.episodic:
            return
        state = self.env.parameter_state
        if (state.next if env_config is None else state.resolve(env_config)).moves_by_returns:
            raise ValueError(
                "`env_config` moves with the returns of episodes, but none ever ends: the task has no end, and the "
                "environment is reset once (`horizons_per_env_reset` < 0). Use horizons_per_env_reset=1 or more, or "
                "give the environment a `time_limit`."
            )

    # -- first episodes that begin at random times

    def _check_random_start(self) -> None:
        env, name = self.env, type(self.env.unwrapped).__name__
        if env.time_limit is None:
            raise ValueError(
                f"`random_start` draws times below a time limit, and {name} has none: give it a `time_limit`."
            )
        if not self.resets.once:
            raise ValueError(
                "`random_start` needs an environment that is reset once (horizons_per_env_reset=-1): each reset would "
                f"have all copies begin at once; got {self.resets.every}."
            )
        if not env.takes_elapsed:
            raise ValueError(
                f"`random_start` needs a time limit that can be shifted, and the simulator that {name} steps counts "
                "its own: use one whose copies are stepped one by one, each with Gymnasium's TimeLimit."
            )

    def _without_shortened(self, rollout: Mapping[str, Tensor], collects: int) -> Mapping[str, Tensor]:
        """Return a rollout's tensors, `[horizon + 1, num_envs, ...]`, in which shortened first episodes do not end."""
        # Such an episode is longer than the number of steps since the reset, so no state has to mark it.
        limit, before = self.env.time_limit, collects * self.rollout.horizon
        if self.start_seed is None or limit is None or before >= limit:
            return rollout
        lengths = rollout[keys.EPISODE_LENGTHS]
        steps = torch.arange(before + 1, before + len(lengths) + 1, device=lengths.device)
        whole = lengths <= steps.unsqueeze(1)
        ends = (keys.TERMINATED, keys.TRUNCATED, keys.ENDED)
        return {**rollout, **{name: rollout[name] & whole for name in ends if name in rollout}}

    # -- after a horizon

    def finish(self) -> Stats:
        """Count the horizon that was collected, truncate its episodes if a reset follows, and return its statistics."""
        rollout, horizon = self.rollout, self.rollout.horizon
        self.counters[keys.COLLECTS] += 1
        if self.reset_is_due():
            rollout.truncate()
        counted = self._without_shortened(rollout.tensors, self.counters[keys.COLLECTS] - 1)
        valid = rollout.tensors.get(keys.VALID)
        state, team = self.env.parameter_state, self.env.team
        if state.current.moves_by_returns:
            assert self.env.carry is not None
            episodes = counted if team is None else team.episodes(counted)
            ended = episodes[keys.TERMINATED] | episodes[keys.TRUNCATED]
            pending = {label: each[: self.env.num_copies] for label, each in self.env.carry["sources"].items()}
            state.update_from_episodes(
                (ended if valid is None or team is not None else ended & valid)[:horizon],
                episodes[keys.EPISODE_RETURNS][:horizon],
                under(keys.METRICS, episodes, horizon),
                under(keys.SOURCES, episodes, horizon),
                pending=None if self.reset_is_due() else pending,
            )
        # Only simulators have masked steps. They run on the host, so counting these is no host sync.
        own = rollout.num_envs * horizon
        own = own * ranks().size if valid is None else int(ranks().sum(valid[:horizon].sum()))
        self.counters[keys.ENV_STEPS] += own
        if team is not None:
            self.counters[keys.COPY_STEPS] += self.env.num_copies * horizon * ranks().size
        stats = self.summarise(counted, horizon, team)
        return Stats.merge(stats, self._parameter_stats()) if state.current.shown_names else stats

    def _parameter_stats(self) -> dict[str, Number]:
        """Summarise the copies' randomised parameters, and the bounds of moving ones."""
        state, stats = self.env.parameter_state, dict[str, Number]()
        assert self.env.carry is not None
        values, ranges = self.env.carry["parameters"], state.ranges()
        for name in (name for name in state.declared if name in state.current.shown_names):
            drawn, ends = values[name], ranges.get(name, ())
            stats |= zip(keys.parameter_metrics([name]), (drawn.mean(), *torch.aminmax(drawn), *ends), strict=False)
        return stats

    def observe(self, policy: Policy) -> None:
        """Update a policy's observation normaliser, if it has one, with the horizon that was collected."""
        if policy.obs_moments is None:
            return
        horizon, tensors = self.rollout.horizon, self.rollout.tensors
        obs = {name.removeprefix(keys.OBS): tensors[name][:horizon] for name in names_of(tuple(tensors), keys.OBS)}
        policy.obs_moments.observe(obs, tensors[keys.VALID][:horizon] if keys.VALID in tensors else None)

    def evaluate(self, env_config: Mapping[str, Any] | None, *, deterministic: bool) -> Stats:
        """Evaluate over the horizons from one reset to the next; see `GenericAlgorithmBase.evaluate`."""
        rows: list[Mapping[str, float]] = []
        counts: dict[str, tuple[str, ...]] = {}
        before, horizon = self.counters[keys.COLLECTS], self.rollout.horizon
        with self.env.parameter_state.evaluating():
            for _ in range(max(1, self.resets.every)):
                self.reset_if_due(env_config)
                try:
                    cut = self.resets.is_due(self.counters[keys.COLLECTS] + 1)
                    played = self.collector.evaluate(horizon, deterministic=deterministic, cut=cut).tensors
                    counted = self._without_shortened(played, self.counters[keys.COLLECTS])
                    row, gates = rollout_stats(counted, horizon, self.env.team).counted()
                except BaseException:  # else training would continue its episodes and configuration
                    self.discard()
                    self.counters[keys.COLLECTS] = before  # else resets would not coincide with evaluations
                    raise
                rows.append(row)
                counts.update(gates)
                self.counters[keys.COLLECTS] += 1
        return pool(rows, counts)

    def discard(self) -> None:
        """Begin new episodes with the next collect."""
        self.collector.cursor = None

    # -- what a run records

    def params(self, factory: Callable[..., Env] | None) -> dict[str, Any]:
        """Return the params of the environment by dotted name, given its factory."""
        env, weights = self.env, "shared" if self.collector.policy.num_separate == 1 else "one each"
        return {
            "env": type(env.unwrapped).__name__,
            "env.time_limit": env.time_limit,
            **({"env.observe_parameters": env.observe_parameters} if env.parameters else {}),
            **({"env.copies": env.num_copies, "env.policies": weights} if env.team is not None else {}),
            **({} if env.team is None else flatten_params("env", env.team.params)),
            **flatten_params("env", env.params or {"kwargs": _factory_arguments(factory)}),
        }

    @property
    def tags(self) -> dict[str, str]:
        """Tags of the environment that a run records at its end, by name."""
        tags = {}
        # Some simulators reveal only at the end of an episode that they do not return its final observation.
        if not self.env.gives_final_obs:
            tags["rl8x.final_obs"] = "missing: time limits bootstrap from the observation after the reset"
        state = self.env.parameter_state
        present = state.present()
        return tags | {f"rl8x.env_config.{name}": str(shown_value(present[name])) for name in state.moving_names}

    def join(self, state: Mapping[str, Any]) -> None:
        """Restore another rank's collector on a new rank: the same configuration, but new episodes."""
        env_state = state["env"]
        # After an evaluation in the training environment the next configuration applies.
        following = env_state["next_config"]
        self.env.parameter_state.configure(env_state["config"] if following is None else following)
        self.env.parameter_state.join(env_state)
        self.collector.reset()  # now, since later collects may begin without a reset


def _factory_arguments(factory: Callable[..., Env] | None) -> dict[str, Any]:
    """Return the arguments that a factory passes to the environment's class, by name, except those that are params."""
    if not isinstance(factory, functools.partial):
        return {}
    names = inspect.signature(factory.func).parameters if factory.args else ()
    arguments = dict(zip(names, factory.args, strict=False)) | factory.keywords
    arguments.pop("time_limit", None)
    return arguments


# -- numbers that are not finite: flags for a row's metrics, and places for a message

# Collected quantities, by the keys of a rollout. Discrete actions are always finite, but not their log-probabilities.
COLLECTED: Final = {
    "observations": (keys.OBS, keys.NEXT_OBS),
    "actions": (keys.ACTIONS, keys.LOGP),
    "rewards": (keys.REWARDS,),
}
# Keys by which a non-finite quantity is located in a rollout. Losses are non-finite where values are.
_LOCATED_BY: Final = {**COLLECTED, "observations": (keys.OBS,), "losses": (keys.VALUES, keys.FINAL_VALUES)}
_MAX_LISTED: Final = 32


def gathered_not_finite(rollout: Mapping[str, Any]) -> dict[str, Any]:
    """Return 0-d bools by metric: which quantities of a rollout, `[horizon + 1, num_envs, ...]`, are not finite."""
    names = tuple(rollout)
    flags = _flags({quantity: [rollout[name] for name in names_of(names, *of)] for quantity, of in COLLECTED.items()})
    if keys.FINAL_VALUES in rollout:
        flags["finite/observations"] = flags["finite/observations"] | _final_not_finite(rollout).any()
    return flags


@torch.no_grad()
def updates_not_finite(rows: Tensor, norms: Sequence[bool], weights: Iterable[Tensor]) -> dict[str, Tensor]:
    """Flag non-finite losses and gradients (`norms`) in the first bad row of `[updates, metrics]`, and weights."""
    bad = ~torch.isfinite(rows)
    first = bad.any(1).to(torch.float32).argmax()
    # Indexing with a 0-d tensor would be a host sync.
    worst = bad.index_select(0, first.reshape(1)).squeeze(0)
    of_gradients = [is_bad for is_bad, is_norm in zip(worst, norms, strict=True) if is_norm]
    of_losses = [is_bad for is_bad, is_norm in zip(worst, norms, strict=True) if not is_norm]
    return {
        "finite/losses": torch.stack(of_losses).any(),
        "finite/gradients": torch.stack(of_gradients).any(),
        **_flags({"parameters": list(weights)}),
    }


def _flags(groups: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return 0-d bools by metric: which groups of tensors or arrays, `[...]` each, have a non-finite number."""
    first = next(each for group in groups.values() for each in group)
    if not isinstance(first, Tensor):
        whole = "iub"  # kinds of numbers that are all finite
        return {
            f"finite/{name}": not all(each.dtype.kind in whole or np.isfinite(each).all() for each in group)
            for name, group in groups.items()
        }
    floats = [[each for each in group if each.is_floating_point() and each.numel()] for group in groups.values()]
    every = [extreme.to(torch.float32) for group in floats for each in group for extreme in torch.aminmax(each)]
    # One vector for all, since each operator costs time.
    bad = ~torch.isfinite(torch.stack(every)) if every else first.new_zeros(0, dtype=torch.bool)
    parts = bad.split_with_sizes([2 * len(group) for group in floats])
    return {f"finite/{name}": part.any() for name, part in zip(groups, parts, strict=True)}


def locate_non_finite(rollout: Mapping[str, Tensor], team: Team | None = None) -> dict[str, dict[str, Any]]:
    """Return as plain data where a rollout, `[horizon + 1, num_envs, ...]`, has the first non-finite numbers."""
    places = {}
    for quantity, names in _LOCATED_BY.items() if rollout else ():
        bad = _slots_not_finite(rollout, *names)
        of_final = torch.zeros_like(bad)
        if quantity == "observations" and keys.FINAL_VALUES in rollout:
            of_final = _final_not_finite(rollout)
        elif quantity == "observations":
            # If the episode continues, the next slot contains the same observation.
            ended = rollout[keys.TERMINATED] | rollout[keys.TRUNCATED]
            of_final = _slots_not_finite(rollout, keys.NEXT_OBS) & ended
        bad |= of_final
        if not bad.any():
            continue
        bad = bad if team is None else team.of_agents(bad).any(-2)
        slot = int(bad.any(1).nonzero()[0])
        environments = bad[slot].nonzero().flatten().tolist()
        places[quantity] = {
            "slot": slot,
            "environments": environments[:_MAX_LISTED],
            "num_environments": len(environments),
            "num_environments_in_rollout": int(bad.any(0).sum()),
            "final": bool(of_final[slot].any()),
        }
    return places


def _slots_not_finite(rollout: Mapping[str, Tensor], *names: str) -> Tensor:
    """Return which slots and copies have a non-finite number under some keys, `[horizon + 1, num_envs]`."""
    bad = torch.zeros_like(rollout[keys.REWARDS], dtype=torch.bool)
    for value in (rollout[name] for name in names_of(tuple(rollout), *names)):
        bad |= ~value.isfinite().reshape(*bad.shape, math.prod(value.shape[2:])).all(-1)
    return bad


def _final_not_finite(rollout: Mapping[str, Any]) -> Any:
    """Return where the value of a truncated episode's final observation is NaN, `[horizon + 1, num_envs]`."""
    final, values = rollout[keys.FINAL_VALUES], rollout[keys.VALUES]
    # If the value of the observation acted on is not finite either, the weights are the cause.
    return (final != final) & (values - values == 0.0)
