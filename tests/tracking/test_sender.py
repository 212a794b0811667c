import contextlib
import itertools
import math
import random
import re

import pytest

from rl8x.tracking.artifacts import keep
from rl8x.tracking.journal import name_of, read_ack
from rl8x.tracking.protocol import StoreDownError, StoreRefusedError
from rl8x.tracking.repeats import Point, left_behind
from rl8x.tracking.sender import NotNowError, Sender
from tracking.fakes import BothSides, FakeStore, artifact, finish, header, params, resume, row, tags, values

TEXT = {"op": "text", "to": "notes/x.txt", "text": "hello"}
CURVES = {"op": "curves", "series": {"returns/mean": [[0, 1.0], [8, 2.0]]}, "title": "PPO", "clock": "transitions"}
SAMPLE = (63_500, {"system/cpu_utilization_percentage": 12.5})
TOTAL = "losses/total"


@pytest.fixture
def store():
    return FakeStore()


@pytest.fixture
def journal(tmp_path):
    journal = BothSides(tmp_path, header(writer="w", run_name="n"))
    yield journal
    journal.close()


def raises(error):
    raise error


def send(journal, store, *ops, **options):
    """Append ops, and send all that has not arrived."""
    journal.append(*ops)
    sender = Sender(journal, store, **options)
    sender.send_some()
    while journal.pending:
        sender.send_some()
    return sender


def test_sends_all_in_order(journal, store):
    ops = [params(lr="0.1"), tags(k="v" * 9000), *map(row, range(3)), TEXT, finish("FINISHED", 5)]
    sender = send(journal, store, *ops, fresh=True)
    assert store.run["points"] == {Point("a", float(step), 1000 + step, step) for step in range(3)}
    assert store.run["params"] == {"lr": "0.1"}
    assert store.run["tags"] == {"k": "v" * 8000}
    assert store.run["texts"] == {"notes/x.txt": "hello"}
    assert store.run["status"] == "FINISHED"
    assert (store.run["name"], sender.num_rows) == ("n", 3)
    assert journal.ack.finished
    assert "find_runs" not in store.calls  # a new run costs no search


def test_batches_are_whole_rows_of_at_most_what_a_store_takes(journal, store):
    sizes = []
    store.fails = lambda call, content: sizes.append(len(content)) if call == "log_points" else None
    rows = [row(step, **{f"m{i}": 1.0 for i in range(300)}) for step in range(7)]
    send(journal, store, *rows, row(7, **{f"m{i}": 1.0 for i in range(1500)}))
    assert sizes == [900, 900, 300, 1000, 500]
    assert len(store.run["points"]) == 7 * 300 + 1500


class Run:
    """A run whose processes end, and go on at an earlier step: by the same course, or by another from some step on."""

    def __init__(self, seed):
        self.draw, self.end, self.numbers = random.Random(seed), 0, itertools.count(1.0)
        self.losses, self.evals, self.times, self.others = {}, {}, {}, {}  # what counts, by step
        self.params, self.status = [], None

    def session(self, number):
        """Yield the lines of a process."""
        draw, began = self.draw, 10_000 * number
        begin = draw.randrange(max(0, self.end - 6), self.end + 1)
        self.end = begin + draw.randrange(1, 9)
        # The step from which on all differs; there an evaluation may do so alone.
        other = draw.choice([math.inf, draw.randrange(begin + 1, self.end + 2)])
        later, has_others = other % 2 == 0 and draw.random() < 0.5, draw.random() < 0.5
        if number:
            yield resume(began)
        self.params.append(draw.choice("12"))
        yield params(lr=self.params[-1])
        for step in range(begin + 1, self.end + 1):
            time = began + 10 * step
            if step == other:
                kept = self.losses.get(step) if later else None
                for each in (self.losses, self.evals, self.times, self.others):
                    for left in [left for left in each if left >= step]:
                        del each[left]
                if kept is not None:
                    self.losses[step] = kept
            loss = self.losses.setdefault(step, next(self.numbers))
            self.times.setdefault(step, float(time))
            told = {TOTAL: loss, "profiling/step_ms": float(time)}
            if has_others:
                told["returns/mean"] = self.others.setdefault(step, next(self.numbers))
            yield row(step, time, **told)
            if step % 2 == 0:
                value = self.evals.setdefault(step, next(self.numbers))
                yield row(step, time + 1, **{"eval/returns/mean": value})
        self.status = draw.choice(["KILLED", "FAILED", "FINISHED"])
        yield finish(self.status, began + 9000)


