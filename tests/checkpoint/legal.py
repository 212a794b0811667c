"""Metadata that a checkpoint may have, for tests of what is done with them."""

from typing import Any

from rl8x import keys
from rl8x.checkpoint import Checkpoints

RUN = dict.fromkeys(("job", "handle", "id", "location", "spool", "names", "database"))
BUILD = {"config_class": None, "config": {}, "env": None, "env_class": None, "spaces": [None, None], "policy": None}
BUILD |= {"algorithm": "PPO", "state_reset_every": 0, "clock": keys.ENV_STEPS, "problems": []}
TRAINER = {"eval_env": "auto", "num_eval_envs": None, "on_non_finite": "stop", "log_models": False}


def metadata(key: str = "k", run: Any = None, build: Any = None, **others: Any) -> dict[str, Any]:
    """Return legal metadata, with some values of a test's own."""
    return {
        "created": "2026-01-01T00:00:00+00:00",
        "versions": {},
        "status": "RUNNING",
        "stop_reason": None,
        "counters": {keys.STEPS: 0, keys.ENV_STEPS: 0},
        "run": {"key": key, "tracker": "NullTracker", **RUN, **(run or {})},
        "build": {**BUILD, **(build or {})},
        "trainer": TRAINER,
        "run_file": None,
        "checkpoints": Checkpoints().to_dict(),
        "is_best": False,
        **others,
    }
