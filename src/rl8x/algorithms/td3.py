"""Twin delayed deep deterministic policy gradients: two critics, delayed policy updates, smoothed targets.

On a data set `actor_bc_coeff` makes it TD3+BC, and with `critic_bc_coeff` ReBRAC.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, Self

import torch
from torch import Tensor

from rl8x import keys
from rl8x.algorithms.base import WITHOUT_VALUES
from rl8x.algorithms.hyperparameters import PRESETS, option
from rl8x.algorithms.off_policy.actor_critic import CRITIC_METRICS, Actor, Critics, check_bounded, make_critics
from rl8x.algorithms.off_policy.config import ActorCriticConfig
from rl8x.algorithms.off_policy.learner import Learner, model_obs, observed
from rl8x.algorithms.off_policy.updates import Average, Found, Loss, Minimise, Net, Phase, ReplayBatch
from rl8x.distributed import ranks
from rl8x.distributions import NoisyDeterministic

NOISE: Final = "target_noise"
"""Key of a batch: the noise on the target policy's actions, in their units, `[batch_size, *action]`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TD3Config(ActorCriticConfig, defaults={"target_interval": 2, "policy_delay": 2}):
    """Hyperparameters of TD3. Noise is in units of half the action range, so that 1 reaches from the middle to a bound.

    Source: Fujimoto et al. 2018, arXiv:1802.09477; `actor_bc_coeff`: Fujimoto and Gu 2021, arXiv:2106.06860;
    `critic_bc_coeff`: Tarasov et al. 2023, arXiv:2305.09836.
    """

    exploration_noise: float = option(
        0.1, "Standard deviation of the exploration noise, in units of half the action range.", above=0.0
    )
    exploration_noise_min: float | None = option(
        None,
        "Each copy has its own standard deviation, evenly spaced from this to exploration_noise. None: all have "
        "exploration_noise.",
        above=0.0,
    )
    target_noise: float = option(
        0.2, "Standard deviation of the target policy's smoothing noise, in units of half the action range.", low=0.0
    )
    target_noise_clip: float = option(
        0.5, "That noise is clipped to plus and minus this, in units of half the action range.", low=0.0
    )
    actor_bc_coeff: float | None = option(
        None,
        "Weight of behaviour cloning in the policy's loss: squared distance to the data's actions, in half ranges "
        "and summed over dimensions, while values are scaled to a mean size of 1. TD3+BC with alpha is 1 / (alpha * "
        "dimensions) here (arXiv:2106.06860); ReBRAC's beta_1 is the same number (arXiv:2305.09836). None: no "
        "cloning, values unscaled. For data sets.",
        low=0.0,
        offline=True,
    )
    critic_bc_coeff: float = option(
        0.0,
        "ReBRAC's beta_2: weight of the same distance, for the next action, subtracted from the next value in the "
        "target. For data sets.",
        low=0.0,
        offline=True,
    )

    @classmethod
    def gpu(cls, **given: Any) -> Self:
        """Return the config with FastTD3's values, for many copies on a GPU; `given` values replace them."""
        return cls.preset("gpu", **given)

    def __post_init__(self) -> None:
        super().__post_init__()
        least, most = self.exploration_noise_min, self.exploration_noise
        if least is not None and least > most:
            raise ValueError(f"`exploration_noise_min` must be at most `exploration_noise`; got {least} and {most}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FastTD3Config(TD3Config, defaults=PRESETS["TD3"]["gpu"]):
    """TD3 for thousands of copies and large batches (FastTD3), with the paper's values for MuJoCo Playground.

    The paper sets the bounds of the atoms per task; here `return_bound` scales rewards, so that the same bounds fit
    all.

    Source: Seo et al. 2025, arXiv:2505.22642.
    """


class TD3(Learner[TD3Config], config=TD3Config):
    """Twin delayed deep deterministic policy gradients. Made by `TD3Config(...).build(env)`.

    It learns from a replay, or with `TD3Config(...).build(dataset=...)` from a data set: then set `actor_bc_coeff`.

    Source: Fujimoto et al. 2018, arXiv:1802.09477, algorithm 1.
    """

    update_metrics: ClassVar[tuple[str, ...]] = (*CRITIC_METRICS, "losses/policy", "monitors/policy_grad_norm")
    trains_by_copy = True

    policy: Actor
    critics: Critics

    def check_spaces(self) -> None:
        """Raise unless actions are in a bounded box."""
        check_bounded("TD3", self.action_space)

    def make_policy(self) -> Actor:
        """Return a deterministic policy with exploration noise."""
        config = self.config
        noise = {"noise_std": config.exploration_noise, "noise_std_min": config.exploration_noise_min}
        return self.policy_of(Actor, WITHOUT_VALUES, distribution=NoisyDeterministic, distribution_config=noise)

    def make_nets(self) -> None:
        """Add critics and policy, each with a target network."""
        self.critics = make_critics(self)
        self.add_net("q", self.critics)
        self.add_net("policy", self.policy)
        self.nets.add_target("target_q", of="q")
        self.nets.add_target("target_policy", of="policy")

    @property
    def reads_next_actions(self) -> bool:
        """Whether the targets have a penalty."""
        return self.config.critic_bc_coeff > 0

    def draw(self, first: int, count: int) -> dict[str, Tensor]:
        """Draw the inputs of updates, including the clipped noise of target actions."""
        config, half_range = self.config, self._distribution.action_half_range
        size = (count, self.batch_size, *half_range.shape)
        noise = torch.randn(size, generator=self.generator, device=self.device).mul_(config.target_noise)
        noise = noise.clamp_(-config.target_noise_clip, config.target_noise_clip).mul_(half_range)
        return {**super().draw(first, count), NOISE: noise}

    def phases(self) -> list[Phase]:
        """Return the updates of the critics towards their TD targets, and of the policy towards higher values.

            a' = clip(mu'(s') + clip(noise))
            y  = R + d (min_i Q_i'(s', a') - critic_bc_coeff |a' - data's a'|^2)
            L_Q  = sum_i mean of w (Q_i(s, a) - y)^2 / 2,    w = 1, or the importance weight with `prioritized`
            L_mu = - mean of Q_1(s, mu(s)),  every `policy_delay` updates

        or, with `actor_bc_coeff`, with distances in half ranges and no gradient through the mean size of values,

            L_mu = - mean of Q_1(s, mu(s)) / mean of |Q_1(s, mu(s))| + actor_bc_coeff mean of |mu(s) - a|^2

        R, d and s' are those of `DQN`; a `return_bound` scales R. With `num_atoms` L_Q is the cross-entropy to
        the distribution of y, where Q' is the critic with the smallest mean.
        """
        critics = Minimise("q", self._critic_loss, "monitors/q_grad_norm")
        policy = Minimise("policy", self._policy_loss, "monitors/policy_grad_norm")
        averages = self.config.actor_bc_coeff is not None and ranks().size > 1
        return [critics, *([Average("mean_size", self._mean_size)] if averages else []), policy]

    def _critic_loss(self, nets: Mapping[str, Net], batch: ReplayBatch, found: Found) -> Loss:
        """Return L_Q."""
        return self.critics.loss(model_obs(self.policy, batch, keys.OBS), batch, self._td_targets(nets, batch))

    def _policy_loss(self, nets: Mapping[str, Net], batch: ReplayBatch, found: Found) -> Loss:
        """Return L_mu."""

        def loss(policy: Callable[..., Any]) -> tuple[Tensor, dict[str, Tensor]]:
            actions, values = self._valued(policy, nets, batch)
            total = -values.mean()
            if self.config.actor_bc_coeff is not None:
                size = found["mean_size"] if "mean_size" in found else values.detach().abs().mean()
                distances = self._distances(actions, batch[keys.ACTIONS])
                total = total / size + self.config.actor_bc_coeff * distances.mean()
            return total, {"losses/policy": total}

        return loss

    def _mean_size(self, nets: Mapping[str, Net], batch: ReplayBatch, found: Found) -> Tensor:
        """Return the mean of |Q_1(s, mu(s))|, 0-d, which several ranks need before the gradient of L_mu."""
        return self._valued(nets["policy"], nets, batch)[1].abs().mean()

    def _valued(self, policy: Callable[..., Any], nets: Mapping[str, Net], batch: ReplayBatch) -> tuple[Tensor, Tensor]:
        """Return the policy's actions, `[batch_size, *action]`, and the first critic's values, `[batch_size]`."""
        actions = policy(*observed(batch, keys.OBS)).mean
        return actions, self.critics.means(nets["q"](model_obs(self.policy, batch, keys.OBS), actions)[0])

    def finish(self, nets: Mapping[str, Net], batch: ReplayBatch, found: Found) -> None:
        """Move the target networks, and add the metrics."""
        super().finish(nets, batch, found)
        self.critics.measure(found)

    def _td_targets(self, nets: Mapping[str, Net], batch: ReplayBatch) -> Tensor:
        """Return y, `[batch_size]`, or the probabilities of the atoms for it, `[batch_size, num_atoms]`."""
        means = nets["target_policy"](*observed(batch, keys.NEXT_OBS)).mean
        actions = self._distribution.env_actions(means + batch[NOISE])
        outputs = nets["target_q"](model_obs(self.policy, batch, keys.NEXT_OBS), actions)
        if not self.config.critic_bc_coeff:
            return self.critics.targets(outputs, batch)
        penalty = self.config.critic_bc_coeff * self._distances(actions, batch[keys.NEXT_ACTIONS])
        return self.critics.targets(outputs, batch, -penalty)

    def _distances(self, actions: Tensor, others: Tensor) -> Tensor:
        """Return squared distances of actions `[batch_size, *action]` in half ranges, `[batch_size]`."""
        distances: Tensor = ((actions - others) / self._distribution.action_half_range).square()
        return distances.reshape(len(actions), -1).sum(-1)

    @property
    def _distribution(self) -> NoisyDeterministic:
        assert isinstance(self.policy.distribution, NoisyDeterministic)
        return self.policy.distribution
