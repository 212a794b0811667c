"""Soft actor-critic: a policy that maximises rewards and its own entropy, from a replay."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, NamedTuple, Self

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl8x import keys
from rl8x.algorithms.base import WITHOUT_VALUES
from rl8x.algorithms.hyperparameters import PRESETS, Default, option
from rl8x.algorithms.off_policy.actor_critic import (
    CRITIC_METRICS,
    Actor,
    Critics,
    bootstrapped,
    check_bounded,
    make_critics,
    weighted_mean,
)
from rl8x.algorithms.off_policy.config import ActorCriticConfig
from rl8x.algorithms.off_policy.learner import Learner, model_obs, observed
from rl8x.algorithms.off_policy.updates import Found, Loss, Minimise, Net, Phase, ReplayBatch
from rl8x.distributions import Categorical, SquashedNormal
from rl8x.trees import tree_map, unflatten_tree

NOISE: Final = "noise"
"""Key of a batch: normal noise of the next actions and of the actions at its rows, `[2, batch_size, num_noise]`."""
CQL_NOISE: Final = "cql_noise"
"""Key of a batch: noise of the actions that `cql_coeff` samples, `[3, cql_samples, batch_size, num_noise]`."""


def _fixed_alpha(config: Any) -> str | None:
    """Return why the options of a learned temperature have no effect, if it is fixed."""
    return None if config.alpha is None else "`alpha` fixes the temperature. Leave one of them out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SACConfig(ActorCriticConfig):
    """Hyperparameters of SAC.

    Source: Haarnoja et al. 2018, arXiv:1812.05905; discrete actions: Christodoulou 2019, arXiv:1910.07207; `num_atoms`:
    Bellemare et al. 2017, arXiv:1707.06887; `cql_coeff`: Kumar et al. 2020, arXiv:2006.04779.
    """

    distribution_config: dict[str, Any] = option(
        {}, "Keyword arguments of the squashed normal distribution, such as initial_std. Discrete actions take none."
    )
    alpha: float | None = option(None, "Fixed temperature, the weight of the entropy. None: learned.", low=0.0)
    initial_alpha: float = option(1.0, "Initial value of a learned temperature.", above=0.0, idle=_fixed_alpha)
    target_entropy: float | None = option(
        None,
        "Target entropy of a learned temperature, in nats, for actions scaled to [-1, 1]. None: minus the number of "
        "dimensions; for discrete actions target_entropy_frac * log(n), n being the number of actions that the mask "
        "allows.",
        idle=_fixed_alpha,
    )
    target_entropy_frac: float = option(
        0.98,
        "Target entropy for discrete actions, as a fraction of the largest entropy (arXiv:1910.07207).",
        low=0.0,
        high=1.0,
        idle=_fixed_alpha,
    )
    cql_coeff: float = option(
        0.0,
        "Weight of the CQL penalty in the critics' loss, which lowers the values of actions that are not in the data "
        "(arXiv:2006.04779). For data sets.",
        low=0.0,
        offline=True,
    )
    cql_samples: int = option(
        10,
        "Sampled actions of each kind (uniform, the policy's at s and at s') that estimate the integral of the CQL "
        "penalty; discrete actions need none.",
        low=1,
        offline=True,
    )

    @classmethod
    def gpu(cls, **given: Any) -> Self:
        """Return the config with FastSAC's values, for many copies on a GPU; `given` values replace them."""
        return cls.preset("gpu", **given)


class Temperature(nn.Module):
    """The logarithm of the temperature, as a module without inputs."""

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor([math.log(initial)]))

    def forward(self) -> Tensor:
        """Return log alpha, 0-d."""
        return self.log_alpha[0]


