"""Proximal policy optimisation, for feedforward and recurrent models alike.

Collect a horizon, estimate advantages, and pass over the data a few times with a clipped surrogate objective.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from rl8x import keys
from rl8x.algorithms.base import EnvFactory
from rl8x.algorithms.config import PolicyConfig
from rl8x.algorithms.hyperparameters import Default, option
from rl8x.algorithms.memory_check import Space, slot_bytes
from rl8x.algorithms.on_policy import Objective, OnPolicyAlgorithm, OnPolicyConfig, SequenceBatch
from rl8x.algorithms.optimizer import AdaptiveRate
from rl8x.distributed import ranks
from rl8x.envs import Env
from rl8x.envs.base import Step
from rl8x.functional import RunningMoments, explained_variance, generalized_advantages, pooled_moments, running_returns
from rl8x.models import State
from rl8x.models.base import TrainingEffects
from rl8x.policy import Act, Evaluation, Policy
from rl8x.rollouts.statistics import Number, Stats
from rl8x.rollouts.step import Cursor, Slot, actor_critic
from rl8x.schedules import Schedule
from rl8x.trees import Tree

PPO_LOSS_METRICS: Final = (
    "losses/policy",
    "losses/vf",
    "losses/entropy",
    "losses/total",
    "monitors/kl_div",
    "monitors/clip_frac",
    "monitors/vf_clip_frac",
)
TOTAL: Final = "losses/total"
KL_DIV: Final = "monitors/kl_div"

# Default arguments of the model "mlp".
SMALL: Final = {"hidden_sizes": (64, 64)}

# Consecutive steps in which clipping removes most of the critic's gradient before a warning; a few are normal.
_SILENCED_STEPS: Final = 10


def with_final_obs(cursor: Cursor, act: Act, step: Step) -> dict[str, Tree]:
    """Return the tensors of `actor_critic`, `[num_envs, ...]` each, and the observation before any reset."""
    return actor_critic(cursor, act, step) | {keys.FINAL_OBS: step.final_obs}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOConfig(
    OnPolicyConfig,
    PolicyConfig,
    defaults={
        "horizon": 64,
        "max_grad_norm": 0.5,
        "num_sgd_iters": 10,
        "sgd_minibatch_size": Default(256),
        "normalize_observations": True,
    },
):
    """Hyperparameters of PPO, with defaults that learn the classic tasks on a CPU; `rl8` and `gpu` have others.

    Source: Schulman et al. 2017, arXiv:1707.06347; `dual_clip_param`: Ye et al. 2020, arXiv:1912.09729, eq. 5.
    """

    model_config: dict[str, Any] = option(
        {},
        "Keyword arguments of the model class. 'mlp' has hidden_sizes=[64, 64] by default; separate=true gives each "
        "agent of an environment weights of its own.",
    )
    lr: float = option(
        1e-3, "Learning rate of the optimizer: the first one, unless lr_schedule is None (none: constant).", above=0.0
    )
    lr_schedule: list[list[float]] | dict[str, Any] | None = option(
        {"kind": "adaptive"},
        "{kind: adaptive, kl: 0.01, low: 1e-5, high: 3e-3}: the rate begins at lr, falls where a minibatch's KL "
        "divergence from the acting policy is above twice kl, and rises where it is below half of it. Or the rate over "
        "transitions: [[transitions, value], ...], constant between points, or {kind: interp, points: [...]}, linear "
        "between them. None: lr, constant.",
    )
    gamma: float = option(0.99, "Discount factor of future rewards.", low=0.0, high=1.0)
    gae_lambda: float = option(
        0.95,
        "Lambda of generalised advantage estimation: 0 is the one-step TD error, 1 the Monte Carlo return "
        "(arXiv:1506.02438).",
        low=0.0,
        high=1.0,
    )
    clip_param: float = option(
        0.2, "Clipping range of the probability ratio: [1 - clip_param, 1 + clip_param].", above=0.0
    )
    dual_clip_param: float | None = option(
        None,
        "Dual-clip PPO: for negative advantages A the surrogate is at least this times A (arXiv:1912.09729). None: "
        "off.",
        above=1.0,
    )
    vf_clip_param: float | None = option(
        5.0, "Each sample's value loss is clipped to this; its gradient is 0 beyond. None: no clipping.", above=0.0
    )
    vf_coeff: float = option(1.0, "Weight of the value loss.", low=0.0)
    entropy_coeff: float = option(0.0, "Weight of the entropy bonus.", low=0.0)
    entropy_coeff_schedule: list[list[float]] | dict[str, Any] | None = option(
        None, "Entropy weight over transitions, in the form of lr_schedule; replaces entropy_coeff."
    )
    target_kl_div: float | None = option(
        None,
        "Early stopping: a step's updates end once the KL divergence from the acting policy exceeds 1.5 times this. "
        "None: no limit.",
        above=0.0,
    )
    normalize_advantages: bool = option(
        True, "Whether to normalise each rollout's advantages to mean 0 and standard deviation 1."
    )
    recompute_advantages: bool = option(
        False,
        "Whether to estimate advantages and targets of values anew before each epoch but the first, with the values of "
        "the present critic (arXiv:2006.05990). Observations before a reset are kept for it.",
        idle=lambda config: "num_sgd_iters=1 has no second epoch" if config.num_sgd_iters == 1 else None,
    )
    normalize_rewards: bool = option(
        True, "Whether to divide rewards by the running standard deviation of the discounted return."
    )
    normalize_values: bool = option(
        False,
        "Whether the critic predicts values normalised by the running moments of their targets.",
    )

    separates: ClassVar[bool] = True

    @classmethod
    def rl8(cls, **given: Any) -> Self:
        """Return the config with rl8's defaults, 8,192 copies x 32 steps in one batch; `given` values replace them."""
        return cls.preset("rl8", **given)

    @classmethod
    def gpu(cls, **given: Any) -> Self:
        """Return the config with values for thousands of copies on a GPU; `given` values replace them."""
        return cls.preset("gpu", **given)

    def rollout_bytes(self, observation: Space | None, action: Space | None) -> int:
        """Return a lower bound of the memory that a rollout takes; see `OnPolicyConfig.rollout_bytes`."""
        final_obs = self.num_envs * (self.horizon + 1) * slot_bytes(observation, None)
        return super().rollout_bytes(observation, action) + final_obs * self.recompute_advantages

    @property
    def adaptive_rate(self) -> AdaptiveRate | None:
        """How the learning rate adapts to the KL divergence; None if it does not."""
        return AdaptiveRate.make(self.lr_schedule, self.lr)

    def schedule(self, name: str) -> Schedule:
        """Return the schedule of a hyperparameter; for an adaptive learning rate, its constant initial value."""
        if name == "lr" and self.adaptive_rate is not None:
            return Schedule.make(self.lr)
        return super().schedule(name)


