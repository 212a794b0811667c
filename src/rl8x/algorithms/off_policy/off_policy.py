"""Algorithms that learn from a replay: collect a little, append it, and make the updates that are due for it.

One step of the trainer is

    collect   `horizon` steps of each copy; rows with n-step returns go to the replay, unless a number is not finite
    due       owed += updates_per_sample * samples;  K = floor(owed);  owed -= K
    sample    K batches at once, with all that is drawn for them
    loop      K updates, without Python between them

An algorithm is a subclass that says what acts (`make_policy`), what is trained (`make_nets`), what one update does
(`update`: its paper's box), and how it explores (`explore`).
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar, Final, TypeVar

import torch
from torch import Tensor

from rl8x import keys
from rl8x.algorithms.base import EnvFactory
from rl8x.algorithms.memory_check import available_bytes, check_replay, check_training
from rl8x.algorithms.off_policy.config import OffPolicyConfig
from rl8x.algorithms.off_policy.nets import Net, Nets
from rl8x.algorithms.off_policy.updates import WEIGHTS, Batch, Figures, Updater, block_size
from rl8x.algorithms.online import OnlineAlgorithm, ResetSchedule
from rl8x.algorithms.optimizer import make_rule, updates_not_finite
from rl8x.algorithms.seeds import part_seed
from rl8x.envs import Env, validate
from rl8x.envs.base import Step
from rl8x.policy import Act, Policy
from rl8x.replay.nstep import NStep
from rl8x.replay.prioritized import PrioritizedReplay
from rl8x.replay.ring import Replay
from rl8x.rollouts.buffer import Rollout
from rl8x.rollouts.collector import Collector
from rl8x.rollouts.statistics import Number, Stats, gathered_not_finite, locate_non_finite
from rl8x.rollouts.step import Cursor, experience
from rl8x.trees import flatten_tree, tree_map, unflatten_tree

OffPolicyConfigT = TypeVar("OffPolicyConfigT", bound=OffPolicyConfig)

SHARE: Final = "target_share"
"""Of an update's batch: the share of the way that the targets go after it, 0-d; 0 where they stay."""
LR: Final = "coefficients/lr"
REPLAY_SIZE: Final = "replay/size"
# Updates after which priorities are written, at the latest: those of a block are drawn before it.
_PRIORITIZED_BLOCK: Final = 16
# Of an eager step that is small: of the environments, and of an update.
_SECONDS_PER_ENV_STEP: Final = 3e-4
_SECONDS_PER_UPDATE: Final = 1e-3
# What is multiplied for a row and a weight: forward, backward by weights and activations, and a target's forward.
_MULTIPLIED: Final = 8


def transition(cursor: Cursor, act: Act, step: Step) -> dict[str, Tensor]:
    """Name what is stored of a step, each `[num_envs, ...]`: with the observation it led to, before any reset."""
    return experience(cursor, act, step) | flatten_tree(keys.NEXT_OBS, step.final_obs)


def observed(batch: Batch, key: str) -> tuple[Any, dict[str, Tensor], Tensor]:
    """Return a batch's observations as a policy's `forward` takes them: sequences of one step, `[1, batch_size, ...]`.

    Args:
        batch: Has observations under `key` or its parts, `[batch_size, ...]`.
        key: `keys.OBS` or `keys.NEXT_OBS`.
    """
    obs = tree_map(lambda part: part.unsqueeze(0), unflatten_tree(key, batch))
    returns = batch[keys.RETURNS]
    return obs, {}, torch.zeros((1, len(returns)), dtype=torch.bool, device=returns.device)


