"""Commands on algorithms that are not rl8x's: their options, help and run files come from their own config class."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from rl8x import Policy, Trainer, trusted
from rl8x.config import RunSpec
from rl8x.envs import Pendulum
from rl8x.importing import UntrustedError

NUMBERS = itertools.count()
# Without `from __future__ import annotations`, as a user may write it
PACKAGE = '''
import dataclasses

from rl8x.algorithms import GenericAlgorithmBase, OnlineConfig, PPOConfig
from rl8x.algorithms.hyperparameters import option


@dataclasses.dataclass(frozen=True, kw_only=True)
class MyConfig(OnlineConfig):
    """Replays what it has seen."""

    capacity: int = option(10000, "Transitions that are kept.", low=1)
    tau: float | None = option(None, "Share of the new weights.", low=0.0, high=1.0)
    double: bool = option(True, "Whether there are two critics.")
    critic: dict[str, int] = option({"width": 8}, "Sizes.")
    model_cls: str = "mine"
    checkpoints: int = option(3, "A name that a run has too.")

    def __post_init__(self):
        super().__post_init__()
        if self.capacity == 13:
            raise ValueError("`capacity` is unlucky.")

    def build(self, env, **env_kwargs):
        return Mine(self, env)


class Mine(GenericAlgorithmBase):
    def __init__(self, config, env):
        self.config, self.env = config, env

    def collect(self, *, env_config=None): ...
    def step(self): ...
    def learned_state(self): ...
    def load_learned_state(self, state): ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(MyConfig):
    def build(self, env=None):
        return Mine(self, env)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunedConfig(PPOConfig):
    bonus: float = option(0.5, "What curiosity adds.", low=0.0)
'''
SMALL = ["--num-envs", "4", "--horizon", "4", "--no-tracking", "--device", "cpu", "--progress", "none"]
SMALL += ["--eval-env", "false"]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The name of a package in the working directory, which nothing has imported."""
    name = f"mypackage_{next(NUMBERS)}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(PACKAGE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


@pytest.fixture
def built(monkeypatch):
    """What commands built, in place of a trainer."""
    algorithms = []
    monkeypatch.setattr(Trainer, "from_spec", lambda spec: algorithms.append(spec.make_algorithm()))
    return algorithms


@pytest.fixture
def help_of(call):
    return lambda *words: " ".join(call(*words, "--help").split())


def test_options_are_fields_of_the_algorithms_own_config(package, built, call):
    words = ["train", "Pendulum", "--algorithm", f"{package}.MyConfig", "--dry-run"]
    typed = ["--capacity", "5000", "--tau", "none", "--no-double", "--critic", "{width: 4}", "--seed", "3"]
    run = yaml.safe_load(call(*words, *typed, "--run-name", "007", "--experiment-name", "None"))
    assert run["algorithm"] == f"{package}.MyConfig"
    assert (run["run_name"], run.get("experiment_name")) == ("007", None)  # text stays text
    given = {"capacity": 5000, "tau": None, "double": False, "critic": {"width": 4}, "seed": 3}
    assert run["algorithm_config"] == given
    assert type(built[0]).__name__ == "Mine"
    assert built[0].config.capacity == 5000
    call(*words, "capacity=1e3", "critic.width=2", "model_cls=other", "algorithm_config.checkpoints=5")
    config = built[1].config
    assert (config.capacity, config.critic, config.model_cls, config.checkpoints) == (1000, {"width": 2}, "other", 5)


def test_a_run_file_needs_trust_for_its_algorithm(package, call):
    Path("run.yaml").write_text(f"env: Pendulum\nalgorithm: {package}.MyConfig\n")
    for words in (["--capacity", "3"], ["--dry-run"], ["--help"]):
        assert f"would import the module '{package}'" in call("train", "-f", "run.yaml", *words, code=2)
    with pytest.raises(UntrustedError):
        RunSpec.from_file("run.yaml")
    assert package not in sys.modules


