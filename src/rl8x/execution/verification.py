"""Compares a compiled program with its function, once after it was built, on the arguments of its first call.

torch's compiler has silently built wrong programs: torch 2.10 for whole updates, torch 2.13 for programs that keep a
copy of a tensor that they overwrite (`traces.KEPT`). A program that is off by more than rounding is refused.
There are two kinds of programs:

- The tensors of a step have a row for each copy of an environment. A number is compared relative to its column's root
  mean square. Rounding may flip a sampled action or a flag, and thereby change its whole row: a few rows are left out.
- The results of an update are metrics; each is compared relative to its own value or, since some cancel to 0, to an
  absolute number. For tensors that an update writes, such as weights and moments, the norm of the change is
  compared. Adam removes a factor of the loss from the change of the weights, but not from that of the moments.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

Call = Callable[[], Sequence[Tensor]]
Kind = Literal["step", "update"]


class Tolerance(NamedTuple):
    """How far a program may be off."""

    number: float  # a number of a row, as a share of its column's root mean square
    rows: float  # share of rows that may have other actions or flags
    few: int  # number of rows that may have them, however few rows there are
    metric: float  # a metric, as a share of its value
    least: float  # a metric, whatever its value
    change: float  # the change of a tensor, as a share of its norm


_COARSE: Final = Tolerance(number=5e-2, rows=0.05, few=1, metric=5e-2, least=5e-2, change=0.3)
TOLERANCES: Final = {"fp32": Tolerance(1e-4, 0.01, 0, 1e-3, 1e-5, 1e-2), "tf32": _COARSE, "bf16": _COARSE}

# Rounding errors of numbers that cancel to 0: as a share of the tolerance of the whole tensor's root mean square, as an
# absolute number, and as a share of the whole tensor's norm.
_OF_WHOLE: Final = 1e-2
_LEAST: Final = 1e-6
_OF_NORM: Final = 1e-6
# Largest number of metrics of an update; longer results, and matrices after the first result, are compared by norm.
_MOST_METRICS: Final = 512


@dataclasses.dataclass
class Check:
    """How a program is verified."""

    name: str = "program"  # in messages
    kind: Kind = "step"  # kind of its tensors, see this module
    tolerance: Tolerance = TOLERANCES["fp32"]
    # By the programs' keys. The programs of a run share them, and checkpoints contain them.
    verdicts: dict[str, str] = dataclasses.field(default_factory=dict)


def verdict(program: Call, function: Call, held: Sequence[Tensor], check: Check, items: Sequence[int] = ()) -> str:
    """Call a function and its program on the same arguments; describe the program's error, or return "" if they agree.

    `held` are all tensors that they read or write, `[*]`; they are restored. `items` are the positions in it of a
    loop's items, `[items, *]`; a loop's results have that shape too.
    """
    before = [tensor.clone() for tensor in held]
    (wanted, after), (got, got_after) = (_called(call, held, before) for call in (function, program))
    turned = items if check.kind == "step" else ()  # all items of a copy are in its row
    pairs = [_Pair(f"result {i}", *both) for i, both in enumerate(zip(got, wanted, strict=True))]
    pairs = [pair.turned() for pair in pairs] if turned else pairs
    for i, (compiled, eager, old) in enumerate(zip(got_after, after, before, strict=True)):
        if compiled is not old or eager is not old:
            pair = _Pair(f"tensor {i}", compiled, eager, old)
            pairs.append(pair.turned() if i in turned else pair)
    differences = _of_step if check.kind == "step" else _of_update
    worst = max(differences([pair for pair in pairs if pair.eager.numel()], check.tolerance), default=(0.0, ""))
    return f"{check.name}: {worst[1]}" if worst[0] > 1.0 else ""


class _Pair(NamedTuple):
    """A tensor, `[*]`, that a program (`compiled`) and its function (`eager`) returned, or wrote over an `old` one."""

    what: str
    compiled: Tensor
    eager: Tensor
    old: Tensor | None = None

    def turned(self) -> _Pair:
        """Return the pair with the axis of a loop's items moved from `[items, *]` to `[*, items]`."""
        return _Pair(self.what, self.compiled.movedim(0, -1), self.eager.movedim(0, -1))


