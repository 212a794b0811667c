"""An environment, condition, distribution, model and algorithm of a package of its own, beside rl8x."""

from __future__ import annotations

import importlib
import itertools
import sys

import pytest

from rl8x.checkpoint import CheckpointError
from rl8x.cli.main import main
from rl8x.replay.recording import record
from rl8x.tracking import MemoryTracker
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
    "climb": '''
import dataclasses

import torch

from rl8x import keys
from rl8x.algorithms import GenericAlgorithmBase, OnlineConfig
from rl8x.algorithms.hyperparameters import option
from rl8x.algorithms.hyperparameters import part_seed
from rl8x.policy import Policy
from rl8x.rollouts.statistics import Stats


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClimbConfig(OnlineConfig):
    """Hyperparameters of hill climbing."""

    sigma: float = option(0.1, "Standard deviation of what is added to the weights.", above=0.0)


class Climb(GenericAlgorithmBase[ClimbConfig], config=ClimbConfig):
    """Keeps a random change of the weights where the mean reward after it is not lower."""

    metrics = ("climb/kept",)

    def __init__(self, config, env, seed, env_factory=None):
        super().__init__(config, env, seed, env_factory)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(part_seed(seed, "weights"))
            spaces = (env.single_observation_space, env.single_action_space)
            self.policy = Policy(*spaces, model_config={"hidden_sizes": []})
        self.horizons = config.make_horizons(self, self.policy)
        self.generator = self.make_generator("climb")
        self.kept = [weight.detach().clone() for weight in self.policy.parameters()]
        self.best = torch.tensor(-torch.inf)

    @torch.no_grad()
    def step(self):
        found = self.rollout[keys.REWARDS][:-1].mean()
        better = bool(found >= self.best)
        if better:
            self.best = found
        for weight, kept in zip(self.policy.parameters(), self.kept, strict=True):
            if better:
                kept.copy_(weight)
            weight.copy_(kept + self.config.sigma * torch.randn(kept.shape, generator=self.generator))
        self.counters[keys.STEPS] += 1
        self.counters[keys.UPDATES] += 1
        return Stats({"climb/kept": float(better)})

    def learned_state(self):
        drawn = self.generator.get_state()
        return {"policy": self.policy.state_dict(), "kept": self.kept, "best": self.best, "climb": drawn}

    def load_learned_state(self, state):
        self.policy.load_state_dict(state["policy"])
        for kept, saved in zip(self.kept, state["kept"], strict=True):
            kept.copy_(saved)
        self.best = state["best"]
        self.generator.set_state(state["climb"])
''',
    "on_policy": '''
import dataclasses

from rl8x import keys
from rl8x.algorithms import OnPolicyAlgorithm, OnPolicyConfig
from rl8x.algorithms.base import LR
from rl8x.algorithms.hyperparameters import option
from rl8x.algorithms.on_policy import Objective
from rl8x.algorithms.on_policy.algorithm import EXPLAINED_VARIANCE, GRAD_NORM
from rl8x.functional import explained_variance, generalized_advantages
from rl8x.policy import Policy
from rl8x.rollouts.step import actor_critic


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforceConfig(OnPolicyConfig):
    """Hyperparameters of REINFORCE with a learned baseline."""

    gamma: float = option(0.99, "Discount factor.", low=0.0, high=1.0)


def losses(policy, batch, state, coefficient, config):
    """Sum -A log p(a | s) + (V - R)^2 over a minibatch."""
    found = policy(batch[keys.OBS], batch[keys.ACTIONS], state, batch[keys.STARTS])
    errors = batch[keys.RETURNS] - found.values
    return (errors.square() - errors.detach() * found.logp).sum().unsqueeze(0)


class Reinforce(OnPolicyAlgorithm[ReinforceConfig], config=ReinforceConfig):
    """Makes actions likelier by how much more they brought than their states are worth."""

    metrics = ("losses/total", GRAD_NORM, EXPLAINED_VARIANCE, LR)
    objective = Objective(losses, ("losses/total",), "losses/total")
    slot = staticmethod(actor_critic)

    def make_policy(self):
        return Policy(self.env.single_observation_space, self.env.single_action_space, model=self.config.model)

    def targets(self, data):
        ends = data[keys.FINAL_VALUES], data[keys.TERMINATED], data[keys.TRUNCATED]
        factors = {"gamma": self.config.gamma, "gae_lambda": 1.0}
        _, returns = generalized_advantages(data[keys.REWARDS], self.rollout[keys.VALUES], *ends, **factors)
        return {keys.RETURNS: returns}, explained_variance(data[keys.VALUES], returns, None)

    def learn(self):
        explained = self.set_targets()
        with self.updates() as updates:
            for _ in updates.epochs():
                for minibatches in updates.minibatches():
                    updates.step(minibatches)
        return explained
''',
    "off_policy": '''
import dataclasses

from rl8x import keys
from rl8x.algorithms import Learner, OffPolicyConfig
from rl8x.algorithms.off_policy.learner import TAU, observed
from rl8x.algorithms.off_policy.updates import Minimise, UpdateResult
from rl8x.distributions.discrete import pick
from rl8x.q_values import QPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeastConfig(OffPolicyConfig):
    """Hyperparameters of the least of Q-learning, which has a replay, or a data set."""


class Least(Learner[LeastConfig], config=LeastConfig):
    """Q-learning with a target network."""

    update_metrics = ("losses/q", "monitors/grad_norm")

    def make_policy(self):
        return self.policy_of(QPolicy)

    def make_nets(self):
        self.add_net("q", self.policy)
        self.nets.add_target("target", of="q")

    def phases(self):
        return [Minimise("q", self.q_loss, "monitors/grad_norm")]

    def q_loss(self, nets, batch, found):
        following = nets["target"](*observed(batch, keys.NEXT_OBS))[0].amax(-1)
        td_targets = batch[keys.RETURNS] + batch[keys.DISCOUNTS] * following

        def loss(q):
            values = pick(q(*observed(batch, keys.OBS))[0], batch[keys.ACTIONS])
            total = (values - td_targets).square().mean()
            return total, {"losses/q": total}

        return loss

    def finish(self, nets, batch, found):
        nets["target"].polyak_update(nets["q"], batch[TAU])
        return UpdateResult(found)
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


@pytest.mark.parametrize(
    "algorithm",
    [
        (),
        ("--algorithm", "climb.ClimbConfig", "--sigma", "0.5"),
        ("--algorithm", "on_policy.ReinforceConfig", "--gamma", "0.9"),
        ("--algorithm", "off_policy.LeastConfig", "--warmup-steps", "10"),
    ],
)
def test_the_command_line_trains_them_by_name(package, algorithm, capsys):
    words = [f"{package}.{word}" if word.endswith("Config") else word for word in algorithm]
    sizes = ["--num-envs", "6", "--horizon", "5", "--device", "cpu", "--seed", "1"]
    stop = f"{{{package}.condition.Reached: [env/steps, 60]}}"
    run = ["--stop", stop, "--no-tracking", "--progress", "lines", "--num-eval-envs", "2", "--steps-per-eval", "2"]
    parts = [f"model={package}.model.Linear", f"distribution={package}.distribution.Sharp", "model_config.bias=false"]
    assert main(["train", f"{package}.env.Corridor", *words, *sizes, *run, *([] if algorithm else parts)]) == 0
    assert "Reached('env/steps', 60): env/steps = 60" in capsys.readouterr().err


class Kept(MemoryTracker):
    """A tracker of one's own."""


CLIMB = {"num_envs": 6, "horizon": 5, "sigma": 0.5}
LEAST = {"num_envs": 6, "horizon": 5, "warmup_steps": 10, "batch_size": 8}
ALGORITHMS = [
    ("climb.ClimbConfig", CLIMB, False),
    ("on_policy.ReinforceConfig", {"num_envs": 6, "horizon": 5, "sgd_minibatch_size": 15}, False),
    ("off_policy.LeastConfig", LEAST, False),
    ("off_policy.LeastConfig", {"batch_size": 8, "updates_per_step": 3}, True),
]


@pytest.mark.parametrize(("path", "options", "offline"), ALGORITHMS)
def test_an_algorithm_is_resumed_to_equal_bits(package, monkeypatch, tmp_path, path, options, offline):
    env, config_class = (found(package, monkeypatch, each) for each in ("env.Corridor", path))
    if offline:
        record(None, env(4, seed=1), 80).dataset.save(tmp_path / "data")

    def begin(folder):
        config = config_class(device="cpu", seed=1, **options)
        built = config.build(dataset=str(tmp_path / "data")) if offline else config.build(env)
        return Trainer(built, tracker=Kept(), checkpoints=tmp_path / folder)

    whole, half = begin("whole"), begin("half")
    before = [weight.detach().clone() for weight in whole.algorithm.policy.parameters()]
    whole.run(max_steps=6, progress="none")
    half.run(max_steps=3, progress="none")
    with pytest.raises(CheckpointError, match="Kept"):  # rl8x cannot make such a tracker
        Trainer.resume(tmp_path / "half")
    resumed = Trainer.resume(tmp_path / "half", tracker=Kept(), trust=True)
    resumed.run(max_steps=6, progress="none")
    weights = [[*each.algorithm.policy.parameters()] for each in (whole, resumed)]
    assert all(one.equal(other) for one, other in zip(*weights, strict=True))
    assert not all(one.equal(other) for one, other in zip(before, weights[0], strict=True))
    assert whole.state == resumed.state