def test_help_lists_the_algorithms_options_in_groups_by_the_class_that_declares_them(package, help_of):
    out = help_of("train", "Pendulum", "--algorithm", f"{package}.MyConfig")
    assert "Every algorithm: --seed" in out
    assert "My: --capacity INTEGER Transitions that are kept. [default: 10000; >= 1]" in out
    assert "--tau NUMBER Share of the new weights. [default: none; >= 0; <= 1]" in out
    assert "--double / --no-double Whether there are two critics. [default: yes]" in out
    assert "--critic MAPPING Sizes. [default: {'width': 8}]" in out
    assert "--lr NUMBER" not in out
    assert out.count("--checkpoints ") == 1  # the run's own
    out = help_of("train", "--algorithm", f"{package}.TunedConfig")
    groups = ["trains a model: --model", "choice of action distributions: --distribution", "rollouts: --num-sgd-iters"]
    groups += ["PPO: --gamma", "Tuned: --bonus"]
    assert [out.index(group) for group in groups] == sorted(out.index(group) for group in groups)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr", "1"], "No such option '--lr'"),
        (["--capcity", "1"], "Did you mean '--capacity'?"),
        (["--capacity", "0"], "`capacity` must be at least 1; got 0"),
        (["--capacity", "13"], "`capacity` is unlucky."),
        (["--checkpoints", "here"], "must be a mapping of names to values, such as {every_steps: 100, every_minutes"),
        (["--algorithm", "{package}.Mine"], ".Mine', an algorithm: name the class of its config."),
        (["--algorithm", "rl8x.algorithms.PPO"], "'rl8x.algorithms.PPO', an algorithm: name the class of its config."),
        (["--algorithm", "mine"], "One of your own is named by its config class, such as my_module.MyConfig."),
    ],
)
def test_mistakes_name_the_algorithms_own_options(package, built, call, words, message):
    words = [word.format(package=package) for word in words]
    assert message in call("train", "Pendulum", "--algorithm", f"{package}.MyConfig", *words, code=2)


def test_an_algorithm_without_an_environment_needs_no_env(package, built, call):
    call("train", "--algorithm", f"{package}.DataConfig", "--dry-run")
    assert built[0].env is None
    assert "no environment is named" in call("train", "--algorithm", f"{package}.MyConfig", code=2)


def test_a_run_is_resumed_with_the_options_of_its_own_config(package, call, help_of):
    words = ["train", "CartPole", "--algorithm", f"{package}.TunedConfig", *SMALL, "checkpoints.directory=runs"]
    call(*words, "--max-steps", "1", "--bonus", "0.25")
    del sys.modules[package]  # as in a process of its own
    trusted.memory().unlink()
    resume = ["resume", "runs", "--trust", "--progress", "none", "--max-steps", "2"]
    assert "would import" in call("resume", "runs", "--bonus", "0.75", code=2)
    told = "Tuned: --bonus NUMBER What curiosity adds. [default: 0.5; >= 0]"
    assert told in help_of("resume", "runs", "--trust")
    assert "No such option '--bonsu'" in call(*resume, "--bonsu", "3", code=2)
    assert "`bonus` must be at least 0; got -1" in call(*resume, "--bonus", "-1", code=2)
    assert "name the run first: rl8x resume RUN --bonus" in call("resume", "--bonus", "1", "runs", code=2)
    assert "there is no run 'nothing'" in call("resume", "nothing", "--bonus", "1", code=2)
    call(*resume, "--bonus", "0.75", "lr=1e-4")
    config = Trainer.resume("runs", trust=True).algorithm.config
    assert (config.bonus, config.lr) == (0.75, 1e-4)


def test_a_file_that_does_not_say_its_spaces_has_those_of_the_environment_to_evaluate_in(tmp_path, monkeypatch, call):
    h5py = pytest.importorskip("h5py", reason="h5py is not installed, which reads D4RL's files")
    monkeypatch.chdir(tmp_path)
    rows = {"observations": np.zeros((8, 3), np.float32), "actions": np.full((8, 1), 1.5, np.float32)}
    with h5py.File("pendulum.hdf5", "w") as file:
        for name, array in (rows | {"rewards": np.ones(8), "terminals": np.arange(8) % 4 == 3}).items():
            file[name] = array
    algorithm = ["--algorithm", "bc", "--dataset", "pendulum.hdf5", "--batch-size", "4", "--device", "cpu"]
    run = ["--max-steps", "2", "--updates-per-step", "2", "--seed", "0", "--progress", "none"]
    words = ["train", *algorithm, *run, "model_config.hidden_sizes=[8]", "checkpoints.directory=run"]
    says = "the data set 'pendulum.hdf5' does not say what its spaces are: name the"
    assert f"rl8x: error: {says}" in call(*words, code=2)
    # Of CartPole observations are of four numbers
    says = "`obs` must be elements of Box([4], float32); got torch.float32 [3]"
    assert says in call(*words, "--eval-env", "CartPole", code=2)
    assert "2 steps, 4 updates" in call(*words, "--eval-env", "Pendulum")
    assert "3 steps, 6 updates" in call("resume", "run", "--max-steps", "3", "--progress", "none")
    call("export", "run", "--output", "policy.safetensors")
    assert Policy.load("policy.safetensors").action_space == Pendulum(1).single_action_space
