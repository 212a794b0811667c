"""The policy that acts in distillation: the student, with the teacher that labels its observations."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import gymnasium
import gymnasium.spaces as spaces
import torch
from torch import Tensor, nn

from rl8x import keys
from rl8x.distributions.base import numbered
from rl8x.envs.base import Step
from rl8x.models import State
from rl8x.policy import Act, Policy
from rl8x.rollouts.step import Cursor, experience
from rl8x.spaces import describe_space, where_rows
from rl8x.trees import Tree, flatten_tree

LABELS: Final = "labels"
PLAYS: Final = "teacher_plays"
_TEACHERS: Final = "teacher/"
"""Prefix of the teacher's state."""


class Student(Policy):
    """A policy whose `forward` maps stored sequences to the parameters of its action distributions."""

    form = Policy.form  # saved as a plain policy: the subclass is only for training

    def forward(self, obs: Tree, state: State, starts: Tensor) -> Any:  # type: ignore[override]
        """Return the parameters for observations `[seq_len, batch, *obs]`; other arguments are those of `evaluate`."""
        features, _, mask = self.predict(obs, state, starts)
        return self.distribution.from_features(features, mask)


class Guided(nn.Module):
    """The policy for collecting: the student, with the teacher, which labels observations and sometimes acts.

    Its state is the student's and the teacher's, each as if it acted alone.

    Args:
        student: The trained policy.
        teacher: The policy that labels observations.
        view: Selects what the teacher observes.
        with_params: Whether labels are the parameters of the teacher's distribution rather than its actions.
        samples: Whether the student's actions are sampled.

    Attributes:
        beta: Probability that the teacher acts, 0-d. Programs read it, so it is changed in place.
    """

    beta: Tensor
    num_separate: ClassVar[int] = 1

    def __init__(self, student: Policy, teacher: Policy, view: View, *, with_params: bool, samples: bool) -> None:
        super().__init__()
        self.student = student
        self.teacher = teacher
        self.view = view
        self.with_params = with_params
        self.samples = samples
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
        return self._joined(self.student.initial_state(num_envs), self.teacher.initial_state(num_envs))

    def noise(self, horizon: int, num_envs: int, generator: torch.Generator) -> Tensor:
        """Draw the student's sampling noise and a number in [0, 1) that decides who acts, `[horizon, num_envs, *]`."""
        drawn = self.student.noise(horizon, num_envs, generator)
        who = torch.rand((horizon, num_envs, 1), generator=generator, device=self.device)
        return torch.cat((drawn, who), -1)

    def act(self, obs: Tree, state: State, starts: Tensor, noise: Tensor | None = None) -> Act:
        """Choose an action for each copy and label its observation; arguments are those of `Policy.act`.

        Without noise the student acts alone, by its most likely actions.
        """
        own = {name: value for name, value in state.items() if not name.startswith(_TEACHERS)}
        others = {name.removeprefix(_TEACHERS): state[name] for name in state.keys() - own.keys()}
        params, _, after = self.teacher.respond(self.view(obs), others, starts)
        best = self.teacher.env_actions(self.teacher.distribution.mode(params))
        act = self.student.act(obs, own, starts, noise[:, :-1] if self.samples and noise is not None else None)
        actions, plays = act.actions, torch.zeros_like(starts)
        if noise is not None:
            plays = noise[:, -1] < self.beta
            actions = where_rows(plays, best, actions)
        label = numbered(params) if self.with_params else best
        state = self._joined(act.state, after)
        return act._replace(actions=actions, state=state, labels={LABELS: label, PLAYS: plays})

    @staticmethod
    def _joined(own: State, others: State) -> State:
        return {**own, **{f"{_TEACHERS}{name}": value for name, value in others.items()}}


def labelled(cursor: Cursor, act: Act, step: Step) -> dict[str, Tensor]:
    """Return a step's tensors to store, by name, each `[num_envs, ...]`, with the label and who acted."""
    assert act.labels is not None
    label = flatten_tree(LABELS, act.labels[LABELS])
    return experience(cursor, act, step) | label | {PLAYS: act.labels[PLAYS]}


class View:
    """Selects what a teacher observes of an environment's observations: all, some parts, or the part `obs` alone.

    Raises a `ValueError` if the environment's observations lack what the teacher needs.
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
