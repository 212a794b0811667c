"""Implicit Q-learning: values of the best actions in a data set, and a policy that imitates those actions.

The critics are never evaluated at actions outside the data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import gymnasium
import torch
from torch import Tensor, nn

from rl8x import keys
from rl8x.algorithms.config import PolicyConfig
from rl8x.algorithms.hyperparameters import option
from rl8x.algorithms.off_policy.actor_critic import action_values, make_critics
from rl8x.algorithms.off_policy.config import ValueConfig
from rl8x.algorithms.off_policy.learner import Learner, model_obs, observed, recorded_actions
from rl8x.algorithms.off_policy.updates import Found, Loss, Minimise, Net, Phase, ReplayBatch
from rl8x.models.layers import INITS
from rl8x.policy import Policy
from rl8x.spaces import describe_space


@dataclasses.dataclass(frozen=True, kw_only=True)
class IQLConfig(ValueConfig, PolicyConfig):
    """Hyperparameters of implicit Q-learning.

    Source: Kostrikov et al. 2022, arXiv:2110.06169.
    """

    expectile: float = option(
        0.7,
        "Expectile of Q over the data's actions that V estimates: 0.5 is the mean, values near 1 approach the maximum.",
        above=0.0,
        high=1.0,
    )
    temperature: float = option(
        3.0, "Inverse temperature of the advantage weights exp(temperature * A): 0 is behaviour cloning.", low=0.0
    )
    max_weight: float = option(100.0, "Largest advantage weight in the policy's loss.", above=0.0)
    critic_hidden_sizes: list[int] | None = option(None, "Widths of the critics' hidden layers. None: [256, 256].")
    critic_layer_norm: bool = option(False, "Whether the critics' hidden layers have layer normalisation.")
    critic_init: str = option(
        "orthogonal", "How the critics' weights begin: orthogonal, or uniform within 1 / sqrt(inputs).", choices=INITS
    )


class PolicyAndValue(nn.Module):
    """A policy whose model's values are V(s); it returns log-probabilities and values, or values alone."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, obs: Any, state: dict[str, Tensor], starts: Tensor, actions: Any = None) -> Any:
        """Return an `Evaluation` of `[1, batch_size]`, or without actions the values alone, `[1, batch_size]`."""
        if actions is None:
            return self.policy.predict(obs, state, starts).values
        return self.policy.evaluate(obs, actions, state, starts)


class IQL(Learner[IQLConfig], config=IQLConfig):
    """Implicit Q-learning from a data set. Made by `IQLConfig(dataset=...).build()`.

    Source: Kostrikov et al. 2022, arXiv:2110.06169, algorithm 1.
    """

    update_metrics: ClassVar[tuple[str, ...]] = (
        "losses/policy",
        "losses/value",
        "losses/q",
        "monitors/advantage",
        "monitors/weight",
        "monitors/q",
        "monitors/grad_norm",
        "monitors/q_grad_norm",
    )

    def check_spaces(self) -> None:
        """Raise a `ValueError` unless the action space is a `Box` or `Discrete`."""
        if not isinstance(self.action_space, gymnasium.spaces.Box | gymnasium.spaces.Discrete):
            raise ValueError(
                f"IQL needs a Box or Discrete action space; got {describe_space(self.action_space)}. Use BC."
            )

    def make_policy(self) -> Policy:
        """Return the policy; its model's values are V."""
        return self.policy_of(Policy)

    def make_nets(self) -> None:
        """Add policy and value as one network, and two critics with a target network."""
        self.add_net("policy", PolicyAndValue(self.policy))
        self.add_net("q", make_critics(self))
        self.nets.add_target("target", of="q")

    def phases(self) -> list[Phase]:
        """Return the updates of V towards an expectile of Q', of the policy, and of Q towards its TD targets.

            A    = min_i Q'_i(s, a) - V(s)
            L_V  = mean of |expectile - 1[A < 0]| A^2
            L_pi = -mean of min(exp(temperature A), max_weight) log pi(a | s)
            L_Q  = mean of sum_i (Q_i(s, a) - R - d V(s'))^2

        R is the sum of n discounted rewards, d = gamma^n, or 0 where the episode terminated, and s' the next state.
        """
        return [
            Minimise("policy", self._policy_loss, "monitors/grad_norm"),
            Minimise("q", self._q_loss, "monitors/q_grad_norm"),
        ]

    def _policy_loss(self, nets: Mapping[str, Net], batch: ReplayBatch, found: Found) -> Loss:
        """Return the loss of V and the policy, which are one network."""
        config, inputs, actions = self.config, observed(batch, keys.OBS), recorded_actions(batch)
        best = self._values(nets["target"], batch).amin(0)  # [batch_size]

        def loss(policy: Callable[..., Any]) -> tuple[Tensor, dict[str, Tensor]]:
            evaluation = policy(*inputs, actions)
            advantages = best - evaluation.values[0]
            weights = (config.temperature * advantages.detach()).exp().clamp(max=config.max_weight)
            value_loss = expectile_loss(advantages, config.expectile).mean()
            policy_loss = -(weights * evaluation.logp[0]).mean()
            metrics = {"losses/policy": policy_loss, "losses/value": value_loss}
            monitors = {"monitors/advantage": advantages.mean(), "monitors/weight": weights.mean()}
            # Unless `shared` is set, actor and critic of a built-in model share no weights: the sum minimises each.
            return policy_loss + value_loss, metrics | monitors

        return loss

    def _q_loss(self, nets: Mapping[str, Net], batch: ReplayBatch, found: Found) -> Loss:
        """Return the loss of the critics, whose targets use the updated V."""
        td_targets = batch[keys.RETURNS] + batch[keys.DISCOUNTS] * nets["policy"](*observed(batch, keys.NEXT_OBS))[0]

        def loss(q: Callable[..., Any]) -> tuple[Tensor, dict[str, Tensor]]:
            values = self._values(q, batch)
            total = (values - td_targets).square().sum(0).mean()
            return total, {"losses/q": total, "monitors/q": values.mean()}

        return loss

    def _values(self, q: Callable[..., Any], batch: ReplayBatch) -> Tensor:
        """Return the critics' values of the batch's actions, `[num_critics, batch_size]`."""
        return action_values(q, model_obs(self.policy, batch, keys.OBS), batch[keys.ACTIONS], self.action_space)


def expectile_loss(errors: Tensor, expectile: float) -> Tensor:
    """Return |expectile - 1[error < 0]| error^2, `[...]`, of errors `[...]`, each a value less its estimate.

    Its minimiser is that expectile of the values; their mean for 0.5.

    Source: Kostrikov et al. 2022, arXiv:2110.06169, eq. 5.
    """
    return torch.where(errors < 0, 1.0 - expectile, expectile) * errors.square()
