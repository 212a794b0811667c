"""What the machine's matrix product allows, measured in a process of its own.

A linear layer `[rows, h] x [h, h]` is timed on a few numbers of rows, in each way that torch has of doing it; the
fastest counts. Memory that is written again and again stays mapped and in cache, so this is a limit, not what
is typical.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS = (512, 2048, 4096, 16384)
WIDTHS = (64, 256)


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


def ways(precision: str, x: Tensor, weight: Tensor, bias: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return the ways of computing a linear layer, by name."""
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    found: dict[str, Callable[[], Tensor]] = {
        "mm": lambda: torch.mm(x, weight.t(), out=out),
        "linear": lambda: F.linear(x, weight, bias),
    }
    fused = getattr(getattr(torch.ops, "mkldnn", None), "_linear_pointwise", None)
    if fused is not None and x.device.type == "cpu":
        found["onednn"] = lambda: fused(x, weight, bias, "none", [], "")
    return found


def measure(device: str = "cpu") -> dict[str, dict[str, dict[str, Any]]]:
    """Return the best GFLOP/s by precision and width, with the way and the rows that gave it."""
    limits: dict[str, dict[str, dict[str, Any]]] = {}
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        limits[precision] = {}
        for width in WIDTHS:
            best: dict[str, Any] = {"gflops": 0.0}
            for rows in ROWS if device == "cpu" else (65536, 262144):
                x = torch.randn(rows, width, device=device).to(dtype)
                weight, bias = (
                    torch.randn(width, width, device=device).to(dtype),
                    torch.randn(width, device=device).to(dtype),
                )
                for name, call in ways(precision, x, weight, bias).items():
                    with torch.no_grad():
                        rate = 2 * rows * width * width / seconds_a_call(call, device) / 1e9
                    if rate > best["gflops"]:
                        best = {"gflops": round(rate, 1), "way": name, "rows": rows}
            limits[precision][str(width)] = best
    return limits


if __name__ == "__main__":
    arguments = json.loads(sys.stdin.read())
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments["threads"]])
    torch.set_num_threads(arguments["threads"])
    print(json.dumps(measure(arguments["device"])))