class Acted(NamedTuple):
    """Actions of a policy: samples, or probabilities of discrete ones, and estimated entropies, per row."""

    actions: tuple[Tensor, ...]
    probs: Tensor | None
    entropies: Tensor

    def expected(self, values: Tensor) -> Tensor:
        """Return values of continuous actions, `[batch_size]`, unchanged; of discrete ones the expectation."""
        return values if self.probs is None else (self.probs * values).sum(-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FastSACConfig(SACConfig, defaults=PRESETS["SAC"]["gpu"]):
    """SAC for a thousand copies of a simulator on an accelerator (FastSAC): 8 updates per step of all copies.

    Large batches, few updates per transition, fast targets, and categorical critics with layer normalisation.
    `return_bound` scales rewards, so that atoms need no bounds per task.

    Source: Seo et al. 2025, arXiv:2512.01996, and its code in holosoma (hyperparameters).
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlashSACConfig(
    SACConfig,
    defaults={
        "num_envs": Default(1024),
        "horizon": 1,
        "batch_size": 2048,
        "updates_per_sample": 2 / 1024,
        "warmup_steps": 10 * 1024,
        "tau": 0.01,
        "lr_schedule": {"kind": "interp", "points": [[0, 3e-4], [50_000_000, 1.5e-4]]},
        "critic_layer_norm": True,
        "num_atoms": 101,
        "return_bound": 5.0,
        "policy_delay": 2,
        "initial_alpha": 0.01,
    },
):
    """SAC for a thousand copies with few updates (FlashSAC): 2 per step of all copies.

    From the paper: batch size, tau, learning rates, atoms, the bound of returns, the policy's delay, the initial
    temperature, and a warm-up of ten thousand transitions. Different here: updates per step, the transitions over
    which the learning rate decays (in the paper the whole run), and layer normalisation with plain networks. The paper
    has residual networks with bounded weights, features and gradients, a target entropy that depends on the action
    dimensions, and exploration noise that repeats.

    Source: Kim et al. 2026, arXiv:2604.04539, and its code (hyperparameters).
    """


class SAC(Learner[SACConfig], config=SACConfig):
    """Soft actor-critic. Made by `SACConfig(...).build(env)`.

    It learns from a replay, or with `SACConfig(...).build(dataset=...)` from a data set: then set `cql_coeff`.

    Source: Haarnoja et al. 2018, arXiv:1812.05905, algorithm 1.
    """

    update_metrics: ClassVar[tuple[str, ...]] = (
        *CRITIC_METRICS,
        "losses/policy",
        "losses/alpha",
        "monitors/entropy",
        "coefficients/alpha",
        "monitors/policy_grad_norm",
    )

    policy: Actor
    critics: Critics

    def check_spaces(self) -> None:
        """Raise unless actions are discrete or in a bounded box."""
        check_bounded("SAC", self.action_space, discrete=True)
        if self.is_discrete and self.config.num_atoms > 1:
            raise ValueError(f"`num_atoms` must be 1 for discrete actions; got {self.config.num_atoms}.")

    @property
    def is_discrete(self) -> bool:
        """Whether actions are discrete, so that expectations over them are exact."""
        return isinstance(self.action_space, spaces.Discrete)

    def make_policy(self) -> Actor:
        """Return a policy that samples squashed normal actions, or discrete ones."""
        kind = Categorical if self.is_discrete else SquashedNormal
        return self.policy_of(Actor, WITHOUT_VALUES, distribution=kind)

    def make_nets(self) -> None:
        """Add the critics with a target network, the policy, and the temperature unless it is fixed."""
        self.critics = make_critics(self)
        self.add_net("q", self.critics)
        self.nets.add_target("target", of="q")
        self.add_net("policy", self.policy)
        if self.config.alpha is None:
            self.add_net("alpha", Temperature(self.config.initial_alpha))

    @property
    def target_entropy(self) -> float:
        """The target entropy of a learned temperature, in nats, for actions scaled to [-1, 1]."""
        space, given = self.action_space, self.config.target_entropy
        if given is not None:
            return given
        if isinstance(space, spaces.Discrete):
            return self.config.target_entropy_frac * math.log(int(space.n))
        assert space.shape is not None
        return -float(math.prod(space.shape))

    def draw(self, first: int, count: int) -> dict[str, Tensor]:
        """Draw the inputs of updates, including action noise."""
        drawn, config = super().draw(first, count), self.config
        sizes: dict[str, tuple[int, ...]] = {} if self.is_discrete else {NOISE: (2,)}
        if self._num_tried:
            sizes[CQL_NOISE] = (3, config.cql_samples)
        for name, size in sizes.items():
            shape = (count, *size, self.batch_size, self.policy.distribution.num_noise)
            drawn[name] = torch.randn(shape, generator=self.generator, device=self.device)
        return drawn

    @property
    def _num_tried(self) -> int:
        """Number of actions per row that `cql_coeff` samples."""
        return 3 * self.config.cql_samples if self.config.cql_coeff > 0 and not self.is_discrete else 0

    @property
    def _row_bytes(self) -> int:
        noise_bytes = self.policy.distribution.num_noise * torch.float32.itemsize
        return super()._row_bytes + self._num_tried * noise_bytes

    @property
    def _work(self) -> int:
        return super()._work + self.batch_size * self._num_tried * len(self.nets.trained["q"].weights)

    def phases(self) -> list[Phase]:
        """Return the updates of the critics, of the policy towards actions of high value, and of the temperature.

            V(s)  = E_a[min_i Q_i(s, a) - alpha log pi(a | s)],    a ~ pi(s); V' is the same with the targets' Q'
            y     = R + d V'(s')
            L_Q   = sum_i mean of w (Q_i(s, a) - y)^2 / 2,    w = 1, or the importance weight with `prioritized`
            L_pi  = -mean of V(s), with the updated critics
            L_log = mean of alpha (H(pi(s)) - target entropy)

        Expectations are estimated by one sample; over discrete actions they are exact. L_pi has the importance
        weights too. R, d and s' are those of `DQN`; a `return_bound` scales R. With `num_atoms` L_Q is the
        cross-entropy to the distribution of y, where Q' is the target critic with the smallest mean. `cql_coeff` adds
        `_conservatism` to L_Q.
        """
        critics = Minimise("q", self._critic_loss, "monitors/q_grad_norm")
        policy = Minimise("policy", self._policy_loss, "monitors/policy_grad_norm")
        return [critics, policy, *([Minimise("alpha", self._alpha_loss)] if self.config.alpha is None else [])]

    def _critic_loss(self, nets: Mapping[str, Net], batch: ReplayBatch, found: Found) -> Loss:
        """Return L_Q; also add the temperature to `found`, for later phases."""
        fixed = self.config.alpha
        alpha = nets["alpha"]().exp() if fixed is None else torch.full((), fixed, device=self.device)
        found["coefficients/alpha"] = alpha
        penalty = self._conservatism(nets, batch) if self.config.cql_coeff else None
        td_targets = self._td_targets(nets, batch, alpha, batch.get(NOISE, (None, None))[0])
        return self.critics.loss(model_obs(self.policy, batch, keys.OBS), batch, td_targets, penalty)

    def _policy_loss(self, nets: Mapping[str, Net], batch: ReplayBatch, found: Found) -> Loss:
        """Return L_pi."""
        q, obs, alpha = nets["q"], model_obs(self.policy, batch, keys.OBS), found["coefficients/alpha"]
        noise = batch.get(NOISE, (None, None))[1]

        def loss(policy: Callable[..., Any]) -> tuple[Tensor, dict[str, Tensor]]:
            acted = self._acted(policy(*observed(batch, keys.OBS)), noise)
            values = acted.expected(self.critics.means(q(obs, *acted.actions)).amin(0)) + alpha * acted.entropies
            total = -weighted_mean(values, batch)
            return total, {"losses/policy": total, "entropies": acted.entropies}

        return loss

    def _alpha_loss(self, nets: Mapping[str, Net], batch: ReplayBatch, found: Found) -> Loss:
        """Return L_log."""
        gaps = found["entropies"] - self._target_entropies(batch)
        return lambda log_alpha: ((log_alpha().exp() * gaps).mean(), {})

    def finish(self, nets: Mapping[str, Net], batch: ReplayBatch, found: Found) -> None:
        """Move the target network, and add the metrics."""
        super().finish(nets, batch, found)
        if "entropies" in found:  # the policy was trained
            gaps = found["entropies"] - self._target_entropies(batch)
            found["losses/alpha"] = (found["coefficients/alpha"] * gaps).mean()
            found["monitors/entropy"] = found["entropies"].mean()
        self.critics.measure(found)

    def _target_entropies(self, batch: ReplayBatch) -> Tensor | float:
        """Return each row's target entropy, `[batch_size]`: one that can be reached where a mask allows few actions."""
        mask = self.policy.model_inputs(unflatten_tree(keys.OBS, batch))[1] if self.policy.masked else None
        if mask is None or self.config.target_entropy is not None:
            return self.target_entropy
        num_legal: Tensor = (mask | ~mask.any(-1, keepdim=True)).sum(-1)
        return self.config.target_entropy_frac * num_legal.log()

    def _td_targets(self, nets: Mapping[str, Net], batch: ReplayBatch, alpha: Tensor, noise: Tensor | None) -> Tensor:
        """Return y, `[batch_size]`, or the probabilities of the atoms for it, `[batch_size, num_atoms]`."""
        acted = self._acted(nets["policy"](*observed(batch, keys.NEXT_OBS)), noise)
        outputs = nets["target"](model_obs(self.policy, batch, keys.NEXT_OBS), *acted.actions)
        bonus = alpha * acted.entropies
        if self.is_discrete:
            return bootstrapped(acted.expected(outputs.amin(0)) + bonus, batch)
        return self.critics.targets(outputs, batch, bonus)

    def _acted(self, params: Any, noise: Tensor | None) -> Acted:
        """Return the actions of a policy, given the parameters of its distributions."""
        distribution = self.policy.distribution
        if noise is not None:
            assert isinstance(distribution, SquashedNormal)
            actions, logp = distribution.rsample(params, noise)
            # Entropies are of actions scaled to [-1, 1], so that they do not depend on the units of actions.
            return Acted((actions,), None, -(logp + distribution.log_scale.sum()))
        probs = params.log_probs.exp()
        # The log-probability of a masked action is finite but huge, and alpha times it may be infinite.
        return Acted((), probs, -(probs * torch.where(probs > 0, params.log_probs, 0.0)).sum(-1))

    def _conservatism(self, nets: Mapping[str, Net], batch: ReplayBatch) -> Callable[..., Tensor]:
        """Return the CQL penalty, which lowers the values of actions that are not in the data.

            cql_coeff sum_i mean of (log integral exp Q_i(s, b) db - Q_i(s, a))

        over actions b scaled to [-1, 1]; for discrete actions it is a sum. The integral is estimated by the mean of exp
        Q(s, b) / p(b) over three kinds of b; see `_cql_actions`.

        Source: Kumar et al. 2020, arXiv:2006.04779, eq. 4 and appendix F.
        """
        obs, config = model_obs(self.policy, batch, keys.OBS), self.config
        if self.is_discrete:
            mask = self.policy.model_inputs(unflatten_tree(keys.OBS, batch))[1]

            def log_sums(q: Callable[..., Tensor]) -> Tensor:
                values = q(obs)
                legal = values if mask is None else torch.where(mask | ~mask.any(-1, keepdim=True), values, -torch.inf)
                return legal.logsumexp(-1)
        else:
            actions, log_weights = self._cql_actions(nets, batch)
            count = len(log_weights)
            repeated = tree_map(lambda part: part.repeat(count, *[1] * (part.dim() - 1)), obs)

            def log_sums(q: Callable[..., Tensor]) -> Tensor:
                values = self.critics.means(q(repeated, actions.flatten(0, 1)))
                return (values.view(-1, *log_weights.shape) + log_weights).logsumexp(1) - math.log(count)

        return lambda q, values: config.cql_coeff * (log_sums(q) - values).mean(-1).sum()

    def _cql_actions(self, nets: Mapping[str, Net], batch: ReplayBatch) -> tuple[Tensor, Tensor]:
        """Return uniform, present and next actions, `[3 cql_samples, ...]`, and their negative log-densities."""
        noise = batch[CQL_NOISE]
        of_policy = [
            self._acted(nets["policy"](*observed(batch, key)), each)
            for key, each in zip((keys.OBS, keys.NEXT_OBS), noise[1:], strict=True)
        ]
        now, after = (each.actions[0] for each in of_policy)
        uniform = self.policy.random_actions(unflatten_tree(keys.OBS, batch), noise[0].flatten(0, 1)).view_as(now)
        of_uniform = torch.full_like(of_policy[0].entropies, noise.shape[-1] * math.log(2.0))
        return torch.cat([uniform, now, after]), torch.cat([of_uniform, *[each.entropies for each in of_policy]])

    @property
    def params(self) -> dict[str, Any]:
        """The effective hyperparameters by name."""
        return super().params | {"target_entropy": self.target_entropy}
