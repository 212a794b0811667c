"""The on-policy update: epochs of minibatches, as programs of tensors that run eagerly, compiled or captured."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rl8x import keys
from rl8x.algorithms.on_policy.adaptive_rate import AdaptiveRate
from rl8x.algorithms.on_policy.config import OnPolicyConfig
from rl8x.algorithms.on_policy.minibatches import Rows, SequenceBatch, SequencePack, epoch, shuffled
from rl8x.algorithms.optimizer import FlatOptimizer, clip_and_apply
from rl8x.distributed import ranks, sum_over_ranks
from rl8x.execution import Execution, Program
from rl8x.execution.private import Substitution
from rl8x.execution.programs import Loop, prepare
from rl8x.execution.threads import Workers
from rl8x.policy import Policy, training_mode

# Transitions per chunk, whose activations are kept for one backward pass: bounds the memory, and on the CPU keeps
# activations in the cache. Each chunk costs eager execution a millisecond of overhead.
_CHUNK_STEPS: Final = 8192
# Compiled on the CPU: transitions per chunk times a layer's width, estimated as the root of half the weights.
_CHUNK_ACTIVATIONS: Final = 2**17
_CHUNK_STEPS_CUDA: Final = 2**18
# Numbers in the observations of a chunk, for wide ones: images and their activations would fill the memory.
_CHUNK_NUMBERS: Final = 2**24


Renew = Callable[[Workers, int], None]
"""Writes new targets into the pack, given threads to share the work and the most sequences at a time."""


class Objective(NamedTuple):
    """The objective that the updates minimise.

    Attributes:
        losses: A pure function of tensors. It takes the policy, to be called as a module, under the weights of the
            update; a minibatch, each `[seq_len, batch, ...]`; the policy's state before its sequences, each
            `[batch, *]`; a coefficient that may change from step to step, 0-d; and the config. It returns the sums of
            all metrics over the minibatch, `[num_metrics]`; what is masked counts as 0.
        metrics: Their names.
        total: The one whose mean is minimised.
        divergence: The one that says how far the policy has gone from that which acted.
        limit: The updates of a step end where the divergence's mean exceeds it before an update; None is no limit.
        rate: How the learning rate goes by that mean; None leaves it alone.
    """

    losses: Callable[[Callable[..., Any], SequenceBatch, SequenceBatch, Tensor, Any], Tensor]
    metrics: tuple[str, ...]
    total: str
    divergence: str = ""
    limit: float | None = None
    rate: AdaptiveRate | None = None


class OnPolicyUpdater:
    """Trains `num_sgd_iters` epochs, an optimizer step for each minibatch or accumulated epoch.

    Args:
        policy: What is trained.
        config: Hyperparameters.
        objective: What is minimised.
        optimizer: Holds weights and gradients as flat vectors.
        pack: The rollout's sequences.
        execution: How the programs run.
        generator: Draws the order of the data.
        renew: Called before each epoch but the first; None leaves the targets as they are.
        in_order: Whether the policy's calls depend on those before, as with dropout: then one thread makes them.

    Attributes:
        adapts: Whether the learning rate goes by the objective's; False where one was set in its place.
        prepared: Whether `prepare` has been called.
    """

    def __init__(
        self,
        policy: Policy,
        config: OnPolicyConfig,
        objective: Objective,
        optimizer: FlatOptimizer,
        pack: SequencePack,
        execution: Execution,
        generator: torch.Generator,
        *,
        renew: Renew | None = None,
        in_order: bool = False,
    ) -> None:
        self.policy = policy
        self.config = config
        self.objective = objective
        self.optimizer = optimizer
        self.pack = pack
        self.execution = execution
        self.generator = generator
        self.renew = renew
        self.in_order = in_order
        self.device = policy.device
        self._under = Substitution(policy, optimizer.names)
        self._scales: dict[int, Tensor] = {}
        # One gradient per worker, and its views in the shapes of the weights.
        self._gradients = [optimizer.gradient]
        self._parts: dict[int, list[Tensor]] = {}
        self._made = torch.zeros((), device=self.device)
        self._total = objective.metrics.index(objective.total)
        self.adapts = objective.rate is not None
        self.prepared = False
        self._ran = {"eager"}

    # Built when the pack has been filled, since only then it is known which tensors a program reads.

    @functools.cached_property
    def _update(self) -> Program:
        num_fixed = len(self._state) + len(self.pack.sources)
        return self.execution.program(self._update_tensors, num_fixed, name="update", kind="update")

    @functools.cached_property
    def _updates(self) -> Program:
        limited = self.objective.limit is not None
        num_state = len(self._state) - (self.objective.rate is None)
        loop = Loop(self._update_tensors, num_state, ends=limited)
        return self.execution.program(loop, name="update", kind="update")

    @functools.cached_property
    def _add_gradient(self) -> Program:
        return self.execution.program(
            self._add_gradient_tensors, 2 + len(self.pack.sources), name="gradient", kind="update"
        )

    @functools.cached_property
    def _apply(self) -> Program:
        return self.execution.program(self._apply_tensors, len(self._state) + 1, name="update", kind="update")

    @property
    def _state(self) -> tuple[Tensor, ...]:
        """The state before an update: weights and moments, which it changes, and the learning rate.

        One that adapts changes too, and goes by the number of updates since the rollout.
        """
        made = () if self.objective.rate is None else (self._made,)
        return (self.optimizer.weights, *self.optimizer.moments.values(), self.optimizer.lr, *made)

    @property
    def _minibatch_rows(self) -> int:
        size = self.config.sgd_minibatch_size
        return self.pack.num_sequences if size is None else size // self.pack.seq_len

    def run(self, coefficient: float = 0.0) -> tuple[Tensor, Tensor]:
        """Update the policy by the packed sequences.

        Args:
            coefficient: The objective's coefficient in these updates.

        Returns:
            A row for each optimizer step, the objective's metrics and the gradient norm, `[updates, num_metrics + 1]`,
            and whether it was applied, `[updates]`, bool.
        """
        config = self.config
        weight, active = self._first(coefficient)
        limited, on_cpu = self.objective.limit is not None, self.device.type == "cpu"
        rows, flags = [], []
        self._made.fill_(0.0 if self.adapts else -math.inf)  # no update has been made, or none ever will
        if self.execution.prepares and not self.prepared:
            with self.execution.ahead():
                self.prepare(coefficient)
        with self._workers() as workers:
            results: Iterable[Sequence[Tensor]]
            looped = self._is_looped(workers)
            at_once = self._epochs_at_once if looped else 1
            for i in range(config.num_sgd_iters // at_once):
                if self.renew is not None and i:
                    self.renew(workers, self._chunk_rows(workers))
                with self._training():
                    if looped:
                        orders = self._orders(self.generator, at_once)
                        results = [self._updates(*self._looped(orders, weight, active))]
                    else:
                        results = self._epoch(self._batches(workers, self.generator), weight, active, workers)
                    for row, flag in results:
                        rows.append(row)
                        flags.append(flag)
                        active = flag[-1]
                        if limited and on_cpu and not flag.all():
                            return torch.cat(rows), torch.cat(flags)
        return torch.cat(rows), torch.cat(flags)

    def _workers(self) -> contextlib.AbstractContextManager[Workers]:
        work = 0 if self.in_order else self._minibatch_rows * self.pack.seq_len * len(self.optimizer.weights)
        return self.execution.threads.workers_for(work)

    def _training(self) -> contextlib.AbstractContextManager[None]:
        """Put the policy into training mode, unless its model has none: for a small one that costs 2% of a step."""
        return training_mode(self.policy) if self.policy.has_modes else contextlib.nullcontext()

    def _chunk_rows(self, workers: Workers) -> int:
        """Return the most sequences of a chunk: few enough to give every worker one, and to stay in the cache."""
        return min(max(1, self._chunk_steps // self.pack.seq_len), -(-self._minibatch_rows // workers.count))

    def _batches(self, workers: Workers, generator: torch.Generator) -> list[list[Rows]]:
        """Return the minibatches of an epoch in chunks."""
        config, num_rows, chunk = self.config, self.pack.num_sequences, self._chunk_rows(workers)
        batches = epoch(num_rows, self._minibatch_rows, chunk, generator, shuffle=config.shuffle_minibatches)
        return [[part for batch in batches for part in batch]] if config.accumulate_grads else batches

    @property
    def _epochs_at_once(self) -> int:
        """Epochs of one program. A limited update may end after any, and then draws no order for those after it."""
        alone = self.objective.limit is not None or self.renew is not None
        return 1 if alone else self.config.num_sgd_iters

    def _orders(self, generator: torch.Generator, epochs: int) -> Tensor:
        """Return the minibatches of some epochs, whose updates are one program, `[updates, sequences]`."""
        return shuffled(self.pack.num_sequences, self._minibatch_rows, epochs, generator)

    def prepare(self, coefficient: float = 0.0) -> None:
        """Start compiling the programs of an update, for each size of chunk, without waiting for them."""
        self.prepared = True
        weight, active = self._first(coefficient)
        generator = torch.Generator(self.device)
        with self._workers() as workers, ranks().alone(), self._training():
            if self._is_looped(workers):
                prepare(self._updates, *self._looped(self._orders(generator, self._epochs_at_once), weight, active))
                return
            for chunks in self._batches(workers, generator):
                scale = self._scale(chunks)
                for chunk in chunks:
                    if len(chunks) == 1 and ranks().size == 1:
                        prepare(self._update, *self._single(chunk, weight, scale, active))
                    else:
                        prepare(self._add_gradient, *self._chunk(self._gradients[0], chunk, weight, scale))
                if len(chunks) == 1 and ranks().size > 1:
                    means = torch.zeros(len(self.objective.metrics), device=self.device)
                    prepare(self._apply, *self._state, self.optimizer.gradient, means, active)

    def _first(self, coefficient: float) -> tuple[Tensor, Tensor]:
        """Return the objective's coefficient and whether the first update is applied, 0-d, made on the device."""
        active = torch.ones((), dtype=torch.bool, device=self.device)
        return torch.full((), coefficient, device=self.device), active

    def _looped(self, orders: Tensor, coefficient: Tensor, active: Tensor) -> list[Tensor]:
        """Return the arguments of the program that makes an optimizer step for each minibatch of `orders`."""
        return [*self._state, *self.pack.sources, coefficient, self._scale([orders[0]]), active, orders]

    def _single(self, chunk: Rows, coefficient: Tensor, scale: Tensor, active: Tensor) -> list[Tensor]:
        """Return the arguments of the program that makes one optimizer step."""
        return [*self._state, *self.pack.sources, coefficient, scale, active, *self._rows_or_data(chunk)]

    def _chunk(self, gradient: Tensor, chunk: Rows, coefficient: Tensor, scale: Tensor) -> list[Tensor]:
        """Return the arguments of the program that adds a chunk's gradient."""
        fixed = (gradient, self.optimizer.weights, *self.pack.sources)
        return [*fixed, coefficient, scale, *self._rows_or_data(chunk)]

    def _epoch(
        self, batches: list[list[Rows]], coefficient: Tensor, active: Tensor, workers: Workers
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Make the optimizer steps of an epoch; yield the results of each, `[1, num_metrics + 1]` and `[1]`."""
        for chunks in batches:
            row, active = self._step(chunks, coefficient, active, workers)
            yield row.unsqueeze(0), active.unsqueeze(0)

    def _is_looped(self, workers: Workers) -> bool:
        """Return whether epochs are one program: on the CPU, with one rank, if each minibatch is one chunk."""
        if self.execution.mode != "compile" or self.device.type != "cpu" or ranks().size > 1:
            return False
        config, pack, size = self.config, self.pack, self._minibatch_rows
        if pack.wide or pack.masked or config.accumulate_grads or not config.shuffle_minibatches:
            return False
        return size < pack.num_sequences and self._chunk_rows(workers) >= size

    def _step(self, chunks: list[Rows], coefficient: Tensor, active: Tensor, workers: Workers) -> tuple[Tensor, Tensor]:
        """Make one optimizer step if the KL divergence allows it: the gradient, its sum over ranks, and applying it.

        A minibatch of one chunk is one program, or with several ranks one before the sum and one after it.

        Returns:
            The loss metrics' means and the gradient norm, `[num_metrics + 1]`, and whether it was taken, 0-d, bool.
        """
        scale, optimizer = self._scale(chunks), self.optimizer
        whole = self.execution.mode != "eager" and len(chunks) == 1
        if whole and ranks().size == 1:
            row, active = self._update(*self._single(chunks[0], coefficient, scale, active))
            return row, active
        means = self._of_all_ranks(self._set_gradient(chunks, coefficient, scale, workers))
        if whole:
            row, active = self._apply(*self._state, optimizer.gradient, means, active)
            return row, active
        active = self._heed(means, active, optimizer.lr, self._made)
        norm = optimizer.step(self.config.max_grad_norm, None if self.objective.limit is None else active)
        return torch.cat((means, norm.unsqueeze(0))), active

    def _of_all_ranks(self, means: Tensor) -> Tensor:
        """Sum gradients in place, and shares of metrics, `[num_metrics]`, over the ranks; return the metrics."""
        gradient, means = sum_over_ranks(self.optimizer.gradient, means)
        if gradient is not self.optimizer.gradient:
            self.optimizer.gradient.copy_(gradient)
        return means

    def _heed(self, means: Tensor, active: Tensor, lr: Tensor, *made: Tensor) -> Tensor:
        """Act on the divergence that was measured before an update: adapt the rate in place, end at the limit.

        Args:
            means: Of the metrics, `[num_metrics]`.
            active: Whether the updates had not ended before this one, 0-d, bool.
            lr: The learning rate, 0-d.
            made: If it adapts, the updates since the rollout, 0-d. Before the first, what is measured is rounding.

        Returns:
            Whether this update is applied, 0-d, bool.
        """
        objective = self.objective
        if objective.rate is not None:
            kl = means[objective.metrics.index(objective.divergence)]
            lr.copy_(torch.where(active & (made[0] > 0), objective.rate.adapted(lr, kl), lr))
            made[0].add_(1.0)
        if objective.limit is None:
            return active
        return active & (means[objective.metrics.index(objective.divergence)] <= objective.limit)

    def _set_gradient(self, chunks: list[Rows], coefficient: Tensor, scale: Tensor, workers: Workers) -> Tensor:
        """Accumulate the gradients of chunks over workers, in an order that does not depend on timing.

        Returns:
            The means of the loss metrics, `[num_metrics]`.
        """
        count = min(workers.count, len(chunks))
        while len(self._gradients) < count:
            self._gradients.append(torch.zeros_like(self.optimizer.gradient))

        def add(worker: int) -> Tensor:
            self._gradients[worker].zero_()
            sums = [self._add(worker, chunk, coefficient, scale) for chunk in chunks[worker::count]]
            return torch.stack(sums).sum(0)

        jobs = [functools.partial(add, worker) for worker in range(count)]
        # The first call, which may compile, runs in one thread, with the same shares and sums as later calls, so that
        # a resumed process gets the same bits.
        sums = workers.share(jobs) if self.execution.mode in self._ran and count > 1 else [job() for job in jobs]
        self._ran.add(self.execution.mode)
        for gradient in self._gradients[1:count]:
            self.optimizer.gradient.add_(gradient)
        return torch.stack(sums).sum(0)

    def _add(self, worker: int, chunk: Rows, coefficient: Tensor, scale: Tensor) -> Tensor:
        """Add a chunk's gradient to a worker's; return the sums of the loss metrics, `[num_metrics]`."""
        gradient = self._gradients[worker]
        if self.execution.mode != "eager":
            (sums,) = self._add_gradient(*self._chunk(gradient, chunk, coefficient, scale))
            return sums
        if worker not in self._parts:
            self._parts[worker] = self.optimizer.split(gradient)
        with torch.enable_grad():
            losses = self._losses(self.optimizer.views, coefficient, scale, *self.pack.gather(chunk))
            new_gradients = torch.autograd.grad(losses[self._total], self.optimizer.views, allow_unused=True)
        for part, new in zip(self._parts[worker], new_gradients, strict=True):
            if new is not None:
                part.add_(new)
        return losses.detach()

    @property
    def _chunk_steps(self) -> int:
        if self.device.type != "cpu":
            most = _CHUNK_STEPS_CUDA
        elif self.execution.mode == "eager":
            most = _CHUNK_STEPS
        else:
            width = (len(self.optimizer.weights) / 2) ** 0.5
            most = 2 ** round(math.log2(_CHUNK_ACTIVATIONS / width))
        return max(1, min(most, _CHUNK_NUMBERS // self.pack.width))

    def _scale(self, chunks: list[Rows]) -> Tensor:
        """Return 1 over the number of unmasked transitions in chunks, summed over ranks, 0-d."""
        if self.pack.masked:
            counts = [self.pack.gather(rows)[0][keys.VALID].sum() for rows in chunks]
            return 1.0 / ranks().sum(torch.stack(counts).sum()).clamp(min=1)
        size = sum(rows.stop - rows.start if isinstance(rows, slice) else len(rows) for rows in chunks)
        if size not in self._scales:
            self._scales[size] = torch.full((), 1.0 / (size * ranks().size * self.pack.seq_len), device=self.device)
        return self._scales[size]

    def _rows_or_data(self, rows: Rows) -> list[Tensor]:
        """Return a program's arguments for its chunk: the rows to gather, or the gathered data."""
        return self.pack.take(rows) if isinstance(rows, slice) or self.pack.wide else [rows]

    def _taken(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Gather a chunk's data inside of a program, from the pack's sources and the result of `_rows_or_data`."""
        num_sources = len(self.pack.sources)
        sources, given = tensors[:num_sources], list(tensors[num_sources:])
        if given[0].dtype != torch.int64:
            return given
        return [source.index_select(0, given[0]) for source in sources]

    # The functions of tensors that are compiled

    def _losses(
        self, views: Sequence[Tensor], coefficient: Tensor, scale: Tensor, batch: SequenceBatch, state: SequenceBatch
    ) -> Tensor:
        """Return the scaled sums of the loss metrics with the given weights, `[num_metrics]`."""
        call: Callable[..., Any] = self.policy
        if views is not self.optimizer.views:
            call = functools.partial(self._under, views)
        return self.objective.losses(call, batch, state, coefficient, self.config) * scale

    def _gradient(
        self, weights: Tensor, coefficient: Tensor, scale: Tensor, taken: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient with respect to the flat weights, and the sums of the loss metrics."""
        with torch.enable_grad():
            weights = weights.detach().requires_grad_()
            losses = self._losses(self.optimizer.split(weights), coefficient, scale, *self.pack.unpack(taken))
            (gradient,) = torch.autograd.grad(losses[self._total], weights)
        return gradient, losses.detach()

    def _add_gradient_tensors(self, gradient: Tensor, weights: Tensor, *tensors: Tensor) -> list[Tensor]:
        """Accumulate a chunk's gradient; return the sums of the loss metrics."""
        num_sources = len(self.pack.sources)
        coefficient, scale, *given = tensors[num_sources:]
        added, sums = self._gradient(weights, coefficient, scale, self._taken((*tensors[:num_sources], *given)))
        gradient.add_(added)
        return [sums]

    def _update_tensors(self, weights: Tensor, *tensors: Tensor) -> list[Tensor]:
        """Make a whole update: gather, gradient, clipping, optimizer; weights and moments change in place."""
        num_moments, num_sources = len(self.optimizer.moments), len(self.pack.sources)
        moments, (lr, *rest) = tensors[:num_moments], tensors[num_moments:]
        num_made = self.objective.rate is not None
        made, rest = rest[:num_made], rest[num_made:]
        sources, (coefficient, scale, active, *given) = rest[:num_sources], rest[num_sources:]
        gradient, sums = self._gradient(weights, coefficient, scale, self._taken((*sources, *given)))
        return self._apply_tensors(weights, *moments, lr, *made, gradient, sums, active)

    def _apply_tensors(self, weights: Tensor, *tensors: Tensor) -> list[Tensor]:
        """Clip a gradient and make an optimizer step by it; weights and moments change in place."""
        num_moments = len(self.optimizer.moments)
        moments, (lr, *made, gradient, means, active) = tensors[:num_moments], tensors[num_moments:]
        active = self._heed(means, active, lr, *made)
        norm = clip_and_apply(
            self.optimizer.rule,
            (weights, *moments),
            gradient,
            lr,
            max_grad_norm=self.config.max_grad_norm,
            active=None if self.objective.limit is None else active,
        )
        return [torch.cat((means, norm.unsqueeze(0))), active.clone()]
