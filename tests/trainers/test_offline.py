"""Algorithms without an environment, which learn from data that are fixed."""

import pytest
import torch
from tests.trainers.helpers import run

from rl8x import BCConfig, Confirmed, DQNConfig, HitsUpperBound, MemoryTracker, keys
from rl8x.envs import CartPole, CartPoleInfinite, Pendulum
from rl8x.replay.recording import record
from rl8x.trainers import NonFiniteError, Trainer


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "walks"
    record(None, CartPole(2, seed=0), 64).dataset.save(path)
    options = {"updates_per_step": 1, "batch_size": 16, "lr": 1e-2, "model_config": {"hidden_sizes": [8]}}
    config = BCConfig(dataset=str(path), device="cpu", seed=3, execution="eager", **options)
    return lambda **options: Trainer(config.build(), tracker=MemoryTracker(), **options)


def test_what_needs_an_environment_is_refused_before_the_first_step(make):
    trainer = make()
    for options, message in (
        ({"steps_per_eval": 1}, "there is nothing to evaluate in: .* Give the trainer an `eval_env`"),
        ({"env_config": {"length": 1.0}}, "`env_config` would never apply: the algorithm trains without"),
        ({"eval_env_config": {"length": 1.0}}, "`eval_env_config` would never apply: give the trainer an `eval_env`"),
        *(
            ({"stop_conditions": [HitsUpperBound(name, 1)]}, f"Unknown metric '{name}'")  # it would wait for ever
            for name in ("returns/mean", keys.ENV_STEPS, keys.ENV_EPISODES)
        ),
    ):
        with pytest.raises(ValueError, match=message):
            run(trainer, max_steps=1, **options)
    with pytest.raises(RuntimeError, match="there is nothing to evaluate in"):
        trainer.eval()
    with pytest.raises(ValueError, match="`eval_env=True` needs to make an environment, but"):
        make(eval_env=True)
    assert trainer.state[keys.STEPS] == 0


def test_it_is_evaluated_in_an_environment_that_is_given(make):
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
        assert trainer.evaluations.env.config == {"length": 0.7}
        trainer.eval(env_config={"length": 0.9})
        run(trainer, max_steps=1, steps_per_eval=1)
        assert trainer.evaluations.env.config == {}
    for other, message in ((Pendulum, "episodes that end|spaces"), (CartPoleInfinite, "never ends")):
        with pytest.raises(ValueError, match=message):
            make(eval_env=other)


def test_a_description_names_no_copies_where_there_are_none(make):
    config = DQNConfig(dataset=make().algorithm.config.dataset, batch_size=8, updates_per_step=1, device="cpu")
    trainer = Trainer(config.build(), tracker=MemoryTracker())
    run(trainer, max_steps=1)
    described = trainer.tracker.description
    assert f"seed `{trainer.algorithm.seed}`" in described
    assert not any(name in described for name in ("num_envs", "horizon"))


def test_an_update_that_is_not_finite_is_in_no_environment(make):
    trainer = make()
    trainer.step()
    distribution = trainer.algorithm.policy.distribution
    logp, distribution.logp = distribution.logp, lambda *given: logp(*given) * torch.nan
    with pytest.raises(NonFiniteError, match="losses not finite at step 2, in no single environment"):
        trainer.step()