@pytest.mark.parametrize("seed", range(80))
def test_the_store_has_each_point_of_the_runs_course_once_whatever_fails(seed, store, tmp_path):
    run, draw = Run(seed), random.Random(seed)
    store.most_points = draw.choice([2, 5, 1000])
    journal = BothSides(tmp_path, header())
    sender = Sender(journal, store, fresh=True)

    def send():
        with contextlib.suppress(StoreDownError):
            sender.send_some()

    for line in (line for number in range(draw.randrange(1, 5)) for line in run.session(number)):
        rows = [each for each, *_ in journal.read() if each["op"] == "m"] + [line]
        # The sending process is killed; but not before the second row of a step, which may be the first to differ.
        if journal.pending and "eval/" not in str(rows[0]) and draw.random() < 0.1:
            journal.close()
            journal = BothSides(journal.folder)
            sender = Sender(journal, store)
        journal.append(line)
        store.down, store.lose_answers = draw.random() < 0.2, draw.random() < 0.3
        if draw.random() < 0.4:
            send()
    store.down = False
    for _ in range(99):
        send()
    assert not journal.pending
    journal.close()
    left = left_behind(store.run["tags"])
    counted = [p for p in store.run["points"] if not any(each.has(p.name, p.step, p.timestamp) for each in left)]
    names = TOTAL, "eval/returns/mean", "profiling/step_ms", "returns/mean"
    for name, expected in zip(names, (run.losses, run.evals, run.times, run.others), strict=True):
        assert sorted((p.step, p.value) for p in counted if p.name == name) == sorted(expected.items()), name
    assert store.run["params"] == {"lr": run.params[0]}
    changed = {"rl8x.param_change.lr": run.params[-1]} if len(set(run.params)) > 1 else {}
    assert {name: text for name, text in store.run["tags"].items() if "param_change" in name} == changed
    assert store.run["status"] == run.status


def test_a_run_that_appears_late_is_deleted(journal, store, monkeypatch):
    """The create request timed out, the search found nothing, and then the first one arrived after all."""
    sender, create = Sender(journal, store, fresh=True), store.create_run
    monkeypatch.setattr(store, "create_run", lambda *about: raises(StoreDownError("timeout")))
    with pytest.raises(StoreDownError):
        sender.send_some()
    monkeypatch.setattr(store, "create_run", lambda *about: (create(*about), create(*about))[1])
    sender.send_some()
    assert list(store.runs) == [journal.ack.run_id]


def test_artifacts_are_copies_of_that_moment_and_hold_up_no_row_where_their_store_fails(journal, store, tmp_path):
    source, copies = tmp_path / "policy.txt", journal.folder / "files"
    for text, to in (("first", "policies"), ("second", None)):
        source.write_text(text)
        journal.append({**artifact(keep(journal.folder, source)), "to": to}, row(1))
    source.write_text("third")
    store.artifacts_down = True
    sender = Sender(journal, store)
    for _ in range(2):
        with pytest.raises(StoreDownError):
            sender.send_some()
    sender.send_all()
    assert values(store.run, "a") == [(1, 1.0)]
    assert len([*copies.glob("*/policy.txt")]) == 2
    assert "no credentials" in (journal.folder / "rejected.jsonl").read_text()
    store.artifacts_down = False
    sender.send_all()
    assert store.run["files"] == {"policies/policy.txt": "first", "policy.txt": "second"}
    assert not journal.rejected
    assert list(copies.iterdir()) == []


def test_resumed_rows_are_not_doubled(journal, store):
    again = [row(step, 2000 + step, a=float(step), b=1.0) for step in (3, 4, 5)]
    send(journal, store, *map(row, range(5)), finish("KILLED", 3), resume(), *again)
    journal.append(*(row(step, 3000 + step) for step in (5, 6)))  # one more at 5, which the run has not had before
    assert store.calls.count("points") == 0  # no history is read for what cannot tell another course
    journal.close()  # another kill
    later = BothSides(journal.folder)
    send(later, store)
    later.close()
    assert values(store.run, "a") == [(step, float(step)) for step in (0, 1, 2, 3, 4, 5, 5, 6)]
    assert values(store.run, "b") == [(step, 1.0) for step in (3, 4, 5)]
    assert {point.timestamp for point in store.run["points"] if point.step == 4 and point.name == "a"} == {1004}
    assert store.run["status"] == "RUNNING"


