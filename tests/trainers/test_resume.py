import contextlib
import copy
import dataclasses
import functools
import json
import math
import os
import shutil

import pytest
import torch
from tests.trainers.helpers import (
    SMALL,
    Killed,
    LinesTracker,
    at_step,
    config,
    killed_at,
    make,
    rows,
    run,
    saved_steps,
    weights,
)

from rl8x import DQNConfig, MemoryTracker, MLflowTracker, NullTracker, PPOConfig, Trainer, keys
from rl8x.checkpoint import CheckpointError, Checkpoints, find, listed
from rl8x.cli.main import main
from rl8x.conditions import Condition, HitsUpperBound, Plateau, as_condition
from rl8x.envs import CartPole, DiscreteDummy, GymnasiumEnv
from rl8x.tracking.locks import FolderLock
from rl8x.tracking.runs import RunReader
from rl8x.trainers.resume import torch_generators


def again(source, **options):
    """Return a trainer that goes on with a run, tracked nowhere."""
    return Trainer.resume(source, **{"tracker": NullTracker()} | options)


def killed(folder, step, *, max_steps=9, every=1, run_options=None, **trainer):
    """Have a run killed after a step, before that is saved."""
    saves = {"checkpoints": Checkpoints(folder, every_steps=every, keep=9), "callbacks": [killed_at(step)]}
    with pytest.raises(Killed):
        run(make(trainer=saves | trainer), max_steps=max_steps, **(run_options or {}))


# -- how far it goes


def test_fewer_steps_than_there_were_are_refused(tmp_path):
    killed(tmp_path, 4)
    second = again(tmp_path)
    with pytest.raises(ValueError, match=r"and the run has made 3 already; got 3\. Give more, or None"):
        run(second, max_steps=3)
    assert run(second, max_steps=4)[keys.STEPS] == 4


def test_an_evaluation_of_a_resumed_run_is_no_row_that_comes_again(tmp_path):
    tracker = MemoryTracker()
    evaluates = {"steps_per_eval": 1}
    killed(tmp_path, 4, max_steps=6, every=2, tracker=tracker, num_eval_envs=2, run_options=evaluates)
    second = Trainer.resume(tmp_path, tracker=tracker)
    evaluated = second.eval()["eval/returns/mean"]
    assert tracker.history("eval/returns/mean")[-1] == (64, evaluated)
    run(second)
    found = [step for step, _ in tracker.history("eval/returns/mean")]
    assert sorted(found) == [32, 64, 64, 96, 128, 160, 192]
    assert [step for step, _ in tracker.history("returns/mean")] == [32, 64, 96, 128, 160, 192]


def test_a_run_that_has_ended_stays_ended(tmp_path):
    first = make(trainer={"checkpoints": tmp_path, "num_eval_envs": 2})
    stats = run(first, max_steps=3)
    first.tracker.status = "RUNNING"  # killed after its end was saved, before the tracked run knew
    second = Trainer.resume(tmp_path, tracker=first.tracker)
    once_more = run(second)
    assert dict(once_more) == dict(stats)
    assert once_more.stop_reason == second.stop_reason == "max_steps=3"
    assert (second.state[keys.STEPS], first.tracker.status) == (3, "FINISHED")
    assert run(again(tmp_path), max_steps=2).stop_reason == "max_steps=3"
    assert run(again(tmp_path), max_steps=None, stop_conditions=[HitsUpperBound(keys.STEPS, 5)])[keys.STEPS] == 5


def test_who_goes_back_and_is_killed_before_anything_is_saved_goes_on_from_there(tmp_path):
    run(make(trainer={"checkpoints": Checkpoints(tmp_path, keep=9, every_steps=1)}), max_steps=4)
    given = {"overrides": {"lr": 0.5}, "callbacks": [killed_at(3)], "checkpoints": Checkpoints(tmp_path, keep=9)}
    with pytest.raises(Killed):
        run(again(listed(tmp_path)[2], **given), max_steps=9)
    third = again(tmp_path)
    assert (third.state[keys.STEPS], third.algorithm.config.lr) == (2, 0.5)


