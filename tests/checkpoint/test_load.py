"""Runs are found by whatever they are called; policies leave a run whatever made its environment."""

import functools
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.combinations.tasks import Simulator, Walk

from rl8x import NullTracker, PPOConfig, Trainer, distill, load_algorithm, trusted
from rl8x.algorithms import BCConfig, DistillationConfig, DQNConfig, IQLConfig, PQNConfig, SACConfig, TD3Config
from rl8x.checkpoint import CheckpointError, find, load_policy
from rl8x.checkpoint.load import problems_of
from rl8x.cli.main import main
from rl8x.config.describe import run_spec
from rl8x.envs import CartPole, Env, GymnasiumEnv, env_maker
from rl8x.models.mlp import MLPModel
from rl8x.policy import Policy
from rl8x.replay.recording import record
from rl8x.studies.compare import compare
from rl8x.studies.report import find_study
from rl8x.tracking import find_run

WORDS = ["--num-envs", "4", "--horizon", "8", "--device", "cpu", "--seed", "1", "--max-steps", "1"]
WORDS += ["algorithm_config.model_config.hidden_sizes=[8]", "--execution", "eager"]
NAMES = ["ppo/seed0", "/ppo/seed0", "ppo//seed0/", "../seed0", "..", ".hidden", "a folder", "a folder/of mine"]
NAMES += ["mlruns", "it's", 'say "hi"', "end\\", "100%_x%20y", "Łódź/√2", "lr=0.1"]
NAMES += ["0123456789abcdef0123456789abcdef", "run.safetensors", "x" * 300]
ODDEST = [".hidden", "a folder/of mine", """both ' and \""""]
NAMES += ODDEST[2:]


@pytest.fixture
def stored(mlruns, mlflow_client):
    """A run, by its ID, and what gives it another name."""
    assert main(["train", "CartPole", *WORDS, "--progress", "none"]) == 0
    (run,) = mlflow_client.search_runs([each.experiment_id for each in mlflow_client.search_experiments()])
    return run.info.run_id, lambda name: mlflow_client.update_run(run.info.run_id, name=name)


def test_a_run_of_any_name_is_found_by_it(stored, tmp_path, mlflow_client):
    run_id, rename = stored
    (tmp_path / "a folder/of mine").mkdir(parents=True)
    (folder,) = (tmp_path / "mlruns/checkpoints").iterdir()
    for name in NAMES:
        rename(name)
        assert mlflow_client.get_run(run_id).info.run_name == name
        assert find(name).path.parent == folder, name
        assert find_run(name).info.run_id == run_id
        if name in ODDEST:
            assert [run.id for run in compare(name).runs] == [run_id], name
            with pytest.raises(ValueError, match=r"has no artifact evaluations\.json"):  # it is found, and no study
                find_study(name)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("nothing", "there is no run 'nothing' in "),
        ("no/such", "there is no checkpoint no/such, and there is no run 'no/such' in "),
        ("here", "there is no checkpoint in here, and there is no run 'here' in "),
        (Path("here"), "there is no checkpoint in here, and "),
    ],
)
def test_what_is_neither_a_path_nor_a_name_is_said(source, says, mlruns):
    Path("here").mkdir()
    with pytest.raises(CheckpointError, match=says):
        find(source)


SMALL = {"num_envs": 4, "device": "cpu", "seed": 0, "execution": "eager"}
ROLLOUT = SMALL | {"horizon": 4}
REPLAY = SMALL | {"buffer_size": 64, "warmup_steps": 0, "batch_size": 4}
MLP = {"model_config": {"hidden_sizes": [4]}}


def task(observations="vector", actions="discrete from 5", **options):
    """A factory that no file can name."""
    make = functools.partial(Walk, observations=observations, actions=actions)
    return env_maker(lambda num_envs, **given: make(num_envs, **given), options)


def student():
    env = Walk(4, observations="vector", actions="discrete from 5")
    teacher = Policy(
        env.single_observation_space, env.single_action_space, model=MLPModel(env.single_observation_space, 3)
    )
    return DistillationConfig(**ROLLOUT, **MLP, teacher=teacher).build(task())


class Own(Policy):
    """A policy whose making only its algorithm knows."""


