"""The networks of off-policy algorithms, and their updates: programs of tensors without Python between updates.

Weights and moments come in as vectors and are changed in place, so that the same function runs eagerly, compiled and
captured. No module is copied: a target network is its module under another vector of weights.

An update is a list of phases. Each ends with a tensor that the ranks average, mostly a gradient. A single rank runs all
phases as one program; each of several ranks runs one program up to each average.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rl8x.algorithms.horizons import updates_not_finite
from rl8x.algorithms.optimizer import FlatOptimizer, check_same
from rl8x.distributed import ranks
from rl8x.execution import Execution, Program
from rl8x.execution.execution import GuardedProgram
from rl8x.execution.programs import Loop
from rl8x.rollouts.statistics import Number
from rl8x.trees import row_major

ReplayBatch = Mapping[str, Tensor]
"""The inputs of one update, by flat names: rows of the replay `[batch_size, ...]`, and drawn noise."""

WEIGHTS: Final = "importance_weights"
"""Key of a batch: importance weights of prioritised sampling, `[batch_size]`; missing without priorities."""

SCALE: Final = "return_scale"
"""Key of a batch: the factor that returns are multiplied by, 0-d; missing if they are not scaled."""

Loss = Callable[[Callable[..., Any]], tuple[Tensor, Mapping[str, Tensor]]]
"""Computes a loss from a network called with its trained weights; returns it, 0-d, and auxiliary values by name."""


@dataclasses.dataclass(eq=False)
class Net:
    """A network in an update: a module under weights, `[size]`, which `apply` and `polyak_update` change."""

    optimizer: FlatOptimizer
    weights: Tensor
    moments: Sequence[Tensor] = ()
    lr: Tensor | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Call the module with these weights; gradients flow to the inputs, not to the weights."""
        return self.optimizer.under(self._parts, *inputs)

    def gradient(self, loss: Loss) -> tuple[dict[str, Tensor], Tensor]:
        """Return a loss's auxiliary values, and its gradient with respect to these weights alone, `[size]`."""
        optimizer = self.optimizer
        with torch.enable_grad(), optimizer.training():
            weights = self.weights.detach().requires_grad_()
            value, measured = loss(functools.partial(optimizer.under, optimizer.split(weights)))
            (gradient,) = torch.autograd.grad(value, weights)
        return {name: each.detach() for name, each in measured.items()}, gradient

    def apply(self, gradient: Tensor) -> Tensor:
        """Clip a gradient, `[size]`, in place, and make an optimizer step; return its norm before clipping, 0-d."""
        assert self.lr is not None, "a target network is not trained"
        return self.optimizer.apply((self.weights, *self.moments), gradient, self.lr)

    def polyak_update(self, net: Net, tau: Tensor | float) -> None:
        """Update the weights to (1 - tau) w + tau w', with those of another network; `tau` is a number or 0-d."""
        self.weights.lerp_(net.weights, tau)

    @functools.cached_property
    def _parts(self) -> list[Tensor]:
        return self.optimizer.split(self.weights)


