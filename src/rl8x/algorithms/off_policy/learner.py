"""Learning from batches of stored transitions, of a replay or a data set.

One step is

    due       K updates
    sample    K batches at once, with all that is drawn for them
    loop      K updates, without Python between them

An algorithm is a subclass that says what acts (`make_policy`), what is trained (`make_nets`), and what one update does
(`update`: its paper's box), or what updates do in turn (`make_cycle`). `OffPolicyAlgorithm` and `OfflineAlgorithm` say
where rows come from; an algorithm's two forms are its class with one of the two as another base.
"""

from __future__ import annotations

import functools
import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar, Final, TypeVar, cast

import gymnasium
import torch
from torch import Tensor

from rl8x import keys
from rl8x.algorithms.base import LR, EnvFactory, GenericAlgorithmBase, refuse_inference_mode
from rl8x.algorithms.memory_check import CountedNets, check_networks, row_bytes
from rl8x.algorithms.off_policy.config import LearnerConfig
from rl8x.algorithms.off_policy.nets import Net, Nets
from rl8x.algorithms.off_policy.updates import (
    Found,
    OffPolicyUpdater,
    Phase,
    ReplayBatch,
    Update,
    UpdateResult,
    block_size,
    update_stats,
)
from rl8x.algorithms.optimizer_rules import make_rule
from rl8x.algorithms.seeds import part_seed, seeded
from rl8x.envs import Env, validate
from rl8x.execution.threads import flushed_denormals
from rl8x.policy import Policy
from rl8x.replay.dataset import Dataset
from rl8x.replay.ring import Replay
from rl8x.rollouts.statistics import Stats
from rl8x.schedules import Schedule
from rl8x.trees import tree_map, unflatten_tree

LearnerConfigT = TypeVar("LearnerConfigT", bound=LearnerConfig)

TAU: Final = "tau"
"""Key of a batch: tau of the target networks after the update, 0-d; 0 leaves them unchanged."""
# Measured for a small eager update.
_SECONDS_PER_UPDATE: Final = 1e-3
# Multiplications per row and weight: forward, backward for weights and activations, and forward of a target.
_MULTIPLIED: Final = 8


def observed(batch: ReplayBatch, key: str) -> tuple[Any, dict[str, Tensor], Tensor]:
    """Return a batch's observations as a policy's `forward` takes them: sequences of one step, `[1, batch_size, ...]`.

    Args:
        batch: Has observations under `key` or its parts, `[batch_size, ...]`.
        key: `keys.OBS` or `keys.NEXT_OBS`.
    """
    obs = tree_map(lambda part: part.unsqueeze(0), unflatten_tree(key, batch))
    returns = batch[keys.RETURNS]
    return obs, {}, torch.zeros((1, len(returns)), dtype=torch.bool, device=returns.device)


def recorded_actions(batch: ReplayBatch) -> Any:
    """Return a batch's actions as a policy's `evaluate` takes them: sequences of one step, `[1, batch_size, ...]`."""
    return tree_map(lambda part: part.unsqueeze(0), unflatten_tree(keys.ACTIONS, batch))


