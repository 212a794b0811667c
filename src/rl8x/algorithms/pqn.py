"""Parallelised Q-network: Q-learning on a rollout, without a replay and without a target network.

Collect a rollout with an epsilon-greedy policy, compute its Q(lambda) returns, and minimise the squared error over a
few epochs. Many copies replace the replay; layer normalisation, which bounds the values of unvisited states, replaces
the target network. Rollouts and epochs are PPO's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from rl8x import keys
from rl8x.algorithms.hyperparameters import Default, option
from rl8x.algorithms.on_policy import Objective, OnPolicyAlgorithm, OnPolicyConfig, SequenceBatch
from rl8x.distributions.discrete import pick
from rl8x.envs.base import Step
from rl8x.envs.parameters import AnyEnvConfig
from rl8x.functional import explained_variance, generalized_advantages
from rl8x.policy import Act
from rl8x.q_values import QPolicy, check_discrete
from rl8x.rollouts.statistics import Number, Stats
from rl8x.rollouts.step import Cursor, Slot, experience
from rl8x.trees import Tree

PQN_LOSS_METRICS: Final = ("losses/q", "monitors/q_values", "monitors/td_error")
_EPSILON: Final = "coefficients/epsilon"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PQNConfig(
    OnPolicyConfig,
    defaults={
        "horizon": 64,
        "lr": 2.5e-4,
        "optimizer": "radam",
        "max_grad_norm": 10.0,
        "sgd_minibatch_size": Default(128),
    },
):
    """Hyperparameters of PQN.

    Source: Gallici et al. 2024, arXiv:2407.04811, algorithm 1.
    """

    num_envs: int = option(
        Default(32),
        "Parallel copies of the environment, stepped as one batch; the paper's tasks have 32 to 1024. Where it is not "
        "given: 16 of a simulator that is stepped copy by copy, as many as an instance has.",
        low=1,
    )
    model_config: dict[str, Any] = option(
        {},
        "Keyword arguments of the model class. 'mlp' and 'cnn' have layer_norm=true by default.",
    )
    gamma: float = option(0.99, "Discount factor of future rewards.", low=0.0, high=1.0)
    q_lambda: float = option(
        0.95, "Lambda of the Q(lambda) returns: 0 is the one-step target, 1 the Monte Carlo return.", low=0.0, high=1.0
    )
    epsilon: float = option(0.1, "Probability of a random action while collecting (epsilon-greedy).", low=0.0, high=1.0)
    epsilon_schedule: list[list[float]] | dict[str, Any] | None = option(
        None, "Epsilon over transitions, in the form of lr_schedule; replaces epsilon."
    )
    dueling: bool = option(False, "Dueling heads: Q = V + A - mean A (arXiv:1511.06581).")
    reward_scale: float = option(1.0, "Factor that rewards are multiplied by.", above=0.0)

    fixed: ClassVar[tuple[str, ...]] = ("dueling",)


class PQN(OnPolicyAlgorithm[PQNConfig], config=PQNConfig):
    """Q-learning on rollouts of one environment. Made by `PQNConfig(...).build(env)`.

    Source: Gallici et al. 2024, arXiv:2407.04811, algorithm 1.
    """

    policy: QPolicy

    def make_policy(self) -> QPolicy:
        """Build the policy, with torch's global generator seeded."""
        check_discrete("PQN", self.action_space, "PPO")
        normalised = {name: {"layer_norm": True} for name in ("mlp", "cnn")}
        return self.policy_of(QPolicy, normalised, dueling=self.config.dueling)

    @property
    def slot(self) -> Slot:
        """The function that returns the tensors of a rollout's slot, including the value of the best action."""
        return best_values

    @property
    def objective(self) -> Objective:
        """The squared error of the values of the actions taken."""
        return Objective(self.losses, PQN_LOSS_METRICS, PQN_LOSS_METRICS[0])

    def collect(self, *, env_config: AnyEnvConfig | None = None) -> Stats:
        """Collect a rollout, with the scheduled epsilon."""
        self.policy.distribution.set_epsilon(self.schedules["epsilon"](self.counters[self.clock]))
        return super().collect(env_config=env_config)

    def learn(self) -> Tensor:
        """Learn from the collected rollout; return the explained variance of the values, 0-d.

        Source: Gallici et al. 2024, arXiv:2407.04811, algorithm 1.
        """
        explained = self.set_targets()  # Q(lambda) returns
        with self.updates() as updates:
            for _ in updates.epochs():
                for minibatches in updates.minibatches():
                    updates.step(minibatches)  # down the gradient of the losses
        return explained

    def targets(self, data: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Compute the Q(lambda) returns that values are trained towards.

            R_t = r_t + gamma ((1 - lambda) max_a Q(s_{t+1}, a) + lambda R_{t+1})    if the episode continues
                  r_t + gamma max_a Q(s', a)                                         if it is truncated in s'
                  r_t                                                                if it is terminated

        with r_t + gamma max_a Q(s_{t+1}, a) at the end of the horizon. These are the returns of generalised advantage
        estimation with max_a Q in place of the state value.

        Source: Peng & Williams 1996, as in Daley & Amato 2019, arXiv:1810.09967, eq. 4.
        """
        config = self.config
        values = self.rollout[keys.VALUES]
        _, returns = generalized_advantages(
            data[keys.REWARDS] * config.reward_scale,
            values,
            data[keys.FINAL_VALUES],
            data[keys.TERMINATED],
            data[keys.TRUNCATED],
            gamma=config.gamma,
            gae_lambda=config.q_lambda,
        )
        targets = {keys.RETURNS: returns, keys.ACTIONS: self.policy.indices(data[keys.ACTIONS])}
        return targets, explained_variance(data[keys.VALUES], returns, data.get(keys.VALID))

    @staticmethod
    def losses(
        policy: Callable[..., Tensor],
        batch: SequenceBatch,
        state: SequenceBatch,
        coefficient: Tensor,
        config: PQNConfig,
    ) -> Tensor:
        """Return the loss and monitors of each transition, in the order of `PQN_LOSS_METRICS`, `[3, seq_len, batch]`.

            L = 1/2 (Q(s_t, a_t) - R_t)^2

        Args:
            policy: A `QPolicy` called as a module, under the weights of the update.
            batch: Observations, starts, actions, counted from 0, and returns, each `[seq_len, batch, ...]`.
            state: The policy's initial states, each `[batch, *]`.
            coefficient: Not used.
            config: Not used.
        """
        q = policy(batch[keys.OBS], state, batch[keys.STARTS])
        taken = pick(q, batch[keys.ACTIONS])
        error = taken - batch[keys.RETURNS]
        return torch.stack((0.5 * error.square(), taken, error.abs()))

    def coefficients(self) -> dict[str, Number]:
        """Return the coefficients other than the learning rate, by metric name."""
        return {_EPSILON: self.policy.distribution.epsilon.clone()}


def best_values(cursor: Cursor, act: Act, step: Step) -> dict[str, Tree]:
    """Return what to store of a step, by name, each `[num_envs, ...]`; `values` are max_a Q."""
    return experience(cursor, act, step) | {keys.VALUES: act.values}
