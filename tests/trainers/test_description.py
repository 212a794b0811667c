import functools

import gymnasium
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

from rl8x.algorithms import PPOConfig
from rl8x.conditions import Condition, HitsUpperBound
from rl8x.config import RunConfig, load_run_file
from rl8x.envs import CartPole, CartPoleInfinite, GymnasiumEnv
from rl8x.models import MLPModel
from rl8x.randomization import Uniform
from rl8x.tracking import MemoryTracker
from rl8x.trainers import Trainer
from rl8x.trainers.description import command

OPTIONS = {"num_envs": 4, "horizon": 4, "device": "cpu", "model_config": {"hidden_sizes": [8]}}


class Passing(gymnasium.Wrapper):
    pass


class Never(Condition):
    def arguments(self):
        return {}

    def judge(self, stats):
        return False


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
    assert trainer.tracker.description.split("\n\n") == [
        "**PPO on `CartPole`**: num_envs `4`, horizon `4`, seed `3`, device `cpu`, "
        "model_config `{'hidden_sizes': [8]}`, lr `0.01`",
        f"Stopped after 2 steps, 32 env steps: `max_steps=2`. Last evaluation: `eval/returns` {returns}.",
        "`/bin/train.py 'two words' --tracking-uri 'https://me:***@host'`",
        f"To go on with it: `rl8x resume {tmp_path}/kept`",
    ]
    assert "secret" not in trainer.tracker.tags["rl8x.command"]


def test_what_a_run_is_made_of_is_described_without_passwords(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--wandb-api-key", "abcdefgh", "--name=x"])
    assert command() == "train.py --wandb-api-key '***' --name=x"
    uri = f"postgresql://me:{'p4ss' * 200}@host/db"  # so long that a description cuts it

    def fail(trainer, stats):
        raise RuntimeError(uri)

    trainer = Trainer(PPOConfig(**OPTIONS).build(CartPole), tracker=MemoryTracker(), callbacks=[fail])
    with pytest.raises(RuntimeError):
        trainer.run(max_steps=1, progress="none")
    assert (
        trainer.stop_reason == trainer.tracker.tags["rl8x.stop_reason"] == "RuntimeError: postgresql://me:***@host/db"
    )
    assert "p4ss" not in trainer.tracker.description + trainer.tracker.texts["traceback.txt"]


def test_the_command_line_has_the_name_of_the_program(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/venv/bin/rl8x", "train", "CartPole", "--stop", "wall_time: 1m"])
    assert command() == "rl8x train CartPole --stop 'wall_time: 1m'"


def test_while_it_runs_a_run_is_described_without_an_end():
    seen = []
    trained(callbacks=[lambda trainer, stats: seen.append(trainer.tracker.description)])
    assert "**PPO on `CartPole`**" in seen[0]
    assert "topped" not in seen[0]


def test_what_a_failure_says_is_shown_as_it_is():
    def fail(trainer, stats):
        raise RuntimeError("a `b` ``c``\n# <img src=x> *d*" + "e" * 9000)

    tracker = MemoryTracker()
    with pytest.raises(RuntimeError):
        Trainer(PPOConfig(**OPTIONS).build(CartPole), tracker=tracker, callbacks=[fail]).run(progress="none")
    (line,) = [line for line in tracker.description.split("\n\n") if line.startswith("Failed")]
    assert line.startswith("Failed after 1 steps, 16 env steps: ```RuntimeError: a `b` ``c`` # <img src=x> *d*eee")
    assert line.endswith("e ...```.")
    assert len(tracker.description) < 3000


# -- as a run file


def again(tmp_path, monkeypatch, trainer):
    path = tmp_path / "run.yaml"
    path.write_text(trainer.tracker.texts["run.yaml"])
    run = RunConfig.from_dict(load_run_file(path) | {"progress": "none"})
    monkeypatch.setattr(RunConfig, "make_tracker", lambda _: MemoryTracker())
    copy = run.make_trainer()
    run.train(copy)
    return copy


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
def test_the_run_file_of_a_run_in_python_makes_the_same_run(tmp_path, monkeypatch, options):
    trainer = trained(**options | {"algorithm": {"seed": 1} | options.get("algorithm", {})})
    copy = again(tmp_path, monkeypatch, trainer)
    assert copy.algorithm.env.config == trainer.algorithm.env.config
    assert copy.tracker.params == trainer.tracker.params
    returns = trainer.tracker.history("returns/mean")
    assert copy.tracker.history("returns/mean") == returns
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


def test_what_only_a_script_has_is_in_no_file(monkeypatch):
    monkeypatch.setattr(Never, "__module__", "__main__")
    monkeypatch.setattr("__main__.Never", Never, raising=False)
    assert trained(run={"max_steps": 2, "stop_conditions": [Never()]}).tracker.texts == {}
