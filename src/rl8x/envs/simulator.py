"""Environments whose state a simulator keeps outside of the carry."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from rl8x.envs.base import Carry, Env


class SimulatorEnv(Env):
    """Base of the adapters to simulators: nothing of them is compiled, captured or saved.

    A subclass implements `restart` and `advance`, which change the simulator, and `another`.
    """

    terminates: ClassVar[bool] = True
    capturable: ClassVar[bool] = False
    resumable: ClassVar[bool] = False

    next_seed: int | None = None
    """The seed of the simulator's next reset, after `set_seed`; None lets its random numbers go on."""

    def set_seed(self, seed: int | None) -> None:
        """Seed the generator, and the simulator at its next reset."""
        super().set_seed(seed)
        self.next_seed = seed

    def state_dict(self) -> dict[str, Any]:
        """Return the seeding and the configuration; the simulator's own state cannot be taken."""
        return super().state_dict() | {"carry": None}

    def first_carry(self, **more: Any) -> Carry:
        """Return the carry of episodes that all start now, its tensors `[num_envs]`; `more` is a simulator's own."""
        return self._first_carry({}, {}) | more

    @staticmethod
    def next_carry(done: Tensor, elapsed: Tensor, returns: Tensor, **more: Any) -> Carry:
        """Return the carry after a step.

        Args:
            done: Where an episode ended, bool `[num_envs]`.
            elapsed: The episodes' steps up to this one, int64 `[num_envs]`.
            returns: The sums of their rewards, float32 `[num_envs]`.
            **more: What a simulator's carry has besides.
        """
        elapsed, returns = elapsed.masked_fill(done, 0), returns.masked_fill(done, 0.0)
        return {"state": {}, "parameters": {}, "elapsed": elapsed, "returns": returns, **more}
