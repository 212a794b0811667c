"""Twin delayed deep deterministic policy gradients: two critics, a policy that learns later, targets that are smooth.

Source: Fujimoto et al. 2018, arXiv:1802.09477, algorithm 1; `FastTD3Config`: Seo et al. 2025, arXiv:2505.22642. On a
data set `actor_bc_coeff` makes it TD3+BC (Fujimoto and Gu 2021, arXiv:2106.06860), and with `critic_bc_coeff` ReBRAC
(Tarasov et al. 2023, arXiv:2305.09836).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import gymnasium
import numpy as np
import torch
from torch import Tensor

from rl8x import keys
from rl8x.algorithms.hyperparameters import option
from rl8x.algorithms.off_policy.actor import Actor
from rl8x.algorithms.off_policy.config import ActorCriticConfig
from rl8x.algorithms.off_policy.critics import Critics, expectation, project
from rl8x.algorithms.off_policy.learner import SHARE, observed
from rl8x.algorithms.off_policy.nets import Net
from rl8x.algorithms.off_policy.off_policy import OffPolicyAlgorithm
from rl8x.algorithms.off_policy.updates import Batch, Figures, weighted_mean
from rl8x.distributions import NoisyDeterministic
from rl8x.rollouts.statistics import Number
from rl8x.spaces import describe
from rl8x.trees import unflatten_tree

NOISE: Final = "target_noise"
"""Of an update's batch: the noise on the target policy's actions, in their units, `[batch_size, *action]`."""
TRAINS_POLICY: Final = "trains_policy"
"""Of an update's batch: whether the policy is trained, 0-d bool; missing where it always is."""
NEXT_ACTIONS: Final = "next_actions"
"""Of a data set's batch: what was done after `next_obs` was seen, `[batch_size, *action]`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TD3Config(ActorCriticConfig, defaults={"target_interval": 2, "policy_delay": 2}):
    """Hyperparameters of TD3. Noise is in units of half the range of an action, so that 1 reaches from 0 to a bound."""

    exploration_noise: float = option(
        0.1, "Standard deviation of the noise on collected actions, in half ranges.", above=0.0
    )
    exploration_noise_min: float | None = option(
        None,
        "Copies have standard deviations of their own, evenly spread from this to exploration_noise. None: all have "
        "the same.",
        above=0.0,
    )
    target_noise: float = option(
        0.2, "Standard deviation of the noise on the target policy's actions, in half ranges.", low=0.0
    )
    target_noise_clip: float = option(0.5, "Where that noise is clipped, in half ranges.", low=0.0)
    actor_bc_coeff: float | None = option(
        None,
        "Weight, in the policy's loss, of squared distances to the actions of the data, in half ranges and summed over "
        "dimensions, beside values scaled to a mean size of 1. TD3+BC's alpha is 1 / (alpha * dimensions); ReBRAC's "
        "beta_1 as it is. None: values alone, not scaled.",
        low=0.0,
    )
    critic_bc_coeff: float = option(
        0.0,
        "What such a distance of the next action to that of the data takes off the value in a target (ReBRAC's "
        "beta_2); needs a data set.",
        low=0.0,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FastTD3Config(
    TD3Config,
    defaults={
        "num_envs": 1024,
        "horizon": 1,
        "batch_size": 32768,
        "updates_per_sample": 2 / 1024,
        "warmup_steps": 10 * 1024,
        "buffer_size": 10 * 1024 * 1024,
        "gamma": 0.97,
        "tau": 0.1,
        "target_interval": 1,
        "exploration_noise": 0.4,
        "exploration_noise_min": 0.001,
        "target_noise": 0.001,
        "optimizer": "adamw",
        "optimizer_config": {"weight_decay": 0.1},
        "normalize_observations": True,
        "model_config": {"hidden_sizes": [512, 256, 128]},
        "critic_hidden_sizes": [1024, 512, 256],
        "num_atoms": 101,
        "v_min": -10.0,
        "v_max": 10.0,
    },
):
    """TD3 for thousands of copies and large batches (FastTD3), with the values for MuJoCo Playground."""


class TD3(OffPolicyAlgorithm[TD3Config], config=TD3Config):
    """Twin delayed deep deterministic policy gradients on one environment. Made by `TD3Config(...).build(env)`."""

    numbers: ClassVar[tuple[str, ...]] = (
        "losses/q",
        "losses/policy",
        "monitors/q",
        "monitors/td_error",
        "monitors/q_grad_norm",
        "monitors/policy_grad_norm",
    )

    policy: Actor

    def check_spaces(self) -> None:
        """Refuse actions that are not numbers between bounds, and penalties of actions that only a data set has."""
        space = self.action_space
        if not isinstance(space, gymnasium.spaces.Box):
            other = "DQN" if isinstance(space, gymnasium.spaces.Discrete) else "PPO"
            raise ValueError(f"TD3 needs a Box action space; got {describe(space)}. Use {other}.")
        if not (np.isfinite(space.low) & np.isfinite(space.high)).all():
            raise ValueError(
                f"TD3 needs actions with finite bounds; got {describe(space)}. Give the environment's Box the largest "
                "actions that make sense (Gymnasium: RescaleAction), or use PPO."
            )
        if self.config.critic_bc_coeff:
            raise ValueError(
                "`critic_bc_coeff` compares next actions with those of a data set, and an environment gives none; "
                f"got {self.config.critic_bc_coeff}. Use 0."
            )

    def make_policy(self) -> Actor:
        """Return a deterministic policy with noise that explores."""
        config = self.config
        return Actor(
            self.observation_space,
            self.action_space,
            distribution=NoisyDeterministic,
            distribution_config={
                "noise_std": config.exploration_noise,
                "noise_std_min": config.exploration_noise_min,
            },
            model=config.model,
            model_config=config.model_config,
            normalize_observations=config.normalize_observations,
        )

    def make_nets(self) -> None:
        """Train policy and critics; targets follow both."""
        config = self.config
        self.critics = Critics(
            self.policy.model.observation_space,
            self.action_space,
            num_critics=config.num_critics,
            hidden_sizes=(256, 256) if config.critic_hidden_sizes is None else config.critic_hidden_sizes,
            layer_norm=config.critic_layer_norm,
            num_outputs=config.num_atoms,
        )
        if config.precision == "bf16":
            self.critics.autocast = self.execution.autocast
        self.add_net("q", self.critics)
        self.add_net("policy", self.policy)
        self.nets.add_target("target_q", of="q")
        self.nets.add_target("target_policy", of="policy")

    def explore(self, *, warms_up: bool) -> dict[str, Number]:
        """Act at random in the warm-up, then with noise."""
        self.policy.set_random(warms_up)
        return {}

    def draw(self, first: int, count: int) -> dict[str, Tensor]:
        """Draw clipped noise for target actions, and say in which updates the policy is trained."""
        config, half_range = self.config, self._distribution.action_half_range
        size = (count, config.batch_size, *half_range.shape)
        noise = torch.randn(size, generator=self.generator, device=self.device).mul_(config.target_noise)
        noise = noise.clamp_(-config.target_noise_clip, config.target_noise_clip).mul_(half_range)
        trains = [(first + i) % config.policy_delay == 0 for i in range(1, count + 1)]
        flags = {TRAINS_POLICY: torch.tensor(trains, device=self.device)} if config.policy_delay > 1 else {}
        return {**super().draw(first, count), NOISE: noise, **flags}

    def update(self, nets: Mapping[str, Net], batch: Batch) -> Figures:
        """Move the critics towards what was seen and expected after it, the policy up the first critic's values.

            a' = clip(mu'(s') + clip(noise))
            y  = R + d (min_i Q_i'(s', a') - critic_bc_coeff |a' - data's a'|^2)
            L_Q  = sum_i mean of w (Q_i(s, a) - y)^2 / 2,    w = 1, or the importance weight with `prioritized`
            L_mu = - mean of Q_1(s, mu(s)),  every `policy_delay` updates

        or, with `actor_bc_coeff`, where distances are in half ranges and the mean size of values has no gradient,

            L_mu = - mean of Q_1(s, mu(s)) / mean of |Q_1(s, mu(s))| + actor_bc_coeff mean of |mu(s) - a|^2

        With `num_atoms` L_Q is the cross-entropy towards the distribution of y, where Q' is that of the smallest mean.
        """
        goals = self._goals(nets, batch)
        seen = self._seen(batch, keys.OBS)

        def q_loss(q: Callable[..., Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            outputs = q(seen, batch[keys.ACTIONS])  # [num_critics, batch_size], or [..., num_atoms]
            if self.config.num_atoms > 1:
                losses = -(goals * outputs.log_softmax(-1)).sum(-1)
            else:
                losses = 0.5 * (outputs - goals).square()
            total = weighted_mean(losses.sum(0), batch)
            return total, {"losses/q": total, "values": self._means(outputs)}

        def policy_loss(policy: Callable[..., Any]) -> tuple[Tensor, dict[str, Tensor]]:
            actions = policy(*observed(batch, keys.OBS)).mean
            values = self._means(nets["q"](seen, actions)[0])
            total = -values.mean()
            if self.config.actor_bc_coeff is not None:
                distances = self._distances(actions, batch[keys.ACTIONS])
                total = total / values.detach().abs().mean() + self.config.actor_bc_coeff * distances.mean()
            return total, {"losses/policy": total}

        found, q_norm = nets["q"].minimise(q_loss)
        of_policy, policy_norm = nets["policy"].minimise(policy_loss, batch.get(TRAINS_POLICY))
        for name in ("q", "policy"):
            nets[f"target_{name}"].follow(nets[name], batch[SHARE])
        means = goals @ self._atoms if self.config.num_atoms > 1 else goals
        errors = (found["values"] - means).abs().mean(0)
        numbers = {
            "losses/q": found["losses/q"],
            "losses/policy": of_policy["losses/policy"],
            "monitors/q": found["values"].mean(),
            "monitors/td_error": errors.mean(),
            "monitors/q_grad_norm": q_norm,
            "monitors/policy_grad_norm": policy_norm,
        }
        return Figures(numbers, errors)

    def _goals(self, nets: Mapping[str, Net], batch: Batch) -> Tensor:
        """Return y of `update`, `[batch_size]`, or the probabilities of the atoms for it, `[batch_size, num_atoms]`."""
        means = nets["target_policy"](*observed(batch, keys.NEXT_OBS)).mean
        actions = self._distribution.env_actions(means + batch[NOISE])
        outputs: Tensor = nets["target_q"](self._seen(batch, keys.NEXT_OBS), actions)
        returns = batch[keys.RETURNS]
        if self.config.critic_bc_coeff:
            penalties = self.config.critic_bc_coeff * self._distances(actions, batch[NEXT_ACTIONS])
            returns = returns - batch[keys.DISCOUNTS] * penalties
        if self.config.num_atoms == 1:
            return returns + batch[keys.DISCOUNTS] * outputs.amin(0)
        least = self._means(outputs).argmin(0).view(1, -1, 1).expand(1, *outputs.shape[1:])
        probs = outputs.gather(0, least).squeeze(0).softmax(-1)
        values = returns.unsqueeze(-1) + batch[keys.DISCOUNTS].unsqueeze(-1) * self._atoms
        return project(probs, values, self._atoms)

    @property
    def _atoms(self) -> Tensor:
        config = self.config
        return torch.linspace(config.v_min, config.v_max, config.num_atoms, device=self.device)

    def _means(self, outputs: Tensor) -> Tensor:
        """Return the values that the critics' outputs stand for."""
        return expectation(outputs, self._atoms) if self.config.num_atoms > 1 else outputs

    def _seen(self, batch: Batch, key: str) -> Any:
        """Return observations as policy and critics see them, `[batch_size, *obs]` or a dict of such."""
        return self.policy.model_inputs(unflatten_tree(key, batch))[0]

    def _distances(self, actions: Tensor, others: Tensor) -> Tensor:
        """Return squared distances of actions `[batch_size, *action]` in half ranges, `[batch_size]`."""
        distances: Tensor = ((actions - others) / self._distribution.action_half_range).square().flatten(1).sum(-1)
        return distances

    @property
    def _distribution(self) -> NoisyDeterministic:
        assert isinstance(self.policy.distribution, NoisyDeterministic)
        return self.policy.distribution