@pytest.mark.parametrize(
    ("before", "after", "best"),
    [([math.nan, math.nan, 9, 3], [math.nan] * 5, None), ([1, 3, 5, 9], [0, 0, 2, 1, 0], "-step-2")],
)
def test_who_goes_back_has_the_best_of_its_own_course_and_nothing_of_what_it_left(before, after, best, tmp_path):
    def measures(values):
        def callback(trainer, stats):
            return {"mine": values[int(stats[keys.STEPS]) - 1]}

        callback.metric_names = ["mine"]
        return [callback]

    every = Checkpoints(tmp_path, keep=50, best="mine", every_steps=1)
    run(make(trainer={"checkpoints": every, "callbacks": measures(before)}), max_steps=4)
    left = find(tmp_path, best=True).path
    assert left.name.endswith("-step-3" if best is None else "-step-4")
    begun = listed(tmp_path)[2]
    second = again(begun, callbacks=measures(after))
    run(second, max_steps=5)
    assert second.checkpoints.best_path == (None if best is None else begun)
    if best is not None:
        assert [find(source, best=True).path for source in (tmp_path, left)] == [begun] * 2
        shutil.rmtree(begun)
    for source in (tmp_path, left):
        with pytest.raises(CheckpointError, match=r"no checkpoint in .* is the best of a metric"):
            find(source, best=True)


def test_who_waited_goes_on_from_the_newest_checkpoint(tmp_path):
    straight, tracker = make(), MemoryTracker()
    run(straight, max_steps=8)
    killed(tmp_path, 3, max_steps=8, tracker=tracker)
    first, waiter = (Trainer.resume(tmp_path, tracker=tracker) for _ in range(2))
    named, stepped = (again(source) for source in (listed(tmp_path)[1], tmp_path))
    run(first, max_steps=6)
    stepped.step()
    for late in (named, stepped):
        before = late.state[keys.STEPS]
        for call in (functools.partial(run, late, max_steps=8), late.save):
            with pytest.raises(CheckpointError, match="another process has gone on with this run"):
                call()
        assert late.state[keys.STEPS] == before
    assert run(waiter, max_steps=8)["algorithm/steps"] == 8
    assert weights(waiter).equal(weights(straight))
    assert rows(tracker) == rows(straight.tracker)
    with pytest.raises(CheckpointError, match="another process"):
        run(first, max_steps=9)


def test_who_is_behind_another_that_went_back_is_refused(tmp_path):
    first = make(trainer={"checkpoints": Checkpoints(tmp_path, keep=50, every_steps=2)})
    run(first, max_steps=8)
    run(again(listed(tmp_path)[1]), max_steps=5)  # its checkpoints are of earlier steps than the first one's last
    with pytest.raises(CheckpointError, match="another process has gone on with this run"):
        run(first, max_steps=9)


def test_a_job_that_is_started_again_goes_on_with_the_seed_that_was_drawn(tmp_path, monkeypatch):
    for module in ("resume", "record"):
        monkeypatch.setattr(f"rl8x.trainers.{module}.job", lambda: "mine")
    saves = {"checkpoints": Checkpoints(tmp_path, every_steps=1)}
    first = make(seed=None, trainer=saves | {"callbacks": [killed_at(4)]})
    with pytest.raises(Killed):
        run(first, max_steps=6)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    second = make(seed=None, trainer=saves)
    assert run(second, max_steps=6)[keys.STEPS] == 6
    assert saved_steps(tmp_path) == [4, 5, 6]
    seeds = [second.algorithm.seed, find(tmp_path).metadata["resolved"]["config"]["seed"]]
    assert seeds == [first.algorithm.seed] * 2


# -- what may be other than it was


def test_overrides_are_recorded(tmp_path):
    first = make(trainer={"checkpoints": tmp_path})
    run(first, max_steps=2)
    run(Trainer.resume(tmp_path, tracker=first.tracker, overrides={"lr": 5e-4}), max_steps=3)
    assert first.tracker.history("coefficients/lr")[-1] == (96, pytest.approx(5e-4))
    assert json.loads(first.tracker.tags["rl8x.resumed_with"]) == {"lr": {"before": 0.001, "now": 0.0005}}
    assert first.tracker.params["lr"] == 5e-4
    assert first.tracker.tags["rl8x.resumed_from"] == "000002-step-2"


FIXED = "`v_max` was 10.0 and is 20.0, but decides what the outputs of the networks mean, .* begin a run"


