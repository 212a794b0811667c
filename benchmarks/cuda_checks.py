"""Checks on a CUDA device, before its speed is measured: captured execution does what eager execution does.

An iteration also runs while torch raises at every wait for the device. On a CPU, where there is none, compiled
execution is compared.
"""

from __future__ import annotations

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


class Checks:
    """The checks on a device, with so many copies and steps."""

    def __init__(self, device: str, sizes: dict[str, int]) -> None:
        self.device, self.sizes = device, sizes
        self.mode = "compile" if device == "cpu" else "graph"

    def build(self, case: str, execution: str, **options: Any) -> Any:
        """Build the algorithm of a case; by default four minibatches a pass."""
        env, chosen = CASES[case]
        minibatch = {"sgd_minibatch_size": self.sizes["num_envs"] * self.sizes["horizon"] // 4}
        config: dict[str, Any] = {"seed": 3, "device": self.device, "execution": execution, **self.sizes, **minibatch}
        return PPOConfig(**config | chosen | options).build(env)

    def compare(self, case: str) -> tuple[bool, str]:
        """Compare the weights after one update with eager execution's; tell those after two iterations of 16 too."""
        first, moved = self.difference(case, 1, num_sgd_iters=1, sgd_minibatch_size=None)
        later, _ = self.difference(case, 2)
        told = f"{first:.1e} after one update, which moved them by {moved:.1e}; {later:.1e} after 32 updates"
        return first <= TOLERANCE < moved, told

    def difference(self, case: str, iterations: int, **options: Any) -> tuple[float, float]:
        """Return by how much the weights differ from eager execution's, at most, and how far those moved."""
        algorithms = [self.build(case, mode, **options) for mode in ("eager", self.mode)]
        before = weights(algorithms[0])
        for _ in range(iterations):
            for algorithm in algorithms:
                algorithm.collect()
                algorithm.step()
        eager, other = map(weights, algorithms)
        return (eager - other).abs().max().item(), (eager - before).abs().max().item()

    def without_waiting(self, case: str, execution: str) -> tuple[bool | None, str]:
        """Run an iteration while torch refuses to wait for the device; the statistics are copied after it."""
        if self.device == "cpu":
            return None, "there is no CUDA device"
        algorithm = self.build(case, execution)
        for _ in range(WARM_UPS):
            dict(Stats.merge(algorithm.collect(), algorithm.step()))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            stats = Stats.merge(algorithm.collect(), algorithm.step())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        row = dict(stats)
        held = all(value == value for value in row.values())
        return held, f"no wait in an iteration; then {len(row)} statistics at once"


def weights(algorithm: Any) -> torch.Tensor:
    """Return all weights as one vector."""
    return torch.cat([weight.detach().flatten() for weight in algorithm.policy.parameters()])


def checked(name: str, case: str, function: Callable[..., tuple[bool | None, str]], *args: str) -> dict[str, Any]:
    """Do a check; an exception fails it."""
    try:
        passed, told = function(case, *args)
    except Exception as error:
        passed, told = False, f"{type(error).__name__}: {[*str(error).strip().splitlines(), ''][0]}"
    return {"name": name, "case": case, "passed": passed, "told": told.replace("|", "/")}


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Do all checks on a device."""
    checks = Checks(asked["device"], asked["sizes"])
    rows = [checked(f"{checks.mode} as eager, weights within {TOLERANCE:g}", case, checks.compare) for case in CASES]
    rows += [
        checked(f"{mode}: no wait for the device in an iteration", case, checks.without_waiting, mode)
        for case in CASES
        for mode in ("eager", "graph")
    ]
    return {"checks": rows} | ({} if checks.device == "cpu" else {"gpu": torch.cuda.get_device_name()})
