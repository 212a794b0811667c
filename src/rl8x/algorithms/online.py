"""Algorithms with an environment: horizons, resets, and evaluation in the training environment."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from rl8x import keys
from rl8x.algorithms.base import EnvFactory, GenericAlgorithmBase, flatten_params, refuse_inference_mode
from rl8x.algorithms.online_config import OnlineConfig
from rl8x.distributed import ranks
from rl8x.envs import Env
from rl8x.envs.env_config import AnyEnvConfig, shown_value
from rl8x.rollouts.buffer import Rollout
from rl8x.rollouts.collector import Collector
from rl8x.rollouts.statistics import Stats, parameter_stats, pool, rollout_stats
from rl8x.trees import tree_map

OnlineConfigT = TypeVar("OnlineConfigT", bound="OnlineConfig")


@dataclasses.dataclass(frozen=True)
class ResetSchedule:
    """When the training environment is reset.

    Attributes:
        every: k > 0 resets it before every k-th collect, k < 0 once, before the first.
    """

    every: int

    @property
    def once(self) -> bool:
        """Whether the environment is reset only once."""
        return self.every < 0

    @property
    def horizons(self) -> int:
        """Horizons from one reset to the next; 1 if there is only one reset."""
        return max(1, self.every)

    def is_due(self, collects: int) -> bool:
        """Return whether the collect after this many collects begins with a reset."""
        return collects == 0 if self.once else collects % self.every == 0

    def until_due(self, collects: int) -> int:
        """Return the number of collects before the next that begins with a reset; 0 if there is only one reset."""
        return 0 if self.once else -collects % self.every


class OnlineAlgorithm(GenericAlgorithmBase[OnlineConfigT]):
    """An algorithm that steps its policy in an environment.

    Args:
        config: The hyperparameters.
        env: The environment that is trained in.
        seed: The seed in use, also where the config leaves it open.
        env_factory: Makes another such environment; None where an instance was given.

    Attributes:
        collector: Steps the policy in the environment; the subclass makes it.
        resets: When the environment is reset.
    """

    clock: ClassVar[str] = keys.ENV_STEPS

    env: Env
    collector: Collector
    _row: Mapping[str, float] = MappingProxyType({})

    def __init__(self, config: OnlineConfigT, env: Env, seed: int, env_factory: EnvFactory | None = None) -> None:
        super().__init__(config, env, seed, env_factory)
        self.resets = ResetSchedule(config.horizons_per_env_reset or (-1 if env.episodic else 1))
        if config.random_start:
            self._check_random_start()

    @abstractmethod
    def collect(self, *, env_config: AnyEnvConfig | None = None) -> Stats:
        """Collect a horizon of experience with the current policy.

        Args:
            env_config: Values for the environment's parameters, applied where a reset is due; or a function of the
                counters, and of the metrics that `follow` was given, that returns such values, which each copy's next
                episode is played under.

        Returns:
            Its statistics, by the names of metrics.

        Raises:
            ValueError: As `reset_if_due` does.
        """

    def finish_collect(self, rollout: Rollout) -> Stats:
        """Count the horizon of a rollout, and truncate its episodes if a reset follows.

        Args:
            rollout: What was collected, `[horizon + 1, num_envs, ...]`.

        Returns:
            Its statistics, by the names of metrics.
        """
        horizon = self.config.horizon
        self.counters[keys.COLLECTS] += 1
        if self.reset_is_due():
            rollout.truncate()
        counted = self._without_shortened(rollout.tensors)
        self._move_parameters(rollout, counted)
        valid = rollout.tensors.get(keys.VALID)
        # Only simulators have masked steps. They run on the host, so counting these is no host sync.
        own = self.config.num_envs * horizon
        own = own * ranks().size if valid is None else int(ranks().sum(valid[:horizon].sum()))
        self.counters[keys.ENV_STEPS] += own
        parameters = parameter_stats(self.env.drawn_parameters, self.env.parameter_ranges())
        return Stats.merge(self.rollout_stats(counted), Stats(parameters))

    def _without_shortened(self, rollout: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a rollout's tensors, `[horizon + 1, num_envs, ...]`, in which shortened first episodes do not end.

        `random_start` lets a first episode begin at a step of its time limit that was drawn. It ends after fewer steps,
        with a smaller return than others, and its length counts the steps that it did not have. Statistics and moving
        parameters leave it out; its transitions are trained on. It is the one that is longer than there have been
        steps since the reset, so that nothing has to be remembered.
        """
        limit, horizon = self.env.time_limit, self.config.horizon
        before = (self.counters[keys.COLLECTS] - 1) * horizon
        if not self.config.random_start or limit is None or before >= limit:
            return rollout
        lengths = rollout[keys.EPISODE_LENGTHS]
        steps = torch.arange(before + 1, before + len(lengths) + 1, device=lengths.device)
        whole = lengths <= steps.unsqueeze(1)
        return {**rollout, **{name: rollout[name] & whole for name in (keys.TERMINATED, keys.TRUNCATED)}}

    def rollout_stats(self, rollout: Mapping[str, Tensor]) -> Stats:
        """Summarise a rollout.

        Args:
            rollout: Its tensors by key, each `[horizon + 1, num_envs, ...]`.
        """
        return rollout_stats(rollout, self.config.horizon)

    def _move_parameters(self, rollout: Rollout, counted: Mapping[str, Tensor]) -> None:
        """Update parameter distributions that depend on returns by the `counted` episodes that ended in a horizon."""
        state, horizon = self.env.parameter_state, self.config.horizon
        if state.in_force.moves_by_returns:
            assert self.env.carry is not None
            ended, valid = counted[keys.TERMINATED] | counted[keys.TRUNCATED], rollout.tensors.get(keys.VALID)
            state.update_from_episodes(
                (ended if valid is None else ended & valid)[:horizon],
                rollout[keys.EPISODE_RETURNS][:horizon],
                rollout.under(keys.METRICS),
                rollout.under(keys.SOURCES),
                pending=None if self.reset_is_due() else self.env.carry["sources"],
            )

    def evaluate(self, *, env_config: Mapping[str, Any] | None = None, deterministic: bool = True) -> Stats:
        """Evaluate in the training environment, over the horizons from one reset to the next.

        Args:
            env_config: Values for the environment's parameters; the next training reset goes back to what was in force
                before. None evaluates under that.
            deterministic: Whether the policy takes its most likely action rather than a sample.

        Returns:
            Statistics of these horizons, by the names of metrics.
        """
        rows: list[Mapping[str, float]] = []
        counts: dict[str, tuple[str, ...]] = {}
        with self.env.parameter_state.evaluating():
            for _ in range(self.resets.horizons):
                self.reset_if_due(env_config)
                try:
                    row, gates = self.collector.evaluate(self.config.horizon, deterministic=deterministic).counted()
                except BaseException:  # else training would go on in its episodes, under its configuration
                    self.discard_experience()
                    raise
                rows.append(row)
                counts.update(gates)
                self.counters[keys.COLLECTS] += 1
        return pool(rows, counts)

    def observe_rollout(self, rollout: Rollout) -> None:
        """Update the observation normaliser, if there is one, with a horizon.

        Args:
            rollout: What was collected, `[horizon + 1, num_envs, ...]`.
        """
        if self.policy.obs_moments is None:
            return
        horizon, valid = self.config.horizon, rollout.tensors.get(keys.VALID)
        obs = tree_map(lambda part: part[:horizon], rollout.tree(keys.OBS))
        self.policy.observe(obs, None if valid is None else valid[:horizon])

    def reset_is_due(self) -> bool:
        """Whether the next collect begins by resetting the environment."""
        return self.resets.is_due(self.counters[keys.COLLECTS])

    def follow(self, row: Mapping[str, float]) -> None:
        """Receive a row of metrics, which the `env_config` of the next collect may depend on."""
        self._row = row

    def reset_if_due(self, env_config: AnyEnvConfig | None) -> bool:
        """Update the environment's parameter distributions by counters and metrics, and reset it if due.

        Args:
            env_config: Values for the environment's parameters, or a function that returns them; see `collect`.

        Returns:
            Whether it was reset.

        Raises:
            ValueError: If a name is unknown or a value out of its bounds, or `env_config` is another than the one in
                force and no reset will ever apply it.
            RuntimeError: In `torch.inference_mode()`.
        """
        refuse_inference_mode()
        known = {**self._row, **self.counters}
        is_due = self.reset_is_due()
        if callable(env_config):
            self.env.steer_config(env_config(known))
        elif is_due:
            self.env.parameter_state.configure(env_config)
        self.env.parameter_state.update_from_metrics(known)
        if is_due:
            self._check_moves()
            self.collector.reset()
            if self.config.random_start:
                self._start_at_random_times()
            return True
        if not callable(env_config):
            self.check_applies(env_config)
        return False

    def _check_random_start(self) -> None:
        """Raise if `random_start` cannot be had in this environment."""
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

    def _start_at_random_times(self) -> None:
        """Have each copy's first episode count as begun at a random time of its limit, `[0, time_limit)`."""
        assert self.env.time_limit is not None
        generator, size = self._generator("start times"), (self.env.num_envs,)
        elapsed = torch.randint(self.env.time_limit, size, generator=generator, device=self.device)
        self.env.set_elapsed(elapsed)

    def check_applies(self, env_config: Mapping[str, Any] | None) -> None:
        """Raise if no reset will apply an `env_config`, or if its moving distributions can never move.

        Args:
            env_config: Values for the environment's parameters; None changes nothing.

        Raises:
            ValueError: If it is another than the one in force, and the environment was reset for the only time; or it
                moves with the returns of episodes, and none ever ends.
        """
        if self.reset_is_due():
            self._check_moves(env_config)
            return
        state = self.env.parameter_state
        if env_config is not None and self.resets.once and state.resolve(env_config).given != state.in_force.given:
            raise ValueError(
                "This `env_config` would never apply: the environment was reset once, at the first collect "
                "(`horizons_per_env_reset` < 0). Give it to the first collect, or use horizons_per_env_reset=1."
            )

    def _check_moves(self, env_config: Mapping[str, Any] | None = None) -> None:
        """Raise if parameters depend on ends of episodes and none will end; None checks the current configuration."""
        if not self.resets.once or self.env.episodic:
            return
        state = self.env.parameter_state
        if (state.following if env_config is None else state.resolve(env_config)).moves_by_returns:
            raise ValueError(
                "`env_config` moves with the returns of episodes, but none ever ends: the task has no end, and the "
                "environment is reset once (`horizons_per_env_reset` < 0). Use horizons_per_env_reset=1 or more, or "
                "give the environment a `time_limit`."
            )

    def join(self, state: Mapping[str, Any]) -> None:
        """Restore another rank's state as a new rank: with episodes of its own and that rank's configuration."""
        super().join(state)
        env_state = state["collector"]["env"]
        # After an evaluation in the training environment the next configuration applies.
        following = env_state["next_config"]
        self.env.parameter_state.configure(env_state["config"] if following is None else following)
        self.env.parameter_state.join(env_state)
        self.collector.reset()  # now, since it may be that no collect begins with a reset

    def discard_experience(self) -> None:
        """Begin new episodes with the next collect."""
        self.collector.cursor = None

    def state_dict(self) -> dict[str, Any]:
        """Return all state that the next collect and step depend on."""
        return {**super().state_dict(), "collector": self.collector.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`; training continues with the same bits."""
        super().load_state_dict(state)
        self.collector.load_state_dict(state["collector"])

    @property
    def params(self) -> dict[str, Any]:
        """The effective hyperparameters by name, and those of the environment."""
        env = self.env
        return {
            **super().params,
            "horizons_per_env_reset": self.resets.every,
            "state_reset_every": self.state_reset_every,
            "env": type(env.unwrapped).__name__,
            "env.time_limit": env.time_limit,
            **({"env.observe_parameters": env.observe_parameters} if env.parameters else {}),
            **flatten_params("env", env.params or {"kwargs": _factory_arguments(self.env_factory)}),
        }

    @property
    def tags(self) -> dict[str, str]:
        """Tags that a run records at its end, by name."""
        whole = self.collector.stepper.compiles_env or self.execution.mode == "eager"
        mode = self.execution.shown_mode + ("" if whole else ", environment eager")
        tags = {**super().tags, "rl8x.execution": mode}
        # Some simulators reveal only at the end of an episode that they do not return its final observation.
        if not self.env.gives_final_obs:
            tags["rl8x.final_obs"] = "missing: time limits bootstrap from the observation after the reset"
        state = self.env.parameter_state
        present = state.present()
        tags |= {f"rl8x.env_config.{name}": str(shown_value(present[name])) for name in state.moving_names}
        return tags


def _factory_arguments(factory: EnvFactory | None) -> dict[str, Any]:
    """Return the arguments that a factory passes to the environment's class, by name, except those that are params."""
    if not isinstance(factory, functools.partial):
        return {}
    signature = inspect.signature(factory.func)
    arguments = dict(signature.bind_partial(*factory.args, **factory.keywords).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    arguments.pop("time_limit", None)
    return arguments
