import functools
import math
import re
import shlex

import gymnasium
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv

from rl8x import HitsUpperBound, MemoryTracker, MLflowTracker, PPOConfig, Trainer
from rl8x.cli.main import main
from rl8x.config import RunSpec, load_run_file
from rl8x.envs import CartPole, CartPoleInfinite, GymnasiumEnv
from rl8x.envs.parameters import plain
from rl8x.models import MLPModel
from rl8x.randomization import Uniform
from rl8x.trainers.record import command

OPTIONS = {"num_envs": 4, "horizon": 4, "device": "cpu", "model_config": {"hidden_sizes": [8]}}


class Passing(gymnasium.Wrapper):
    pass


def trained(env=CartPole, *, algorithm=None, run=None, env_kwargs=None, **options):
    built = PPOConfig(**OPTIONS | (algorithm or {})).build(env, **(env_kwargs or {}))
    trainer = Trainer(built, tracker=MemoryTracker(), **options)
    trainer.run(**{"max_steps": 2, "progress": "none"} | (run or {}))
    return trainer


# -- in words


def test_a_description_says_what_ran_how_it_ended_and_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/bin/train.py", "two words", "--tracking-uri", "https://me:secret@host"])
    monkeypatch.chdir(tmp_path)
    trainer = trained(algorithm={"seed": 3, "lr": 0.01}, run={"steps_per_eval": 1}, num_eval_envs=2, checkpoints="kept")
    mean, std = (trainer.tracker.history(f"eval/returns/{name}")[-1][1] for name in ("mean", "std"))
    returns = f"{mean:.4g} ± {std:.3g}"
    step, best = max(trainer.tracker.history("eval/returns/mean"), key=lambda point: (point[1], -point[0]))
    assert trainer.tracker.description.split("\n\n") == [
        f"Best `eval/returns/mean`: {best:.4g}, at {step} transitions. Last evaluation: `eval/returns` {returns}. "
        "Stopped after 2 steps, 32 transitions: `max_steps=2`.",
        "**PPO on `CartPole`**, model `mlp`: num_envs `4`, horizon `4`, seed `3`, device `cpu`, "
        "model_config `{'hidden_sizes': [8]}`, lr `0.01`, sgd_minibatch_size `16`",
        "Until `max_steps=2`; evaluated after every step.",
        "Command: `/bin/train.py 'two words' --tracking-uri 'https://me:***@host'`",
        f"To continue training: `Trainer.resume('{tmp_path}/kept', tracker=...).run(max_steps=N)`",
        f"To take its policy elsewhere: `rl8x export {tmp_path}/kept --format pt2`",
        f"To watch it play: `rl8x play {tmp_path}/kept`",
    ]
    assert "secret" not in trainer.tracker.tags["rl8x.command"]


class Undefined(CartPole):
    """Rewards are NaN on the poles that it is evaluated with."""

    def transition(self, state, actions, parameters, noise):
        following, rewards, terminated = super().transition(state, actions, parameters, noise)
        return following, torch.where(parameters["length"] == 1.0, math.nan, rewards), terminated


def test_a_description_says_when_a_run_stops_and_what_it_trains_under(tmp_path):
    solved = HitsUpperBound("eval/returns/mean", 1e9)
    run = {"steps_per_eval": 2, "max_steps": 3, "stop_conditions": [solved, lambda row: False]}
    configs = {"env_config": {"length": Uniform(0.25, 1.0)}, "eval_env_config": {"gravity": 5.0, "length": 1.0}}
    note = trained(run=run | configs, num_eval_envs=2).tracker.description.split("\n\n")
    assert note[2].startswith("Until `HitsUpperBound('eval/returns/mean', 1000000000.0)` or `test_a_description")
    end = (
        "evaluated after every 2 steps; under `length=Uniform(0.25, 1.0)`; evaluated under `gravity=5.0`, `length=1.0`."
    )
    assert note[2].endswith(f"or `max_steps=3`; {end}")
    assert "Last evaluation, at 32 of 48 transitions: `eval/returns` " in note[0]
    assert not [line for line in note if line.startswith("To ")]  # it is not saved
    nowhere = trained(env=Undefined, run=run | configs | {"max_steps": 5}).tracker.description
    assert "Last evaluation, at 64 of 80 transitions: `eval/returns` nan ± nan. " in nowhere

    steered = trained(run={"env_config": narrower}).tracker.description.split("\n\n")
    assert "Until `max_steps=2`; under the function `tests.trainers.test_description.narrower`." in steered


