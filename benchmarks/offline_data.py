"""Data sets of the offline learning tasks: recorded from our own policies, the same at each call.

No published data set is needed: an expert is what the benchmark's PPO is at the end of its training, a medium policy
the same training stopped on the way, and a random policy draws actions uniformly.

Expert and medium policy act deterministically. So a policy that was cloned from their data is judged deterministically
by the return of the data: the most likely actions of a sampled medium policy are much better than their samples, and
no measure of cloning.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import torch

from benchmarks.learning_tasks import TASKS
from rl8x import HitsUpperBound, NullTracker, Trainer
from rl8x.cli.collect import Recording, record
from rl8x.policy import Policy
from rl8x.replay.dataset import Dataset, normalized_score

# Few copies, each for long: the episodes that are cut at the end are longer than others, and not in the means.
COPIES = 20
REFERENCE = 20_000  # transitions by which random policy and expert are judged
SEED = 100  # of policies and recordings; learners have 0, 1, ...


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Of which policies a data set is.

    Attributes:
        task: The online task of `learning_tasks.TASKS` that gives environment and policies.
        parts: Transitions of the policies "random", "medium" and "expert".
        medium_at: Mean return of training episodes, with sampled actions, at which the medium policy is taken.
    """

    task: str
    parts: Mapping[str, int]
    medium_at: float


@dataclasses.dataclass(frozen=True)
class Data:
    """A data set and what returns are compared with.

    Attributes:
        dataset: The transitions.
        mean: Mean return of its whole episodes.
        random: Mean return of the random policy: a score of 0.
        expert: Mean return of the expert: a score of 100.
    """

    dataset: Dataset
    mean: float
    random: float
    expert: float

    def score(self, value: float) -> float:
        """Return a mean return on the scale of random policy and expert."""
        return normalized_score(value, self.random, self.expert)


CARTPOLE = {"task": "cartpole", "medium_at": 30.0}
PENDULUM = {"task": "pendulum", "medium_at": -1180.0}
RECIPES = {
    "cartpole-medium": Recipe(parts={"medium": 200_000}, **CARTPOLE),
    "cartpole-mixed": Recipe(parts={"random": 20_000, "medium": 30_000, "expert": 10_000}, **CARTPOLE),
    "pendulum-mixed": Recipe(parts={"random": 20_000, "medium": 10_000, "expert": 10_000}, **PENDULUM),
}


@functools.cache
def make_data(name: str) -> Data:
    """Record the data set of a recipe; the second call returns the first's."""
    recipe = RECIPES[name]
    parts = {kind: recorded(recipe.task, kind, count, recipe.medium_at) for kind, count in recipe.parts.items()}
    random, expert = (
        (parts.get(kind) or recorded(recipe.task, kind, REFERENCE, recipe.medium_at)).returns.mean().item()
        for kind in ("random", "expert")
    )
    sets = [part.dataset for part in parts.values()]
    rows = {key: torch.cat([each.transitions[key] for each in sets]) for key in sets[0].transitions}
    first = sets[0]
    dataset = Dataset(rows, observation_space=first.observation_space, action_space=first.action_space)
    returns = torch.cat([part.returns for part in parts.values()])
    return Data(dataset, returns.mean().item(), random, expert)


@functools.cache
def recorded(task: str, kind: str, transitions: int, medium_at: float) -> Recording:
    """Record the "random", "medium" or "expert" policy of an online task."""
    # A random policy needs one that knows the spaces; it is asked for nothing.
    policy = policy_of(task, None if kind == "expert" else medium_at)
    env = TASKS[task].make_env(COPIES, device="cpu", seed=SEED)
    is_random = kind == "random"
    return record(policy, env, transitions, epsilon=float(is_random), deterministic=not is_random, seed=SEED)


@functools.cache
def policy_of(task: str, medium_at: float | None) -> Policy:
    """Train the policy of an online task, to its end or until training episodes first reach a mean return."""
    online = TASKS[task]
    algorithm = online.make_algorithm(SEED)
    trainer = Trainer(algorithm, tracker=NullTracker(), eval_env=False)
    conditions = [HitsUpperBound("env/steps", online.transitions)]
    if medium_at is not None:
        conditions.append(HitsUpperBound("episodes/returns/mean", medium_at))
    trainer.run(stop_conditions=conditions, progress="none")
    trainer.close()
    return algorithm.policy