RUNS = {
    "a lambda": lambda: PPOConfig(**ROLLOUT, **MLP).build(task()),
    "an instance": lambda: PPOConfig(**ROLLOUT, **MLP).build(Walk(4, observations="number", actions="bounded")),
    "normalisers": lambda: PPOConfig(**ROLLOUT, **MLP, normalize_observations=True, normalize_values=True).build(
        task()
    ),
    "a memory": lambda: PPOConfig(**ROLLOUT, model="gru", seq_len=2).build(task("dict", "unbounded")),
    "a mask": lambda: PPOConfig(**ROLLOUT, **MLP).build(task("nested", "multi-discrete", masked=True)),
    "an image": lambda: PPOConfig(**ROLLOUT).build(task("dict with an image", "nested")),
    "a critic that sees more": lambda: PPOConfig(**ROLLOUT, **MLP).build(task(observe_parameters="critic")),
    "a simulator": lambda: PPOConfig(**ROLLOUT, **MLP).build(
        functools.partial(GymnasiumEnv, lambda: Simulator("discrete", "dict", limit=99), vectorization="sync")
    ),
    "pqn": lambda: PQNConfig(**ROLLOUT, **MLP, sgd_minibatch_size=4).build(task()),
    "c51": lambda: DQNConfig(**REPLAY, **MLP, num_atoms=5, v_min=-5.0, v_max=5.0).build(task(masked=True)),
    "sac": lambda: SACConfig(**REPLAY, **MLP, normalize_observations=True).build(
        task("dict", "bounded", observe_parameters="critic")
    ),
    "td3": lambda: TD3Config(**REPLAY, **MLP).build(task(actions="bounded")),
    "a student": student,
    "iql": lambda: IQLConfig(device="cpu", seed=0, batch_size=4, dataset=data("unbounded"), **MLP).build(),
    "bc": lambda: BCConfig(device="cpu", seed=0, batch_size=4, dataset=data("discrete from 5"), **MLP).build(),
}


def data(actions):
    return record(None, task(actions=actions)(4, seed=0), 32).dataset


def train(algorithm, folder, **options):
    trainer = Trainer(algorithm, tracker=NullTracker(), checkpoints=folder, **{"eval_env": False, **options})
    trainer.run(max_steps=2, progress="none")
    return trainer


TRACED = ("a memory", "c51", "sac", "td3")  # of which each has parts that the others have not
ACT = ("a lambda", "an instance", "a memory", "a critic that sees more", "sac", "bc")


@pytest.mark.parametrize("name", RUNS)
def test_the_policy_of_any_run_is_exported_as_it_was_trained_and_needs_no_environment(
    name, tmp_path, monkeypatch, capsys
):
    def made(*_, **__):
        raise AssertionError("an environment was made")

    monkeypatch.chdir(tmp_path)
    trained = train(RUNS[name](), "run").algorithm
    checkpoint = find("run")
    assert problems_of(checkpoint.spec, checkpoint.metadata["resolved"]) != []
    with monkeypatch.context() as patch:
        patch.setattr(Env, "__init__", made)
        assert main(["export", "run"]) == 0, capsys.readouterr().err
        content = trained.policy.save(tmp_path / "saved").read_bytes()
        assert (tmp_path / "policy.safetensors").read_bytes() == load_policy("run").to_bytes() == content
        assert name not in TRACED or main(["export", "run", "--format", "pt2"]) == 0
    if name not in ACT:
        return
    loaded = load_algorithm("run")
    assert (loaded.policy.to_bytes(), loaded.state_reset_every) == (content, trained.state_reset_every)
    if trained.env is not None:
        says = r"without its environment: the environment .*\. Give load_algorithm `env`"
        with pytest.raises(RuntimeError, match=says):
            loaded.env.reset()
        again = load_algorithm("run", env=trained.env_factory or trained.env)
        assert (type(again.env), again.policy.to_bytes()) == (type(trained.env), content)


MODULE = """
import functools
import gymnasium
from rl8x.envs import CartPole, GymnasiumEnv

def task(num_envs, *, length=3, **options):
    return CartPole(num_envs, time_limit=length, **options)

def copy():
    return gymnasium.make("CartPole-v1")

def copies(num_envs, **options):
    return GymnasiumEnv(functools.partial(gymnasium.make, "CartPole-v1", max_episode_steps=3), num_envs, **options)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the working directory, and what forgets that it was imported."""
    monkeypatch.chdir(tmp_path)
    name = f"tasks_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    yield name
    sys.modules.pop(name, None)


