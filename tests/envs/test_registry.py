from __future__ import annotations

import abc
import functools
import json
import re
import sys
from pathlib import Path

import gymnasium
import pytest

import rl8x.envs
from rl8x import NullTracker, PPOConfig, Trainer
from rl8x.cli.main import main
from rl8x.config import RunSpec
from rl8x.config.describe import env_spec
from rl8x.envs import CartPole, Spread
from rl8x.envs.registry import env_maker
from rl8x.importing import import_named


def test_a_maker_of_a_maker_is_the_same_class_with_all_arguments():
    made_by = env_maker(env_maker(Spread, {"time_limit": 7}), {"num_agents": 2})
    assert (made_by.func, made_by.args, dict(made_by.keywords)) == (Spread, (), {"time_limit": 7, "num_agents": 2})
    assert repr(env_maker("CartPole-v1", {"metrics": ()})) == "GymnasiumEnv('CartPole-v1', metrics=())"


@pytest.mark.parametrize("name", ["CartPole", "CartPole-v1"])
def test_what_makes_an_environment_of_a_run_file_says_what_the_file_said(name):
    given = {"env": name, "env_kwargs": {"time_limit": 7}}
    run = RunSpec.from_plain({**given, "algorithm_config": {"num_envs": 2, "device": "cpu"}})
    assert env_spec(run.make_algorithm()).to_plain() == given
    assert env_spec(PPOConfig(**SMALL).build(env_maker(name, {"time_limit": 7}))).to_plain() == given


# -- ids of Gymnasium's registry, whatever their form

MODULE = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
names = "M_Plain mine/M_Plain M_Old-v0 M_Old-v2 mine/M_Old-v9 mine/M_Old-v10 M.Dotted M_2048"
for name in names.split():
    gymnasium.register(name, CartPoleEnv, max_episode_steps=9)
