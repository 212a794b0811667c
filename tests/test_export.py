"""Exported programs, by what the policy does; those of each algorithm are in tests/checkpoint/test_load.py."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from tests.policies import policy_of

from rl8x import Policy, export
from rl8x.export import DecisionProgram, export_policy, largest_difference
from rl8x.q_values import QPolicy
from rl8x.spaces import AsymmetricDict

onnxruntime = pytest.importorskip("onnxruntime", reason="the extra `export` is not installed")

VECTOR = Box(-np.inf, np.inf, (4,), np.float32)
STEER = Box(-2.0, 2.0, (2,), np.float32)
# Models, spaces and formats beside those of tests/checkpoint/test_load.py; all combinations are those of
# `python -m benchmarks.costs export-matrix`.
CASES = [
    ("mlp", "multibinary", "pt2", True),
    ("cnn", "multidiscrete", "pt2", True),
]
LONG = [("attention", "masked", "onnx", True), ("cnn", "discrete", "onnx", False), ("gru", "box", "onnx", True)]
SEPARATE = {"hidden_sizes": [8], "separate": 3}  # agents with weights of their own, which are exported together


@pytest.mark.parametrize(
    ("model", "actions", "format", "sampled", "config"),
    [
        *((*case, {}) for case in CASES),
        *(("mlp", "box", format, False, SEPARATE) for format in export.FORMATS),
        *(pytest.param(*case, {}, marks=pytest.mark.long) for case in LONG),
    ],
)
def test_an_exported_policy_acts_as_the_policy(model, actions, format, sampled, config, tmp_path):
    policy = policy_of(model, actions, model_config=config)
    made = export_policy(policy, tmp_path / f"policy.{format}", sampled=sampled)
    assert made.difference <= 1e-5
    assert (made.format, made.path.exists()) == (format, True)
    assert [path.name for path in tmp_path.iterdir()] == [made.path.name]
    assert logging.getLogger("torch.onnx").level == logging.NOTSET


@pytest.mark.long
def test_onnx_runtime_decides_as_the_policy_for_any_number_of_observations(tmp_path):
    """What a user would do with the file, without rl8x."""
    policy = policy_of("lstm", "dict")
    path = export_policy(policy, tmp_path / "pilot.onnx").path
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    about = json.loads(session.get_modelmeta().custom_metadata_map["rl8x"])
    assert about["inputs"] == {
        "obs/lane": "int64 [batch]",
        "obs/sensed": "float32 [batch, 4]",
        "obs/wheels": "int64 [batch, 2]",
        "state/actor_h": "float32 [batch, 64]",
        "state/actor_c": "float32 [batch, 64]",
        "starts": "bool [batch]",
    }
    rng = np.random.default_rng(0)
    for num in (1, 2, 7):
        state, memory = None, {f"state/actor_{part}": np.zeros((num, 64), np.float32) for part in "hc"}
        for step in range(3):
            obs = {
                "sensed": rng.standard_normal((num, 4)).astype(np.float32),
                "lane": rng.integers(1, 4, num),
                "wheels": rng.integers(0, 2, (num, 2)),
            }
            given = {f"obs/{name}": part for name, part in obs.items()} | memory | {"starts": np.full(num, step == 0)}
            found = dict(zip(about["outputs"], session.run(list(about["outputs"]), given), strict=True))
            memory = {f"state/actor_{part}": found[f"next_state/actor_{part}"] for part in "hc"}
            decided, state = policy.decide(obs, state)
            assert np.array_equal(found["actions/gear"], decided["gear"])
            assert np.allclose(found["actions/steer"], decided["steer"], atol=1e-5)


def test_a_pt2_is_called_with_torch_alone_and_says_what_it_takes(tmp_path):
    policy = QPolicy(
        VECTOR, Discrete(3, start=4), num_outputs=5, support=(0.0, 1.0), model_config={"hidden_sizes": [8]}
    )
    policy.distribution.set_epsilon(0.5)
    path = export_policy(policy, tmp_path / "policy.pt2", sampled=True).path
    texts = {"rl8x.json": ""}
    program = torch.export.load(path, extra_files=texts).module()
    about = json.loads(texts["rl8x.json"])
    assert about["noise"] == [["uniform in [0, 1)", 1]]
    obs, noise = torch.randn(500, 4), torch.rand(500, 1)
    found = program({"obs": obs, "noise": noise})["actions"]
    expected = policy.act(obs, {}, torch.ones(500, dtype=torch.bool), noise).actions
    assert torch.equal(found, expected)
    assert not np.array_equal(found.numpy(), policy.decide(obs).actions)  # some explore


def test_a_critics_part_is_no_input(tmp_path):
    space = AsymmetricDict({"secret": Box(-1, 1, (2,), np.float32), "x": VECTOR}, critic_only=["secret"])
    policy = Policy(space, STEER, model="gru", model_config={"hidden_size": 8}, normalize_observations=True)
    made = export_policy(policy, tmp_path / "policy.pt2")
    assert list(made.inputs) == ["obs/x", "state/actor_h", "starts"]
    assert list(made.outputs) == ["actions", "next_state/actor_h"]
    assert made.difference <= 1e-5


@pytest.mark.parametrize("format", ["pt2", "onnx"])
def test_half_precision_is_normalised_as_any_other(format, tmp_path):
    policy = Policy(
        Box(-2.0, 2.0, (3,), np.float16), STEER, model_config={"hidden_sizes": []}, normalize_observations=True
    )
    policy.obs_moments.observe({"": 0.4 + 0.01 * torch.randn(99, 3)}, None)
    assert export_policy(policy, tmp_path / f"policy.{format}").difference <= 1e-5
    row = torch.tensor([[0.41, 0.39, 0.4]], dtype=torch.float16)
    (moments,) = policy.obs_moments.values()
    exact = (row.double() - moments.mean) / moments.std
    assert torch.allclose(policy.model_inputs(row)[0].double(), exact, atol=1e-5)


def test_a_policy_in_training_stays_as_it_is(tmp_path):
    policy = policy_of("mlp", "box")
    policy.autocast = lambda: torch.autocast("cpu", torch.bfloat16)  # of a run in bf16
    made = export_policy(policy, tmp_path / "policy.safetensors")
    assert made.difference == 0.0
    assert all(weight.requires_grad for weight in policy.parameters())
    assert isinstance(policy.autocast(), torch.autocast)


# -- the comparison


def test_the_comparison_finds_what_differs():
    policy = policy_of("gru", "dict")
    program = DecisionProgram(policy, sampled=False)

    def forgetful(inputs):
        return program({**inputs, "state/actor_h": torch.zeros_like(inputs["state/actor_h"])})

    def difference(change):
        return largest_difference(policy, lambda inputs: change(program(inputs)), sampled=False)

    def for_many_alone(found):
        return found | {"actions/gear": found["actions/gear"] + (len(found["actions/gear"]) == 1)}

    assert difference(dict) <= 1e-6
    assert largest_difference(policy, forgetful, sampled=False) > 1e-3
    for change, least, most in (
        (lambda found: found | {"actions/steer": found["actions/steer"] + 3e-3}, 2.97e-3, 3.03e-3),
        (lambda found: found | {"actions/steer": found["actions/steer"] * torch.nan}, np.inf, np.inf),
        (lambda found: {name: part for name, part in found.items() if name != "actions/gear"}, np.inf, np.inf),
        (for_many_alone, 0.2, np.inf),
    ):
        assert least <= difference(change) <= most


def test_rounding_may_decide_between_equals_and_between_nothing_else():
    """Actions 2 and 3 have the same value; which of them is taken is no difference, what the others would be is one."""
    policy = Policy(VECTOR, Discrete(4), model_config={"hidden_sizes": [8], "policy_gain": 1.0})
    with torch.no_grad():
        policy.model.policy_head.weight[:2] *= 0.01
        policy.model.policy_head.bias[:] = torch.tensor([-9.0, -9.0, 9.0, 9.0])
        policy.model.policy_head.weight[3] = policy.model.policy_head.weight[2]
    program = DecisionProgram(policy, sampled=False)
    assert largest_difference(policy, lambda inputs: {"actions": 5 - program(inputs)["actions"]}, sampled=False) == 0.0
    assert largest_difference(policy, lambda inputs: {"actions": program(inputs)["actions"] * 0}, sampled=False) == 1.0


def test_a_program_that_differs_is_refused_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("rl8x.export.largest_difference", lambda *args, **options: 2e-4)
    (tmp_path / "policy.safetensors").write_text("before")
    with pytest.raises(ValueError, match=r"differs from the policy by 2.0e-04 in an action, .* nothing was written"):
        export_policy(policy_of("mlp", "box"), tmp_path / "policy.safetensors")
    assert (tmp_path / "policy.safetensors").read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 1


def test_formats_and_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(export._NEEDS, "onnx", ("onnx", "no_such_package"))
    for name, options, message in (
        ("policy.onx", {}, r"no format 'onx' \(the suffix of policy\.onx\)\. Did you mean 'onnx'"),
        ("policy.onnx", {"format": "pt2"}, r"policy\.onnx is the name of a file of the format onnx, and `format` is"),
        ("policy", {"format": "safetensors", "sampled": True}, "is the policy itself"),
        ("policy.onnx", {}, r"the format onnx needs no_such_package: pip install 'rl8x\[export\]'"),
    ):
        with pytest.raises((ValueError, ImportError), match=message):
            export_policy(policy_of("mlp", "box"), tmp_path / name, **options)
    assert list(tmp_path.iterdir()) == []
