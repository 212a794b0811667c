"""`Trainer.plot` draws what the run's tracker has."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from rl8x import MemoryTracker, MLflowTracker, NullTracker, PPOConfig, Trainer
from rl8x.envs import AlgoTrading, CartPole

SMALL = {"num_envs": 4, "horizon": 32, "seed": 3, "device": "cpu", "model_config": {"hidden_sizes": [8]}}


def trained(tracker, env=CartPole, **options):
    trainer = Trainer(PPOConfig(**SMALL).build(env), tracker=tracker, checkpoints=False, num_eval_envs=2)
    trainer.run(max_steps=4, progress="none", **options)
    return trainer


def lines(panel):
    return {line.get_label(): line.get_xydata().tolist() for line in panel.get_lines()}


def test_returns_of_training_and_evaluations_are_in_one_panel():
    tracker = MemoryTracker()
    figure = trained(tracker, steps_per_eval=2).plot()
    (panel,) = figure.axes
    drawn = lines(panel)
    assert list(drawn) == ["episodes of the training", "evaluations"]
    for label, name in zip(drawn, ("episodes/returns/mean", "eval/returns/mean"), strict=True):
        finite = [[step, value] for step, value in tracker.history(name) if np.isfinite(value)]
        assert np.array(drawn[label]) == pytest.approx(np.array(finite))
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("transitions of training", "mean return")
    image = Image.open(io.BytesIO(figure._repr_png_()))
    assert image.size == (720, 390)


def test_metrics_that_are_named_have_a_panel_each_and_mlflow_is_read(mlruns):
    trainer = trained(MLflowTracker())
    figure = trainer.plot("losses/vf", "losses/policy", "rewards/mean", "monitors/kl_div")
    labels = [panel.get_ylabel() for panel in figure.axes if panel.get_visible()]
    assert labels == ["losses/vf", "losses/policy", "rewards/mean", "monitors/kl_div"]
    ((steps),) = lines(figure.axes[0]).values()
    assert [step for step, _ in steps] == [128, 256, 384, 512]


def test_before_an_episode_has_ended_horizons_are_drawn():
    config = PPOConfig(**SMALL | {"horizon": 2})  # no pole falls in four steps
    trainer = Trainer(config.build(CartPole), tracker=MemoryTracker(), checkpoints=False)
    trainer.run(max_steps=2, progress="none")
    (panel,) = trainer.plot().axes
    assert list(lines(panel)) == ["horizons of the training"]


def test_evaluations_in_the_training_environment_are_drawn():
    (panel,) = trained(MemoryTracker(), AlgoTrading, steps_per_eval=2).plot().axes
    assert list(lines(panel)) == ["episodes of the training", "evaluations"]


def test_what_cannot_be_drawn_is_said():
    trainer = trained(MemoryTracker())
    with pytest.raises(ValueError, match=r"no metric 'losses/fv'. Did you mean .*losses/vf"):
        trainer.plot("losses/fv")
    with pytest.raises(ValueError, match=r"no metric 'eval/returns/mean'. It has no value yet"):
        trainer.plot("eval/returns/mean")
    with pytest.raises(ValueError, match="a NullTracker keeps no metrics to read back"):
        trained(NullTracker()).plot()
    fresh = Trainer(PPOConfig(**SMALL).build(CartPole), tracker=MemoryTracker(), checkpoints=False)
    with pytest.raises(ValueError, match="has logged no returns yet"):
        fresh.plot()
