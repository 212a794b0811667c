"""The `env_config` of an environment: what is in force, and parameters in it that move while a policy trains."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from rl8x.distributed import ranks
from rl8x.envs.env_config import EnvConfig
from rl8x.envs.parameters import Parameter, ResolvedConfig, resolve_config
from rl8x.randomization.base import ParameterDistribution
from rl8x.randomization.moving import NO_SOURCE, RETURNS, Episodes, ParameterGroup
from rl8x.randomization.scheduled import PerCopy

if TYPE_CHECKING:
    from rl8x.envs.steps import Carry


class MovesParameters:
    """The part of an environment that handles its `env_config`, and parameters that move.

    A group of moving parameters is kept under its key for as long as the environment lives: a configuration that comes
    into force again continues where it was, and programs that read its tensors read the right ones.
    """

    gives_sources: ClassVar[bool] = True
    """Whether `Step.sources` says of each episode how its parameters were drawn."""
    parameters: Mapping[str, Parameter] = {}
    """The parameters that `env_config` may set, by name."""
    num_envs: int
    metric_names: tuple[str, ...]
    shared_seed: int = 0
    """A seed that all ranks share, for what they have to draw alike."""
    carry: Carry | None
    generator: torch.Generator
    _known_groups: dict[str, ParameterGroup]
    _saved_groups: dict[str, Any]
    _last_resolved: tuple[object, ResolvedConfig] | None = None
    _no_noise: Tensor
    _config: ResolvedConfig
    _next_config: ResolvedConfig | None

    # ---- the configuration in force, and the next

    @property
    def config(self) -> dict[str, object]:
        """The `env_config` in force, in plain JSON form; empty for the defaults."""
        return dict(self._config.given)

    @property
    def next_config(self) -> dict[str, Any]:
        """The `env_config` of the next `reset`, unless that is given another, in plain JSON form."""
        return dict((self._next_config or self._config).given)

    def plain_config(self, config: EnvConfig, called: str = "env_config", copies: str = "num_envs") -> dict[str, Any]:
        """Check an `env_config` and return it in the form of `config`, to compare the two; nothing changes.

        Args:
            config: Names of parameters to values, distributions or their JSON forms.
            called: Its name in error messages.
            copies: The argument that sets the number of copies, for error messages.

        Raises:
            TypeError: If it is not a mapping.
            ValueError: As `configure` does.
        """
        return dict(self._resolve(config, called, copies).given)

    def configure(self, config: EnvConfig | None) -> None:
        """Check an `env_config`, which takes effect at the next `reset`.

        Args:
            config: Names of parameters to a number, `num_envs` numbers, a distribution or its JSON form, in the
                parameters' units; `{}` for the defaults, None for no change.

        Raises:
            TypeError: If it is not a mapping.
            ValueError: If a name is unknown or a value out of bounds; the message has the legal names and bounds.
        """
        if config is not None:
            self._next_config = self._with_known_groups(self._resolve(config))

    def adopt_next_config(self) -> None:
        """Put the `env_config` that `configure` was given last into force, as `reset` does; a `restart` must follow."""
        if self._next_config is not None:
            self._config, self._next_config = self._next_config, None

    def _resolve(
        self, config: EnvConfig, called: str = "env_config", copies: str = "num_envs", *, steered: bool = False
    ) -> ResolvedConfig:
        """Check an `env_config` and turn it into tensors on the environment's device; the last one is remembered.

        A run gives its `env_config` with each step: to make tensors of it anew would be a copy to the device for each
        parameter, and each a wait for it.
        """
        values = _constants(config)
        if values is not None and self._last_resolved is not None and self._last_resolved[0] == (values, steered):
            return self._last_resolved[1]
        # A tensor's device has its index ("cuda:0"), by which constants are found again.
        owner, device = f"{type(self).__name__}: {called}", self._no_noise.device
        options: Any = {"owner": owner, "device": device, "copies": copies, "steered": steered}
        resolved = resolve_config(config, self.parameters, num_envs=self.num_envs, metrics=self.metric_names, **options)
        self._refuse_moves(resolved, owner)
        # Groups have a state, and are not shared.
        self._last_resolved = None if values is None or resolved.groups else ((values, steered), resolved)
        return resolved

    # ---- which groups there are

    def _with_known_groups(self, resolved: ResolvedConfig) -> ResolvedConfig:
        """Return a configuration with those of its groups that are known already, and keep the others."""
        if not resolved.groups:
            return resolved
        groups = []
        for group in resolved.groups:
            known = self._known_groups.setdefault(group.key, group)
            known.allocate_state(self.generator.device)
            if group.key in self._saved_groups:
                known.load_state_dict(self._saved_groups.pop(group.key))
            known.update_from_config(group)
            groups.append(known)
        return ResolvedConfig(resolved.given, resolved.fixed, resolved.drawn, tuple(groups), resolved.steered)

    def _refuse_moves(self, resolved: ResolvedConfig, owner: str) -> None:
        """Refuse groups that move with returns, where the environment does not give the sources of episodes."""
        for group in () if self.gives_sources else resolved.groups:
            if group.metric is not None:
                raise ValueError(
                    f"{owner}[{group.names[0]!r}] moves with the returns of episodes, and a simulator does not say "
                    "under which parameters they were played. Use Scheduled, or a distribution that stands still."
                )

    def known_group(self, key: str) -> ParameterGroup | None:
        """Return the group of a key, if any configuration of this environment has had it.

        Args:
            key: The group's key.
        """
        return self._known_groups.get(key)

    @property
    def is_steered(self) -> bool:
        """Whether a function set the configuration in force."""
        return self._config.steered

    def begin_moving(self) -> None:
        """Draw the initial state of groups that have none yet: the same on all ranks, without communication.

        A single rank may call it, such as for the environment of a film, so that ranks cannot exchange messages here.
        """
        for group in self._config.groups:
            seed = self.shared_seed ^ zlib.crc32(group.key.encode())
            same_on_all_ranks = torch.Generator(self.generator.device).manual_seed(seed)
            group.begin(self.generator if ranks().size == 1 else same_on_all_ranks)

    @property
    def _in_use(self) -> dict[str, ParameterGroup]:
        """The groups of the configuration in force and of that which the next reset puts into force, by key."""
        groups = (*self._config.groups, *(() if self._next_config is None else self._next_config.groups))
        return {group.key: group for group in groups}

    # ---- when they move

    def update_parameters_from_metrics(self, row: Mapping[str, float]) -> None:
        """Move scheduled parameters to the present values of the counters and metrics that they go by.

        Args:
            row: Counters and metrics by name.
        """
        for group in self._in_use.values():
            group.update_from_metrics(row)

    def steer_config(self, config: EnvConfig) -> None:
        """Play each copy's next episode under an `env_config`; those in progress keep the values that they began with.

        Programs are recompiled where the kind of a parameter's distribution changes, and not where its numbers do.

        Args:
            config: Names of parameters to values in their units, see `Env.configure`.

        Raises:
            ValueError: If a name is unknown, a value is out of bounds, or a distribution moves by itself.
        """
        self._config, self._next_config = self._with_known_groups(self._resolve(config, steered=True)), None
        if self.carry is not None:
            self.carry = {name: value for name, value in self.carry.items() if name != "sources"}

    def check_steered_config(self, config: EnvConfig) -> None:
        """Refuse an `env_config` that `steer_config` would refuse; nothing changes.

        Args:
            config: Names of parameters to values in their units, see `Env.configure`.

        Raises:
            ValueError: As `steer_config` does.
        """
        self._resolve(config, steered=True)

    @property
    def moves_by_returns(self) -> bool:
        """Whether some parameters move with the returns of episodes."""
        return any(group.metric is not None for group in self._config.groups)

    def will_move_by_returns(self, config: EnvConfig | None = None) -> bool:
        """Whether some parameters move with the returns of episodes from the next reset on.

        Args:
            config: The `env_config` that the reset puts into force; None is the one that is due already.
        """
        following = (self._next_config or self._config) if config is None else self._resolve(config)
        return any(group.metric is not None for group in following.groups)

    def update_parameters_from_episodes(
        self,
        ended: Tensor,
        returns: Tensor,
        metrics: Mapping[str, Tensor],
        sources: Mapping[str, Tensor],
        *,
        is_reset: bool,
    ) -> None:
        """Move parameters that go by returns, by the episodes of a horizon on all ranks; on the device.

        Args:
            ended: Where an episode ended that is experience, `[horizon, num_envs]`, bool.
            returns: The return of the episode up to each step, `[horizon, num_envs]`.
            metrics: The environment's own metrics of it, likewise.
            sources: `Step.sources` of it, likewise, by label.
            is_reset: Whether a reset ends all episodes that would go on after the horizon.
        """
        assert self.carry is not None
        for group in self._config.groups:
            if group.metric is None:
                continue
            measured = {RETURNS: returns, **metrics}
            scores = measured.get(group.metric, torch.full_like(returns, torch.nan))
            pending = self.carry["sources"][group.label]
            pending = torch.full_like(pending, NO_SOURCE) if is_reset else pending
            episodes = Episodes(scores, ended, sources[group.label], pending)
            group.update_from_episodes(episodes.of_all_ranks(), self.generator)
            # The episodes were the same, what was drawn was not.
            ranks().broadcast(list(group.state.values()))

    @contextlib.contextmanager
    def evaluating_parameters(self) -> Iterator[None]:
        """Draw as evaluations do, and go back to the training's configuration and its state at the end."""
        training = self._next_config or self._config
        groups = self._in_use.values()
        for group in groups:
            group.set_evaluating(True)
        try:
            yield
        finally:
            for group in groups:
                group.set_evaluating(False)
            if (self._next_config or self._config) is not training:
                self._next_config = training

    def configure_for_evaluation(self, config: EnvConfig, training: MovesParameters | None) -> None:
        """Set the `env_config` of an evaluation, from the next reset on, with moving parameters as in the training.

        Args:
            config: The `env_config` to evaluate under.
            training: The environment that is trained in, whose state is copied; None if there is none.
        """
        steered = training is not None and training.is_steered
        self._next_config = self._with_known_groups(self._resolve(config, steered=steered))
        for group in self._next_config.groups:
            trained = None if training is None else training.known_group(group.key)
            if trained is not None:
                group.load_state_dict(trained.state_dict())
            group.set_evaluating(True)

    # ---- what is known of them

    @property
    def drawn_parameters(self) -> dict[str, Tensor]:
        """The values of those parameters that resets draw, of the episodes in progress, `[num_envs]` each."""
        values = {} if self.carry is None else self.carry["parameters"]
        return {name: values[name] for name in self.parameters if name in self._config.shown_names and name in values}

    def parameter_ranges(self) -> dict[str, tuple[Any, Any]]:
        """Return the smallest and largest value drawn now of those parameters that move: numbers, or 0-d tensors."""
        ranges = {name: ends for group in self._config.groups for name, ends in group.ranges().items()}
        return {name: ends for name, ends in ranges.items() if name in self._config.shown_names}

    @property
    def moving_names(self) -> list[str]:
        """The parameters that move in the configuration of the next reset."""
        config = self._next_config or self._config
        return [name for group in config.groups for name in group.names if name in config.shown_names]

    def present_config(self) -> dict[str, Any]:
        """Return the configuration of the next reset in plain JSON form, with what moves as it stands now.

        It is what an evaluation under the training's configuration draws from; looks at values on the device.
        """
        config = self._next_config or self._config
        if config.steered:
            return dict(config.given)
        present = {name: now for group in config.groups for name, now in group.present().items()}
        forms = {name: now.values[0] if isinstance(now, PerCopy) else now.to_dict() for name, now in present.items()}
        return {**config.given, **forms}

    def parameter_support(self) -> dict[str, tuple[float, float]]:
        """Return the smallest and the largest value of each parameter as evaluations draw it now, in its own unit."""
        config = self._resolve(self.present_config())
        ends = {name: drawn.support for name, drawn in config.drawn.items()}
        ends |= {name: (float(values.min()), float(values.max())) for name, values in config.fixed.items()}
        return {name: ends[name] for name in self.parameters}

    # ---- saving

    def moving_state(self) -> dict[str, Any]:
        """Return the state of all parameters that move or have moved, for a snapshot; empty if there are none."""
        if not (self._known_groups or self._saved_groups):
            return {}
        following = self._next_config
        return {
            "steered": [self._config.steered, following is not None and following.steered],
            "moving": {**self._saved_groups, **{key: each.state_dict() for key, each in self._known_groups.items()}},
            "present": self.present_config(),
        }

    def join_moving(self, state: Mapping[str, Any]) -> None:
        """Copy the state of the moving parameters from another environment of the same configuration.

        Args:
            state: The other environment's `state_dict`.
        """
        self._load_groups(state.get("moving", {}))

    def _load_groups(self, moving: Mapping[str, Any]) -> None:
        """Restore the state of groups by key; that of one which no configuration has had here waits for it."""
        for key in self._known_groups.keys() & moving.keys():
            self._known_groups[key].load_state_dict(moving[key])
        self._saved_groups = {key: saved for key, saved in moving.items() if key not in self._known_groups}

    def load_moving_state(self, state: Mapping[str, Any]) -> None:
        """Restore the configurations of a snapshot, and the state of their moving parameters.

        Args:
            state: The environment's `state_dict`.
        """
        steered, following_steered = state.get("steered", (False, False))
        following = state["next_config"]
        self._load_groups(state.get("moving", {}))
        self._config, self._next_config = self._with_known_groups(self._resolve(state["config"], steered=steered)), None
        if following is not None:
            self._next_config = self._with_known_groups(self._resolve(following, steered=following_steered))


def _constants(config: EnvConfig) -> tuple[tuple[str, object], ...] | None:
    """Return an `env_config` as a value to compare; None if something in it, such as a list, can change in place."""
    items = tuple(config.items()) if isinstance(config, Mapping) else None
    if items is None or any(
        type(value) not in (int, float) and not isinstance(value, ParameterDistribution) for _, value in items
    ):
        return None
    return items
