"""The losses between a student and its teacher's labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import gymnasium.spaces as spaces
import numpy as np
import torch
from torch import Tensor

from rl8x import keys
from rl8x.algorithms.distillation.config import DistillationConfig
from rl8x.algorithms.distillation.guided import LABELS
from rl8x.algorithms.on_policy import SequenceBatch
from rl8x.distributions import Distribution
from rl8x.distributions.base import from_numbered
from rl8x.distributions.composite import Composite
from rl8x.spaces import describe_space, leaves
from rl8x.trees import Tree, flatten_tree

DISTILLATION_LOSS_METRICS: Final = ("losses/distillation", "monitors/entropy", "monitors/disagreement")


def distillation_minibatch_losses(
    policy: Callable[..., Any],
    batch: SequenceBatch,
    state: SequenceBatch,
    _: Tensor,
    config: DistillationConfig,
    *,
    distribution: Distribution,
    loss: str,
) -> Tensor:
    """Return the loss and its monitors, summed over a minibatch.

        kl:   L = KL(teacher || student)
        nll:  L = -log p_student(a*),            a* the teacher's most likely action
        mse:  L = mean over the action's dimensions of (a_student - a*)^2,    a_student the student's most likely one

    Args:
        policy: A `Student` called as a module, under the weights of the update.
        batch: Observations, starts and labels, each `[seq_len, batch, ...]`.
        state: The student's initial states, each `[batch, *]`.
        config: The hyperparameters; not used.
        distribution: The student's action distribution.
        loss: The loss's name.

    Returns:
        Sums in the order of `DISTILLATION_LOSS_METRICS`, `[3]`. The disagreement is the share of most likely actions
        that differ; for continuous actions, their mean distance.
    """
    params = policy(batch[keys.OBS], state, batch[keys.STARTS])
    labels, mode = batch[LABELS], distribution.mode(params)
    if loss == "kl":
        taught = from_numbered(labels, params)
        losses, best = distribution.kl(taught, params), distribution.mode(taught)
    else:
        best = labels
        losses = -distribution.logp(params, best) if loss == "nll" else _mean_of(torch.square, mode, best)
    distance = _mean_of(torch.abs, mode, best).detach()
    columns = torch.stack((losses, distribution.entropy(params), distance))
    if keys.VALID in batch:
        columns = columns * batch[keys.VALID]
    return columns.flatten(1).sum(1)


def _mean_of(function: Callable[[Tensor], Tensor], actions: Tree, others: Tree) -> Tensor:
    """Return a function of differences, averaged over dimensions, `[seq_len, batch]`; integers count as equal or not.

    Actions are `[seq_len, batch, *action]`, or dicts of such.
    """
    pairs = zip(flatten_tree("", actions).values(), flatten_tree("", others).values(), strict=True)
    differences = [function(a - b) if a.is_floating_point() else (a != b).float() for a, b in pairs]
    return torch.stack([each.flatten(2).mean(-1) if each.dim() > 2 else each for each in differences]).mean(0)


def loss_of(loss: str | None, student: Distribution, teacher: Distribution) -> str:
    """Resolve the loss; raise if the two distributions do not support it.

    Raises:
        ValueError: If they do not.
    """
    same = _same_kind(student, teacher)
    names = f"{type(student).__name__} of the student and {type(teacher).__name__} of the teacher"
    if loss == "kl" and not same:
        raise ValueError(f"loss='kl' needs one kind of distribution, with a `kl`; got {names}. Use 'nll'.")
    if loss == "mse" and not all(
        isinstance(leaf, spaces.Box) and np.issubdtype(leaf.dtype, np.floating) for _, leaf in leaves(student.space)
    ):
        raise ValueError(
            f"loss='mse' needs continuous actions; got {describe_space(student.space)}. Use 'kl' or 'nll'."
        )
    return loss or ("kl" if same else "nll")


def _same_kind(one: Distribution, other: Distribution) -> bool:
    """Return whether two distributions have the same kind of parameters and a KL divergence."""
    if type(one) is not type(other) or not one.has_kl:
        return False
    if isinstance(one, Composite) and isinstance(other, Composite):
        return all(_same_kind(part, other.named[key]) for key, part in one.named.items())
    return True