def _called(call: Call, held: Sequence[Tensor], before: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the results of a call, and copies of the tensors that it changed; restore them afterwards."""
    after = list(before)
    try:
        results = [result.detach().clone() for result in call()]
    finally:
        for i, (tensor, old) in enumerate(zip(held, before, strict=True)):
            if not torch.equal(tensor, old):
                after[i] = tensor.clone()
                with torch.no_grad():
                    tensor.copy_(old)
    return results, after


def _of_step(pairs: Sequence[_Pair], tolerance: Tolerance) -> Iterator[tuple[float, str]]:
    """Yield the excess of each tensor's error (above 1: too far off) and a text; tensors have a row for each copy."""
    sizes = collections.Counter(pair.eager.shape[0] for pair in pairs if pair.eager.dim())
    rows = sizes.most_common(1)[0][0] if sizes else 1
    tables = [
        _Pair(what, *(each.reshape(rows if each.shape[:1] == (rows,) else 1, -1) for each in (compiled, eager)))
        for what, compiled, eager, _ in pairs
    ]
    flips = torch.zeros(rows, 1, dtype=torch.bool)
    for what, compiled, eager, _ in tables:
        if not eager.is_floating_point():
            differs = compiled.ne(eager).any(1, keepdim=True).cpu()
            if len(eager) != rows and differs:
                yield math.inf, f"{what} differs"
            flips = flips | differs
    most, count = min(max(int(tolerance.rows * rows), tolerance.few), rows - 1), int(flips.sum())
    if count > most:
        yield math.inf, f"{count} of {rows} rows have other actions or flags"
        return
    for what, compiled, eager, _ in tables:
        if eager.is_floating_point():
            kept = ~flips.squeeze(1).to(eager.device) if len(eager) == rows else slice(None)
            known = eager[kept].double().nan_to_num(0.0, 0.0, 0.0)
            usual, whole = known.square().mean(0).sqrt(), known.square().mean().sqrt()
            allowed = tolerance.number * (usual + _OF_WHOLE * whole) + _LEAST
            yield _off(what, _differences(compiled[kept], eager[kept]), allowed, tolerance.number)


def _of_update(pairs: Sequence[_Pair], tolerance: Tolerance) -> Iterator[tuple[float, str]]:
    """Yield the excess of each tensor's error in an update (above 1: too far off) and a text."""
    for i, (what, compiled, eager, old) in enumerate(pairs):
        if not eager.is_floating_point():
            yield 0.0 if torch.equal(compiled, eager) else math.inf, f"{what} differs"
        elif old is None and (i == 0 or eager.dim() <= 1) and eager.numel() <= _MOST_METRICS:
            allowed = (tolerance.metric * eager.double().abs()).clamp(min=tolerance.least)
            yield _off("a metric", _differences(compiled, eager), allowed, tolerance.metric)
        else:
            known = eager.double().nan_to_num(0.0, 0.0, 0.0)
            change = known.norm() if old is None else (known - old).norm()
            allowed = tolerance.change * change + _OF_NORM * known.norm() + 1e-12
            yield _off(what, _differences(compiled, eager).norm(), allowed, tolerance.change)


def _differences(compiled: Tensor, eager: Tensor) -> Tensor:
    """Return the distances of numbers, `[*]`; infinite where only one of two is finite."""
    same = (compiled == eager) | (compiled.isnan() & eager.isnan())
    return (compiled.double() - eager.double()).abs().masked_fill(same, 0.0).nan_to_num(math.inf, math.inf)


def _off(what: str, differences: Tensor, allowed: Tensor, share: float) -> tuple[float, str]:
    """Return the largest ratio of a difference to the allowed one, a `share` of the size, and a text about it."""
    excess = float((differences / allowed).max())
    return excess, f"{what} is off by {excess * share:.2g} of its size, where {share:g} is rounding"