class PPO(OnPolicyAlgorithm[PPOConfig], config=PPOConfig):
    """Proximal policy optimisation on one environment. Made by `PPOConfig(...).build(env)`.

        collect()    a rollout: a horizon of all copies, played by the present policy
        step()       advantages; for each epoch, for each minibatch: losses, a step of the optimizer

    Source: Schulman et al. 2017, arXiv:1707.06347.
    """

    packed = (*OnPolicyAlgorithm.packed, keys.LOGP, keys.PARAMS)
    made = (keys.ADVANTAGES, keys.RETURNS)

    def __init__(self, config: PPOConfig, env: Env, seed: int, env_factory: EnvFactory | None = None) -> None:
        super().__init__(config, env, seed, env_factory)
        if config.normalize_advantages and env.num_envs * config.horizon * ranks().size == 1:
            raise ValueError(
                "`normalize_advantages` leaves the only advantage of a collect 0, from which the policy never learns; "
                "got num_envs=1 and horizon=1. Raise `horizon`, or set normalize_advantages=False."
            )
        if config.adaptive_rate is not None:
            self.policy.show_params()
        self.return_moments = RunningMoments(()).to(self.device)
        self.running_return = torch.zeros(env.num_envs, device=self.device)
        values = self.policy.value_moments
        learned = [*self.return_moments.buffers(), *([] if values is None else values.buffers())]
        self.learned_by_targets = [self.running_return, *learned]
        self._silenced_steps = 0
        self._told_silenced = False

    def make_policy(self) -> Policy:
        """Build the policy, with torch's global generator seeded."""
        options: dict[str, Any] = {"normalize_values": self.config.normalize_values}
        if self.config.model_config.get("separate"):
            if self.env.team is None:
                raise ValueError(
                    "`model_config.separate` gives each agent weights of its own, and a copy of "
                    f"{type(self.env.unwrapped).__name__} has one agent: leave it out."
                )
            options["model_config"] = self.config.model_config | {"separate": self.env.num_agents}
        return self.policy_of(Policy, {"mlp": SMALL}, **options)

    # -- learning

    def learn(self) -> Tensor:
        """Learn from the collected rollout; return the explained variance of the values, 0-d.

        Source: Schulman et al. 2017, arXiv:1707.06347, algorithm 1.
        """
        explained = self.set_targets()  # advantages and returns
        with self.updates() as updates:
            for epoch in updates.epochs():
                if epoch and self.config.recompute_advantages:
                    self.recompute_targets()
                for minibatches in updates.minibatches():
                    updates.step(minibatches)  # down the gradient of the losses
        return explained

    @property
    def renews(self) -> bool:
        """Whether advantages are estimated again between epochs."""
        return self.config.recompute_advantages

    def targets(self, data: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Estimate advantages, and the targets of values in the model's units."""
        config, valid = self.config, data.get(keys.VALID)
        if config.normalize_rewards:
            ended = data[keys.TERMINATED] | data[keys.TRUNCATED]
            # The environment may have been reset since: the sums of new episodes begin at 0.
            before = self.running_return.masked_fill(data[keys.STARTS][0], 0.0)
            returns, carry = running_returns(data[keys.REWARDS], ended, before, config.gamma)
            self.running_return.copy_(carry)
            self.return_moments.update(returns, valid)
        advantages, targets = self._estimated(data, self.rollout[keys.VALUES])
        explained = explained_variance(data[keys.VALUES], targets, valid)
        if self.policy.value_moments is not None:
            # Before the update, so that it and the next collect have the same units.
            self.policy.value_moments.update(targets, valid)
        return self._named(advantages, targets), explained

    def _estimated(self, data: Mapping[str, Tensor], values: Tensor) -> tuple[Tensor, Tensor]:
        """Return advantages, normalised if so configured, and returns, `[horizon, num_envs]` each."""
        config, rewards, valid = self.config, data[keys.REWARDS], data.get(keys.VALID)
        if config.normalize_rewards:
            rewards = self.return_moments.normalize(rewards, center=False)
        advantages, targets = generalized_advantages(
            rewards,
            values,
            data[keys.FINAL_VALUES],
            data[keys.TERMINATED],
            data[keys.TRUNCATED],
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
        )
        if config.normalize_advantages:
            _, mean, var = pooled_moments(advantages.reshape(-1), None if valid is None else valid.reshape(-1))
            advantages = (advantages - mean.to(advantages.dtype)) / (var.sqrt().to(advantages.dtype) + 1e-8)
        return advantages, targets

    def _named(self, advantages: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the results of `_estimated` as updates read them, `[horizon, num_envs]` each, by name."""
        moments = self.policy.value_moments
        return {keys.ADVANTAGES: advantages, keys.RETURNS: targets if moments is None else moments.normalize(targets)}

    @staticmethod
    def losses(
        policy: Callable[..., Evaluation],
        batch: SequenceBatch,
        state: SequenceBatch,
        entropy_coeff: Tensor,
        config: PPOConfig,
    ) -> Tensor:
        """Return the losses and monitors of each transition, in the order of `PPO_LOSS_METRICS`, `[7, seq_len, batch]`.

            r_t      = exp(logp_t - logp_old_t)
            L_policy = -min(r_t A_t, clip(r_t, 1 - eps, 1 + eps) A_t), for A_t < 0 bounded by -c A_t
            L_vf     = min(smooth_l1(v_t, R_t), vf_clip)
            L_total  = L_policy + vf_coeff L_vf - entropy_coeff H_t

        Args:
            policy: Called as a module, under the weights of the update.
            batch: Observations, starts, actions and their log-probabilities, advantages and returns, each `[seq_len,
                batch, ...]`.
            state: The policy's state before the sequences, each `[batch, *]`.
            entropy_coeff: Weight of the entropy, 0-d.
            config: Clipping and weights.

        Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9; dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5;
        the estimate of the KL divergence: Schulman 2020, "Approximating KL divergence", k3.
        """
        acted = [batch[keys.PARAMS]] if keys.PARAMS in batch else []
        evaluation = policy(batch[keys.OBS], batch[keys.ACTIONS], state, batch[keys.STARTS], *acted)
        advantages = batch[keys.ADVANTAGES]
        log_ratio = evaluation.logp - batch[keys.LOGP]
        ratio = log_ratio.exp()
        clip = config.clip_param
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + clip) * advantages)
        if config.dual_clip_param is not None:
            bounded = torch.maximum(surrogate, config.dual_clip_param * advantages)
            surrogate = torch.where(advantages < 0, bounded, surrogate)
        vf_loss = F.smooth_l1_loss(evaluation.values, batch[keys.RETURNS], reduction="none")
        vf_clip_frac = torch.zeros_like(vf_loss)
        if config.vf_clip_param is not None:
            vf_clip_frac = (vf_loss.detach() > config.vf_clip_param).to(vf_loss.dtype)
            vf_loss = vf_loss.clamp(max=config.vf_clip_param)
        total = config.vf_coeff * vf_loss - surrogate - entropy_coeff * evaluation.entropy
        with torch.no_grad():
            kl_div = ratio - 1.0 - log_ratio if evaluation.kl is None else evaluation.kl
            clip_frac = ((ratio - 1.0).abs() > clip).to(ratio.dtype)
        return torch.stack((-surrogate, vf_loss, evaluation.entropy, total, kl_div, clip_frac, vf_clip_frac))

    # -- settings, checks and metrics

    def set_lr(self, lr: float | None) -> None:
        """Set the learning rate; see `GenericAlgorithmBase.set_lr`. None restarts an adaptive one."""
        super().set_lr(lr)
        self.updater.adapts = lr is None and self.updater.objective.rate is not None
        if self.updater.adapts:
            self.optimizer.lr.fill_(self.config.lr)

    @property
    def _has_schedule(self) -> bool:
        return super()._has_schedule and self.config.adaptive_rate is None

    def check_model(self, seq_len: int = 1) -> TrainingEffects:
        """Run the model once, and warn if it behaves differently in training mode; see `GenericAlgorithmBase`."""
        effects = super().check_model(seq_len)
        if any(effects):
            warnings.warn(
                f"{type(self.policy.model).__name__} gives other outputs in training mode (dropout, batch "
                "normalisation) than in evaluation mode, in which it collects: PPO's ratios and KL divergence take the "
                "difference for learning. Layers without modes, such as nn.LayerNorm, suit it better.",
                RuntimeWarning,
                stacklevel=2,
            )
        return effects

    @property
    def slot(self) -> Slot:
        """The function that returns the tensors of a rollout's slot, including log-probabilities and values."""
        return with_final_obs if self.config.recompute_advantages else actor_critic

    @property
    def objective(self) -> Objective:
        """PPO's losses; the KL divergence may end the updates of a step and adapt the learning rate."""
        limit, rate = self.config.target_kl_div, self.config.adaptive_rate
        limit = None if limit is None else 1.5 * limit
        return Objective(self.losses, PPO_LOSS_METRICS, TOTAL, KL_DIV, limit, rate)

    @property
    def params(self) -> dict[str, Any]:
        """The effective hyperparameters by name."""
        rate = self.config.adaptive_rate
        return super().params | ({"lr_schedule": rate.to_dict()} if rate is not None and self.updater.adapts else {})

    def evaluate(self, *, env_config: Mapping[str, Any] | None = None, deterministic: bool = True) -> Stats:
        """Evaluate in the training environment; see `GenericAlgorithmBase.evaluate`. Running reward sums end there."""
        if not self.fresh:  # otherwise the collected rewards still have to be scaled by the sums
            self.running_return.zero_()
        return super().evaluate(env_config=env_config, deterministic=deterministic)

    def coefficient(self) -> float:
        """Return the entropy's present weight."""
        return self.schedules["entropy_coeff"](self.counters[self.clock])

    def coefficients(self) -> dict[str, Number]:
        """Return the coefficients other than the learning rate, by metric name."""
        return {
            "coefficients/entropy": self.coefficient(),
            "coefficients/vf": self.config.vf_coeff,
        }

    def watch(self, row: Mapping[str, float]) -> None:
        """Warn once if the clipping of the value loss keeps the critic from learning for many steps in a row."""
        config = self.config
        silenced = row.get("monitors/vf_clip_frac", 0.0) > 0.5  # a user's loss may lack the metric
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

    # -- advantages under the current critic

    @torch.no_grad()
    def recompute_targets(self) -> None:
        """Estimate advantages again with the current critic; units of rewards and values stay those of this step."""
        rollout, horizon = self.rollout, self.config.horizon
        values, final_values = self._present_values()
        data = {name: rollout[name][:horizon] for name in rollout.tensors} | {keys.FINAL_VALUES: final_values}
        self.pack.renew(self._named(*self._estimated(data, values)))

    def _present_values(self) -> tuple[Tensor, Tensor]:
        """Compute the values of a rollout's observations again, each sequence from its stored state, as updates do."""
        policy, rollout, horizon = self.policy, self.rollout, self.config.horizon
        values = torch.zeros_like(rollout[keys.VALUES])
        finals = torch.zeros_like(values[:horizon])
        ends = {name: torch.empty_like(states) for name, states in rollout.states.items()}
        workers, num_rows = self.updater.workers, self.pack.num_sequences // policy.num_separate
        (chunks,) = self.updater.in_chunks(torch.arange(num_rows, device=self.device).unsqueeze(0), workers)
        count = min(workers.count, len(chunks))

        def write(worker: int) -> None:
            for rows in chunks[worker::count]:
                self._write_values(rows, values, finals, ends)

        workers.share([functools.partial(write, worker) for worker in range(count)])
        state = {name: ends[name][-1] for name in policy.initial_state(1)}
        values[horizon] = policy.values(rollout.tree(keys.OBS, horizon), state, rollout[keys.STARTS][horizon])
        return values, finals

    def _write_values(self, rows: Tensor, values: Tensor, finals: Tensor, ends: State) -> None:
        """Write the values of the sequences with numbers `rows`, `[rows]`, and the policy's states after them."""
        policy, rollout, stepper = self.policy, self.rollout, self.horizons.collector.stepper
        sequences, copies = rows.div(rollout.num_envs, rounding_mode="floor"), rows.remainder(rollout.num_envs)
        state = {name: rollout.states[name][sequences, copies] for name in policy.initial_state(1)}
        for step in range(self.seq_len):
            where = (sequences * self.seq_len + step, copies)
            obs, starts = rollout.tree(keys.OBS, where), rollout[keys.STARTS][where]
            if policy.recurrent:
                _, values[where], state = policy.respond(obs, state, starts)
            else:
                values[where] = policy.values(obs, state, starts)
            after = state
            if stepper.picks_rows:  # on an accelerator, asking which were cut would be a host sync
                cut = (rollout[keys.TRUNCATED] & ~rollout[keys.TERMINATED])[where]
                where, after = (where[0][cut], copies[cut]), {name: value[cut] for name, value in state.items()}
            if len(where[0]):  # not every model accepts an empty batch
                finals[where] = stepper.final_obs_values(rollout.tree(keys.FINAL_OBS, where), after)
        for name, value in state.items():
            ends[name][sequences, copies] = value

    # -- saving

    def learned_state(self) -> dict[str, Any]:
        """Return the state that updates change: weights, optimizer, running moments, and the order of minibatches."""
        return {**super().learned_state(), "return_moments": self.return_moments.state_dict()}

    def load_learned_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `learned_state` or `state_dict`; collected experience that has not been learned from is lost."""
        super().load_learned_state(state)
        self.return_moments.load_state_dict(state["return_moments"])

    def state_dict(self) -> dict[str, Any]:
        """Return all state that the next collect and step depend on, including reward sums of running episodes."""
        return {**super().state_dict(), "running_return": self.running_return}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`; training continues with the same bits."""
        super().load_state_dict(state)
        self.running_return.copy_(state["running_return"])
