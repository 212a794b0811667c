"""What options of configs may be: ranges, kinds, and values of schedules are checked before anything is built."""

from __future__ import annotations

import array
import collections
import dataclasses
import enum
import json
import math
import re
import types
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Optional

import gymnasium
import numpy as np
import pytest
import torch
from tests.algorithms.by_hand import dataset
from tests.algorithms.test_conformance import train

from rl8x.algorithms import (
    AlgorithmConfig,
    BCConfig,
    DistillationConfig,
    DQNConfig,
    FlashSACConfig,
    IQLConfig,
    PPOConfig,
    PQNConfig,
    SACConfig,
    TD3Config,
)
from rl8x.algorithms.hyperparameters import draw_seed, option, part_seed, seeded
from rl8x.conditions import WallTime
from rl8x.config.describe import algorithm_spec, env_spec
from rl8x.envs import CartPole, Pendulum
from rl8x.plain import own_values
from rl8x.policy import Policy
from rl8x.randomization import Adaptive, Learnable, Uniform
from rl8x.tracking import NullTracker
from rl8x.trainers import Trainer

FALLING = {"kind": "interp", "points": [[0, 5e-4], [100, 0.0]]}


@pytest.mark.parametrize("config", [PPOConfig, PQNConfig, DQNConfig, SACConfig, BCConfig, DistillationConfig])
def test_a_learning_rate_never_falls_below_0(config):
    with pytest.raises(ValueError, match=r"`lr_schedule` must stay at least 0; got -0\.001"):
        config(lr_schedule=[[0, 1e-3], [100, -1e-3]])


ADAPTS, CONSTANT = {"lr_schedule": FALLING}, {"lr_schedule": None}
UNUSED = [  # options, and which have no effect: what schedules replace, and what others switch off
    (PPOConfig, {"lr": 3e-3} | ADAPTS, ["lr=0.003"]),
    (PPOConfig, {"entropy_coeff": 0.1, "entropy_coeff_schedule": FALLING}, ["entropy_coeff=0.1"]),
    (PPOConfig, {"recompute_advantages": True, "num_sgd_iters": 1}, ["recompute_advantages=True"]),
    (FlashSACConfig, {"lr": 1e-3}, ["lr=0.001"]),
    (FlashSACConfig, {"v_max": 9.0, "num_atoms": 1}, ["v_max=9.0"]),
    (DQNConfig, {"epsilon": 0.5, "epsilon_schedule": [[0, 1.0]]}, ["epsilon=0.5"]),
    (DQNConfig, {"v_max": 500.0, "num_quantiles": 8}, ["v_max=500.0"]),
    (DQNConfig, {"huber_delta": 0.5, "num_atoms": 8}, ["huber_delta=0.5"]),
    (DQNConfig, {"epsilon_decay_steps": 9, "epsilon_schedule": [[0, 0.05]]}, ["epsilon_decay_steps=9"]),
    (DQNConfig, {"priority_alpha": 0.5}, ["priority_alpha=0.5"]),
    (DQNConfig, {"priority_beta_schedule": [[0, 0.5]]}, ["priority_beta_schedule=[[0, 0.5]]"]),
    (SACConfig, {"v_min": -9.0, "v_max": 9.0}, ["v_min=-9.0", "v_max=9.0"]),
    (SACConfig, {"alpha": 0.2, "target_entropy": -1.0}, ["target_entropy=-1.0"]),
    (SACConfig, {"alpha": 0.0, "initial_alpha": 0.5}, ["initial_alpha=0.5"]),
    # What has an effect, is what a schedule begins with, or was given by nobody but a preset.
    (PPOConfig, {"lr": 5e-4} | ADAPTS, []),
    (PPOConfig, ADAPTS, []),
    (PPOConfig, {"lr": 0.25, "entropy_coeff": 0.1} | CONSTANT, []),
    (FlashSACConfig, {}, []),
    (FlashSACConfig, {"lr": 1e-3} | CONSTANT, []),
    (FlashSACConfig, {"alpha": 0.2, "num_atoms": 1}, []),
    (SACConfig, {"v_min": -9.0, "num_atoms": 11}, []),
    (SACConfig, {"target_entropy": -1.0, "initial_alpha": 0.5}, []),
    (DQNConfig, {"priority_alpha": 0.5, "prioritized": True}, []),
]


