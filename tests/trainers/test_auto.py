"""`execution="auto"` on the CPU: eager up to a step that the configuration decides, compiled from then on."""

import contextlib
import math
import os
import signal
import warnings
from types import SimpleNamespace

import pytest
import torch
from tests.probes import traced_only, weights_of
from tests.trainers.helpers import run, saved_steps

from rl8x import HitsUpperBound, MemoryTracker, NullTracker, PPOConfig, Trainer, WallTime, keys
from rl8x.checkpoint import Checkpoints, listed, read
from rl8x.envs import CartPole
from rl8x.execution import Execution
from rl8x.execution.compiler import CompiledProgram, Compiler

SMALL = {"num_envs": 8, "horizon": 8, "sgd_minibatch_size": 32, "num_sgd_iters": 2, "seed": 3, "device": "cpu"}
SMALL |= {"model_config": {"hidden_sizes": [32, 32]}, "max_grad_norm": 0.1}


def build(execution="auto", **options):
    return PPOConfig.rl8(**{**SMALL, "execution": execution, **options}).build(CartPole, time_limit=20)


def make(algorithm, **options):
    return Trainer(algorithm, **{"tracker": NullTracker(), "checkpoints": False, "eval_env": False} | options)


@pytest.fixture
def changes_at_3(monkeypatch):
    """Let `auto` change at step 3 of runs whose end is known, to programs that differ from eager ones in their bits."""
    traced_only(monkeypatch)
    monkeypatch.setattr(CompiledProgram, "_compile", slightly_off)
    for name, seconds in (("_CHANGE_SECONDS", 3.0), ("_CHANGE_SECONDS_UNKNOWN", 6.0), ("_WORTH_SECONDS", 9.0)):
        monkeypatch.setattr(f"rl8x.execution.execution.{name}", seconds)
    monkeypatch.setattr("rl8x.algorithms.ppo.PPO.seconds_per_step", 1.0)


def slightly_off(self, tensors):
    interpreted = self._interpret(tensors)

    def run(*given):
        results = interpreted(*given)
        next(each for each in given if each.is_floating_point()).mul_(1.0 + 1e-6)
        return results

    return run


def trained(algorithm, steps, **options):
    run(make(algorithm), max_steps=steps, **options)
    return weights_of(algorithm)


# -- the plan


@pytest.mark.parametrize(
    ("seconds_per_step", "steps", "expected"),
    [
        (0.125, 1000, ("compile", 4)),
        (0.125, 144, ("compile", 4)),
        (0.125, 143, ("eager", 0)),  # too short to earn it
        (100.0, 3, ("compile", 1)),
        (0.125, math.inf, ("compile", 96)),  # nothing is known to come
    ],
)
def test_the_step_follows_from_the_work_and_the_length_of_a_run_alone(seconds_per_step, steps, expected):
    execution = Execution("auto", "fp32", torch.device("cpu"))
    execution.plan(seconds_per_step, steps)
    assert (execution.target, execution.starts_at) == expected


# -- the change


@pytest.mark.usefixtures("changes_at_3")
def test_it_is_eager_to_the_bit_before_and_compiled_to_the_bit_after():
    eager, compiled = build("eager"), build("compile")
    assert torch.equal(trained(build(), 3, stop_conditions=HitsUpperBound(keys.ENV_STEPS, 9 * 64)), trained(eager, 3))
    compiled.load_state_dict(eager.state_dict())
    auto = build()
    assert torch.equal(trained(auto, 9), trained(compiled, 6))
    assert auto.execution.mode == "compile"
    assert not torch.equal(weights_of(auto), trained(build("eager"), 9))


@pytest.mark.usefixtures("changes_at_3")
def test_verdicts_on_programs_are_kept_in_checkpoints_and_the_tag_names_what_was_refused(tmp_path):
    tracker, first = MemoryTracker(), build("compile")
    first.execution.verdicts |= {"a": "update: result 0 is off by 1 of its size", "b": ""}
    run(make(first, tracker=tracker, checkpoints=tmp_path), max_steps=1)
    assert tracker.tags["rl8x.execution"] == "compile, eager: update"
    second = Trainer.resume(tmp_path, tracker=NullTracker(), algorithm=build("compile"))
    assert second.algorithm.execution.verdicts == first.execution.verdicts


