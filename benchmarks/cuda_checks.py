"""Correctness checks on a CUDA device, made in a separate process before its speed is measured.

Captured execution is compared with eager execution from the same seed, and an iteration runs while torch raises at
every host sync. On other devices another mode can be compared, but host syncs are not detected.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from rl8x.algorithms import PPOConfig
from rl8x.rollouts.statistics import Stats

TOLERANCE = 1e-5
WARM_UPS = 3
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cartpole, feedforward": ("CartPole", {"model_config": {"hidden_sizes": [64, 64]}}),
    "pendulum, feedforward": ("Pendulum", {"model_config": {"hidden_sizes": [64, 64]}}),
    "cartpole, recurrent": ("CartPole", {"model": "gru", "model_config": {"hidden_size": 64}, "seq_len": 4}),
}


def build(case: str, device: str, execution: str, sizes: dict[str, int], **options: Any) -> Any:
    """Build the algorithm of a case; by default four minibatches a pass."""
    env, chosen = CASES[case]
    minibatch = {"sgd_minibatch_size": sizes["num_envs"] * sizes["horizon"] // 4}
    config: dict[str, Any] = {"seed": 3, "device": device, "execution": execution, **sizes, **minibatch, **chosen}
    return PPOConfig(**config | options).build(env)


def checked(name: str, case: str, function: Callable[[], tuple[bool, str]]) -> dict[str, Any]:
    """Do a check; an exception fails it."""
    try:
        passed, told = function()
    except Exception as error:
        lines = str(error).strip().splitlines()
        passed, told = False, f"{type(error).__name__}: {lines[0] if lines else ''}"
    return {"name": name, "case": case, "passed": passed, "told": told.replace("|", "/")}


def weights(algorithm: Any) -> torch.Tensor:
    """Return all weights as one vector."""
    return torch.cat([weight.detach().flatten() for weight in algorithm.policy.parameters()])


def compare(case: str, device: str, execution: str, sizes: dict[str, int]) -> tuple[bool, str]:
    """Compare the weights after one update with those of eager execution; tell those after two iterations of 16 too."""
    once = {"num_sgd_iters": 1, "sgd_minibatch_size": None}
    first, moved = difference(case, device, execution, sizes, 1, once)
    later, _ = difference(case, device, execution, sizes, 2, {})
    told = f"{first:.1e} after one update, which moved them by {moved:.1e}; {later:.1e} after 32 updates"
    return first <= TOLERANCE < moved, told


def difference(
    case: str, device: str, execution: str, sizes: dict[str, int], iterations: int, options: dict[str, Any]
) -> tuple[float, float]:
    """Return by how much the weights differ from eager execution's, at most, and how far those moved."""
    algorithms = [build(case, device, mode, sizes, **options) for mode in ("eager", execution)]
    before = weights(algorithms[0])
    for _ in range(iterations):
        for algorithm in algorithms:
            algorithm.collect()
            algorithm.step()
    eager, other = (weights(algorithm) for algorithm in algorithms)
    return (eager - other).abs().max().item(), (eager - before).abs().max().item()


def without_waiting(case: str, device: str, execution: str, sizes: dict[str, int]) -> tuple[bool, str]:
    """Run an iteration while torch refuses to wait for the device; the statistics are copied after it."""
    algorithm = build(case, device, execution, sizes)
    for _ in range(WARM_UPS):
        dict(Stats.merge(algorithm.collect(), algorithm.step()))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stats = Stats.merge(algorithm.collect(), algorithm.step())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    row = dict(stats)
    return all(value == value for value in row.values()), f"no wait in an iteration; then {len(row)} statistics at once"


def run(device: str, modes: list[str], sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Do every check.

    Args:
        device: `"cuda"`, or `"cpu"` to try the script.
        modes: Execution modes that are measured; what is compared is the last of them.
        sizes: `num_envs` and `horizon`.
    """
    checks = []
    for case in CASES:
        name = f"{modes[-1]} as eager, weights within {TOLERANCE:g}"
        checks.append(checked(name, case, lambda case=case: compare(case, device, modes[-1], sizes)))
    for case in CASES:
        for mode in [mode for mode in modes if mode != "compile"]:
            name = f"{mode}: no wait for the device in an iteration"
            if device == "cpu":
                checks.append({"name": name, "case": case, "passed": None, "told": "there is no CUDA device"})
                continue
            checks.append(checked(name, case, lambda case=case, mode=mode: without_waiting(case, device, mode, sizes)))
    return checks


if __name__ == "__main__":
    arguments = json.loads(sys.stdin.read())
    found: dict[str, Any] = {"checks": run(arguments["device"], arguments["modes"], arguments["sizes"])}
    if arguments["device"] != "cpu":
        found["gpu"] = torch.cuda.get_device_name()
    print(json.dumps(found))
