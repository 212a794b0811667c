"""Derives independent seeds for the parts of a run from one seed."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch

from rl8x.distributed import ranks
from rl8x.execution.execution import kept_generators

# The seeds of these parts are the words of one SeedSequence, in this order. Any other part has its own sequence.
_PARTS: Final = ("env", "weights", "sampling", "minibatches", "eval_env", "eval_sampling")
RULE: Final = "NumPy's SeedSequence of the seed; of ranks from 1 on, of seed, rank and part"
"""Version of the derivation; ranks with different versions might draw the same numbers."""
# Parts whose seeds are the same on all ranks; all others differ between ranks.
_SHARED: Final = ("weights",)


def draw_seed(seed: int | None) -> int:
    """Return the seed given, or draw one, the same on all ranks."""
    return ranks().first("the seed", secrets.randbelow(2**31)) if seed is None else seed


def part_seed(seed: int, part: str, rank: int | None = None) -> int:
    """Derive the seed of one part of a run, in [0, 2^63)."""
    entropy: int | list[int] = seed if part in _PARTS else [seed, 1, *part.encode()]
    rank = ranks().rank if rank is None else rank
    if rank and part not in _SHARED:
        entropy = [seed, 2, rank, *part.encode()]
    words = np.random.SeedSequence(entropy).generate_state(len(_PARTS), dtype=np.uint64) >> np.uint64(1)
    return int(words[_PARTS.index(part) if part in _PARTS and isinstance(entropy, int) else 0])


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators, the CPU's and the device's, within the context; restore them afterwards."""
    with kept_generators(device):
        torch.manual_seed(seed)
        yield
