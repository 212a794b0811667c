"""A store in memory that can be away, hang or refuse, with the rules of MLflow that matter here."""

import threading

from rl8x.tracking.appending import Journal
from rl8x.tracking.journal import ACK, SendingJournal
from rl8x.tracking.locks import FileLock
from rl8x.tracking.protocol import RunMissingError, StoreDownError, StoreRefusedError
from rl8x.tracking.repeats import LeftBehind, left_behind, left_tag


class FakeStore:
    """Keeps runs in dicts; shared by all "connections", as a server is."""

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

    def _enter(self, call):
        self.calls.append(call)
        self.entered.set()
        if self.hang is not None:
            self.hang.wait(20)
        if self.down:
            raise StoreDownError("no answer")

    def _may_fail(self, call, content):
        error = self.fails(call, content)
        if error is not None:
            raise error

    def _leave(self):
        if self.lose_answers > 0:
            self.lose_answers -= 1
            raise StoreDownError("the answer was lost")

    def _run(self, run_id):
        if run_id not in self.runs:
            raise RunMissingError(f"no run {run_id}")
        return self.runs[run_id]

    @property
    def run(self):
        """The only run."""
        assert len(self.runs) == 1
        return next(iter(self.runs.values()))

    def find_runs(self, spool_id):
        self._enter("find_runs")
        return [run_id for run_id, run in self.runs.items() if run["spool_id"] == spool_id]

    def create_run(self, spec, tags):
        self._enter("create_run")
        self._may_fail("create_run", spec)
        run_id = f"run{len(self.runs)}"
        self.runs[run_id] = {
            "spool_id": spec.spool_id,
            "name": spec.run_name,
            "points": set(),
            "params": {},
            "tags": dict(tags),
            "texts": {},
            "files": {},
            "curves": [],
            "status": "RUNNING",
            "end_time": None,
        }
        self._leave()
        return run_id

    def delete_run(self, run_id):
        self._enter("delete_run")
        del self.runs[run_id]

    def check_run(self, run_id):
        self._enter("check_run")
        self._run(run_id)

    def run_name(self, run_id):
        self._enter("run_name")
        return self._run(run_id).get("name") or f"made-up-{run_id}", True

    def status(self, run_id):
        self._enter("status")
        run = self._run(run_id)
        return run["status"], run["end_time"]

    def log_points(self, run_id, points):
        self._enter("log_points")
        self._may_fail("log_points", points)
        assert 0 < len(points) <= self.most_points
        if any(self.refuse(point) for point in points):
            raise StoreRefusedError("bad point")
        self._run(run_id)["points"].update(points)
        self._leave()

    def params(self, run_id):
        self._enter("params")
        return dict(self._run(run_id)["params"])

    def log_params(self, run_id, params):
        self._enter("log_params")
        self._may_fail("log_params", params)
        assert len(params) <= 100
        self._run(run_id)["params"].update(params)
        self._leave()

    def tags(self, run_id):
        self._enter("tags")
        return dict(self._run(run_id)["tags"])

    def set_tags(self, run_id, tags):
        self._enter("set_tags")
        self._may_fail("set_tags", tags)
        assert len(tags) <= 100
        self._run(run_id)["tags"].update(tags)
        self._leave()

    def log_artifact(self, run_id, path, to):
        self._enter("log_artifact")
        if self.artifacts_down:
            raise StoreDownError("no credentials")
        name = path.name if to is None else f"{to}/{path.name}"
        self._run(run_id)["files"][name] = path.read_text()

    def log_curves(self, run_id, series, title, clock):
        self._enter("log_curves")
        self._run(run_id)["curves"].append((series, title, clock))

    def start_time(self, run_id):
        self._enter("start_time")
        self._run(run_id)
        return 1000

    def log_text(self, run_id, text, name):
        self._enter("log_text")
        self._may_fail("log_text", name)
        self._run(run_id)["texts"][name] = text

    def set_status(self, run_id, status, end_time):
        self._enter("set_status")
        self._may_fail("set_status", status)
        self._run(run_id).update(status=status, end_time=end_time)

    def last_steps(self, run_id):
        self._enter("last_steps")
        steps = {}
        for point in self._run(run_id)["points"]:
            steps[point.name] = max(point.step, steps.get(point.name, point.step))
        return steps

    def points(self, run_id, name):
        self._enter("points")
        self._may_fail("points", name)
        return sorted((list(point) for point in self._run(run_id)["points"] if point.name == name), key=lambda p: p[2])

    def leave_behind(self, run_id, step, before):
        self._enter("leave_behind")
        left = LeftBehind(step, before)
        known = [each for each in left_behind(self._run(run_id)["tags"]) if each != left]
        self._run(run_id)["tags"].update(left_tag([*known, left]))
        return str(left)


class BothSides(SendingJournal):
    """A journal that is appended to and sent in one process, made in a folder or found there."""

    def __init__(self, folder, header=None):
        self.journal = Journal.open(folder) if header is None else Journal.create(folder, header)
        lock = FileLock(self.journal.folder / ACK, signs=False)
        assert lock.acquire()
        super().__init__(self.journal.folder, lock)
        self.append = self.journal.append

    def close(self):
        super().close()
        self.journal.close()


def values(store_run, name):
    """List the (step, value) pairs of a metric in a fake run."""
    return sorted((point.step, point.value) for point in store_run["points"] if point.name == name)
