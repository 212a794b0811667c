"""Policies as programs for other runtimes, each checked against the policy before it is written.

    from rl8x.export import export_policy
    print(export_policy(policy, "policy.onnx"))

A program takes a dict of tensors by name and returns one; docs/export.md lists the names, the same in each format. It
includes observation normaliser, action mask, scaling and clipping. The batch may have any size; if agents have weights
of their own, it has the observations of all agents, one agent after the other.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from rl8x import __version__
from rl8x.disk import replace_synced
from rl8x.distributions import Distribution
from rl8x.distributions.composite import Composite
from rl8x.names import unknown_name
from rl8x.policy import Policy, check_torch_defaults
from rl8x.portable import zeros
from rl8x.spaces import leaves, space_to_plain, torch_dtype
from rl8x.trees import flatten_tree, unflatten_tree

Format = Literal["pt2", "onnx", "safetensors"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)
Tensors = Mapping[str, Tensor]
Program = Callable[[Tensors], Tensors]

TOLERANCE: Final = 1e-4
_STEPS: Final = 10
_COPIES: Final = (99, 1)  # 1,000 observations in ten steps; a batch of one copy must work too
_TRIES: Final = 16
_DIGITS: Final = 1e-5
_STATE: Final = "state/"
_NEXT: Final = "next_state/"
_NEEDS: Final[dict[Format, tuple[str, ...]]] = {"onnx": ("onnx", "onnxscript", "onnxruntime")}
# Spaces with larger bounds are not sampled uniformly: environments do not return such observations.
_FAR: Final = 1e6


@dataclasses.dataclass(frozen=True)
class Export:
    """An exported policy.

    Attributes:
        path: The file.
        format: Its format.
        sampled: Whether actions are sampled, with the input `noise`, rather than the most likely ones.
        inputs: Type and shape of each input by name, as in `float32 [batch, 4]`.
        outputs: Type and shape of each output by name.
        difference: The largest difference to the policy's actions over 1,000 observations: |a - b| / max(1, |b|).
    """

    path: Path
    format: Format
    sampled: bool
    inputs: dict[str, str]
    outputs: dict[str, str]
    difference: float

    def __str__(self) -> str:
        """Describe the file and its largest difference from the policy, one fact a line."""
        both = self.inputs, self.outputs
        inputs, outputs = (", ".join(f"{name} {kind}" for name, kind in part.items()) for part in both)
        found = f"largest difference to the policy's actions over 1,000 observations: {self.difference:.1e}"
        return f"{self.path}\n{inputs} -> {outputs}\n{found}"


class DecisionProgram(nn.Module):
    """A policy's decision as a function of named tensors."""

    def __init__(self, policy: Policy, sampled: bool) -> None:
        super().__init__()
        self.policy = policy
        self.sampled = sampled

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return `actions` and `next_state`, each `[batch, *]`, for `obs`, `state`, `starts` and `noise`."""
        obs = unflatten_tree("obs", inputs)
        state = {name.removeprefix(_STATE): part for name, part in inputs.items() if name.startswith(_STATE)}
        first = next(iter(inputs.values()))
        starts = inputs["starts"] if state else first.new_zeros(first.shape[:1], dtype=torch.bool)
        actions, state = self.policy.choose(obs, state, starts, inputs["noise"] if self.sampled else None)
        return flatten_tree("actions", actions) | {f"{_NEXT}{name}": part for name, part in state.items()}

    def example(self, num: int) -> dict[str, Tensor]:
        """Return inputs for `num` observations of each agent: zeros, at the beginning of an episode."""
        policy, num = self.policy, num * self.policy.num_separate
        inputs = flatten_tree("obs", zeros(policy.seen_space, num))
        memory = {f"{_STATE}{name}": part.clone() for name, part in policy.memory(num).items()}
        starts = {"starts": torch.ones(num, dtype=torch.bool)} if memory else {}
        noise = {"noise": torch.zeros(num, policy.distribution.num_noise)} if self.sampled else {}
        return inputs | memory | starts | noise


def export_policy(
    policy: Policy, path: str | os.PathLike[str], *, format: Format | None = None, sampled: bool = False
) -> Export:
    """Write a policy as a program for the CPU, in float32, after comparing it with the policy.

    Args:
        policy: The policy, which is not changed.
        path: The file; an existing one is replaced.
        format: `"pt2"` (`torch.export`), `"onnx"`, or `"safetensors"`, which `Policy.load` reads; None: by the suffix.
        sampled: Whether actions are sampled, with the input `noise`. For a safetensors file, each call decides.

    Returns:
        A description of the file: names, types and shapes of inputs and outputs, and the largest difference.

    Raises:
        ImportError: If a package is missing that the format needs.
        OSError: If the file cannot be written.
        ValueError: If the format is unknown or not that of the file's suffix, a safetensors file was asked to be
            `sampled`, or an action differs from the policy's by more than 1e-4.
        TypeError: If `policy` is not a `Policy`, or has no form in the format.
    """
    if not isinstance(policy, Policy):
        raise TypeError(f"a Policy is exported, such as an algorithm's `policy`; got {policy!r:.200}.")
    check_torch_defaults()
    target = Path(path)
    chosen = _format(target, format)
    if sampled and chosen == "safetensors":
        raise ValueError("a safetensors file is the policy itself: `decide(obs, deterministic=False)` samples from it.")
    missing = [name for name in _NEEDS.get(chosen, ()) if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"the format {chosen} needs {', '.join(missing)}: pip install 'rl8x[export]'.")
    # Copies of the weights: those of a policy in training are views of one vector, maybe on another device.
    policy = copy.deepcopy(policy).cpu().requires_grad_(False).eval()
    policy.autocast = contextlib.nullcontext
    program = DecisionProgram(policy, sampled)
    content, run = _WRITERS[chosen](program)
    difference = largest_difference(policy, run, sampled=sampled)
    if not difference <= TOLERANCE:
        raise ValueError(
            f"the program in the format {chosen} differs from the policy by {difference:.1e} in an action, which is "
            f"more than {TOLERANCE:.0e}: nothing was written."
        )
    replace_synced(target, content)
    example = program.example(1)
    outputs = program(example)
    return Export(target, chosen, sampled, described(example), described(outputs), difference)


def _format(path: Path, given: str | None) -> Format:
    name = path.suffix.removeprefix(".") if given is None else given
    if name not in FORMATS:
        where = f" (the suffix of {path.name})" if given is None else ""
        raise ValueError(unknown_name("format", name, FORMATS, where))
    by_suffix = path.suffix.removeprefix(".")
    if by_suffix in FORMATS and by_suffix != name:
        raise ValueError(f"{path.name} is the name of a file of the format {by_suffix}, and `format` is {name}.")
    return name


def described(tensors: Tensors) -> dict[str, str]:
    """Write the type and shape of tensors `[1, *]`, by name, as in `float32 [batch, 4]`."""
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} [{', '.join(['batch', *map(str, tensor.shape[1:])])}]"
        for name, tensor in tensors.items()
    }


def _about(program: DecisionProgram) -> str:
    """Return the JSON in a program's file: its inputs and outputs, its spaces, and its kinds of noise in order."""
    example = program.example(1)
    about = {
        "rl8x": __version__,
        "inputs": described(example),
        "outputs": described(program(example)),
        "observation_space": space_to_plain(program.policy.seen_space),
        "action_space": space_to_plain(program.policy.action_space),
        "noise": _noise_kinds(program.policy.distribution) if program.sampled else [],
    }
    return json.dumps(about, allow_nan=False)