@pytest.mark.parametrize(("config", "options", "names"), UNUSED)
def test_what_has_no_effect_is_warned_of(config, options, names, recwarn):
    size = {} if config is PPOConfig else {"buffer_size": 4096}
    made = config(num_envs=2, device="cpu", **size, **options)
    made.build(Pendulum if issubclass(config, SACConfig) else CartPole)
    told = [str(each.message) for each in recwarn]
    assert [each.split("`")[1] for each in told] == names
    assert all(each.startswith("`") and "` has no effect: " in each for each in told)
    replaced = [name.split("=")[0] for name in names if f"{name.split('=')[0]}_schedule" in options]
    assert all(f"`{name}_schedule` replaces it" in text for name, text in zip(replaced, told, strict=False))


@pytest.mark.parametrize("name", ["num_envs", "horizon", "lr", "execution", "precision", "device", "model_config"])
def test_none_is_refused_where_an_option_has_no_such_meaning(name):
    with pytest.raises(TypeError, match=f"`{name}` must be .*; got None. Leave it out for its default"):
        PPOConfig(**{name: None})


def test_none_is_legal_where_an_annotation_or_a_default_says_so():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Mine(AlgorithmConfig):
        first: Optional[int] = option(1, "One.")  # noqa: UP045 - as users write it
        second: int = option(None, "Two.")  # type: ignore[assignment]

    assert (Mine(first=None).first, Mine().second) == (None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": -1e-8}, "`eps` must be finite, at least 0; got -1e-08"),
        ({"betas": [0.9, 1.0]}, r"`betas` must be finite, at least 0 and less than 1; got 1\.0"),
        ({"betas": 0.9}, r"`betas` must be two numbers; got 0\.9"),
        ({"weight_decay": "0.1"}, "`weight_decay` must be finite, at least 0; got '0.1'"),
        ({"epsilon": 1e-8}, "no option 'epsilon'"),
        ({"eps": math.nan}, "`eps` must be finite, at least 0; got nan"),
    ],
)
def test_options_of_an_optimizer_are_checked_with_the_config(options, message):
    with pytest.raises(ValueError, match=f"`optimizer_config`.*{message}"):
        SACConfig(optimizer="adam", optimizer_config=options)


def numpys(value):
    """Return plain data with NumPy's numbers in the place of Python's."""
    if isinstance(value, dict):
        return {name: numpys(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(numpys, value))
    kinds = {bool: np.bool_, int: np.int64, float: np.float64}
    return kinds[type(value)](value) if type(value) in kinds else value


CARTPOLE = CartPole.single_observation_space, CartPole.single_action_space
SMALL = PPOConfig(num_envs=2, horizon=2, device="cpu", seed=0)
ADAPTIVE = {"start": (0.4, 0.6), "thresholds": (5.0, 20.0), "step": 0.1, "episodes": 3}
LEARNABLE = {"base": Uniform(0.4, 0.6), "levels": 2, "candidates": 3, "episodes": 4, "threshold": 9.0}

MLP = {"model_config": {"hidden_sizes": [8, 4], "shared": True}}
ATTENTION = {"model_config": {"window": 3, "width": 8, "num_heads": 2}}


@pytest.mark.parametrize(
    ("shown", "given"),
    [
        (lambda given: Policy(*CARTPOLE, **given).arguments, MLP),
        (lambda given: Policy(*CARTPOLE, model="gru", **given).arguments, {"model_config": {"hidden_size": 8}}),
        (lambda given: Policy(*CARTPOLE, model="attention", **given).arguments, ATTENTION),
        (lambda given: Adaptive(**given).to_dict(), ADAPTIVE),
        (lambda given: Learnable(**given).to_dict(), LEARNABLE),
        (lambda given: env_spec(SMALL.build(CartPole, **given)).env_kwargs, {"time_limit": 5}),
        (lambda given: WallTime(**given).arguments(), {"duration": 0.5}),
    ],
)
def test_numbers_of_numpy_are_kept_as_pythons_wherever_they_are_given(shown, given):
    assert own_values(numpys(given)) == given
    own, numpy = shown(given), shown(numpys(given))
    assert repr(own) == repr(numpy)  # in which their types show


class Own(Sequence):
    """A sequence as users write one."""

    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, place):
        return self.values[place]


class Word(str):
    """A text of a class of one's own."""

    def __str__(self):
        return "something else"


class Rate(float):
    """A number of a class of one's own."""