class OffPolicyAlgorithm(OnlineAlgorithm[OffPolicyConfigT]):
    """Learns from a replay of what its policy did in an environment.

    Attributes:
        numbers: What `update` measures, by the names of metrics; norms of gradients end in `grad_norm`.
        nets: The networks of an update.
        rollout: The last collect.
        replay: What is learned from.
        updates_owed: Updates that are due, with the fraction of one that is carried over.
    """

    numbers: ClassVar[tuple[str, ...]]
    metrics: tuple[str, ...] = (LR, REPLAY_SIZE)

    def __init__(self, config: OffPolicyConfigT, env: Env, seed: int, env_factory: EnvFactory | None = None) -> None:
        super().__init__(config, env, seed, env_factory)
        self.resets = ResetSchedule(config.horizons_per_env_reset or -1)
        self.metrics = (*self.numbers, *self.metrics)
        self.check_spaces()
        validate(env)
        self.generator = self._generator("minibatches")
        self._make_networks()
        if config.precision == "bf16":
            self.policy.autocast = self.execution.autocast
        self._check_fits()
        self.collector = Collector(env, self.policy, self._generator("sampling"), self.execution, slot=transition)
        self.rollout = Rollout(config.horizon, config.num_envs)
        self.nstep = NStep(config.n_step, config.gamma)
        self.replay = self._make_replay()
        self.lr_schedule, self.beta_schedule = config.schedule("lr"), config.schedule("priority_beta")
        self.updates_owed = Fraction(0)
        self.updater = Updater(self.update, self.nets, self.numbers, self.execution, self._made_of())
        self._prepared = False

    # -- what an algorithm says

    def check_spaces(self) -> None:
        """Raise `ValueError` where the environment's spaces do not fit, naming the algorithm that does."""

    @abstractmethod
    def make_policy(self) -> Policy:
        """Return what acts, on any device."""

    @abstractmethod
    def make_nets(self) -> None:
        """Add what is trained, and its targets, to `nets`, by `add_net` and `nets.add_target`."""

    @abstractmethod
    def update(self, nets: Mapping[str, Net], batch: Batch) -> Figures:
        """Learn from one batch: a pure function of tensors, but that networks change in place.

        Args:
            nets: The networks of `make_nets`, by name.
            batch: `obs`, `actions` and `next_obs` (or their parts), `returns` and `discounts`, `[batch_size, ...]`
                each, and what `draw` gave for this update. A target is `returns + discounts * V(next_obs)`.

        Returns:
            What `numbers` names, and the errors of the rows where the algorithm knows them.
        """

    def draw(self, first: int, count: int) -> dict[str, Tensor]:
        """Draw what updates read beside their batches, such as noise and flags.

        Args:
            first: Updates that were made before.
            count: Updates that it is for.

        Returns:
            By a name of the algorithm's own, `[count, ...]` each.
        """
        interval, tau = self.config.target_interval, self.config.tau
        shares = [tau if (first + i) % interval == 0 else 0.0 for i in range(1, count + 1)]
        return {SHARE: torch.tensor(shares, device=self.device)}

    def explore(self, *, warms_up: bool) -> dict[str, Number]:
        """Set how the next collect explores; return what of it is a metric.

        Args:
            warms_up: Whether actions are to be random.
        """
        return {}

    # -- building

    def add_net(self, name: str, module: torch.nn.Module) -> None:
        """Add a network that is trained with the config's optimizer."""
        config = self.config
        rule = make_rule(config.optimizer, config.optimizer_config)
        module = module.to(self.device)
        self.nets.add(name, module, rule, lr=config.schedule("lr")(0), max_grad_norm=config.max_grad_norm)

    def _make_networks(self) -> None:
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(part_seed(self.seed, "weights"))
            self.policy = self.make_policy().to(self.device)
            if self.policy.recurrent:
                name, model = type(self).__name__, type(self.policy.model).__name__
                raise ValueError(f"{name} trains feedforward models; {model} is recurrent. Use PPO, or another model.")
            self.nets = Nets(self.policy)
            self.make_nets()

    def _check_fits(self) -> None:
        config, env = self.config, self.env
        spaces = (env.single_observation_space, env.single_action_space)
        check_training(config.num_envs, config.horizon, self.device, config.rollout_bytes(*spaces), policy=self.policy)
        if config.buffer_path is None:
            check_replay(config.buffer_size, self.device, config.replay_bytes(*spaces))

    def _make_replay(self) -> Replay:
        config = self.config
        options: Any = {"path": config.buffer_path, "available": available_bytes}
        if not config.prioritized:
            return Replay(config.buffer_size, self.device, **options)
        return PrioritizedReplay(config.buffer_size, self.device, alpha=config.priority_alpha, **options)

    def _generator(self, part: str) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(part_seed(self.seed, part))

    def _made_of(self) -> Sequence[object]:
        """Return what decides an update; seeds differ where programs do not."""
        config = {name: value for name, value in vars(self.config).items() if name != "seed"}
        return [type(self), config, self.policy]

    # -- collecting

    @property
    def buffer(self) -> Any:
        """The last rollout as a TensorDict of batch size `[num_envs, horizon + 1]`, sharing its memory."""
        return self.rollout.as_tensordict()

    @property
    def source(self) -> Replay:
        """What is learned from."""
        return self.replay

    def collect(self, *, env_config: Mapping[str, Any] | None = None) -> Stats:
        """Run the policy for a horizon and append what is complete of it to the replay."""
        warms_up = self.counters[keys.ENV_STEPS] < self.config.warmup_steps
        explored = self.explore(warms_up=warms_up)
        self.reset_if_due(env_config)
        if self.collector.cursor is None:
            self.nstep.cut()
        self.collector.fill(self.rollout)
        before = self.counters[keys.ENV_STEPS]
        stats = self.finish_collect(self.rollout)
        flags = gathered_not_finite(self.rollout.tensors)
        self._append(flags, samples=0 if warms_up else self.counters[keys.ENV_STEPS] - before)
        return Stats.merge(stats, Stats({**explored, **flags}))

    def _append(self, flags: Mapping[str, Tensor], samples: int) -> None:
        """Append a horizon to the replay; one with a number that is not finite is never learned from."""
        # The one value that the host waits for off the CPU: how many rows there are is the host's to know.
        if torch.stack([*flags.values()]).any():
            self.nstep.cut()
            return
        self.replay.append(self.nstep.rows(self.rollout.tensors, self.config.horizon), checked=True)
        self.updates_owed += self.config.update_ratio * samples
        if self.policy.obs_moments is not None:
            horizon, valid = self.config.horizon, self.rollout.tensors.get(keys.VALID)
            obs = tree_map(lambda part: part[:horizon], self.rollout.tree(keys.OBS))
            self.policy.observe(obs, None if valid is None else valid[:horizon])

    def reset_if_due(self, env_config: Mapping[str, Any] | None) -> bool:
        """Reset the environment where the schedule says so; no return reaches across it."""
        is_reset = super().reset_if_due(env_config)
        if is_reset:
            self.nstep.cut()
        return is_reset

    def evaluate(self, *, env_config: Mapping[str, Any] | None = None, deterministic: bool = True) -> Stats:
        """Play in the training environment; see `OnlineAlgorithm.evaluate`. No return reaches across it."""
        self.nstep.cut()
        return super().evaluate(env_config=env_config, deterministic=deterministic)

    def discard_experience(self) -> None:
        """Begin new episodes with the next collect; a horizon that was not finite never came to the replay."""
        super().discard_experience()
        self.nstep.cut()

    def locate_non_finite(self) -> dict[str, dict[str, Any]]:
        """Say where in the last rollout numbers are not finite, by quantity; see `statistics.locate_non_finite`."""
        return locate_non_finite(self.rollout.tensors)

    # -- learning

    def step(self) -> Stats:
        """Make the updates that are due; a row of a step without any has no losses."""
        lr = self.lr_schedule(self.counters[self.clock])
        self.nets.set_lr(lr)
        self.counters[keys.STEPS] += 1
        rows = []
        with self.execution.threads.for_work(self._work):
            self._prepare()
            for size in self._due_blocks():
                rows.append(self._update_block(size))
        return Stats({LR: lr, REPLAY_SIZE: self.replay.size, **(self._measured(torch.cat(rows)) if rows else {})})

    def _due_blocks(self) -> list[int]:
        """Take the updates that are due off what is owed, in the sizes of the programs; without any row all wait."""
        due = int(self.updates_owed) if self.replay.size else 0
        self.updates_owed -= due
        size = self.block_size
        return [size] * (due // size) + [1] * (due % size)

    @functools.cached_property
    def block_size(self) -> int:
        """How many updates are one program; see `updates.block_size`."""
        config, env = self.config, self.env
        row = config.replay_bytes(env.single_observation_space, env.single_action_space) // config.buffer_size
        most = _PRIORITIZED_BLOCK if config.prioritized else None
        return block_size(float(config.updates_per_step), config.batch_size * row, masks=not env.capturable, most=most)

    def _update_block(self, size: int) -> Tensor:
        """Sample batches and make an update of each; return what they measured, `[size, numbers]`."""
        index = self.replay.sample(size, self.config.batch_size, self.generator)
        rows, errors = self.updater.run(self._items(index))
        self.counters[keys.UPDATES] += size
        if isinstance(self.replay, PrioritizedReplay):
            assert errors is not None, f"{type(self).__name__} gives no errors to draw by"
            self.replay.update(index, errors)
        return rows

    def _items(self, index: Tensor) -> dict[str, Tensor]:
        """Return what updates read, `[updates, ...]` each, given where the rows of their batches are."""
        items = self.replay.gather(index) | self.draw(self.counters[keys.UPDATES], len(index))
        if isinstance(self.replay, PrioritizedReplay):
            items[WEIGHTS] = self.replay.weights(index, self.beta_schedule(self.counters[self.clock]))
        return items

    def _measured(self, rows: Tensor) -> dict[str, Number]:
        """Average what the updates of a step measured, `[updates, numbers]`, and look for what is not finite."""
        columns = dict(zip(self.numbers, rows.unbind(1), strict=True))
        norms = torch.stack([column for name, column in columns.items() if name.endswith("grad_norm")], 1)
        losses = torch.stack([column for name, column in columns.items() if not name.endswith("grad_norm")], 1)
        means: dict[str, Number] = dict(zip(self.numbers, rows.mean(0), strict=True))
        vectors = [tensor for tensor in self.nets.state if tensor.numel() > 1]
        return {**means, **updates_not_finite(losses, norms, vectors)}

    def _prepare(self) -> None:
        """Have the updates' programs compiled while transitions are gathered, or updates made eagerly."""
        execution = self.execution
        ahead = execution.prepares or (execution.mode == "compile" and self.device.type == "cpu")
        if self._prepared or not ahead or not self.replay.size:
            return
        self._prepared = True
        sizes = {self.block_size} if self.config.updates_per_step % self.block_size == 0 else {self.block_size, 1}
        # What is drawn only shows layouts: the first updates draw the same as without it.
        drawn_from = self.generator.get_state()
        with execution.ahead():
            for size in sizes:
                index = torch.zeros((size, self.config.batch_size), dtype=torch.int64, device=self.device)
                self.updater.prepare(self._items(index))
        self.generator.set_state(drawn_from)

    @property
    def _work(self) -> int:
        """Rows times weights of one update."""
        return self.config.batch_size * sum(len(each.optimizer.weights) for each in self.nets.trained.values())

    @property
    def seconds_per_step(self) -> float:
        """Estimate of an eager step: its operations, and what it multiplies at 100 GFLOP/s a thread; see PPO's."""
        updates = float(self.config.updates_per_step)
        multiplied = updates * self._work * _MULTIPLIED / (1e11 * torch.get_num_threads())
        return self.config.horizon * _SECONDS_PER_ENV_STEP + updates * _SECONDS_PER_UPDATE + multiplied

    # -- what is recorded and saved

    @property
    def params(self) -> dict[str, Any]:
        """Every hyperparameter by name, as it is in force."""
        schedules = {"lr_schedule": self.lr_schedule.to_dict(), "priority_beta_schedule": self.beta_schedule.to_dict()}
        return super().params | schedules

    def learned_state(self) -> dict[str, Any]:
        """Return what an update changes: weights, targets, optimizers, running moments, and what draws batches."""
        return {
            "policy": self.policy.state_dict(),
            "nets": self.nets.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load_learned_state(self, state: Mapping[str, Any]) -> None:
        """Go back to what `learned_state` or `state_dict` returned; the replay stays."""
        self.policy.load_state_dict(state["policy"])
        self.nets.load_state_dict(state["nets"])
        self.generator.set_state(state["generator"].cpu())

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next collect and step depend on."""
        owed = [self.updates_owed.numerator, self.updates_owed.denominator]
        replay = {"replay": self.replay.state_dict(), "n_step": self.nstep.state_dict(), "updates_owed": owed}
        return {**super().state_dict(), **replay}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken, bit for bit."""
        super().load_state_dict(state)
        self.replay.load_state_dict(state["replay"])
        self.nstep.load_state_dict(state["n_step"])
        self.updates_owed = Fraction(*state["updates_owed"])
