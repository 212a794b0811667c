"""An algorithm without an environment: values are fitted to a batch that is fixed."""

import dataclasses

import pytest
import torch
from tests.checkpoint.legal import described
from tests.trainers.test_non_finite import at_step
from tests.trainers.test_resume import run

from rl8x import keys
from rl8x.algorithms import AlgorithmConfig, GenericAlgorithmBase
from rl8x.algorithms.hyperparameters import option
from rl8x.algorithms.seeds import part_seed
from rl8x.checkpoint import Checkpoints
from rl8x.checkpoint.build import build_algorithm, problems_of
from rl8x.conditions import Confirmed, HitsLowerBound, HitsUpperBound
from rl8x.envs import CartPole, CartPoleInfinite, Pendulum
from rl8x.policy import Policy
from rl8x.rollouts.statistics import Stats, any_not_finite
from rl8x.tracking import MemoryTracker
from rl8x.trainers import NonFiniteError, Trainer

SPACES = CartPole(1).single_observation_space, CartPole(1).single_action_space


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegressionConfig(AlgorithmConfig):
    lr: float = option(1e-2, "Learning rate.", above=0.0)


class Regression(GenericAlgorithmBase[RegressionConfig], config=RegressionConfig):
    metrics = ("losses/total",)

    def __init__(self, config, env, seed, env_factory=None):
        super().__init__(config, env, seed, env_factory)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(part_seed(seed, "weights"))
            self.policy = Policy(*SPACES, model_config={"hidden_sizes": [8]})
        self.generator = torch.Generator().manual_seed(part_seed(seed, "batch"))
        self.obs = torch.randn(64, 4, generator=self.generator)
        self.targets = self.obs.sum(1)
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=config.lr)
        self.num_discarded = 0

    def step(self):
        rows = torch.randint(64, (16,), generator=self.generator)
        values = self.policy.values(self.obs[rows], {}, torch.zeros(16, dtype=torch.bool))
        loss = (values - self.targets[rows]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.counters[keys.UPDATES] += 1
        self.counters[keys.STEPS] += 1
        return Stats({"losses/total": loss, "finite/losses": any_not_finite([loss])})

    def learned_state(self):
        return {"policy": self.policy.state_dict(), "generator": self.generator.get_state()}

    def load_learned_state(self, state):
        self.policy.load_state_dict(state["policy"])
        self.generator.set_state(state["generator"])

    def discard_experience(self):
        self.num_discarded += 1


def make(*, seed=3, **options):
    return Trainer(RegressionConfig(seed=seed, device="cpu").build(), **({"tracker": MemoryTracker()} | options))


def weights(trainer):
    return torch.cat([weight.detach().flatten() for weight in trainer.algorithm.policy.parameters()])


def test_a_run_goes_by_its_updates():
    trainer = make()
    stats = run(trainer, stop_conditions=[HitsLowerBound("losses/total", 0.5)], max_steps=200)
    assert "HitsLowerBound('losses/total', 0.5)" in stats.stop_reason
    steps = int(stats[keys.STEPS])
    assert [step for step, _ in trainer.tracker.history("losses/total")] == list(range(1, steps + 1))
    assert stats.keys() <= trainer.metric_names
    assert not [
        name for name in trainer.metric_names if name.startswith(("returns/", "rewards/", "episodes/", "eval/"))
    ]
    assert trainer.tracker.params["lr"] == 1e-2
    assert not [name for name in trainer.tracker.params if name.startswith(("env", "eval", "num_eval"))]
    result, head, *_ = trainer.tracker.description.split("\n\n")
    assert head.startswith("**Regression on `data set`**, model `mlp`: seed")
    assert result.startswith(f"Stopped after {steps} steps, {steps} updates: ")


def test_what_needs_an_environment_is_refused_before_the_first_step():
    trainer = make()
    for options, message in (
        ({"steps_per_eval": 1}, "there is nothing to evaluate in: .* Give the trainer an `eval_env`"),
        ({"env_config": {"length": 1.0}}, "`env_config` would never apply: the algorithm trains without"),
        ({"eval_env_config": {"length": 1.0}}, "`eval_env_config` would never apply: give the trainer an `eval_env`"),
        ({"stop_conditions": [HitsUpperBound("returns/mean", 1)]}, "Unknown metric 'returns/mean'"),
    ):
        with pytest.raises(ValueError, match=message):
            run(trainer, max_steps=1, **options)
    with pytest.raises(RuntimeError, match="there is nothing to evaluate in"):
        trainer.eval()
    with pytest.raises(ValueError, match="`eval_env=True` needs to make an environment, but"):
        make(eval_env=True)
    assert trainer.state[keys.STEPS] == 0


def test_it_is_evaluated_in_an_environment_that_is_given():
    confirmed = Confirmed(HitsUpperBound(keys.UPDATES, 2), by=HitsUpperBound("eval/returns/mean", 1))
    for eval_env in (CartPole, CartPole(3)):
        trainer = make(eval_env=eval_env, num_eval_envs=3)
        stats = run(
            trainer, steps_per_eval=2, eval_env_config={"length": 0.7}, max_steps=3, stop_conditions=[confirmed]
        )
        assert stats[keys.STEPS] == 2
        assert stats["eval/episodes/ended"] == 3
        assert trainer.tracker.params["eval_env"] == "CartPole"
        assert trainer.tracker.params["eval_env_config.length"] == 0.7
        assert trainer.evaluator.env.config == {"length": 0.7}
        trainer.eval(env_config={"length": 0.9})
        run(trainer, max_steps=1, steps_per_eval=1)
        assert trainer.evaluator.env.config == {}
    for other, message in ((Pendulum, "episodes that end|spaces"), (CartPoleInfinite, "never ends")):
        with pytest.raises(ValueError, match=message):
            make(eval_env=other)


def test_it_is_described_and_built_again_without_an_environment():
    algorithm = make(seed=None).algorithm
    spec, resolved = described(algorithm)
    assert (spec.env.env, resolved["env_class"], problems_of(spec, resolved)) == ("", None, [])
    again = build_algorithm(spec, resolved, {"lr": 0.5})
    assert again.config == RegressionConfig(seed=algorithm.seed, device="cpu", lr=0.5)


def spoil(trainer):
    trainer.algorithm.targets[:] = torch.nan


def mend(trainer):
    trainer.algorithm.targets[:] = trainer.algorithm.obs.sum(1)


@pytest.mark.parametrize("mode", ["stop", "skip", "rollback"])
def test_an_update_that_is_not_finite(mode, tmp_path):
    seen = []
    callbacks = [lambda trainer, stats: seen.append(weights(trainer)), at_step(3, spoil), at_step(4, mend)]
    trainer = make(on_non_finite=mode, callbacks=callbacks, checkpoints=Checkpoints(tmp_path, every_steps=2))
    if mode == "stop":
        with pytest.raises(NonFiniteError, match="losses not finite at step 4, in no single environment") as error:
            run(trainer, max_steps=6)
        assert error.value.diagnosis["gradients"]
        return
    back = "before the step" if mode == "skip" else "in 000002-step-2"
    with pytest.warns(RuntimeWarning, match=f"losses not finite at step 4, .*as they were {back}"):
        stats = run(trainer, max_steps=6)
    assert torch.equal(seen[3], seen[2 if mode == "skip" else 1])
    assert not torch.equal(seen[4], seen[3])
    assert stats[keys.UPDATES] == 6
    assert trainer.algorithm.num_discarded == 0
