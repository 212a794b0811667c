"""Proximal policy optimisation, for feedforward and recurrent models alike.

Collect a horizon, estimate advantages, and pass over the data a few times with a clipped surrogate objective. A feedforward
model trains on sequences of one step, a recurrent one on longer sequences from its stored states; nothing else differs.

Source: Schulman et al. 2017, arXiv:1707.06347; dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5; the estimate of the KL
divergence: Schulman 2020, "Approximating KL divergence", k3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from rl8x import keys
from rl8x.algorithms.base import AlgorithmConfig, EnvFactory, EnvLike, GenericAlgorithmBase, draw_seed, make_env
from rl8x.algorithms.config import option, split_seed
from rl8x.algorithms.minibatches import Batch, SequencePack, chunked, minibatch_rows
from rl8x.algorithms.optimizer import OPTIMIZERS, FlatOptimizer
from rl8x.distributions import Distribution
from rl8x.envs import Env, validate
from rl8x.functional.gae import generalized_advantages
from rl8x.functional.returns import running_returns
from rl8x.functional.stats import explained_variance
from rl8x.models import Model
from rl8x.normalization import RunningMoments
from rl8x.policy import Evaluation, Policy
from rl8x.rollout import Collector, Rollout, collect_stats
from rl8x.schedules import Schedule
from rl8x.stats import Number, Stats, reduce_horizons

LOSS_METRICS: Final = (
    "losses/policy",
    "losses/vf",
    "losses/entropy",
    "losses/total",
    "monitors/kl_div",
    "monitors/clip_frac",
)
_TOTAL: Final = LOSS_METRICS.index("losses/total")
_KL: Final = LOSS_METRICS.index("monitors/kl_div")
# Transitions whose activations are kept for a backward pass at once: more than this spills out of the cache.
_CHUNK_STEPS: Final = 16384


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOConfig(AlgorithmConfig):
    """Hyperparameters of PPO; the defaults are rl8's."""

    model: str | type[Model] | Model | None = option(
        None, "Network: 'mlp' (the default), 'lstm', 'gru', a dotted path to a Model class, a class or an instance."
    )
    model_config: dict[str, Any] = option({}, "Keyword arguments of the model's class, such as hidden_sizes=[64, 64].")
    distribution: str | type[Distribution] | None = option(
        None, "Action distribution: a built-in name, a dotted path, or a class. None picks by the action space."
    )
    distribution_config: dict[str, Any] = option({}, "Keyword arguments of the distribution's class.")
    gamma: float = option(0.95, "Discount of a reward one step later.", low=0.0, high=1.0)
    gae_lambda: float = option(
        0.95, "Weight of longer estimates in the advantages: 0 is one step, 1 the whole return.", low=0.0, high=1.0
    )
    lr: float = option(1e-3, "Learning rate of the optimizer.", above=0.0)
    lr_schedule: list[list[float]] | dict[str, Any] | None = option(
        None,
        "Learning rate over transitions: [[transitions, value], ...], steps held, or a mapping with kind 'step' or 'interp'.",
    )
    optimizer: str = option("adam", "Optimizer of the weights.", choices=tuple(OPTIMIZERS))
    optimizer_config: dict[str, Any] = option({}, "Keyword arguments of the optimizer, such as eps or weight_decay.")
    clip_param: float = option(
        0.2, "How far the probability ratio may move from 1 before its gradient is cut.", above=0.0
    )
    dual_clip_param: float | None = option(
        None, "Bounds the surrogate from below by this times a negative advantage; None does not.", above=1.0
    )
    vf_clip_param: float | None = option(
        5.0, "Largest value loss of a sample; beyond it the gradient is 0. None: no limit.", above=0.0
    )
    vf_coeff: float = option(1.0, "Weight of the value loss in the total.", low=0.0)
    entropy_coeff: float = option(0.0, "Weight of the entropy bonus in the total.", low=0.0)
    entropy_coeff_schedule: list[list[float]] | dict[str, Any] | None = option(
        None, "Entropy weight over transitions, in the form of lr_schedule; it replaces entropy_coeff."
    )
    target_kl_div: float | None = option(
        None, "Updates of a step end when the KL divergence from the acting policy exceeds 1.5 times this.", above=0.0
    )
    max_grad_norm: float | None = option(
        5.0, "Largest L2 norm of the gradient over all weights. None does not clip.", above=0.0
    )
    num_sgd_iters: int = option(4, "Passes over a collect's data in one step.", low=1)
    sgd_minibatch_size: int | None = option(
        None, "Transitions of a minibatch; it must divide num_envs * horizon. None is all of them.", low=1
    )
    shuffle_minibatches: bool = option(True, "Whether each pass draws a fresh order of the data.")
    accumulate_grads: bool = option(
        False, "Whether the gradients of all minibatches of a pass make one optimizer step."
    )
    normalize_advantages: bool = option(
        True, "Whether a collect's advantages are shifted and scaled to mean 0 and std 1."
    )
    normalize_rewards: bool = option(True, "Whether rewards are divided by the running std of the discounted return.")
    normalize_observations: bool = option(
        False, "Whether the policy shifts and scales observations by running moments."
    )
    seq_len: int | None = option(
        None,
        "Steps of a training sequence; it must divide horizon. None: 1 for feedforward models, 4 for recurrent ones.",
        low=1,
    )
    seqs_per_state_reset: int | None = option(
        None,
        "A recurrent state is forgotten every so many sequences of a collect, -1 only where episodes begin. "
        "None: 8 for tasks that never end, -1 for episodic ones.",
    )

    def __post_init__(self) -> None:
        """Check what can be checked without an environment."""
        super().__post_init__()
        Schedule.make(self.lr_schedule if self.lr_schedule is not None else self.lr, name="lr_schedule")
        Schedule.make(
            self.entropy_coeff_schedule if self.entropy_coeff_schedule is not None else self.entropy_coeff,
            name="entropy_coeff_schedule",
        )
        transitions = self.num_envs * self.horizon
        if self.sgd_minibatch_size is not None and transitions % self.sgd_minibatch_size:
            raise ValueError(
                f"`sgd_minibatch_size` must divide num_envs * horizon = {transitions}; got {self.sgd_minibatch_size}. "
                f"Try {nearest_divisor(transitions, self.sgd_minibatch_size)}."
            )
        if self.seq_len is not None and self.horizon % self.seq_len:
            raise ValueError(
                f"`seq_len` must divide `horizon`; got {self.seq_len} and {self.horizon}. "
                f"Try {nearest_divisor(self.horizon, self.seq_len)}."
            )
        if self.seqs_per_state_reset == 0 or (self.seqs_per_state_reset or 0) < -1:
            raise ValueError(
                f"`seqs_per_state_reset` must be positive, or -1 for never; got {self.seqs_per_state_reset}."
            )

    def build(self, env: EnvLike, **env_kwargs: Any) -> PPO:
        """Make the environment, check that it fits, and return the algorithm.

        Args:
            env: An environment's class, factory, built-in name, or an instance.
            env_kwargs: Keyword arguments for the environment's constructor, such as `time_limit`.
        """
        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        seed = draw_seed(self.seed)
        made, factory = make_env(self, env, split_seed(seed, 4)[0], env_kwargs)
        return PPO(self, made, seed, factory)