@pytest.mark.parametrize(
    ("kind", "overrides", "says"),
    [
        ({"num_atoms": 5}, {"seed": 99}, r"another `seed` \(99\)"),
        ({"num_atoms": 5}, {"num_envs": 8}, "`num_envs` stays 4 as the run goes on; got 8"),
        ({"num_atoms": 5}, {"v_max": 20.0}, FIXED),
        ({"num_quantiles": 5}, {"num_quantiles": 1, "num_atoms": 5}, "what the outputs of the networks mean"),
    ],
)
def test_overrides_that_would_mean_another_run_are_refused(kind, overrides, says, tmp_path):
    algorithm = DQNConfig(**SMALL, updates_per_sample=0.1, **kind).build(CartPole)
    run(Trainer(algorithm, tracker=NullTracker(), checkpoints=tmp_path), max_steps=1)
    with pytest.raises(CheckpointError, match=says):
        Trainer.resume(tmp_path, overrides=overrides)
    with pytest.raises(CheckpointError, match=says):
        Trainer.resume(tmp_path, algorithm=dataclasses.replace(algorithm.config, **overrides).build(CartPole))


def test_an_algorithm_given_must_be_as_it_was_but_for_the_overrides(tmp_path):
    first = make(trainer={"checkpoints": tmp_path})
    run(first, max_steps=2)
    build = lambda **options: config(**options).build(CartPole(4))  # noqa: E731 - an instance: no file can name it
    with pytest.raises(CheckpointError, match=r"`lr` was 0.001 and is 0.5 .* pass overrides=\{'lr': 0.5\} to change"):
        again(tmp_path, algorithm=build(lr=0.5))
    again(tmp_path, algorithm=build(lr=0.5), overrides={"lr": 0.5})
    assert torch.equal(weights(again(tmp_path, algorithm=build(), eval_env=False)), weights(first))
    with pytest.raises(CheckpointError, match="DiscreteDummy"):
        again(tmp_path, algorithm=config().build(DiscreteDummy))
    for odd in (config(), PPOConfig, first, first.algorithm.policy, str(tmp_path)):
        with pytest.raises(CheckpointError, match=r"needs an algorithm like PPOConfig\(\).build\(CartPole\); got "):
            again(tmp_path, algorithm=odd)


def test_an_environment_that_was_given_with_other_arguments_is_made_so_by_later_checkpoints(tmp_path):
    tracker = MemoryTracker()
    run(make(trainer={"checkpoints": tmp_path, "tracker": tracker}), max_steps=1)
    run(Trainer.resume(tmp_path, algorithm=config().build(CartPole, time_limit=7), tracker=tracker), max_steps=2)
    assert tracker.params["env.time_limit"] == 7
    assert again(tmp_path).algorithm.env.time_limit == 7


def test_what_does_not_fit_is_one_line(tmp_path):
    run(make(trainer={"checkpoints": tmp_path / "ppo"}), max_steps=1)
    dqn = DQNConfig(**SMALL).build(CartPole)
    run(Trainer(dqn, tracker=NullTracker(), checkpoints=tmp_path / "dqn"), max_steps=1)
    sizes = r"the network 'policy' had \[8, 4\] for `\S+` in the run, and has \[16, 4\] here\."
    for folder, name, value, what in (
        ("ppo", "model_config", {"hidden_sizes": [16]}, sizes),
        ("dqn", "model_config", {"hidden_sizes": [16]}, sizes),
        ("ppo", "optimizer", "sgd", "the saved optimizer keeps"),
        ("ppo", "normalize_values", True, ""),
    ):
        advice = rf" Leave out of `overrides` what .* \('{name}', 'lr'\), or begin a new run$"
        with pytest.raises(CheckpointError, match=f"does not fit this trainer: .*{what}.*{advice}") as error:
            again(tmp_path / folder, overrides={name: value, "lr": 0.5})
        assert "\n" not in str(error.value)
        assert ".." not in str(error.value)


def test_an_evaluation_environment_that_was_given_must_be_given_again(tmp_path):
    run(make(trainer={"checkpoints": tmp_path, "eval_env": CartPole(3)}), max_steps=1)
    with pytest.raises(CheckpointError, match="pass `eval_env=`"):
        again(tmp_path)
    assert again(tmp_path, eval_env=CartPole(3)).evaluations.env.num_envs == 3


