"""How configs become algorithms: classes, presets, environments, and numbers that nobody gave."""

import dataclasses
import functools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv

from rl8x import NullTracker, Policy, Trainer
from rl8x.algorithms import (
    AlgorithmConfig,
    DQNConfig,
    FastSACConfig,
    FastTD3Config,
    GenericAlgorithmBase,
    PPOConfig,
    PQNConfig,
    SACConfig,
    TD3Config,
)
from rl8x.algorithms.hyperparameters import PRESETS, Default
from rl8x.cli.main import main
from rl8x.cli.options import read_run
from rl8x.config import RunSpec
from rl8x.envs import CartPole, GymnasiumEnv
from rl8x.export import export_policy
from rl8x.rollouts.statistics import Stats


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchConfig(AlgorithmConfig):
    """Has no environment."""


class Batch(GenericAlgorithmBase[BatchConfig], config=BatchConfig):
    """Does nothing."""

    def step(self):
        return Stats({})

    def learned_state(self):
        return {"weight": torch.ones(2)}

    def load_learned_state(self, state):
        assert state["weight"].tolist() == [1.0, 1.0]


def test_a_config_builds_the_algorithm_that_names_it():
    with pytest.raises(TypeError, match="BatchConfig trains without an environment"):
        BatchConfig().build(CartPole)
    built = BatchConfig(seed=3, device="cpu").build()
    assert isinstance(built, Batch)
    assert (built.env, built.seed, built.clock) == (None, 3, "algorithm/updates")
    assert dict(built.collect()) == {}
    assert built.locate_non_finite() == {}
    built.counters["algorithm/updates"] = 4
    other = BatchConfig(seed=3, device="cpu").build()
    other.load_state_dict(built.state_dict())
    assert other.counters == built.counters
    assert built.tags == {"rl8x.execution": "eager"}


def test_training_goes_on_in_its_own_physics_where_an_evaluation_was_interrupted(monkeypatch):
    config = PPOConfig(num_envs=4, horizon=3, seed=1, device="cpu", model_config={"hidden_sizes": [8]})
    algorithm = dataclasses.replace(config, horizons_per_env_reset=2).build(CartPole)
    evaluate, calls = algorithm.horizons.collector.evaluate, []

    def interrupted(*args, **options):
        calls.append(evaluate(*args, **options))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return calls[-1]

    monkeypatch.setattr(algorithm.horizons.collector, "evaluate", interrupted)
    trainer = Trainer(algorithm, tracker=NullTracker(), eval_env=False)
    with pytest.raises(KeyboardInterrupt):
        trainer.eval(env_config={"length": 0.9})
    assert algorithm.counters["algorithm/collects"] == 0
    trainer.eval(env_config={"length": 0.9})  # it is still its turn
    algorithm.collect()
    assert algorithm.env.carry["parameters"]["length"].tolist() == [0.5] * 4
    assert algorithm.rollout["starts"][0].all()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ManyConfig(PPOConfig, defaults={"num_envs": 16, "model_config": {"hidden_sizes": [8]}, "horizon": 4}):
    """A preset of PPO."""


def test_a_preset_is_its_algorithm_with_other_defaults_of_the_same_ranges_and_explanations():
    preset, plain = ManyConfig(), PPOConfig()
    changed = {"num_envs": 16, "horizon": 4, "model_config": {"hidden_sizes": [8]}, "sgd_minibatch_size": 64}
    assert {**dataclasses.asdict(plain), **changed} == dataclasses.asdict(preset)
    assert ManyConfig(num_envs=32).num_envs == 32
    assert preset.model_config is not ManyConfig().model_config
    for field, same in zip(dataclasses.fields(PPOConfig), dataclasses.fields(ManyConfig), strict=True):
        assert (field.name, field.type, field.metadata) == (same.name, same.type, same.metadata)
    with pytest.raises(ValueError, match="`num_envs` must be at least 1; got 0"):
        ManyConfig(num_envs=0)
    assert type(preset.build(CartPole)).__name__ == "PPO"


@pytest.mark.parametrize("factory", [lambda: CartPole(4), lambda num_envs: CartPole(num_envs)])
def test_a_factory_that_cannot_be_called_as_factories_are_is_told_how(factory):
    with pytest.raises(TypeError, match=r"is called with the number of copies, `device=` and `seed=`.*GymnasiumEnv"):
        PPOConfig(num_envs=4, device="cpu").build(factory)
    PPOConfig(num_envs=4, device="cpu").build(lambda num_envs, **options: CartPole(num_envs, **options))