WORD = enum.Enum("WORD", {"A": "hidden_sizes"}, type=str).A
BETAS = [0.5, 0.75]
KEPT = [
    ("num_envs", np.int64(4), 4),
    ("lr", np.float32(0.5), 0.5),
    ("lr", Rate(0.5), 0.5),
    ("device", Word("cpu"), "cpu"),
    ("buffer_path", Path("replay"), "replay"),
    ("shuffle_minibatches", np.bool_(False), False),
    ("lr_schedule", [collections.deque([0.0, 1e-3])], [[0.0, 1e-3]]),
    *(("optimizer_config", {"betas": kind(BETAS)}, {"betas": BETAS}) for kind in (collections.UserList, Own)),
    ("optimizer_config", {"betas": array.array("d", BETAS)}, {"betas": BETAS}),
    ("model_config", {"hidden_sizes": range(3, 6)}, {"hidden_sizes": [3, 4, 5]}),
    ("distribution_config", {"log_std_bounds": Own([-2.0, 1.0])}, {"log_std_bounds": [-2.0, 1.0]}),
    *(
        ("model_config", {key: [3]}, {"hidden_sizes": [3]})
        for key in (Word("hidden_sizes"), np.str_("hidden_sizes"), WORD)
    ),
    *(
        ("model_config", kind({"hidden_sizes": [3]}), {"hidden_sizes": [3]})
        for kind in (types.MappingProxyType, collections.UserDict, collections.OrderedDict)
    ),
]


@pytest.mark.parametrize(("name", "given", "kept"), KEPT)
def test_values_of_every_class_are_kept_as_files_have_them(name, given, kept):
    """Else a run trains by them, and its checkpoints cannot say what they were."""
    make = DQNConfig if name == "buffer_path" else PPOConfig
    config, plain = make(**{name: given}), make(**{name: kept})
    assert (config, repr(config)) == (plain, repr(plain))
    assert repr(json.loads(json.dumps(algorithm_spec(config).algorithm_config[name]))) == repr(kept)


def test_spaces_are_neither_lists_nor_texts():
    assert isinstance(own_values(gymnasium.spaces.Tuple([])), gymnasium.spaces.Tuple)


# Of these many are much work, which nobody can refuse.
MUCH_WORK = {"num_sgd_iters", "updates_per_step", "seed"}
COUNTS = [
    (config, field.name)
    for config in (PPOConfig, PQNConfig, DQNConfig, SACConfig, TD3Config, BCConfig, IQLConfig)
    for field in dataclasses.fields(config)
    if str(field.type).startswith("int") and field.name not in MUCH_WORK
]


@pytest.mark.parametrize(("config", "name"), COUNTS)
def test_a_count_of_far_too_many_zeros_is_refused_when_it_is_built_or_does_no_harm(config, name):
    small = {"num_envs": 2, "horizon": 2, "warmup_steps": 2, "batch_size": 2, "buffer_size": 50}
    env = [CartPole if config in (PPOConfig, PQNConfig, DQNConfig) else Pendulum]
    if config in (BCConfig, IQLConfig) or name == "cql_samples":
        small = {"batch_size": 2, "updates_per_step": 1, "dataset": dataset(Pendulum, size=8)}
        small, env = small | ({"cql_coeff": 1.0} if name == "cql_samples" else {}), []
    options = {key: value for key, value in small.items() if key in config.__dataclass_fields__}
    options |= {"device": "cpu", "seed": 0, "execution": "eager"}
    for count in (10**13, 10**30):
        try:
            algorithm = config(**{**options, name: count}).build(*env)
        except ValueError as error:
            said = str(error)
            assert re.search(f"`{name}`|{name}=", said)
        else:
            train(algorithm, 1)


def test_counts_of_numpy_are_counts():
    config = PPOConfig(num_envs=4, horizon=4, device="cpu", seed=0, model_config={"hidden_sizes": [8]})
    trainer = Trainer(config.build(CartPole, time_limit=5), tracker=NullTracker(), num_eval_envs=np.int64(3))
    assert trainer.evaluations.env.num_envs == 3
    frames = [trainer.evaluate_grid({"length": [0.5]}, episodes=kind(2)) for kind in (int, np.int64)]
    assert frames[0].equals(frames[1])


# -- seeds

PARTS = ("env", "weights", "sampling", "minibatches", "eval_env", "eval_sampling")


def test_every_part_of_a_run_has_a_seed_of_its_own():
    words = np.random.SeedSequence(7).generate_state(6, dtype=np.uint64) >> np.uint64(1)
    assert [part_seed(7, part) for part in PARTS] == [int(word) for word in words]
    seeds = [part_seed(seed, part) for seed in range(20) for part in (*PARTS, "replay", "target", "")]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert draw_seed(5) == 5
    assert len({draw_seed(None) for _ in range(20)}) == 20


def test_threads_draw_none_of_each_others_numbers():
    def draw(seed):
        with seeded(seed, torch.device("cpu")):
            return torch.stack([torch.rand(()) for _ in range(2000)])

    alone = [draw(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        assert all(map(torch.equal, threads.map(draw, range(4)), alone))