def test_callbacks_that_are_not_given_again_are_told_of_once_at_the_line_that_runs(tmp_path):
    def counts(trainer, stats):
        return {"mine/steps": stats[keys.STEPS]}

    counts.metric_names = ["mine/steps"]
    stops = {"stop_conditions": [HitsUpperBound("mine/steps", 9)], "progress": "none"}
    make(trainer={"checkpoints": tmp_path, "callbacks": [counts]}).run(max_steps=1, **stops)
    lost = r"the run had callbacks, \S*counts, which cannot be saved"
    with pytest.warns(RuntimeWarning, match=lost) as told, pytest.raises(ValueError, match="'mine/steps'"):
        again(tmp_path).run(max_steps=2)
    assert [warning.filename for warning in told] == [__file__]
    assert run(again(tmp_path, callbacks=[counts]), max_steps=2)["mine/steps"] == 2
    without = again(tmp_path)
    with pytest.warns(RuntimeWarning, match=lost):
        run(without, max_steps=3, stop_conditions=[])
    run(without, max_steps=1)


# -- conditions


class Above(Condition):
    """Met when a function of the row was above a limit so many times; a function cannot be saved."""

    def __init__(self, function, times=1):
        self.function, self.times, self.count = function, times, 0

    def judge(self, stats):
        self.count += self.function(stats) > 0
        return self.count >= self.times


class Exceeds:
    """A plain callable, known by its address."""

    def __call__(self, stats):
        return stats[keys.STEPS] > 0


@pytest.mark.parametrize(
    "condition",
    [
        lambda: Above(lambda stats: 1, times=5),
        lambda: as_condition(functools.partial(lambda n, stats: True, 3)) & Above(len, times=5),
        lambda: as_condition(Exceeds()) & Plateau("coefficients/vf", patience=4),
    ],
)
def test_what_has_no_form_in_a_file_is_given_again_and_goes_on_counting(condition, tmp_path):
    killed(tmp_path, 4, run_options={"stop_conditions": [condition()]})
    second = again(tmp_path)
    with pytest.raises(CheckpointError, match="was not saved: pass `stop_conditions` again"):
        run(second)
    assert run(second, stop_conditions=[condition()])[keys.STEPS] == 5
    assert " at 0x" not in str(second.params["run.stop_conditions"])  # another in each process, and on each rank
    # At its end it stays there, also with conditions that are others by their address alone.
    assert run(again(tmp_path), stop_conditions=[condition()])[keys.STEPS] == 5


@dataclasses.dataclass
class Rows(Condition):
    """Counts in a field, which is an argument of its constructor."""

    most: int
    count: int = 0

    def judge(self, stats):
        self.count += 1
        return self.count >= self.most


@pytest.mark.parametrize("given", [{}, {"stop_conditions": [Rows(6)]}])
def test_a_condition_that_counts_in_an_argument_goes_on_counting_and_has_ended_once(given, tmp_path):
    killed(tmp_path, 4, run_options={"stop_conditions": [Rows(6)]}, max_steps=20)
    for _ in range(2):
        assert run(again(tmp_path), **copy.deepcopy(given))[keys.STEPS] == 6


class Keeps(Condition):
    """Remembers what no checkpoint can hold, from a step on."""

    def __init__(self, since):
        self.since, self.rows = since, 0
        self.kept = None if since else {1, 2}

    def judge(self, stats):
        self.rows += 1
        self.kept = {1, 2} if self.rows >= self.since else None
        return False

    def arguments(self):
        return {"since": self.since}


def test_a_condition_that_cannot_be_saved_is_refused_before_a_run_that_saves(tmp_path):
    trainer = make(trainer={"checkpoints": tmp_path / "run"})
    message = r"^Keeps: its attribute `kept` holds a value of type set, .* write own_state\(\) and load_own_state\(\)"
    with pytest.raises(TypeError, match=message):
        run(trainer, stop_conditions=[~Keeps(0)], max_steps=1)
    assert (trainer.tracker.status, list(tmp_path.iterdir())) == (None, [])
    assert run(make(), stop_conditions=[Keeps(0)], max_steps=1)[keys.STEPS] == 1


