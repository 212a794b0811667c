"""Find a study by its folder, or by its parent run in MLflow, which has the same files as artifacts."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rl8x.config.spec import AlgorithmSpec
from rl8x.studies.evaluations import Supports
from rl8x.studies.table import RUN
from rl8x.tracking import TrackingError
from rl8x.tracking.database_runs import RunRecord
from rl8x.tracking.protocol import PARENT_TAG
from rl8x.tracking.reading import RunReader
from rl8x.tracking.runs import HANDLE_PREFIX

if TYPE_CHECKING:
    import pandas

EVALUATIONS: Final = "evaluations.json"
"""The table, as `mlflow.log_table` writes it: `{"columns": [...], "data": [[...], ...]}`."""
DEFINITION: Final = "study.json"
SUPPORTS: Final = "supports.json"

STUDY_TAG: Final = "rl8x.study"
_UNFINISHED: Final = "they are there when it has come to its end; `rl8x study` goes on with it"


class FoundStudy(NamedTuple):
    """The parts of a study that a report is made of.

    Attributes:
        table: Its evaluations, with the columns of `rl8x.studies.table`.
        supports: By training and parameter the ends of what was trained on.
        definition: The study as it was asked for.
        units: Units of test parameters.
        created: The day on which it was begun, `2026-11-25`; empty where it is not known.
        title: Its name.
        folder: Where the report's files go.
        run_id: Its parent run; None where it is not known.
    """

    table: pandas.DataFrame
    supports: Supports
    definition: Mapping[str, Any]
    units: Mapping[str, str]
    created: str
    title: str
    folder: Path
    run_id: str | None


def find_runs(reader: RunReader, runs: Sequence[str | Path], experiment: str | None) -> list[RunRecord]:
    """Find runs by name, ID, or folder of a study or of checkpoints, each once; a parent stands for its children.

    Raises:
        ValueError: If one is not there, or none was named.
    """
    records: dict[str, RunRecord] = {}
    for word in runs:
        run = _of_folder(reader, Path(word)) or reader.run(str(word))
        for each in reader.children(run.id) or [run]:
            records.setdefault(each.id, each)
    if experiment is not None:
        listed = reader.experiment(experiment)
        parents = {run.tags.get(PARENT_TAG) for run in listed}
        for each in listed:
            if each.id not in parents:
                records.setdefault(each.id, each)
        if not records:
            raise ValueError(f"the experiment {experiment!r} has no runs.")
    if not records:
        raise ValueError("no run is named: give names or IDs of runs, folders of checkpoints, or an experiment.")
    return list(records.values())


def _of_folder(reader: RunReader, path: Path) -> RunRecord | None:
    """Find the parent run of a study's folder, or the run of a folder of checkpoints by what the newest says.

    None where a path leads to neither: it may be the name of a run.
    """
    from rl8x.checkpoint import files

    if os.path.isfile(path / DEFINITION):
        parent = reader.run_of_spool(str(_json(path / DEFINITION).get("run_key", "")))
        if parent is not None:
            return parent
        ids = _runs_of(find_study(path).table) if (path / EVALUATIONS).exists() else []
        run_id = reader.run(ids[0]).tags.get(PARENT_TAG) if ids else None
        if run_id is None:
            raise ValueError(f"the study in {path} has no runs in MLflow.")
        return reader.run(run_id)
    if not files.is_place(path):
        return None
    listed = files.listed(path)
    described = files.describe(listed[-1] if listed else path).get("run")
    known = described if isinstance(described, dict) else {}
    if known.get("id"):
        return reader.run(str(known["id"]))
    handle = str(known.get("handle") or "")
    run = reader.run_of_spool(handle.removeprefix(HANDLE_PREFIX)) if handle.startswith(HANDLE_PREFIX) else None
    if run is None:
        raise ValueError(f"{path} has checkpoints of a run that is not in MLflow.")
    return run


def find_study(study: str | Path, tracking_uri: str | None = None) -> FoundStudy:
    """Find a study by its folder, or by the name or ID of its parent run.

    Raises:
        ValueError: If there is none, or it has no table of evaluations that can be read.
    """
    folder = Path(study)
    if os.path.isfile(folder / EVALUATIONS):
        return _read(folder, folder.resolve().name, folder / "report", None)
    if os.path.isfile(folder / DEFINITION):
        raise ValueError(f"the study in {folder} has no results yet: {_UNFINISHED}.")
    try:
        reader = RunReader(tracking_uri)
        run = reader.run(str(study))
    except TrackingError:
        if os.path.isdir(folder):
            _json(folder / EVALUATIONS)  # raises, as it is not there
        raise
    with tempfile.TemporaryDirectory() as copies:
        for name in (EVALUATIONS, DEFINITION, SUPPORTS):
            reader.artifact(run.id, name, Path(copies))
        if not (Path(copies) / EVALUATIONS).exists():
            if STUDY_TAG in run.tags and PARENT_TAG not in run.tags:
                raise ValueError(f"the study {run.name!r} has no results yet: {_UNFINISHED}.")
            raise ValueError(f"the run {run.name!r} has no artifact {EVALUATIONS}: it is no study's parent run.")
        return _read(Path(copies), run.name, Path("reports") / plain_name(run.name), run.id)


def plain_name(text: str) -> str:
    """Make the name of a file or folder of a text."""
    return re.sub(r"[^\w.-]", "-", text).strip(".") or "-"


def _read(folder: Path, title: str, output: Path, run_id: str | None) -> FoundStudy:
    import pandas

    table = _json(folder / EVALUATIONS)
    columns, rows = table.get("columns"), table.get("data")
    if not isinstance(columns, list) or not isinstance(rows, list):
        raise ValueError(f"{folder / EVALUATIONS} is no table: it needs `columns` and `data`, as MLflow logs tables.")
    stored = _json(folder / DEFINITION) if (folder / DEFINITION).exists() else {}
    definition = stored.get("definition", stored)  # a study's folder has its run's key beside it
    supports = _json(folder / SUPPORTS) if (folder / SUPPORTS).exists() else {}
    named = str(definition.get("name") or title)
    frame = pandas.DataFrame(rows, columns=columns)
    units, created = dict(stored.get("units") or {}), str(stored.get("created") or "")
    return FoundStudy(frame, supports, definition, units, created, named, output, run_id)


def about(definition: Mapping[str, Any]) -> dict[str, str]:
    """Return the `task` and the `algorithm` of a study's definition, or several of either; empty without one."""
    if not definition:
        return {}
    varied = definition.get("vary") or {}
    tasks = varied.get("env") or [_of_run(definition, "env") or _of_run(definition, "eval_env")]
    algorithms = varied.get("algorithm") or [_of_run(definition, "algorithm") or AlgorithmSpec.algorithm]
    names = [str(name).rpartition(".")[2].removesuffix("Config") for name in algorithms]
    return {
        "task": ", ".join(map(str, tasks)),
        "algorithm": ", ".join(name.upper() if name.islower() else name for name in names),
    }


def _of_run(definition: Mapping[str, Any], name: str) -> Any:
    """Return what a study's definition says of its runs, among its own keys or under `run`; None where it does not."""
    run = definition.get("run")
    return run[name] if isinstance(run, dict) and name in run else definition.get(name)


def parent_run(found: FoundStudy, tracking_uri: str | None) -> tuple[str | None, str | None]:
    """Return the ID of a study's parent run and its store; of one found by its folder, by the runs in its table.

    Raises:
        ValueError: If the store does not answer.
    """
    uri = tracking_uri or _of_run(found.definition, "tracking_uri")
    if found.run_id is not None:
        return found.run_id, uri
    ids = _runs_of(found.table)
    return (RunReader(uri).run(ids[0]).tags.get(PARENT_TAG) if ids else None), uri


def _runs_of(table: pandas.DataFrame) -> list[str]:
    """List the IDs of the runs of a study's table."""
    return [each for each in table.get(RUN, ()) if isinstance(each, str) and each]


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no {path}: {path.parent} is no folder of a study that was evaluated.") from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}.") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a mapping; got {type(data).__name__}.")
    return data
