"""Policies that act by action values, or by distributions of returns, computed by a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import torch
from torch import Tensor

from rl8x.distributions import EpsilonGreedy
from rl8x.distributions.discrete import EpsilonGreedyParams
from rl8x.functional import expectation
from rl8x.models import Model, State
from rl8x.models.base import BUILTIN
from rl8x.models.layers import masked_mean
from rl8x.policy import Policy
from rl8x.spaces import critic_only, describe_space
from rl8x.trees import Tree, tree_map


def q_values(features: Tensor, values: Tensor, mask: Tensor | None = None, *, dueling: bool = False) -> Tensor:
    """Compute action values from a model's outputs.

        Q(s, a) = A(s, a),                                       a legal
        Q(s, a) = V(s) + A(s, a) - mean of A(s, b) over legal b  with `dueling`
        Q(s, a) = -inf                                           a illegal

    If a mask allows nothing, all actions are legal. No gradient reaches illegal actions.

    Source: Wang et al. 2016, arXiv:1511.06581, eq. 9.
    """
    if dueling:
        features = _around(values, features, mask)
    return _legal_only(features, mask)


def _legal(mask: Tensor) -> Tensor:
    return mask | ~mask.any(-1, keepdim=True)


def _around(values: Tensor, advantages: Tensor, mask: Tensor | None) -> Tensor:
    """Shift numbers of actions, `[..., num_actions]`, so that the mean over legal actions is `values`, `[...]`."""
    mean = advantages.mean(-1) if mask is None else masked_mean(advantages, _legal(mask), -1)
    return advantages + (values - mean).unsqueeze(-1)


def _legal_only(values: Tensor, mask: Tensor | None) -> Tensor:
    return values if mask is None else torch.where(_legal(mask), values, -torch.inf)


class GreedyInMeans(EpsilonGreedy):
    """Epsilon-greedy on expected returns, for models that output a distribution of returns for each action.

    Features are `num_outputs` numbers for each action, one action after the other: logits of `atoms`, or quantiles if
    there are no atoms. With `dueling` the state's outputs come first, and an action's outputs are those plus the
    action's advantages.

    Source: Bellemare et al. 2017, arXiv:1707.06887 (atoms); Dabney et al. 2017, arXiv:1710.10044 (quantiles); Hessel et
    al. 2018, arXiv:1710.02298 (dueling).
    """

    atoms: Tensor | None

    def __init__(
        self,
        space: gymnasium.Space[Any],
        *,
        num_outputs: int,
        support: tuple[float, float] | None = None,
        dueling: bool = False,
    ) -> None:
        super().__init__(space)
        self.num_outputs = num_outputs
        self.dueling = dueling
        self.num_features = (self.num_features + dueling) * num_outputs
        atoms = None if support is None else torch.linspace(*support, num_outputs)
        self.register_buffer("atoms", atoms, persistent=False)

    def outputs(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the outputs that represent each action's return, `[..., num_actions, num_outputs]`."""
        outputs = features.reshape(*features.shape[:-1], features.shape[-1] // self.num_outputs, self.num_outputs)
        if not self.dueling:
            return outputs
        among = None if mask is None else mask.unsqueeze(-2)
        return _around(outputs[..., 0, :], outputs[..., 1:, :].transpose(-1, -2), among).transpose(-1, -2)

    def means(self, outputs: Tensor) -> Tensor:
        """Return the expected returns `[...]` of outputs `[..., num_outputs]`."""
        return outputs.mean(-1) if self.atoms is None else expectation(outputs, self.atoms)

    def from_features(self, features: Tensor, mask: Tensor | None = None) -> EpsilonGreedyParams:  # type: ignore[override]
        """Return the parameters for a model's outputs, `[..., num_features]`; the mask is `[..., num_actions]`."""
        return super().from_features(self.means(self.outputs(features, mask)), mask)


class QPolicy(Policy):
    """A policy that acts by action values; the value of an observation is that of the best legal action.

    As a module it maps observations to values of actions. Updates train this map, under its own weights or, with
    `torch.func.functional_call`, under those of an update or a target.
    """

    distribution: EpsilonGreedy

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        model: str | type[Model] | Model | None = None,
        model_config: Mapping[str, Any] | None = None,
        dueling: bool = False,
        num_outputs: int = 1,
        support: tuple[float, float] | None = None,
        normalize_observations: bool = False,
    ) -> None:
        if kept := critic_only(observation_space):
            raise ValueError(
                f"a Q-network acts by its values, so that nothing can be for the critic alone; the environment keeps "
                f"{', '.join(map(repr, kept))} for it. Let all see it or nobody (observe_parameters='all' or 'none', "
                "state=None), or use PPO, SAC or TD3."
            )
        several = {"num_outputs": num_outputs, "support": support, "dueling": dueling} if num_outputs > 1 else None
        built_in = model is None or (isinstance(model, str) and model in BUILTIN)
        super().__init__(
            observation_space,
            action_space,
            model=model,
            model_config={**({"shared": True} if built_in else {}), **(model_config or {})},
            distribution=EpsilonGreedy if several is None else GreedyInMeans,
            distribution_config=several,
            normalize_observations=normalize_observations,
        )
        self.dueling = dueling
        self.outputs = {"num_outputs": num_outputs, "support": support}

    @property
    def form(self) -> tuple[type[Policy], dict[str, Any]]:
        """This class, and its arguments other than the spaces."""
        kept = ("model", "model_config", "normalize_observations")
        form: dict[str, Any] = {name: value for name, value in super().form[1].items() if name in kept}
        return QPolicy, form | {"dueling": self.dueling, **self.outputs}

    def forward(self, obs: Tree, state: State, starts: Tensor, with_outputs: bool = False) -> Any:  # type: ignore[override]
        """Return the values of actions, `[seq_len, batch, num_actions]`, -inf where they are illegal."""
        features, values, mask = self.predict(obs, state, starts)
        q, outputs = self._values_and_outputs(features, values, mask)
        return (q, outputs) if with_outputs else q

    @property
    def atoms(self) -> Tensor | None:
        """The atoms of categorical distributions of returns, `[num_outputs]`; None if there are none."""
        return self.distribution.atoms if isinstance(self.distribution, GreedyInMeans) else None

    def means(self, outputs: Tensor) -> Tensor:
        """Return the values `[...]` of `forward`'s outputs, `[..., num_outputs]`."""
        return self.distribution.means(outputs) if isinstance(self.distribution, GreedyInMeans) else outputs

    def values(self, obs: Tree, state: State, starts: Tensor) -> Tensor:
        """Return max_a Q(s, a) over legal actions, `[num_envs]`; arguments are those of `Policy.values`."""
        q = self(tree_map(lambda part: part.unsqueeze(0), obs), state, starts.unsqueeze(0))
        best: Tensor = q[0].amax(-1)
        return best

    def _estimates(self, features: Tensor, values: Tensor, mask: Any) -> Tensor:
        return self._values_and_outputs(features, values, mask)[0].amax(-1)

    def _values_and_outputs(self, features: Tensor, values: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
        if isinstance(self.distribution, GreedyInMeans):
            outputs = self.distribution.outputs(features, mask)
            return _legal_only(self.distribution.means(outputs), mask), outputs
        q = q_values(features, values, mask, dueling=self.dueling)
        return q, q

    def indices(self, actions: Tensor) -> Tensor:
        """Return the indices, from 0, of actions, which may count from another number, int64 `[...]`."""
        return actions - self.distribution.start if self.distribution.start else actions


def check_discrete(name: str, space: gymnasium.Space[Any], others: str) -> None:
    """Raise if an action space is not `Discrete`."""
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise ValueError(f"{name} needs a Discrete action space; got {describe_space(space)}. Use {others}.")
