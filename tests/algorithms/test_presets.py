"""Presets by one word: in Python, in run files and on the command line."""

import dataclasses

import pytest

from rl8x.algorithms import DQNConfig, FastSACConfig, FastTD3Config, PPOConfig, SACConfig, TD3Config
from rl8x.algorithms.hyperparameters import PRESETS, Default
from rl8x.cli.main import main
from rl8x.cli.options import read_run
from rl8x.config import RunSpec
from rl8x.envs import CartPole

# What rl8's AlgorithmConfig has, under rl8x's names.
RL8 = {"num_envs": 8192, "horizon": 32, "gamma": 0.95, "gae_lambda": 0.95, "normalize_advantages": True}
RL8 |= {"clip_param": 0.2, "dual_clip_param": None, "vf_clip_param": 5.0, "vf_coeff": 1.0, "entropy_coeff": 0.0}
RL8 |= {"target_kl_div": None, "max_grad_norm": 5.0, "num_sgd_iters": 4, "sgd_minibatch_size": None}
RL8 |= {"shuffle_minibatches": True, "accumulate_grads": False, "normalize_rewards": True}
RL8 |= {"lr": 1e-3, "lr_schedule": None, "model_config": {"hidden_sizes": [256, 256]}}
# And what it has not.
RL8 |= {"normalize_observations": False, "normalize_values": False}


def values(config):
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def typed(*words, **options):
    return read_run({"words": ("CartPole", *words), "file": None, "trust": False, **options}).algorithm.make_config()


def test_rl8s_defaults():
    assert values(PPOConfig.rl8()) == values(PPOConfig()) | RL8


@pytest.mark.parametrize(
    ("config_class", "name"), [(PPOConfig, "rl8"), (PPOConfig, "gpu"), (SACConfig, "gpu"), (TD3Config, "gpu")]
)
def test_three_doors_give_the_same_and_what_is_given_wins(config_class, name):
    algorithm = config_class.__name__.removesuffix("Config")
    for given in ({}, {"num_envs": 256, "lr": 5e-4}):
        config = getattr(config_class, name)(**given)
        run = RunSpec.from_plain({"env": "Pendulum", "algorithm": algorithm, "preset": name, "algorithm_config": given})
        assert RunSpec.from_plain(run.to_plain()).algorithm.make_config() == run.algorithm.make_config() == config
        assert typed(algorithm=algorithm, preset=name, **given) == config
        assert typed(f"algorithm={algorithm}", f"preset={name}", *map("{0[0]}={0[1]}".format, given.items())) == config
        expected = values(config_class()) | PRESETS[algorithm][name] | given
        assert values(config) | {"sgd_minibatch_size": None} == expected | {"sgd_minibatch_size": None}


def test_what_nobody_gave_gives_way_under_a_preset_too():
    assert isinstance(PPOConfig.rl8().num_envs, Default)
    assert not isinstance(PPOConfig.rl8(num_envs=8192).num_envs, Default)
    assert PPOConfig.rl8(horizon=4, device="cpu").build(CartPole(3, device="cpu")).config.num_envs == 3
    assert PPOConfig.gpu(num_envs=100).sgd_minibatch_size == 200  # the divisor of 3,200 nearest to a 16th of it


def test_a_model_that_is_given_takes_the_place_of_the_presets_arguments():
    assert PPOConfig.rl8(model="gru").model_config == {}
    assert PPOConfig.rl8(model="mlp", model_config={"hidden_sizes": [8]}).model_config == {"hidden_sizes": [8]}
    assert PPOConfig.rl8(model=None).model_config == {"hidden_sizes": [256, 256]}


def test_fast_presets_are_those_of_a_gpu():
    for preset, base in ((FastSACConfig, SACConfig), (FastTD3Config, TD3Config)):
        assert values(preset()) == values(base.gpu())
    assert issubclass(FastSACConfig, SACConfig)


@pytest.mark.parametrize(
    ("config_class", "name", "why"),
    [
        (PPOConfig, "big", "no preset 'big': PPO has rl8 and gpu."),
        (SACConfig, "rl8", "no preset 'rl8': SAC has gpu."),
        (DQNConfig, "gpu", "no preset 'gpu': DQN has none; others do: PPO (rl8, gpu), SAC (gpu), TD3 (gpu)."),
    ],
)
def test_others_are_refused(config_class, name, why, capsys):
    with pytest.raises(ValueError, match="no preset") as error:
        config_class.preset(name)
    assert str(error.value) == why
    algorithm = config_class.__name__.removesuffix("Config")
    assert main(["train", "CartPole", "--algorithm", algorithm, "--preset", name, "--dry-run"]) == 2
    assert why in " ".join(capsys.readouterr().err.split())


def test_a_dry_run_keeps_the_word_and_params_have_the_values(capsys):
    assert main(["train", "CartPole", "--preset", "rl8", "--num-envs", "4", "--dry-run"]) == 0
    assert "preset: rl8\n" in capsys.readouterr().out
    params = PPOConfig.rl8(num_envs=4, device="cpu").build(CartPole).params
    assert (params["gamma"], params["num_sgd_iters"], params["num_envs"]) == (0.95, 4, 4)
    assert params["model_config.hidden_sizes"] == [256, 256]
