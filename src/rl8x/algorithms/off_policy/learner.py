"""Learning from batches of stored transitions, of a replay or a data set.

A step samples the batches of the updates that are due, draws their noise, and loops over them without Python between
updates. An algorithm is a subclass that defines the policy (`make_policy`), the trained networks (`make_nets`), and
one update (`phases` and `finish`: the box in its paper).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from rl8x import keys
from rl8x.algorithms.base import LR, EnvFactory, GenericAlgorithmBase, eager_seconds
from rl8x.algorithms.hyperparameters import part_seed, seeded
from rl8x.algorithms.memory_check import check_memory, row_bytes
from rl8x.algorithms.off_policy.actor_critic import CRITIC_METRICS, Actor
from rl8x.algorithms.off_policy.config import LearnerConfig, OffPolicyConfig
from rl8x.algorithms.off_policy.sources import (
    DatasetSource,
    ReplaySource,
    Source,
    collected_stats,
    read_dataset,
    transition,
)
from rl8x.algorithms.off_policy.updates import (
    Found,
    Net,
    Nets,
    OffPolicyUpdater,
    Phase,
    ReplayBatch,
    update_stats,
)
from rl8x.algorithms.optimizer import check_same
from rl8x.envs import Env, validate
from rl8x.envs.parameters import AnyEnvConfig
from rl8x.envs.team import Team
from rl8x.execution.execution import flushed_denormals
from rl8x.policy import Policy
from rl8x.replay.dataset import Dataset
from rl8x.replay.ring import Replay
from rl8x.rollouts.statistics import Number, Stats, numpy_if_small
from rl8x.trees import tree_map, unflatten_tree

LearnerConfigT = TypeVar("LearnerConfigT", bound=LearnerConfig)

TAU: Final = "tau"
"""Key of a batch: tau of the target networks after the update, 0-d; 0 leaves them unchanged."""
# Maximum bytes of the batches that are sampled at once; images would fill the memory.
_BLOCK_BYTES: Final = 2**26
# Multiplications per row and weight: forward, backward for weights and activations, and forward of a target.
_MULTIPLIED: Final = 8


def observed(batch: ReplayBatch, key: str) -> tuple[Any, dict[str, Tensor], Tensor]:
    """Return a batch's observations as inputs of a policy's `forward`: sequences of one step, `[1, batch_size, *]`."""
    obs = tree_map(lambda part: part.unsqueeze(0), unflatten_tree(key, batch))
    returns = batch[keys.RETURNS]
    return obs, {}, torch.zeros((1, len(returns)), dtype=torch.bool, device=returns.device)


def model_obs(policy: Policy, batch: ReplayBatch, key: str) -> Any:
    """Return a batch's normalised observations without an action mask, `[batch_size, *obs]` or a dict, for critics."""
    return policy.model_inputs(unflatten_tree(key, batch))[0]


def recorded_actions(batch: ReplayBatch) -> Any:
    """Return a batch's actions as a policy's `evaluate` takes them: sequences of one step, `[1, batch_size, ...]`."""
    return tree_map(lambda part: part.unsqueeze(0), unflatten_tree(keys.ACTIONS, batch))


