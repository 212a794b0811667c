"""The networks of actor-critic algorithms: a policy that critics train, and critics with their targets and loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from rl8x import keys
from rl8x.algorithms.off_policy.config import ActorCriticConfig
from rl8x.algorithms.off_policy.updates import ERRORS, SCALE, WEIGHTS, Found, Loss, ReplayBatch
from rl8x.distributions.discrete import inverse_cdf
from rl8x.functional import expectation, project
from rl8x.models import State
from rl8x.models.encoders import FlatObservations
from rl8x.models.layers import LinearStack, check_sizes, hidden_gain, masked_logits, perceptron, plain_layers
from rl8x.models.mlp import are_many, layer_stack
from rl8x.policy import Act, Policy
from rl8x.spaces import check_bounds, critic_only, describe_space
from rl8x.trees import Tree

CRITIC_METRICS: Final = ("losses/q", "monitors/q", "monitors/td_error", "monitors/q_grad_norm")
"""Metrics of every update that trains critics by `Critics.loss`, even if it trains nothing else."""


def check_bounded(name: str, space: gymnasium.Space[Any], *, discrete: bool = False) -> None:
    """Raise a `ValueError` unless an action space is a bounded `Box` of floats, or, with `discrete`, `Discrete`."""
    if isinstance(space, gymnasium.spaces.Discrete):
        if discrete:
            return
        raise ValueError(f"{name} needs a Box action space of floats; got {describe_space(space)}. Use DQN or SAC.")
    if not isinstance(space, gymnasium.spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        fits = "Box action space of floats, or a Discrete one" if discrete else "Box action space of floats"
        raise ValueError(f"{name} needs a {fits}; got {describe_space(space)}. Use PPO.")
    check_bounds(space, name, "PPO")


class Actor(Policy):
    """A policy for a bounded `Box` or a `Discrete` action space that acts at random while `is_random`, 0-d bool."""

    is_random: Tensor
    random_low: Tensor
    random_high: Tensor

    def __init__(
        self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any], **options: Any
    ) -> None:
        # The critics are separate networks that read all parts.
        super().__init__(observation_space, action_space, hidden=critic_only(observation_space), **options)
        self.register_buffer("is_random", torch.zeros((), dtype=torch.bool), persistent=False)
        if isinstance(action_space, gymnasium.spaces.Box):
            for name in ("low", "high"):
                bound = torch.as_tensor(getattr(action_space, name), dtype=torch.float32)
                self.register_buffer(f"random_{name}", bound, persistent=False)

    # After training it acts like a plain policy, so it is saved as one.
    form = Policy.form

    @contextlib.contextmanager
    def exploring(self, *, warms_up: bool) -> Iterator[dict[str, Any]]:
        """Act at random within the context if it `warms_up`; yield no metrics."""
        self.is_random.fill_(warms_up)  # in place, since programs read it
        try:
            yield {}
        finally:
            self.is_random.fill_(False)

    def act(self, obs: Tree, state: State, starts: Tensor, noise: Tensor | None = None) -> Act:
        """Choose an action for each copy; arguments are those of `Policy.act`. Without `noise` no action is random."""
        act = super().act(obs, state, starts, noise)
        if noise is None:
            return act
        actions = torch.where(self.is_random, self.random_actions(obs, noise), act.actions)
        return act._replace(actions=actions)

    def random_actions(self, obs: Tree, noise: Tensor) -> Tensor:
        """Return uniformly random legal actions, `[num_envs, *action]`, from normal noise, `[num_envs, num_noise]`."""
        space = self.action_space
        if isinstance(space, gymnasium.spaces.Box):
            shares = torch.special.ndtr(noise).reshape(-1, *space.shape)
            return torch.lerp(self.random_low, self.random_high, shares)
        assert isinstance(space, gymnasium.spaces.Discrete)
        mask = self.model_inputs(obs)[1]
        logits = noise.new_zeros(len(noise), int(space.n))
        if mask is not None:
            logits = masked_logits(logits, mask | ~mask.any(-1, keepdim=True))
        return inverse_cdf(logits.log_softmax(-1), noise.squeeze(-1)) + int(space.start)

    def forward(self, obs: Tree, state: State, starts: Tensor) -> Any:  # type: ignore[override]
        """Return the parameters of the action distributions of sequences of one step, `[batch, ...]`."""
        features, _, mask = self.predict(obs, state, starts)
        return self.distribution.from_features(features[0], None if mask is None else mask[0])


class Critics(nn.Module):
    """Perceptrons Q_1 to Q_n of observations and actions; each layer is one batched product for all of them.

    For a `Discrete` action space they read observations alone and give the values of all actions.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        num_critics: int = 2,
        hidden_sizes: Sequence[int] = (256, 256),
        activation: str = "relu",
        layer_norm: bool = False,
        init: str = "orthogonal",
        num_atoms: int = 1,
        support: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        super().__init__()
        check_sizes("critic_hidden_sizes", hidden_sizes)
        self.action_space = action_space
        self.num_critics, self.num_atoms, self.support = num_critics, num_atoms, support
        self.autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.flat = FlatObservations(observation_space)
        discrete = isinstance(action_space, gymnasium.spaces.Discrete)
        self.flat_actions = None if discrete else FlatObservations(action_space)
        width = self.flat.width + (self.flat_actions.width if self.flat_actions else 0)
        # The axes of a result after those of critics and rows.
        self.shape = [int(action_space.n)] if isinstance(action_space, gymnasium.spaces.Discrete) else []
        self.shape += [num_atoms] if num_atoms > 1 else []
        sizes, gain = [width, *hidden_sizes], hidden_gain(init)
        options: Any = {"activation": activation, "layer_norm": layer_norm, "gain": gain}
        self.hidden = nn.Sequential(*layer_stack(num_critics, sizes, **options))
        num_heads = int(torch.Size(self.shape).numel())
        self.num_activations = sum(hidden_sizes) + num_heads
        self.head = LinearStack(num_critics, sizes[-1], num_heads, None if gain is None else 1.0)

    def forward(self, obs: Any, actions: Tensor | None = None) -> Tensor:
        """Return the critics' values, `[num_critics, batch_size]`, with further axes `num_actions` and `num_atoms`."""
        x = self.flat(obs)
        if self.flat_actions is not None:
            x = torch.cat([x, self.flat_actions(actions)], -1)
        x = x.expand(self.num_critics, *x.shape)
        with self.autocast():  # hidden layers; heads compute in float32
            layers = plain_layers([*self.hidden, self.head], x) if are_many(x, self.num_activations) else None
            x = x if layers else self.hidden(x)
        values: Tensor = perceptron(x, layers) if layers else self.head(x.float())
        return values.view(*values.shape[:-1], *self.shape)

    @property
    def atoms(self) -> Tensor:
        """The atoms, `[num_atoms]`."""
        return torch.linspace(*self.support, self.num_atoms, device=self.head.weight.device)

    def means(self, outputs: Tensor) -> Tensor:
        """Return the values `[...]` of outputs `[..., num_atoms]`; with one atom the outputs are the values."""
        return expectation(outputs, self.atoms) if self.num_atoms > 1 else outputs

    def targets(self, outputs: Tensor, batch: ReplayBatch, bonus: Tensor | None = None) -> Tensor:
        """Return y = R + d (min_i Q_i'(s', a') + bonus), `[batch_size]`, from `[num_critics, batch_size]`.

        With atoms it is the distribution of y, `[batch_size, num_atoms]`, where Q' is that of the smallest mean.
        """
        if self.num_atoms == 1:
            least = outputs.amin(0)
            return bootstrapped(least if bonus is None else least + bonus, batch)
        index = self.means(outputs).argmin(0).view(1, -1, 1).expand(1, *outputs.shape[1:])
        probs = outputs.gather(0, index).squeeze(0).softmax(-1)
        after = self.atoms if bonus is None else self.atoms + bonus.unsqueeze(-1)
        return project(probs, bootstrapped(after.expand_as(probs), batch), self.atoms)

    def loss(
        self, obs: Any, batch: ReplayBatch, td_targets: Tensor, penalty: Callable[..., Tensor] | None = None
    ) -> Loss:
        """Return the loss that moves the critics towards their targets, as `targets` returns them.

            L = sum_i mean of w (Q_i(s, a) - y)^2 / 2,    w = 1, or the importance weight with `prioritized`

        With atoms it is the cross-entropy towards the distribution of y. A `penalty` is added, 0-d, given critics and
        their values Q_i(s, a), `[num_critics, batch_size]`.
        """

        def loss(q: Callable[..., Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            outputs = action_values(q, obs, batch[keys.ACTIONS], self.action_space)
            if self.num_atoms > 1:
                losses = -(td_targets * outputs.log_softmax(-1)).sum(-1)
            else:
                losses = 0.5 * (outputs - td_targets).square()
            error, values = weighted_mean(losses.sum(0), batch), self.means(outputs)
            total = error if penalty is None else error + penalty(q, values)
            return total, {"losses/q": error, "values": values, "td_targets": td_targets}

        return loss

    def measure(self, found: Found) -> None:
        """Add the metrics of an update that used `loss`, and the errors of the rows, `[batch_size]`."""
        values, td_targets = found["values"], found["td_targets"]
        errors = (values - (td_targets @ self.atoms if self.num_atoms > 1 else td_targets)).abs().mean(0)
        found |= {"monitors/q": values.mean(), "monitors/td_error": errors.mean(), ERRORS: errors}


def make_critics(algorithm: Any) -> Critics:
    """Return the critics of an algorithm's config, which read all parts of observations but an action mask."""
    config, policy, options = algorithm.config, algorithm.policy, dict[str, Any]()
    if isinstance(config, ActorCriticConfig):
        options = {"num_atoms": config.num_atoms, "support": (config.v_min, config.v_max)}
        options |= {"num_critics": config.num_critics}
    critics = Critics(
        policy.inputs_space,
        policy.action_space,
        hidden_sizes=(256, 256) if config.critic_hidden_sizes is None else config.critic_hidden_sizes,
        layer_norm=config.critic_layer_norm,
        init=config.critic_init,
        **options,
    )
    if config.precision == "bf16":
        critics.autocast = algorithm.execution.autocast
    return critics


def weighted_mean(losses: Tensor, batch: ReplayBatch) -> Tensor:
    """Return the mean of losses, `[batch_size]`, weighted by the batch's importance weights if it has any."""
    return (losses * batch[WEIGHTS]).mean() if WEIGHTS in batch else losses.mean()


def bootstrapped(next_values: Tensor, batch: ReplayBatch) -> Tensor:
    """Return y = R + d V(s'), given V(s'), `[batch_size]` or of atoms `[batch_size, num_atoms]`; R may be scaled."""
    returns, discounts = batch[keys.RETURNS], batch[keys.DISCOUNTS]
    if SCALE in batch:
        returns = returns * batch[SCALE]
    if next_values.dim() > 1:
        returns, discounts = returns.unsqueeze(-1), discounts.unsqueeze(-1)
    return returns + discounts * next_values


def action_values(
    critics: Callable[..., Tensor], obs: Any, actions: Tensor, action_space: gymnasium.Space[Any]
) -> Tensor:
    """Return Q_i(s, a) of recorded actions, `[num_critics, batch_size]`, or with atoms `[..., num_atoms]`."""
    if not isinstance(action_space, gymnasium.spaces.Discrete):
        return critics(obs, actions)
    values = critics(obs)  # [num_critics, batch_size, num_actions]
    index = actions - int(action_space.start)
    return values.gather(-1, index.expand(values.shape[:-1]).unsqueeze(-1)).squeeze(-1)
