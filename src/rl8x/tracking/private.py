"""Private names of MLflow that rl8x reads, each with what is done where a version of MLflow does not have it.

What is called here is not promised by MLflow: each is looked up when it is needed, and one that is missing, or is not
what it was, costs time or a convenience and no row. SQL on the tables of a local database is in `database.py` and
`database_runs.py`, of which each falls back to MLflow's client too, but for readers, which say what is wrong.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, Final

# The tag of an experiment in which MLflow's page keeps a saved view. Without it the view is not listed: the page opens
# with its own order of charts.
VIEW_TAG_PREFIX: Final = "mlflow.sharedViewState."


def last_steps(run: Any) -> dict[str, int] | None:
    """Return the last step of each metric of a run; None without it, where histories have to be read."""
    points = getattr(run.data, "_metric_objs", None)
    if points is None:
        return None
    with contextlib.suppress(AttributeError, TypeError):
        return {str(point.key): int(point.step) for point in points}
    return None


def tables_maker() -> Callable[[Any], None] | None:
    """Return what makes MLflow's tables by an engine; None without it, where MLflow makes them on the disk, slowly."""
    try:
        from mlflow.store.db.utils import _initialize_tables
    except ImportError:
        return None
    maker: Callable[[Any], None] = _initialize_tables
    return maker


def forget_engine(uri: str, *, dispose: bool) -> None:
    """Have MLflow open a database anew; without it a file that was replaced stays open, to which nothing is written."""
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

        engines: Any = SqlAlchemyStore
        engine = engines._engine_map.get(uri) if dispose else engines._engine_map.pop(uri, None)
        if engine is not None and dispose:
            engine.dispose()


def forget_artifacts(run_id: str) -> None:
    """Have MLflow ask again where a run's artifacts are; without it a copied store's go where the first one's went."""
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        from mlflow.tracking._tracking_service import utils

        cache: Any = utils
        cache._artifact_repos_cache.pop(run_id, None)


def is_set_in_process() -> bool:
    """Return whether the user has called `mlflow.set_tracking_uri()`; without it commands show the variable's URI."""
    mlflows = sys.modules.get("mlflow.tracking._tracking_service.utils")
    return getattr(mlflows, "_tracking_uri", None) is not None