class Learner(GenericAlgorithmBase[LearnerConfigT]):
    """Learns from batches of a source's rows: with an environment from a replay, else from the config's data set.

    Attributes:
        batch_size: Rows of a batch on this rank.
        update_metrics: Names of the metrics that an update returns; norms of gradients end in `grad_norm`.
        explore_metrics: Names of the metrics that `exploring` gives.
        cycle: The updaters that take turns; the last has all phases.
        dataset: The data set, as it was read; None with an environment.
        nets: The networks of an update.
        source: The source of the rows.
    """

    update_metrics: ClassVar[tuple[str, ...]]
    explore_metrics: ClassVar[tuple[str, ...]] = ()
    of_rank: ClassVar[tuple[str, ...]] = ("generator",)

    source: Source

    def __init__(
        self, config: LearnerConfigT, env: Env | None, seed: int, env_factory: EnvFactory | None = None
    ) -> None:
        super().__init__(config, env, seed, env_factory)
        self.dataset = read_dataset(type(self).__name__, config) if env is None else None
        if self.dataset is not None:
            assert self.dataset.observation_space is not None
            assert self.dataset.action_space is not None
            self.observation_space, self.action_space = self.dataset.observation_space, self.dataset.action_space
        self.check_spaces()
        if env is not None:
            validate(env)  # before networks are made for it
        self.generator = self.make_generator("minibatches")
        with seeded(part_seed(seed, "weights"), self.device):
            self.policy = self.make_policy().to(self.device)
            if self.policy.recurrent:
                name, model = type(self).__name__, type(self.policy.model).__name__
                raise ValueError(f"{name} trains feedforward models; {model} is recurrent. Use PPO, or another model.")
            self.check_model()
            self.nets = Nets(self.policy)
            self.make_nets()
        self.optimizers = [*self.nets.trained.values()]
        if config.precision == "bf16":
            self.policy.autocast = self.execution.autocast
        self.cycle = self._make_cycle()
        self._prepared = False
        self.source = self._make_source()
        self.batch_size = self.source.batch_size
        what = f"a batch of batch_size={config.batch_size:,} needs"
        lower = " or ".join(f"`{name}`" for name in ("batch_size", "cql_samples") if hasattr(config, name))
        check_memory(self.batch_size * self._row_bytes, self.device, what, lower)
        self.metrics = (*self.update_metrics, LR, *self.source.metrics, *(self.explore_metrics if env else ()))

    def _make_source(self) -> Source:
        config, dataset = self.config, self.dataset
        if dataset is not None:
            source = DatasetSource(config, dataset, self.device, next_actions=self.reads_next_actions)
            if self.policy.obs_moments is not None:  # otherwise this copy on the device is not needed
                obs = unflatten_tree(keys.OBS, dataset.transitions)
                self.policy.observe(tree_map(lambda part: part.unsqueeze(1).to(self.device), obs), shared=True)
            return source
        assert isinstance(config, OffPolicyConfig), "only an OffPolicyConfig has an environment"

        def summarise(rollout: Mapping[str, Tensor], horizon: int, team: Team | None) -> Stats:
            return collected_stats(numpy_if_small(rollout) if self.execution.host_looks else rollout, horizon, team)

        self.horizons = config.make_horizons(self, self.policy, slot=transition, summarise=summarise)
        return ReplaySource(config, self.horizons)

    # -- defined by subclasses

    def check_spaces(self) -> None:
        """Raise a `ValueError` if the algorithm does not support the spaces, naming one that does."""

    @abstractmethod
    def make_policy(self) -> Policy:
        """Build the policy, on any device; see `policy_of`."""

    @abstractmethod
    def make_nets(self) -> None:
        """Add the trained networks and their targets to `nets`, by `add_net` and `nets.add_target`."""

    @abstractmethod
    def phases(self) -> list[Phase]:
        """Return the phases of an update, in order: functions of tensors without side effects.

        The batch that they get has `obs`, `actions` and `next_obs` (or their parts), `returns` and `discounts`,
        `[batch_size, ...]` each, and the result of `draw` for this update. A target is `returns + discounts *
        V(next_obs)`.
        """

    def finish(self, nets: Mapping[str, Net], batch: ReplayBatch, found: Found) -> None:
        """End an update: move the target networks, and add results.

        Args:
            nets: The networks of `make_nets`, by name.
            batch: The batch, as the phases get it.
            found: The results of the phases, by name; in the end it has the metrics of `update_metrics`, and the errors
                of the rows, `ERRORS`, if known.
        """
        for name, (followed, _) in self.nets.targets.items():
            nets[name].polyak_update(nets[followed], batch[TAU])

    def draw(self, first: int, count: int) -> dict[str, Tensor]:
        """Draw the inputs of updates other than their batches, such as noise and flags.

        Args:
            first: Number of updates made before.
            count: Number of updates to draw for.

        Returns:
            Tensors `[count, ...]`, by names that the algorithm chooses.
        """
        if not self.nets.targets:
            return {}
        config: Any = self.config  # a `ValueConfig`
        taus = [config.tau_of(update) for update in range(first + 1, first + count + 1)]
        # Otherwise the copy would be a host sync.
        return {TAU: torch.from_numpy(np.array(taus, np.float32)).to(self.device, non_blocking=True)}

    def exploring(self, *, warms_up: bool) -> AbstractContextManager[Mapping[str, Number]]:
        """Return the context in which the policy explores while it collects; it yields metrics of the exploration.

        Args:
            warms_up: Whether actions should be random; an `Actor` then acts at random.
        """
        policy = self.policy
        return policy.exploring(warms_up=warms_up) if isinstance(policy, Actor) else contextlib.nullcontext({})

    @property
    def reads_next_actions(self) -> bool:
        """Whether updates read a data set's `next_actions`, which not all rows have; see `Dataset.prepare`."""
        return False

    # -- building

    def _make_cycle(self) -> list[OffPolicyUpdater]:
        """Return the updaters that take turns: `policy_delay` - 1 of the first phase alone, then one of all phases."""
        phases, delay = self.phases(), getattr(self.config, "policy_delay", 1)
        # A replay knows the names of its rows once it has some.
        rows = lambda items: self.source.rows.columns.views(items)  # noqa: E731
        options: Any = {"finish": self.finish, "nets": self.nets, "execution": self.execution, "rows": rows}
        critics = OffPolicyUpdater(phases[:1], CRITIC_METRICS, **options)
        return [critics] * (delay - 1) + [OffPolicyUpdater(phases, self.update_metrics, **options)]

    def add_net(self, name: str, module: torch.nn.Module) -> None:
        """Add a network that is trained with the config's optimizer.

        Args:
            name: Its name in `nets`.
            module: The network, on any device.
        """
        self.nets.trained[name] = self.make_optimizer(module.to(self.device))

    # -- collecting and learning

    def collect(self, *, env_config: AnyEnvConfig | None = None) -> Stats:
        """Collect experience for the source; see `GenericAlgorithmBase.collect`."""
        self.make_ready()
        return self.source.collect(env_config, self.exploring)

    def evaluate(self, *, env_config: Mapping[str, Any] | None = None, deterministic: bool = True) -> Stats:
        """Evaluate in the training environment; see `GenericAlgorithmBase.evaluate`. It cuts n-step returns."""
        self.source.cut()
        return super().evaluate(env_config=env_config, deterministic=deterministic)

    def discard_experience(self) -> None:
        """Begin new episodes with the next collect; a replay never stores a non-finite horizon."""
        super().discard_experience()
        self.source.cut()

    def step(self) -> Stats:
        """Make the updates that are due; if none is, the step's row has no losses."""
        self.make_ready()
        lr = self.schedules["lr"](self.counters[self.clock])
        for rate in self.nets.rates:
            rate.fill_(lr)
        rows, threads = [], self.execution.threads.for_work(self._work)
        with threads, flushed_denormals(self.device), self.model_draws():
            self.counters[keys.STEPS] += 1
            self._prepare()
            due = self.source.take_due()
            for size in [self.block_size] * (due // self.block_size) + [1] * (due % self.block_size):
                rows += self._update_block(size)
            weights, looks = [each.weights for each in self.optimizers], self.execution.host_looks
            means = update_stats(rows, self.update_metrics, weights, host_looks=looks) if rows else {}
        return Stats({LR: lr, **means, **self.source.stats()})

    @property
    def replay(self) -> Replay | Dataset:
        """The replay or data set that updates learn from."""
        return self.source.rows

    @functools.cached_property
    def block_size(self) -> int:
        """Number of updates in one program; a second program makes the remaining updates one by one."""
        source, size = self.source, float(self.source.updates_per_step)
        # If a simulator masks steps, a collect may have fewer transitions than usual: blocks are then small.
        size = size if self.env is None or self.env.capturable else size**0.5
        return max(1, min(int(size), source.most_at_once, _BLOCK_BYTES // max(1, self.batch_size * self._row_bytes)))

    @property
    def _row_bytes(self) -> int:
        return row_bytes(self.observation_space, self.action_space)

    def _update_block(self, size: int) -> list[Tensor]:
        """Sample batches and make an update with each; return their metrics, `[updates, metrics]` each."""
        index = self.source.rows.sample(size, self.source.batch_size, self.generator)
        items, done, results = self._items(index), 0, []
        for updater, count in self._runs(self.counters[keys.UPDATES], size):
            some = slice(done, done + count)
            results.append(updater.run(items if count == size else {name: item[some] for name, item in items.items()}))
            done += count
        self.counters[keys.UPDATES] += size
        self.source.learned_from(index, [wrong for _, wrong in results if wrong is not None])
        return [rows for rows, _ in results]

    def _runs(self, first: int, count: int) -> Iterator[tuple[OffPolicyUpdater, int]]:
        """Yield each updater after update `first`, with the number of consecutive updates that it makes."""
        if len(self.cycle) == 1:
            yield self.cycle[0], count
            return
        turns = (self.cycle[i % len(self.cycle)] for i in range(first, first + count))
        for updater, each in itertools.groupby(turns):
            yield updater, len(list(each))

    def _items(self, index: Tensor) -> dict[str, Tensor]:
        """Return the inputs of updates, `[updates, ...]` each, given the numbers of their batches' rows."""
        return self.source.items(index) | self.draw(self.counters[keys.UPDATES], index.size(0))

    @property
    def prepared(self) -> bool:
        """Whether a step has requested the updates' programs."""
        return self._prepared

    def prepare(self) -> None:
        """Request the programs of a step, unless that was done, there are no rows, or the environment will be reset."""
        with self.execution.ahead():
            if self.horizons is not None and not self.prepared:
                self.horizons.collector.prepare(self.horizons.rollout)
            with self.execution.threads.for_work(self._work):
                self._prepare()

    def _prepare(self) -> None:
        """Start compiling the updates' programs while transitions are gathered, or updates run eagerly."""
        execution = self.execution
        ahead = execution.prepares or (execution.mode == "compile" and self.device.type == "cpu")
        if self._prepared or not ahead or not self.source.rows.size:
            return
        self._prepared = True
        sizes = {self.block_size} if self.source.updates_per_step % self.block_size == 0 else {self.block_size, 1}
        # Batches are drawn here for their layouts only; generators are restored, so that updates draw the same.
        drawn_from = self.generator.get_state()
        with execution.ahead():
            runs = {run for size in sizes for i in range(len(self.cycle)) for run in self._runs(i * size, size)}
            for updater, count in sorted(runs, key=lambda run: (self.cycle.index(run[0]), run[1])):
                index = torch.zeros((count, self.source.batch_size), dtype=torch.int64, device=self.device)
                updater.prepare(self._items(index))
        self.generator.set_state(drawn_from)

    @functools.cached_property
    def _work(self) -> int:
        """Rows times weights of one update."""
        return self.source.batch_size * sum(len(each.weights) for each in self.optimizers)

    @property
    def seconds_per_step(self) -> float:
        """Estimated seconds of an eager step."""
        updates, env_steps = float(self.source.updates_per_step), 0 if self.horizons is None else self.rollout.horizon
        return eager_seconds(env_steps, updates, updates * self._work * _MULTIPLIED)

    # -- params and checkpoints

    @property
    def params(self) -> dict[str, Any]:
        """The effective hyperparameters by name."""
        return self.source.params(super().params)

    def learned_state(self) -> dict[str, Any]:
        """Return the state that updates change: weights, targets, optimizers, moments and generators of batches."""
        return {
            "policy": self.policy.state_dict(),
            "nets": self.nets.state_dict(),
            "generator": self.generator.get_state(),
            **self.source.learned_state(),
        }

    def load_learned_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `learned_state`; raise a `ValueError` if it is of other networks. Stored transitions stay."""
        self.source.load_learned_state(state)
        check_same("policy", state["policy"], self.policy.state_dict())
        self.policy.load_state_dict(state["policy"])
        self.nets.load_state_dict(state["nets"])
        self.generator.set_state(state["generator"].cpu())

    def state_dict(self) -> dict[str, Any]:
        """Return all state that the next collect and step depend on."""
        return {**super().state_dict(), **self.source.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`; training continues with the same bits."""
        super().load_state_dict(state)
        self.source.load_state_dict(state)

    def join(self, state: Mapping[str, Any]) -> None:
        """Restore another rank's state as a new rank, with an empty replay."""
        super().join(state)
        self.source.join(state)
