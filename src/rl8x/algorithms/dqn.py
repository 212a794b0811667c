"""Deep Q-learning: action values, learned from a replay with a target network."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from rl8x import keys
from rl8x.algorithms.hyperparameters import Default, option
from rl8x.algorithms.off_policy.actor_critic import weighted_mean
from rl8x.algorithms.off_policy.config import OffPolicyConfig, no_atoms
from rl8x.algorithms.off_policy.learner import Learner, observed
from rl8x.algorithms.off_policy.updates import ERRORS, Found, Loss, Minimise, Net, Phase, ReplayBatch
from rl8x.distributed import ranks
from rl8x.functional import project
from rl8x.q_values import QPolicy, check_discrete
from rl8x.rollouts.statistics import Number
from rl8x.schedules import Schedule

EPSILON: Final = "coefficients/epsilon"

# Default arguments of the model "mlp".
STABLE: Final = {"hidden_sizes": (128, 128), "layer_norm": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DQNConfig(
    OffPolicyConfig,
    defaults={
        "batch_size": 128,
        "updates_per_sample": 0.25,
        "n_step": Default(3),
        "tau": 1.0,
        "lr": 2.5e-4,
        "max_grad_norm": 10.0,
    },
):
    """Hyperparameters of DQN, with defaults that learn the classic tasks.

    The paper's one-step returns and unnormalised layers overestimate the values of CartPole, on some seeds without
    bound, so that a good policy is lost again. With a data set, which another policy collected, the default of
    `n_step` is 1.

    Source: Mnih et al. 2015, doi:10.1038/nature14236; `double`: van Hasselt et al. 2016, arXiv:1509.06461; `dueling`:
    Wang et al. 2016, arXiv:1511.06581; `prioritized`: Schaul et al. 2016, arXiv:1511.05952; `num_atoms`: Bellemare et
    al. 2017, arXiv:1707.06887, algorithm 1; `num_quantiles`: Dabney et al. 2017, arXiv:1710.10044, algorithm 1;
    `cql_coeff`: Kumar et al. 2020, arXiv:2006.04779.
    """

    model_config: dict[str, Any] = option(
        {}, "Keyword arguments of the model class. 'mlp' has hidden_sizes=[128, 128] and layer_norm=true by default."
    )
    target_interval: int = option(
        500, "Transitions, or updates with a data set, between two updates of the target network.", low=1
    )
    epsilon: float = option(
        0.05, "Probability of a random action (epsilon-greedy), once it has decayed.", low=0.0, high=1.0
    )
    epsilon_decay_steps: int = option(
        10_000,
        "Transitions over which epsilon falls from 1 to its value, linearly; 0: none.",
        low=0,
        idle=lambda config: (
            None if config.epsilon_schedule is None else "`epsilon_schedule` replaces it. Leave one of them out"
        ),
    )
    epsilon_schedule: list[list[float]] | dict[str, Any] | None = option(
        None, "Epsilon over transitions, in the form of lr_schedule; replaces epsilon and epsilon_decay_steps."
    )
    double: bool = option(
        True,
        "Double Q-learning: the trained network selects the next action and the target network evaluates it "
        "(arXiv:1509.06461).",
    )
    dueling: bool = option(False, "Dueling heads: Q = V + A - mean A (arXiv:1511.06581).")
    huber_delta: float | None = option(
        1.0,
        "Delta of the Huber loss, also of quantiles. None: half the squared error, whose rare large errors at episode "
        "ends make learning unstable; with num_quantiles the absolute error.",
        above=0.0,
        idle=lambda config: "the loss of atoms is a cross-entropy. Leave it out" if config.num_atoms > 1 else None,
    )
    num_atoms: int = option(
        1,
        "C51: atoms of a categorical distribution of the return, from v_min to v_max (arXiv:1707.06887 has 51); 1: "
        "the network predicts the mean return alone. An update has batch_size * num_atoms^2 numbers.",
        low=1,
        high=1000,
    )
    v_min: float = option(-10.0, "Lowest atom: the smallest discounted return; must be less than v_max.", idle=no_atoms)
    v_max: float = option(10.0, "Highest atom: the largest discounted return.", idle=no_atoms)
    num_quantiles: int = option(
        1,
        "QR-DQN: quantiles of the return, without bounds (arXiv:1710.10044 has 200, with huber_delta 1); 1: the "
        "network predicts the mean return alone. An update has batch_size * num_quantiles^2 numbers.",
        low=1,
        high=1000,
    )
    cql_coeff: float = option(
        0.0,
        "Weight of the discrete CQL loss, logsumexp Q - Q(s, a), which lowers the values of actions that are not in "
        "the data (arXiv:2006.04779). For data sets.",
        low=0.0,
        offline=True,
    )

    fixed: ClassVar[tuple[str, ...]] = ("dueling", "num_quantiles", "num_atoms", "v_min", "v_max")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset is not None and isinstance(self.n_step, Default):
            object.__setattr__(self, "n_step", Default(1))
        if not -math.inf < self.v_min < self.v_max < math.inf:
            raise ValueError(f"`v_min` must be less than `v_max`, both finite; got {self.v_min} and {self.v_max}.")
        if self.num_atoms > 1 and self.num_quantiles > 1:
            given = f"{self.num_atoms} and {self.num_quantiles}"
            raise ValueError(f"`num_atoms` and `num_quantiles` exclude each other; got {given}. Leave one at 1.")

    def schedule(self, name: str) -> Schedule:
        """Return the schedule of a hyperparameter; that of epsilon decays from 1 by default."""
        if name == "epsilon" and self.epsilon_schedule is None and self.epsilon_decay_steps:
            points = ((0, 1.0), (self.epsilon_decay_steps, self.epsilon))
            return Schedule(points, "interp", "epsilon_schedule")
        return super().schedule(name)

    def tau_of(self, update: int) -> float:
        """Return tau of the target network after an update, counted from 1; 0 unless an interval ends with it."""
        # Each rank makes its share of the updates for the transitions of all ranks.
        ratio = Fraction(1) if self.dataset is not None else self.update_ratio / ranks().size
        interval = self.target_interval * ratio.numerator  # in updates, times the denominator
        return self.tau if update * ratio.denominator % interval < ratio.denominator else 0.0


class DQN(Learner[DQNConfig], config=DQNConfig):
    """Deep Q-learning. Made by `DQNConfig(...).build(env)`.

    It learns from a replay, or with `DQNConfig(...).build(dataset=...)` from a data set: then set `cql_coeff`.

    Source: Mnih et al. 2015, doi:10.1038/nature14236, algorithm 1.
    """

    update_metrics: ClassVar[tuple[str, ...]] = ("losses/q", "monitors/q", "monitors/td_error", "monitors/grad_norm")
    explore_metrics: ClassVar[tuple[str, ...]] = (EPSILON,)

    policy: QPolicy

    def check_spaces(self) -> None:
        """Raise if the action space is not discrete."""
        check_discrete("DQN", self.action_space, "PPO")

    def make_policy(self) -> QPolicy:
        """Return an epsilon-greedy policy over values of actions."""
        config = self.config
        return self.policy_of(
            QPolicy,
            {"mlp": STABLE},
            dueling=config.dueling,
            num_outputs=max(config.num_atoms, config.num_quantiles),
            support=(config.v_min, config.v_max) if config.num_atoms > 1 else None,
        )

    def make_nets(self) -> None:
        """Add the policy and its target network."""
        self.add_net("q", self.policy)
        self.nets.add_target("target", of="q")

    @contextlib.contextmanager
    def exploring(self, *, warms_up: bool) -> Iterator[dict[str, Number]]:
        """Set epsilon, the probability of random actions."""
        epsilon = 1.0 if warms_up else self.schedules["epsilon"](self.counters[self.clock])
        self.policy.distribution.set_epsilon(epsilon)
        yield {EPSILON: epsilon}

    def phases(self) -> list[Phase]:
        """Return the update of the values."""
        return [Minimise("q", self._q_loss, "monitors/grad_norm")]

    def _q_loss(self, nets: Mapping[str, Net], batch: ReplayBatch, found: Found) -> Loss:
        """Return the loss that moves Q(s, a) towards the n-step return plus the target network's value of s'.

            y = R + d Q'(s', a'),    a' = argmax_a Q(s', a) with `double`, else argmax_a Q'(s', a)
            L = mean of w huber(Q(s, a) - y) + cql_coeff mean of (log sum_b exp Q(s, b) - Q(s, a))

        w is 1, or the importance weight with `prioritized`, whose priorities are |Q(s, a) - y|.

        R is the sum of n discounted rewards, d = gamma^n, or 0 where the episode terminated, and s' the next state.
        If the network predicts distributions Z of returns, Q is their mean, and in place of huber there is the
        distance between Z(s, a) and R + d Z'(s', a'), with Z' the target network's; see `_losses`.
        """
        q, target = nets["q"], nets["target"]
        after = observed(batch, keys.NEXT_OBS)
        next_values, next_outputs = (sequence[0] for sequence in target(*after, True))  # [batch_size, num_actions, ...]
        best = (q(*after)[0] if self.config.double else next_values).argmax(-1)
        following = of_actions(next_outputs, best)
        actions = self.policy.indices(batch[keys.ACTIONS])

        def loss(q: Callable[..., Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            table, outputs = (sequence[0] for sequence in q(*observed(batch, keys.OBS), True))
            taken = of_actions(outputs, actions)
            values = self.policy.means(taken)
            losses, td_targets = self._losses(taken, following, batch[keys.RETURNS], batch[keys.DISCOUNTS])
            error = weighted_mean(losses, batch)
            total = error
            if self.config.cql_coeff:
                total = error + self.config.cql_coeff * (table.logsumexp(-1) - values).mean()
            return total, {"losses/q": error, "values": values, "td_targets": td_targets}

        return loss

    def finish(self, nets: Mapping[str, Net], batch: ReplayBatch, found: Found) -> None:
        """Move the target network, and add the metrics."""
        super().finish(nets, batch, found)
        errors = (found["values"] - found["td_targets"]).abs()
        found |= {"monitors/q": found["values"].mean(), "monitors/td_error": errors.mean(), ERRORS: errors}

    def _losses(self, outputs: Tensor, following: Tensor, returns: Tensor, discounts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses of rows and the expectations of their targets y, `[batch_size]` each.

        `outputs` are those for the actions taken, and `following` those of the target network for the best next ones,
        `[batch_size]`, or `[batch_size, num_outputs]` for distributions.
        """
        config, atoms = self.config, self.policy.atoms
        if outputs.dim() == 1:
            td_targets = returns + discounts * following
            return q_loss(outputs, td_targets, config.huber_delta), td_targets
        if atoms is None:
            td_targets = returns.unsqueeze(-1) + discounts.unsqueeze(-1) * following
            return quantile_loss(outputs, td_targets, config.huber_delta), td_targets.mean(-1)
        td_targets = returns.unsqueeze(-1) + discounts.unsqueeze(-1) * atoms
        probs = project(following.softmax(-1), td_targets, atoms)
        return -(probs * outputs.log_softmax(-1)).sum(-1), probs @ atoms


def q_loss(values: Tensor, td_targets: Tensor, huber_delta: float | None) -> Tensor:
    """Return the loss of each value against its target, `[...]`.

    e^2 / 2 where |e| <= delta, else delta (|e| - delta / 2),    e = value - target
    """
    if huber_delta is None:
        return 0.5 * F.mse_loss(values, td_targets, reduction="none")
    return F.huber_loss(values, td_targets, reduction="none", delta=huber_delta)


def quantile_loss(quantiles: Tensor, td_targets: Tensor, huber_delta: float | None) -> Tensor:
    """Return the quantile Huber loss of quantiles theta, `[batch_size, N]`, against targets y, `[batch_size, any]`.

        sum over i of the mean over j of |tau_i - [u < 0]| huber(u) / delta,    u = y_j - theta_i, tau_i = (i + 1/2) / N

    with |u|, the limit for small delta, in place of huber(u) / delta if delta is None.

    Source: Dabney et al. 2017, arXiv:1710.10044, eq. 9 and 10; the division by delta: Dabney et al. 2018,
    arXiv:1806.06923, eq. 3.
    """
    num_quantiles = quantiles.shape[-1]
    shares = (torch.arange(num_quantiles, device=quantiles.device, dtype=quantiles.dtype) + 0.5) / num_quantiles
    errors = td_targets.unsqueeze(-2) - quantiles.unsqueeze(-1)  # [batch_size, quantile, target]
    if huber_delta is None:
        sizes = errors.abs()
    else:
        sizes = F.huber_loss(errors, torch.zeros_like(errors), reduction="none", delta=huber_delta) / huber_delta
    return ((shares.unsqueeze(-1) - (errors < 0).to(errors.dtype)).abs() * sizes).mean(-1).sum(-1)


def of_actions(table: Tensor, actions: Tensor) -> Tensor:
    """Select the entry of each row's action from `[batch_size, num_actions, ...]`; return `[batch_size, ...]`."""
    index = actions.reshape(-1, *[1] * (table.dim() - 1)).expand(-1, 1, *table.shape[2:])
    return table.gather(1, index).squeeze(1)