def test_a_condition_that_cannot_be_saved_any_more_costs_checkpoints_and_no_run(tmp_path, caplog):
    trainer = make(trainer={"checkpoints": Checkpoints(tmp_path, every_steps=1)})
    assert run(trainer, stop_conditions=[Keeps(3)], max_steps=4)[keys.STEPS] == 4
    assert (trainer.tracker.status, saved_steps(tmp_path)) == ("FINISHED", [0, 1, 2])
    warned = [record.getMessage() for record in caplog.records if "no checkpoint" in record.getMessage()]
    assert [text.split(": ")[1] for text in warned] == ["no checkpoint at step 3", "no checkpoint at step 4"]


# -- where checkpoints go


def test_nothing_is_saved_unless_asked_where_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for tracker in (MemoryTracker(), NullTracker()):
        trainer = make(trainer={"tracker": tracker})
        run(trainer, max_steps=1)
        assert trainer.checkpoints.directory is trainer.save() is None
        assert trainer.ending == [f"run {tracker.run_id} is in memory"] * isinstance(tracker, MemoryTracker)
    assert list(tmp_path.iterdir()) == []
    trainer = make(trainer={"checkpoints": True})
    run(trainer, max_steps=1)
    assert trainer.checkpoints.directory.parent == tmp_path / "mlruns" / "checkpoints"
    assert (tmp_path / "mlruns" / ".gitignore").exists()


def test_what_a_callback_asks_to_be_saved_is_saved_after_the_step_and_the_run_goes_on_saving(tmp_path):
    answers, saves = [], Checkpoints(tmp_path, every_steps=4)
    asks = at_step(2, lambda trainer: answers.append(trainer.save()))
    trainer = make(trainer={"checkpoints": saves, "callbacks": [asks]})
    run(trainer, stop_conditions=[Plateau("coefficients/vf", patience=4)])
    assert (answers, saved_steps(tmp_path)) == ([None], [2, 4, 5])
    second = again(listed(tmp_path)[0])
    assert run(second)[keys.STEPS] == 5  # the condition has seen the second row
    assert second.save().name.endswith("step-5")


def test_a_relative_folder_stays_where_it_was_when_it_was_given(tmp_path, monkeypatch):
    given, elsewhere, third = (tmp_path / name for name in ("given", "elsewhere", "third"))
    for folder in (given, elsewhere, third):
        folder.mkdir()
    monkeypatch.chdir(given)
    options, moves = Checkpoints("options", every_steps=1), [lambda *_: os.chdir(third)]
    by_path = make(trainer={"checkpoints": "path", "callbacks": moves})
    monkeypatch.chdir(elsewhere)
    for trainer in (by_path, make(trainer={"checkpoints": options, "callbacks": moves})):
        monkeypatch.chdir(elsewhere)
        run(trainer, max_steps=2)
        folder = given / trainer.checkpoints.directory.name
        assert saved_steps(folder)[-1] == 2
        assert trainer.tracker.tags["rl8x.checkpoints"] == str(folder)
        assert trainer.ending[-1].startswith(f"to continue training: Trainer.resume({str(folder)!r}")
    monkeypatch.chdir(given)
    second = again("path", callbacks=[])
    monkeypatch.chdir(elsewhere)
    run(second, max_steps=3)
    assert saved_steps(given / "path")[-1] == 3
    assert list(elsewhere.iterdir()) == list(third.iterdir()) == []


def test_a_tilde_is_the_home_in_a_folder_that_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Checkpoints("~/run").directory == tmp_path / "run"
    assert Checkpoints("~nobody-of-this-name/run").directory.parent.name == "~nobody-of-this-name"


def test_a_folder_of_another_run_or_in_use_is_met_before_the_tracker_is_told_anything(tmp_path, monkeypatch):
    monkeypatch.setattr("rl8x.checkpoint.manager._BUSY_WAIT_S", 0.0)
    run(make(trainer={"checkpoints": tmp_path}), max_steps=1)
    other, waits = make(trainer={"checkpoints": tmp_path}), Trainer.resume(tmp_path, tracker=MemoryTracker())
    for trainer, message in ((other, "another run"), (waits, "in use by this process; wait for it or end it")):
        with FolderLock(tmp_path) if trainer is waits else contextlib.nullcontext():
            with pytest.raises(CheckpointError, match=message):
                run(trainer, max_steps=2)
            assert (trainer.tracker.run_id, trainer.tracker.status, trainer.ending) == (None, None, [])
    assert other.state[keys.STEPS] == 0
    assert run(waits, max_steps=2)["algorithm/steps"] == 2


