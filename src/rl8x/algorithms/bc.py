"""Behaviour cloning: a policy that maximises the likelihood of a data set's actions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor

from rl8x import keys
from rl8x.algorithms.config import PolicyConfig
from rl8x.algorithms.off_policy.config import LearnerConfig
from rl8x.algorithms.off_policy.learner import Learner, observed, recorded_actions
from rl8x.algorithms.off_policy.updates import Found, Loss, Minimise, Net, Phase, ReplayBatch
from rl8x.policy import Policy
from rl8x.spaces import critic_only


@dataclasses.dataclass(frozen=True, kw_only=True)
class BCConfig(LearnerConfig, PolicyConfig):
    """Hyperparameters of behaviour cloning.

    Source: Pomerleau 1991, doi:10.1162/neco.1991.3.1.88.
    """


class BC(Learner[BCConfig], config=BCConfig):
    """Behaviour cloning from a data set. Made by `BCConfig(dataset=...).build()`.

    Source: Pomerleau 1991, doi:10.1162/neco.1991.3.1.88.
    """

    update_metrics: ClassVar[tuple[str, ...]] = ("losses/bc", "monitors/entropy", "monitors/grad_norm")

    def make_policy(self) -> Policy:
        """Return the policy; its critic is not trained."""
        return self.policy_of(Policy, hidden=critic_only(self.observation_space))

    def make_nets(self) -> None:
        """Add the policy."""
        self.add_net("policy", self.policy)

    def phases(self) -> list[Phase]:
        """Return the update of the policy."""
        return [Minimise("policy", self._policy_loss, "monitors/grad_norm")]

    def _policy_loss(self, nets: Mapping[str, Net], batch: ReplayBatch, found: Found) -> Loss:
        """Return the loss that makes the batch's actions more likely.

        L = -mean of log pi(a | s)
        """
        obs, state, starts = observed(batch, keys.OBS)
        actions = recorded_actions(batch)

        def loss(policy: Callable[..., Any]) -> tuple[Tensor, dict[str, Tensor]]:
            evaluation = policy(obs, actions, state, starts)
            total = -evaluation.logp.mean()
            return total, {"losses/bc": total, "monitors/entropy": evaluation.entropy.mean()}

        return loss
