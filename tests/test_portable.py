"""Policies in files and by themselves: what they decide equals what they act, in whatever is made of them."""

from __future__ import annotations

import hashlib
import json
import math
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from torch import Tensor

from rl8x import Policy, TD3Config
from rl8x.algorithms.teacher import Student
from rl8x.envs import CartPole
from rl8x.models import MLPModel
from rl8x.portable import zeros
from rl8x.q_values import QPolicy
from rl8x.replay.dataset import Dataset
from rl8x.spaces import leaves, space_to_plain, tree_of
from rl8x.trees import flatten_tree

VECTOR = Box(-np.inf, np.inf, (4,), np.float32)
STEER = Box(np.float32([-2, 0]), np.float32([2, 1]))
SMALL = {"hidden_sizes": [8], "policy_gain": 1.0}
MEMORIES = ["lstm", "gru", "attention"]


def random_rows(num, seed=0):
    return np.random.default_rng(seed).standard_normal((num, 4)).astype(np.float32)


def same_weights(policy, other):
    mine, theirs = policy.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


class Wider(MLPModel):
    """A model of a user's."""


POLICIES = {
    "normal": lambda: Policy(VECTOR, STEER, normalize_observations=True, normalize_values=True, model_config=SMALL),
    "own model": lambda: Policy(
        VECTOR, STEER, distribution="squashed_normal", distribution_config={"initial_std": 0.3}, model=Wider
    ),
    "tuple": lambda: Policy(
        VECTOR, Tuple([Discrete(3), STEER]), distribution_config={"1": {"distribution": "squashed_normal"}}
    ),
    "image": lambda: Policy(
        Box(0, 255, (3, 8, 8), np.uint8), MultiDiscrete([2, 3]), model_config={"hidden_sizes": [8]}
    ),
    "attention": lambda: Policy(VECTOR, MultiBinary(3), model="attention", model_config={"window": 3, "width": 8}),
    "dueling": lambda: QPolicy(VECTOR, Discrete(3, start=-1), dueling=True, model_config=SMALL),
    "atoms": lambda: QPolicy(VECTOR, Discrete(3), num_outputs=5, support=(-1.0, 2.5), normalize_observations=True),
    "student": lambda: Student(VECTOR, Discrete(3), model="lstm", model_config={"hidden_size": 8}),
    "TD3": lambda: TD3Config(num_envs=4, device="cpu", buffer_size=64).build("Pendulum").policy,
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_saved_policy_acts_as_it_did(name, tmp_path):
    policy = POLICIES[name]()
    for moments in () if policy.obs_moments is None else policy.obs_moments.values():
        moments.update(5.0 + 2.0 * torch.randn(50, *moments.shape))
    loaded = Policy.load(policy.save(tmp_path / "policy.safetensors"))
    assert same_weights(policy, loaded)
    obs = zeros(policy.observation_space, 6)
    obs = torch.randn_like(obs) if obs.is_floating_point() else torch.randint_like(obs, 0, 256)
    state, starts = policy.initial_state(6), torch.ones(6, dtype=torch.bool)
    (noise,) = policy.noise(1, 6, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for each in (None, noise):
            # Of an algorithm's own way to act, which may be at random at first, what it has learned.
            mine, theirs = (Policy.act(which, obs, state, starts, each) for which in (policy, loaded))
            flat = mine.actions if isinstance(mine.actions, dict) else {"": mine.actions}
            other = theirs.actions if isinstance(theirs.actions, dict) else {"": theirs.actions}
            assert all(torch.equal(flat[name], other[name]) for name in flat)
        if type(policy) is not type(loaded):
            return
        assert torch.equal(policy.values(obs, state, starts), loaded.values(obs, state, starts))


def flat_arrays(actions):
    return flatten_tree("", tree_of(actions, torch.as_tensor))


class InTurn(MLPModel):
    """A model of a user's, which takes the parts of observations in turn, as the space has them."""

    def __init__(self, space, num_features, **options):
        super().__init__(
            Box(-1, 1, (sum(math.prod(leaf.shape) for _, leaf in leaves(space)),)), num_features, **options
        )

    def trunk_inputs(self, obs, state, starts):
        return super().trunk_inputs(torch.cat([*flatten_tree("", obs).values()], -1), state, starts)


@pytest.mark.parametrize("model", ["mlp", "lstm", InTurn])
def test_parts_of_spaces_and_of_observations_may_come_in_any_order(model):
    """Gymnasium sorts the keys of a plain dict and no others, and two orders are equal to it."""
    boxes = [(name, Box(-1, 1, (2,), np.float32)) for name in ("b", "a", "c")]
    many = Tuple([box for _, box in boxes] * 4)
    both = [("z", Dict(boxes)), *boxes, ("t", many)], [("t", many), *boxes[::-1], ("z", Dict(boxes[::-1]))]
    config = {"hidden_size": 8} if model == "lstm" else {"hidden_sizes": [8]}
    options = {"model": model, "model_config": config | {"policy_gain": 10.0}, "normalize_observations": True}
    first, second = (Policy(Dict(parts), Dict(parts), **options) for parts in both)
    assert list(first.observation_space) == list(second.observation_space)[::-1]
    assert space_to_plain(first.observation_space) == space_to_plain(second.observation_space)
    for moments in first.obs_moments.values():
        moments.update(torch.randn(50, 2))
    second.load_state_dict(first.state_dict())
    obs = Dict(both[0], seed=1).sample()
    turned = dict(reversed(obs.items())) | {"z": dict(reversed(obs["z"].items()))}
    wanted = flat_arrays(first.decide(obs).actions)
    for policy in (first, second, Policy.from_bytes(first.to_bytes())):
        for given in (obs, turned):
            decided = policy.decide(given).actions
            assert list(decided) == list(policy.action_space)  # as an environment may read it
            found = flat_arrays(decided)
            rows = tree_of(given, lambda part: torch.as_tensor(part)[None])  # as an environment gives them
            acted = flatten_tree("", policy.act(rows, policy.initial_state(1), torch.ones(1).bool()).actions)
            assert all(torch.equal(found[name], part) for name, part in wanted.items())
            assert all(torch.equal(acted[name][0].clamp(-1, 1), part) for name, part in wanted.items())


def test_deciding_is_acting_clipped_and_as_the_environment_wants_it():
    policy = Policy(VECTOR, STEER, normalize_observations=True, model_config={**SMALL, "policy_gain": 10.0})
    obs = random_rows(20)
    act = policy.act(torch.from_numpy(obs), {}, torch.ones(20, dtype=torch.bool))
    decided = policy.decide(obs).actions
    assert np.array_equal(decided, np.clip(act.actions.detach().numpy(), STEER.low, STEER.high))
    assert not np.array_equal(decided, act.actions.detach().numpy())  # some were beyond the bounds
    one = policy.decide(obs[3]).actions
    assert one.shape == (2,)
    assert STEER.contains(one)
    assert np.allclose(one, decided[3], atol=1e-6)
    assert np.array_equal(policy.decide(obs.astype(np.float64)).actions, decided)
    assert np.array_equal(policy.decide(obs.tolist()).actions, decided)


def read_only(array):
    array.setflags(write=False)
    return array


@pytest.mark.parametrize(
    "odd",
    [
        lambda rows: rows[::-1].copy()[::-1],
        lambda rows: rows[:, ::-1].copy()[:, ::-1],
        lambda rows: rows.astype(rows.dtype.newbyteorder()),
        lambda rows: rows.astype(np.longdouble),
        lambda rows: read_only(rows.copy()),
    ],
)
def test_arrays_of_any_layout_are_read(odd):
    policy, rows = Policy(VECTOR, Discrete(2), model_config=SMALL), random_rows(6)
    starts = np.array([True, False] * 3)
    decided = policy.decide(rows, starts=starts).actions
    assert np.array_equal(policy.decide(odd(rows), starts=starts[::-1]).actions, decided)
    env, other = (CartPole(6, seed=0) for _ in range(2))
    env.reset(), other.reset()
    actions = odd(rows)[:, 0] > 0
    assert torch.equal(
        env.step(actions.astype(int)[::-1])[0], other.step(torch.tensor((rows[:, 0] > 0) * 1).flip(0))[0]
    )
    columns = {"obs": odd(rows), "next_obs": odd(rows), "actions": rows[:, 0] > 0, "rewards": rows[:, 1][::-1]}
    columns |= {"terminated": np.ones(6, bool), "truncated": np.zeros(6, bool)}
    assert Dataset.from_tensors(columns).transitions["obs"].tolist() == rows.tolist()


def test_decisions_have_the_form_of_the_space():
    space = Tuple([Discrete(3, start=5), Dict({"a": MultiBinary(2), "b": MultiDiscrete([2, 2])})])
    observed = Dict({"x": VECTOR, "pair": Tuple([Discrete(2), MultiBinary(3)])})
    policy = Policy(observed, space)
    element = observed.sample()
    assert space.contains(policy.decide(element).actions)
    batch = {"x": np.stack([element["x"]] * 2), "pair": (np.array([0, 1]), np.zeros((2, 3), np.int8))}
    actions = policy.decide(batch).actions
    assert [part.shape for part in (actions[0], actions[1]["a"], actions[1]["b"])] == [(2,), (2, 2), (2, 2)]


@pytest.mark.parametrize("model", [*MEMORIES, "mlp", "atoms"])
def test_a_batch_may_be_empty_and_a_state_of_any_numbers(model):
    policy = POLICIES["atoms"]() if model == "atoms" else Policy(VECTOR, STEER, model=model)
    actions, state = policy.decide(random_rows(0))
    assert actions.shape == (0, *policy.action_space.shape)
    assert all(len(part) == 0 for part in state.values())
    rows = random_rows(3)
    state = policy.decide(rows).state
    wanted = policy.decide(rows, state).actions
    for form in (Tensor.double, Tensor.numpy, Tensor.tolist):
        assert np.array_equal(policy.decide(rows, {name: form(part) for name, part in state.items()}).actions, wanted)


def test_samples_follow_the_generator():
    policy = Policy(VECTOR, Discrete(4), model_config=SMALL)
    obs = np.repeat(random_rows(1), 4000, 0)
    draws = [policy.decide(obs, deterministic=False, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert np.array_equal(draws[0].actions, draws[1].actions)
    assert not np.array_equal(draws[0].actions, draws[2].actions)
    features = policy.model(torch.from_numpy(obs[None, :1]), {}, torch.ones(1, 1, dtype=torch.bool))[0]
    shares = np.bincount(draws[0].actions, minlength=4) / 4000
    assert np.abs(shares - features.softmax(-1).detach().numpy().ravel()).max() < 0.04


@pytest.mark.parametrize("model", MEMORIES)
def test_memory_goes_on_until_an_episode_begins(model):
    config = {"window": 3, "width": 8} if model == "attention" else {"hidden_size": 8}
    policy = Policy(VECTOR, STEER, model=model, model_config={**config, "policy_gain": 1.0})
    rows = [torch.from_numpy(random_rows(3, seed)) for seed in range(5)]
    state, memory = policy.initial_state(3), None
    for step, obs in enumerate(rows):
        begins = np.array([step == 0, step in (0, 3), step == 0])
        act = policy.act(obs, state, torch.from_numpy(begins))
        state = act.state
        decision = policy.decide(obs, memory, starts=begins if step else None)
        memory = decision.state
        assert np.allclose(decision.actions, policy.env_actions(act.actions).detach().numpy(), atol=1e-6)
    assert not any("critic" in name for name in memory)
    fresh = policy.decide(rows[-1]).actions
    assert not np.allclose(fresh, decision.actions, atol=1e-4)


@pytest.mark.long
def test_loading_needs_no_environment_trainer_algorithm_or_mlflow(tmp_path):
    policy = QPolicy(VECTOR, Discrete(3), num_outputs=5, support=(0.0, 1.0), model_config=SMALL)
    path = policy.save(tmp_path / "policy")
    code = (
        "import sys, json, rl8x\n"
        "policy = rl8x.Policy.load(sys.argv[1])\n"
        "actions = policy.decide(json.loads(sys.argv[2])).actions.tolist()\n"
        "parts = ('algorithms', 'envs', 'trainers', 'tracking', 'checkpoint', 'rollouts')\n"
        "print(actions, [part for part in parts if f'rl8x.{part}' in sys.modules], 'mlflow' in sys.modules)\n"
    )
    rows = random_rows(4).tolist()
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), json.dumps(rows)], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{policy.decide(rows).actions.tolist()} [] False\n"


def edited(path, change):
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    description = json.loads(header["__metadata__"]["rl8x"])
    change(description)
    digest, description["sha256"] = description["sha256"], "0" * 64
    header["__metadata__"]["rl8x"] = json.dumps(description)
    written = json.dumps(header, separators=(",", ":")).encode()
    blank = len(written).to_bytes(8, "little") + written + content[8 + size :]
    whole = blank.replace(b"0" * 64, hashlib.sha256(blank).hexdigest().encode(), 1)
    assert digest.encode() not in whole
    path.write_bytes(whole)


def test_files_that_are_no_policys_are_refused(tmp_path):
    policy = Policy(VECTOR, STEER, model_config=SMALL)
    path = policy.save(tmp_path / "policy.safetensors")
    whole = path.read_bytes()
    for damaged in (b"", whole[:40], whole[:-3], b"\x80\x04K\x01.", b"PK\x03\x04" * 20):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"policy.safetensors is no policy that rl8x saved, or damaged"):
            Policy.load(path)
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="holds tensors, but not those of a policy"):
        Policy.load(path)
    for change, words in (
        (lambda d: d.update(version=2), "version 2"),
        (lambda d: d.pop("arguments"), "does not say how its policy is made"),
        (lambda d: d.update(action_space={"kind": "Discrete", "n": 10**30, "start": 0, "dtype": "int64"}), "is made"),
        (lambda d: d["arguments"]["model_config"].update(hidden_sizes=[9]), "does not say how its policy is made"),
        (lambda d: d["arguments"]["model_config"].update(layers=9), "no argument 'layers'"),
        (lambda d: d.update({"class": "torch.nn.Linear"}), "not a subclass of Policy"),
        (lambda d: d["arguments"].update(model={"$class": "antigravity.fly"}), "antigravity"),
        (lambda d: d["arguments"].update(model={"$class": "rl8x.disk.replace_synced"}), "not a subclass of"),
    ):
        path.write_bytes(whole)
        edited(path, change)
        with pytest.raises(ValueError, match=words):
            Policy.load(path)
    assert "antigravity" not in sys.modules