def test_a_place_that_cannot_be_written_is_refused_before_the_tracked_run_begins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "mlruns").touch()
    (tmp_path / "link").symlink_to("nowhere/runs")
    (tmp_path / "folder").mkdir()
    apart = MLflowTracker(tracking_uri="sqlite:///folder", spool_dir="folder")
    for options, message in (
        ({"checkpoints": "file/run"}, "file/run cannot hold checkpoints .*file is no folder.: give another folder"),
        ({"checkpoints": "link"}, "link cannot hold checkpoints .*link is no folder.: give another"),
        ({"checkpoints": "link/run"}, "link/run cannot hold checkpoints .*link is no folder.: give"),
        ({"checkpoints": True}, "mlruns/checkpoints/.* cannot hold checkpoints"),
        ({"tracker": MLflowTracker()}, "runs cannot be kept in .*/mlruns .*mlruns is no folder.: change to a folder"),
        ({"tracker": MLflowTracker(tracking_uri="sqlite:///a.db")}, "runs cannot be kept in .*/mlruns/spool "),
        ({"tracker": apart, "checkpoints": False}, "runs cannot be kept in .*/folder, a folder: move it"),
        ({"tracker": MLflowTracker(tracking_uri="http://127.0.0.1:9")}, "mlruns/checkpoints cannot hold checkpoints"),
    ):
        trainer = make(trainer=options)
        for call in (trainer.check_run, functools.partial(run, trainer, max_steps=1)):
            with pytest.raises(ValueError, match=message):
                call()
        assert trainer.tracker.resume_handle is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "link", "mlruns"]


# -- random numbers, and simulators


def test_torchs_own_generator_is_restored(tmp_path):
    trainer = make(trainer={"checkpoints": tmp_path})
    torch.manual_seed(4)
    path = trainer.save()
    expected = torch.rand(3)
    torch.manual_seed(5)
    again(path)
    assert torch.equal(torch.rand(3), expected)


def as_on_cuda(part, name=""):
    """Return a trainer's state as a GPU would have had it: generators of 16 bytes, seed and offset."""
    if isinstance(part, dict):
        return {key: as_on_cuda(each, key) for key, each in part.items()}
    if name == "generator_device":
        return "cuda"
    return torch.tensor([7, *[0] * 15], dtype=torch.uint8) if name.endswith("generator") else part


@pytest.mark.parametrize("algorithm", [PPOConfig, DQNConfig])
def test_a_run_of_a_gpu_goes_on_where_there_is_none_with_other_random_numbers(algorithm, tmp_path, monkeypatch):
    replay = {"buffer_size": 100, "batch_size": 8, "warmup_steps": 0} if algorithm is DQNConfig else {}
    built = algorithm(**SMALL | {"device": "auto"}, **replay).build(CartPole)
    trainer = Trainer(built, tracker=NullTracker(), checkpoints=tmp_path)
    save, state_of = trainer.record.save, torch_generators
    monkeypatch.setattr(trainer.record, "save", lambda state, *rest, **more: save(as_on_cuda(state), *rest, **more))
    monkeypatch.setattr("rl8x.trainers.record.torch_generators", lambda device: {**state_of(device), "cuda": 0})
    run(trainer, max_steps=3, steps_per_eval=2)
    saved, ends = weights(trainer), []
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="was on 'cuda' and goes on on 'cpu', whose random numbers are others"):
            resumed = again(tmp_path, checkpoints=False)
        assert torch.equal(weights(resumed), saved)
        run(resumed, max_steps=6)
        ends.append(weights(resumed))
    assert torch.equal(*ends)
    assert not torch.equal(ends[0], saved)


def test_a_device_that_is_torchs_is_saved_as_its_name(tmp_path):
    first = make(trainer={"checkpoints": tmp_path}, device=torch.device("cpu"))
    assert first.algorithm.config == config(device="cpu")
    run(first, max_steps=1)
    assert again(tmp_path, overrides={"device": torch.device("cpu", 0)}).algorithm.config.device == "cpu:0"