def test_a_name_that_cannot_be_read_or_is_very_long_holds_nothing_up(journal, store, monkeypatch):
    asked = []
    monkeypatch.setattr(store, "run_name", lambda run_id: asked.append(run_id) or raises(StoreDownError("not allowed")))
    sender = Sender(journal, store)
    for step in range(5):
        journal.append(row(step))
        sender.send_some()
    assert (len(store.run["points"]), len(asked), journal.ack.run_name) == (5, 3, None)
    monkeypatch.setattr(store, "run_name", lambda run_id: ("long " * 800, True))
    send(journal, store, finish("FINISHED", 5))
    assert read_ack(journal.folder).finished


def test_a_resumed_run_repeats_each_of_several_points_of_a_step_once(journal, store):
    send(journal, store, *(row(7, 100 + time, **{TOTAL: value}) for time, value in enumerate((1.0, 2.0))))
    sender = send(journal, store, resume(200))
    journal.append(*(row(7, 300 + time, **{TOTAL: value}) for time, value in enumerate((1.0, 2.0, 3.0))))
    store.lose_answers = 1  # the third point arrives, but not the answer: all are read again
    with pytest.raises(StoreDownError):
        sender.send_some()
    sender.send_some()
    assert values(store.run, TOTAL) == [(7, 1.0), (7, 2.0), (7, 3.0)]


def test_what_is_added_by_the_process_that_logged_it_is_all_new_and_may_keep_the_status(journal, store):
    ops = [row(7), finish("FAILED", 5), resume(repeats=False, keeps_status=True), row(7, 2000)]
    for more in (ops, [finish(None, 7)]):
        send(journal, store, *more)
        assert len(values(store.run, "a")) == 2
        assert store.run["status"] == "FAILED"
        assert journal.ack.finished  # where the process ends here, `rl8x sync` leaves the status alone


@pytest.mark.parametrize(
    ("name", "is_free", "is_default", "word"),
    [
        ("my run", True, True, "'my run'"),
        ("my run", False, True, None),
        ("my run", True, False, None),
        *[(odd, True, True, None) for odd in ("-n", ".", "a\nb", "")],
    ],
)
def test_commands_of_a_description_have_the_runs_name_where_that_finds_it(
    journal, store, monkeypatch, name, is_free, is_default, word
):
    monkeypatch.setattr(store, "run_name", lambda run_id: (name, is_free))
    text = "`rl8x resume '/a b/1' --max-steps N` `Trainer.resume('/a b/1')`"
    send(journal, store, {"op": "describe", "text": text, "folder": "'/a b/1'"}, is_default=is_default)
    described = text if word is None else text.replace("resume '/a b/1'", f"resume {word}")
    assert store.run["tags"]["mlflow.note.content"] == described


def describe(journal, store, text):
    send(journal, store, {"op": "describe", "text": text})
    return store.run["tags"].get("mlflow.note.content")


def test_a_description_is_renewed_until_the_user_writes_another_also_after_a_lost_answer(journal, store):
    assert describe(journal, store, "running") == "running"
    journal.append({"op": "describe", "text": "x" * 9000})
    store.lose_answers = 2  # also that of the check whether the store takes anything
    with pytest.raises(StoreDownError):
        Sender(journal, store).send_some()
    send(journal, store)
    assert store.run["tags"]["mlflow.note.content"] == "x" * 8000
    assert describe(journal, store, "ended") == "ended"
    journal.append(tags(**{"mlflow.note.content": "ended, and it was good"}))  # or at the start
    assert describe(journal, store, "resumed") == "ended, and it was good"
    store.run["tags"]["mlflow.note.content"] = ""  # as MLflow's page leaves it where the text is deleted
    assert describe(journal, store, "resumed") == "resumed"


MANY = {f"p{i}": str(i) for i in range(250)}
BAD_ENTRIES = {  # an entry, and the calls that fail
    "the run's name 'n'": (None, lambda call, what: "mlflow.runName" in what or "n" in what),
    "the experiment 'e'": (None, lambda call, what: call == "create_run" and what.experiment == "e"),
    "the param 'p1'": (params(**MANY), lambda call, what: "p1" in what),
    "the tag 'p1'": (tags(**MANY), lambda call, what: "p1" in what),
    "the metric 'b'": (row(0, 1000, a=0.0, b=5.0), lambda call, what: call == "log_points" and "b" in str(what)),
    "an entry of the kind 'describe'": ({"op": "describe", "text": "d"}, lambda call, what: "rl8x.description" in what),
    "the text 'notes/x.txt'": (TEXT, lambda call, what: call == "log_text"),
    "an entry of the kind 'resume'": (resume(), lambda call, what: what == "RUNNING"),
    "an entry of the kind 'finish'": (finish("KILLED"), lambda call, what: what == "KILLED"),
}