"""
IDS = ["M_Plain", "mine/M_Plain", "M:M_Plain", "M:mine/M_Plain", "M_Old-v0", "M_Old", "M:M_Old", "M:M_Old-v0"]
IDS += ["mine/M_Old", "mine/M_Old-v9", "M:mine/M_Old-v9", "M.Dotted", "M:M.Dotted"]
NEWEST = {"M_Old": "M_Old-v2", "mine/M_Old": "mine/M_Old-v10"}
SMALL = {"num_envs": 2, "horizon": 4, "seed": 0, "device": "cpu", "model_config": {"hidden_sizes": [4]}}
WORDS = ["num_envs=2", "horizon=4", "device=cpu", "max_steps=1", "tracking=false", "progress=none"]


@pytest.fixture
def registering(tmp_path, monkeypatch):
    """The name of a module in the working directory that registers ids when it is imported; gone afterwards."""
    module = re.sub(r"\W", "_", f"ids_{tmp_path.name}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / f"{module}.py").write_text(MODULE.replace("M", module))
    before = {*gymnasium.registry}
    yield module
    sys.modules.pop(module, None)
    for name in {*gymnasium.registry} - before:
        del gymnasium.registry[name]


@pytest.mark.filterwarnings("ignore:.*is out of date")
@pytest.mark.parametrize("name", IDS)
def test_gymnasiums_registry_says_what_is_an_id(name, registering, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)  # as a script's own folder is
    own = name.removeprefix("M:")
    given, meant = (text.replace("M", registering) for text in (name, NEWEST.get(own, own)))
    if not given.startswith(f"{registering}:"):
        exec(MODULE.replace("M", registering), {})  # as a script registers what it uses
    algorithm = PPOConfig(**SMALL).build(given)
    assert (algorithm.env.params["id"], algorithm.env.time_limit) == (meant, 9)
    assert env_spec(algorithm).env.rpartition(":")[2] == meant


@pytest.mark.parametrize("form", ["id", "argument"])
def test_an_id_without_a_version_runs_no_code_of_a_file_either(form, registering, capsys):
    for own in (f"{registering}_Plain", f"{registering}_2048", "2048"):
        name = f"{registering}:{own}"
        env = {"env": name} if form == "id" else {"env": "rl8x.envs.GymnasiumEnv", "env_kwargs": {"env": name}}
        Path("run.json").write_text(json.dumps({**env, "tracking": False, "max_steps": 1, "algorithm_config": SMALL}))
        assert main(["train", "-f", "run.json"]) == 2
        assert f"'{name}' would import the module '{registering}'" in capsys.readouterr().err
        assert registering not in sys.modules


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Acrobo", "no built-in environment 'Acrobo'. Did you mean Acrobot?"),
        ("cartpole", "no built-in environment 'cartpole'. Did you mean CartPole?"),
        ("zzz", "no built-in environment 'zzz'. There are"),
        ("Blackjac", "no built-in environment 'Blackjac'. Did you mean Blackjack-v1?"),
        ("tabular/Blackjac", "environment 'tabular/Blackjac' is registered. Did you mean tabular/Blackjack"),
        ("json:Nothing", "no Gymnasium environment 'json:Nothing' is registered."),
        ("no_such_module:Nothing", "cannot import 'no_such_module:Nothing': No module named 'no_such_module'"),
        ("json:a:b", "an id of Gymnasium's looks like module:namespace/Name-v0; got 'json:a:b'"),
    ],
)
def test_an_id_that_is_none_is_told(name, message, capsys):
    assert main(["train", name, *WORDS]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


# -- adapters by their class


def adapters():
    """Each adapter, its own first argument, and the package it needs."""
    return {
        "GymnasiumEnv": ({"env": "CartPole-v1"}, "gymnasium"),
        "MjlabEnv": ({"task": "Mjlab-Cartpole-Balance"}, "mjlab"),
        "VmasEnv": ({"scenario": "balance", "n_agents": 2}, "vmas"),
        "PettingZooEnv": ({"make": "tests.envs.team_stubs:Shift"}, "pettingzoo"),
        "BraxEnv": ({"env": "fast"}, "brax"),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*adapters(), "mine/M_Plain", "M:M_Old", "M:mine/M_Old-v9"])
def test_every_command_and_a_run_file_take_an_adapters_class_and_an_id_as_it_is_written(name, registering, monkeypatch):
    monkeypatch.setenv("MJLAB_WARP_QUIET", "1")
    given, arguments = name.replace("M", registering), {}
    if name in adapters():
        arguments, package = adapters()[name]
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'rl8x[{package}]'")
        adapter, given, arguments = getattr(rl8x.envs, name), f"rl8x.envs.{name}", arguments | {"time_limit": 3}
        for algorithm in (
            PPOConfig(**SMALL).build(adapter, **arguments),
            PPOConfig(**SMALL).build(functools.partial(adapter, **arguments)),
        ):
            assert (type(algorithm.env), algorithm.env.num_copies, algorithm.env.time_limit) == (adapter, 2, 3)
    elif not given.startswith(f"{registering}:"):
        exec(MODULE.replace("M", registering), {})
        assert main(["envs", given]) == 0
    kwargs = ["--env-kwargs", json.dumps(arguments)] if arguments else []
    evaluated = [] if arguments else [f"eval_env={given}"]
    assert main(["train", given, *WORDS, *kwargs, *evaluated, "steps_per_eval=1", "checkpoints.directory=a"]) == 0
    assert main(["resume", "a", "--max-steps", "2", "--progress", "none"]) == 0
    assert main(["collect", "a", "--transitions", "4", "--num-envs", "2", "--output", "b"]) == 0
    run = {"env": given, "env_kwargs": arguments, "tracking": False, "max_steps": 1, "algorithm_config": SMALL}
    Path("run.json").write_text(json.dumps(run))
    assert main(["train", "-f", "run.json", "--trust", "checkpoints.directory=c", "progress=none"]) == 0
    (spec, *_) = (json.loads(path.read_text())["spec"] for path in Path("c").glob("*/checkpoint.json"))
    assert (spec["env"], spec.get("env_kwargs", {})) == (given, arguments)


@pytest.mark.parametrize("name", adapters())
def test_an_adapter_without_its_argument_is_told(name, capsys):
    (argument, *_), _ = adapters()[name]
    assert main(["train", f"rl8x.envs.{name}", *WORDS]) == 2
    assert f"{name} is missing an argument: give {argument!r} too" in capsys.readouterr().err
    with pytest.raises(TypeError, match=f"{name} is missing an argument: give '{argument}' too"):
        PPOConfig(**SMALL).build(getattr(rl8x.envs, name))


def test_an_environment_may_be_given_by_name_by_position_or_as_a_function_of_more():
    def make(kind, num_envs, **options):
        return kind(num_envs, **options)

    bound = PPOConfig(**SMALL).build(functools.partial(make, kind=CartPole), time_limit=7)
    for algorithm in (bound, PPOConfig(**SMALL).build(env=CartPole, time_limit=7)):
        assert (type(algorithm.env), algorithm.env.time_limit) == (CartPole, 7)
    with pytest.raises(TypeError, match=r"An environment is a class, .*; got None"):
        PPOConfig(**SMALL).build()


# -- what is no environment by itself


class Unfinished(CartPole, abc.ABC):
    @abc.abstractmethod
    def length(self):
        """Return something."""


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gymnasium.Env", r"gymnasium.Env is a base class, without step\(\)"),
        ("rl8x.envs.Env", r"rl8x.Env is a base class, without transition\(\)"),
        ("rl8x.envs.simulator.SimulatorEnv", r"SimulatorEnv is a base class, without transition\(\)"),
        (f"{__name__}.Unfinished", r"Unfinished is a base class, without length\(\)"),
        ("gymnasium.Wrapper", "gymnasium.Wrapper wraps an environment"),
        ("gymnasium.wrappers.TimeLimit", "TimeLimit wraps an environment"),
        ("gymnasium.vector.VectorEnv", "gymnasium.vector.VectorEnv is a class of Gymnasium's vector environments"),
        ("gymnasium.vector.SyncVectorEnv", "SyncVectorEnv is a class of Gymnasium's vector environments"),
        ("rl8x.envs.NumpyEnv", "NumpyEnv is a class of Gymnasium's vector environments"),
    ],
)
def test_a_class_that_is_no_environment_by_itself_is_told(path, message, tmp_path, capsys):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"env": path, "tracking": False, "algorithm_config": SMALL}))
    for words in ([path, *WORDS], ["-f", str(file)]):
        assert main(["train", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(message, line)
    with pytest.raises(TypeError, match=message):
        PPOConfig(**SMALL).build(import_named(path))
    with pytest.raises(TypeError, match=message):
        Trainer(PPOConfig(**SMALL).build(CartPole), tracker=NullTracker(), eval_env=import_named(path))
