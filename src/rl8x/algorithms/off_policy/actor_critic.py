"""The common base of SAC and TD3: a policy that is trained by critics Q(s, a).

An algorithm says which actions follow, from which the critics' targets are made, and what the policy's loss is. Here
are the critics' construction, targets and losses, whose values are means or categorical distributions.

Source: Fujimoto et al. 2018, arXiv:1802.09477 (the smaller of two critics); Bellemare et al. 2017, arXiv:1707.06887
(`num_atoms`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from rl8x import keys
from rl8x.algorithms.base import EnvFactory
from rl8x.algorithms.off_policy.actor import Actor
from rl8x.algorithms.off_policy.config import ActorCriticConfig
from rl8x.algorithms.off_policy.critics import Critics, action_values
from rl8x.algorithms.off_policy.learner import Learner
from rl8x.algorithms.off_policy.nets import Loss, Net
from rl8x.algorithms.off_policy.off_policy import OffPolicyAlgorithm
from rl8x.algorithms.off_policy.return_scale import ReturnScale
from rl8x.algorithms.off_policy.updates import (
    Found,
    OffPolicyUpdater,
    Phase,
    ReplayBatch,
    Update,
    UpdateResult,
    weighted_mean,
)
from rl8x.distributions import Distribution
from rl8x.envs import Env
from rl8x.envs.env_config import AnyEnvConfig
from rl8x.functional import expectation, project
from rl8x.rollouts.statistics import Number, Stats
from rl8x.trees import unflatten_tree

ActorCriticConfigT = TypeVar("ActorCriticConfigT", bound=ActorCriticConfig)

CRITIC_METRICS: Final = ("losses/q", "monitors/q", "monitors/td_error", "monitors/q_grad_norm")
"""Metrics of every update, also of those that train only the critics."""
SCALE: Final = "return_scale"
"""Key of a batch: the factor that returns are multiplied by, 0-d; missing if they are not scaled."""


class ActorCritic(Learner[ActorCriticConfigT]):
    """The update of an actor-critic, for rows of a replay or of a data set.

    Attributes:
        critics: The module of the network "q".
    """

    policy: Actor
    critics: Critics

    def make_actor(self, distribution: type[Distribution], distribution_config: Mapping[str, Any]) -> Actor:
        """Return a policy of the config's model.

        Args:
            distribution: Class of its action distribution.
            distribution_config: Keyword arguments of that class.
        """
        config = self.config
        return Actor(
            self.observation_space,
            self.action_space,
            distribution=distribution,
            distribution_config=distribution_config,
            model=config.model,
            model_config=config.model_config,
            normalize_observations=config.normalize_observations,
        )

    def add_critics(self) -> None:
        """Add the critics of the config as the network "q"."""
        config = self.config
        self.critics = Critics(
            self.policy.inputs_space,
            self.action_space,
            num_critics=config.num_critics,
            hidden_sizes=(256, 256) if config.critic_hidden_sizes is None else config.critic_hidden_sizes,
            layer_norm=config.critic_layer_norm,
            num_outputs=config.num_atoms,
        )
        if config.precision == "bf16":
            self.critics.autocast = self.execution.autocast
        self.add_net("q", self.critics)

    def make_cycle(self) -> list[OffPolicyUpdater]:
        """Return a cycle of updates in which every `policy_delay`-th also trains the policy."""
        critics = self.make_updater(Update(self.phases()[:1], self.finish), CRITIC_METRICS)
        return [critics] * (self.config.policy_delay - 1) + super().make_cycle()

    @abstractmethod
    def phases(self) -> list[Phase]:
        """Return the phases of an update, in order; the first is that of the critics."""

    def finish(self, nets: Mapping[str, Net], batch: ReplayBatch, found: Found) -> UpdateResult:
        """Return the metrics, and the errors of the rows, `[batch_size]`.

        Args:
            nets: The networks by name.
            batch: Rows of the replay and drawn noise by name, `[batch_size, ...]` each.
            found: What the phases have found, by name.
        """
        values, td_targets = found["values"], found["td_targets"]
        errors = (values - (td_targets @ self.atoms if self.config.num_atoms > 1 else td_targets)).abs().mean(0)
        return UpdateResult(found | {"monitors/q": values.mean(), "monitors/td_error": errors.mean()}, errors)

    # -- parts of an update

    def critics_obs(self, batch: ReplayBatch, key: str) -> Any:
        """Return a batch's observations as the critics read them.

        Args:
            batch: The rows.
            key: `keys.OBS` or `keys.NEXT_OBS`.

        Returns:
            `[batch_size, *obs]`, or a dict of such.
        """
        return self.policy.model_inputs(unflatten_tree(key, batch))[0]

    @property
    def atoms(self) -> Tensor:
        """The atoms of categorical critics, `[num_atoms]`."""
        config = self.config
        return torch.linspace(config.v_min, config.v_max, config.num_atoms, device=self.device)

    def means(self, outputs: Tensor) -> Tensor:
        """Return the values that the critics' outputs represent.

        Args:
            outputs: `[..., num_atoms]`, or with one atom the values themselves.

        Returns:
            `[...]`.
        """
        return expectation(outputs, self.atoms) if self.config.num_atoms > 1 else outputs

    def bootstrapped(self, next_values: Tensor, batch: ReplayBatch) -> Tensor:
        """Return y = R + d V(s'), given values of next states; R is scaled if there is a `return_bound`.

        Args:
            next_values: V(s'), `[batch_size]`, or `[batch_size, num_atoms]` of atoms.
            batch: Has R and d.
        """
        returns, discounts = batch[keys.RETURNS], batch[keys.DISCOUNTS]
        if SCALE in batch:
            returns = returns * batch[SCALE]
        if next_values.dim() > 1:
            returns, discounts = returns.unsqueeze(-1), discounts.unsqueeze(-1)
        return returns + discounts * next_values

    def critic_targets(self, outputs: Tensor, batch: ReplayBatch, bonus: Tensor | None = None) -> Tensor:
        """Return y = R + d (min_i Q_i'(s', a') + bonus), or its distribution where Q' is that of the smallest mean.

        Args:
            outputs: What the target's critics say of the next actions, `[num_critics, batch_size]`, or with atoms
                `[num_critics, batch_size, num_atoms]`.
            batch: Has R and d.
            bonus: What the next actions are worth beside that, `[batch_size]`.

        Returns:
            `[batch_size]`, or the probabilities of the atoms, `[batch_size, num_atoms]`.
        """
        if self.config.num_atoms == 1:
            least = outputs.amin(0)
            return self.bootstrapped(least if bonus is None else least + bonus, batch)
        index = self.means(outputs).argmin(0).view(1, -1, 1).expand(1, *outputs.shape[1:])
        probs = outputs.gather(0, index).squeeze(0).softmax(-1)
        after = self.atoms if bonus is None else self.atoms + bonus.unsqueeze(-1)
        return project(probs, self.bootstrapped(after.expand_as(probs), batch), self.atoms)

    def q_loss(self, batch: ReplayBatch, td_targets: Tensor, penalty: Callable[..., Tensor] | None = None) -> Loss:
        """Return the loss that moves the critics towards their targets.

            L = sum_i mean of w (Q_i(s, a) - y)^2 / 2,    w = 1, or the importance weight with `prioritized`

        With `num_atoms` it is the cross-entropy towards the distribution of y.

        Args:
            batch: The rows.
            td_targets: As `critic_targets` returns them.
            penalty: Given critics and their values Q_i(s, a), `[num_critics, batch_size]`, returns what is added to
                the loss, 0-d.
        """
        obs, categorical = self.critics_obs(batch, keys.OBS), self.config.num_atoms > 1

        def loss(q: Callable[..., Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            outputs = action_values(q, obs, batch[keys.ACTIONS], self.action_space)
            if categorical:
                losses = -(td_targets * outputs.log_softmax(-1)).sum(-1)
            else:
                losses = 0.5 * (outputs - td_targets).square()
            error, values = weighted_mean(losses.sum(0), batch), self.means(outputs)
            total = error if penalty is None else error + penalty(q, values)
            return total, {"losses/q": error, "values": values, "td_targets": td_targets}

        return loss


class OnlineActorCritic(ActorCritic[ActorCriticConfigT], OffPolicyAlgorithm[ActorCriticConfigT]):
    """Learns from a replay: explores, and scales returns if there is a `return_bound`.

    Attributes:
        return_scale: What rewards are multiplied by in updates; None leaves them as they are.
    """

    def __init__(self, config: ActorCriticConfigT, env: Env, seed: int, env_factory: EnvFactory | None = None) -> None:
        super().__init__(config, env, seed, env_factory)
        bound = config.return_bound
        self.return_scale = None if bound is None else ReturnScale(config.num_envs, config.gamma, bound).to(self.device)

    def explore(self, *, warms_up: bool) -> dict[str, Number]:
        """Act uniformly at random during warm-up, and sample from the policy afterwards."""
        self.policy.set_random(warms_up)
        return {}

    def collect(self, *, env_config: AnyEnvConfig | None = None) -> Stats:
        """Collect a horizon; afterwards the policy samples normally, as evaluations do not warm up."""
        stats = super().collect(env_config=env_config)
        self.policy.set_random(False)
        return stats

    def draw(self, first: int, count: int) -> dict[str, Tensor]:
        """Add the current scale of returns to the inputs of updates."""
        drawn = super().draw(first, count)
        return drawn if self.return_scale is None else drawn | {SCALE: self.return_scale.scale.repeat(count)}

    def observe(self) -> None:
        """Update running moments, and the scale of returns by the last rollout."""
        super().observe()
        if self.return_scale is not None:
            part = {name: each[: self.config.horizon] for name, each in self.rollout.tensors.items()}
            cuts = part[keys.TERMINATED] | part[keys.TRUNCATED]
            self.return_scale.observe(part[keys.REWARDS], cuts, part.get(keys.VALID))

    def cut_returns(self) -> None:
        """Cut pending n-step returns, and the reward sums that the scale is computed from."""
        super().cut_returns()
        if self.return_scale is not None:
            self.return_scale.cut()

    def learned_state(self) -> dict[str, Any]:
        """Return the state that updates change, and the scale of returns."""
        scale = {} if self.return_scale is None else {"return_scale": self.return_scale.state_dict()}
        return super().learned_state() | scale

    def load_learned_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `learned_state` or `state_dict`; the replay stays.

        Raises:
            ValueError: If the state has a scale of returns and this algorithm none, or the other way round.
        """
        if ("return_scale" in state) != (self.return_scale is not None):
            had = "a" if "return_scale" in state else "no"
            raise ValueError(
                f"the run had {had} `return_bound`, which decides what its critics' values mean; "
                f"got {self.config.return_bound}. Resume it as it was."
            )
        super().load_learned_state(state)
        if self.return_scale is not None:
            self.return_scale.load_state_dict(state["return_scale"])

    def state_dict(self) -> dict[str, Any]:
        """Return all state that the next collect and step depend on, including reward sums of running episodes."""
        behind = {} if self.return_scale is None else {"running_return": self.return_scale.carry}
        return super().state_dict() | behind

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`; training continues with the same bits.

        Raises:
            ValueError: As `load_learned_state` does.
        """
        super().load_state_dict(state)
        if self.return_scale is not None:
            self.return_scale.carry.copy_(state["running_return"])
