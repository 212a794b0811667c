"""The update: passes over a rollout's data, as programs of tensors that are run eagerly or compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.func import functional_call, grad

from rl8x import keys
from rl8x.algorithms.minibatches import SequencePack, chunked, minibatch_rows
from rl8x.algorithms.optimizer import FlatOptimizer, clip_and_apply
from rl8x.algorithms.ppo_config import PPOConfig
from rl8x.algorithms.ppo_losses import KL_DIV, LOSS_METRICS, TOTAL, ppo_losses
from rl8x.execution import Execution
from rl8x.policy import Policy
from rl8x.trees import unflatten_tree

Rows = Tensor | slice

# Transitions whose activations are kept for a backward pass at once: more than this spills out of the cache.
_CHUNK_STEPS: Final = 16384


class Updater:
    """Passes over the data `num_sgd_iters` times, an optimizer step for each minibatch or accumulated pass.

    Args:
        policy: What is trained.
        config: Hyperparameters.
        optimizer: Holds weights and gradients as flat vectors.
        pack: The rollout's sequences.
        execution: How the programs run.
        generator: Draws the order of the data.
    """

    def __init__(
        self,
        policy: Policy,
        config: PPOConfig,
        optimizer: FlatOptimizer,
        pack: SequencePack,
        execution: Execution,
        generator: torch.Generator,
    ) -> None:
        self.policy = policy
        self.config = config
        self.optimizer = optimizer
        self.pack = pack
        self.execution = execution
        self.generator = generator
        self.names = [name for name, weight in policy.named_parameters() if weight.requires_grad]
        self._update = execution.program(self._update_tensors)
        self._add_gradient = execution.program(self._add_gradient_tensors)

    @property
    def updates_a_step(self) -> int:
        """Optimizer steps of one `run()` that no KL limit ends."""
        minibatches = self.pack.num_sequences // self._minibatch_rows
        return self.config.num_sgd_iters * (1 if self.config.accumulate_grads else minibatches)

    @property
    def _minibatch_rows(self) -> int:
        size = self.config.sgd_minibatch_size
        return self.pack.num_sequences if size is None else size // self.pack.seq_len

    def run(self, entropy_coeff: float) -> tuple[Tensor, Tensor]:
        """Update the policy with what is in the pack.

        Returns:
            A row for each optimizer step, the loss metrics and the gradient norm, `[updates, 7]`, and whether it was
            applied, `[updates]`, bool.
        """
        limit, device = self.config.target_kl_div, self.policy.device
        coefficient = torch.tensor(entropy_coeff, device=device)
        if limit is None:
            rows = torch.stack([self._step(group, coefficient) for group in self._groups()])
            return rows, torch.ones(len(rows), dtype=torch.bool, device=device)
        kept, flags = [], []
        # A tensor, so that an accelerator decides without the host.
        active = torch.ones((), dtype=torch.bool, device=device)
        for group in self._groups():
            means = self._accumulate(group, coefficient)
            active = active & (means[KL_DIV] <= 1.5 * limit)
            norm = self.optimizer.step(self.config.max_grad_norm, active)
            kept.append(torch.cat((means, norm.unsqueeze(0))))
            flags.append(active)
            if device.type == "cpu" and not active:
                break
        return torch.stack(kept), torch.stack(flags)

    def _groups(self) -> Iterator[list[Rows]]:
        """Yield the minibatches of each optimizer step."""
        config, pack = self.config, self.pack
        for _ in range(config.num_sgd_iters):
            minibatches = minibatch_rows(
                pack.num_sequences,
                self._minibatch_rows,
                self.generator,
                shuffle=config.shuffle_minibatches,
                device=self.policy.device,
            )
            if config.accumulate_grads:
                yield list(minibatches)
            else:
                yield from ([minibatch] for minibatch in minibatches)

    def _step(self, group: list[Rows], entropy_coeff: Tensor) -> Tensor:
        """Take one optimizer step; return the loss metrics' means and the gradient norm, `[7]`."""
        chunks = self._chunks(group)
        if self.execution.mode == "compile" and len(chunks) == 1:
            optimizer = self.optimizer
            state = (optimizer.weights, optimizer.count, *optimizer.moments)
            (row,) = self._update(
                *state, optimizer.gradient, optimizer.lr, entropy_coeff, self._scale(group), *self.pack.take(chunks[0])
            )
            return row
        sums = self._accumulate(group, entropy_coeff)
        return torch.cat((sums, self.optimizer.step(self.config.max_grad_norm).unsqueeze(0)))

    def _accumulate(self, group: list[Rows], entropy_coeff: Tensor) -> Tensor:
        """Add up the gradient of some minibatches, chunk by chunk, and return the means of the loss metrics, `[6]`."""
        optimizer, scale = self.optimizer, self._scale(group)
        optimizer.gradient.zero_()
        means = torch.zeros(len(LOSS_METRICS), device=optimizer.gradient.device)
        for chunk in self._chunks(group):
            taken = self.pack.take(chunk)
            if self.execution.mode == "compile":
                (sums,) = self._add_gradient(optimizer.gradient, optimizer.weights, entropy_coeff, scale, *taken)
            else:
                losses = self._losses(self.optimizer.views, entropy_coeff, scale, taken)
                losses[TOTAL].backward()  # type: ignore[no-untyped-call]
                sums = losses.detach()
            means += sums
        return means

    def _chunks(self, group: list[Rows]) -> list[Rows]:
        size = max(1, _CHUNK_STEPS // self.pack.seq_len)
        return [chunk for rows in group for chunk in chunked(rows, size)]

    def _scale(self, group: list[Rows]) -> Tensor:
        """Return 1 over the number of transitions that count in some minibatches, 0-d."""
        device = self.policy.device
        if self.pack.masked:
            counts = [self.pack.gather(rows)[0][keys.VALID].sum() for rows in group]
            return 1.0 / torch.stack(counts).sum().clamp(min=1)
        sizes = [rows.stop - rows.start if isinstance(rows, slice) else len(rows) for rows in group]
        return torch.full((), 1.0 / (sum(sizes) * self.pack.seq_len), device=device)

    # The functions of tensors that are compiled

    def _losses(self, views: Sequence[Tensor], entropy_coeff: Tensor, scale: Tensor, taken: list[Tensor]) -> Tensor:
        """Return the scaled sums of the loss metrics under the weights given, `[6]`."""
        batch, state = self.pack.unpack(taken)
        inputs = (unflatten_tree(keys.OBS, batch), unflatten_tree(keys.ACTIONS, batch), state, batch[keys.STARTS])
        if views is self.optimizer.views:
            evaluation = self.policy.evaluate(*inputs)
        else:
            evaluation = functional_call(self.policy, dict(zip(self.names, views, strict=True)), inputs)
        return ppo_losses(evaluation, batch, self.config, entropy_coeff) * scale

    def _slope(
        self, weights: Tensor, entropy_coeff: Tensor, scale: Tensor, taken: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient by the flat weights, and the sums of the loss metrics."""

        def total(weights: Tensor) -> tuple[Tensor, Tensor]:
            losses = self._losses(self.optimizer.split(weights), entropy_coeff, scale, taken)
            return losses[TOTAL], losses

        slope, sums = grad(total, has_aux=True)(weights)
        return slope, sums

    def _add_gradient_tensors(
        self, gradient: Tensor, weights: Tensor, entropy_coeff: Tensor, scale: Tensor, *taken: Tensor
    ) -> list[Tensor]:
        slope, sums = self._slope(weights, entropy_coeff, scale, list(taken))
        gradient.add_(slope)
        return [sums]

    def _update_tensors(self, weights: Tensor, count: Tensor, *tensors: Tensor) -> list[Tensor]:
        """Do a whole update: gradient, clipping, optimizer; weights, count and moments change in place."""
        num_moments = len(self.optimizer.moments)
        moments, (gradient, lr, entropy_coeff, scale, *taken) = tensors[:num_moments], tensors[num_moments:]
        slope, sums = self._slope(weights, entropy_coeff, scale, taken)
        gradient.copy_(slope)
        norm = clip_and_apply(
            self.optimizer.rule, weights, gradient, moments, count, lr, max_grad_norm=self.config.max_grad_norm
        )
        return [torch.cat((sums, norm.unsqueeze(0)))]
