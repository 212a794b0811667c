"""Hyperparameter search by Optuna, with its storage in the study's folder; unpromising trials are pruned.

A trial is one set of hyperparameters, trained under the study's configurations and seeds; its value is their mean
return over the test cells. The median pruner ends a training whose test result is below the median of earlier trials
at the same point.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rl8x.studies import table
from rl8x.studies.definition import StudyConfig, Training
from rl8x.tracking.private import sqlite_uri

DATABASE: Final = "optuna.db"
_KEY: Final = "rl8x"
_WARM_UP_TRIALS: Final = 4  # least number of trials for a meaningful median


def open_search(folder: Path, study: StudyConfig) -> Any:
    """Make or load the search in a study's folder; the same seeds draw the same trials."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    options: Any = {"direction": "maximize", "load_if_exists": True, "pruner": optuna.pruners.NopPruner()}
    storage = optuna.storages.RDBStorage(sqlite_uri(folder / DATABASE), engine_kwargs={"connect_args": {"timeout": 60}})
    search = optuna.create_study(storage=storage, study_name=study.name, **options)
    # The sampler's random state is not stored, so the number of trials keeps a resumed search from repeating them.
    search.sampler = optuna.samplers.TPESampler(seed=study.test_seed + 7919 * sum(study.seeds) + len(search.trials))
    return search


def next_trials(search: Any, study: StudyConfig, count: int, tried: Collection[int]) -> dict[int, list[Training]]:
    """Return, by number, the trainings of unfinished trials that are not in `tried`; else those of new trials."""
    from optuna.trial import TrialState

    drawn = [trial for trial in search.trials if _KEY in trial.user_attrs]
    for trial in search.trials:
        if trial.state == TrialState.RUNNING and _KEY not in trial.user_attrs:  # killed before its values were stored
            search.tell(trial.number, state=TrialState.FAIL)
    begun = [each for each in drawn if each.state == TrialState.RUNNING and each.number not in tried]
    if not begun:
        assert study.trials is not None
        begun = [search.ask() for _ in range(min(count, study.trials - len(drawn)))]
        for trial in begun:
            vary = {name: _suggest(trial, name, values) for name, values in study.vary.items()}
            trial.set_user_attr(_KEY, json.dumps(vary))
    return {trial.number: _trainings(study, trial) for trial in begun}


def _trainings(study: StudyConfig, trial: Any) -> list[Training]:
    """List the trainings of an Optuna trial."""
    vary = json.loads(trial.user_attrs[_KEY])
    return [Training(name, vary, seed, trial.number) for name in study.train for seed in study.seeds]


def _suggest(trial: Any, name: str, values: Any) -> Any:
    """Draw a value from a range or a list with an Optuna trial."""
    ((kind, given),) = values.items() if isinstance(values, Mapping) else [("choice", values)]
    if kind == "choice":
        # Texts, since Optuna's storage takes no lists and mappings.
        return json.loads(trial.suggest_categorical(name, [json.dumps(value) for value in given]))
    if kind in ("int", "log_int"):
        return trial.suggest_int(name, *given, log=kind == "log_int")
    return trial.suggest_float(name, *given, log=kind == "log_uniform")


def trials_of(search: Any, study: StudyConfig, *, ended: bool = False) -> list[Training]:
    """List the trainings of all trials so far, or only of those that have `ended`."""
    trials = [trial for trial in search.trials if _KEY in trial.user_attrs]
    return [each for trial in trials if trial.state.is_finished() or not ended for each in _trainings(study, trial)]


def tell(search: Any, number: int, values: Sequence[float], *, pruned: bool) -> None:
    """End a trial with the mean of its trainings' values, or as `pruned`."""
    from optuna.trial import TrialState

    if pruned:
        # Without a value the sampler ranks it below all trials that have one.
        search.tell(number, state=TrialState.PRUNED)
    else:
        mean = sum(values) / len(values)
        # A value that is not finite is the worst; Optuna would take NaN for a failure and ignore it.
        search.tell(number, mean if math.isfinite(mean) else -math.inf)


def should_prune(folder: Path, training: Training, steps: int, value: float) -> bool:
    """Record a training's value after `steps`; return whether to prune it, as it is below the median of the others."""
    # Golovin et al. 2017, KDD, section 3.2.2. Each training has its own files, so that any number of processes may
    # write them, and a resumed training decides as before.
    notes = folder / "search"
    notes.mkdir(exist_ok=True)
    own = notes / f"{training.trial:05d}-{training.training}-{training.seed}-{steps}.json"
    if (decided := table.read_if_there(own)) is not None:
        return bool(decided["pruned"])
    # Compare the whole name after the trial's number, as one training's name may end like another's.
    alike = (path for path in notes.glob("*.json") if path.name.partition("-")[2] == own.name.partition("-")[2])
    others = [float(note["value"]) for path in alike if (note := table.read_if_there(path)) is not None]
    value = -math.inf if math.isnan(value) else value  # NaN cannot be ordered
    pruned = len(others) >= _WARM_UP_TRIALS and value < statistics.median(others)
    table.write(own, {"value": value, "pruned": pruned})
    return pruned
