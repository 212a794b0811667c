"""A store in memory that can be away, hang or refuse, with the rules of MLflow that matter here; journals to send."""

import contextlib
import functools
import inspect
import sqlite3
import threading
from types import SimpleNamespace

from rl8x.tracking.appending import Journal
from rl8x.tracking.journal import ACK, SendingJournal
from rl8x.tracking.locks import FileLock
from rl8x.tracking.protocol import RunMissingError, StoreDownError, StoreRefusedError
from rl8x.tracking.repeats import left_behind, left_tag

# What of its arguments a call's failure may hang on, and the calls whose answer may be lost.
CONTENT = {"create_run": 0, "log_text": 2, **dict.fromkeys(("log_points", "log_params", "set_tags"), 1)}
CONTENT |= {"set_status": 1, "points": 1}
LOSABLE = ("create_run", "log_points", "log_params", "set_tags")


class FakeStore:
    """Keeps runs in dicts; shared by all "connections", as a server is. Calls fail before they are made, or after."""

    most_points = 1000

    def __init__(self):
        self.down = False
        self.lose_answers = 0  # calls that work but whose answer is lost
        self.refuse = lambda point: False
        self.hang = None  # an Event to wait for in each call
        self.artifacts_down = False
        self.fails = lambda call, content: None  # returns what a call raises, if anything
        self.entered = threading.Event()
        self.calls = []
        self.runs = {}

    def __getattribute__(self, name):
        method = super().__getattribute__(name)
        return method if name.startswith("_") or not inspect.ismethod(method) else functools.partial(self._call, method)

    def _call(self, method, *args):
        name = method.__name__
        self.calls.append(name)
        self.entered.set()
        if self.hang is not None:
            self.hang.wait(60)
        error = StoreDownError("no answer") if self.down else None
        if error is None and name in CONTENT:
            error = self.fails(name, args[CONTENT[name]])
        if error is not None:
            raise error
        answer = method(*args)
        if name in LOSABLE and self.lose_answers > 0:
            self.lose_answers -= 1
            raise StoreDownError("the answer was lost")
        return answer

    def _run(self, run_id):
        if run_id not in self.runs:
            raise RunMissingError(f"no run {run_id}")
        return self.runs[run_id]

    @property
    def run(self):
        assert len(self.runs) == 1
        return next(iter(self.runs.values()))

    def entity(self, run_id):
        run = self._run(run_id)
        info = SimpleNamespace(status=run["status"], start_time=1000, end_time=run["end_time"])
        return SimpleNamespace(info=info, data=SimpleNamespace(params=dict(run["params"]), tags=dict(run["tags"])))

    def find_runs(self, journal_id):
        return [run_id for run_id, run in self.runs.items() if run["journal_id"] == journal_id]

    def create_run(self, spec, tags):
        run_id = f"run{len(self.runs)}"
        kept = {"points": set(), "params": {}, "tags": dict(tags), "texts": {}, "files": {}, "curves": []}
        about = {"journal_id": spec.journal_id, "name": spec.run_name, "status": "RUNNING", "end_time": None}
        self.runs[run_id] = {**kept, **about}
        return run_id

    def delete_run(self, run_id):
        del self.runs[run_id]

    def check_run(self, run_id):
        self._run(run_id)

    def run_name(self, run_id):
        return self._run(run_id).get("name") or f"made-up-{run_id}", True

    def log_points(self, run_id, points):
        assert 0 < len(points) <= self.most_points
        if any(self.refuse(point) for point in points):
            raise StoreRefusedError("bad point")
        self._run(run_id)["points"].update(points)

    def log_params(self, run_id, params):
        assert len(params) <= 100
        self._run(run_id)["params"].update(params)

    def set_tags(self, run_id, tags):
        assert len(tags) <= 100
        self._run(run_id)["tags"].update(tags)

    def log_artifact(self, run_id, path, to):
        if self.artifacts_down:
            raise StoreDownError("no credentials")
        name = path.name if to is None else f"{to}/{path.name}"
        self._run(run_id)["files"][name] = path.read_text()

    def log_curves(self, run_id, series, title, clock):
        self._run(run_id)["curves"].append((series, title, clock))

    def log_text(self, run_id, text, name):
        self._run(run_id)["texts"][name] = text

    def set_status(self, run_id, status, end_time):
        self._run(run_id).update(status=status, end_time=end_time)

    def last_steps(self, run_id):
        steps = {}
        for point in self._run(run_id)["points"]:
            steps[point.name] = max(point.step, steps.get(point.name, point.step))
        return steps

    def points(self, run_id, name):
        return sorted((point for point in self._run(run_id)["points"] if point.name == name), key=lambda p: p[2])

    def leave_behind(self, run_id, left):
        known = [each for each in left_behind(self._run(run_id)["tags"]) if each != left]
        self._run(run_id)["tags"].update(left_tag([*known, left]))


# Lines of a journal


def header(journal_id="abc", **more):
    return {"op": "open", "version": 1, "journal_id": journal_id, "t": 1, "experiment": "e", **more}


def row(step, t=None, **metrics):
    """The line of a row, of the metric `a` with its step as the value by default."""
    return {"op": "m", "t": 1000 + step if t is None else t, "s": step, "m": metrics or {"a": float(step)}}


def params(**texts):
    return {"op": "params", "params": texts}


def tags(**texts):
    return {"op": "tags", "tags": texts}


def artifact(file):
    return {"op": "artifact", "file": file, "to": None}


def resume(t=1500, *, repeats=True, keeps_status=False):
    """The line with which a process goes on with a run."""
    return {"op": "resume", "t": t, "repeats": repeats, "keeps_status": keeps_status}


def finish(status, t=9):
    return {"op": "finish", "status": status, "t": t}


def left_over(root, journal_id, num_rows=0, *ops, **more):
    """Make the journal of a process that is gone; returns its folder."""
    journal = Journal.create(root, header(journal_id, uri="http://x") | more)
    for op in (*map(row, range(num_rows)), *ops):
        journal.append(op)
    journal.close()
    return journal.folder


class BothSides(SendingJournal):
    """A journal that is appended to and sent in one process, made in a folder or found there."""

    def __init__(self, folder, header=None, *ops):
        self.journal = Journal.open(folder) if header is None else Journal.create(folder, header)
        lock = FileLock(self.journal.folder / ACK, signs=False)
        assert lock.acquire()
        super().__init__(self.journal.folder, lock)
        self.append(*ops)

    def append(self, *ops):
        for op in ops:
            self.journal.append(op)

    def close(self):
        super().close()
        self.journal.close()


def values(store_run, name):
    """List the (step, value) pairs of a metric in a fake run."""
    return sorted((point.step, point.value) for point in store_run["points"] if point.name == name)


def query(database, *queries):
    """Make SQL queries of a database; return the rows of the last."""
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        return [connection.execute(each).fetchall() for each in queries][-1]
