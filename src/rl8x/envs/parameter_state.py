"""The parameters of one environment: the current configuration and the next, and the curricula that move them."""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rl8x.distributed import ranks
from rl8x.envs.parameters import EnvConfig, ResolvedConfig, parsed, plain, resolve_config
from rl8x.randomization.curriculum import NO_SOURCE, RETURNS, Curriculum, Episodes
from rl8x.randomization.distributions import ParameterDistribution


class ParameterState:
    """The configurations of an environment's parameters: `current`, and `next` from the next reset on; and curricula.

    Curricula are kept by key for the lifetime of the environment: a configuration that comes into force again continues
    where it was, and programs still read the right tensors.
    """

    def __init__(self, env: Any) -> None:
        self._env, self.declared = env, env.parameters
        # The device of a tensor includes its index ("cuda:0"); constants are looked up by that.
        self._device = torch.empty(0, device=env.device).device
        self.shared_seed = 0  # which all ranks share, for draws that must agree
        self.curricula: dict[str, Curriculum] = {}  # of all configurations so far
        self._saved: dict[str, Any] = {}
        self._last: tuple[object, ResolvedConfig] | None = None
        self.current = self.next = self.resolve({})

    # ---- which configuration

    def resolve(
        self, config: EnvConfig, called: str = "env_config", copies: str = "num_envs", *, steered: bool = False
    ) -> ResolvedConfig:
        """Check an `env_config` and turn it into tensors; the last result is kept, as a run gives it at each step."""
        env = self._env
        owner = f"{type(env).__name__}: {called}"
        key = parsed(config, owner), steered
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        resolved = resolve_config(
            key[0],
            self.declared,
            owner=owner,
            num_envs=env.num_copies,
            num_agents=env.num_agents,
            device=self._device,
            copies=copies,
            metrics=env.metric_names,
            steered=steered,
        )
        env.check_config(resolved, owner)
        self._last = key, resolved
        return resolved

    def configure(self, config: EnvConfig | None) -> None:
        """Check an `env_config`, which the next `adopt` puts into force; None changes nothing."""
        if config is not None:
            self.next = self._with_known(self.resolve(config))

    def adopt(self) -> None:
        """Make the next `env_config` the current one; a `restart` must follow."""
        self.current = self.next

    def steer(self, config: EnvConfig) -> None:
        """Make an `env_config` the current one, for each copy's next episode; see `Env.steer_config`."""
        self.current = self.next = self._with_known(self.resolve(config, steered=True))

    def _with_known(self, resolved: ResolvedConfig) -> ResolvedConfig:
        """Return a configuration in which known curricula replace new ones of the same key; remember the others."""
        known = []
        for curriculum in resolved.curricula:
            kept = self.curricula.setdefault(curriculum.key, curriculum)
            if not kept.state:
                kept.allocate_state(self._device)
            if curriculum.key in self._saved:
                kept.load_state_dict(self._saved.pop(curriculum.key))
            kept.update_from_config(curriculum)
            known.append(kept)
        return dataclasses.replace(resolved, curricula=tuple(known)) if known else resolved

    # ---- when they move

    def begin(self) -> None:
        """Draw the initial state of curricula without one, the same on all ranks; a single rank may call it."""
        for curriculum in self.current.curricula:
            seed = self.shared_seed ^ zlib.crc32(curriculum.key.encode())
            same_on_all_ranks = torch.Generator(self._device).manual_seed(seed)
            curriculum.begin(self._env.generator if ranks().size == 1 else same_on_all_ranks)

    @property
    def _in_use(self) -> list[Curriculum]:
        """The curricula of the current configuration and the next."""
        return [*{each.key: each for each in (*self.current.curricula, *self.next.curricula)}.values()]

    def update_from_metrics(self, row: Mapping[str, float]) -> None:
        """Move scheduled parameters according to the counters and metrics that they follow, by name."""
        for curriculum in self._in_use:
            curriculum.update_from_metrics(row)

    def update_from_episodes(
        self,
        ended: Tensor,
        returns: Tensor,
        metrics: Mapping[str, Tensor],
        sources: Mapping[str, Tensor],
        pending: Mapping[str, Tensor] | None,  # the sources of episodes that continue; None: a reset ends them
    ) -> None:
        """Move parameters that depend on returns, by all ranks' episodes of a horizon, `[horizon, num_envs]`."""
        measured = {RETURNS: returns, **metrics}
        for curriculum in self.current.curricula:
            if curriculum.metric is None:
                continue
            scores = measured.get(curriculum.metric, torch.full_like(returns, torch.nan))
            drawn_from = sources[curriculum.label]
            waiting = torch.full_like(drawn_from[0], NO_SOURCE) if pending is None else pending[curriculum.label]
            episodes = Episodes(scores, ended, drawn_from, waiting)
            curriculum.update_from_episodes(episodes.of_all_ranks(), self._env.generator)
            # Ranks have seen the same episodes but drawn different numbers.
            ranks().broadcast(list(curriculum.state.values()))

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Draw as evaluations do within the context, then return to the training's configuration."""
        training, curricula = self.next, self._in_use
        for curriculum in curricula:
            curriculum.set_evaluating(True)
        try:
            yield
        finally:
            for curriculum in curricula:
                curriculum.set_evaluating(False)
            self.next = training

    def configure_for_evaluation(self, config: EnvConfig, training: ParameterState | None) -> None:
        """Set the `env_config` of an evaluation, from the next reset on, with the state of the training's curricula."""
        steered = training is not None and training.current.steered
        self.next = self._with_known(self.resolve(config, steered=steered))
        for curriculum in self.next.curricula:
            trained = None if training is None else training.curricula.get(curriculum.key)
            if trained is not None:
                curriculum.load_state_dict(trained.state_dict())
            curriculum.set_evaluating(True)

    # ---- queries

    @property
    def moving_names(self) -> list[str]:
        """The parameters that move in the configuration of the next reset."""
        config = self.next
        return [name for each in config.curricula for name in each.names if name in config.shown_names]

    def ranges(self) -> dict[str, tuple[Any, Any]]:
        """Return the smallest and largest value drawn now of each moving parameter: numbers, or 0-d tensors."""
        ranges = {name: ends for each in self.current.curricula for name, ends in each.ranges().items()}
        return {name: ends for name, ends in ranges.items() if name in self.current.shown_names}

    def present(self) -> dict[str, ParameterDistribution]:
        """Return the next reset's configuration with moving distributions as they are now; see `Env.present_config`."""
        present = dict(self.next.config)
        for curriculum in () if self.next.steered else self.next.curricula:
            present |= curriculum.present()
        return present

    # ---- saving

    def state_dict(self) -> dict[str, Any]:
        """Return the configurations in plain form, and the state of all parameters that move or have moved."""
        changes = self.next is not self.current
        return {
            "config": plain(self.current.config),
            "next_config": plain(self.next.config) if changes else None,
            "steered": [self.current.steered, changes and self.next.steered],
            "moving": {**self._saved, **{key: each.state_dict() for key, each in self.curricula.items()}},
            "present": plain(self.present()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the configurations of a snapshot, and the state of their moving parameters."""
        self.join(state)
        steered, next_steered = state["steered"]
        self.current = self.next = self._with_known(self.resolve(state["config"], steered=steered))
        if state["next_config"] is not None:
            self.next = self._with_known(self.resolve(state["next_config"], steered=next_steered))

    def join(self, state: Mapping[str, Any]) -> None:
        """Copy the state of curricula from another environment's `state_dict`; that of unknown ones waits for them."""
        moving = state["moving"]
        for key in self.curricula.keys() & moving.keys():
            self.curricula[key].load_state_dict(moving[key])
        self._saved = {key: saved for key, saved in moving.items() if key not in self.curricula}