@pytest.mark.filterwarnings("ignore:.*simulator's state cannot be saved")
@pytest.mark.parametrize("function", ["task", "copies"])
def test_commands_that_act_go_by_the_function_that_a_run_was_trained_in(function, module, tmp_path, capsys):
    """That nothing runs without trust is tested with every place of a checkpoint, in test_importing.py."""
    small = ["num_envs=4", "horizon=4", "device=cpu", "max_steps=1", "tracking=false", "progress=none"]
    kwargs = ["env_kwargs.length=2"] * (function == "task")
    assert main(["train", f"{module}.{function}", *small, *kwargs, "checkpoints.directory=run"]) == 0
    length = 2 if kwargs else 3
    collects = ["run", "--transitions", "8", "--num-envs", "2", "--output", "data"]
    for command, words in {"play": ["run", "--episodes", "2"], "collect": collects}.items():
        sys.modules.pop(module)
        trusted.memory().unlink()
        capsys.readouterr()
        assert main([command, *words]) == 2
        err = capsys.readouterr().err
        assert ("--trust" in err, len(err.splitlines()), module in sys.modules) == (True, 1, False)
        assert main([command, *words, "--trust"]) == 0
        output = capsys.readouterr()
        assert command != "play" or f"; {length} steps on average" in output.out
        assert output.err.count("is remembered until it changes") == 1
    assert load_algorithm("run", trust=True).env.time_limit in (length, None)
    sys.modules.pop(module)
    assert main(["export", "run"]) == 0  # of what the policy is made all is rl8x's
    assert module not in sys.modules


@pytest.mark.filterwarnings("ignore:.*simulator's state cannot be saved")
def test_functions_of_a_module_in_a_script_are_found_again(module, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    tasks = importlib.import_module(module)
    made_by = functools.partial(tasks.task, length=4), functools.partial(GymnasiumEnv, tasks.copy, vectorization="sync")
    for index, env in enumerate(made_by):
        algorithm = PPOConfig(**ROLLOUT, **MLP).build(env)
        train(algorithm, tmp_path / str(index))
        again = Trainer.resume(tmp_path / str(index), trust=True).algorithm
        assert (type(again.env), again.env.time_limit) == (type(algorithm.env), algorithm.env.time_limit)
        trusted.memory().unlink(missing_ok=True)
        with pytest.raises(CheckpointError, match="trust=True"):
            Trainer.resume(tmp_path / str(index))
        # A run file's `env` names what is called with a number of copies: `copy` is an argument of that.
        file = run_spec(algorithm).to_plain()
        assert file["env"] == (f"{module}.task", "rl8x.envs.GymnasiumEnv")[index]
        if index:
            assert file["env_kwargs"] == {"env": {"$class": f"{module}.copy"}, "vectorization": "sync"}


def test_what_needs_an_environment_says_which_argument_gives_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train(
        PPOConfig(**ROLLOUT, **MLP).build(lambda num_envs, **options: CartPole(num_envs, time_limit=3, **options)),
        "run",
    )
    for command, words in {"play": [], "collect": ["--transitions", "4"]}.items():
        assert main([command, "run", *words]) == 2
        assert capsys.readouterr().err == (
            "rl8x: error: run does not say in which environment: give it by --env, as in --env CartPole.\n"
        )
        assert main([command, "run", *words, "--env", "CartPole"]) == 0
    with pytest.raises(ValueError, match="give `env`"):
        distill("run", DistillationConfig(**ROLLOUT))
    with pytest.raises(CheckpointError, match=r"not made by a class or a function .* Pass `algorithm=`"):
        Trainer.resume("run")
    pupil = distill("run", DistillationConfig(**ROLLOUT, **MLP), CartPole)
    taught = load_policy("run").state_dict()
    assert all(torch.equal(part, taught[name]) for name, part in pupil.teacher.state_dict().items())


@pytest.mark.parametrize("env", [CartPole, lambda num_envs, **options: CartPole(num_envs, **options)])
def test_a_policy_that_no_file_describes_is_made_with_its_algorithm(env, tmp_path, monkeypatch, capsys):
    """It has no `form`, or its model was given as an instance."""
    monkeypatch.setattr("rl8x.algorithms.ppo.Policy", Own)
    monkeypatch.chdir(tmp_path)
    trainer = train(PPOConfig(**ROLLOUT, **MLP).build(env), "own")
    obs = np.zeros((2, 4), np.float32)
    assert np.array_equal(load_policy("own").decide(obs).actions, trainer.algorithm.policy.decide(obs).actions)
    assert main(["export", "own", "--format", "pt2"]) == 0
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    model = MLPModel(CartPole(1).single_observation_space, 2)
    train(PPOConfig(**ROLLOUT, model=model).build(env), "given")
    capsys.readouterr()
    assert main(["export", "given"]) == 2
    err = capsys.readouterr().err
    assert "`model` is MLPModel, which cannot be saved to a file" in err
    assert "algorithm=" not in err
    assert len(err.splitlines()) == 1
