"""What a config is given stays as it was, whatever the script, the environment or the model does with theirs."""

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from rl8x import AlgorithmConfig, DQNConfig, NullTracker, PPOConfig, Trainer
from rl8x.algorithms.hyperparameters import option
from rl8x.config import RunSpec
from rl8x.envs import CartPole
from rl8x.envs.bindings import Scale
from rl8x.plain import thawed
from rl8x.randomization import Adaptive, Choice, Grid, Learnable, Scheduled
from rl8x.studies.definition import StudyConfig


def spoil(value):
    """Change all that can be changed within a value, as a script may that goes on with it."""
    if isinstance(value, dict | list | tuple):
        for item in list(value.values() if isinstance(value, dict) else value):
            spoil(item)
    if isinstance(value, dict):
        value["spoilt"] = 999
    elif isinstance(value, list):
        value.append(999)
    elif isinstance(value, np.ndarray | torch.Tensor):
        value[...] = 999


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(AlgorithmConfig):
    anything: Any = option(None, "Any value.")


RUN = {
    "env": "CartPole",
    "env_kwargs": {"observe_parameters": ["length"]},
    "env_config": {"length": {"uniform": [0.4, 0.6]}},
    "algorithm_config": {"model_config": {"hidden_sizes": [8]}, "num_envs": 4.0},
    "stop_conditions": [{"non_finite": ["losses/vf"]}],
    "checkpoints": {"every_steps": 5},
}
STUDY = {
    "env": "CartPole",
    "max_steps": 2,
    "train": {"wide": {"length": {"uniform": [0.4, 0.6]}}},
    "test": {"length": [0.4, 0.5]},
    "seeds": [1, 2],
    "vary": {"model_config.hidden_sizes": [[8], [9]]},
}
ENDS = {"thresholds": [1.0, 3.0], "limits": [0.1, 1.0]}
# What a script gives, and what is made of it
MADE = {
    "config": ({"list": [1, [2, {"a": [3]}]], "tuple": (1, [2]), "array": np.zeros(3), "tensor": torch.zeros(3)}, Own),
    "model_config": ({"hidden_sizes": [8, 8]}, lambda given: PPOConfig(model_config=given)),
    "schedule": ({"kind": "interp", "points": [[0, 1.0], [9, 2.0]]}, lambda given: DQNConfig(lr_schedule=given)),
    "replaced": ({"a": [8]}, lambda given: dataclasses.replace(PPOConfig(), model_config=given)),
    "run": (RUN, lambda given: RunSpec.from_plain({**given})),
    "study": (STUDY, StudyConfig.from_dict),
    "adaptive": (ENDS, lambda given: Adaptive([0.4, 0.6], step=0.1, **given)),
    "choice": ([0.4, 0.6], lambda given: Choice(given, given)),
    "grid": ([0.4, 0.6], Grid),
    "learnable": ({"choice": [1.0, 2.0]}, lambda given: Learnable(given, bounds=[1.0, 3.0])),
    "scheduled": ([[0, 0.5], [9, 0.7]], Scheduled),
    "setter": (["length", "gravity"], Scale),
}


@pytest.mark.parametrize("kind", MADE)
def test_what_is_made_is_its_own_from_construction_on(kind):
    given, make = MADE[kind]
    given = copy.deepcopy(given)
    made = make(anything=given) if make is Own else make(given)
    before = repr(made)
    spoil(given)
    assert repr(made) == before
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
    for copied in (copy.deepcopy(held), thawed(held), pickle.loads(pickle.dumps(held))):
        assert type(copied) is type(value)
    for copied in (copy.deepcopy(held), thawed(held)):
        spoil(copied)
    if not isinstance(value, np.ndarray):  # NumPy 2.5 pickles that an array is read-only
        spoil(pickle.loads(pickle.dumps(held)))
    assert repr(held) == repr(value)


def test_a_run_goes_by_its_options_as_they_were_given():
    def spoils(trainer, stats):
        spoil(lengths)

    lengths = [0.4, 0.5, 0.6, 0.7]
    config = PPOConfig(num_envs=4, horizon=8, device="cpu", horizons_per_env_reset=1, execution="eager")
    trainer = Trainer(config.build(CartPole), tracker=NullTracker(), callbacks=[spoils], eval_env=False)
    trainer.run(env_config={"length": lengths}, max_steps=3, progress="none")
    assert trainer.algorithm.env.config == {"length": [0.4, 0.5, 0.6, 0.7]}
