import os
import signal
import sys
import threading
from types import SimpleNamespace

import pytest
from tests.forks import need_gradients_in_forks
from tests.trainers.helpers import at_step, make, run, saved_steps, sends

from rl8x import MemoryTracker, Trainer, keys
from rl8x.checkpoint import Checkpoints, listed, read
from rl8x.trainers.ranks import SignalGuard, agree
from rl8x.trainers.rows import TrainStats


@pytest.fixture(autouse=True)
def handlers_are_put_back(default_signals):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    assert before == {number: signal.getsignal(number) for number in before}


@pytest.mark.parametrize(
    ("number", "error", "code"),
    [(signal.SIGINT, KeyboardInterrupt, None), (signal.SIGTERM, SystemExit, 143), (signal.SIGHUP, SystemExit, 129)],
)
def test_a_signal_ends_the_run_after_the_step_and_it_goes_on_where_it_was(number, error, code, tmp_path):
    trainer = make(trainer={"checkpoints": tmp_path, "callbacks": [sends(number, 3)]})
    with pytest.raises(error) as raised:
        run(trainer, max_steps=6)
    assert getattr(raised.value, "code", None) == code
    assert trainer.state[keys.STEPS] == len(trainer.tracker.history("losses/total")) == saved_steps(tmp_path)[-1] == 3
    assert trainer.tracker.status == read(listed(tmp_path)[-1]).metadata["status"] == "KILLED"
    assert trainer.tracker.tags["rl8x.stop_reason"] == f"interrupted by {number.name}"
    assert run(Trainer.resume(tmp_path, tracker=trainer.tracker))[keys.STEPS] == 6
    assert trainer.tracker.status == "FINISHED"


def test_usr1_saves_and_goes_on_or_says_that_nothing_is_saved(tmp_path, capfd):
    trainer = make(trainer={"checkpoints": tmp_path, "callbacks": [sends(signal.SIGUSR1, 2)]})
    assert run(trainer, max_steps=4)[keys.STEPS] == 4
    assert saved_steps(tmp_path) == [0, 2, 4]
    assert read(listed(tmp_path)[1]).metadata["status"] == "RUNNING"
    assert trainer.tracker.status == "FINISHED"
    make(trainer={"callbacks": [sends(signal.SIGUSR1, 1)]}).run(max_steps=2, progress="lines")
    assert "nothing saved: checkpoints are off" in capfd.readouterr().err


def test_a_signal_to_save_that_comes_while_ranks_share_counts_after_the_next_step(monkeypatch):
    guard, arrives = SignalGuard(), iter([True, False, False])

    def share(_, decision):
        shared = [[*decision], [None, None, False, False]]
        guard.save = guard.save or next(arrives)
        return shared

    monkeypatch.setattr("rl8x.trainers.ranks.ranks", lambda: SimpleNamespace(size=2, share=share))
    assert [agree(TrainStats({}), guard, saves=False)[2] for _ in range(3)] == [False, True, False]


def test_a_second_interrupt_ends_at_once(tmp_path):
    after = []
    trainer = make(trainer={"checkpoints": tmp_path, "callbacks": [sends(signal.SIGINT, 2, times=2)]})
    trainer.callbacks += (lambda trainer, stats: after.append(stats[keys.STEPS]),)
    with pytest.raises(KeyboardInterrupt):
        run(trainer, max_steps=4)
    assert after == [1]  # the callback after the one that was interrupted was not called any more
    assert trainer.tracker.status == "KILLED"
    assert saved_steps(tmp_path) == [0]  # not in the middle of a step


def test_a_signal_in_the_last_step_lets_the_run_finish_first(tmp_path):
    trainer = make(trainer={"checkpoints": tmp_path, "callbacks": [sends(signal.SIGTERM, 2)]})
    with pytest.raises(SystemExit):
        run(trainer, max_steps=2)
    assert trainer.tracker.status == "FINISHED"
    assert trainer.stop_reason == "max_steps=2"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_is_ignored_stays_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with SignalGuard(quiet=True) as guard:
            os.kill(os.getpid(), number)
            assert guard.stop is None
    finally:
        signal.signal(number, before)


WAYS = {
    "run": lambda trainer: run(trainer, max_steps=9),
    "step": lambda trainer: [trainer.step() for _ in range(9)],
    "a loop over the trainer": list,
}