def test_no_flipped_bit_is_decided_by(tmp_path):
    policy = Policy(VECTOR, STEER, normalize_observations=True, model_config=SMALL)
    whole = policy.to_bytes()
    assert {policy.to_bytes() for _ in range(16)} == {whole}
    assert same_weights(Policy.from_bytes(whole), policy)
    draw = random.Random(0)
    for at in range(len(whole)):  # length, names, shapes, offsets, description, digest, padding, every weight
        flipped = bytearray(whole)
        flipped[at] ^= 1 << draw.randrange(8)
        with pytest.raises(ValueError, match=r"damaged|holds tensors, but not|of the format") as refusal:
            Policy.from_bytes(bytes(flipped))
        assert len(str(refusal.value).splitlines()) == 1, at
    for damaged in (whole + b"\0", whole[:-1], whole[:-4] + whole[-8:-4], whole.replace(b"sha256", b"sha255")):
        with pytest.raises(ValueError, match="is no policy that rl8x saved, or damaged"):
            Policy.from_bytes(damaged)


def test_what_has_no_form_in_a_file_is_refused_and_nothing_is_written(tmp_path):
    class Special(Policy):
        """A policy that may act otherwise."""

    made = MLPModel(VECTOR, 2, hidden_sizes=[8])
    for policy, words in (
        (Policy(VECTOR, STEER, model=made), "`model` of this policy cannot be saved"),
        (Special(VECTOR, STEER), "Special of this policy cannot be saved"),
    ):
        with pytest.raises(TypeError, match=words):
            policy.save(tmp_path / "policy")
    assert list(tmp_path.iterdir()) == []
