"""Soft actor-critic: a policy that maximises rewards and its own entropy, from a replay.

Source: Haarnoja et al. 2018, arXiv:1812.05905, algorithm 1; discrete actions: Christodoulou 2019, arXiv:1910.07207;
`num_atoms`: Bellemare et al. 2017, arXiv:1707.06887.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl8x import keys
from rl8x.algorithms.base import EnvFactory
from rl8x.algorithms.hyperparameters import option
from rl8x.algorithms.off_policy.actor import Actor
from rl8x.algorithms.off_policy.config import ActorCriticConfig
from rl8x.algorithms.off_policy.critics import Critics, expectation, project
from rl8x.algorithms.off_policy.learner import SHARE, observed
from rl8x.algorithms.off_policy.nets import Net
from rl8x.algorithms.off_policy.off_policy import OffPolicyAlgorithm
from rl8x.algorithms.off_policy.return_scale import ReturnScale
from rl8x.algorithms.off_policy.updates import Batch, Figures, weighted_mean
from rl8x.distributions import Categorical, SquashedNormal
from rl8x.envs import Env
from rl8x.rollouts.statistics import Number, Stats
from rl8x.spaces import describe
from rl8x.trees import unflatten_tree

NOISE: Final = "noise"
"""Of an update's batch: standard normal numbers of the actions after and at its rows, `[2, batch_size, num_noise]`."""
TRAINS_POLICY: Final = "trains_policy"
"""Of an update's batch: whether policy and temperature are trained, 0-d bool; missing where they always are."""
SCALE: Final = "return_scale"
"""Of an update's batch: what returns are multiplied by, 0-d; missing where they are not."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SACConfig(ActorCriticConfig):
    """Hyperparameters of SAC."""

    distribution_config: dict[str, Any] = option(
        {}, "Keyword arguments of the squashed normal distribution, such as initial_std; none for discrete actions."
    )
    return_bound: float | None = option(
        None,
        "Rewards are divided in updates so that discounted returns lie within plus and minus this, and atoms from -5 "
        "to 5 fit any task. None leaves them as they are.",
        above=0.0,
    )
    alpha: float | None = option(None, "Temperature: the weight of the entropy. None learns it.", low=0.0)
    initial_alpha: float = option(1.0, "What a learned temperature starts from.", above=0.0)
    target_entropy: float | None = option(
        None,
        "The entropy that a learned temperature keeps, in nats, of actions scaled to [-1, 1]. None: minus the number "
        "of dimensions; of n discrete actions target_entropy_frac log n.",
    )
    target_entropy_frac: float = option(
        0.98, "Share of the largest entropy that is the target for discrete actions.", low=0.0, high=1.0
    )


class Temperature(nn.Module):
    """The logarithm of the entropy's weight, as a network without inputs."""

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor([math.log(initial)]))

    def forward(self) -> Tensor:
        """Return log alpha, 0-d."""
        return self.log_alpha[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FastSACConfig(
    SACConfig,
    defaults={
        "num_envs": 1024,
        "horizon": 1,
        "batch_size": 8192,
        "updates_per_sample": 8 / 1024,
        "warmup_steps": 10 * 1024,
        "gamma": 0.97,
        "tau": 0.125,
        "critic_layer_norm": True,
        "num_atoms": 101,
        "return_bound": 5.0,
        "policy_delay": 4,
        "initial_alpha": 0.001,
    },
):
    """SAC for a thousand copies of a simulator on an accelerator (FastSAC): 8 updates for each step of all copies.

    Large batches, few updates for each transition, fast targets, and categorical critics with layer normalisation.
    Atoms need no bounds of each task, since rewards are scaled to returns.

    Source: Seo et al. 2025, arXiv:2512.01996, and its code in holosoma (hyperparameters).
    """


class SAC(OffPolicyAlgorithm[SACConfig], config=SACConfig):
    """Soft actor-critic on one environment. Made by `SACConfig(...).build(env)`."""

    numbers: ClassVar[tuple[str, ...]] = (
        "losses/q",
        "losses/policy",
        "losses/alpha",
        "monitors/q",
        "monitors/td_error",
        "monitors/entropy",
        "coefficients/alpha",
        "monitors/q_grad_norm",
        "monitors/policy_grad_norm",
    )

    policy: Actor

    def __init__(self, config: SACConfig, env: Env, seed: int, env_factory: EnvFactory | None = None) -> None:
        super().__init__(config, env, seed, env_factory)
        bound = config.return_bound
        self.return_scale = None if bound is None else ReturnScale(config.num_envs, config.gamma, bound).to(self.device)

    def check_spaces(self) -> None:
        """Refuse actions that are neither numbered nor in a bounded box."""
        space = self.action_space
        if not isinstance(space, spaces.Discrete) and not is_bounded_box(space):
            raise ValueError(
                f"SAC needs a Box action space of floats with finite bounds, or a Discrete one; got {describe(space)}. "
                "Use PPO."
            )
        if isinstance(space, spaces.Discrete) and self.config.num_atoms > 1:
            raise ValueError(f"`num_atoms` must be 1 for discrete actions; got {self.config.num_atoms}.")

    def make_policy(self) -> Actor:
        """Return a policy that samples squashed normal actions, or discrete ones."""
        config, space = self.config, self.action_space
        return Actor(
            self.observation_space,
            space,
            distribution=Categorical if isinstance(space, spaces.Discrete) else SquashedNormal,
            distribution_config=config.distribution_config,
            model=config.model,
            model_config=config.model_config,
            normalize_observations=config.normalize_observations,
        )

    def make_nets(self) -> None:
        """Train critics, which a target follows, the policy, and the temperature unless it is fixed."""
        config, space = self.config, self.action_space
        self.critics = Critics(
            self.policy.model.observation_space,
            space,
            num_critics=config.num_critics,
            hidden_sizes=(256, 256) if config.critic_hidden_sizes is None else config.critic_hidden_sizes,
            layer_norm=config.critic_layer_norm,
            num_outputs=config.num_atoms,
        )
        if config.precision == "bf16":
            self.critics.autocast = self.execution.autocast
        self.add_net("q", self.critics)
        self.nets.add_target("target", of="q")
        self.add_net("policy", self.policy)
        if config.alpha is None:
            self.add_net("alpha", Temperature(config.initial_alpha))
        self.target_entropy = self._target_entropy()

    def _target_entropy(self) -> float:
        space, given = self.action_space, self.config.target_entropy
        if given is not None:
            return given
        if isinstance(space, spaces.Discrete):
            return self.config.target_entropy_frac * math.log(int(space.n))
        assert space.shape is not None
        return -float(math.prod(space.shape))

    def explore(self, *, warms_up: bool) -> dict[str, Number]:
        """Act at random in the warm-up, afterwards as the policy does."""
        self.policy.set_random(warms_up)
        return {}

    def draw(self, first: int, count: int) -> dict[str, Tensor]:
        """Draw the noise of actions, and say which updates train the policy."""
        drawn, delay = super().draw(first, count), self.config.policy_delay
        if isinstance(self.policy.distribution, SquashedNormal):
            size = (count, 2, self.config.batch_size, self.policy.distribution.num_noise)
            drawn[NOISE] = torch.randn(size, generator=self.generator, device=self.device)
        if delay > 1:
            trains = [(first + i) % delay == 0 for i in range(1, count + 1)]
            drawn[TRAINS_POLICY] = torch.tensor(trains, device=self.device)
        if self.return_scale is not None:
            drawn[SCALE] = self.return_scale.scale.repeat(count)
        return drawn

    def collect(self, *, env_config: Mapping[str, Any] | None = None) -> Stats:
        """Run the policy for a horizon, append it to the replay, and see how large returns are."""
        if self.return_scale is None:
            return super().collect(env_config=env_config)
        if self.collector.cursor is None:
            self.return_scale.cut()
        stats = super().collect(env_config=env_config)
        part = {name: each[: self.config.horizon] for name, each in self.rollout.tensors.items()}
        # A horizon with a number that is not finite is never learned from.
        rewards = part[keys.REWARDS].nan_to_num(0.0, 0.0, 0.0)
        self.return_scale.observe(rewards, part[keys.TERMINATED] | part[keys.TRUNCATED], part.get(keys.VALID))
        return stats

    def reset_if_due(self, env_config: Mapping[str, Any] | None) -> bool:
        """Reset the environment where the schedule says so; no sum of rewards reaches across it."""
        is_reset = super().reset_if_due(env_config)
        if is_reset and self.return_scale is not None:
            self.return_scale.cut()
        return is_reset

    def update(self, nets: Mapping[str, Net], batch: Batch) -> Figures:
        """Move critics towards soft values, the policy towards actions of high ones, and the temperature.

            V(s)  = E_a[min_i Q_i(s, a) - alpha log pi(a | s)],    a ~ pi(s); with the targets' Q' it is V'
            y     = R + d V'(s')
            L_Q   = sum_i mean of w (Q_i(s, a) - y)^2 / 2,    w = 1, or the importance weight with `prioritized`
            L_pi  = -mean of V(s), by the critics' new weights
            L_log = mean of alpha (H(pi(s)) - target entropy)

        Expectations are one sample, and exact where actions are discrete. The policy's value has the importance
        weights too. R, d and s' are those of `DQN.update`, R scaled where there is a `return_bound`. With `num_atoms`
        L_Q is the cross-entropy towards the distribution of y, where Q'(s', a') is the target's with the smallest mean.
        """
        q, policy, trains = nets["q"], nets["policy"], batch.get(TRAINS_POLICY)
        alpha = self._alpha(nets)
        noise = batch.get(NOISE, (None, None))
        if SCALE in batch:
            batch = {**batch, keys.RETURNS: batch[keys.RETURNS] * batch[SCALE]}
        goals = self._goals(nets, batch, alpha, noise[0])
        obs = self.critics_obs(batch, keys.OBS)
        found, q_norm = q.minimise(lambda q: self._q_loss(q, obs, batch, goals))

        def policy_loss(policy: Callable[..., Any]) -> tuple[Tensor, dict[str, Tensor]]:
            params = policy(*observed(batch, keys.OBS))
            values, entropies = self._soft_values(
                params, lambda *actions: self._means(q(obs, *actions)).amin(0), alpha, noise[1]
            )
            loss = -weighted_mean(values, batch)
            return loss, {"losses/policy": loss, "entropies": entropies}

        acted, policy_norm = policy.minimise(policy_loss, trains)
        gaps = acted["entropies"] - self.target_entropy
        alpha_loss = (alpha * gaps).mean()
        if "alpha" in nets:
            nets["alpha"].minimise(lambda log_alpha: ((log_alpha().exp() * gaps).mean(), {}), trains)
        nets["target"].follow(q, batch[SHARE])
        errors = (found["values"] - (goals @ self.atoms if self.config.num_atoms > 1 else goals)).abs().mean(0)
        numbers = {
            "losses/q": found["losses/q"],
            "losses/policy": acted["losses/policy"],
            "losses/alpha": alpha_loss,
            "monitors/q": found["values"].mean(),
            "monitors/td_error": errors.mean(),
            "monitors/entropy": acted["entropies"].mean(),
            "coefficients/alpha": alpha,
            "monitors/q_grad_norm": q_norm,
            "monitors/policy_grad_norm": policy_norm,
        }
        return Figures(numbers, errors)

    def critics_obs(self, batch: Batch, key: str) -> Any:
        """Return a batch's observations as the critics read them, `[batch_size, *obs]` or a dict of such."""
        return self.policy.model_inputs(unflatten_tree(key, batch))[0]

    def _alpha(self, nets: Mapping[str, Net]) -> Tensor:
        """Return the temperature, 0-d."""
        if self.config.alpha is None:
            alpha: Tensor = nets["alpha"]().exp()
            return alpha
        return torch.full((), self.config.alpha, device=self.device)

    def _goals(self, nets: Mapping[str, Net], batch: Batch, alpha: Tensor, noise: Tensor | None) -> Tensor:
        """Return y, `[batch_size]`, or the probabilities of the atoms for it, `[batch_size, num_atoms]`."""
        obs, target = self.critics_obs(batch, keys.NEXT_OBS), nets["target"]
        params = nets["policy"](*observed(batch, keys.NEXT_OBS))
        if self.config.num_atoms > 1:
            return self._goal_probs(params, lambda actions: target(obs, actions), batch, alpha, noise)
        after, _ = self._soft_values(params, lambda *actions: target(obs, *actions).amin(0), alpha, noise)
        return batch[keys.RETURNS] + batch[keys.DISCOUNTS] * after

    def _goal_probs(
        self, params: Any, logits_of: Callable[..., Tensor], batch: Batch, alpha: Tensor, noise: Tensor | None
    ) -> Tensor:
        """Return the distribution of y = R + d (z - alpha log pi) on the atoms z, `[batch_size, num_atoms]`."""
        found: list[Tensor] = []

        def means(actions: Tensor) -> Tensor:
            found.append(logits_of(actions))
            return self._means(found[0]).amin(0)

        _, entropies = self._soft_values(params, means, alpha, noise)
        (logits,) = found
        least = self._means(logits).argmin(0, keepdim=True).unsqueeze(-1)
        probs = logits.gather(0, least.expand(1, *logits.shape[1:])).squeeze(0).softmax(-1)
        after = self.atoms + (alpha * entropies).unsqueeze(-1)
        values = batch[keys.RETURNS].unsqueeze(-1) + batch[keys.DISCOUNTS].unsqueeze(-1) * after
        return project(probs, values, self.atoms)

    @property
    def atoms(self) -> Tensor:
        """The atoms of categorical critics, `[num_atoms]`."""
        config = self.config
        return torch.linspace(config.v_min, config.v_max, config.num_atoms, device=self.device)

    def _means(self, outputs: Tensor) -> Tensor:
        """Return the values that the critics' outputs stand for."""
        return expectation(outputs, self.atoms) if self.config.num_atoms > 1 else outputs

    def _q_loss(
        self, q: Callable[..., Tensor], obs: Any, batch: Batch, goals: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if isinstance(self.policy.distribution, Categorical):
            index = batch[keys.ACTIONS] - self.policy.distribution.start
            values = q(obs)
            values = values.gather(-1, index.expand(values.shape[:-1]).unsqueeze(-1)).squeeze(-1)
        else:
            values = q(obs, batch[keys.ACTIONS])
        if self.config.num_atoms > 1:
            loss = weighted_mean(-(goals * values.log_softmax(-1)).sum(-1).sum(0), batch)
            return loss, {"losses/q": loss, "values": self._means(values)}
        loss = weighted_mean(0.5 * (values - goals).square().sum(0), batch)
        return loss, {"losses/q": loss, "values": values}

    def _soft_values(
        self, params: Any, values_of: Callable[..., Tensor], alpha: Tensor, noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return V(s) and what it has of the policy's entropy, -log pi or its expectation, `[batch_size]` each.

        Args:
            params: Of the action distributions.
            values_of: The smallest of the critics' values, `[batch_size]` of actions, or `[batch_size, num_actions]`.
            alpha: The temperature, 0-d.
            noise: Of the samples, `[batch_size, num_noise]`; None for discrete actions.
        """
        distribution = self.policy.distribution
        if noise is not None:
            assert isinstance(distribution, SquashedNormal)
            actions, logp = distribution.rsample(params, noise)
            # Of actions scaled to [-1, 1], so that neither rewards nor the target depend on the units of actions.
            entropies = -(logp + distribution.log_scale.sum())
            return values_of(actions) + alpha * entropies, entropies
        probs = params.log_probs.exp()
        # An action that is never taken has a finite, huge logarithm, of which alpha times may be infinite.
        entropies = -(probs * torch.where(probs > 0, params.log_probs, 0.0)).sum(-1)
        return (probs * values_of()).sum(-1) + alpha * entropies, entropies

    def learned_state(self) -> dict[str, Any]:
        """Return what an update changes, and how large returns were."""
        scale = {} if self.return_scale is None else {"return_scale": self.return_scale.state_dict()}
        return super().learned_state() | scale

    def load_learned_state(self, state: Mapping[str, Any]) -> None:
        """Go back to what `learned_state` or `state_dict` returned; the replay stays."""
        super().load_learned_state(state)
        if self.return_scale is not None:
            self.return_scale.load_state_dict(state["return_scale"])

    @property
    def params(self) -> dict[str, Any]:
        """Every hyperparameter by name, as it is in force."""
        return super().params | {"target_entropy": self.target_entropy}


def is_bounded_box(space: spaces.Space[Any]) -> bool:
    """Return whether a space is a `Box` of floats with finite bounds."""
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        return False
    return bool(np.isfinite(space.low).all() and np.isfinite(space.high).all())