@pytest.mark.parametrize("what", BAD_ENTRIES)
@pytest.mark.parametrize("error", [StoreRefusedError, StoreDownError, ZeroDivisionError])
def test_an_entry_of_any_kind_that_is_not_taken_holds_nothing_up(what, error, journal, store):
    op, is_bad = BAD_ENTRIES[what]
    if op is None and error is not StoreRefusedError:
        return  # without a run nothing can be sent: that is an outage
    journal.append(row(0), *([] if op is None else [op]), *(row(step, 2000 + step) for step in range(3)))
    journal.append(tags(after="yes"))
    store.fails = lambda call, content: error("no") if is_bad(call, content) else None
    sender = Sender(journal, store)
    sender.send_all()
    assert not journal.pending
    assert store.run["tags"]["after"] == "yes"
    assert len({step for step, _ in values(store.run, "a")}) == 3
    assert [name_of(entry) for entry in journal.rejected.entries] == [what]
    if "'p1'" in what:  # of which no other is taken with it
        assert MANY.keys() - {**store.run["params"], **store.run["tags"]}.keys() == {"p1"}
    store.fails = lambda call, content: None
    sender.send_all()  # what was set aside is sent when it can be
    assert len(journal.rejected) == (what == "the experiment 'e'")
    assert (journal.folder / "rejected.jsonl").exists() == (what == "the experiment 'e'")
    sent_later = {"the run's name 'n'": {"mlflow.runName": "n"}, "the param 'p1'": MANY, "the tag 'p1'": MANY}
    assert sent_later.get(what, {}).items() <= {**store.run["params"], **store.run["tags"]}.items()


def test_what_was_set_aside_does_not_undo_what_came_later(journal, store):
    store.fails = lambda call, content: StoreRefusedError("no") if content == "KILLED" or "1" in content else None
    journal.append({"op": "tags", "tags": {"1": "old"}}, finish("KILLED", 3))
    Sender(journal, store).send_all()
    assert len(journal.rejected) == 2
    assert journal.ack.finished
    store.fails = lambda call, content: None
    journal.append(resume(repeats=False), {"op": "tags", "tags": {"1": "new"}}, finish("FINISHED"))
    Sender(journal, store).send_all()
    assert (store.run["status"], store.run["tags"]["1"], len(journal.rejected)) == ("FINISHED", "new", 0)


def test_a_refusal_is_believed_the_third_time_and_of_many_points_alone_what_is_at_fault_is_sent_alone(journal, store):
    sizes, refusals = [], iter([True] * 5 + [False])

    def refuses(points):
        sizes.append(len(points))
        return StoreRefusedError("no") if points[0].step <= 3 <= points[-1].step and next(refusals) else None

    store.fails = lambda call, content: refuses(content) if call == "log_points" else None
    send(journal, store, *map(row, range(8)))
    assert sizes == [8, 4, 2, 2, 1, 1, 1, 1, 4]
    assert len(values(store.run, "a")) == 8
    assert not journal.rejected


WRITES = ("log_points", "set_tags", "log_params", "set_status")


@pytest.mark.parametrize(
    ("calls", "error"),
    [
        (WRITES, StoreDownError("400")),  # as behind a proxy that answers so to every POST for a while
        (WRITES, StoreRefusedError("400")),
        # What needs no room is taken.
        (["log_points"], StoreDownError("(sqlite3.OperationalError) database or disk is full")),
    ],
)
def test_a_store_that_takes_no_writes_or_has_no_room_is_away_and_nothing_is_set_aside(calls, error, journal, store):
    send(journal, store, row(0))
    journal.append(*map(row, range(1, 200)))
    store.calls.clear()
    store.fails = lambda call, content: error if call in calls else None
    sender = Sender(journal, store)
    for _ in range(10):
        with pytest.raises(NotNowError, match=re.escape(str(error))):
            sender.send_some()
    assert store.calls.count("log_points") == 10  # not each point alone
    with pytest.raises(NotNowError):
        sender.send_all()
    store.fails = lambda call, content: None
    gone = store.runs.pop("run0")  # as where it is deleted, until it is restored
    with pytest.raises(NotNowError, match="no run run0"):
        sender.send_some()
    store.runs["run0"] = gone
    sender.send_all()
    assert len(values(store.run, "a")) == 200
    assert not journal.rejected