ENDS = [((), "FINISHED"), ((None,), "FINISHED"), ((0,), "FINISHED"), ((4,), "KILLED"), (("no",), "KILLED")]


@pytest.mark.parametrize(
    ("codes", "status", "how"),
    [*((*end, "run") for end in [*ENDS, ((0.0,), "KILLED")]), *((*end, how) for end in ENDS[2:4] for how in WAYS)],
)
def test_sys_exit_in_a_callback_ends_the_run_by_its_code(codes, status, how):
    trainer = make(trainer={"callbacks": [at_step(2, lambda trainer: sys.exit(*codes))]})
    with pytest.raises(SystemExit):
        WAYS[how](trainer)
    tracker = trainer.tracker
    assert tracker.status == status
    assert tracker.tags["rl8x.stop_reason"] == f"sys.exit({codes[0] if codes else None!r})"
    assert trainer.state[keys.STEPS] == 2


def in_fork(do):
    """Return what a forked process says of doing something, and its exit code."""
    need_gradients_in_forks()
    read_end, write_end = os.pipe()
    if (child := os.fork()) == 0:
        try:
            do()
            said = "done"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write_end, said.encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("while_it_runs", [False, True])
def test_a_fork_leaves_the_run_and_its_checkpoints_to_its_parent(while_it_runs, tmp_path):
    said, kept = {}, []

    def forks(trainer, stats=None):
        trainer.checkpoints.wait()
        kept.append(contents(tmp_path))
        calls = {"eval": trainer.eval}
        if not while_it_runs:  # within a run the others do nothing
            calls |= {"run": lambda: run(trainer, max_steps=9), "next": lambda: next(iter(trainer))}
            calls |= {"step": trainer.step, "save": trainer.save}
        said.update({name: in_fork(do) for name, do in calls.items()})
        kept.append(contents(tmp_path))

    trainer = make(trainer={"checkpoints": tmp_path, "callbacks": [forks] if while_it_runs else []})
    run(trainer, max_steps=1)
    if not while_it_runs:
        forks(trainer)
    line = f"RuntimeError: this trainer's run belongs to process {os.getpid()}, and this is a fork of it"
    assert len(said) == (1 if while_it_runs else 5)
    assert all(each.startswith(line) for each in said.values()), said
    assert kept[0] == kept[1] != {}
    run(trainer, max_steps=1)  # the parent goes on
    assert trainer.state[keys.STEPS] == 2


def test_a_fork_that_comes_back_from_a_callback_writes_nothing(tmp_path):
    need_gradients_in_forks()
    parent, ended = os.getpid(), []

    def forks(trainer, stats):
        if stats[keys.STEPS] == 2:
            trainer.checkpoints.wait()
            before = contents(tmp_path)
            if (child := os.fork()) == 0:
                return
            ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            assert contents(tmp_path) == before

    tracker = MemoryTracker()
    checkpoints = Checkpoints(tmp_path, every_steps=1)
    trainer = make(trainer={"checkpoints": checkpoints, "callbacks": [forks], "tracker": tracker})
    try:
        run(trainer, max_steps=3)
    except RuntimeError as error:
        if os.getpid() != parent:
            os._exit(7 if "is a fork of it" in str(error) and tracker.status == "RUNNING" else 1)
        raise
    finally:
        if os.getpid() != parent:
            os._exit(2)
    assert (ended, tracker.status) == ([7], "FINISHED")
    assert saved_steps(tmp_path)[-1] == 3


def test_a_trainer_that_was_made_before_a_fork_may_begin_in_it(tmp_path):
    trainer = make(trainer={"checkpoints": tmp_path})
    assert in_fork(lambda: run(trainer, max_steps=1)) == "done"
    assert saved_steps(tmp_path) == [0, 1]


def test_a_run_in_another_thread_leaves_signals_alone():
    before, inside = signal.getsignal(signal.SIGTERM), []
    trainer = make(trainer={"callbacks": [lambda *_: inside.append(signal.getsignal(signal.SIGTERM))]})
    thread = threading.Thread(target=lambda: run(trainer, max_steps=1))
    thread.start()
    thread.join()
    assert inside == [before]
    assert trainer.tracker.status == "FINISHED"
