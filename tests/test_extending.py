"""An environment, condition, distribution, model, tracker and algorithm of a package of its own, beside rl8x."""

from __future__ import annotations

import importlib
import itertools
import sys

import pytest

from rl8x.algorithms import PPOConfig
from rl8x.checkpoint import CheckpointError
from rl8x.cli.main import main
from rl8x.trainers import Trainer

FILES = {
    "__init__": "",
    "env": '''
import gymnasium.spaces as spaces
import torch

from rl8x import Env, Parameter


class Corridor(Env):
    """Walk to the right; each step costs, and the end of the corridor ends the episode."""

    single_observation_space = spaces.Box(-100.0, 100.0, (1,))
    single_action_space = spaces.Discrete(2)
    parameters = {"length": Parameter(default=4.0, low=1.0, high=50.0, unit="m", description="steps to the end")}
    terminates = True
    default_time_limit = 12

    def initial_state(self, parameters, noise):
        return {"x": torch.zeros(self.num_envs, device=self.device)}

    def transition(self, state, actions, parameters, noise):
        x = state["x"] + 2 * actions - 1
        return {"x": x}, -torch.ones_like(x), x >= parameters["length"]

    def observe(self, state, parameters):
        return state["x"].unsqueeze(-1)
''',
    "condition": '''
from rl8x import Condition


class Reached(Condition):
    """Met when a metric is at least a bound."""

    def __init__(self, name, bound):
        self.name, self.bound = name, bound

    def judge(self, stats):
        return stats[self.name] >= self.bound if self.name in stats else None

    @property
    def metric_names(self):
        return {self.name}
''',
    "model": '''
from torch import nn

from rl8x import Model


class Linear(Model):
    """One layer."""

    def __init__(self, observation_space, num_features, *, bias=True):
        super().__init__(observation_space, num_features)
        self.layer = nn.Linear(1, num_features + 1, bias=bias)

    def forward(self, obs, state, starts):
        found = self.layer(obs)
        return found[..., :-1], found[..., -1], state
''',
    "distribution": '''
from rl8x import Distribution
from rl8x.distributions import Categorical


class Sharp(Distribution):
    """A categorical distribution of logits times a factor, written without inheriting from it."""

    def __init__(self, space, *, factor=2.0):
        super().__init__(space)
        self.inner, self.factor = Categorical(space), factor
        self.num_features, self.num_noise = self.inner.num_features, self.inner.num_noise

    def from_features(self, features, mask=None):
        return self.inner.from_features(self.factor * features, mask)

    def sample(self, params, noise):
        return self.inner.sample(params, noise)

    def mode(self, params):
        return self.inner.mode(params)

    def logp(self, params, actions):
        return self.inner.logp(params, actions)

    def entropy(self, params):
        return self.inner.entropy(params)
''',
    "tracker": '''
class Lists:
    """Keeps rows in a list."""

    run_id = resume_handle = None
    location = "a list"

    def __init__(self):
        self.rows, self.params, self.tags, self.status = [], {}, {}, None

    def start(self, *, params, tags, resume=None, repeats=True, keeps_status=False):
        self.params |= params
        self.tags |= tags

    def log_params(self, params):
        self.params |= params

    def set_tags(self, tags):
        self.tags |= tags

    def describe(self, text, folder=None): ...

    def log_metrics(self, metrics, step):
        self.rows.append((step, dict(metrics)))

    def log_artifact(self, path, artifact_path=None): ...

    def log_text(self, text, artifact_file): ...

    def flush(self, timeout_s=30.0):
        return True

    def finish(self, status):
        self.status = status
''',
    "algorithm": '''
import dataclasses

import torch

from rl8x import keys
from rl8x.algorithms import OnlineAlgorithm, OnlineConfig
from rl8x.algorithms.hyperparameters import option
from rl8x.algorithms.seeds import part_seed
from rl8x.policy import Policy
from rl8x.rollouts.buffer import Rollout
from rl8x.rollouts.collector import Collector
from rl8x.rollouts.statistics import Stats, rollout_stats


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClimbConfig(OnlineConfig):
    """Hyperparameters of hill climbing."""

    sigma: float = option(0.1, "Standard deviation of what is added to the weights.", above=0.0)


class Climb(OnlineAlgorithm[ClimbConfig], config=ClimbConfig):
    """Keeps a random change of the weights where the mean reward after it is not lower."""

    metrics = ("climb/kept",)

    def __init__(self, config, env, seed, env_factory=None):
        super().__init__(config, env, seed, env_factory)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(part_seed(seed, "weights"))
            spaces = (env.single_observation_space, env.single_action_space)
            self.policy = Policy(*spaces, model_config={"hidden_sizes": []})
        self.generators = {name: torch.Generator().manual_seed(part_seed(seed, name)) for name in ("sampling", "climb")}
        self.collector = Collector(env, self.policy, self.generators["sampling"], self.execution)
        self.rollout = Rollout(config.horizon, config.num_envs)
        self.kept = [weight.detach().clone() for weight in self.policy.parameters()]
        self.best = torch.tensor(-torch.inf)

    def collect(self, *, env_config=None):
        self.reset_if_due(env_config)
        self.collector.fill(self.rollout)
        self.counters[keys.COLLECTS] += 1
        self.counters[keys.ENV_STEPS] += self.config.horizon * self.config.num_envs
        return rollout_stats(self.rollout.tensors, self.config.horizon)

    @torch.no_grad()
    def step(self):
        found = self.rollout[keys.REWARDS][:-1].mean()
        better = bool(found >= self.best)
        if better:
            self.best = found
        for weight, kept in zip(self.policy.parameters(), self.kept, strict=True):
            if better:
                kept.copy_(weight)
            weight.copy_(kept + self.config.sigma * torch.randn(kept.shape, generator=self.generators["climb"]))
        self.counters[keys.STEPS] += 1
        self.counters[keys.UPDATES] += 1
        return Stats({"climb/kept": float(better)})

    def learned_state(self):
        drawn = self.generators["climb"].get_state()
        return {"policy": self.policy.state_dict(), "kept": self.kept, "best": self.best, "climb": drawn}

    def load_learned_state(self, state):
        self.policy.load_state_dict(state["policy"])
        for kept, saved in zip(self.kept, state["kept"], strict=True):
            kept.copy_(saved)
        self.best = state["best"]
        self.generators["climb"].set_state(state["climb"])
''',
}
NUMBERS = itertools.count()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The name of a package in the working directory, which nothing has imported."""
    name = f"extension_{next(NUMBERS)}"
    (tmp_path / name).mkdir()
    for module, text in FILES.items():
        (tmp_path / name / f"{module}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def found(package, monkeypatch, path):
    """Return a class of the package, by `module.name`."""
    monkeypatch.syspath_prepend(".")
    module, name = path.split(".")
    return getattr(importlib.import_module(f"{package}.{module}"), name)


@pytest.mark.parametrize("algorithm", [(), ("--algorithm", "algorithm.ClimbConfig", "--sigma", "0.5")])
def test_the_command_line_trains_them_by_name(package, algorithm, capsys):
    words = [f"{package}.{word}" if word.endswith("Config") else word for word in algorithm]
    sizes = ["--num-envs", "6", "--horizon", "5", "--device", "cpu", "--seed", "1"]
    stop = f"{{{package}.condition.Reached: [env/steps, 60]}}"
    run = ["--stop", stop, "--no-tracking", "--progress", "lines", "--num-eval-envs", "2", "--steps-per-eval", "2"]
    parts = [f"model={package}.model.Linear", f"distribution={package}.distribution.Sharp", "model_config.bias=false"]
    assert main(["train", f"{package}.env.Corridor", *words, *sizes, *run, *([] if algorithm else parts)]) == 0
    assert "Reached('env/steps', 60): env/steps = 60" in capsys.readouterr().err


def test_a_trainer_takes_them(package, monkeypatch):
    env, model, distribution = (
        found(package, monkeypatch, path) for path in ("env.Corridor", "model.Linear", "distribution.Sharp")
    )
    config = PPOConfig(
        num_envs=6, horizon=5, device="cpu", seed=1, model=model, distribution=distribution, normalize_values=True
    )
    tracker = found(package, monkeypatch, "tracker.Lists")()
    trainer = Trainer(config.build(env), tracker=tracker)
    stop = found(package, monkeypatch, "condition.Reached")("eval/returns/mean", -4.5)
    trainer.run(stop_conditions=[stop], max_steps=3, steps_per_eval=2, env_config={"length": 3}, progress="none")
    assert tracker.params["model.class"] == f"{package}.model.Linear"
    assert tracker.params["env_config.length"] == 3
    steps = [step for step, row in tracker.rows if "returns/mean" in row]
    assert steps == [30 * (i + 1) for i in range(len(steps))]
    assert tracker.status == "FINISHED"


def test_an_algorithm_is_resumed_to_equal_bits(package, monkeypatch, tmp_path):
    env, config_class = (found(package, monkeypatch, path) for path in ("env.Corridor", "algorithm.ClimbConfig"))
    tracker = found(package, monkeypatch, "tracker.Lists")

    def begin(folder):
        config = config_class(num_envs=6, horizon=5, device="cpu", seed=1, sigma=0.5)
        return Trainer(config.build(env), tracker=tracker(), checkpoints=tmp_path / folder)

    whole, half = begin("whole"), begin("half")
    whole.run(max_steps=6, progress="none")
    half.run(max_steps=3, progress="none")
    with pytest.raises(CheckpointError, match="Lists"):  # rl8x cannot make such a tracker
        Trainer.resume(tmp_path / "half")
    resumed = Trainer.resume(tmp_path / "half", tracker=tracker(), trust=True)
    resumed.run(max_steps=6, progress="none")
    for one, other in zip(whole.algorithm.policy.parameters(), resumed.algorithm.policy.parameters(), strict=True):
        assert one.equal(other)
    assert whole.state == resumed.state
