from __future__ import annotations

import pytest
import torch

from rl8x.envs import BUILTIN, CartPole, make, resolve


def test_names_are_the_classes_names():
    assert all(name == cls.__name__ for name, cls in BUILTIN.items())
    assert resolve("CartPole") is CartPole
    assert len(BUILTIN) == 9


def test_make_passes_arguments_on():
    env = make("CartPole", 3, seed=1, time_limit=7)
    other = CartPole(3, seed=1)
    assert env.time_limit == 7
    assert torch.equal(env.reset()[0], other.reset()[0])


@pytest.mark.parametrize(
    ("name", "hint"),
    [("CartPol", "Did you mean CartPole"), ("cartpole", "Did you mean CartPole?"), ("zzz", "There are")],
)
def test_an_unknown_name_names_the_nearest(name, hint):
    with pytest.raises(ValueError, match=f"{name!r}") as caught:
        resolve(name)
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("env_class", BUILTIN.values())
def test_parameters_are_documented(env_class):
    assert env_class.parameters
    for name, parameter in env_class.parameters.items():
        assert name.isidentifier()
        assert parameter.description
        assert parameter.low < parameter.high
        assert env_class.__doc__