class Nets:
    """The networks of an algorithm and their targets, by name; the policy's weights are saved with the policy."""

    def __init__(self, policy: nn.Module) -> None:
        self.trained: dict[str, FlatOptimizer] = {}
        self.targets: dict[str, tuple[str, Tensor]] = {}
        self._policy = policy

    def add_target(self, name: str, *, of: str) -> None:
        """Add a target network of a named network: the same module with a copy of its weights."""
        self.targets[name] = of, self.trained[of].weights.clone()

    # -- as the arguments of an update

    @property
    def state(self) -> list[Tensor]:
        """The tensors that an update changes in place: weights and moments, `[size]`, and numbers of steps, `[1]`."""
        trained = [tensor for each in self.trained.values() for tensor in each.state]
        return trained + [weights for _, weights in self.targets.values()]

    @property
    def rates(self) -> list[Tensor]:
        """The learning rates, 0-d each."""
        return [each.lr for each in self.trained.values()]

    def bind(self, state: Sequence[Tensor], rates: Sequence[Tensor]) -> dict[str, Net]:
        """Return the networks by name, with tensors in the order and shapes of `state` and `rates`."""
        left, nets = iter(state), dict[str, Net]()
        for (name, each), lr in zip(self.trained.items(), rates, strict=True):
            weights, *moments = (next(left) for _ in each.state)
            nets[name] = Net(each, weights, moments, lr)
        for name, (followed, _) in self.targets.items():
            nets[name] = Net(self.trained[followed], next(left))
        return nets

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return weights that are not the policy's, optimizer states and targets, all by names of weights."""
        targets = {}
        for name, (followed, weights) in self.targets.items():
            optimizer = self.trained[followed]
            targets[name] = dict(zip(optimizer.names, optimizer.split(weights), strict=True))
        return {
            "modules": {name: self._own(each.module) for name, each in self.trained.items()},
            "optimizers": {name: each.state_dict() for name, each in self.trained.items()},
            "targets": targets,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`, after the policy; raise a `ValueError`, changing nothing, if modules do not fit."""
        for name, each in self.trained.items():
            check_same(name, state["modules"].get(name), self._own(each.module))
        for name, each in self.trained.items():
            for key, tensor in self._own(each.module).items():
                tensor.copy_(state["modules"][name][key])
            each.load_state_dict(state["optimizers"][name])
        for name, (followed, weights) in self.targets.items():
            optimizer, saved = self.trained[followed], state["targets"][name]
            weights.copy_(optimizer.joined(saved[key] for key in optimizer.names))

    def _own(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the weights and buffers of a module that are not the policy's."""
        saved = {tensor.data_ptr() for tensor in self._policy.state_dict().values()}
        return {name: tensor for name, tensor in module.state_dict().items() if tensor.data_ptr() not in saved}


Found = dict[str, Tensor]
"""Results of an update so far, by name: metrics, 0-d, inputs of later phases, and perhaps `ERRORS`."""

ERRORS: Final = "errors"
"""Key of an update's results: absolute errors of its rows' values, `[batch_size]`, for their priorities."""

NetsByName = Mapping[str, Net]


class Minimise(NamedTuple):
    """A phase that makes an optimizer step of one network; `found` gets its loss's values and its gradient's norm."""

    net: str
    loss: Callable[[NetsByName, ReplayBatch, Found], Loss]
    norm: str = "norm"

    def begin(self, nets: NetsByName, batch: ReplayBatch, found: Found) -> Tensor:
        """Return the gradient, `[size]`."""
        measured, gradient = nets[self.net].gradient(self.loss(nets, batch, found))
        found.update(measured)
        return gradient

    def end(self, nets: NetsByName, found: Found, mean: Tensor) -> None:
        """Apply the ranks' mean gradient, `[size]`."""
        found[self.norm] = nets[self.net].apply(mean)


class Average(NamedTuple):
    """A phase that averages a number, 0-d, over the ranks, and adds it to `found` by name."""

    name: str
    number: Callable[[NetsByName, ReplayBatch, Found], Tensor]

    def begin(self, nets: NetsByName, batch: ReplayBatch, found: Found) -> Tensor:
        """Return this rank's number, 0-d."""
        return self.number(nets, batch, found)

    def end(self, nets: NetsByName, found: Found, mean: Tensor) -> None:
        """Add the mean, 0-d, to `found`."""
        found[self.name] = mean


Phase = Minimise | Average


@dataclasses.dataclass(eq=False, repr=False)
class OffPolicyUpdater:
    """Runs updates in blocks: each learns from a batch by phases, and ends by `finish`, which moves target networks."""

    phases: Sequence[Phase]
    names: Sequence[str]
    finish: Callable[[NetsByName, ReplayBatch, Found], None]
    nets: Nets
    execution: Execution
    rows: Callable[[ReplayBatch], ReplayBatch]

    def __post_init__(self) -> None:
        self._items: tuple[str, ...] = ()
        self._found: dict[int, list[str]] = {0: []}  # names of the results before each phase

    def run(self, items: ReplayBatch) -> tuple[Tensor, Tensor | None]:
        """Make an update for each of the items, `[updates, ...]`; return their metrics and the errors of rows."""
        arguments = self._arguments(items)
        rows, *errors = self._program(*arguments)
        return rows, errors[0] if errors else None

    def prepare(self, items: ReplayBatch) -> None:
        """Request compilation for items of this layout, without running the program or waiting for it."""
        arguments = self._arguments(items)
        if isinstance(self._program, GuardedProgram):
            self._program.prepare(*arguments)
            return

        def prepared(phase: int, *tensors: Tensor) -> Sequence[Tensor]:
            self._programs[phase].prepare(*tensors)
            return self._run_phase(phase, *tensors)

        num_state, first = len(self.nets.state), self._loop(prepared).first(arguments)
        with ranks().alone():
            self._in_phases(prepared, *[tensor.clone() for tensor in first[:num_state]], *first[num_state:])

    def _arguments(self, items: ReplayBatch) -> list[Tensor]:
        self._items = tuple(items)
        return [*self.nets.state, *self.nets.rates, *[row_major(item) for item in items.values()]]

    @functools.cached_property
    def _program(self) -> GuardedProgram | Loop:
        """Return the loop, built at the first call, when the names of the items are known."""
        if ranks().size > 1:
            run = lambda phase, *tensors: self._programs[phase](*tensors)  # noqa: E731
            return self._loop(functools.partial(self._in_phases, run))
        return self.execution.program(self._loop(self._update_tensors), name="update", kind="update")

    def _loop(self, function: Program) -> Loop:
        return Loop(function, len(self.nets.state), len(self._items))

    @torch.no_grad()
    def _update_tensors(self, *tensors: Tensor) -> list[Tensor]:
        """Make one update; this function is compiled."""
        return self._results(self.update(*self._named(tensors)))

    def update(self, nets: NetsByName, batch: ReplayBatch) -> Found:
        """Make one update, in a single process; return its results."""
        found: Found = {}
        for phase in self.phases:
            phase.end(nets, found, phase.begin(nets, batch, found))
        self.finish(nets, batch, found)
        return found

    def _named(self, tensors: Sequence[Tensor]) -> tuple[dict[str, Net], dict[str, Tensor]]:
        """Return the networks and the batch, by name, from the arguments of an update."""
        num_state, num_items = len(self.nets.state), len(self._items)
        state, rates, items = tensors[:num_state], tensors[num_state:-num_items], tensors[-num_items:]
        batch = dict(zip(self._items, items, strict=True))
        # Scalars and vectors are columns of one tensor, and parts of a program are contiguous.
        rows = {name: row if row.is_contiguous() else row.clone() for name, row in self.rows(batch).items()}
        return self.nets.bind(state, rates), batch | rows

    def _results(self, found: Found) -> list[Tensor]:
        row = torch.stack([found[name] for name in self.names])
        return [row, found[ERRORS]] if ERRORS in found else [row]

    # -- with several ranks

    @functools.cached_property
    def _programs(self) -> list[GuardedProgram]:
        """Return a program for each phase, and one for the result."""
        run, count, fixed = self._run_phase, len(self.phases) + 1, len(self.nets.state)
        options: Any = {"name": "update", "kind": "update"}
        return [self.execution.program(functools.partial(run, phase), fixed, **options) for phase in range(count)]

    def _in_phases(self, run: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> Sequence[Tensor]:
        """Make one update: `run` each phase, given its number, with a sum over the ranks after it."""
        left: list[Tensor] = []
        for phase in range(len(self.phases)):
            *found, shared = run(phase, *tensors, *left)
            left = [*found, ranks().sum(shared)]
        return run(len(self.phases), *tensors, *left)

    @torch.no_grad()
    def _run_phase(self, phase: int, *tensors: Tensor) -> list[Tensor]:
        """End the previous phase, and begin this one or finish the update; this function is compiled.

        It takes an update's arguments, the results so far, and the ranks' sum after the previous phase. It returns the
        results so far and the tensor that the ranks sum next, or, after the last phase, the results of the update.
        """
        phases, names = self.phases, self._found[phase]
        count = len(self.nets.state) + len(self.nets.rates) + len(self._items)
        nets, batch = self._named(tensors[:count])
        found = dict(zip(names, tensors[count:], strict=False))
        if phase:
            phases[phase - 1].end(nets, found, tensors[-1] / ranks().size)
        if phase == len(phases):
            self.finish(nets, batch, found)
            return self._results(found)
        shared = phases[phase].begin(nets, batch, found)
        self._found[phase + 1] = list(found)
        return [*found.values(), shared]


def update_stats(
    rows: Sequence[Tensor], names: Sequence[str], weights: Iterable[Tensor], *, host_looks: bool
) -> dict[str, Number]:
    """Average metrics, `[updates, metrics]` each, of which some lack the last, and flag non-finite ones and weights."""
    norms = [name.endswith("grad_norm") for name in names]
    if host_looks:  # it averages faster than many operators
        table = [row for each in rows for row in each.tolist()]
        columns = {name: [row[i] for row in table if i < len(row)] for i, name in enumerate(names)}
        means: dict[str, Number] = {name: sum(each) / len(each) for name, each in columns.items() if each}
        # After the first bad update all numbers are bad.
        worst: list[float] = next((row for row in table if not all(map(math.isfinite, row))), [])
        bad = {is_norm for number, is_norm in zip(worst, norms, strict=False) if not math.isfinite(number)}
        # The sum of squares is finite only if all weights are, and takes a fifth of the time of checking each.
        wrong = any(not math.isfinite(float(each @ each)) and not each.isfinite().all() for each in weights)
        return {**means, "finite/losses": False in bad, "finite/gradients": True in bad, "finite/parameters": wrong}
    padded = torch.cat([pad(each, (0, len(names) - each.shape[1])) for each in rows])
    counts = [sum(len(each) for each in rows if each.shape[1] > i) for i in range(len(names))]
    sums = zip(names, padded.sum(0), counts, strict=True)
    means = {name: each / count for name, each, count in sums if count}
    return {**means, **updates_not_finite(padded, norms, weights)}
