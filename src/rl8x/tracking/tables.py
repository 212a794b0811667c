"""Tables as MLflow keeps them, which its page shows and `mlflow.load_table` reads, and the tag of a run's parent."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

from rl8x.tracking.protocol import Tracker

_TABLES_TAG: Final = "mlflow.loggedArtifacts"
PARENT_TAG: Final = "mlflow.parentRunId"


def parent_tag(run_id: str) -> dict[str, str]:
    """Return the tag that makes a run a child of another on MLflow's page.

    Args:
        run_id: The ID of the parent.
    """
    return {PARENT_TAG: run_id}


def log_table(tracker: Tracker, path: str | os.PathLike[str]) -> None:
    """Keep a table as an artifact in the form of `mlflow.log_table`; other than that, it replaces one of its name.

    Args:
        tracker: What keeps the run; its one table is this.
        path: A JSON file, `{"columns": [...], "data": [[...], ...]}`, as pandas' `to_json(orient="split")` writes it.

    Raises:
        FileNotFoundError: If it is not there.
    """
    tracker.log_artifact(path)
    tracker.set_tags({_TABLES_TAG: json.dumps([{"path": Path(path).name, "type": "table"}])})
