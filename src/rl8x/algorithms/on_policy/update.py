"""The on-policy update: epochs of minibatches, as programs of tensors that run eagerly, compiled or captured."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rl8x import keys
from rl8x.algorithms.on_policy.config import OnPolicyConfig
from rl8x.algorithms.on_policy.minibatches import SequenceBatch, SequencePack
from rl8x.algorithms.optimizer import AdaptiveRate, FlatOptimizer
from rl8x.distributed import ranks, sum_over_ranks
from rl8x.execution import Execution, Program
from rl8x.execution.execution import GuardedProgram, Workers
from rl8x.execution.programs import Loop
from rl8x.policy import Policy

# Transitions per chunk, whose activations are kept for one backward pass: bounds the memory, and on the CPU keeps
# activations in the cache. Each chunk costs eager execution a millisecond of overhead.
_CHUNK_STEPS: Final = 8192
# Compiled on the CPU: transitions per chunk times a layer's width, estimated as the root of half the weights.
_CHUNK_ACTIVATIONS: Final = 2**17
_CHUNK_STEPS_CUDA: Final = 2**18
# Numbers in the observations of a chunk, for wide ones: images and their activations would fill the memory.
_CHUNK_NUMBERS: Final = 2**24

Minibatches = list[Tensor] | Tensor
"""Numbers of sequences: of one minibatch in chunks, `[rows]` each; or of one program, `[minibatches, rows]`."""


class Objective(NamedTuple):
    """The objective that the updates minimise.

    Attributes:
        losses: A pure function of tensors. It takes the policy, to be called as a module, under the weights of the
            update; a minibatch, each `[seq_len, batch, ...]`; the policy's state before its sequences, each
            `[batch, *]`; a coefficient that may change from step to step, 0-d; and the config. It returns the metrics
            of each transition, `[num_metrics, seq_len, batch]`.
        metrics: Names of the metrics.
        total: The metric whose mean is minimised.
        divergence: The metric that measures how far the policy has moved from the one that acted.
        limit: The updates of a step end when the mean divergence before an update exceeds it; None: no limit.
        rate: How the learning rate adapts to the mean divergence; None: not at all.
    """

    losses: Callable[[Callable[..., Any], SequenceBatch, SequenceBatch, Tensor, Any], Tensor]
    metrics: tuple[str, ...]
    total: str
    divergence: str = ""
    limit: float | None = None
    rate: AdaptiveRate | None = None


def sums_of(metrics: Tensor, batch: SequenceBatch) -> Tensor:
    """Sum metrics of a minibatch's transitions, `[num_metrics, seq_len, batch]`; masked ones count as 0."""
    return (metrics * batch[keys.VALID] if keys.VALID in batch else metrics).flatten(1).sum(1)


