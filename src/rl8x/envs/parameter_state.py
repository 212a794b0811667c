"""The parameters of one environment: its configurations in force and due, and the curricula that move them."""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rl8x.distributed import ranks
from rl8x.envs.parameters import EnvConfig, Parameter, ResolvedConfig, parsed, plain, resolve_config
from rl8x.randomization.curriculum import NO_SOURCE, RETURNS, Curriculum, Episodes
from rl8x.randomization.scheduled import PerCopy


class ParameterState:
    """The configurations of an environment's parameters, and their curricula.

    Curricula are kept by key for the lifetime of the environment: a configuration that comes into force again continues
    where it was, and programs still read the right tensors.

    Attributes:
        in_force: The configuration of the episodes that begin.
        due: The configuration that the next reset puts into force; None if it stays the same.
        curricula: The curricula of all configurations so far, by key.
        shared_seed: A seed that all ranks share, for draws that must agree.
    """

    def __init__(
        self,
        declared: Mapping[str, Parameter],
        num_envs: int,
        generator: torch.Generator,
        *,
        owner: str,
        metrics: tuple[str, ...],
        check: Callable[[ResolvedConfig, str], None],
    ) -> None:
        self.declared, self.num_envs, self._generator = declared, num_envs, generator
        self._owner, self._metrics, self._check = owner, metrics, check
        # The device of a tensor includes its index ("cuda:0"); constants are looked up by that.
        self._device = torch.empty(0, device=generator.device).device
        self.shared_seed = 0
        self.curricula: dict[str, Curriculum] = {}
        self._saved: dict[str, Any] = {}
        self._last: tuple[object, ResolvedConfig] | None = None
        self.in_force = self.resolve({})
        self.due: ResolvedConfig | None = None

    # ---- which configuration

    @property
    def following(self) -> ResolvedConfig:
        """The configuration of the next reset."""
        return self.in_force if self.due is None else self.due

    def resolve(
        self, config: EnvConfig, called: str = "env_config", copies: str = "num_envs", *, steered: bool = False
    ) -> ResolvedConfig:
        """Check an `env_config` and turn it into tensors; nothing changes.

        The last result is cached, because a run passes its `env_config` with each step: new tensors would take a copy
        to the device, and a wait for it, for each parameter.
        """
        owner = f"{self._owner}: {called}"
        if not isinstance(config, Mapping):
            raise TypeError(f"{owner} must be a mapping from parameter names to values; got {config!r}.")
        values = parsed(config, owner)
        key = [(name, type(value), value) for name, value in values.items()], steered  # True equals 1.0
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        options: Any = {"owner": owner, "copies": copies, "metrics": self._metrics, "steered": steered}
        resolved = resolve_config(values, self.declared, num_envs=self.num_envs, device=self._device, **options)
        self._check(resolved, owner)
        self._last = key, resolved
        return resolved

    def configure(self, config: EnvConfig | None) -> None:
        """Check an `env_config`, which the next `adopt` puts into force; None changes nothing."""
        if config is not None:
            self.due = self._with_known(self.resolve(config))

    def adopt(self) -> None:
        """Put the `env_config` that is due into force; a `restart` must follow."""
        self.in_force, self.due = self.following, None

    def steer(self, config: EnvConfig) -> None:
        """Put an `env_config` into force for each copy's next episode; see `Env.steer_config`."""
        self.in_force, self.due = self._with_known(self.resolve(config, steered=True)), None

    def _with_known(self, resolved: ResolvedConfig) -> ResolvedConfig:
        """Return a configuration in which known curricula replace new ones of the same key; remember the others."""
        known = []
        for curriculum in resolved.curricula:
            kept = self.curricula.setdefault(curriculum.key, curriculum)
            kept.allocate_state(self._device)
            if curriculum.key in self._saved:
                kept.load_state_dict(self._saved.pop(curriculum.key))
            kept.update_from_config(curriculum)
            known.append(kept)
        return dataclasses.replace(resolved, curricula=tuple(known)) if known else resolved

    # ---- when they move

    def begin(self) -> None:
        """Draw the initial state of curricula that have none yet: the same on all ranks, without communication.

        A single rank may call it, for example for the environment of a film, so ranks cannot communicate here.
        """
        for curriculum in self.in_force.curricula:
            seed = self.shared_seed ^ zlib.crc32(curriculum.key.encode())
            same_on_all_ranks = torch.Generator(self._device).manual_seed(seed)
            curriculum.begin(self._generator if ranks().size == 1 else same_on_all_ranks)

    @property
    def _in_use(self) -> list[Curriculum]:
        """The curricula of the configurations in force and due."""
        return [*{each.key: each for each in (*self.in_force.curricula, *self.following.curricula)}.values()]

    def update_from_metrics(self, row: Mapping[str, float]) -> None:
        """Move scheduled parameters according to the counters and metrics that they follow, given by name."""
        for curriculum in self._in_use:
            curriculum.update_from_metrics(row)

    def update_from_episodes(
        self,
        ended: Tensor,
        returns: Tensor,
        metrics: Mapping[str, Tensor],
        sources: Mapping[str, Tensor],
        pending: Mapping[str, Tensor] | None,
    ) -> None:
        """Move parameters that depend on returns, by all ranks' episodes of a horizon, `[horizon, num_envs]`.

        `pending` has the sources of the episodes that continue after it, `[num_envs]`; None if a reset ends them.
        """
        measured = {RETURNS: returns, **metrics}
        for curriculum in self.in_force.curricula:
            if curriculum.metric is None:
                continue
            scores = measured.get(curriculum.metric, torch.full_like(returns, torch.nan))
            own = sources[curriculum.label]
            waiting = torch.full_like(own[0], NO_SOURCE) if pending is None else pending[curriculum.label]
            episodes = Episodes(scores, ended, own, waiting)
            curriculum.update_from_episodes(episodes.of_all_ranks(), self._generator)
            # Ranks have seen the same episodes but drawn different numbers.
            ranks().broadcast(list(curriculum.state.values()))

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Draw as evaluations do within the context, then return to the training's configuration."""
        training, curricula = self.following, self._in_use
        for curriculum in curricula:
            curriculum.set_evaluating(True)
        try:
            yield
        finally:
            for curriculum in curricula:
                curriculum.set_evaluating(False)
            if self.following is not training:
                self.due = training

    def configure_for_evaluation(self, config: EnvConfig, training: ParameterState | None) -> None:
        """Set the `env_config` of an evaluation, from the next reset on, with the state of the training's curricula."""
        steered = training is not None and training.in_force.steered
        self.due = self._with_known(self.resolve(config, steered=steered))
        for curriculum in self.due.curricula:
            trained = None if training is None else training.curricula.get(curriculum.key)
            if trained is not None:
                curriculum.load_state_dict(trained.state_dict())
            curriculum.set_evaluating(True)

    # ---- queries

    @property
    def moving_names(self) -> list[str]:
        """The parameters that move in the configuration of the next reset."""
        config = self.following
        return [name for each in config.curricula for name in each.names if name in config.shown_names]

    def ranges(self) -> dict[str, tuple[Any, Any]]:
        """Return the smallest and largest value drawn now of each moving parameter: numbers, or 0-d tensors."""
        ranges = {name: ends for each in self.in_force.curricula for name, ends in each.ranges().items()}
        return {name: ends for name, ends in ranges.items() if name in self.in_force.shown_names}

    def present(self) -> dict[str, Any]:
        """Return the next reset's configuration with moving distributions as they are now; see `Env.present_config`."""
        config = self.following
        if config.steered:
            return dict(config.given)
        present = {name: now for each in config.curricula for name, now in each.present().items()}
        values = {name: now.values[0] if isinstance(now, PerCopy) else now for name, now in present.items()}
        return {**config.given, **values}

    def support(self) -> dict[str, tuple[float, float]]:
        """Return the smallest and the largest value of each parameter as evaluations draw it now, in its own unit."""
        return self.resolve(self.present()).support(self.declared)

    # ---- saving

    def state_dict(self) -> dict[str, Any]:
        """Return the configurations in plain form, and the state of all parameters that move or have moved."""
        due = self.due
        return {
            "config": plain(self.in_force.given),
            "next_config": None if due is None else plain(due.given),
            "steered": [self.in_force.steered, due is not None and due.steered],
            "moving": {**self._saved, **{key: each.state_dict() for key, each in self.curricula.items()}},
            "present": plain(self.present()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the configurations of a snapshot, and the state of their moving parameters."""
        self.join(state)
        (steered, due_steered), due = state["steered"], state["next_config"]
        self.in_force = self._with_known(self.resolve(state["config"], steered=steered))
        self.due = None if due is None else self._with_known(self.resolve(due, steered=due_steered))

    def join(self, state: Mapping[str, Any]) -> None:
        """Copy the state of moving parameters from the `state_dict` of another environment.

        The state of a curriculum that is unknown here is kept until a configuration has that curriculum.
        """
        moving = state["moving"]
        for key in self.curricula.keys() & moving.keys():
            self.curricula[key].load_state_dict(moving[key])
        self._saved = {key: saved for key, saved in moving.items() if key not in self.curricula}
