"""What single entries of a spool are in a store's terms, and what they are called in messages."""

from __future__ import annotations

import hashlib

from rl8x.tracking.names import MAX_PARAM_LENGTH
from rl8x.tracking.spool_files import Op

_CUT = " ... (the whole value is the artifact {})"


def fitted(name: str, text: str) -> tuple[str, Op | None]:
    """Cut a param to what a store takes; returns it and the text to be kept beside it, if any."""
    if len(text) <= MAX_PARAM_LENGTH:
        return text, None
    file = f"params/{name.replace(':', '_')}.txt"
    if len(file.encode()) > 250:  # of a file's name, in bytes; param names may be longer
        file = f"params/{digest(name)}.txt"
    note = _CUT.format(file)
    return text[: MAX_PARAM_LENGTH - len(note)] + note, {"op": "text", "to": file, "text": text}


def name_of(op: Op) -> str:
    """Name an entry in a message."""
    match op:
        case {"op": "m", "m": {**metrics}} if len(metrics) == 1:
            return f"the metric {next(iter(metrics))!r}"
        case {"op": "params" | "tags" as kind} if isinstance(op.get(kind), dict) and len(op[kind]) == 1:
            return f"the {kind[:-1]} {next(iter(op[kind]))!r:.100}"
        case {"op": "text", "to": to}:
            return f"the text {to!r:.100}"
        case {"op": "artifact", "file": file}:
            return f"the artifact {file!r:.100}"
        case {"op": "open", "experiment": experiment, "run_name": name}:
            return f"the run's name {name!r:.100}" if experiment is None else f"the experiment {experiment!r:.100}"
    return f"an entry of the kind {op['op']!r:.100}"


def digest(text: str) -> str:
    """Return sixteen letters that stand for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
