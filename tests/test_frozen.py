"""What a config is given stays as it was, whatever the script, the environment or the model does with theirs."""

import copy
import dataclasses
import pickle
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl8x import MemoryTracker, NullTracker, PPOConfig, Trainer
from rl8x.algorithms import AlgorithmConfig, DQNConfig, SACConfig
from rl8x.algorithms.hyperparameters import option
from rl8x.conditions import NonFinite
from rl8x.config import RunSpec
from rl8x.config.describe import env_spec
from rl8x.envs import CartPole, GymnasiumEnv
from rl8x.envs.bindings import Scale
from rl8x.models import MLPModel
from rl8x.plain import frozen, thawed
from rl8x.randomization import Adaptive, Choice, Grid, Learnable, Scheduled, Uniform
from rl8x.replay.dataset import Dataset
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
        "lr_schedule": lambda: ((g := [[0, 1e-3], [64, 1e-4]]), PPOConfig(lr_schedule=g)),
        "a schedule by name": lambda: (
            (g := {"kind": "interp", "points": [[0, 1.0], [9, 2.0]]}),
            DQNConfig(lr_schedule=g),
        ),
        "optimizer_config": lambda: ((g := {"betas": [0.9, 0.99]}), PPOConfig(optimizer_config=g)),
        "critics": lambda: ((g := [8, 8]), SACConfig(critic_hidden_sizes=g)),
        "replace": lambda: ((g := {"hidden_sizes": [8]}), dataclasses.replace(PPOConfig(), model_config=g)),
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


KINDS = ["an own config", "model_config", "lr_schedule", "a schedule by name", "optimizer_config", "critics", "replace"]
KINDS += ["a run", "a study", "env_config distributions", "a setter"]


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


def test_whatever_else_there_is_stays_itself():
    given = nested()
    held = frozen(given)
    assert held["module"] is given["module"]
    assert held["size"] is given["size"]
    assert held["tuple"] == (1, [2])


class Greedy(MLPModel):
    """A model that takes its arguments apart."""

    def __init__(self, observation_space, num_features, hidden_sizes):
        width = hidden_sizes.pop()
        super().__init__(observation_space, num_features, hidden_sizes=[width])


class GreedyEnv(CartPole):
    def __init__(self, *args, limits, **options):
        self.sum = sum(limits.pop() for _ in range(2))
        super().__init__(*args, **options)


def test_models_and_environments_that_change_their_arguments_leave_the_config_alone():
    limits = [1.0, 2.0]
    config = PPOConfig(**SMALL, model=Greedy, model_config={"hidden_sizes": [8, 8]})
    algorithm = config.build(GreedyEnv, limits=limits)
    described = env_spec(algorithm)
    spoil(limits)
    assert algorithm.env_factory(2, device="cpu", seed=0).sum == 3.0
    assert described.env_kwargs == {"limits": [1.0, 2.0]} == env_spec(algorithm).env_kwargs
    assert config.model_config == algorithm.policy.arguments["model"] == {"hidden_sizes": [8, 8]}
    assert config.build(GreedyEnv, limits=[1.0, 2.0]).env.sum == 3.0


class Steps(gymnasium.Env):
    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, sizes):
        self.sizes = sizes

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, True, False, {}


def test_another_environment_of_the_same_is_as_the_first_was_made():
    sizes = [1, 2]
    env = GymnasiumEnv(Steps, 2, sizes=sizes)
    spoil(sizes)
    spoil(env.vector_env.envs[0].unwrapped.sizes)
    assert env.another().vector_env.envs[0].unwrapped.sizes == [1, 2]
    assert env.params["kwargs"] == {"sizes": [1, 2]}


def test_a_run_goes_by_its_options_as_they_were_given():
    def spoils(trainer, stats):
        spoil(lengths)

    lengths = [0.4, 0.5, 0.6, 0.7]
    config = PPOConfig(**SMALL, horizons_per_env_reset=1, model_config={"hidden_sizes": [4]})
    trainer = Trainer(config.build(CartPole), tracker=NullTracker(), callbacks=[spoils], eval_env=False)
    trainer.run(env_config={"length": lengths}, max_steps=3, progress="none")
    assert trainer.algorithm.env.config == {"length": [0.4, 0.5, 0.6, 0.7]}


def test_a_data_set_is_not_changed_by_the_tensors_it_was_made_of():
    rows = {"obs": torch.zeros(4, 1), "next_obs": torch.ones(4, 1), "actions": torch.zeros(4, dtype=torch.int64)}
    rows |= {"rewards": torch.ones(4), "terminated": torch.ones(4, dtype=torch.bool), "truncated": np.zeros(4, bool)}
    dataset = Dataset.from_tensors(rows, gaps="truncate")
    before = {name: tensor.clone() for name, tensor in dataset.transitions.items()}
    for tensor in rows.values():
        spoil(tensor)
    assert all(torch.equal(dataset.transitions[name], tensor) for name, tensor in before.items())


def test_a_run_is_tracked_and_written_as_with_plain_lists():
    tracker = MemoryTracker()
    run = RunSpec.from_plain(
        {
            "env": "CartPole",
            "env_config": {"length": {"uniform": [0.4, 0.6]}},
            "algorithm_config": {**SMALL, "model_config": {"hidden_sizes": [4, 4]}},
            "max_steps": 1,
            "progress": "none",
        }
    )
    Trainer.from_spec(run, tracker=tracker).run()
    assert str(tracker.params["model_config.hidden_sizes"]) == "[4, 4]"
    assert type(run.to_plain()["algorithm_config"]["model_config"]["hidden_sizes"]) is list
    assert RunSpec.from_plain(run.to_plain()) == run
    assert run.replace(env_config={"length": Uniform(0.4, 0.6).to_dict()}) == run
