"""The policies of distillation: how to find and describe the teacher, and how student and teacher act together."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import gymnasium
import gymnasium.spaces as spaces
import torch
from torch import Tensor, nn

import rl8x
from rl8x import keys
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.envs.base import Step
from rl8x.execution.execution import kept_generators
from rl8x.models import State
from rl8x.output import described, shown
from rl8x.policy import Act, Policy, numbered
from rl8x.portable import SUFFIX
from rl8x.rollouts.step import Cursor, experience
from rl8x.spaces import describe_space, space_from_plain, space_to_plain, where_rows
from rl8x.trees import Tree

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
            f"trainer; got {shown(given)}."
        )
    return policy, None


def describe_teacher(policy: Policy, source: str | None) -> dict[str, Any]:
    """Describe a policy as plain data without its weights, or with a copy of it if it cannot be rebuilt."""
    description: dict[str, Any] = {
        "source": source,
        "sha256": digest(acting_weights(policy)),
        # As JSON strings, since some file formats have no infinities.
        "spaces": [json.dumps(space_to_plain(space)) for space in (policy.observation_space, policy.action_space)],
        "state_reset_every": policy.state_reset_every,
    }
    if policy.model_is_made and type(policy).__module__.startswith("rl8x."):
        cls, arguments = policy.form
        kept = {name: value for name, value in arguments.items() if name != "normalize_values"}
        return description | {"class": cls, "arguments": kept}
    try:  # made from a model instance, or a user's policy class; checkpoints report that they cannot save it
        return description | {"policy": copy.deepcopy(policy)}
    except Exception as error:  # anything that the user's objects may raise
        raise TypeError(
            f"a student learns from a copy of its teacher, and this {type(policy).__name__} cannot be copied "
            f"({described(error)}): give `teacher` a run, or a policy's file."
        ) from error


def make_teacher(description: Mapping[str, Any]) -> Policy:
    """Return the policy in a description, else make one with initial weights; its weights need no gradients."""
    policy = description.get("policy")
    if policy is None:
        observation, action = (space_from_plain(json.loads(space)) for space in description["spaces"])
        with kept_generators():
            policy = description["class"](observation, action, **description["arguments"])
        policy.state_reset_every = description["state_reset_every"]
    made: Policy = policy.requires_grad_(False).eval()
    return made


def read_weights(description: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Return the weights of a described policy from its run; raise a `ValueError` if they have changed."""
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


LABELS: Final = "labels"
PLAYS: Final = "teacher_plays"
_TEACHERS: Final = "teacher/"
"""Prefix of the teacher's state."""
_AGE: Final = f"{_TEACHERS}(age)"
"""Steps since the last reset of the teacher's state, if it is reset within episodes."""


class Student(Policy):
    """A policy whose `forward` maps stored sequences to the parameters of its action distributions."""

    form = Policy.form  # saved as a plain policy

    def forward(self, obs: Tree, state: State, starts: Tensor) -> Any:  # type: ignore[override]
        """Return the parameters for observations `[seq_len, batch, *obs]`; other arguments are those of `evaluate`."""
        features, _, mask = self.predict(obs, state, starts)
        return self.distribution.from_features(features, mask)


class Guided(nn.Module):
    """The policy for collecting: the student, and a teacher that labels observations and acts with `beta`."""

    beta: Tensor
    """The probability that the teacher acts, 0-d; programs read it: change it in place."""
    num_separate: ClassVar[int] = 1

    def __init__(
        self, student: Policy, teacher: Policy, view: Callable[[Any], Any], *, with_params: bool, samples: bool
    ) -> None:
        super().__init__()
        self.student, self.teacher, self.view = student, teacher, view
        self.with_params, self.samples = with_params, samples
        self.register_buffer("beta", torch.zeros((), device=student.device), persistent=False)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.student.device

    @property
    def clips(self) -> bool:
        """Whether `env_actions` may change actions."""
        return self.student.clips

    def env_actions(self, actions: Any) -> Any:
        """Clip actions `[num_envs, *action]` for the environment."""
        return self.student.env_actions(actions)

    def initial_state(self, num_envs: int) -> State:
        """Return the initial states of both, each `[num_envs, *]`."""
        state = self._joined(self.student.initial_state(num_envs), self.teacher.initial_state(num_envs))
        age = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        return state | ({_AGE: age} if self.teacher.state_reset_every else {})

    def state_at_reset(self, num_envs: int) -> State:
        """Return the student's initial state alone, each `[num_envs, *]`: the teacher's resets at its own interval."""
        return self.student.initial_state(num_envs)

    def noise(self, horizon: int, num_envs: int, generator: torch.Generator) -> Tensor:
        """Draw the student's sampling noise and a number in [0, 1) that decides who acts, `[horizon, num_envs, *]`."""
        drawn = self.student.noise(horizon, num_envs, generator)
        who = torch.rand((horizon, num_envs, 1), generator=generator, device=self.device)
        return torch.cat((drawn, who), -1)

    def act(self, obs: Tree, state: State, starts: Tensor, noise: Tensor | None = None) -> Act:
        """Choose actions (without noise: the student's most likely ones), and label observations; see `Policy.act`."""
        own = {name: value for name, value in state.items() if not name.startswith(_TEACHERS)}
        others = {name.removeprefix(_TEACHERS): state[name] for name in state.keys() - own.keys() - {_AGE}}
        forgets, age = starts, {}
        if _AGE in state:
            steps = torch.where(starts, 0, state[_AGE])
            forgets, age = steps == 0, {_AGE: (steps + 1) % self.teacher.state_reset_every}
        params, _, after = self.teacher.respond(self.view(obs), others, forgets)
        best = self.teacher.env_actions(self.teacher.distribution.mode(params))
        act = self.student.act(obs, own, starts, noise[:, :-1] if self.samples and noise is not None else None)
        actions, plays = act.actions, torch.zeros_like(starts)
        if noise is not None:
            plays = noise[:, -1] < self.beta
            actions = where_rows(plays, best, actions)
        label = numbered(params) if self.with_params else best
        state = self._joined(act.state, after) | age
        return act._replace(actions=actions, state=state, labels={LABELS: label, PLAYS: plays})

    @staticmethod
    def _joined(own: State, others: State) -> State:
        return {**own, **{f"{_TEACHERS}{name}": value for name, value in others.items()}}


def labelled(cursor: Cursor, act: Act, step: Step) -> dict[str, Tree]:
    """Return what to store of a step, by name, each `[num_envs, ...]`, with the label and who acted."""
    assert act.labels is not None
    return experience(cursor, act, step) | {LABELS: act.labels[LABELS], PLAYS: act.labels[PLAYS]}


def view_of(env: gymnasium.Space[Any], teacher: gymnasium.Space[Any]) -> Callable[[Any], Any]:
    """Return a function that selects a teacher's part of an observation: all of it, some parts, or the part `obs`."""
    if env == teacher:
        return lambda obs: obs
    shown = dict(env.spaces) if isinstance(env, spaces.Dict) else {}
    if isinstance(teacher, spaces.Dict) and all(shown.get(name) == part for name, part in teacher.spaces.items()):
        parts = tuple(teacher.spaces)
        return lambda obs: {name: obs[name] for name in parts}
    if shown.get(keys.OBS) == teacher:
        return lambda obs: obs[keys.OBS]
    raise ValueError(
        f"the teacher needs observations of {describe_space(teacher)}; the environment has {describe_space(env)}. Add "
        "what is missing to the environment's observations, as observe_parameters='all' adds the parameters; "
        "`teacher_obs` hides it from the student."
    )