def test_parameters_of_an_environment_are_no_arguments_of_its_class():
    with pytest.raises(ValueError, match=r"CartPole takes .*'length'\. `env_config` sets parameters\.$"):
        PPOConfig(num_envs=4).build(CartPole, length=1.0)


@pytest.mark.parametrize(("dtype", "device"), [(torch.float64, "cpu"), (torch.float32, "meta")])
def test_another_default_dtype_or_device_is_refused_in_a_line(dtype, device):
    trainer = Trainer(PPOConfig(**TINY, num_envs=2).build(CartPole), tracker=NullTracker())
    algorithm, build = trainer.algorithm, functools.partial(PPOConfig(num_envs=4, device="cpu").build, CartPole)
    calls = [build, algorithm.collect, algorithm.step, trainer.step, trainer.eval, trainer.run]
    policy = algorithm.policy
    calls += [functools.partial(Policy.from_bytes, policy.to_bytes()), functools.partial(policy.decide, [0.0] * 4)]
    calls += [functools.partial(export_policy, policy, "none.pt2")]
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        wrong = f"torch makes tensors of {dtype} on {device}.*call torch.set_default_dtype.*torch.set_default_device"
        for call in calls:
            with pytest.raises(ValueError, match=wrong):
                call()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


TINY = {"horizon": 4, "device": "cpu", "execution": "eager", "model_config": {"hidden_sizes": [4]}}


@pytest.mark.parametrize(
    ("env", "copies"),
    [
        ("CartPole-v1", 16),
        (functools.partial(GymnasiumEnv, CartPoleEnv, vectorization="async"), 16),
        (CartPoleEnv, 16),
        (functools.partial(GymnasiumEnv, "CartPole-v1", vectorization="vector"), 32),
        (CartPole, 32),
        (lambda num_envs, **options: CartPole(num_envs, **options), 32),
        (gymnasium.make_vec("CartPole-v1", 3), 3),  # instances bring their numbers
        (CartPole(3, device="cpu"), 3),
    ],
)
def test_simulators_that_are_stepped_one_by_one_get_16_copies_where_nobody_said_how_many(env, copies, capsys):
    algorithm = PQNConfig(**TINY).build(env)
    assert algorithm.env.num_envs == algorithm.config.num_envs == copies
    assert algorithm.config.sgd_minibatch_size == min(128, 4 * copies)
    told = "is stepped copy by copy: 16 copies, as `num_envs` was not given"
    assert (told in capsys.readouterr().err) == (copies == 16)
    algorithm.env.close()


def of_run_file(number):
    plain = {"env": "CartPole-v1", "algorithm": "PQN", "algorithm_config": {**TINY, "num_envs": number}}
    return RunSpec.from_plain(plain).make_algorithm()


@pytest.mark.parametrize("number", [32, np.int64(32), 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda number: dataclasses.replace(PQNConfig(num_envs=number, **TINY), lr=0.1).build("CartPole-v1"),
        lambda number: dataclasses.replace(PQNConfig(**TINY), num_envs=number).build("CartPole-v1"),
        of_run_file,
    ],
    ids=["config", "replace", "run file"],
)
def test_a_number_of_copies_that_was_given_is_kept(number, make, capsys):
    algorithm = make(number)
    assert algorithm.env.num_envs == number
    assert "copy by copy" not in capsys.readouterr().err
    algorithm.env.close()


# -- numbers that nobody gave


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ({}, 256),
        ({"num_envs": 4, "horizon": 8}, 32),  # all that there is
        ({"num_envs": 128, "horizon": 64}, 512),  # a 16th
        ({"num_envs": 8192, "horizon": 32}, 16384),
        ({"num_envs": 20, "horizon": 20}, 200),  # a divisor of 400
        ({"num_envs": 18, "horizon": 16, "seq_len": 16}, 288),  # of whole sequences: 288 = 18 * 16
        ({"num_envs": 27, "horizon": 32}, 288),  # 864 / 3, of sequences of 4, as a memory has them
        ({"sgd_minibatch_size": 64}, 64),
        ({"sgd_minibatch_size": None}, None),
    ],
)
def test_a_minibatch_that_is_not_given_fits(given, size):
    assert PPOConfig(**given).sgd_minibatch_size == size


@pytest.mark.parametrize("model", ["gru", "lstm", "attention", "mlp", None])
def test_the_default_width_is_that_of_the_mlp_alone(model):
    algorithm = PPOConfig(model=model, num_envs=2, horizon=4, device="cpu").build(CartPole)
    assert algorithm.params.get("model.hidden_sizes") == ([64, 64] if model in ("mlp", None) else None)


# -- presets by one word: in Python, in run files and on the command line


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
