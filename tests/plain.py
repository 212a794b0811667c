"""A perceptron written plainly and trained by torch's own Adam: for second formulations of what trains policies."""

from __future__ import annotations

import torch


class PlainLearner:
    """The actor of a policy with one hidden layer, in float64, apart from all that rl8x trains it by.

    Args:
        policy: It begins with copies of its weights.
        lr: The learning rate.
        max_grad_norm: Largest norm of a gradient.
    """

    def __init__(self, policy, lr, max_grad_norm):
        self.weights = {
            name: weight.detach().double().clone().requires_grad_() for name, weight in policy.named_parameters()
        }
        self.adam = torch.optim.Adam(self.weights.values(), lr)
        self.max_grad_norm = max_grad_norm

    def features(self, obs):
        """Compute W2 relu(W1 x + b1) + b2 of observations `[..., obs]`."""
        part = {name.removeprefix("model."): weight for name, weight in self.weights.items()}
        hidden = (obs.double() @ part["actor.0.weight"].T + part["actor.0.bias"]).clamp(min=0)
        return hidden @ part["policy_head.weight"].T + part["policy_head.bias"]

    def descend(self, loss):
        """Take a step of Adam down a loss, 0-d, with the gradient scaled to its largest norm where it is longer."""
        self.adam.zero_grad()
        loss.backward()
        used = [weight for weight in self.weights.values() if weight.grad is not None]
        norm = sum(weight.grad.square().sum() for weight in used).sqrt()
        for weight in used:
            weight.grad *= min(1.0, self.max_grad_norm / norm.item())
        self.adam.step()

    def furthest(self, policy):
        """Return the largest difference between a weight of a policy and its own."""
        return max((weight - self.weights[name]).abs().max().item() for name, weight in policy.named_parameters())