@dataclasses.dataclass(eq=False, repr=False)
class OnPolicyUpdater:
    """Makes the updates of a step, an optimizer step for each minibatch or accumulated epoch; see PPO's `learn`."""

    policy: Policy
    config: OnPolicyConfig
    objective: Objective
    optimizer: FlatOptimizer
    pack: SequencePack
    execution: Execution
    generator: torch.Generator
    _: dataclasses.KW_ONLY
    renews: bool = False
    in_order: bool = False
    workers: Workers = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.device = self.policy.device
        # Epochs of one program. With a limit, updates may end after any epoch, and draw no orders for later ones.
        at_once = not self.renews and self.objective.limit is None
        self.epochs_at_once = self.config.num_sgd_iters if at_once else 1
        self._scales: dict[int, Tensor] = {}
        self._gradients = [self.optimizer.gradient]  # one per worker
        self._num_updates = torch.zeros((), device=self.device)
        self._total = self.objective.metrics.index(self.objective.total)
        self.adapts = self.objective.rate is not None  # until `set_lr`
        self.prepared = False
        self._ran = {"eager"}
        # This context would make a small policy, whose modes do not differ, 2% slower.
        self._learning: Any = self.optimizer.training if self.policy.has_modes else contextlib.nullcontext

    # -- called by a step of the algorithm

    @contextlib.contextmanager
    def begin(self, coefficient: float = 0.0) -> Iterator[None]:
        """Make the updates of a step within the context, with this coefficient of the objective."""
        self._first(coefficient)
        self._results: list[tuple[Tensor, Tensor]] = []
        self._num_updates.fill_(0.0 if self.adapts else -math.inf)  # no update has been made, or none ever will
        if self.execution.prepares and not self.prepared:
            with self.execution.ahead():
                self.prepare(coefficient)
        self._alone = ranks().size == 1
        self._ended = False
        with self._workers() as self.workers:
            self._looped = self._is_looped(self.workers)
            yield

    def epochs(self) -> Iterator[int]:
        """Yield the number of each epoch, or of each program's first epoch, until updates reach the limit."""
        for number in range(0, self.config.num_sgd_iters, self.epochs_at_once if self._looped else 1):
            if not self._ended:
                yield number

    def minibatches(self) -> Sequence[Minibatches]:
        """Return the minibatches of an epoch one by one, or all those of one program together."""
        if self._looped:
            return [self._of_agents(self._orders(self.generator, self.epochs_at_once))]
        return self._batches(self.workers, self.generator)

    def step(self, minibatches: Minibatches) -> None:
        """Make an optimizer step for each minibatch, up to the limit: loss, gradient, clipping, and the rule."""
        if self._ended:
            return
        with self._learning():
            if isinstance(minibatches, Tensor):
                scale = self._scale([minibatches[0]])
                rows, applied = self._updates(*self._arguments(self._state, minibatches, scale))
            else:
                row, is_applied = self._step(minibatches)
                rows, applied = row.unsqueeze(0), is_applied.unsqueeze(0)
        self._results.append((rows, applied))
        self._active = applied[-1]
        if self.objective.limit is not None and self.device.type == "cpu":  # elsewhere a look would be a host sync
            self._ended = not bool(applied.all())

    @property
    def results(self) -> tuple[Tensor, Tensor]:
        """Metrics and gradient norms since `begin`, `[updates, num_metrics + 1]`, and which were applied."""
        rows, applied = zip(*self._results, strict=True)
        return torch.cat(rows), torch.cat(applied)

    def prepare(self, coefficient: float = 0.0) -> None:
        """Start compiling the programs of an update, for each size of chunk, without waiting for them."""
        self.prepared = True
        self._first(coefficient)
        generator = torch.Generator(self.device)  # only layouts matter
        with self._workers() as workers, ranks().alone(), self._learning():
            if self._is_looped(workers):
                orders = self._of_agents(self._orders(generator, self.epochs_at_once))
                self._updates.prepare(*self._arguments(self._state, orders, self._scale([orders[0]])))
                return
            for chunks in self._batches(workers, generator):
                scale = self._scale(chunks)
                for chunk in chunks:
                    if len(chunks) == 1 and ranks().size == 1:
                        self._update.prepare(*self._arguments(self._state, chunk, scale))
                    else:
                        head = (self._gradients[0], self.optimizer.weights)
                        self._add_gradient.prepare(*self._arguments(head, chunk, scale))
                if len(chunks) == 1 and ranks().size > 1:
                    means = torch.zeros(len(self.objective.metrics), device=self.device)
                    self._apply.prepare(*self._state, self.optimizer.gradient, means, self._active)

    # -- minibatches

    @property
    def _minibatch_rows(self) -> int:
        size, agents = self.config.sgd_minibatch_size, self.policy.num_separate
        return self.pack.num_sequences if size is None else size // self.pack.seq_len * agents

    def _workers(self) -> contextlib.AbstractContextManager[Workers]:
        work = 0 if self.in_order else self._minibatch_rows * self.pack.seq_len * len(self.optimizer.weights)
        return self.execution.threads.workers_for(work)

    def chunk_rows(self, workers: Workers) -> int:
        """Return the most sequences of a chunk: few enough to give every worker one, and to stay in the cache."""
        if self.device.type != "cpu":
            steps = _CHUNK_STEPS_CUDA
        elif self.execution.mode == "eager":
            steps = _CHUNK_STEPS
        else:
            width = (len(self.optimizer.weights) / 2) ** 0.5
            steps = 2 ** round(math.log2(_CHUNK_ACTIVATIONS / width))
        steps = min(steps, _CHUNK_NUMBERS // self.pack.width)
        return min(max(1, steps // self.pack.seq_len), -(-self._minibatch_rows // workers.count))

    def _orders(self, generator: torch.Generator, epochs: int = 1) -> Tensor:
        """Return the minibatches of some epochs, as numbers of copies' sequences, `[minibatches, rows]`."""
        agents, device = self.policy.num_separate, self.device
        num_rows, size = self.pack.num_sequences // agents, self._minibatch_rows // agents
        if size == num_rows or not self.config.shuffle_minibatches:
            return torch.arange(num_rows, device=device).view(-1, size)
        orders = [torch.randperm(num_rows, generator=generator, device=device) for _ in range(epochs)]
        return torch.cat(orders).view(-1, size)

    def _of_agents(self, rows: Tensor) -> Tensor:
        agents = self.policy.num_separate
        return rows if agents == 1 else self.pack.of_agents(rows, agents)

    def in_chunks(self, orders: Tensor, workers: Workers) -> list[list[Tensor]]:
        """Split minibatches of copies' sequences, `[minibatches, rows]`, into chunks of agents' that fit the cache."""
        size = max(1, self.chunk_rows(workers) // self.policy.num_separate)
        return [[self._of_agents(chunk) for chunk in torch.split(rows, size)] for rows in orders.unbind()]

    def _batches(self, workers: Workers, generator: torch.Generator) -> list[list[Tensor]]:
        """Return the minibatches of an epoch in chunks."""
        batches = self.in_chunks(self._orders(generator), workers)
        return [[chunk for batch in batches for chunk in batch]] if self.config.accumulate_grads else batches

    def _is_looped(self, workers: Workers) -> bool:
        """Return whether epochs are one program: on the CPU, with one rank, if each minibatch is one chunk."""
        if self.execution.mode != "compile" or self.device.type != "cpu" or ranks().size > 1:
            return False
        config, pack, size = self.config, self.pack, self._minibatch_rows
        if pack.wide or pack.masked or config.accumulate_grads or not config.shuffle_minibatches:
            return False
        return size < pack.num_sequences and self.chunk_rows(workers) >= size

    # -- the arguments of programs

    @property
    def _state(self) -> tuple[Tensor, ...]:
        """The state that an update changes: weights, moments, the rate, and, if it adapts, the number of updates."""
        count = () if self.objective.rate is None else (self._num_updates,)
        return (self.optimizer.weights, *self.optimizer.moments.values(), self.optimizer.lr, *count)

    def _first(self, coefficient: float) -> None:
        """Set the objective's coefficient, and whether the first update is applied, 0-d, made on the device."""
        self._coefficient = torch.full((), coefficient, device=self.device)
        self._active = torch.ones((), dtype=torch.bool, device=self.device)

    def _arguments(self, changed: Sequence[Tensor], rows: Tensor, scale: Tensor) -> list[Tensor]:
        """Return a program's arguments: tensors it changes, shared inputs, and rows to gather or the gathered data."""
        given = self.pack.take(rows) if self.pack.wide else [rows]
        return [*changed, *self.pack.sources, self._coefficient, scale, self._active, *given]

    def _read(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Return coefficient, scale and whether an update is applied, 0-d each, and the data, from the arguments."""
        sources, numbers = tensors[: len(self.pack.sources)], tensors[len(self.pack.sources) :]
        given = numbers[3:]
        taken = [*given] if self.pack.wide else [source.index_select(0, given[0]) for source in sources]
        return tuple(numbers[:3]), taken

    def _scale(self, chunks: list[Tensor]) -> Tensor:
        """Return 1 over the number of unmasked transitions in chunks, summed over ranks, 0-d."""
        if self.pack.masked:
            counts = [self.pack.gather(rows)[0][keys.VALID].sum() for rows in chunks]
            return 1.0 / ranks().sum(torch.stack(counts).sum()).clamp(min=1)
        size = sum(map(len, chunks))
        if size not in self._scales:
            self._scales[size] = torch.full((), 1.0 / (size * ranks().size * self.pack.seq_len), device=self.device)
        return self._scales[size]

    # -- one optimizer step: a program, or one for each chunk's gradient, a sum over ranks, and one that applies it

    def _step(self, chunks: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Make one optimizer step if the KL allows it; return its row, `[num_metrics + 1]`, and whether it was made."""
        scale = self._scale(chunks)
        if len(chunks) == 1 and self._alone:
            row, applied = self._update(*self._arguments(self._state, chunks[0], scale))
            return row, applied
        means = self._set_gradient(chunks, scale)
        gradient, means = sum_over_ranks(self.optimizer.gradient, means)
        if gradient is not self.optimizer.gradient:
            self.optimizer.gradient.copy_(gradient)
        apply = self._apply if len(chunks) == 1 else self._apply_tensors
        row, applied = apply(*self._state, self.optimizer.gradient, means, self._active)
        return row, applied

    def _set_gradient(self, chunks: list[Tensor], scale: Tensor) -> Tensor:
        """Add up gradients of chunks, in an order that does not depend on timing; return the means of the metrics."""
        count = min(self.workers.count, len(chunks))
        while len(self._gradients) < count:
            self._gradients.append(torch.zeros_like(self.optimizer.gradient))

        def add(worker: int) -> Tensor:
            head = (self._gradients[worker].zero_(), self.optimizer.weights)
            sums = [self._add_gradient(*self._arguments(head, each, scale))[0] for each in chunks[worker::count]]
            return torch.stack(sums).sum(0)

        jobs = [functools.partial(add, worker) for worker in range(count)]
        # The first call, which may compile, runs in one thread, with the same shares and sums as later calls, so that
        # a resumed process gets the same bits.
        at_once = self.execution.mode in self._ran and count > 1
        sums = self.workers.share(jobs) if at_once else [job() for job in jobs]
        self._ran.add(self.execution.mode)
        for gradient in self._gradients[1:count]:
            self.optimizer.gradient.add_(gradient)
        return torch.stack(sums).sum(0)

    # Programs are made when the pack has been filled, since only then it is known which tensors they read.

    def _program(self, function: Program, num_changed: int, name: str = "update") -> GuardedProgram:
        return self.execution.program(function, num_changed + len(self.pack.sources), name=name, kind="update")

    @functools.cached_property
    def _update(self) -> GuardedProgram:
        return self._program(self._update_tensors, len(self._state))

    @functools.cached_property
    def _updates(self) -> GuardedProgram:
        num_state = len(self._state) - (self.objective.rate is None)
        loop = Loop(self._update_tensors, num_state, ends=self.objective.limit is not None)
        return self.execution.program(loop, name="update", kind="update")

    @functools.cached_property
    def _add_gradient(self) -> GuardedProgram:
        return self._program(self._add_gradient_tensors, 2, "gradient")

    @functools.cached_property
    def _apply(self) -> GuardedProgram:
        return self.execution.program(self._apply_tensors, len(self._state) + 1, name="update", kind="update")

    # -- the update as functions of tensors, which run eagerly, compiled and captured

    def _update_tensors(self, *tensors: Tensor) -> list[Tensor]:
        """Make a whole update: gather, gradient, clipping, optimizer; weights and moments change in place."""
        state, rest = tensors[: len(self._state)], tensors[len(self._state) :]
        (coefficient, scale, active), taken = self._read(rest)
        gradient, sums = self._gradient(state[0], coefficient, scale, taken)
        return self._apply_tensors(*state, gradient, sums, active)

    def _add_gradient_tensors(self, gradient: Tensor, weights: Tensor, *tensors: Tensor) -> list[Tensor]:
        """Accumulate a chunk's gradient; return the sums of the loss metrics."""
        (coefficient, scale, _), taken = self._read(tensors)
        added, sums = self._gradient(weights, coefficient, scale, taken)
        gradient.add_(added)
        return [sums]

    def _apply_tensors(self, *tensors: Tensor) -> list[Tensor]:
        """Clip a gradient and make an optimizer step by it; weights, moments and an adaptive rate change in place."""
        objective, num_held = self.objective, 1 + len(self.optimizer.moments)
        held, (lr, *count, gradient, means, active) = tensors[:num_held], tensors[num_held:]
        if objective.rate is not None:
            kl = means[objective.metrics.index(objective.divergence)]
            # Before the first update since the rollout the measured divergence is only rounding.
            lr.copy_(torch.where(active & (count[0] > 0), objective.rate.adapted(lr, kl), lr))
            count[0].add_(1.0)
        if objective.limit is not None:
            active = active & (means[objective.metrics.index(objective.divergence)] <= objective.limit)
        norm = self.optimizer.apply(held, gradient, lr, active=None if objective.limit is None else active)
        return [torch.cat((means, norm.unsqueeze(0))), active.clone()]

    def _gradient(
        self, weights: Tensor, coefficient: Tensor, scale: Tensor, taken: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient with respect to the flat weights, and the sums of the loss metrics, `[num_metrics]`."""
        optimizer, (batch, state) = self.optimizer, self.pack.unpack(taken)
        # The policy has these weights, and eager threads that share it cannot swap them for others.
        in_place = weights is optimizer.weights and self.execution.mode == "eager"
        with torch.enable_grad():
            policy: Callable[..., Any] = self.policy
            trained: Sequence[Tensor] = optimizer.views
            if not in_place:
                trained = [weights.detach().requires_grad_()]
                policy = functools.partial(optimizer.under, optimizer.split(trained[0]))
            losses = sums_of(self.objective.losses(policy, batch, state, coefficient, self.config), batch) * scale
            gradients = torch.autograd.grad(losses[self._total], trained, allow_unused=in_place)
        return optimizer.joined(gradients) if in_place else gradients[0], losses.detach()