class PPO(GenericAlgorithmBase[PPOConfig]):
    """Proximal policy optimisation on one environment. Made by `PPOConfig(...).build(env)`."""

    metrics = (
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
        _, init_seed, sample_seed, order_seed = split_seed(seed, 4)
        self.policy = self._make_policy(init_seed)
        self.seq_len = config.seq_len or (4 if self.policy.recurrent else 1)
        self.state_reset_every = self._resolve_state_reset()
        self.validate()
        generator = torch.Generator(self.device).manual_seed(sample_seed)
        self.collector = Collector(env, self.policy, generator, state_reset_every=self.state_reset_every)
        self.rollout = Rollout(config.horizon, config.num_envs, state_every=self.seq_len)
        self.pack = SequencePack(config.horizon, config.num_envs, self.seq_len)
        self.order_generator = torch.Generator(self.device).manual_seed(order_seed)
        self.lr_schedule = Schedule.make(config.lr if config.lr_schedule is None else config.lr_schedule)
        self.entropy_schedule = Schedule.make(
            config.entropy_coeff if config.entropy_coeff_schedule is None else config.entropy_coeff_schedule
        )
        self.optimizer = FlatOptimizer(
            self.policy.parameters(), config.optimizer, config.optimizer_config, lr=self.lr_schedule(0)
        )
        self.return_moments = RunningMoments(()).to(self.device)
        self.running_return = torch.zeros(config.num_envs, device=self.device)
        self.fresh = False

    @property
    def _updates_a_step(self) -> int:
        config = self.config
        minibatches = (
            config.num_envs * config.horizon // (config.sgd_minibatch_size or config.num_envs * config.horizon)
        )
        return config.num_sgd_iters * (1 if config.accumulate_grads else minibatches)

    def _make_policy(self, init_seed: int) -> Policy:
        config = self.config
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(init_seed)
            policy = Policy(
                self.env.single_observation_space,
                self.env.single_action_space,
                model=config.model,
                model_config=config.model_config,
                distribution=config.distribution,
                distribution_config=config.distribution_config,
                normalize_observations=config.normalize_observations,
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
                f"`sgd_minibatch_size` must be a multiple of `seq_len`; got {config.sgd_minibatch_size} and {self.seq_len}."
            )
        reset_every = self.state_reset_every
        if reset_every and horizon % reset_every:
            raise ValueError(
                f"`seqs_per_state_reset` * `seq_len` must divide `horizon`; got {reset_every // self.seq_len} * {self.seq_len} "
                f"and {horizon}. Try seqs_per_state_reset={nearest_divisor(horizon // self.seq_len, reset_every // self.seq_len)}."
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
    def params(self) -> dict[str, Any]:
        """Every hyperparameter by name, as it is in force."""
        schedules = {
            "lr_schedule": self.lr_schedule.to_dict(),
            "entropy_coeff_schedule": self.entropy_schedule.to_dict(),
        }
        return super().params | schedules | {"seq_len": self.seq_len, "state_reset_every": self.state_reset_every}

    # -- collecting -----------------------------------------------------------------------------------------------------

    def collect(self, *, env_config: Mapping[str, Any] | None = None) -> Stats:
        """Run the policy for a horizon, filling the buffer."""
        self._reset_if_due(env_config)
        self.collector.fill(self.rollout)
        self.counters[keys.COLLECTS] += 1
        self.counters[keys.ENV_STEPS] += self.config.num_envs * self.config.horizon
        self.fresh = True
        rollout, horizon = self.rollout, self.config.horizon
        ended = (rollout[keys.TERMINATED] | rollout[keys.TRUNCATED])[:horizon]
        return collect_stats(
            rollout[keys.REWARDS][:horizon],
            ended,
            rollout[keys.EPISODE_RETURNS][:horizon],
            rollout[keys.EPISODE_LENGTHS][:horizon],
        )

    def evaluate(self, *, env_config: Mapping[str, Any] | None = None, deterministic: bool = True) -> Stats:
        """Run `max(1, horizons_per_env_reset)` horizons in the training environment, learning nothing from them."""
        horizons: list[Mapping[str, float]] = []
        for _ in range(max(1, self.horizons_per_env_reset)):
            self._reset_if_due(env_config)
            horizons.append(self.collector.evaluate(self.config.horizon, deterministic=deterministic))
            self.counters[keys.COLLECTS] += 1
        return Stats(reduce_horizons(horizons))

    def _reset_if_due(self, env_config: Mapping[str, Any] | None) -> None:
        if self.reset_is_due():
            self.collector.reset(env_config)
            self.running_return.zero_()
        elif env_config is not None and self.horizons_per_env_reset < 0 and dict(env_config) != dict(self.env.config):
            raise ValueError(
                "This `env_config` would never apply: the environment was reset once, at the first collect "
                "(`horizons_per_env_reset` < 0). Give it to the first collect, or use horizons_per_env_reset=1."
            )

    # -- learning -------------------------------------------------------------------------------------------------------

    def step(self) -> Stats:
        """Update the policy with the last collect's data.

        Raises:
            RuntimeError: If `collect()` has not been called since the last `step()`.
        """
        if not self.fresh:
            raise RuntimeError("`step()` needs fresh experience: call `collect()` before each `step()`.")
        self.fresh = False
        with torch.no_grad():
            explained = self._prepare()
        transitions = self.counters[keys.ENV_STEPS]
        lr, entropy_coeff = self.lr_schedule(transitions), self.entropy_schedule(transitions)
        self.optimizer.lr.fill_(lr)
        totals, applied = self._update(torch.tensor(entropy_coeff, device=self.device))
        self.policy.observe(self.rollout[keys.OBS][: self.config.horizon])
        self.counters[keys.STEPS] += 1
        self.counters[keys.UPDATES] += self._updates_a_step if self.config.target_kl_div is None else int(applied)
        means = totals / applied.clamp(min=1)
        stats: dict[str, Number] = dict(zip((*LOSS_METRICS, "monitors/grad_norm"), means, strict=True))
        stats.update(
            {
                "monitors/explained_variance": explained,
                "coefficients/lr": lr,
                "coefficients/entropy": entropy_coeff,
                "coefficients/vf": self.config.vf_coeff,
            }
        )
        return Stats(stats)

    def _prepare(self) -> Tensor:
        """Estimate advantages and returns, and pack what the updates read."""
        config, rollout, horizon = self.config, self.rollout, self.config.horizon
        data = {name: rollout[name][:horizon] for name in rollout.tensors}
        rewards, ended = data[keys.REWARDS], data[keys.TERMINATED] | data[keys.TRUNCATED]
        if config.normalize_rewards:
            returns, self.running_return = running_returns(rewards, ended, self.running_return, config.gamma)
            self.return_moments.update(returns.reshape(-1))
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
        explained = explained_variance(data[keys.VALUES], targets)
        if config.normalize_advantages:
            advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
        packed = {
            name: data[name] for name in (keys.OBS, keys.STARTS, keys.ACTIONS, keys.LOGP, keys.VALID) if name in data
        }
        packed |= {keys.ADVANTAGES: advantages, keys.RETURNS: targets}
        self.pack.fill(packed, rollout.states)
        return explained

    def _update(self, entropy_coeff: Tensor) -> tuple[Tensor, Tensor]:
        """Pass over the data `num_sgd_iters` times; return sums of the statistics and the number of optimizer steps."""
        config, pack = self.config, self.pack
        size = (config.sgd_minibatch_size or config.num_envs * config.horizon) // self.seq_len
        totals = torch.zeros(len(LOSS_METRICS) + 1, device=self.device)
        # 1 while updates are applied, 0 once the policy has moved too far: a number, so that an accelerator decides alone.
        active = torch.ones((), device=self.device)
        applied = torch.zeros((), device=self.device)
        for _ in range(config.num_sgd_iters):
            minibatches = list(
                minibatch_rows(
                    pack.num_sequences,
                    size,
                    self.order_generator,
                    shuffle=config.shuffle_minibatches,
                    device=self.device,
                )
            )
            for group in [minibatches] if config.accumulate_grads else [[minibatch] for minibatch in minibatches]:
                row = self._accumulate(group, entropy_coeff)
                if config.target_kl_div is not None:
                    active = active * (row[_KL] <= 1.5 * config.target_kl_div)
                    if self.device.type == "cpu" and not active:
                        return totals, applied
                norm = self.optimizer.step(config.max_grad_norm, skip=1.0 - active if config.target_kl_div else None)
                totals += active * torch.cat((row, norm.unsqueeze(0)))
                applied += active
        return totals, applied

    def _accumulate(self, group: list[Tensor | slice], entropy_coeff: Tensor) -> Tensor:
        """Add up the gradient of some minibatches, chunk by chunk, and return the means of their statistics."""
        self.optimizer.zero_grad()
        row = torch.zeros(len(LOSS_METRICS), device=self.device)
        scale = self._scale(group)
        for rows in group:
            for chunk in chunked(rows, max(1, _CHUNK_STEPS // self.seq_len)):
                batch, state = self.pack.gather(chunk)
                evaluation = self.policy.evaluate(batch[keys.OBS], batch[keys.ACTIONS], state, batch[keys.STARTS])
                losses = ppo_losses(evaluation, batch, self.config, entropy_coeff) * scale
                losses[_TOTAL].backward()
                row += losses.detach()
        return row

    def _scale(self, group: list[Tensor | slice]) -> Tensor | float:
        """Return 1 over the number of transitions that count in some minibatches."""
        if keys.VALID in self.rollout.tensors:
            counts = [self.pack.gather(rows)[0][keys.VALID].sum() for rows in group]
            return 1.0 / torch.stack(counts).sum().clamp(min=1)
        sizes = [rows.stop - rows.start if isinstance(rows, slice) else len(rows) for rows in group]
        return 1.0 / (sum(sizes) * self.seq_len)

    # -- saving ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next collect and step depend on."""
        return {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "collector": self.collector.state_dict(),
            "order_generator": self.order_generator.get_state(),
            "return_moments": self.return_moments.state_dict(),
            "running_return": self.running_return,
            "counters": dict(self.counters),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken; what was collected but not yet learned from is not part of it."""
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.collector.load_state_dict(state["collector"])
        self.order_generator.set_state(state["order_generator"].cpu())
        self.return_moments.load_state_dict(state["return_moments"])
        self.running_return.copy_(state["running_return"])
        self.counters.update(state["counters"])
        self.fresh = False


def ppo_losses(evaluation: Evaluation, batch: Batch, config: PPOConfig, entropy_coeff: Tensor) -> Tensor:
    """Sum PPO's losses and monitors over a batch.

        r_t      = exp(logp_t - logp_old_t)
        L_policy = -min(r_t A_t, clip(r_t, 1 - eps, 1 + eps) A_t), for A_t < 0 bounded by -c A_t
        L_vf     = min(smooth_l1(v_t, R_t), vf_clip)
        L_total  = L_policy + vf_coeff L_vf - entropy_coeff H_t

    Args:
        evaluation: Log-probabilities, values and entropies under the present weights, each `[seq_len, batch]`.
        batch: Stored actions' log-probabilities, advantages, returns, and which rows count, each `[seq_len, batch]`.
        config: Clipping and weights.
        entropy_coeff: Weight of the entropy, 0-d.

    Returns:
        Sums in the order of `LOSS_METRICS`, `[6]`.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9; dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5.
    """
    advantages = batch[keys.ADVANTAGES]
    log_ratio = evaluation.logp - batch[keys.LOGP]
    ratio = log_ratio.exp()
    clip = config.clip_param
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + clip) * advantages)
    if config.dual_clip_param is not None:
        bounded = torch.maximum(surrogate, config.dual_clip_param * advantages)
        surrogate = torch.where(advantages < 0, bounded, surrogate)
    vf_loss = F.smooth_l1_loss(evaluation.values, batch[keys.RETURNS], reduction="none")
    if config.vf_clip_param is not None:
        vf_loss = vf_loss.clamp(max=config.vf_clip_param)
    total = config.vf_coeff * vf_loss - surrogate - entropy_coeff * evaluation.entropy
    with torch.no_grad():
        kl_div = ratio - 1.0 - log_ratio
        clip_frac = ((ratio - 1.0).abs() > clip).to(ratio.dtype)
    columns = torch.stack((-surrogate, vf_loss, evaluation.entropy, total, kl_div, clip_frac))
    if keys.VALID in batch:
        columns = columns * batch[keys.VALID]
    return columns.flatten(1).sum(1)


def nearest_divisor(number: int, wanted: int) -> int:
    """Find the divisor of a number that is nearest to the one wanted."""
    divisors = {size for low in range(1, int(number**0.5) + 1) if number % low == 0 for size in (low, number // low)}
    return min(divisors, key=lambda divisor: (abs(divisor - wanted), divisor))
