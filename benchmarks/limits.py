"""Measure the machine's limits in a separate process: matmul throughput and memory bandwidth.

A linear layer `[rows, h] x [h, h]` is timed on a few numbers of rows, in each way that torch has of doing it; the
fastest counts. Memory that is written again and again stays mapped and in cache, so this is a limit, not what
is typical. Memory is timed by a copy that no cache holds. Given the shapes of an update's products, it says how often a
second those could be done.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS, ROWS_OF_GPU = (512, 2048, 4096, 16384), (65536, 262144)
WIDTHS = (64, 256)
KINDS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}


def seconds_a_call(function: Callable[[], Any], device: str, budget_s: float = 0.3) -> float:
    """Return the median time of a call, in seconds."""
    times: list[float] = []
    for _ in range(3):
        function()
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end or len(times) < 5:
        begin = time.perf_counter()
        function()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def ways(x: Tensor, weight: Tensor, bias: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return the ways of computing a linear layer, by name."""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    found: dict[str, Callable[[], Tensor]] = {
        "mm": lambda: torch.mm(x, weight.t(), out=out),
        "linear": lambda: F.linear(x, weight, bias),
    }
    fused = getattr(getattr(torch.ops, "mkldnn", None), "_linear_pointwise", None)
    if fused is not None and x.device.type == "cpu":
        with contextlib.suppress(RuntimeError):  # it has no bfloat16 for processors without AVX-512
            fused(x, weight, bias, "none", [], "")
            found["onednn"] = lambda: fused(x, weight, bias, "none", [], "")
    return found


def measure(device: str, rows: tuple[int, ...], copied: int) -> dict[str, Any]:
    """Measure a device: the best GFLOP/s by precision and width, and GB of memory read and written a second."""
    limits: dict[str, Any] = {}
    for precision in ("fp32", "bf16") if device == "cpu" else KINDS:
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        limits[precision] = {str(width): fastest(precision, width, rows, device) for width in WIDTHS}
    source = torch.zeros(copied // 4, device=device)
    target = torch.empty_like(source)
    seconds = seconds_a_call(lambda: target.copy_(source), device)
    return {**limits, "bytes_gb_per_s": round(2 * copied / seconds / 1e9, 1)}


def layer(precision: str, m: int, k: int, n: int, device: str) -> dict[str, Callable[[], Tensor]]:
    """Return the ways of computing a linear layer `[m, k] x [k, n]` of random numbers, by name."""
    x, weight, bias = (torch.randn(*shape, device=device).to(KINDS[precision]) for shape in ((m, k), (n, k), (n,)))
    return ways(x, weight, bias)


def fastest(precision: str, width: int, rows: tuple[int, ...], device: str) -> dict[str, Any]:
    """Return the best GFLOP/s of one width, with the way and the rows that gave it."""
    best: dict[str, Any] = {"gflops": 0.0}
    for count in rows:
        for name, call in layer(precision, count, width, width, device).items():
            rate = 2 * count * width * width / seconds_a_call(call, device) / 1e9
            if rate > best["gflops"]:
                best = {"gflops": round(rate, 1), "way": name, "rows": count}
    return best


def products_per_s(products: Sequence[tuple[int, int, int]], precision: str, device: str, budget_s: float) -> float:
    """Return how often a second some products `[m, k] x [k, n]` could be done, each in its fastest way, alone.

    Each call comes from Python, which adds about a microsecond to it.
    """
    total = 0.0
    for shape, count in Counter(map(tuple, products)).items():
        calls = layer(precision, *shape, device).values()
        total += count * min(seconds_a_call(call, device, budget_s) for call in calls)
    return 1.0 / total


@torch.no_grad()
def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Measure a device, or how often a second some products could be done."""
    device, is_quick = asked["device"], asked["quick"]
    if "products" in asked:
        budget_s = 0.01 if is_quick else 0.3
        return {"per_s": products_per_s(asked["products"], asked["precision"], device, budget_s)}
    rows = (512,) if is_quick else ROWS if device == "cpu" else ROWS_OF_GPU
    return measure(device, rows, 2**20 if is_quick else 2**28)
