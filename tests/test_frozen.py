"""What a config is given stays as it was, whatever the script, the environment or the model does with theirs."""

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from rl8x import NullTracker, PPOConfig, Trainer
from rl8x.algorithms import AlgorithmConfig, DQNConfig, SACConfig
from rl8x.algorithms.hyperparameters import option
from rl8x.conditions import NonFinite
from rl8x.config import RunSpec
from rl8x.envs import CartPole
from rl8x.envs.bindings import Scale
from rl8x.plain import thawed
from rl8x.randomization import Adaptive, Choice, Grid, Learnable, Scheduled
from rl8x.studies.definition import StudyConfig

SMALL = {"num_envs": 4, "horizon": 8, "device": "cpu", "seed": 0, "execution": "eager"}


def spoil(value):
    """Change all that can be changed within a value, as a script may that goes on with it."""
    if isinstance(value, dict | list):
        for item in list(value.values() if isinstance(value, dict) else value):
            spoil(item)
        if isinstance(value, dict):
            value["spoilt"] = 999
        else:
            value.append(999)
    elif isinstance(value, tuple):
        for item in value:
            spoil(item)
    elif isinstance(value, np.ndarray | torch.Tensor):
        value[...] = 999


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(AlgorithmConfig):
    anything: Any = option(None, "Any value.")
    more: Any = None


def nested():
    return {
        "list": [1, [2, {"a": [3]}]],
        "tuple": (1, [2]),
        "array": np.zeros(3),
        "tensor": torch.zeros(3),
        "set": {1},
        "module": torch.nn.Linear(1, 1),
        "size": torch.Size([2]),
    }


def make(kind):
    """Return what a script gives, and a function that makes the text of what holds it."""
    if kind == "env_config distributions":
        given = {"a": [0.4, 0.6], "b": [[0, 0.5], [9, 0.7]], "c": {"choice": [1.0, 2.0]}, "d": [1.0, 3.0]}
        made = [
            *(Adaptive(given["a"], thresholds=given["d"], step=0.1, limits=[0.1, 1.0]), Choice(given["a"], given["d"])),
            *(Grid(given["a"]), Learnable(given["c"], bounds=given["d"]), Scheduled(given["b"]), NonFinite(["x"])),
        ]
        return given, lambda: repr(made)
    if kind == "a setter":
        given = ["length", "gravity"]
        setter = Scale(given)
        return given, lambda: repr(setter)
    given, config = {
        "an own config": lambda: ((g := nested()), Own(anything=g, more=g)),
        "model_config": lambda: ((g := {"hidden_sizes": [8, 8]}), PPOConfig(model_config=g)),
        "a schedule by name": lambda: (
            (g := {"kind": "interp", "points": [[0, 1.0], [9, 2.0]]}),
            DQNConfig(lr_schedule=g),
        ),
        "critics": lambda: ((g := [8, 8]), SACConfig(critic_hidden_sizes=g)),
        "a run": lambda: (
            (
                g := {
                    "env": "CartPole",
                    "env_kwargs": {"observe_parameters": ["length"]},
                    "env_config": {"length": {"uniform": [0.4, 0.6]}},
                    "algorithm_config": {"model_config": {"hidden_sizes": [8]}, "num_envs": 4.0},
                    "stop_conditions": [{"non_finite": ["losses/vf"]}],
                    "checkpoints": {"every_steps": 5},
                }
            ),
            RunSpec.from_plain({**g}),
        ),
        "a study": lambda: (
            (
                g := {
                    "env": "CartPole",
                    "max_steps": 2,
                    "train": {"wide": {"length": {"uniform": [0.4, 0.6]}}},
                    "test": {"length": [0.4, 0.5]},
                    "seeds": [1, 2],
                    "vary": {"model_config.hidden_sizes": [[8], [9]]},
                    "evaluate_at": [1],
                }
            ),
            StudyConfig.from_dict(g),
        ),
    }[kind]()
    return given, lambda: repr({field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


KINDS = [
    "an own config",
    "model_config",
    "a schedule by name",
    "critics",
    "a run",
    "a study",
    "env_config distributions",
]
KINDS += ["env_config distributions", "a setter"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_is_its_own_from_construction_on(kind):
    given, shown = make(kind)
    before = shown()
    spoil(given)
    assert shown() == before
    assert "999" not in before


@pytest.mark.parametrize("value", [{"a": [1]}, [1, 2], np.zeros(2)], ids=repr)
def test_what_a_config_hands_out_cannot_be_changed_but_copied(value):
    held = Own(anything=value).anything
    changes = {
        dict: "pop('a') update(b=1) setdefault('c',1) clear() popitem() __ior__({}) __setitem__('a',2) "
        "__delitem__('a')",
        list: "append(3) extend([3]) insert(0,3) pop() clear() remove(1) reverse() sort() __iadd__([3]) __imul__(2) "
        "__setitem__(0,3) __delitem__(0)",
        np.ndarray: "fill(1) sort() __setitem__(0,1)",
    }
    for change in changes[type(value)].split():
        with pytest.raises((TypeError, ValueError), match=r"cannot be changed|read-only"):
            eval(f"held.{change}")
    if isinstance(value, dict):
        with pytest.raises(TypeError, match="cannot be changed"):
            held["a"].append(2)
    for copied in (copy.deepcopy(held), thawed(held), pickle.loads(pickle.dumps(held))):
        spoil(copied)
        assert type(copied) is type(value)
    assert repr(held) == repr(value)


def test_a_run_goes_by_its_options_as_they_were_given():
    def spoils(trainer, stats):
        spoil(lengths)

    lengths = [0.4, 0.5, 0.6, 0.7]
    config = PPOConfig(**SMALL, horizons_per_env_reset=1, model_config={"hidden_sizes": [4]})
    trainer = Trainer(config.build(CartPole), tracker=NullTracker(), callbacks=[spoils], eval_env=False)
    trainer.run(env_config={"length": lengths}, max_steps=3, progress="none")
    assert trainer.algorithm.env.config == {"length": [0.4, 0.5, 0.6, 0.7]}
