"""All of a run's state, to compare a resumed run with one that was not interrupted."""

from __future__ import annotations

import torch

from rl8x.trainers import Trainer


def everything(trainer: Trainer) -> dict[str, object]:
    """All that the next step depends on, by its place, tensors as their bytes; but for times, and names of segments."""
    found: dict[str, object] = {}

    def note(place: str, part: object) -> None:
        if isinstance(part, dict):
            for name, each in part.items():
                if not name.startswith(("profiling/", "memory/", "segments")):
                    note(f"{place}.{name}", each)
        elif isinstance(part, torch.Tensor):
            found[place] = (part.dtype, part.shape, part.detach().cpu().numpy().tobytes())
        else:
            found[place] = repr(part)

    note("", trainer.state_dict())
    return found
