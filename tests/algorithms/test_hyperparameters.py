"""What options of configs may be: ranges, kinds, and values of schedules are checked before anything is built."""

from __future__ import annotations

import dataclasses
from typing import Optional

import numpy as np
import pytest

from rl8x.algorithms import (
    AlgorithmConfig,
    BCConfig,
    DistillationConfig,
    DQNConfig,
    FlashSACConfig,
    PPOConfig,
    PQNConfig,
    SACConfig,
)
from rl8x.algorithms.hyperparameters import option
from rl8x.envs import CartPole, Pendulum
from rl8x.models import BUILTIN

CONFIGS = [PPOConfig, PQNConfig, DQNConfig, SACConfig, BCConfig, DistillationConfig]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_learning_rate_never_falls_below_0(config):
    falling = {"kind": "interp", "points": [[0, 1e-3], [100, 0.0]]}
    assert config(lr_schedule=falling).lr_schedule == falling
    with pytest.raises(ValueError, match=r"`lr_schedule` must stay at least 0; got -0\.001"):
        config(lr_schedule=[[0, 1e-3], [100, -1e-3]])


FALLING = {"kind": "interp", "points": [[0, 5e-4], [100, 0.0]]}


@pytest.mark.parametrize(
    ("config", "options", "name"),
    [
        (PPOConfig, {"lr": 3e-3, "lr_schedule": FALLING}, "lr=0.003"),
        (FlashSACConfig, {"lr": 1e-3, "buffer_size": 4096}, "lr=0.001"),
        (DQNConfig, {"epsilon": 0.5, "epsilon_schedule": [[0, 1.0]], "buffer_size": 4096}, "epsilon=0.5"),
        (PPOConfig, {"entropy_coeff": 0.1, "entropy_coeff_schedule": FALLING}, "entropy_coeff=0.1"),
    ],
)
def test_a_number_that_a_schedule_replaces_is_warned_of(config, options, name):
    made = config(num_envs=2, device="cpu", **options)
    with pytest.warns(RuntimeWarning, match=f"^`{name}` has no effect: `{name.split('=')[0]}_schedule` replaces it"):
        made.build(Pendulum if config is FlashSACConfig else CartPole)


@pytest.mark.parametrize(
    ("config", "options", "names"),
    [
        (SACConfig, {"v_min": -9.0, "v_max": 9.0}, ["v_min=-9.0", "v_max=9.0"]),
        (DQNConfig, {"v_max": 500.0, "num_quantiles": 8}, ["v_max=500.0"]),
        (DQNConfig, {"huber_delta": 0.5, "num_atoms": 8}, ["huber_delta=0.5"]),
        (DQNConfig, {"epsilon_decay_steps": 9, "epsilon_schedule": [[0, 0.05]]}, ["epsilon_decay_steps=9"]),
        (FlashSACConfig, {"v_max": 9.0, "num_atoms": 1}, ["v_max=9.0"]),
        (DQNConfig, {"priority_alpha": 0.5}, ["priority_alpha=0.5"]),
        (DQNConfig, {"priority_beta_schedule": [[0, 0.5]]}, ["priority_beta_schedule=[[0, 0.5]]"]),
        (SACConfig, {"alpha": 0.2, "target_entropy": -1.0}, ["target_entropy=-1.0"]),
        (SACConfig, {"alpha": 0.0, "initial_alpha": 0.5}, ["initial_alpha=0.5"]),
    ],
)
def test_what_another_option_leaves_unused_is_warned_of(config, options, names):
    made = config(num_envs=2, buffer_size=4096, device="cpu", **options)
    with pytest.warns(RuntimeWarning, match="has no effect") as caught:
        made.build(CartPole if config is DQNConfig else Pendulum)
    assert [str(each.message).split("`")[1] for each in caught] == names


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (SACConfig, {"v_min": -9.0, "num_atoms": 11}),
        (FlashSACConfig, {"alpha": 0.2, "num_atoms": 1}),  # the preset's initial_alpha: nobody gave it
        (DQNConfig, {"priority_alpha": 0.5, "prioritized": True}),
        (SACConfig, {"target_entropy": -1.0, "initial_alpha": 0.5}),
    ],
)
def test_what_has_an_effect_or_is_the_presets_own_is_not_warned_of(config, options, recwarn):
    config(num_envs=2, buffer_size=4096, device="cpu", **options).build(CartPole if config is DQNConfig else Pendulum)
    assert list(recwarn) == []


def test_a_number_that_a_schedule_begins_with_or_that_nobody_gave_is_not_warned_of(recwarn):
    for options in ({"lr": 5e-4}, {}, {"lr": 0.25, "lr_schedule": None}, {"entropy_coeff": 0.1}):
        PPOConfig(num_envs=2, horizon=2, device="cpu", **{"lr_schedule": FALLING, **options}).build(CartPole)
    FlashSACConfig(num_envs=2, buffer_size=4096, device="cpu").build(Pendulum)
    FlashSACConfig(num_envs=2, buffer_size=4096, device="cpu", lr=1e-3, lr_schedule=None).build(Pendulum)
    assert list(recwarn) == []


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


@pytest.mark.parametrize("config", [PPOConfig, SACConfig])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": -1e-8}, "`eps` must be finite, at least 0; got -1e-08"),
        ({"betas": [0.9, 1.0]}, r"`betas` must be finite, at least 0 and less than 1; got 1\.0"),
        ({"betas": 0.9}, r"`betas` must be two numbers; got 0\.9"),
        ({"weight_decay": "0.1"}, "`weight_decay` must be finite, at least 0; got '0.1'"),
        ({"epsilon": 1e-8}, "no option 'epsilon'"),
    ],
)
def test_options_of_an_optimizer_are_checked_with_the_config(config, options, message):
    with pytest.raises(ValueError, match=f"`optimizer_config`.*{message}"):
        config(optimizer="adam", optimizer_config=options)


@pytest.mark.parametrize(("config", "recurrent"), [(PPOConfig, True), (PQNConfig, True), (DQNConfig, False)])
def test_the_help_of_a_model_names_all_that_are_built_in(config, recurrent):
    (told,) = [field.metadata["help"] for field in dataclasses.fields(config) if field.name == "model"]
    for name in BUILTIN:
        remembers = name in ("lstm", "gru", "attention")
        assert (f"'{name}'" in told) == (recurrent or not remembers), name


def test_numbers_of_numpy_are_numbers():
    config = PPOConfig(num_envs=np.int64(4), lr=np.float32(0.5), shuffle_minibatches=np.bool_(False))
    assert config == PPOConfig(num_envs=4, lr=0.5, shuffle_minibatches=False)
    assert [type(each) for each in (config.num_envs, config.lr, config.shuffle_minibatches)] == [int, float, bool]
    with pytest.raises(TypeError, match=r"`num_envs` must be a whole number; got 4\.5"):
        PPOConfig(num_envs=np.float64(4.5))