def test_a_param_that_is_too_long_is_logged_where_artifacts_are_out_of_reach(journal, store):
    journal.append(params(big="x" * 7000, small="1"), row(1), params(big="x" * 7000))
    store.fails = lambda call, content: StoreDownError("no bucket") if call == "log_text" else None
    sender = Sender(journal, store)
    with pytest.raises(NotNowError, match="no bucket"):
        sender.send_some()
    assert (len(store.run["params"]["big"]), store.run["params"]["small"]) == (6000, "1")
    assert store.run["params"]["big"].endswith("(the whole value is the artifact params/big.txt)")
    sender.send_all()
    assert values(store.run, "a") == [(1, 1.0)]
    assert journal.rejected.entries == [{"op": "text", "to": "params/big.txt", "text": "x" * 7000}]
    store.fails = lambda call, content: None
    sender.send_all()
    assert store.run["texts"] == {"params/big.txt": "x" * 7000}
    assert [name for name in store.run["tags"] if "param_change" in name] == []  # no param has changed
    assert not journal.rejected


def test_learning_curves_and_samples_wait_for_a_store_that_is_away(journal, store):
    store.down = True
    journal.append(row(0), CURVES, finish("FINISHED", 70_000))
    sender = Sender(journal, store)
    sender.samples.append(SAMPLE)
    with pytest.raises(StoreDownError):
        sender.send_some()
    assert journal.pending
    assert store.runs == {}
    store.down = False
    sender.send_all()
    assert store.run["curves"] == [(CURVES["series"], "PPO", "transitions")]
    # The run began at 1,000 ms: a sample's step is the seconds since.
    sample = Point("system/cpu_utilization_percentage", 12.5, 63_500, 62)
    assert store.run["points"] == {Point("a", 0.0, 1000, 0), sample}


def test_samples_that_come_faster_than_they_are_sent_hold_up_nothing(journal, store):
    journal.append(row(0))
    sender = Sender(journal, store)
    sender.samples.append(SAMPLE)

    def measure(call, content):
        assert len(store.calls) < 100
        if call == "log_points":
            sender.samples.append(SAMPLE)

    store.fails = measure
    sender.send_all()
    assert values(store.run, "a") == [(0, 0.0)]
    assert len(sender.samples) <= 2


def goes_back(journal, store, first, then):
    """Send rows of the steps of `first`, a resume, and rows of the steps of `then`: values by step."""
    for t, rows in ((1000, first), (2000, then)):
        for step, value in rows.items():
            journal.append(row(step, t + step, **{TOTAL: value, "profiling/step_ms": float(t + step)}))
        journal.append(finish("FINISHED", t + 100), resume(t + 200))
    send(journal, store)
    left = left_behind(store.run["tags"])
    counted = [p for p in store.run["points"] if not any(each.has(p.name, p.step, p.timestamp) for each in left)]
    return left, {
        name: sorted((p.step, p.value) for p in counted if p.name == name) for name in {p[0] for p in counted}
    }


def test_a_run_that_goes_back_and_comes_to_other_values_leaves_the_old_ones_behind(journal, store):
    journal.append({"op": "describe", "text": "PPO on CartPole"})
    first = {step: float(step) for step in range(1, 9)}
    left, found = goes_back(journal, store, first, {3: 3.0, 4: 44.0, 5: math.nan})
    # Step 3 came again; from 4 on it is another course, also where that has not come to yet when the run ends.
    assert left == [(4, 1200)]  # what is older than the resume
    assert found[TOTAL] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 44.0), (5, pytest.approx(math.nan, nan_ok=True))]
    assert found["profiling/step_ms"] == [(1, 1001.0), (2, 1002.0), (3, 1003.0), (4, 2004.0), (5, 2005.0)]
    description = store.run["tags"]["mlflow.note.content"]
    assert description.startswith("PPO on CartPole\n\nWent back on 1970-01-01 00:00:01 UTC: points from step 4 on")
    assert describe(journal, store, "PPO, at its end") == description.replace("PPO on CartPole", "PPO, at its end")


def test_what_an_older_process_sends_late_is_no_other_course_and_its_picture_is_not_drawn(journal, store, tmp_path):
    goes_back(journal, store, {1: 1.0}, {1: 1.0, 2: 2.0})
    older = BothSides(tmp_path / "other", header(run_id="run0"))
    store.run["tags"]["rl8x.journal"] = "of another process"
    store.run.update(status="FINISHED", end_time=10**9)
    send(older, store, row(2, 1500, **{TOTAL: 9.0}), CURVES, late=True)
    older.close()
    assert values(store.run, TOTAL) == [(1, 1.0), (2, 2.0)]
    assert (left_behind(store.run["tags"]), store.run["curves"]) == ([], [])
