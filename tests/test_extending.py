"""Classes of a package of its own, beside rl8x: those of the examples, and algorithms written from the bases."""

import importlib
import sys
import uuid

import pytest
from tests.pages import ROOT

from rl8x import MemoryTracker, Trainer
from rl8x.checkpoint import CheckpointError
from rl8x.cli.main import main
from rl8x.envs import CartPole
from rl8x.replay.recording import record

CLIMB = '''
import dataclasses

import torch

from rl8x import keys
from rl8x.algorithms import GenericAlgorithmBase, OnlineConfig
from rl8x.algorithms.hyperparameters import option, part_seed
from rl8x.policy import Policy
from rl8x.rollouts.statistics import Stats


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClimbConfig(OnlineConfig):
    """Hyperparameters of a walk."""

    sigma: float = option(0.1, "Standard deviation of what is added to the weights.", above=0.0)


class Climb(GenericAlgorithmBase[ClimbConfig], config=ClimbConfig):
    """Walks at random, by the mean reward further or less far."""

    metrics = ("climb/reward",)

    def __init__(self, config, env, seed, env_factory=None):
        super().__init__(config, env, seed, env_factory)
        spaces = env.single_observation_space, env.single_action_space
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(part_seed(seed, "weights"))
            self.policy = Policy(*spaces, model_config={"hidden_sizes": []})
        self.horizons = config.make_horizons(self, self.policy)
        self.generator = self.make_generator("climb")

    def step(self):
        reward = self.rollout[keys.REWARDS][:-1].mean()
        weights = torch.nn.utils.parameters_to_vector(self.policy.parameters()).detach()
        change = self.config.sigma * reward * torch.randn(weights.shape, generator=self.generator)
        torch.nn.utils.vector_to_parameters(weights + change, self.policy.parameters())
        self.counters[keys.STEPS] += 1
        self.counters[keys.UPDATES] += 1
        return Stats({"climb/reward": float(reward)})

    def learned_state(self):
        return {"policy": self.policy.state_dict(), "climb": self.generator.get_state()}

    def load_learned_state(self, state):
        self.policy.load_state_dict(state["policy"])
        self.generator.set_state(state["climb"])
'''
LEAST = '''
import dataclasses

from rl8x import keys
from rl8x.algorithms import Learner, OffPolicyConfig
from rl8x.algorithms.off_policy.learner import TAU, observed
from rl8x.algorithms.off_policy.updates import Minimise
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
'''
FILES = {"__init__": "", "climb": CLIMB, "least": LEAST}
FILES |= {path.stem: path.read_text() for path in (ROOT / "examples").glob("own_*.py")}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The name of a package in the working directory, which nothing has imported."""
    name = f"extension_{uuid.uuid4().hex}"
    (tmp_path / name).mkdir()
    for module, text in FILES.items():
        (tmp_path / name / f"{module}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


@pytest.mark.parametrize(
    "words",
    [
        "OWN.own_environment.Hover --algorithm OWN.climb.ClimbConfig --sigma 0.5",
        "CartPole --algorithm OWN.own_algorithm.SPOConfig --penalty 0.5 sgd_minibatch_size=15",
        "CartPole --algorithm OWN.least.LeastConfig --warmup-steps 10",
        "CartPole model=OWN.own_model.Fourier distribution=OWN.own_model.Careful model_config.width=8",
    ],
)
def test_the_command_line_trains_them_by_name(package, words, capsys):
    run = ["--num-envs", "6", "--horizon", "5", "--device", "cpu", "--seed", "1", "--num-eval-envs", "2"]
    run += ["--steps-per-eval", "2", "--stop", f"{{{package}.own_condition.Grows: [env/steps, 2]}}", "--no-tracking"]
    assert main(["train", *words.replace("OWN", package).split(), *run, "--progress", "lines"]) == 0
    assert "Grows('env/steps', 2): env/steps = 60" in capsys.readouterr().err


class Kept(MemoryTracker):
    """A tracker of one's own."""


SIZES = {"num_envs": 6, "horizon": 5}


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("climb.ClimbConfig", SIZES | {"sigma": 0.5}),
        ("own_algorithm.SPOConfig", SIZES | {"sgd_minibatch_size": 15}),
        ("least.LeastConfig", SIZES | {"warmup_steps": 10, "batch_size": 8}),
        ("least.LeastConfig", {"dataset": "data", "batch_size": 8, "updates_per_step": 3}),
    ],
)
def test_an_algorithm_is_resumed_to_equal_bits(package, monkeypatch, tmp_path, path, options):
    monkeypatch.syspath_prepend(".")
    module, name = path.split(".")
    config = getattr(importlib.import_module(f"{package}.{module}"), name)(device="cpu", seed=1, **options)
    record(None, CartPole(4, seed=1), 80).dataset.save(tmp_path / "data")

    def begin(folder):
        built = config.build() if "dataset" in options else config.build(CartPole)
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