def test_steps_by_hand_after_a_run_do_not_go_by_its_plan():
    trainer = trained(run={"steps_per_eval": 1, "eval_env_config": {"length": 1.0}}, num_eval_envs=2)
    assert "Until `max_steps=2`" in trainer.tracker.description
    trainer.step()
    trainer.close()
    assert not [line for line in trainer.tracker.description.split("\n\n") if "max_steps" in line or "every" in line]
    params = trainer.tracker.params
    assert (params["run.max_steps"], params["run.steps_per_eval"]) == (None, None)
    assert params["eval_env_config.length"] == 1.0  # which evaluations by hand are made under, too
    trainer.run(max_steps=1, progress="none")
    assert "Until `max_steps=1`." in trainer.tracker.description
    assert trainer.tracker.params["run.max_steps"] == 1


def test_evaluations_by_hand_after_a_resume_say_what_they_are_made_under(tmp_path):
    trained(run={"eval_env_config": {"length": 1.0}}, num_eval_envs=2, checkpoints=tmp_path)
    trainer = Trainer.resume(tmp_path, tracker=MemoryTracker())
    trainer.step()
    assert plain(trainer.evaluations.env_config)["length"] == trainer.tracker.params["eval_env_config.length"] == 1.0


def narrower(known):
    return {"length": 0.5}


@pytest.mark.parametrize(
    ("run", "call"),
    [
        ({"max_steps": 1}, "rl8x resume {} --max-steps N"),
        ({"stop_conditions": [HitsUpperBound("env/steps", 16)]}, "rl8x resume {} --stop CONDITION"),
        ({"max_steps": 1, "env_config": narrower}, "Trainer.resume({}).run(max_steps=N, env_config=...)"),
    ],
)
def test_the_commands_in_a_description_are_those_that_work(mlflow_client, tmp_path, run, call):
    seen = []
    tracker = MLflowTracker()
    tracker.describe = lambda text, folder: seen.append(text.split("\n\n"))
    folder = str(tmp_path / "a folder")
    Trainer(PPOConfig(**OPTIONS).build(CartPole), tracker=tracker, checkpoints=folder).run(progress="none", **run)
    started, ended = seen
    call = call.format(f"'{folder}'")
    assert ended[-3:] == [
        f"To continue training: `{call}`",
        f"To take its policy elsewhere: `rl8x export '{folder}' --format pt2`",
        f"To watch it play: `rl8x play '{folder}'`",
    ]
    begun = call.replace("max_steps=N, ", "").replace(" --max-steps N", "").replace(" --stop CONDITION", "")
    assert started[-3] == f"To continue it: `{begun}`"
    if call.startswith("rl8x"):
        words = shlex.split(call.replace("--max-steps N", "--max-steps 2").replace("CONDITION", "'env/steps >= 40'"))
        assert main([*words[1:], "--progress", "none"]) == 0


def test_tags_tell_runs_apart():
    trainer = trained(run={"steps_per_eval": 1}, num_eval_envs=2)
    values = [value for _, value in trainer.tracker.history("eval/returns/mean")]
    labels = {name: trainer.tracker.tags[f"rl8x.{name}"] for name in ("task", "algorithm", "model", "result")}
    assert labels == {
        "task": "CartPole",
        "algorithm": "PPO",
        "model": "mlp",
        "result": f"{values[-1]:.4g}, best {max(values):.4g} (eval/returns)",
    }
    other = trained(functools.partial(GymnasiumEnv, "CartPole-v1"), algorithm={"model": Wide}).tracker.tags
    assert [other["rl8x.task"], other["rl8x.model"]] == ["CartPole-v1", "Wide"]


class Wide(MLPModel):
    pass


def made(num_envs, **options):
    return CartPole(num_envs, **options)


@pytest.mark.parametrize(
    ("env", "options", "export", "play"),
    [
        (lambda num_envs, **options: CartPole(num_envs, **options), {}, "", " --env ENV"),
        (CartPole(4), {"eval_env": True}, "", " --env ENV"),
        (CartPole(4), {"eval_env": "CartPole"}, "", ""),
        (made, {}, "", " --trust"),
        (CartPole, {"algorithm": {"model": Wide}}, " --trust", " --trust"),  # a user's code
        (functools.partial(GymnasiumEnv, CartPoleEnv), {}, "", ""),
    ],
)
def test_commands_take_what_the_checkpoint_says_of_an_environment(env, options, export, play, tmp_path):
    """Its policy needs none; an environment that it does not describe is to be filled in."""
    note = trained(env, checkpoints=tmp_path, **options).tracker.description.split("\n\n")
    assert note[-2:] == [
        f"To take its policy elsewhere: `rl8x export {tmp_path}{export} --format pt2`",
        f"To watch it play: `rl8x play {tmp_path}{play}`",
    ]


