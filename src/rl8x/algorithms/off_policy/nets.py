"""The networks of an off-policy update: modules with flat weight vectors, and their target networks.

An update is a function of tensors: weights and moments come in as vectors and are changed in place. So the same
function runs eagerly, compiled and captured, and a loop of updates needs no Python in between. No module is copied: a
target network is its module under another vector of weights.

    nets = Nets(policy)                                    # when the algorithm is made
    nets.add("q", QNetwork(policy), rule, lr=3e-4)
    nets.add_target("target", of="q")

    values, gradient = nets["q"].gradient(loss)            # in an update, on the result of `bind`
    norm = nets["q"].apply(gradient)
    nets["target"].polyak_update(nets["q"], 0.005)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rl8x.algorithms.optimizer import FlatOptimizer, Rule, clip_and_apply
from rl8x.execution.private import Substitution
from rl8x.policy import Policy, training_mode

Loss = Callable[[Callable[..., Any]], tuple[Tensor, Mapping[str, Tensor]]]
"""Computes a loss from a network called with its trained weights; returns it, 0-d, and auxiliary values by name."""


class Trained(NamedTuple):
    """A trained module, and what has its weights as one vector; it is in training mode only while it is trained."""

    module: nn.Module
    optimizer: FlatOptimizer
    max_grad_norm: float | None
    under: Substitution
    has_modes: bool


class Net:
    """A network in an update: a module under a vector of weights, `[size]`, which `apply` and `polyak_update` change.

    `moments` are what the optimizer keeps beside it, and `lr` its learning rate, 0-d; a target has neither.
    """

    def __init__(
        self, trained: Trained, weights: Tensor, moments: Sequence[Tensor] = (), lr: Tensor | None = None
    ) -> None:
        self.trained = trained
        self.weights = weights
        self.moments = moments
        self.lr = lr

    def __call__(self, *inputs: Any) -> Any:
        """Call the module with these weights; gradients flow to the inputs, not to the weights."""
        return self.trained.under(self._parts, *inputs)

    def gradient(self, loss: Loss) -> tuple[dict[str, Tensor], Tensor]:
        """Compute the gradient of a loss with respect to the weights, `[size]`; networks that it calls get none.

        Returns what else the loss returned, without gradients, and the gradient.
        """
        optimizer = self.trained.optimizer
        mode = training_mode(self.trained.module) if self.trained.has_modes else contextlib.nullcontext()
        with torch.enable_grad(), mode:
            weights = self.weights.detach().requires_grad_()
            value, measured = loss(functools.partial(self.trained.under, optimizer.split(weights)))
            (gradient,) = torch.autograd.grad(value, weights)
        return {name: each.detach() for name, each in measured.items()}, gradient

    def apply(self, gradient: Tensor) -> Tensor:
        """Make an optimizer step by a gradient, `[size]`, which is clipped in place; return its norm before, 0-d."""
        assert self.lr is not None, "a target network is not trained"
        state, most = (self.weights, *self.moments), self.trained.max_grad_norm
        return clip_and_apply(self.trained.optimizer.rule, state, gradient, self.lr, max_grad_norm=most)

    def polyak_update(self, net: Net, tau: Tensor | float) -> None:
        """Update the weights to (1 - tau) w + tau w', with those of another network; `tau` is a number or 0-d."""
        self.weights.lerp_(net.weights, tau)

    @functools.cached_property
    def _parts(self) -> list[Tensor]:
        return self.trained.optimizer.split(self.weights)


class Nets:
    """The networks of an algorithm between updates, by name: trained ones, and targets that follow one of them.

    Weights that are the policy's are saved with it, not here.
    """

    def __init__(self, policy: nn.Module) -> None:
        self.trained: dict[str, Trained] = {}
        self.targets: dict[str, tuple[str, Tensor]] = {}
        self._policy = policy

    def add(self, name: str, module: nn.Module, rule: Rule, *, lr: float, max_grad_norm: float | None = None) -> None:
        """Add a trained network; the module's weights become views of one vector."""
        optimizer = FlatOptimizer(module.named_parameters(), rule, lr=lr)
        has_modes = any(isinstance(part, Policy) and part.has_modes for part in module.modules())
        under = Substitution(module, optimizer.names)
        self.trained[name] = Trained(module, optimizer, max_grad_norm, under, has_modes)

    def add_target(self, name: str, *, of: str) -> None:
        """Add a target network of a named network: the same module with a copy of its weights."""
        self.targets[name] = of, self.trained[of].optimizer.weights.clone()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all networks, in place."""
        for each in self.trained.values():
            each.optimizer.lr.fill_(lr)

    # -- as the arguments of an update

    @property
    def state(self) -> list[Tensor]:
        """The tensors that an update changes in place: weights and moments, `[size]`, and numbers of steps, `[1]`."""
        trained = [tensor for each in self.trained.values() for tensor in each.optimizer.state]
        return trained + [weights for _, weights in self.targets.values()]

    @property
    def rates(self) -> list[Tensor]:
        """The learning rates, 0-d each."""
        return [each.optimizer.lr for each in self.trained.values()]

    def bind(self, state: Sequence[Tensor], rates: Sequence[Tensor]) -> dict[str, Net]:
        """Return the networks by name, with tensors in the order and shapes of `state` and `rates`."""
        left, nets = iter(state), dict[str, Net]()
        for (name, each), lr in zip(self.trained.items(), rates, strict=True):
            weights, *moments = (next(left) for _ in each.optimizer.state)
            nets[name] = Net(each, weights, moments, lr)
        for name, (followed, _) in self.targets.items():
            nets[name] = Net(self.trained[followed], next(left))
        return nets

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return weights that are not the policy's, optimizer states and targets, all by names of weights."""
        targets = {}
        for name, (followed, weights) in self.targets.items():
            optimizer = self.trained[followed].optimizer
            targets[name] = dict(zip(optimizer.names, optimizer.split(weights), strict=True))
        return {
            "modules": {name: self._own(each.module) for name, each in self.trained.items()},
            "optimizers": {name: each.optimizer.state_dict() for name, each in self.trained.items()},
            "targets": targets,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`, after the policy; raise a `ValueError`, changing nothing, if it is of others."""
        for name, each in self.trained.items():
            _check_same(name, state["modules"].get(name), self._own(each.module))
        for name, each in self.trained.items():
            for key, tensor in self._own(each.module).items():
                tensor.copy_(state["modules"][name][key])
            each.optimizer.load_state_dict(state["optimizers"][name])
        for name, (followed, weights) in self.targets.items():
            optimizer, saved = self.trained[followed].optimizer, state["targets"][name]
            weights.copy_(optimizer.joined(saved[key] for key in optimizer.names))

    def _own(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the weights and buffers of a module that are not the policy's."""
        saved = {tensor.data_ptr() for tensor in self._policy.state_dict().values()}
        return {name: tensor for name, tensor in module.state_dict().items() if tensor.data_ptr() not in saved}


def _check_same(name: str, saved: Mapping[str, Tensor] | None, own: Mapping[str, Tensor]) -> None:
    """Raise if saved weights belong to another network than the one of this name."""
    why = "Hyperparameters that decide what is trained cannot change in a resume: leave them as they were."
    if saved is None:
        raise ValueError(f"the run trained no network {name!r}. {why}")
    for key in dict.fromkeys((*own, *saved)):
        had, has = (f"{list(each[key].shape)}" if key in each else "nothing" for each in (saved, own))
        if had != has:
            raise ValueError(f"the network {name!r} had {had} for `{key}` in the run, and has {has} here. {why}")
