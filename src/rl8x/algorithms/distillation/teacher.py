"""The policy that a student learns from: given directly or found by its run, and described as plain data.

A student's checkpoint contains the teacher's description and weights, so that it can be resumed without the teacher's
run.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import gymnasium
import gymnasium.spaces as spaces
import torch
from torch import Tensor

import rl8x
from rl8x import keys
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.execution.threads import kept_generators
from rl8x.output import described
from rl8x.policy import Policy
from rl8x.portable import SUFFIX
from rl8x.spaces import describe_space, space_from_plain, space_to_plain

# State of a policy that acting does not need: the value normaliser.
_NOT_ACTING: Final = "value_moments."


class Teacher(Mapping[str, Any]):
    """A policy that labels observations; as a mapping, the plain data that it is built from, without weights.

    Args:
        description: As `of` makes it.
        policy: The policy; None builds it from the description, and `load` must load its weights.

    Attributes:
        policy: The policy, which is never trained.
        has_weights: Whether the policy has the weights of the teacher.
    """

    def __init__(self, description: Mapping[str, Any], policy: Policy | None = None) -> None:
        self._description = dict(description)
        self.has_weights = policy is not None
        self.policy = _built(description) if policy is None else policy
        self.policy.requires_grad_(False).eval()

    def __getitem__(self, name: str) -> Any:
        """Return a part of the description."""
        return self._description[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the description's parts."""
        return iter(self._description)

    def __len__(self) -> int:
        """Return the number of the description's parts."""
        return len(self._description)

    def __repr__(self) -> str:
        """Name the source, and the weights."""
        return f"Teacher({self['source'] or 'given'}, {self['sha256'][:12]})"

    @classmethod
    def of(cls, given: Any, device: torch.device | str = "cpu") -> Teacher:
        """Return the teacher that the argument specifies, on a device.

        Args:
            given: A policy or its file, an algorithm or its trainer, a run's name, ID or folder, a checkpoint, or a
                description.
            device: Device of its policy.

        Raises:
            TypeError: If it is none of these, or cannot be copied.
            ValueError: If the file is not a policy file.
            rl8x.checkpoint.CheckpointError: If no run is found, or it cannot be built.
        """
        if isinstance(given, Teacher):
            return given
        if isinstance(given, Mapping):
            return cls(given)
        if isinstance(given, str | Path):
            return cls._from_policy(_read(given, device), str(given), device)
        learner = getattr(given, "algorithm", given)  # of a trainer
        policy = learner.policy if isinstance(learner, GenericAlgorithmBase) else learner
        if not isinstance(policy, Policy):
            raise TypeError(
                "`teacher` must be a run (its name, ID, folder or checkpoint), a policy or its file, an algorithm or a "
                f"trainer; got {given!r}."
            )
        return cls._from_policy(policy, None, device)

    @classmethod
    def _from_policy(cls, policy: Policy, source: str | None, device: torch.device | str) -> Teacher:
        weights = acting_weights(policy)
        description: dict[str, Any] = {
            "source": source,
            "sha256": digest(weights),
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
            built = _built(description)
            built.load_state_dict(weights)
            return cls(description, built.to(device))
        # A model instance, or a user's policy class, has no description from which it could be built.
        try:
            built = copy.deepcopy(policy)
        except Exception as error:  # anything that the user's objects may raise
            raise TypeError(
                f"a student learns from a copy of its teacher, and this {type(policy).__name__} cannot be copied "
                f"({described(error)}): give `teacher` a run, or a policy's file."
            ) from error
        description["model"] = built.model  # cannot be written to a file; checkpoints report that
        return cls(description, built.to(device))

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Load the weights of a checkpoint, in place.

        Raises:
            ValueError: If they belong to another model.
        """
        if weights.keys() != acting_weights(self.policy).keys():
            raise ValueError("the teacher's weights in the checkpoint do not match the model of its description.")
        self.policy.load_state_dict(dict(weights), strict=False)
        self.has_weights = True

    def need_weights(self) -> None:
        """Load the weights from the run that the description names, unless a checkpoint provided them.

        Raises:
            ValueError: If there are none, or that run's weights have changed.
        """
        if self.has_weights:
            return
        source = self["source"]
        if source is None:
            raise ValueError("the teacher's description has no weights: name its run in `teacher`, or resume.")
        weights = acting_weights(_read(source, self.policy.device))
        if digest(weights) != self["sha256"]:
            raise ValueError(
                f"the teacher's run {source!r} has changed since it was described: give only the run's name as "
                "`teacher` to learn from its present weights."
            )
        self.load(weights)


def _read(source: str | Path, device: torch.device | str) -> Policy:
    """Read the policy of a run, or of a file that `Policy.save` wrote."""
    if Path(source).suffix == SUFFIX and Path(source).is_file():
        return Policy.load(source, device=device)
    policy: Policy = rl8x.load_policy(source, device=str(device))
    return policy


def _built(description: Mapping[str, Any]) -> Policy:
    """Build the policy of a description, with initial weights."""
    with kept_generators():
        return Policy(
            space_from_plain(json.loads(description["observation_space"])),
            space_from_plain(json.loads(description["action_space"])),
            model=description["model"],
            model_config=description["model_config"],
            distribution=description["distribution"],
            distribution_config=description["distribution_config"],
            normalize_observations=description["normalize_observations"],
            hidden=description["hidden"],
        )


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


class View:
    """Selects what a teacher observes of an environment's observations: all, some parts, or the part `obs` alone.

    Args:
        env: Space of one copy's observation in the environment.
        teacher: The space that the teacher was trained in.

    Raises:
        ValueError: If the environment's observations lack what the teacher needs.
    """

    def __init__(self, env: gymnasium.Space[Any], teacher: gymnasium.Space[Any]) -> None:
        self.parts: tuple[str, ...] | None = None
        self.unwraps = False
        if env == teacher:
            return
        shown = dict(env.spaces) if isinstance(env, spaces.Dict) else {}
        if isinstance(teacher, spaces.Dict) and all(shown.get(name) == part for name, part in teacher.spaces.items()):
            self.parts = tuple(teacher.spaces)
        elif shown.get(keys.OBS) == teacher:
            self.unwraps = True
        else:
            raise ValueError(
                f"the teacher needs observations of {describe_space(teacher)}; the environment has "
                f"{describe_space(env)}. Add what is missing to the environment's observations, as "
                "observe_parameters='all' adds the parameters; `teacher_obs` hides it from the student."
            )

    def __call__(self, obs: Any) -> Any:
        """Return the parts of observations `[num_envs, *obs]` that the teacher observes."""
        if self.unwraps:
            return obs[keys.OBS]
        return obs if self.parts is None else {name: obs[name] for name in self.parts}