def test_a_call_that_finds_a_function_says_that_it_is_trusted(tmp_path):
    trainer = trained(made, checkpoints=tmp_path, callbacks=[lambda trainer, row: None])
    assert "tracker=..., callbacks=[...], trust=True)" in trainer.ending[-1]


def failed(text):
    def fail(trainer, stats):
        raise RuntimeError(text)

    trainer = Trainer(PPOConfig(**OPTIONS).build(CartPole), tracker=MemoryTracker(), callbacks=[fail])
    with pytest.raises(RuntimeError):
        trainer.run(max_steps=1, progress="none")
    return trainer


def test_what_a_run_is_made_of_is_described_without_passwords(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--wandb-api-key", "abcdefgh", "--name=x"])
    assert command() == "train.py --wandb-api-key '***' --name=x"
    trainer = failed(f"postgresql://me:{'p4ss' * 200}@host/db")  # so long that a description cuts it
    assert trainer.stop_reason == "RuntimeError: postgresql://me:***@host/db"
    assert trainer.tracker.tags["rl8x.stop_reason"] == trainer.stop_reason
    assert "p4ss" not in trainer.tracker.description + trainer.tracker.texts["traceback.txt"]


def test_what_a_failure_says_is_shown_as_it_is():
    description = failed("a `b` ``c``\n# <img src=x> *d*" + "e" * 9000).tracker.description
    (line,) = [line for line in description.split("\n\n") if line.startswith("Failed")]
    assert line.startswith("Failed after 1 step, 16 transitions: ```RuntimeError: a `b` ``c`` # <img src=x> *d*eee")
    assert re.search(r"e \.\.\.```\. Best `returns/mean`: \d+, at 16 transitions\.$", line)
    assert len(description) < 3000


@pytest.mark.parametrize("program", ["/venv/bin/rl8x", "/venv/rl8x/__main__.py", "/venv/rl8x/cli/main.py"])
def test_the_command_line_has_the_name_of_the_program(program, monkeypatch):
    monkeypatch.setattr("sys.argv", [program, "train", "CartPole", "--stop", "wall_time: 1m"])
    assert command() == "rl8x train CartPole --stop 'wall_time: 1m'"


# -- as a run file


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": {"lr_schedule": [[0, 1e-3], [64, 1e-4]], "model": "lstm", "model_config": {"hidden_size": 8}}},
        {"env_kwargs": {"time_limit": 3}, "num_eval_envs": 2, "run": {"steps_per_eval": 1}},
        {"env": CartPoleInfinite, "run": {"env_config": {"length": Uniform(0.25, 1.0)}, "max_steps": 3}},
        {"env": functools.partial(GymnasiumEnv, "CartPole-v1"), "algorithm": {"model": MLPModel}, "eval_env": False},
        {"env": functools.partial(GymnasiumEnv, CartPoleEnv), "env_kwargs": {"time_limit": 9}, "eval_env": False},
        {"env": "CartPole-v1", "env_kwargs": {"wrappers": [Passing]}, "eval_env": False},
        {"run": {"stop_conditions": [HitsUpperBound("env/steps", 48) | HitsUpperBound("returns/mean", 1e9)]}},
    ],
)
def test_the_run_file_of_a_run_in_python_makes_the_same_run(tmp_path, options):
    trainer = trained(**options | {"algorithm": {"seed": 1} | options.get("algorithm", {})})
    path = tmp_path / "run.yaml"
    path.write_text(trainer.tracker.texts["run.yaml"])
    spec = RunSpec.from_plain(load_run_file(path) | {"progress": "none"})
    again = Trainer.from_spec(spec, tracker=MemoryTracker())
    again.run()
    assert again.algorithm.env.config == trainer.algorithm.env.config
    assert again.tracker.params == trainer.tracker.params
    returns = trainer.tracker.history("returns/mean")
    assert again.tracker.history("returns/mean") == returns
    assert len(returns) > 1


@pytest.mark.parametrize(
    "options",
    [
        {"callbacks": [lambda trainer, stats: None]},
        {"run": {"max_steps": 2, "stop_conditions": [lambda stats: False]}},
        {"env": lambda num_envs, **kwargs: CartPole(num_envs, **kwargs)},
        {"eval_env": CartPole},
    ],
)
def test_what_no_file_can_say_has_none(options):
    assert trained(**options).tracker.texts == {}
