"""Seeds of the parts of a run, derived from one, so that no two parts draw the same numbers."""

from __future__ import annotations

import secrets
from typing import Final

import numpy as np

# Their seeds are the words of one sequence, in this order. Any other part has a sequence of its own.
_PARTS: Final = ("env", "weights", "sampling", "minibatches", "eval_env", "eval_sampling")


def draw_seed(seed: int | None) -> int:
    """Return the seed given, or draw one."""
    return secrets.randbelow(2**31) if seed is None else seed


def part_seed(seed: int, part: str) -> int:
    """Derive the seed of one part of a run, in [0, 2^63).

    Args:
        seed: The run's seed.
        part: Name of the part: `"env"`, `"weights"`, `"sampling"`, `"minibatches"`, `"eval_env"`, `"eval_sampling"`, or
            one of an algorithm's own.
    """
    entropy: int | list[int] = seed if part in _PARTS else [seed, 1, *part.encode()]
    words = np.random.SeedSequence(entropy).generate_state(len(_PARTS), dtype=np.uint64) >> np.uint64(1)
    return int(words[_PARTS.index(part) if part in _PARTS else 0])