def _noise_kinds(distribution: Distribution) -> list[list[Any]]:
    """List the kinds of random numbers of a sample, with the number of each, in the order of `noise`."""
    if isinstance(distribution, Composite):
        return [kind for part in distribution.named.values() for kind in _noise_kinds(part)]
    kinds = {torch.rand: "uniform in [0, 1)", torch.randn: "standard normal"}
    return [[kinds.get(distribution.draw, type(distribution).__name__), distribution.num_noise]]


# -- the formats: each writer returns the file's content, and the program that was read back from it


def _traced(program: DecisionProgram) -> Any:
    example = program.example(3)
    batch = torch.export.Dim("batch", min=program.policy.num_separate)
    shapes = ({name: {0: batch} for name in example},)
    with torch.no_grad():
        return torch.export.export(program, (example,), dynamic_shapes=shapes, strict=False)


def _write_pt2(program: DecisionProgram) -> tuple[bytes, Program]:
    buffer = io.BytesIO()
    torch.export.save(_traced(program), buffer, extra_files={"rl8x.json": _about(program)})
    content = buffer.getvalue()
    return content, torch.export.load(io.BytesIO(content)).module()


def _write_onnx(program: DecisionProgram) -> tuple[bytes, Program]:
    import onnxruntime

    example = program.example(1)
    names = list(program(example))
    log = logging.getLogger("torch.onnx")
    with warnings.catch_warnings(action="ignore"), contextlib.ExitStack() as until:
        until.callback(log.setLevel, log.level)
        log.setLevel(logging.ERROR)  # it reports missing packages, and names that it changes
        made = torch.onnx.export(_traced(program), input_names=list(example), output_names=names, verbose=False)
    assert made is not None
    made.model.metadata_props["rl8x"] = _about(program)
    content = made.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def run(inputs: Tensors) -> Tensors:
        found = session.run(names, {name: part.numpy() for name, part in inputs.items()})
        return {name: torch.from_numpy(np.asarray(part)) for name, part in zip(names, found, strict=True)}

    return content, run