@pytest.mark.usefixtures("changes_at_3")
@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        (5, {"max_steps": 14}, 5),  # was too short to earn it, and is past the step of the longer plan
        (2, {"max_steps": 14}, 3),
        (9, {"max_steps": 12}, 3),  # compiled already
        (9, {"max_steps": None, "stop_conditions": [lambda row: row[keys.STEPS] >= 11]}, 3),
    ],
)
def test_a_resume_with_another_end_says_at_which_step_it_really_changed(before, after, changed, tmp_path):
    tracker, modes = MemoryTracker(), []
    run(make(build(), tracker=tracker, checkpoints=tmp_path), max_steps=before)
    assert tracker.params.get("execution.compiled_from") == (3 if before == 9 else None)
    note = [lambda trainer, _: modes.append(trainer.algorithm.execution.mode)]
    second = Trainer.resume(tmp_path, tracker=tracker, algorithm=build(), callbacks=note)
    run(second, **after)
    assert tracker.params["execution.compiled_from"] == changed
    assert modes == ["eager" if step < changed else "compile" for step in range(before, second.state[keys.STEPS])]


@pytest.mark.usefixtures("changes_at_3")
def test_programs_are_prepared_while_it_is_eager_and_called_after(monkeypatch):
    events, steps, compile_ = [], [], CompiledProgram._compile

    def compiles(program, given):
        events.append(("compile", program.check.name))
        return compile_(program, given)

    monkeypatch.setattr(CompiledProgram, "prepare", lambda self, *_: events.append(("prepare", self.check.name)))
    monkeypatch.setattr(CompiledProgram, "_compile", compiles)
    notes = [lambda trainer, stats: steps.append(list(events))]
    run(make(build(), callbacks=notes, eval_env="auto"), max_steps=9, steps_per_eval=2)
    kinds = [[kind for kind, _ in each] for each in steps]
    assert kinds[0] == ["prepare", "prepare"]  # the horizon and the updates
    assert kinds[1] == ["prepare"] * 3  # the evaluation's step
    assert kinds[2] == ["prepare"] * 3
    prepared, compiled = ({name for kind, name in events if kind == wanted} for wanted in ("prepare", "compile"))
    assert prepared == compiled


@pytest.mark.usefixtures("changes_at_3")
@pytest.mark.parametrize("when", ["prepare", "_compile"])
def test_what_cannot_be_compiled_stays_eager_with_one_warning(when, monkeypatch):
    def refuse(*_):
        raise OSError("no compiler found")

    if when == "prepare":
        monkeypatch.undo()
        monkeypatch.setattr("rl8x.execution.execution._WORTH_SECONDS", 9.0)
        monkeypatch.setattr("rl8x.algorithms.ppo.PPO.seconds_per_step", 1.0)
        monkeypatch.setattr("rl8x.execution.compiler.trace", refuse)
    else:
        monkeypatch.setattr(CompiledProgram, "_compile", refuse)
    tracker, algorithm = MemoryTracker(), build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(make(algorithm, tracker=tracker), max_steps=9)
    told = [str(each.message) for each in caught if issubclass(each.category, RuntimeWarning)]
    assert len(told) == 1, told
    assert told[0].startswith("execution='compile' is not possible")
    assert "no compiler found. execution='eager' always is. Running eagerly." in told[0]
    assert tracker.tags["rl8x.execution"] == "eager"
    assert torch.equal(weights_of(algorithm), trained(build("eager"), 9))


# -- the wait for programs, and doing without


class SlowCompiler:
    """Has nothing to show for so many looks; what happens meanwhile is done in the second."""

    def __init__(self, monkeypatch, looks, meanwhile=lambda: None):
        self.left, self.meanwhile, self.waited = looks, meanwhile, []
        monkeypatch.setattr(Compiler, "num_missing", lambda _, seconds=0.0: self.missing(seconds))

    def missing(self, seconds):
        self.waited.append(seconds)
        self.left -= 1
        if len(self.waited) == 2:
            self.meanwhile()
        return max(self.left, 0)


