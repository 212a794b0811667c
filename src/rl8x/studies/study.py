"""A study: trainings under several configurations, hyperparameters and seeds, and their tests in all cells.

Its folder has all data to continue after a kill. Each training has a folder there (`rl8x.studies.training`), and its
tracked run is a child of the study's. A finished training is not repeated.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import pandas as pd

from rl8x import __version__
from rl8x.disk import check_writable
from rl8x.envs.cells import Support
from rl8x.importing import Trust
from rl8x.plain import checked_number
from rl8x.studies import search, table
from rl8x.studies.definition import StudyConfig, Training
from rl8x.studies.jobs import RAY_ADDRESS, StudyProgress, check_backend, do_jobs, threads_of
from rl8x.studies.parent import ParentRun
from rl8x.studies.report import report
from rl8x.studies.training import run_job
from rl8x.tracking import sync
from rl8x.tracking.journal import is_sent
from rl8x.tracking.location import make_mlruns, mlruns_dir
from rl8x.tracking.locks import FolderLock, is_locked

_DISK: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # errors of a disk that is full or has become read-only
_Finished = list[tuple[Training, dict[str, Any]]]  # trainings with their results


class StudyError(ValueError):
    """A study cannot be started or resumed as requested; the message says what to do."""


class Study:
    """A study of generalisation.

    Args:
        train: The `env_config` of each training configuration, by name.
        test: The test cells, as for `rl8x.envs.cells.make_cells`: lists of parameter values, in all combinations, or
            distributions from which `test_cells` cells are drawn.
        seeds: Seeds of each training: a list, or their number.
        vary: Hyperparameters or other keys of a run with lists of values, all combined; with `trials`, ranges.
        trust: Whether names in the study may import any module; `RunSpec` explains it.
        options: The other keys of a study (`StudyConfig`), and those of a run (`RunSpec`): `env`, `algorithm`,
            `algorithm_config`, `max_steps`, `stop_conditions`, ...

    Attributes:
        config: The config of the study.
        failed: The errors of trainings that failed in the last `run()`, by their labels.
        has_arrived: Whether the store has all that the last `run()` tracked; else the next one sends the rest.

    Raises:
        ValueError: If a value is not legal.
    """

    def __init__(
        self,
        train: Mapping[str, Any],
        test: Mapping[str, Any],
        seeds: int | Sequence[int] = 1,
        vary: Mapping[str, Any] | None = None,
        *,
        trust: Trust = True,
        **options: Any,
    ) -> None:
        data = {"train": train, "test": test, "seeds": seeds, "vary": {} if vary is None else vary, **options}
        self.config = StudyConfig.from_dict(data, trust=trust)
        self.failed: dict[str, str] = {}
        self.has_arrived = True
        self._trainings = [] if self.config.searches else self.config.trainings()

    @classmethod
    def from_config(cls, config: StudyConfig) -> Self:
        """Make a study from a config.

        Args:
            config: The config, such as `StudyConfig.from_file` returns.
        """
        return cls(**config.plain, trust=config.trusted)

    @property
    def folder(self) -> Path:
        """The study's folder, which holds all its data."""
        return self.config.folder

    def run(
        self, jobs: int = 1, *, backend: str = "processes", cluster: str | None = None, progress: str | None = None
    ) -> pd.DataFrame:
        """Run all trainings that are not done yet, and return the table of evaluations.

        Args:
            jobs: Trainings at the same time on this machine, each with its share of the processors' threads.
            backend: "processes", or the clusters of "dask" or "ray".
            cluster: Address of a Dask scheduler; None makes one of `jobs` workers on this machine.
            progress: "auto" (lines, and a bar on a terminal), "lines" or "none"; None takes the study's setting.

        Raises:
            StudyError: If another process runs it, or its folder has another definition.
            ValueError: If a value is not legal or torchrun has started several ranks, before anything is written.
        """
        config, jobs = self.config, checked_number(jobs, "jobs", least=1, whole=True)
        check_backend(backend, cluster)
        if (self._stored() or {}).get("done") == (config.trials or 0):
            return self.results()
        config.check()
        mode = progress or config.run.get("progress", "auto")
        with contextlib.closing(StudyProgress(mode, self.folder)) as shown, self._locked():
            stored = self._begin()
            # After failures or with more trials, a report logs other values at the same steps, so all its points are
            # sent and become the last of their steps. A report that repeats the previous ones is not sent again.
            repeats = all(report == {"trials": config.trials, "failed": []} for report in stored["reports"])
            parent = ParentRun(config, stored["run_key"], repeats=repeats, mlruns=stored.get("mlruns"))
            interrupted, self.failed = True, {}
            try:
                how = {"num_jobs": jobs, "backend": backend, "address": cluster, "say": shown.say}
                for trainings in self._rounds(jobs):
                    self._train(trainings, parent, shown, how)
                finished = self._finished(self._trainings)
                self.has_arrived = self._send_left(finished, parent, shown)
                frame = self._collect(finished)
                if not frame.empty:
                    stored["reports"].append({"trials": config.trials, "failed": list(self.failed)})
                    stored["supports"] = _supports(finished)
                    table.write(self.folder / table.DEFINITION, stored)
                    parent.log_results(frame, [(each.group, result["curve"]) for each, result in finished])
                interrupted = False
            finally:
                shown.close()
                self.has_arrived &= parent.finish(failed=list(self.failed), interrupted=interrupted)
            if not self.failed and self.has_arrived:
                table.write(self.folder / table.DEFINITION, stored | {"done": config.trials or 0})
        return frame

    def _stored(self) -> dict[str, Any] | None:
        """Read the stored definition, None if there is none; raise if it is unreadable or differs from this study."""
        path = self.folder / table.DEFINITION
        if not path.exists():
            own = ("lock", f"{table.DEFINITION}.new-")
            if self.folder.is_dir() and any(not each.name.startswith(own) for each in self.folder.iterdir()):
                raise StudyError(f"{self.folder} is no study's folder: give another `directory` or `name`.")
            return None
        stored = table.read_if_there(path) or {}
        definition = stored.get("definition")
        if not isinstance(definition, dict) or not isinstance(stored.get("run_key"), str):
            raise StudyError(f"{path} cannot be read; give the study another `name`, or remove its folder.")
        if changes := self.config.changes(definition):
            self.config.check()  # a misspelt key counts as changed, and has a better error here
            raise StudyError(
                f"the study in {self.folder} is another one: {'; '.join(changes)}. Change that back to go on with it, "
                "or give this one another `name`."
            )
        if (definition.get("trials") or 0) > (self.config.trials or 0):
            raise StudyError(f"the study in {self.folder} has {definition['trials']} trials: ask for as many, or more.")
        return stored

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the study's folder, which is made if it is missing."""
        try:
            parent = self.folder.parent
            check_writable(parent)
            if parent.parent.name == "mlruns":
                make_mlruns(parent.parent)
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StudyError(f"the study's folder {self.folder} cannot be made: {error.strerror}.") from None
        lock = FolderLock(self.folder)
        if not lock.acquire():
            raise StudyError(f"{lock.owner()} is at the study in {self.folder}: wait for it, or end it.")
        try:
            yield
        except OSError as error:
            if error.errno not in _DISK:
                raise
            raise StudyError(
                f"the study's folder {self.folder} cannot be written ({error.strerror}): make room there; the same "
                "command goes on."
            ) from error
        finally:
            lock.release()

    def _begin(self) -> dict[str, Any]:
        """Store the definition if the study is new or its trials have changed; return the stored data."""
        stored = self._stored()  # again, as another process may have started it meanwhile
        if stored is None or stored["definition"].get("trials") != self.config.trials:
            new = {"run_key": uuid.uuid4().hex, "created": datetime.date.today().isoformat(), "reports": []}
            new["mlruns"] = str(mlruns_dir())  # where its runs are, unless its folder or somebody names another store
            known = {"definition": self.config.to_dict(), "units": self.config.units(), "rl8x": __version__}
            stored = (new if stored is None else stored) | known
            table.write(self.folder / table.DEFINITION, stored)
        return stored

    def _rounds(self, jobs: int) -> Iterator[list[Training]]:
        """Yield lists of trainings that may run at the same time: all, or those of some trials of a search."""
        if not self.config.searches:
            yield self._trainings
            return
        optuna_study = search.open_search(self.folder, self.config)
        at_once = max(1, jobs // (len(self.config.train) * len(self.config.seeds)))
        # Repeat trainings of ended trials whose results were removed.
        ended = search.trials_of(optuna_study, self.config, ended=True)
        yield [each for each in ended if self._result_of(each) is None]
        tried = set[int]()
        while trials := search.next_trials(optuna_study, self.config, at_once, tried):
            yield [training for trainings in trials.values() for training in trainings]
            tried.update(trials)
            for number, trainings in trials.items():
                results = [result for _, result in self._finished(trainings)]
                if len(results) == len(trainings):
                    values = [float(result["means"]["test/returns/mean"]) for result in results]
                    search.tell(optuna_study, number, values, pruned=any(result["pruned"] for result in results))
        self._trainings = search.trials_of(optuna_study, self.config)

    def _train(self, trainings: list[Training], parent: ParentRun, shown: StudyProgress, how: dict[str, Any]) -> None:
        """Run those of the trainings that are not done."""
        left = {each.key: each for each in trainings if self._result_of(each) is None}
        shown.begin(len(trainings), left.values())
        for training in left.values():
            lock = FolderLock(self.folder / training.key)
            if is_locked(lock.folder):
                shown.say(f"{training.label}: {lock.owner()} is still at it, and is waited for; end it if it hangs")
        for done in do_jobs([self._job(each, parent, how) for each in left.values()], run_job, **how):
            training = left[done["key"]]
            if "error" in done:
                self.failed[training.label] = done["error"]
            shown.end(training, done)

    def _job(self, training: Training, parent: ParentRun, how: Mapping[str, Any]) -> dict[str, Any]:
        """Return a job for `run_job` as plain data."""
        local = how["address"] is None and not (how["backend"] == "ray" and os.environ.get(RAY_ADDRESS))
        return {
            "key": training.key,
            "study": self.config.plain,
            **vars(training),
            "folder": str(self.folder / training.key),
            "threads": threads_of(how["num_jobs"]) if local else None,
            "tracking": parent.child_options(training),
            "trust": self.config.trusted,
        }

    def _send_left(self, finished: _Finished, parent: ParentRun, shown: StudyProgress) -> bool:
        """Send rows that the store lacks because it was down; return whether it has all of them now."""
        for training, result in finished:
            journal = parent.journal_of(training)
            if journal is None or not journal.is_dir() or is_sent(journal):
                continue
            report = sync(journal, to=parent.store_uri)
            if journal.is_dir() and not is_sent(journal):
                shown.say(f"{training.label}: its run waits in {journal}; the same command tries again. {report}")
                return False  # the others would wait for the same store
            if not result["run_id"] and report.journals:
                result["run_id"] = report.journals[0].run_id or ""
                table.write(self.folder / training.key / table.RESULT, result)
        return True

    def _result_of(self, training: Training) -> dict[str, Any] | None:
        """Return the result of a training; None if it is not done."""
        return table.read_if_there(self.folder / training.key / table.RESULT)

    def _finished(self, trainings: Sequence[Training]) -> _Finished:
        """List the trainings that are done, each with its result."""
        return [(each, result) for each in trainings if (result := self._result_of(each)) is not None]

    def _collect(self, finished: _Finished) -> pd.DataFrame:
        """Concatenate the trainings' tables, and store the whole table in the folder."""
        frames = [table.read_training(self.folder / each.key, str(done["run_id"])) for each, done in finished]
        frame = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
        table.write(self.folder / table.EVALUATIONS, table.as_plain(frame))
        return frame

    def results(self) -> pd.DataFrame:
        """Read the table of evaluations, with the columns of `rl8x.studies.table`.

        Raises:
            StudyError: If nothing has been evaluated yet.
        """
        whole = table.read_if_there(self.folder / table.EVALUATIONS)
        if whole is None:
            raise StudyError(f"the study in {self.folder} has no results yet: run it.")
        return table.from_plain(whole)

    @property
    def supports(self) -> dict[str, Support]:
        """The final range of each parameter by training configuration: its smallest and largest value."""
        return dict((table.read_if_there(self.folder / table.DEFINITION) or {}).get("supports", {}))

    def report(self, **options: Any) -> Any:
        """Write the study's report, as `rl8x report` does: tables, figures, and a page.

        Args:
            options: Arguments of `rl8x.studies.report.report`, such as `baseline`, `over`, `level` and `output`.

        Returns:
            The report; its text is the tables for a terminal.

        Raises:
            ValueError: If its table is empty or incomplete, or an option is not legal.
        """
        return report(self.folder, **options)


def _supports(finished: _Finished) -> dict[str, Support]:
    """Return the support of each configuration over all its seeds and hyperparameters."""
    supports: dict[str, Support] = {}
    for training, result in finished:
        hull = supports.setdefault(training.training, dict(result["support"]))
        for name, ends in result["support"].items():
            hull[name] = [min(hull[name] + ends), max(hull[name] + ends)]
    return supports
