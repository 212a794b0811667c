import dataclasses
import functools
import importlib
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from rl8x.algorithms import PPOConfig
from rl8x.envs import CartPole, Pendulum
from rl8x.execution.fingerprint import _patched, fingerprint
from rl8x.randomization import Uniform


class Physics:
    gravity = 9.8
    not_traced = ("steps",)

    def __init__(self, mass=1.0):
        self.mass = mass
        self.table = np.arange(3.0)
        self.weights = torch.zeros(2, 3)
        self.generator = torch.Generator()
        self.steps = 0

    def force(self, x, *, scale=2.0):
        return x * self.mass * scale


def text(*roots):
    found = fingerprint(roots)
    assert found is not None
    return found.text


def test_equal_objects_have_one_fingerprint_and_what_no_trace_reads_is_left_out():
    first, second = Physics(), Physics()
    second.weights.fill_(3.0)
    second.generator.manual_seed(5)
    second.steps = 7
    assert text(first) == text(second)


def changed(change):
    physics = Physics()
    change(physics)
    return physics


CHANGES = {
    "a number": lambda physics: setattr(physics, "mass", 1.0 + 1e-12),
    "its type": lambda physics: setattr(physics, "mass", 1),
    "an array": lambda physics: physics.table.__setitem__(1, 5.0),
    "a shape": lambda physics: setattr(physics, "weights", torch.zeros(3, 2)),
    "strides": lambda physics: setattr(physics, "weights", torch.zeros(3, 2).t()),
    "a dtype": lambda physics: setattr(physics, "weights", torch.zeros(2, 3, dtype=torch.float64)),
    "gradients": lambda physics: physics.weights.requires_grad_(),
    "one more": lambda physics: setattr(physics, "drag", 0.0),
    "nothing for a number": lambda physics: setattr(physics, "mass", None),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_that_a_trace_may_see_makes_another_fingerprint(change):
    assert text(changed(change)) != text(Physics())


def scaled(by):
    def scale(x, offset=0.0):
        return x * by + offset

    return scale


def test_functions_are_told_apart_by_what_they_hold():
    assert text(scaled(2.0)) == text(scaled(2.0))
    assert text(scaled(2.0)) != text(scaled(3.0))
    assert text(functools.partial(scaled, 2.0)) != text(functools.partial(scaled, 3.0))
    assert text(Physics(1.0).force) != text(Physics(2.0).force)
    assert text(torch.relu) != text(torch.tanh)
    assert text(torch.ops.aten.relu.default) != text(torch.ops.aten.tanh.default)


def test_which_objects_are_one_counts():
    one, other = [1.0], [1.0]
    assert text([one, one]) != text([one, other])


@pytest.mark.parametrize("value", [threading.Lock(), sys.stdout, (i for i in ())], ids=["lock", "file", "generator"])
def test_what_is_not_understood_has_no_fingerprint(value):
    assert fingerprint([{"deep": [value]}]) is None


def test_a_space_is_the_same_before_and_after_it_was_sampled():
    space = Dict({"a": Box(-1.0, 1.0, (2,)), "b": Discrete(3)})
    before = text(space)
    space.seed(3)
    space.sample()
    assert text(space) == before
    assert text(Dict({"a": Box(-1.0, 2.0, (2,)), "b": Discrete(3)})) != before


def test_tensors_are_found_again_by_their_places():
    first, second = Physics(), Physics()
    places = fingerprint([first]).places([first.weights])
    assert places is not None
    [place] = places
    assert fingerprint([second]).tensors[place] is second.weights
    assert fingerprint([first]).places([torch.zeros(2, 3)]) is None


# -- sources


PACKAGE = {
    "__init__.py": "",
    "physics.py": "G = 9.8\n\ndef pull(x):\n    return x * G\n",
    "env.py": "from mine_{n}.physics import pull\n\nclass Task:\n    def step(self, x):\n        return pull(x)\n",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write a package of a user's own, and read it as another process would."""

    def make(n, **changes):
        folder = tmp_path / f"mine_{n}"
        folder.mkdir()
        for name, source in (PACKAGE | changes).items():
            (folder / name).write_text(source.replace("{n}", str(n)))
        return importlib.import_module(f"mine_{n}.env").Task()

    monkeypatch.syspath_prepend(tmp_path)
    return make


def test_the_source_of_a_users_module_and_of_those_that_it_imports_counts(package, tmp_path):
    task = package(1)
    before = text(task)
    assert text(task) == before
    physics = tmp_path / "mine_1" / "physics.py"
    physics.write_text(physics.read_text().replace("9.8", "9.9"))
    os.utime(physics, ns=(1, 1))  # another time, however coarse the file system's clock is
    assert text(task) != before


def test_what_was_typed_in_and_a_source_that_is_gone_have_no_fingerprint(package, tmp_path):
    task = package(3)
    (tmp_path / "mine_3" / "physics.py").unlink()
    assert fingerprint([task]) is None
    code = (
        "from rl8x.execution.fingerprint import fingerprint\n"
        "class Typed: pass\n"
        "print(fingerprint([Typed()]), fingerprint([1]) is None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "None False\n"


def test_a_global_that_was_changed_while_it_ran_counts(package):
    task = package(2)
    before = text(task)
    sys.modules["mine_2.physics"].G = 1.6
    assert text(task) != before


def test_an_attribute_of_a_class_that_was_changed_while_it_ran_counts(monkeypatch):
    before = text(Physics())
    monkeypatch.setattr(Physics, "gravity", 1.6)
    assert text(Physics()) != before


# What of a module beside its source decides what `make()` gives does, and how that is changed.
MEANT = {
    "a dict": ("C = {'g': 9.8}", "x * C['g']", lambda module: module.C.update(g=9.9)),
    "an array": ("import numpy as np\nT = np.zeros(3)", "x * T[1]", lambda module: module.T.fill(1)),
    "an object": (
        "class P:\n    pass\nP.all = P()\nP.all.g = 1",
        "x * P.all.g",
        lambda module: setattr(module.P.all, "g", 2),
    ),
    "a function": ("F = abs\nG = max", "F(x)", lambda module: setattr(module, "F", module.G)),
    "one of two lambdas": (
        "F = lambda x: x.clamp(-1, 1)\nG = lambda x: x.clamp(-2, 2)",
        "F(x)",
        lambda module: setattr(module, "F", module.G),
    ),
    "a closure of a method": ("", "x * by", lambda module: module.GIVEN.append(2.0)),
    "an attribute of a class that a function makes": ("", "x * self.by", lambda module: module.GIVEN.append(2.0)),
    "a method": ("", "x", lambda module: setattr(module.Kept, "step", lambda self, x: -x)),
    "what it has of another module": (
        "import types\nother = types.ModuleType('other')\nother.__file__ = __file__\nother.g = {'a': 1}",
        "x * other.g['a']",
        lambda module: module.other.g.update(a=2),
    ),
}
MODULE = """
{before}
GIVEN = [1.0]

def made(by):
    class Task:
        by = None
        def step(self, x):
            return {step}
    Task.by = by
    return Task

Kept = made(1.0)

def make():
    return (Kept if GIVEN[-1] == 1.0 else made(GIVEN[-1]))()
"""


@pytest.mark.parametrize(("before", "step", "change"), MEANT.values(), ids=MEANT)
def test_what_the_names_in_a_users_code_stand_for_counts(before, step, change, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"meant_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE.replace("{before}", before).replace("{step}", step))
    module = importlib.import_module(name)
    # Of the module's plain values nothing changes but for the list, which is of no interest here.
    monkeypatch.setattr("rl8x.execution.fingerprint._globals", lambda _: ())
    found = text(module.make())
    assert text(module.make()) == found
    change(module)
    assert text(module.make()) != found


class Closed(dict):
    def items(self):
        raise OSError("it is closed")


closed = Closed()


class ReadsClosed:
    def step(self, x):
        return closed and x


def test_what_cannot_be_looked_at_does_no_harm():
    assert text(ReadsClosed()) == text(ReadsClosed())


def test_code_that_was_loaded_before_its_source_was_edited_is_told_apart(package, tmp_path):
    physics = tmp_path / "mine_4" / "env.py"
    old = package(4)
    edited = physics.read_text().replace("pull(x)", "2 * pull(x)")
    physics.write_text(edited)
    os.utime(physics, ns=(1, 1))
    found = text(old)  # the old code, whose file has the new one
    importlib.reload(sys.modules["mine_4.env"])
    assert text(sys.modules["mine_4.env"].Task()) != found


def test_a_class_of_rl8x_that_a_user_changes_counts(monkeypatch):
    before, advance = text(CartPole(2)), CartPole.advance
    with monkeypatch.context() as patch:
        patch.setattr("rl8x.envs.cartpole.X_LIMIT_M", 5.0)
        assert text(CartPole(2)) != before
    with monkeypatch.context() as patch:
        patch.setattr(CartPole, "advance", lambda self, *given: advance(self, *given))
        assert text(CartPole(2)) != before
    assert text(CartPole(2)) == before


def halved(x):
    return torch.Tensor.relu(x) * 0.5


def holding(factor):
    relu = torch.relu

    @functools.wraps(relu)
    def scaled(x):
        return factor * relu(x)

    return scaled


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return self.factor * x


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (torch, "relu"),
        (torch.nn.functional, "relu"),
        (torch.Tensor, "relu"),
        (torch.special, "ndtr"),
        (sys.modules["rl8x.functional"], "running_returns"),
    ],
)
def test_functions_that_a_user_puts_in_the_place_of_those_that_rl8x_calls_count(where, name, monkeypatch):
    task = CartPole(2)
    before = text(task)
    others = [halved, lambda x: 2 * x, lambda x: 3 * x, holding(2.0), holding(3.0), torch.sigmoid, Scaled(2.0)]
    others += [Scaled(3.0), functools.partial(torch.clamp, min=0.0), functools.partial(torch.clamp, min=1.0)]
    found = {before}
    for number, other in enumerate(others, 1):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, other)
            found.add(text(task))
        assert len(found) == number + 1
    assert text(task) == before


def test_as_it_is_installed_torch_has_hardly_anything_that_is_not_its_own():
    assert len([*_patched()]) < 20


def test_a_function_that_holds_nothing_yet_has_no_fingerprint():
    def outer():
        def inner():
            return later

        yield inner
        later = 1

    assert fingerprint([next(outer())]) is None


# -- what an algorithm is made of


def roots(algorithm):
    return [*algorithm.collector.stepper.made_of(), *algorithm.updater._made_of()]


def build(env=CartPole, env_kwargs=(), **options):
    defaults = {"num_envs": 4, "horizon": 8, "device": "cpu", "model_config": {"hidden_sizes": [8]}, "seed": 0}
    algorithm = PPOConfig.rl8(**{**defaults, "sgd_minibatch_size": 16, **options}).build(env, **dict(env_kwargs))
    algorithm.collect()
    algorithm.step()
    return algorithm


def test_neither_the_seed_nor_training_changes_an_algorithms_fingerprint():
    algorithm = build(seed=1)
    before = text(*roots(algorithm))
    algorithm.collect()
    algorithm.step()
    assert text(*roots(algorithm)) == before == text(*roots(build(seed=2)))


OTHERS = {
    "gamma": {"gamma": 0.9},
    "clip_param": {"clip_param": 0.1},
    "vf_clip_param": {"vf_clip_param": None},
    "entropy": {"entropy_coeff": 0.1},
    "target_kl_div": {"target_kl_div": 0.1},
    "max_grad_norm": {"max_grad_norm": None},
    "optimizer": {"optimizer": "sgd"},
    "betas": {"optimizer_config": {"betas": [0.9, 0.99]}},
    "model": {"model_config": {"hidden_sizes": [9]}},
    "activation": {"model_config": {"hidden_sizes": [8], "activation": "tanh"}},
    "precision": {"precision": "bf16"},
    "normalize_observations": {"normalize_observations": True},
    "normalize_values": {"normalize_values": True},
    "copies": {"num_envs": 8},
    "horizon": {"horizon": 4},
    "env": {"env": Pendulum},
    "time limit": {"env_kwargs": {"time_limit": 7}},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_each_hyperparameter_that_reaches_a_program_makes_another_fingerprint(options):
    assert text(*roots(build(**options))) != text(*roots(build()))


def test_a_randomised_parameter_makes_another_fingerprint():
    plain, drawn, wider = build(), build(), build()
    for algorithm, high in ((drawn, 0.6), (wider, 0.7)):
        algorithm.collector.reset({"length": Uniform(0.4, high)})
    assert len({text(*roots(algorithm)) for algorithm in (plain, drawn, wider)}) == 3


def test_every_field_of_the_config_but_the_seed_counts():
    algorithm = build()
    before = text(*roots(algorithm))
    for field in dataclasses.fields(algorithm.config):
        altered = dataclasses.replace(algorithm.config)
        object.__setattr__(altered, field.name, "another")
        algorithm.updater.config = altered
        assert (text(*roots(algorithm)) == before) is (field.name == "seed"), field.name


def test_another_process_reads_the_same_fingerprint():
    code = "from tests.execution.test_fingerprint import *; print(hash_of(text(*roots(build()))))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def hash_of(string):
    import hashlib

    return hashlib.sha256(string.encode()).hexdigest()