def test_that_a_simulator_begins_anew_is_told_once_whose_evaluations_always_do(tmp_path):
    run(make(functools.partial(GymnasiumEnv, "CartPole-v1"), trainer={"checkpoints": tmp_path}), max_steps=1)
    with pytest.warns(RuntimeWarning, match="all copies start new episodes") as told:
        resumed = again(tmp_path)
    assert len(told) == 1
    run(resumed, max_steps=2)
    assert resumed.state[keys.ENV_STEPS] == 2 * 32


# -- where it is tracked

# Of the same name as rl8x's, and another's all the same.
THEIRS = type("MLflowTracker", (LinesTracker,), {"__module__": "their.tracking"})
OTHERS = {
    LinesTracker: r"kept by a LinesTracker \(lines.txt\), which is not rl8x's: pass `tracker=`",
    THEIRS: r"kept by a their.tracking.MLflowTracker \(lines.txt\), which is not rl8x's: pass `tracker=`",
    MemoryTracker: r"kept by a MemoryTracker, in memory that may be gone: pass `tracker=`",
}


@pytest.mark.parametrize("tracker", OTHERS)
def test_a_run_of_another_tracker_goes_into_no_store_unasked(tracker, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first = make(trainer={"tracker": tracker(), "checkpoints": "saved"})
    run(first, max_steps=2)
    with pytest.raises(CheckpointError, match=OTHERS[tracker]):
        Trainer.resume("saved")
    assert main(["resume", "saved"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert "in a script: Trainer.resume('saved', tracker=...)" in error
    assert not (tmp_path / "mlruns").exists()
    run(Trainer.resume("saved", tracker=first.tracker), max_steps=3)
    assert [step for step, _ in first.tracker.history("losses/total")] == [32, 64, 96]


def test_a_run_of_another_tracker_goes_into_mlflow_on_purpose(mlruns, mlflow_client):
    run(make(trainer={"tracker": LinesTracker(), "checkpoints": "saved"}), max_steps=2)
    elsewhere = Trainer.resume("saved", tracker=MLflowTracker())
    run(elsewhere, max_steps=4)
    assert mlflow_client.get_run(elsewhere.tracker.run_id).data.metrics[keys.STEPS] == 4


def test_a_run_that_goes_back_with_other_options_has_one_course_wherever_it_is_read(mlruns, mlflow_client):
    every = Checkpoints(every_steps=1, keep=9)
    first = make(trainer={"tracker": MLflowTracker(run_name="mine"), "checkpoints": every, "num_eval_envs": 2})
    run(first, max_steps=6, steps_per_eval=2)
    run_id, names = first.tracker.run_id, ["losses/total", "eval/returns/mean", "profiling/step_ms", "env/steps"]
    before = RunReader().histories([RunReader().run(run_id)], names)
    third = next(path for path in listed(first.checkpoints.directory) if path.name.endswith("step-3"))
    twin = Trainer.resume(third, overrides={"lr": 0.1}, tracker=MemoryTracker(), checkpoints=False)
    run(twin, max_steps=5)
    second = Trainer.resume(third, overrides={"lr": 0.1})
    run(second, max_steps=5)
    assert second.tracker.run_id == run_id

    def expected(name):
        old, new = before[name][run_id], twin.tracker.history(name)
        return [(step, value) for step, value in zip(*old, strict=True) if step <= 96] + new

    record = RunReader().run("mine")
    found = RunReader().histories([record], names)
    for name in ("losses/total", "eval/returns/mean", "env/steps"):
        assert list(zip(*found[name][run_id], strict=True)) == expected(name)
        assert record.metrics[name] == expected(name)[-1][1]
    assert found["profiling/step_ms"][run_id][0] == [32, 64, 96, 128, 160]

    # MLflow's page draws the same, with what was left beside it, and says so.
    def drawn(name):
        return sorted((point.step, point.value) for point in mlflow_client.get_metric_history(run_id, name))

    own = mlflow_client.get_run(run_id).data
    assert own.metrics == record.metrics
    assert own.metrics["best/eval/returns/mean"] == max(value for _, value in expected("eval/returns/mean"))
    assert drawn("losses/total") == expected("losses/total")
    assert drawn("left/losses/total") == [*zip(*before["losses/total"][run_id], strict=True)][3:]
    assert "points from step 128 on that are older are of a course" in own.tags["mlflow.note.content"]
    assert own.tags["mlflow.note.content"].count("Went back") == 1
