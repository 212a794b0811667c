"""Films of evaluations: kept as artifacts, without a trace in the training; and those that a user asks for."""

from __future__ import annotations

import io

import gymnasium
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from PIL import Image

from rl8x import MemoryTracker, NullTracker, PPOConfig, Trainer
from rl8x.algorithms import BCConfig
from rl8x.envs import AlgoTrading, CartPole, Env, GymnasiumEnv, Pendulum
from rl8x.randomization import Uniform

SMALL = {"num_envs": 4, "horizon": 8, "seed": 3, "device": "cpu", "model_config": {"hidden_sizes": [8]}}


def make(env=CartPole, tracker=None, checkpoints=False, config=SMALL, **options):
    tracker = MemoryTracker() if tracker is None else tracker
    return Trainer(PPOConfig(**config).build(env), tracker=tracker, checkpoints=checkpoints, num_eval_envs=4, **options)


def rows(trainer):
    return [
        {name: value for name, value in row.metrics.items() if not name.startswith(("profiling/", "memory/"))}
        for row in trainer.tracker.rows
    ]


def test_every_second_evaluation_is_filmed_and_the_training_notices_nothing():
    env_config = {"length": Uniform(0.3, 0.6)}
    filmed, plain = make(), make()
    filmed.run(steps_per_eval=1, evals_per_film=2, max_steps=5, env_config=env_config, progress="none")
    plain.run(steps_per_eval=1, max_steps=5, env_config=env_config, progress="none")
    films = [name for name in filmed.tracker.artifacts if name.startswith("films/")]
    assert films == ["films/step-00000002.gif", "films/step-00000004.gif"]
    assert rows(filmed) == rows(plain)
    assert filmed.tracker.params["run.evals_per_film"] == 2


class Plain(CartPole):
    draw = Env.draw


def test_what_cannot_be_filmed_is_told_before_the_first_step():
    trainer = make(Plain)
    with pytest.raises(ValueError, match="Plain cannot be rendered: give it a `draw`"):
        trainer.run(steps_per_eval=1, evals_per_film=1, max_steps=1, progress="none")
    assert trainer.state["algorithm/steps"] == 0
    with pytest.raises(ValueError, match="`evals_per_film` counts the evaluations of the run: give `steps_per_eval`"):
        make().run(evals_per_film=1, max_steps=1, progress="none")
    with pytest.raises(ValueError, match="`evals_per_film` must be at least 1; got 0"):
        make().run(steps_per_eval=1, evals_per_film=0, progress="none")


def test_a_film_has_the_physics_of_the_evaluations_or_those_asked_for(tmp_path):
    trainer = make()
    trainer.run(steps_per_eval=1, eval_env_config={"length": 0.7}, max_steps=1, progress="none")
    made = trainer.play(max_steps=2)
    assert (made.suffix, made.returns.shape) == (".gif", (1, 1))
    captioned = Image.open(io.BytesIO(made.data))
    assert captioned.size == (480, 320 + 20 + 20)  # the parameter above, steps and return below
    assert Image.open(io.BytesIO(make().play(max_steps=2).data)).size == (480, 320 + 20)
    path = tmp_path / "wide" / "a.gif"
    wide = trainer.play(path, env_config={"length": [0.2, 0.5, 1.0]}, max_steps=2, episodes=2)
    assert wide.returns.tolist() == [[2.0] * 3] * 2
    assert path.read_bytes() == wide.data
    with pytest.raises(ValueError, match="no parameter 'lenght'"):
        trainer.play(env_config={"lenght": 1.0})
    with pytest.raises(ValueError, match="num_envs must be at least 1; got 0"):
        trainer.play(copies=0)


def test_an_instance_is_copied_and_as_many_copies_are_seen_as_are_asked_for():
    env = CartPole(4, seed=0)
    trainer = make(env)
    made = trainer.play(copies=2, max_steps=3)
    assert made.returns.shape == (1, 2)
    made = trainer.play(env_config={"length": [0.2, 1.0]}, max_steps=3)
    assert made.returns.shape == (1, 2)
    assert env.carry is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("CartPole-v1", None),
        (CartPoleEnv, None),  # takes a render_mode
        (lambda: gymnasium.make("CartPole-v1"), "GymnasiumEnv renders no frames. Make it with render_mode='rgb_array'"),
        (lambda: gymnasium.make("CartPole-v1", render_mode="rgb_array"), None),
    ],
)
def test_a_simulator_that_renders_nothing_is_made_again_to_be_filmed(source, message):
    env = GymnasiumEnv(source, 4, seed=0)
    trainer = make(env)
    if message is not None:
        with pytest.raises(ValueError, match=message):
            trainer.play(max_steps=2)
        return
    pytest.importorskip("pygame", reason="pygame is not installed, by which Gymnasium draws CartPole")
    assert trainer.play(copies=2, max_steps=2).lengths.tolist() == [[2, 2]]
    assert env.render_mode in (None, "rgb_array")


@pytest.mark.parametrize("env", [AlgoTrading, Pendulum])
def test_masks_memories_and_normalisers_play(env):
    config = SMALL | {"model": "lstm", "model_config": {"hidden_size": 8}, "normalize_observations": True, "seq_len": 4}
    trainer = make(env, config=config)
    trainer.step()
    assert trainer.play(max_steps=3).lengths.tolist() == [[3]]


def test_an_algorithm_without_an_environment_plays_in_that_of_its_evaluations(tmp_path):
    from rl8x.cli.collect import record

    record(make().algorithm.policy, CartPole(2, seed=0), 40).dataset.save(tmp_path / "data")
    config = BCConfig(
        dataset=str(tmp_path / "data"), device="cpu", seed=0, batch_size=4, model_config={"hidden_sizes": [8]}
    )
    trainer = Trainer(config.build(), tracker=NullTracker(), checkpoints=False, eval_env="CartPole", num_eval_envs=3)
    assert trainer.play(max_steps=2).returns.shape == (1, 1)
    alone = Trainer(config.build(), tracker=NullTracker(), checkpoints=False)
    with pytest.raises(ValueError, match="there is nothing to film: the algorithm trains without an environment"):
        alone.play()
