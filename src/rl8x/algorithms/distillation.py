"""Distillation: a student, which may observe less, imitates a teacher's actions in the states that the student visits.

DAgger: the student acts, alone or mixed with the teacher, the teacher labels each observation, and the student learns
the labels. The student has to infer, for example by memory, what only the teacher observes, such as the environment's
parameters. Each rollout is discarded after its epochs, rather than aggregated with earlier ones (section 4 of the
paper); tens of thousands of fresh transitions per rollout make up for that.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import gymnasium.spaces as spaces
import numpy as np
import torch
from torch import Tensor

import rl8x
from rl8x import keys
from rl8x.algorithms.base import WITHOUT_VALUES, EnvFactory, GenericAlgorithmBase
from rl8x.algorithms.config import PolicyConfig
from rl8x.algorithms.hyperparameters import option
from rl8x.algorithms.on_policy import Objective, OnPolicyAlgorithm, OnPolicyConfig, SequenceBatch
from rl8x.algorithms.teacher import (
    LABELS,
    PLAYS,
    Guided,
    Student,
    acting_weights,
    describe_teacher,
    find_teacher,
    labelled,
    make_teacher,
    read_weights,
    view_of,
)
from rl8x.distributed import resolve_device
from rl8x.distributions import Distribution
from rl8x.distributions.composite import Composite
from rl8x.envs import Env
from rl8x.envs.observed import PARAMETERS
from rl8x.envs.parameters import AnyEnvConfig
from rl8x.names import unknown_name
from rl8x.policy import Policy, from_numbered
from rl8x.rollouts.statistics import Number, Stats
from rl8x.rollouts.step import Slot
from rl8x.spaces import critic_only, describe_space, leaves, without_parts
from rl8x.trees import Tree, flatten_tree

DISTILLATION_LOSS_METRICS: Final = ("losses/distillation", "monitors/entropy", "monitors/disagreement")
BETA: Final = "coefficients/beta"
PLAYED: Final = "monitors/teacher_share"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationConfig(OnPolicyConfig, PolicyConfig):
    """Hyperparameters of distillation.

    Source: Ross, Gordon & Bagnell 2011, arXiv:1011.0686, algorithm 3.1.
    """

    teacher: Any = option(
        None,
        "The teacher: a run's name, ID, folder or checkpoint, or a policy file; in Python also a policy, an "
        "algorithm or a trainer.",
    )
    teacher_obs: list[str] | None = option(
        None,
        "Parts of a Dict observation that only the teacher observes. None: the environment's parameters "
        "(observe_parameters), and the parts that only a critic observes.",
    )
    loss: str | None = option(
        None,
        "'kl': KL(teacher || student); 'nll': negative log-likelihood of the teacher's most likely action "
        "(cross-entropy for discrete actions); 'mse': squared error of continuous actions. None: kl if both have the "
        "same kind of distribution, else nll.",
        choices=("kl", "nll", "mse"),
    )
    beta: float = option(
        0.0,
        "DAgger's beta: probability that a step takes the teacher's action while collecting.",
        low=0.0,
        high=1.0,
    )
    beta_schedule: list[list[float]] | dict[str, Any] | None = option(
        None,
        "Beta over transitions, in the form of lr_schedule; replaces beta. The paper's choice, 1 in the first "
        "rollout and 0 afterwards, is [[0, 1.0], [num_envs * horizon, 0.0]].",
    )
    sample_actions: bool | None = option(
        None,
        "Whether to sample the student's actions while collecting, rather than take the most likely ones. None: "
        "unless the loss is 'mse', which does not train standard deviations.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.teacher_obs, str):
            raise TypeError(f"`teacher_obs` must be a list of names; got {self.teacher_obs!r}.")

    def build(self, env: Any = ..., /, **env_kwargs: Any) -> GenericAlgorithmBase[Any]:
        """Find the teacher, make the environment, check that they fit, and return the algorithm."""
        if self.teacher is None:
            raise ValueError("distillation needs a `teacher`: a run, a policy, an algorithm or a trainer.")
        if isinstance(self.teacher, Mapping) and "sha256" in self.teacher:  # its description
            return super().build(env, **env_kwargs)
        policy, source = find_teacher(self.teacher, resolve_device(self.device))
        described = dataclasses.replace(self, teacher=describe_teacher(policy, source))
        algorithm: Any = described.build(env, **env_kwargs)
        algorithm.load_teacher(acting_weights(policy))
        return cast(GenericAlgorithmBase[Any], algorithm)


class Distillation(OnPolicyAlgorithm[DistillationConfig], config=DistillationConfig):
    """A student that learns from a teacher. Made by `DistillationConfig(...).build(env)`, or by `distill`.

    Source: Ross, Gordon & Bagnell 2011, arXiv:1011.0686, algorithm 3.1; privileged teachers: Lee et al. 2020,
    arXiv:2010.11251.
    """

    target_metric: ClassVar[str] = PLAYED
    packed: ClassVar[tuple[str, ...]] = (keys.OBS, keys.STARTS, keys.VALID, LABELS)
    made: ClassVar[tuple[str, ...]] = ()
    bootstrap = None  # no values are learned

    def __init__(self, config: DistillationConfig, env: Env, seed: int, env_factory: EnvFactory | None = None) -> None:
        self.teacher = make_teacher(config.teacher)
        self.has_teacher = "policy" in config.teacher  # not its description alone
        super().__init__(config, env, seed, env_factory)

    def load_teacher(self, weights: Mapping[str, Tensor]) -> None:
        """Load the teacher's weights, in place; a `ValueError` if they belong to another model.

        Args:
            weights: Its `acting_weights`, `[*]` each.
        """
        if weights.keys() != acting_weights(self.teacher).keys():
            raise ValueError("the teacher's weights in the checkpoint do not match the model of its description.")
        self.teacher.load_state_dict(dict(weights), strict=False)
        self.has_teacher = True

    def make_policy(self) -> Student:
        """Build the student, with torch's global generator seeded."""
        space = self.env.single_observation_space
        spaces_of = self.teacher.action_space, self.env.single_action_space
        if spaces_of[0] != spaces_of[1]:
            theirs, ours = map(describe_space, spaces_of)
            raise ValueError(f"the teacher acts in {theirs}; the environment takes {ours}.")
        return self.policy_of(Student, WITHOUT_VALUES, hidden=_hidden(space, self.config.teacher_obs))

    @functools.cached_property
    def loss(self) -> str:
        """The loss; raises a `ValueError` if the two distributions do not support it."""
        loss, student, teacher = self.config.loss, self.policy.distribution, self.teacher.distribution
        same = _same_kind(student, teacher)
        names = f"{type(student).__name__} of the student and {type(teacher).__name__} of the teacher"
        if loss == "kl" and not same:
            raise ValueError(f"loss='kl' needs one kind of distribution, with a `kl`; got {names}. Use 'nll'.")
        if loss == "mse" and not all(
            isinstance(leaf, spaces.Box) and np.issubdtype(leaf.dtype, np.floating) for _, leaf in leaves(student.space)
        ):
            raise ValueError(
                f"loss='mse' needs continuous actions; got {describe_space(student.space)}. Use 'kl' or 'nll'."
            )
        return loss or ("kl" if same else "nll")

    @functools.cached_property
    def guided(self) -> Guided:
        """The student and the teacher, which act while collecting."""
        teacher, samples = self.teacher.to(self.device), self.config.sample_actions
        view = view_of(self.env.single_observation_space, teacher.observation_space)
        samples = self.loss != "mse" if samples is None else samples
        return Guided(self.policy, teacher, view, with_params=self.loss == "kl", samples=samples)

    @property
    def acting(self) -> Policy:
        """The student together with the teacher."""
        return cast(Policy, self.guided)  # it has every method that a collector calls

    @property
    def slot(self) -> Slot:
        """The function that returns the tensors of a rollout's slot, including the label and who acted."""
        return labelled

    @property
    def objective(self) -> Objective:
        """The loss of the student against the labels."""
        losses = functools.partial(self.losses, distribution=self.policy.distribution, loss=self.loss)
        return Objective(losses, DISTILLATION_LOSS_METRICS, DISTILLATION_LOSS_METRICS[0])

    def targets(self, data: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Return the share of steps in which the teacher acted; labels were computed while collecting."""
        plays, valid = data[PLAYS].float(), data.get(keys.VALID)
        return {}, plays.mean() if valid is None else (plays * valid).sum() / valid.sum().clamp(min=1)

    @staticmethod
    def losses(
        policy: Callable[..., Any],
        batch: SequenceBatch,
        state: SequenceBatch,
        coefficient: Tensor,
        config: DistillationConfig,
        *,
        distribution: Distribution,
        loss: str,
    ) -> Tensor:
        """Return loss and monitors of each transition, as in `DISTILLATION_LOSS_METRICS`, `[3, seq_len, batch]`.

            kl:   L = KL(teacher || student)
            nll:  L = -log p_student(a*),            a* the teacher's most likely action
            mse:  L = mean over the action's dimensions of (a - a*)^2,    a the student's most likely action

        Args:
            policy: A `Student` called as a module, under the weights of the update.
            batch: Observations, starts and labels, each `[seq_len, batch, ...]`.
            state: The student's initial states, each `[batch, *]`.
            coefficient: Not used.
            config: Not used.
            distribution: The student's action distribution.
            loss: The loss's name.

        The disagreement is the share of most likely actions that differ; for continuous actions, their mean distance.
        """
        params = policy(batch[keys.OBS], state, batch[keys.STARTS])
        labels, mode = batch[LABELS], distribution.mode(params)
        if loss == "kl":
            taught = from_numbered(labels, params)
            losses, best = distribution.kl(taught, params), distribution.mode(taught)
        else:
            best = labels
            losses = -distribution.logp(params, best) if loss == "nll" else _mean_of(torch.square, mode, best)
        distance = _mean_of(torch.abs, mode, best).detach()
        return torch.stack((losses, distribution.entropy(params), distance))

    def coefficients(self) -> dict[str, Number]:
        """Return the coefficients other than the learning rate, by metric name."""
        return {BETA: self.guided.beta.clone()}

    def collect(self, *, env_config: AnyEnvConfig | None = None) -> Stats:
        """Collect a rollout with student and teacher."""
        if not self.has_teacher:  # no checkpoint has provided it
            self.load_teacher(read_weights(self.config.teacher, self.device))
        self.guided.beta.fill_(self.schedules["beta"](self.counters[self.clock]))
        return super().collect(env_config=env_config)

    def evaluate(self, *, env_config: Mapping[str, Any] | None = None, deterministic: bool = True) -> Stats:
        """Evaluate the student without the teacher; see `GenericAlgorithmBase.evaluate`."""
        beta = self.guided.beta.clone()
        self.guided.beta.zero_()
        try:
            return super().evaluate(env_config=env_config, deterministic=deterministic)
        finally:
            self.guided.beta.copy_(beta)

    def student_policy(self) -> Policy:
        """Return the student as a policy of its own observation, without the parts that only the teacher observes.

        The `Dict` that `observe_parameters` wraps an observation in is undone, so that the policy acts in the
        environment without `observe_parameters`; a model given as an instance keeps the observation that it was made
        for. The policy shares no memory with the student.
        """
        student, own = self.policy, self.env.unwrapped.single_observation_space
        rest = without_parts(self.env.single_observation_space, student.hidden)
        is_wrapped = isinstance(rest, spaces.Dict) and list(rest.spaces) == [keys.OBS] and rest[keys.OBS] == own
        is_wrapped = is_wrapped and student.model_is_made
        arguments = student.form[1] | {"hidden": ()}
        policy = Policy(own if is_wrapped else rest, student.action_space, **arguments)
        policy.state_reset_every = student.state_reset_every
        policy.model.load_state_dict(student.model.state_dict())
        policy.distribution.load_state_dict(student.distribution.state_dict())
        if student.obs_moments is not None and policy.obs_moments is not None:
            for name, moments in policy.obs_moments.items():
                moments.load_state_dict(student.obs_moments[keys.OBS if is_wrapped else name].state_dict())
        return policy.to(self.device)

    @property
    def params(self) -> dict[str, Any]:
        """Every effective hyperparameter by name, and the identity of the teacher."""
        params = {name: value for name, value in super().params.items() if not name.startswith("teacher.")}
        described = self.config.teacher
        return params | {
            "teacher": described["source"] or "given",
            "teacher.sha256": described["sha256"],
            "teacher.model.class": type(self.teacher.model).__name__,
            "teacher_obs": list(self.policy.hidden),
            "loss": self.loss,
            "sample_actions": self.guided.samples,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all state that the next collect and step depend on, including the teacher's weights."""
        return {**super().state_dict(), "teacher": acting_weights(self.teacher)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`; training continues with the same bits."""
        super().load_state_dict(state)
        # A teacher that was found again has its weights already; the resume checks their hash.
        if not self.has_teacher:
            self.load_teacher(state["teacher"])


def distill(
    teacher: Any, student_config: DistillationConfig | None = None, env: Any = None, **env_kwargs: Any
) -> Distillation:
    """Return an algorithm whose student learns from a teacher, for a `Trainer`.

        trainer = Trainer(distill("teacher-run", DistillationConfig(model="gru", seq_len=16)))
        trainer.run(env_config=..., stop_conditions=[...])
        policy = trainer.algorithm.student_policy()

    Args:
        teacher: A run's name, ID, folder or checkpoint, an algorithm, a trainer, a policy, or a policy file.
        student_config: The hyperparameters; its `teacher` is replaced.
        env: The student's environment, in any form that `build` accepts; None: another one like that of the teacher's
            training, in which the student does not see `teacher_obs`.
        env_kwargs: Keyword arguments for the environment's constructor.

    Raises:
        ValueError: If no environment is given and the teacher's cannot be made again.
    """
    config, source = student_config or DistillationConfig(), teacher
    if env is None and isinstance(teacher, str | Path):
        source = rl8x.load_algorithm(teacher, device=str(resolve_device(config.device)))
    if env is None:
        env = getattr(getattr(source, "algorithm", source), "env_factory", None)
    if env is None:
        raise ValueError("distill: the teacher's environment cannot be recreated; give `env`.")
    given = str(teacher) if isinstance(teacher, Path) else teacher
    return cast(Distillation, dataclasses.replace(config, teacher=given).build(env, **env_kwargs))


def _hidden(space: Any, teacher_obs: list[str] | None) -> list[str]:
    """Return the parts of an observation that the student does not observe; raise a `ValueError` if one is unknown."""
    parts = dict(space.spaces) if isinstance(space, spaces.Dict) else {}
    if teacher_obs is None:
        return [name for name in parts if name == PARAMETERS or name in critic_only(space)]
    for name in teacher_obs:
        if name not in parts:
            raise ValueError(unknown_name("part", name, parts, " of the observation in `teacher_obs`"))
    if parts and not parts.keys() - {*teacher_obs, keys.ACTION_MASK}:
        raise ValueError("`teacher_obs` leaves the student nothing to observe: it names every part of the observation.")
    return list(teacher_obs)


def _mean_of(function: Callable[[Tensor], Tensor], actions: Tree, others: Tree) -> Tensor:
    """Average a function of differences of actions, `[seq_len, batch, *action]`; integers count 1 if they differ."""
    flat = flatten_tree("", others)
    pairs = [(part, flat[name]) for name, part in flatten_tree("", actions).items()]
    differences = [function(a - b) if a.is_floating_point() else (a != b).float() for a, b in pairs]
    return torch.stack([each.flatten(2).mean(-1) if each.dim() > 2 else each for each in differences]).mean(0)


def _same_kind(one: Distribution, other: Distribution) -> bool:
    """Return whether two distributions have the same kind of parameters and a KL divergence."""
    if type(one) is not type(other) or not one.has_kl:
        return False
    if isinstance(one, Composite) and isinstance(other, Composite):
        return all(_same_kind(part, other.named[key]) for key, part in one.named.items())
    return True