def _write_safetensors(program: DecisionProgram) -> tuple[bytes, Program]:
    content = program.policy.to_bytes()
    return content, DecisionProgram(Policy.from_bytes(content, trust=True), sampled=False)


_WRITERS: Final[dict[Format, Callable[[DecisionProgram], tuple[bytes, Program]]]] = {
    "pt2": _write_pt2,
    "onnx": _write_onnx,
    "safetensors": _write_safetensors,
}


# -- the comparison


@torch.no_grad()
def largest_difference(policy: Policy, run: Program, *, sampled: bool) -> float:
    """Compare a program with `policy.act` on 1,000 observations: ten steps of 99 copies, and of one alone.

    Each has its own memory, so that memories are compared too. Rounding decides between discrete actions whose scores,
    or distances to the drawn number, agree to five digits: such actions count as equal.
    """
    parts = {"/".join(("", *path)): copy.deepcopy(leaf) for path, leaf in leaves(policy.observation_space)}
    for index, leaf in enumerate(parts.values()):
        leaf.seed(index)
    generator, largest = torch.Generator().manual_seed(0), 0.0
    for num in (copies * policy.num_separate for copies in _COPIES):
        state, memory = policy.initial_state(num), policy.memory(num)
        starts = torch.ones(num, dtype=torch.bool)
        for noise in policy.noise(_STEPS, num, generator):
            drawn = {name: _observed(policy, name, leaf, num, generator) for name, leaf in parts.items()}
            obs = unflatten_tree("", drawn)
            # Not an algorithm's own `act`, which may be random during warm-up.
            own = noise if sampled else None
            act = Policy.act(policy, obs, state, starts, own)
            expected = flatten_tree("actions", policy.env_actions(act.actions))
            seen = {name: part for name, part in obs.items() if name not in policy.unseen} if policy.unseen else obs
            inputs = flatten_tree("obs", seen) | {f"{_STATE}{name}": part for name, part in memory.items()}
            inputs |= ({"starts": starts} if memory else {}) | ({"noise": noise} if sampled else {})
            found = run(inputs)
            memory = {name: found[f"{_NEXT}{name}"] for name in memory}
            discrete = {name: part for name, part in expected.items() if not part.is_floating_point()}
            if any(_difference(found.get(name), part) for name, part in discrete.items()):
                _settle(policy, expected, found, (obs, state, starts, own), generator)
            state = act.state
            largest = max(largest, *(_difference(found.get(name), part) for name, part in expected.items()))
            starts = torch.rand(num, generator=generator) < 0.2
    return largest


def _settle(
    policy: Policy, expected: dict[str, Tensor], found: Tensors, given: tuple[Any, ...], generator: torch.Generator
) -> None:
    """Accept a program's discrete actions that the policy takes after small shifts (1e-5) of its model's features."""
    obs, state, starts, noise = given
    inputs, mask = policy.model_inputs(obs)
    features, _ = policy.policy_features(inputs, state, starts)
    for _ in range(_TRIES):
        shift = _DIGITS * (1.0 + features.abs()) * torch.randn(features.shape, generator=generator)
        params = policy.distribution.from_features(features + shift, mask)
        actions = policy.distribution.mode(params) if noise is None else policy.distribution.sample(params, noise)[0]
        nearby = flatten_tree("actions", policy.env_actions(actions))
        for name, part in expected.items():
            if not part.is_floating_point() and name in found and found[name].shape == part.shape:
                expected[name] = torch.where(found[name] == nearby[name], found[name].to(part.dtype), part)


def _difference(found: Tensor | None, expected: Tensor) -> float:
    if found is None or found.shape != expected.shape:
        return float("inf")
    expected = expected.double()
    each = (found.double() - expected).abs() / expected.abs().clamp(min=1.0)
    return float(each.nan_to_num(nan=torch.inf).amax()) if each.numel() else 0.0


def _observed(policy: Policy, name: str, leaf: gymnasium.Space[Any], num: int, generator: torch.Generator) -> Tensor:
    """Draw a part of `num` observations; normalised parts have the mean and spread of the policy's moments."""
    rows = torch.from_numpy(np.stack([np.asarray(leaf.sample()) for _ in range(num)])).to(torch_dtype(leaf))
    if not rows.is_floating_point() or not isinstance(leaf, gymnasium.spaces.Box):
        return rows
    low, high = (torch.from_numpy(bound).to(rows.dtype) for bound in (leaf.low, leaf.high))
    normal = torch.randn(rows.shape, generator=generator).to(rows.dtype)
    if policy.obs_moments is not None and (moments := policy.obs_moments.of_part(name)) is not None:
        return moments.denormalize(normal).clamp(low, high)
    near = (low.abs() < _FAR) & (high.abs() < _FAR)
    return torch.where(near, rows, normal.clamp(low, high))
