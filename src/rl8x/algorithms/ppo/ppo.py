"""Proximal policy optimisation, for feedforward and recurrent models alike.

Collect a horizon, estimate advantages, and pass over the data a few times with a clipped surrogate objective. A
feedforward model trains on sequences of one step, a recurrent one on longer sequences from its stored states; nothing
else differs.

Source: Schulman et al. 2017, arXiv:1707.06347; dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5; the estimate of the
KL divergence: Schulman 2020, "Approximating KL divergence", k3.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from rl8x import keys
from rl8x.algorithms.base import EnvFactory
from rl8x.algorithms.hyperparameters import nearest_divisor
from rl8x.algorithms.memory_check import check_training
from rl8x.algorithms.online import OnlineAlgorithm
from rl8x.algorithms.optimizer import FlatOptimizer, make_rule, updates_not_finite
from rl8x.algorithms.ppo.config import PPOConfig
from rl8x.algorithms.ppo.losses import KL_DIV, LOSS_METRICS
from rl8x.algorithms.ppo.minibatches import Batch, SequencePack
from rl8x.algorithms.ppo.update import Updater
from rl8x.algorithms.seeds import part_seed
from rl8x.envs import Env, validate
from rl8x.functional import RunningMoments, explained_variance, generalized_advantages, moments, running_returns
from rl8x.policy import Policy
from rl8x.rollouts.buffer import Rollout
from rl8x.rollouts.collector import Collector
from rl8x.rollouts.statistics import Number, Stats, gathered_not_finite, locate_non_finite
from rl8x.rollouts.step import actor_critic
from rl8x.schedules import Schedule
from rl8x.trees import tree_map

# Of what an update returns: the monitors that are measured before its step, between the losses and the gradient's norm.
_MONITORS: Final = slice(KL_DIV, len(LOSS_METRICS))
# Of an eager step that is small: of the environments, and of the optimizer.
_SECONDS_PER_ENV_STEP: Final = 3e-4
_SECONDS_PER_UPDATE: Final = 1e-3
_REFUSED: Final = "monitors/refused_updates"

# Steps in a row with most of the critic's samples silenced before a warning: the first ones are no sign yet.
_SILENCED_STEPS: Final = 10


class PPO(OnlineAlgorithm[PPOConfig], config=PPOConfig):
    """Proximal policy optimisation on one environment. Made by `PPOConfig(...).build(env)`."""

    metrics: tuple[str, ...] = (
        *LOSS_METRICS,
        "monitors/grad_norm",
        "monitors/explained_variance",
        "coefficients/lr",
        "coefficients/entropy",
        "coefficients/vf",
    )

    def __init__(self, config: PPOConfig, env: Env, seed: int, env_factory: EnvFactory | None = None) -> None:
        super().__init__(config, env, seed, env_factory)
        validate(env)
        self.policy = self._make_policy()
        if config.precision == "bf16":
            self.policy.autocast = self.execution.autocast
        self.seq_len = config.seq_len or (4 if self.policy.recurrent else 1)
        self.state_reset_every = self._resolve_state_reset()
        self.validate()
        spaces = (env.single_observation_space, env.single_action_space)
        need = config.rollout_bytes(*spaces)
        check_training(config.num_envs, config.horizon, self.device, need, policy=self.policy, seq_len=self.seq_len)
        self.collector = Collector(
            env,
            self.policy,
            self._generator("sampling"),
            self.execution,
            slot=actor_critic,
            bootstrap=self.policy.values,
            state_reset_every=self.state_reset_every,
        )
        self.rollout = Rollout(config.horizon, config.num_envs, state_every=self.seq_len)
        self.pack = SequencePack(config.horizon, config.num_envs, self.seq_len)
        self.lr_schedule = Schedule.make(config.lr if config.lr_schedule is None else config.lr_schedule)
        self.entropy_schedule = Schedule.make(
            config.entropy_coeff if config.entropy_coeff_schedule is None else config.entropy_coeff_schedule
        )
        rule = make_rule(config.optimizer, config.optimizer_config)
        self.optimizer = FlatOptimizer(self.policy.named_parameters(), rule, lr=self.lr_schedule(0))
        self.updater = Updater(
            self.policy,
            config,
            self.optimizer,
            self.pack,
            self.execution,
            self._generator("minibatches"),
        )
        self.return_moments = RunningMoments(()).to(self.device)
        self.running_return = torch.zeros(config.num_envs, device=self.device)
        if config.target_kl_div is not None:
            self.metrics = (*self.metrics, _REFUSED)
        self.fresh = False
        self._silenced_steps = 0
        self._told_silenced = False

    def _generator(self, part: str) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(part_seed(self.seed, part))

    def _make_policy(self) -> Policy:
        config = self.config
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(part_seed(self.seed, "weights"))
            policy = Policy(
                self.env.single_observation_space,
                self.env.single_action_space,
                model=config.model,
                model_config=config.model_config,
                distribution=config.distribution,
                distribution_config=config.distribution_config,
                normalize_observations=config.normalize_observations,
                normalize_values=config.normalize_values,
            )
        return policy.to(self.device)

    def _resolve_state_reset(self) -> int:
        if not self.policy.recurrent:
            return 0
        sequences = self.config.seqs_per_state_reset
        if sequences is None:
            sequences = -1 if self.env.episodic else min(8, self.config.horizon // self.seq_len)
        return 0 if sequences < 0 else sequences * self.seq_len

    def validate(self) -> None:
        """Raise `ValueError` where config, environment and policy do not fit together."""
        config, horizon = self.config, self.config.horizon
        if horizon % self.seq_len:
            raise ValueError(
                f"`seq_len` must divide `horizon`; got {self.seq_len} and {horizon}. "
                f"Try {nearest_divisor(horizon, self.seq_len)}."
            )
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
                    f"{type(self.env).__name__} allows `{name}` up to {limit}; got {getattr(config, name)}."
                )

    @property
    def buffer(self) -> Any:
        """The rollout as a TensorDict of batch size `[num_envs, horizon + 1]`, sharing its memory."""
        return self.rollout.as_tensordict()

    @property
    def seconds_per_step(self) -> float:
        """Estimate of an eager step: its operations, and what it multiplies at 100 GFLOP/s a thread.

        An operation costs microseconds however small its tensors are: some 50 of them an environment step, 150 a
        gradient and an update, as measured on an Intel Xeon and an AMD Zen 5 to within a factor of two.
        """
        config = self.config
        transitions = config.num_envs * config.horizon
        weights = len(self.optimizer.weights)
        multiplied = transitions * weights * (2 + 6 * config.num_sgd_iters) / (1e11 * torch.get_num_threads())
        return config.horizon * _SECONDS_PER_ENV_STEP + config.updates_per_step * _SECONDS_PER_UPDATE + multiplied

    @property
    def params(self) -> dict[str, Any]:
        """Every hyperparameter by name, as it is in force."""
        schedules = {
            "lr_schedule": self.lr_schedule.to_dict(),
            "entropy_coeff_schedule": self.entropy_schedule.to_dict(),
        }
        return (
            super().params
            | schedules
            | {
                "seq_len": self.seq_len,
            }
        )

    def locate_non_finite(self) -> dict[str, dict[str, Any]]:
        """Say where in the rollout numbers are not finite, by quantity; see `statistics.locate_non_finite`."""
        return locate_non_finite(self.rollout.tensors)

    # -- collecting

    def collect(self, *, env_config: Mapping[str, Any] | None = None) -> Stats:
        """Run the policy for a horizon, filling the buffer."""
        self.reset_if_due(env_config)
        waits = self.execution.mode == "compile" and self.device.type == "cpu" and not self.updater.prepared
        self.collector.fill(self.rollout, self._prepare_update if waits else None)
        self.fresh = True
        return self.finish_collect(self.rollout)

    def reset_if_due(self, env_config: Mapping[str, Any] | None) -> bool:
        """Reset the environment where the schedule says so, and with it the return that scales rewards."""
        is_reset = super().reset_if_due(env_config)
        if is_reset:
            self.running_return.zero_()
        return is_reset

    # -- learning

    def step(self) -> Stats:
        """Update the policy with the last collect's data.

        Raises:
            RuntimeError: If `collect()` has not been called since the last `step()`.
        """
        if not self.fresh:
            raise RuntimeError("`step()` needs fresh experience: call `collect()` before each `step()`.")
        self.fresh = False
        with torch.no_grad():
            (explained,) = self._prepare_program()
        now = self.counters[self.clock]
        lr, entropy_coeff = self.lr_schedule(now), self.entropy_schedule(now)
        self.optimizer.lr.fill_(lr)
        rows, applied = self.updater.run(entropy_coeff)
        self._observe()
        self.counters[keys.STEPS] += 1
        self.counters[keys.UPDATES] += len(rows) if self.config.target_kl_div is None else int(applied.sum())
        stats = self._update_stats(rows, applied)
        stats.update(
            {
                "monitors/explained_variance": explained,
                "coefficients/lr": lr,
                "coefficients/entropy": entropy_coeff,
                "coefficients/vf": self.config.vf_coeff,
                **gathered_not_finite(self.rollout.tensors),
                **updates_not_finite(rows[:, :-1], rows[:, -1:], [self.optimizer.weights]),
            }
        )
        return Stats(stats)

    def _update_stats(self, rows: Tensor, applied: Tensor) -> dict[str, Number]:
        """Average over the updates of a step what `Updater.run` returned of each.

        Losses and the gradient's norm are those of the updates that were applied. What is measured before an update's
        step counts also where that ended the step: leaving it out would hide by how much the limit was exceeded.
        """
        measured = torch.cat((torch.ones_like(applied[:1]), applied[:-1]))
        counted = applied.unsqueeze(1).repeat(1, rows.shape[1])
        counted[:, _MONITORS] = measured.unsqueeze(1)
        means = torch.where(counted, rows, 0.0).sum(0) / counted.sum(0).clamp(min=1)
        stats: dict[str, Number] = dict(zip((*LOSS_METRICS, "monitors/grad_norm"), means, strict=True))
        if self.config.target_kl_div is not None:
            stats[_REFUSED] = self.config.updates_per_step - applied.sum()
        return stats

    def watch(self, row: Mapping[str, float]) -> None:
        """Warn once where the clipping of the value loss keeps the critic from learning for many steps in a row."""
        config = self.config
        silenced = row["monitors/vf_clip_frac"] > 0.5
        self._silenced_steps = self._silenced_steps + 1 if silenced else 0
        if self._silenced_steps < _SILENCED_STEPS or self._told_silenced:
            return
        self._told_silenced = True
        others = {"normalize_values=True": config.normalize_values, "normalize_rewards=True": config.normalize_rewards}
        remedies = " or ".join(["vf_clip_param=None", *[remedy for remedy, is_set in others.items() if not is_set]])
        warnings.warn(
            f"The critic learns nothing from {row['monitors/vf_clip_frac']:.0%} of its samples, and from less than "
            f"half for {_SILENCED_STEPS} steps: their loss is above vf_clip_param={config.vf_clip_param:g}, where its "
            f"gradient is 0 (monitors/vf_clip_frac). Use {remedies}.",
            RuntimeWarning,
            stacklevel=2,
        )

    def _observe(self) -> None:
        """Let the observation normaliser learn from the horizon."""
        if self.policy.obs_moments is None:
            return
        horizon, valid = self.config.horizon, self.rollout.tensors.get(keys.VALID)
        obs = tree_map(lambda part: part[:horizon], self.rollout.tree(keys.OBS))
        self.policy.observe(obs, None if valid is None else valid[:horizon])

    @functools.cached_property
    def _prepare_program(self) -> Callable[[], Sequence[Tensor]]:
        """Return `_prepare`, captured where kernels are: it reads and writes memory that stays where it is."""
        if self.execution.mode != "graph":
            return lambda: [self._prepare()]
        values = self.policy.value_moments
        learned = [*self.return_moments.buffers(), *([] if values is None else values.buffers())]
        fixed = [self.running_return, *learned]
        program = self.execution.program(lambda *_: [self._prepare()], len(fixed))
        return lambda: program(*fixed)

    def _prepare(self) -> Tensor:
        """Estimate advantages and returns, and pack what the updates read; values' targets in the model's units."""
        config, rollout, horizon = self.config, self.rollout, self.config.horizon
        data = {name: rollout[name][:horizon] for name in rollout.tensors}
        rewards, ended = data[keys.REWARDS], data[keys.TERMINATED] | data[keys.TRUNCATED]
        if config.normalize_rewards:
            returns, carry = running_returns(rewards, ended, self.running_return, config.gamma)
            self.running_return.copy_(carry)
            self.return_moments.update(returns, data.get(keys.VALID))
            rewards = self.return_moments.normalize(rewards, center=False)
        advantages, targets = generalized_advantages(
            rewards,
            rollout[keys.VALUES],
            data[keys.FINAL_VALUES],
            data[keys.TERMINATED],
            data[keys.TRUNCATED],
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
        )
        valid = data.get(keys.VALID)
        explained = explained_variance(data[keys.VALUES], targets, valid)
        if config.normalize_advantages:
            _, mean, var = moments(advantages.reshape(-1), None if valid is None else valid.reshape(-1))
            advantages = (advantages - mean.to(advantages.dtype)) / (var.sqrt().to(advantages.dtype) + 1e-8)
        if self.policy.value_moments is not None:
            # Before the update, so that it and the next collect have the same units.
            self.policy.value_moments.update(targets, valid)
            targets = self.policy.value_moments.normalize(targets)
        self._fill_pack(advantages, targets)
        return explained

    def _fill_pack(self, advantages: Tensor, targets: Tensor) -> None:
        """Pack what the updates read; advantages and targets are `[horizon, num_envs]`."""
        read = (keys.OBS, keys.STARTS, keys.ACTIONS, keys.LOGP, keys.VALID)
        horizon = self.config.horizon
        packed: Batch = {
            name: value[:horizon] for name, value in self.rollout.tensors.items() if name.split("/")[0] in read
        }
        packed[keys.ADVANTAGES], packed[keys.RETURNS] = advantages, targets
        self.pack.fill(packed, self.rollout.states)

    def _prepare_update(self) -> None:
        """Have the update's programs compiled beside those of the rollout, which is empty: only layouts count."""
        empty = self.rollout[keys.REWARDS][: self.config.horizon]
        self._fill_pack(empty, empty)
        self.updater.prepare(self.entropy_schedule(self.counters[self.clock]))

    # -- saving

    def learned_state(self) -> dict[str, Any]:
        """Return what an update changes: weights, optimizer, running moments, and the order of minibatches."""
        return {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "order_generator": self.updater.generator.get_state(),
            "return_moments": self.return_moments.state_dict(),
            "running_return": self.running_return,
        }

    def load_learned_state(self, state: Mapping[str, Any]) -> None:
        """Go back to what `learned_state` or `state_dict` returned; what is collected but not learned from is lost."""
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updater.generator.set_state(state["order_generator"].cpu())
        self.return_moments.load_state_dict(state["return_moments"])
        self.running_return.copy_(state["running_return"])
        self.fresh = False
