"""Environments without a state of their own: simulators keep it outside of the carry, a stand-in has none."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

import gymnasium
import torch
from torch import Tensor

from rl8x.envs.base import MAX_EVAL_ENVS, Carry, Env, Observation, Step
from rl8x.envs.checks import narrow_seed
from rl8x.envs.episode_metrics import EpisodeMetrics
from rl8x.envs.parameters import ResolvedConfig
from rl8x.envs.team import Team
from rl8x.plain import thawed


class SimulatorEnv(Env):
    """Base of the adapters to simulators: nothing of them is compiled, captured or saved.

    A subclass implements `restart` and `advance`, which change the simulator, and sets `made_from`.
    """

    terminates: ClassVar[bool] = True
    capturable: ClassVar[bool] = False
    resumable: ClassVar[bool] = False

    takes_render_mode: ClassVar[bool] = False
    """Whether it renders frames where it is made with `render_mode="rgb_array"`."""
    episode_metrics: EpisodeMetrics
    made_from: tuple[Any, Mapping[str, Any]] | None = None
    """The arguments of its constructor, the first and others by name, frozen; None: it cannot be made again."""
    next_seed: int | None = None
    """The seed of the simulator's next reset, after `set_seed`, narrowed; None lets its random numbers go on."""

    def set_seed(self, seed: int | None) -> None:
        """Seed the generator, and the simulator at its next reset."""
        super().set_seed(seed)
        self.next_seed = None if seed is None else narrow_seed(seed)

    def check_config(self, resolved: ResolvedConfig, owner: str) -> None:
        """Refuse parameters that move with returns: a simulator does not say under which its episodes were played."""
        for each in resolved.curricula:
            if each.metric is not None:
                raise ValueError(
                    f"{owner}[{each.names[0]!r}] moves with the returns of episodes, and a simulator does not say "
                    "under which parameters they were played. Use Scheduled, or a distribution that stands still."
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the seeding and the configuration; the simulator's own state cannot be taken."""
        return super().state_dict() | {"carry": None}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the seeding; new episodes start, from a seed drawn from the restored generator."""
        super().load_state_dict(state_dict)
        self.next_seed = int(torch.randint(2**31 - self.num_envs, (), generator=self.generator, device=self.device))
        name, why = type(self).__name__, "a simulator's state cannot be saved, so all copies start new episodes"
        warnings.warn(f"{name}: {why}.", RuntimeWarning, stacklevel=2)

    def another(self, num_envs: int | None = None, *, seed: int | None = None, **kwargs: Any) -> Env | None:
        """Make copies again as these were made, at most 128 by default; `kwargs` replace arguments of their names."""
        if self.made_from is None:
            return super().another(num_envs, seed=seed)
        source, options = self.made_from
        options = {"device": self.device, "time_limit": self.time_limit, **thawed(options), **kwargs}
        make: Any = type(self)
        made: Env = make(source, num_envs or min(self.num_copies, MAX_EVAL_ENVS), seed=seed, **options)
        return made

    def _finish(
        self,
        carry: Carry,
        obs: Observation,
        rewards: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        final_obs: Observation,
        parameters: Mapping[str, Tensor],
        info: Mapping[str, Any],
        valid: Tensor | None = None,
        ended: Tensor | None = None,
    ) -> tuple[Carry, Step]:
        """Return the carry after a step and its result, given what comes before, the next parameters and the report."""
        done = terminated | truncated if ended is None else ended
        returns, elapsed = carry["returns"] + rewards, carry["elapsed"] + 1
        counted = torch.ones_like(done) if valid is None else valid
        metrics = self.episode_metrics.update(carry.get("metrics", {}), info, None, counted)
        self.episode_metrics.check_reported(metrics, info, done)
        values = self.episode_metrics.values(metrics)
        step = Step(obs, rewards, terminated, truncated, final_obs, returns, elapsed, valid, values, ended=ended)
        following = self.next_carry(done, elapsed, returns, parameters)
        return following | {"metrics": self.episode_metrics.restarted(metrics, done)}, step

    @staticmethod
    def next_carry(done: Tensor, elapsed: Tensor, returns: Tensor, parameters: Mapping[str, Tensor]) -> Carry:
        """Return the carry after a step.

        Args:
            done: Where an episode ended, `[num_envs]`, bool.
            elapsed: Its steps so far, int64 `[num_envs]`.
            returns: Its rewards so far, `[num_envs]`.
            parameters: Those of the episodes that go on or have begun, `[num_envs]` each.
        """
        elapsed, returns = elapsed.masked_fill(done, 0), returns.masked_fill(done, 0.0)
        return {"state": {}, "parameters": parameters, "elapsed": elapsed, "returns": returns}

    @staticmethod
    def _redrawn(begun: Tensor, parameters: Mapping[str, Tensor], fresh: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters in force, fresh ones where an episode has begun, `[num_envs]` each."""
        return {
            name: value if value is parameters[name] else torch.where(begun, value, parameters[name])
            for name, value in fresh.items()
        }


class StandIn(Env):
    """Copies that have spaces alone, of one copy each: no episode can begin, for the reason that `problem` states."""

    capturable = False

    def __init__(
        self,
        num_envs: int,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        episodic: bool,
        problem: str,
        device: torch.device | str = "cpu",
        team: Team | None = None,
    ) -> None:
        self.single_observation_space, self.single_action_space, self.team = observation_space, action_space, team
        self.terminates, self.problem = episodic, problem  # type: ignore[misc] # other classes always do, or never
        super().__init__(num_envs, device=device)

    def initial_state(self, *_: Any) -> NoReturn:
        """Refuse to begin episodes."""
        raise RuntimeError(
            f"this algorithm was loaded to act, without its environment: {self.problem}. Give load_algorithm `env`."
        )
