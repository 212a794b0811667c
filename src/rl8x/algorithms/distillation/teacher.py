"""The policy that a student learns from: found where it is named, and described as plain data.

A student's checkpoint contains the teacher's description and weights, so that it can be resumed without the teacher's
run.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import rl8x
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.execution.threads import kept_generators
from rl8x.output import described
from rl8x.policy import Policy
from rl8x.portable import SUFFIX
from rl8x.spaces import space_from_plain, space_to_plain

# State of a policy that acting does not need: the value normaliser.
_NOT_ACTING: Final = "value_moments."


def find_teacher(given: Any, device: torch.device | str) -> tuple[Policy, str | None]:
    """Return the policy that an argument specifies, and the name by which it can be found again, if it has one."""
    if isinstance(given, str | Path):
        if Path(given).suffix == SUFFIX and Path(given).is_file():
            return Policy.load(given, device=device), str(given)
        return rl8x.load_policy(given, device=str(device)), str(given)
    learner = getattr(given, "algorithm", given)  # of a trainer
    policy = learner.policy if isinstance(learner, GenericAlgorithmBase) else learner
    if not isinstance(policy, Policy):
        raise TypeError(
            "`teacher` must be a run (its name, ID, folder or checkpoint), a policy or its file, an algorithm or a "
            f"trainer; got {given!r}."
        )
    return policy, None


def describe_teacher(policy: Policy, source: str | None) -> dict[str, Any]:
    """Describe a policy as plain data without its weights; one whose making nobody knows is in it as a copy.

    Raises a `TypeError` if it cannot be copied.
    """
    description: dict[str, Any] = {
        "source": source,
        "sha256": digest(acting_weights(policy)),
        # As JSON strings, since some file formats have no infinities.
        "observation_space": json.dumps(space_to_plain(policy.observation_space)),
        "action_space": json.dumps(space_to_plain(policy.action_space)),
        "model": type(policy.model),
        "model_config": policy.arguments["model"],
        "distribution": type(policy.distribution),
        "distribution_config": policy.arguments["distribution"],
        "normalize_observations": policy.obs_moments is not None,
        "hidden": list(policy.hidden),
    }
    if policy.model_is_made and type(policy).__module__.startswith("rl8x."):
        return description
    try:  # of a model instance, or a user's policy class; checkpoints report that it cannot be written
        return description | {"policy": copy.deepcopy(policy)}
    except Exception as error:  # anything that the user's objects may raise
        raise TypeError(
            f"a student learns from a copy of its teacher, and this {type(policy).__name__} cannot be copied "
            f"({described(error)}): give `teacher` a run, or a policy's file."
        ) from error


def make_teacher(description: Mapping[str, Any]) -> Policy:
    """Make the policy of a description, with initial weights unless it is in it, and without gradients."""
    policy = description.get("policy")
    if policy is None:
        arguments = ("model", "model_config", "distribution", "distribution_config", "normalize_observations", "hidden")
        spaces = [space_from_plain(json.loads(description[name])) for name in ("observation_space", "action_space")]
        with kept_generators():
            policy = Policy(*spaces, **{name: description[name] for name in arguments})
    made: Policy = policy.requires_grad_(False).eval()
    return made


def read_weights(description: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Return the weights of a described policy from the run that it names; raise a `ValueError` if they are others."""
    source = description["source"]
    if source is None:
        raise ValueError("the teacher's description has no weights: name its run in `teacher`, or resume.")
    weights = acting_weights(find_teacher(source, device)[0])
    if digest(weights) != description["sha256"]:
        raise ValueError(
            f"the teacher's run {source!r} has changed since it was described: give only the run's name as "
            "`teacher` to learn from its present weights."
        )
    return weights


def acting_weights(policy: Policy) -> dict[str, Tensor]:
    """Return the weights and moments that a policy acts with, by name, without the value normaliser."""
    return {name: value for name, value in policy.state_dict().items() if not name.startswith(_NOT_ACTING)}


def digest(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of weights, in hexadecimal digits."""
    sha256 = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        sha256.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        sha256.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()