class Learner(GenericAlgorithmBase[LearnerConfigT]):
    """Learns from batches of rows.

    Attributes:
        update_metrics: Names of the metrics that `update` returns; norms of gradients end in `grad_norm`.
        cycle: What each update does, in turn; the last is `update`, of all phases.
        observation_space: Space of one observation.
        action_space: Space of one action.
        nets: The networks of an update.
        replay: What is learned from; the subclass makes it.
    """

    update_metrics: ClassVar[tuple[str, ...]]
    metrics: tuple[str, ...] = (LR,)
    of_rank: ClassVar[tuple[str, ...]] = ("generator",)

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    lr_schedule: Schedule
    replay: Replay | Dataset

    def __init__(
        self, config: LearnerConfigT, env: Env | None, seed: int, env_factory: EnvFactory | None = None
    ) -> None:
        super().__init__(config, env, seed, env_factory)
        self.observation_space, self.action_space = self.find_spaces()
        self.metrics = (*self.update_metrics, *self.metrics)
        self.check_spaces()
        if env is not None:
            validate(env)  # before networks are made for it
        self.generator = self._generator("minibatches")
        self._make_networks()
        if config.precision == "bf16":
            self.policy.autocast = self.execution.autocast
        self.lr_schedule = config.schedule("lr")
        self.cycle = self.make_cycle()
        self._prepared = False

    @abstractmethod
    def find_spaces(self) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
        """Return the spaces of one observation and one action."""

    # -- defined by subclasses

    def check_spaces(self) -> None:
        """Raise if the algorithm does not support the spaces, naming one that does.

        Raises:
            ValueError: If they do not.
        """

    @abstractmethod
    def make_policy(self) -> Policy:
        """Build the policy, on any device."""

    @abstractmethod
    def make_nets(self) -> None:
        """Add the trained networks and their targets to `nets`, by `add_net` and `nets.add_target`."""

    @abstractmethod
    def phases(self) -> list[Phase]:
        """Return the phases of an update, in order: functions of tensors that have no other effects.

        The batch that they get has `obs`, `actions` and `next_obs` (or their parts), `returns` and `discounts`,
        `[batch_size, ...]` each, and the result of `draw` for this update. A target is `returns + discounts *
        V(next_obs)`.
        """

    @abstractmethod
    def finish(self, nets: Mapping[str, Net], batch: ReplayBatch, found: Found) -> UpdateResult:
        """End an update, by moving target networks.

        Args:
            nets: The networks of `make_nets`, by name.
            batch: As the phases get it.
            found: What the phases have found, by name.

        Returns:
            The metrics that `update_metrics` names, and the errors of the rows where the algorithm knows them.
        """

    @property
    def update(self) -> Update:
        """Learns from one batch."""
        return Update(self.phases(), self.finish)

    def make_cycle(self) -> list[OffPolicyUpdater]:
        """Return the updaters of a cycle, which take turns; by default one."""
        return [self.make_updater(self.update, self.update_metrics)]

    def make_updater(self, update: Update, names: Sequence[str]) -> OffPolicyUpdater:
        """Make the updater of an update function.

        Args:
            update: The update.
            names: The metrics that it returns: the first ones of `update_metrics`, or all.
        """
        rows: Callable[[ReplayBatch], ReplayBatch] = lambda items: self.replay.columns.views(items)  # noqa: E731
        return OffPolicyUpdater(update, self.nets, names, self.execution, rows)

    def draw(self, first: int, count: int) -> dict[str, Tensor]:
        """Draw the inputs of updates beside their batches, such as noise and flags.

        Args:
            first: Updates that were made before.
            count: Updates that it is for.

        Returns:
            By a name of the algorithm's own, `[count, ...]` each.
        """
        if not self.nets.targets:
            return {}
        # Made on the device, since a copy from the host would be a host sync.
        return {TAU: self.config.taus(torch.arange(first + 1, first + count + 1, device=self.device))}

    # -- building

    def add_net(self, name: str, module: torch.nn.Module) -> None:
        """Add a network that is trained with the config's optimizer.

        Args:
            name: Its name in `nets`.
            module: The network, on any device.
        """
        config = self.config
        rule = make_rule(config.optimizer, config.optimizer_config)
        module = module.to(self.device)
        self.nets.add(name, module, rule, lr=config.schedule("lr")(0), max_grad_norm=config.max_grad_norm)

    def _count_networks(self) -> int:
        self.policy, counted = self.make_policy(), CountedNets()
        self.nets = cast(Nets, counted)  # `make_nets` adds to them
        self.make_nets()
        return counted.need

    def _make_networks(self) -> None:
        check_networks(type(self).__name__, vars(self.config), self.device, self._count_networks)
        with seeded(part_seed(self.seed, "weights"), self.device):
            self.policy = self.make_policy().to(self.device)
            if self.policy.recurrent:
                name, model = type(self).__name__, type(self.policy.model).__name__
                raise ValueError(f"{name} trains feedforward models; {model} is recurrent. Use PPO, or another model.")
            self.check_model()
            self.nets = Nets(self.policy)
            self.make_nets()

    # -- learning

    def step(self) -> Stats:
        """Make the updates that are due; if none is, the step's row has no losses."""
        refuse_inference_mode()
        lr = self.lr_schedule(self.counters[self.clock])
        self.nets.set_lr(lr)
        rows, threads = [], self.execution.threads.for_work(self._work)
        with threads, flushed_denormals(self.device), self.model_draws():
            self.counters[keys.STEPS] += 1
            self._prepare()
            due = self._take_due()
            for size in self._blocks(due):
                rows += self._update_block(size)
        if not rows:
            return Stats({LR: lr})
        stats = update_stats(rows, self.update_metrics, self._weights, host_looks=self.execution.host_looks)
        return Stats.merge({LR: lr}, stats)

    def _blocks(self, due: int) -> list[int]:
        """Return the numbers of updates of the programs that make `due` updates."""
        return [self.block_size] * (due // self.block_size) + [1] * (due % self.block_size)

    @abstractmethod
    def _take_due(self) -> int:
        """Return the number of updates that are due, and count them as made."""

    @property
    @abstractmethod
    def updates_per_step(self) -> Fraction:
        """Updates of one `step()`, on average."""

    @property
    def batch_size(self) -> int:
        """Rows of a batch on this rank."""
        return self.config.batch_size

    @functools.cached_property
    def block_size(self) -> int:
        """Number of updates in one program; see `updates.block_size`."""
        return block_size(float(self.updates_per_step), self.batch_size * self._row_bytes, **self._block_limits)

    @property
    def _row_bytes(self) -> int:
        return row_bytes(self.observation_space, self.action_space)

    @property
    def _block_limits(self) -> dict[str, Any]:
        """Further limits of the block size."""
        return {"masks": False}

    def _update_block(self, size: int) -> list[Tensor]:
        """Sample batches and make an update with each; return their metrics, `[updates, metrics]` each."""
        index = self.replay.sample(size, self.batch_size, self.generator)
        items, done, results = self._items(index), 0, []
        for updater, count in self._runs(self.counters[keys.UPDATES], size):
            some = slice(done, done + count)
            results.append(updater.run(items if count == size else {name: item[some] for name, item in items.items()}))
            done += count
        self.counters[keys.UPDATES] += size
        self._learned_from(index, [wrong for _, wrong in results if wrong is not None])
        return [rows for rows, _ in results]

    def _runs(self, first: int, count: int) -> Iterator[tuple[OffPolicyUpdater, int]]:
        """Yield each updater after update `first`, with the number of consecutive updates that it makes."""
        if len(self.cycle) == 1:
            yield self.cycle[0], count
            return
        turns = (self.cycle[i % len(self.cycle)] for i in range(first, first + count))
        for updater, each in itertools.groupby(turns):
            yield updater, len(list(each))

    def _learned_from(self, index: Tensor, errors: Sequence[Tensor]) -> None:
        """Receive which rows were learned from, `[updates, batch_size]`, and their errors in parts, for priorities."""

    def _items(self, index: Tensor) -> dict[str, Tensor]:
        """Return the inputs of updates, `[updates, ...]` each, given the indices of their batches' rows."""
        rows = self.replay.columns.gather(index, self.device)
        return rows | self.draw(self.counters[keys.UPDATES], index.size(0))

    @property
    def _weights(self) -> list[Tensor]:
        """The weights of each trained network as a vector."""
        return [each.optimizer.weights for each in self.nets.trained.values()]

    @property
    def prepared(self) -> bool:
        """Whether a step has requested the updates' programs."""
        return self._prepared

    def prepare(self) -> None:
        """Request the updates' programs, unless a step has, or there are no rows."""
        with self.execution.ahead(), self.execution.threads.for_work(self._work):
            self._prepare()

    def _prepare(self) -> None:
        """Start compiling the updates' programs while transitions are gathered, or updates run eagerly."""
        execution = self.execution
        ahead = execution.prepares or (execution.mode == "compile" and self.device.type == "cpu")
        if self._prepared or not ahead or not self.replay.size:
            return
        self._prepared = True
        sizes = {self.block_size} if self.updates_per_step % self.block_size == 0 else {self.block_size, 1}
        # Batches are drawn here for their layouts only; generators are restored, so that updates draw the same.
        drawn_from = self.generator.get_state()
        with execution.ahead():
            runs = {run for size in sizes for i in range(len(self.cycle)) for run in self._runs(i * size, size)}
            for updater, count in sorted(runs, key=lambda run: (self.cycle.index(run[0]), run[1])):
                index = torch.zeros((count, self.batch_size), dtype=torch.int64, device=self.device)
                updater.prepare(self._items(index))
        self.generator.set_state(drawn_from)

    @functools.cached_property
    def _work(self) -> int:
        """Rows times weights of one update."""
        return self.batch_size * sum(len(each) for each in self._weights)

    @property
    def seconds_per_step(self) -> float:
        """Estimated seconds of an eager step's updates: its multiplications at 100 GFLOP/s a thread; see PPO's."""
        updates = float(self.updates_per_step)
        return updates * (_SECONDS_PER_UPDATE + self._work * _MULTIPLIED / (1e11 * torch.get_num_threads()))

    # -- params and checkpoints

    @property
    def params(self) -> dict[str, Any]:
        """The effective hyperparameters by name."""
        return super().params | {"lr_schedule": self.lr_schedule.to_dict()}

    def learned_state(self) -> dict[str, Any]:
        """Return the state that updates change: weights, targets, optimizers, moments and generators of batches."""
        return {
            "policy": self.policy.state_dict(),
            "nets": self.nets.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load_learned_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `learned_state` or `state_dict`; the stored transitions stay."""
        self.policy.load_state_dict(state["policy"])
        self.nets.load_state_dict(state["nets"])
        self.generator.set_state(state["generator"].cpu())