def waiting(folder, **options):
    saves = Checkpoints(folder, every_steps=100)
    return make(build(**options), tracker=MemoryTracker(), checkpoints=saves)


@pytest.mark.usefixtures("changes_at_3")
def test_what_is_missing_at_the_step_is_waited_for_after_a_checkpoint_and_said(monkeypatch, tmp_path, capsys):
    found = []
    slow = SlowCompiler(monkeypatch, 4, lambda: found.extend(saved_steps(tmp_path)))
    trainer = waiting(tmp_path)
    trainer.run(max_steps=9, progress="lines")
    assert found == [0, 3]
    assert slow.waited == [0.0, 0.2, 0.2, 0.2]
    assert "step 4 waits for 3 programs of the compiler; later runs like this one find" in capsys.readouterr().err
    assert trainer.params["execution.compiled_from"] == 3
    assert torch.equal(weights_of(trainer.algorithm), trained(build(), 9))


def let_time_pass(trainer):
    WallTime._passed += 3600.0


ENDS = {
    "signal": (lambda trainer: os.kill(os.getpid(), signal.SIGTERM), "interrupted by SIGTERM", "KILLED"),
    "stop": (lambda trainer: trainer.stop("enough"), "enough", "FINISHED"),
    "wall_time": (let_time_pass, "Or(WallTime('50m'), HitsUpperBound('env/steps', 900))", "FINISHED"),
}


@pytest.mark.usefixtures("changes_at_3")
@pytest.mark.parametrize("how", ENDS)
def test_a_run_ends_while_it_waits_and_has_its_checkpoint(how, monkeypatch, tmp_path):
    act, reason, status = ENDS[how]
    monkeypatch.setattr(WallTime, "_passed", 0.0, raising=False)
    monkeypatch.setattr("rl8x.conditions.kinds.time", SimpleNamespace(monotonic=lambda: WallTime._passed))
    trainer = waiting(tmp_path)
    SlowCompiler(monkeypatch, 10**6, lambda: act(trainer))
    stops = [WallTime("50m") | HitsUpperBound(keys.ENV_STEPS, 900)]
    with pytest.raises(SystemExit) if how == "signal" else contextlib.nullcontext():
        assert run(trainer, max_steps=9, stop_conditions=stops).stop_reason.startswith(reason)
    assert trainer.stop_reason.startswith(reason)
    assert (trainer.state[keys.STEPS], trainer.tracker.status) == (3, status)
    assert read(listed(tmp_path)[-1]).metadata["status"] == status
    assert saved_steps(tmp_path)[-1] == 3


@pytest.mark.usefixtures("changes_at_3")
def test_without_a_seed_it_changes_once_the_programs_are_there_and_never_waits(monkeypatch, tmp_path):
    slow, trainer, seen = SlowCompiler(monkeypatch, 5), waiting(tmp_path, seed=None), []
    assert trainer.params["execution"] == "auto"

    def note(trainer, _):
        found = trainer.algorithm.execution.mode, trainer.tracker.params.get("execution.compiled_from")
        seen.append(found)

    trainer.callbacks = (note,)
    run(trainer, max_steps=9)
    assert seen == [("eager", None)] * 5 + [("compile", 5)] * 4
    assert slow.waited == [0.0] * 5
    assert saved_steps(tmp_path) == [0, 5, 9]
    (path,) = [path for path in listed(tmp_path) if path.name.endswith("-step-5")]
    SlowCompiler(monkeypatch, 3)  # now it waits: the step is known
    rest = Trainer.resume(path, tracker=MemoryTracker(), checkpoints=False, callbacks=[note])
    assert rest.params["execution.compiled_from"] == 5
    run(rest)
    assert rest.algorithm.execution.mode == "compile"
    assert torch.equal(weights_of(rest.algorithm), weights_of(trainer.algorithm))
    slow = SlowCompiler(monkeypatch, 100)
    first = Trainer.resume(listed(tmp_path)[0], tracker=MemoryTracker(), checkpoints=False, callbacks=[note])
    run(first)
    assert slow.waited == [0.0] * 8
