"""Metadata that a checkpoint may have, for tests of what is done with them."""

import json
from typing import Any

from rl8x import keys
from rl8x.checkpoint.load import resolve
from rl8x.config import RunSpec
from rl8x.config.describe import run_spec

RUN = dict.fromkeys(("job", "handle", "id", "location", "journal", "names", "database"))
RESOLVED = {"config": {}, "env_class": None, "spaces": [None, None], "policy": None}
RESOLVED |= {"algorithm": "PPO", "state_reset_every": 0, "clock": keys.ENV_STEPS}


def metadata(key: str = "k", run: Any = None, resolved: Any = None, **others: Any) -> dict[str, Any]:
    """Return legal metadata, with some values of a test's own."""
    return {
        "created": "2026-01-01T00:00:00+00:00",
        "versions": {},
        "status": "RUNNING",
        "stop_reason": None,
        "counters": {keys.STEPS: 0, keys.ENV_STEPS: 0},
        "run": {"key": key, "tracker": "NullTracker", **RUN, **(run or {})},
        "spec": {},
        "resolved": {**RESOLVED, **(resolved or {})},
        "is_best": False,
        **others,
    }


def described(algorithm: Any) -> tuple[RunSpec, Any]:
    """Return an algorithm's spec and what was resolved, as a checkpoint gives them back."""
    spec, resolved = json.loads(json.dumps([run_spec(algorithm).to_plain(), resolve(algorithm)]))
    return RunSpec.read(spec), resolved
