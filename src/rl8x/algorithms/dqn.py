"""Deep Q-learning: values of actions, learned from a replay towards targets of a network that follows.

Source: Mnih et al. 2015, "Human-level control through deep reinforcement learning", algorithm 1; `double`: van Hasselt
et al. 2016, arXiv:1509.06461; `dueling`: Wang et al. 2016, arXiv:1511.06581; `prioritized`: Schaul et al. 2016,
arXiv:1511.05952; `cql_coeff`: Kumar et al. 2020, arXiv:2006.04779.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

from torch import Tensor
from torch.nn import functional as F

from rl8x import keys
from rl8x.algorithms.base import EnvFactory
from rl8x.algorithms.hyperparameters import option
from rl8x.algorithms.off_policy.config import OffPolicyConfig
from rl8x.algorithms.off_policy.learner import SHARE, Learner, observed
from rl8x.algorithms.off_policy.nets import Net
from rl8x.algorithms.off_policy.off_policy import OffPolicyAlgorithm
from rl8x.algorithms.off_policy.offline import OfflineAlgorithm
from rl8x.algorithms.off_policy.updates import Batch, Figures, weighted_mean
from rl8x.algorithms.q_values import QPolicy, check_discrete
from rl8x.envs import Env
from rl8x.rollouts.statistics import Number

EPSILON: Final = "coefficients/epsilon"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DQNConfig(OffPolicyConfig):
    """Hyperparameters of DQN."""

    batch_size: int = option(64, "Transitions of a batch, each drawn by itself.", low=1)
    updates_per_sample: float = option(
        0.25,
        "Updates for each transition collected after the warm-up. Of fractions the rest is owed, so that the ratio is "
        "exact in the long run.",
        low=1e-6,
        high=1e6,
    )
    tau: float = option(
        1.0,
        "Share of the way that the target network goes to the trained one when it moves; 1 copies it.",
        above=0.0,
        high=1.0,
    )
    target_interval: int = option(250, "Updates from one move of the target network to the next.", low=1)
    lr: float = option(1e-3, "Learning rate of the optimizer.", above=0.0)
    max_grad_norm: float | None = option(10.0, "Largest L2 norm of the gradient. None does not clip.", above=0.0)
    epsilon: float = option(0.05, "Share of random actions after the warm-up, when all are.", low=0.0, high=1.0)
    epsilon_schedule: list[list[float]] | dict[str, Any] | None = option(
        None, "Share of random actions over transitions, in the form of lr_schedule; it replaces epsilon."
    )
    double: bool = option(
        True, "Whether the trained network chooses the action whose value the target network gives (double Q-learning)."
    )
    dueling: bool = option(
        False, "Whether values of actions are the state's value and what each action adds to it: Q = V + A - mean A."
    )
    huber_delta: float | None = option(
        None,
        "Errors beyond it have a gradient of constant size; 1 is the paper's. None: half the squared error, "
        "which learns faster from the rare large errors where an episode ends.",
        above=0.0,
    )
    cql_coeff: float = option(
        0.0,
        "Weight in the loss of logsumexp Q - Q(s, a), which lowers the values of actions that the data do not have "
        "(discrete CQL); for data sets.",
        low=0.0,
    )

    def __post_init__(self) -> None:
        """Check what can be checked without an environment."""
        super().__post_init__()
        self.check_shares("epsilon")


class QLearning(Learner[DQNConfig]):
    """What DQN learns from a batch, whether its rows come from a replay or from a data set."""

    numbers: ClassVar[tuple[str, ...]] = ("losses/q", "monitors/q", "monitors/td_error", "monitors/grad_norm")

    policy: QPolicy

    def check_spaces(self) -> None:
        """Refuse actions that are not numbered."""
        check_discrete("DQN", self.action_space, "PPO")

    def make_policy(self) -> QPolicy:
        """Return an epsilon-greedy policy over values of actions."""
        config = self.config
        return QPolicy(
            self.observation_space,
            self.action_space,
            model=config.model,
            model_config=config.model_config,
            dueling=config.dueling,
            normalize_observations=config.normalize_observations,
        )

    def make_nets(self) -> None:
        """Train the policy; a target follows it."""
        self.add_net("q", self.policy)
        self.nets.add_target("target", of="q")

    def update(self, nets: Mapping[str, Net], batch: Batch) -> Figures:
        """Move Q(s, a) towards what was seen and what the target network expects after it.

            y = R + d Q'(s', a'),    a' = argmax_a Q(s', a) with `double`, else argmax_a Q'(s', a)
            L = mean of w huber(Q(s, a) - y) + cql_coeff mean of (log sum_b exp Q(s, b) - Q(s, a))

        w is 1, or the importance weight with `prioritized`.

        R is the sum of n discounted rewards, d = gamma^n, or 0 where the episode terminated, s' what followed them.
        """
        q, target = nets["q"], nets["target"]
        after = observed(batch, keys.NEXT_OBS)
        next_values = target(*after)[0]  # [batch_size, num_actions]
        best = (q(*after)[0] if self.config.double else next_values).argmax(-1, keepdim=True)
        goals = batch[keys.RETURNS] + batch[keys.DISCOUNTS] * next_values.gather(-1, best).squeeze(-1)
        actions = self.policy.indices(batch[keys.ACTIONS]).unsqueeze(-1)

        def loss(q: Callable[..., Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            table = q(*observed(batch, keys.OBS))[0]
            values = table.gather(-1, actions).squeeze(-1)
            error = weighted_mean(q_loss(values, goals, self.config.huber_delta), batch)
            gap = (table.logsumexp(-1) - values).mean()
            total = error + self.config.cql_coeff * gap if self.config.cql_coeff else error
            return total, {"losses/q": error, "values": values}

        found, norm = q.minimise(loss)
        target.follow(q, batch[SHARE])
        errors = (found["values"] - goals).abs()
        numbers = {
            "losses/q": found["losses/q"],
            "monitors/q": found["values"].mean(),
            "monitors/td_error": errors.mean(),
            "monitors/grad_norm": norm,
        }
        return Figures(numbers, errors)


class DQN(QLearning, OffPolicyAlgorithm[DQNConfig], config=DQNConfig):
    """Deep Q-learning on one environment. Made by `DQNConfig(...).build(env)`."""

    metrics: tuple[str, ...] = (*OffPolicyAlgorithm.metrics, EPSILON)

    def __init__(self, config: DQNConfig, env: Env, seed: int, env_factory: EnvFactory | None = None) -> None:
        super().__init__(config, env, seed, env_factory)
        self.epsilon_schedule = config.schedule("epsilon")

    def explore(self, *, warms_up: bool) -> dict[str, Number]:
        """Set the share of random actions."""
        epsilon = 1.0 if warms_up else self.epsilon_schedule(self.counters[self.clock])
        self.policy.distribution.set_epsilon(epsilon)
        return {EPSILON: epsilon}

    @property
    def params(self) -> dict[str, Any]:
        """Every hyperparameter by name, as it is in force."""
        return super().params | {"epsilon_schedule": self.epsilon_schedule.to_dict()}


class OfflineDQN(QLearning, OfflineAlgorithm[DQNConfig], config=DQNConfig):
    """Deep Q-learning from a data set, which needs `cql_coeff`. Made by `DQNConfig(...).build(dataset=...)`."""


def q_loss(values: Tensor, goals: Tensor, huber_delta: float | None) -> Tensor:
    """Return how far values are from their goals, `[...]`, each `[...]`.

    e^2 / 2 where |e| <= delta, else delta (|e| - delta / 2),    e = value - goal
    """
    if huber_delta is None:
        return 0.5 * F.mse_loss(values, goals, reduction="none")
    return F.huber_loss(values, goals, reduction="none", delta=huber_delta)
