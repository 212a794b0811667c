"""An algorithm that collects a rollout, learns from it in epochs of minibatches, and discards it.

A feedforward model trains on sequences of one step, a recurrent one on longer sequences from its stored states; nothing
else differs.
"""

from __future__ import annotations

import contextlib
import functools
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, TypeVar

import torch
from torch import Tensor

from rl8x import keys
from rl8x.algorithms.base import LR, EnvFactory, GenericAlgorithmBase, eager_seconds
from rl8x.algorithms.horizons import Horizons, gathered_not_finite, updates_not_finite
from rl8x.algorithms.hyperparameters import nearest_divisor, part_seed, seeded
from rl8x.algorithms.memory_check import check_training
from rl8x.algorithms.on_policy.config import SEQ_LEN, OnPolicyConfig, check_seq_len
from rl8x.algorithms.on_policy.minibatches import SequencePack, rounded_parts
from rl8x.algorithms.on_policy.update import Objective, OnPolicyUpdater
from rl8x.algorithms.optimizer import check_same
from rl8x.distributed import ranks
from rl8x.envs import Env, validate
from rl8x.envs.parameters import AnyEnvConfig
from rl8x.execution import Program
from rl8x.execution.execution import flushed_denormals
from rl8x.policy import Policy
from rl8x.rollouts.statistics import Number, Stats
from rl8x.rollouts.step import Bootstrap, Slot
from rl8x.trees import names_of

OnPolicyConfigT = TypeVar("OnPolicyConfigT", bound=OnPolicyConfig)

GRAD_NORM: Final = "monitors/grad_norm"
EXPLAINED_VARIANCE: Final = "monitors/explained_variance"
REFUSED: Final = "monitors/refused_updates"


class OnPolicyAlgorithm(GenericAlgorithmBase[OnPolicyConfigT]):
    """An algorithm that learns from rollouts; a subclass defines the slots, the targets, the loss and the learning.

    Attributes:
        fresh: Whether there is a rollout that has not been learned from.
    """

    target_metric: ClassVar[str] = EXPLAINED_VARIANCE
    """The name of the metric that `targets` returns; by default the explained variance of the values."""

    packed: ClassVar[tuple[str, ...]] = (keys.OBS, keys.STARTS, keys.ACTIONS, keys.VALID)
    """The tensors of the rollout that updates read, by the first part of their names."""

    made: ClassVar[tuple[str, ...]] = (keys.RETURNS,)
    """The names of the targets that `targets` returns."""

    learned_by_targets: Sequence[Tensor] = ()
    """Tensors that `targets` changes in place, except those of the policy."""

    of_rank: ClassVar[tuple[str, ...]] = ("order_generator",)
    env: Env
    horizons: Horizons

    def __init__(self, config: OnPolicyConfigT, env: Env, seed: int, env_factory: EnvFactory | None = None) -> None:
        super().__init__(config, env, seed, env_factory)
        validate(env)
        with seeded(part_seed(seed, "weights"), self.device):
            policy = self.make_policy()
        self.policy = policy.to(self.device)
        if config.precision == "bf16":
            self.policy.autocast = self.execution.autocast
        self.seq_len = config.seq_len or (SEQ_LEN if self.policy.recurrent else 1)
        if self.policy.recurrent:
            sequences = config.seqs_per_state_reset
            if sequences is None:
                sequences = -1 if env.episodic else nearest_divisor(config.horizon // self.seq_len or 1, 8)
            self.state_reset_every = 0 if sequences < 0 else sequences * self.seq_len
        self.policy.state_reset_every = self.state_reset_every
        self.validate()
        effects = self.check_model(self.seq_len)
        check_training(config, env, self.device, policy=self.policy, seq_len=self.seq_len)
        # Updates read no states if the trained policy has none, even if the acting one does.
        options: Any = {"state_every": self.seq_len if self.policy.recurrent else None}
        options |= {"slot": self.slot, "bootstrap": self.bootstrap}
        self.horizons = config.make_horizons(self, self.acting, **options)
        exact = rounded_parts(keys.OBS, env.single_observation_space)
        self.pack = SequencePack(config.horizon, env.num_envs, self.seq_len, exact)
        self.optimizer = self.make_optimizer(self.policy)
        self.optimizers = (self.optimizer,)
        objective, self._in_order = self.objective, any(effects)
        refused = () if objective.limit is None else (REFUSED,)
        self.metrics = (*objective.metrics, GRAD_NORM, self.target_metric, LR, *self.coefficients(), *refused)
        self._states = tuple(self.policy.initial_state(1))
        self.fresh = False

    # -- defined by subclasses

    @abstractmethod
    def make_policy(self) -> Policy:
        """Build the policy, with torch's global generator seeded."""

    @property
    def acting(self) -> Policy:
        """The policy that acts while collecting."""
        return self.policy

    @property
    def bootstrap(self) -> Bootstrap | None:
        """The policy whose values bootstrap truncated episodes; None if no values are learned."""
        return self.policy.values

    @property
    @abstractmethod
    def slot(self) -> Slot:
        """The function that returns the tensors of a rollout's slot, including values if there is a `bootstrap`."""

    @property
    @abstractmethod
    def objective(self) -> Objective:
        """The objective that the updates minimise."""

    @property
    def renews(self) -> bool:
        """Whether `learn` changes the targets between epochs."""
        return False

    @abstractmethod
    def targets(self, data: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Return the targets of a rollout by the names in `made`, `[horizon, num_envs]` each, and `target_metric`, 0-d.

        Args:
            data: The tensors of the rollout without its last slot, by name, each `[horizon, num_envs, ...]`.
        """

    def learn(self) -> Tensor:
        """Set the targets, and make the updates of each epoch and minibatch; return the metric of the targets, 0-d."""
        measured = self.set_targets()
        with self.updates() as updates:
            for _ in updates.epochs():
                for minibatches in updates.minibatches():
                    updates.step(minibatches)
        return measured

    def coefficient(self) -> float:
        """Return the objective's present coefficient."""
        return 0.0

    def coefficients(self) -> dict[str, Number]:
        """Return the coefficients other than the learning rate, by metric name."""
        return {}

    # -- building

    def validate(self) -> None:
        """Raise a `ValueError` if config, environment and policy do not fit together."""
        config, horizon = self.config, self.config.horizon
        check_seq_len(config, self.seq_len)
        if config.sgd_minibatch_size is not None and config.sgd_minibatch_size % self.seq_len:
            raise ValueError(
                "`sgd_minibatch_size` must be a multiple of `seq_len`; "
                f"got {config.sgd_minibatch_size} and {self.seq_len}."
            )
        reset_every = self.state_reset_every
        if reset_every and horizon % reset_every:
            sequences = reset_every // self.seq_len
            raise ValueError(
                "`seqs_per_state_reset` * `seq_len` must divide `horizon`; "
                f"got {sequences} * {self.seq_len} and {horizon}. "
                f"Try seqs_per_state_reset={nearest_divisor(horizon // self.seq_len, sequences)}."
            )
        for name, limit in (("num_envs", self.env.max_num_envs), ("horizon", self.env.max_horizon)):
            if limit is not None and getattr(config, name) > limit:
                raise ValueError(
                    f"{type(self.env.unwrapped).__name__} allows `{name}` up to {limit}; got {getattr(config, name)}."
                )

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of one `step()`, unless a KL limit ends them early."""
        config, size = self.config, self.config.sgd_minibatch_size
        if size is None or config.accumulate_grads:
            return config.num_sgd_iters
        minibatches = config.num_envs * config.horizon // size
        return config.num_sgd_iters * minibatches * (self.env.num_agents // self.policy.num_separate)

    @property
    def seconds_per_step(self) -> float:
        """Estimated seconds of an eager step."""
        config, weights = self.config, len(self.optimizer.weights)
        multiplied = self.env.num_envs * config.horizon * weights * (2 + 6 * config.num_sgd_iters)
        return eager_seconds(config.horizon, self.updates_per_step, multiplied)

    @property
    def params(self) -> dict[str, Any]:
        """The effective hyperparameters by name."""
        return super().params | {"seq_len": self.seq_len}

    # -- collecting

    def collect(self, *, env_config: AnyEnvConfig | None = None) -> Stats:
        """Collect a rollout; see `GenericAlgorithmBase.collect`."""
        self.make_ready()
        self.horizons.reset_if_due(env_config)
        if self.execution.mode == "compile" and self.device.type == "cpu":
            self.prepare()  # so that all programs are compiled in parallel
        self.horizons.collector.fill(self.rollout)
        self.fresh = True
        return self.horizons.finish()

    # -- learning

    @functools.cached_property
    def updater(self) -> OnPolicyUpdater:
        """What makes the updates."""
        return OnPolicyUpdater(
            self.policy,
            self.config,
            self.objective,
            self.optimizer,
            self.pack,
            self.execution,
            self.make_generator("minibatches"),
            renews=self.renews,
            in_order=self._in_order,
        )

    def step(self) -> Stats:
        """Update the policy with the last collect's data.

        Raises:
            RuntimeError: If `collect()` has not been called since the last `step()`, or in `torch.inference_mode()`.
        """
        self.make_ready()
        if not self.fresh:
            raise RuntimeError("`step()` needs fresh experience: call `collect()` before each `step()`.")
        self.fresh = False
        lr: Number = self.schedules["lr"](self.counters[self.clock])
        if not self.updater.adapts:
            self.optimizer.lr.fill_(lr)
        measured = self.learn()
        rows, applied = self.updater.results
        if self.updater.adapts:
            lr = self.optimizer.lr.clone()
        self.horizons.observe(self.policy)
        objective = self.updater.objective
        norms = [name == GRAD_NORM for name in (*objective.metrics, GRAD_NORM)]
        self.counters[keys.STEPS] += 1
        self.counters[keys.UPDATES] += len(rows) if objective.limit is None else int(applied.sum())
        return Stats(
            {
                **self._update_stats(rows, applied),
                self.target_metric: measured,
                LR: lr,
                **self.coefficients(),
                **gathered_not_finite(self.rollout.tensors),
                **updates_not_finite(rows, norms, [self.optimizer.weights]),
            }
        )

    @contextlib.contextmanager
    def updates(self) -> Iterator[OnPolicyUpdater]:
        """Return the context of a step's updates; it yields the updater that makes them."""
        with flushed_denormals(self.device), self.model_draws(), self.updater.begin(self.coefficient()):
            yield self.updater

    def _update_stats(self, rows: Tensor, applied: Tensor) -> dict[str, Number]:
        """Average the results of the updates of a step: losses and gradient norms of those that were applied."""
        objective = self.updater.objective
        # Monitors also count the first update that was refused, or the excess that ended the step would be hidden.
        measured = torch.cat((torch.ones_like(applied[:1]), applied[:-1]))
        columns = [measured if name.startswith("monitors/") else applied for name in objective.metrics]
        counted = torch.stack((*columns, applied), dim=1)
        means = torch.where(counted, rows, 0.0).sum(0) / counted.sum(0).clamp(min=1)
        refused = {} if objective.limit is None else {REFUSED: self.updates_per_step - applied.sum()}
        return dict(zip((*objective.metrics, GRAD_NORM), means, strict=True)) | refused

    @torch.no_grad()
    def set_targets(self) -> Tensor:
        """Compute the `targets` of the rollout, and pack the updates' data; return the metric of the targets, 0-d."""
        (measured,) = self._prepare_program(*self.learned_by_targets)
        return measured

    @functools.cached_property
    def _prepare_program(self) -> Program:
        """`_prepare`, captured in mode `graph` unless ranks communicate in it; it uses the same memory in each call."""
        if self.execution.mode != "graph" or ranks().size > 1:
            return self._prepare
        return self.execution.program(self._prepare, len(self.learned_by_targets))

    def _prepare(self, *_: Tensor) -> list[Tensor]:
        """Compute the targets and pack the updates' data; return the metric of `targets`, 0-d."""
        rollout, horizon = self.rollout, self.config.horizon
        targets, target_metric = self.targets({name: rollout[name][:horizon] for name in rollout.tensors})
        self._fill_pack(targets)
        return [target_metric]

    def _fill_pack(self, targets: Mapping[str, Tensor]) -> None:
        """Pack the updates' data: the rollout, and the targets, `[horizon, num_envs]` each."""
        rollout, horizon = self.rollout, self.config.horizon
        packed = {name: rollout[name][:horizon] for name in names_of(tuple(rollout.tensors), *self.packed)}
        states = {name: rollout.states[name] for name in self._states}
        self.pack.fill(packed | dict(targets), states)

    @property
    def prepared(self) -> bool:
        """Whether a step has requested its programs."""
        return self.updater.prepared

    def prepare(self) -> None:
        """Request the programs of a step, unless that was done or the environment has to be reset first."""
        with self.execution.ahead():
            if not self.prepared and self.horizons.collector.prepare(self.rollout):
                # Only layouts matter, while the rollout is still empty.
                self._fill_pack(dict.fromkeys(self.made, self.rollout[keys.REWARDS][: self.config.horizon]))
                self.updater.prepare(self.coefficient())

    # -- saving

    def learned_state(self) -> dict[str, Any]:
        """Return the state that updates change: weights, optimizer, and the order of minibatches."""
        return {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "order_generator": self.updater.generator.get_state(),
        }

    def load_learned_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `learned_state` or `state_dict`; collected experience that has not been learned from is lost."""
        check_same("policy", state["policy"], self.policy.state_dict())
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updater.generator.set_state(state["order_generator"].cpu())
        self.fresh = False
