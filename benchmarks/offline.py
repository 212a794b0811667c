"""The offline tasks of the learning benchmark: algorithm, data set and required score of each.

No published data set is needed: the data are recorded from our own policies, the same at each call. An expert is what
the benchmark's PPO is at the end of its training, a medium policy the same training stopped on the way, and a random
policy draws actions uniformly. Expert and medium policy act deterministically. So a policy that was cloned from their
data is judged deterministically by the return of the data: the most likely actions of a sampled medium policy are much
better than their samples, and no measure of cloning.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.learning_runs import Notes, judged
from benchmarks.learning_tasks import ON_ONE_THREAD, SMALL, TASKS, falling
from rl8x import HitsUpperBound, NullTracker, Trainer
from rl8x.algorithms import BCConfig, DQNConfig, IQLConfig, SACConfig, TD3Config
from rl8x.algorithms.off_policy.config import LearnerConfig
from rl8x.policy import Policy
from rl8x.replay.dataset import Dataset, normalized_score
from rl8x.replay.recording import Recording, record

# Few copies, each for long: the episodes that are cut at the end are longer than others, and not in the means.
COPIES = 20
REFERENCE = 20_000  # transitions by which random policy and expert are judged
SEED = 100  # of policies and recordings; learners have 0, 1, ...


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Of which policies a data set is."""

    task: str  # the online task of `learning_tasks.TASKS` that gives environment and policies
    parts: Mapping[str, int]  # transitions of the policies "random", "medium" and "expert"
    medium_at: float  # mean return of training episodes, with sampled actions, at which the medium policy is taken


@dataclasses.dataclass(frozen=True)
class Data:
    """A data set and what returns are compared with."""

    dataset: Dataset  # the transitions
    mean: float  # mean return of its whole episodes
    random: float  # mean return of the random policy: a score of 0
    expert: float  # mean return of the expert: a score of 100

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfflineTask:
    """What learns from which data, for how long, and what is asked of the result."""

    data: str  # the data set, of `RECIPES`
    algorithm: type[LearnerConfig]  # the class of the hyperparameters
    updates: int  # updates to make
    lr: float  # learning rate at the start; it falls to 0 in a straight line
    # The other hyperparameters, where they are not the defaults.
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    near: float | None = None  # share of the data's mean return within which every seed must end; None: any
    above: str | None = None  # the task whose return with the same seed must be reached at least; None: any
    seeds: int = 3  # how many seeds are run
    episodes: int = 1024  # fresh episodes that the final policy is judged by, deterministically
    missing: ClassVar[None] = None

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `algorithm` but for the seed."""
        schedule = {"lr_schedule": falling(self.lr, self.updates)}
        return {**schedule, "model_config": SMALL, **ON_ONE_THREAD, **self.config}

    @property
    def described(self) -> dict[str, Any]:
        """All of the task, as the JSON file has it."""
        algorithm = self.algorithm.__name__.removesuffix("Config")
        recipe = dataclasses.asdict(RECIPES[self.data])
        return {**dataclasses.asdict(self), "recipe": recipe, "algorithm": algorithm, "config": self.settings}

    @property
    def asked(self) -> str:
        """What is asked of every seed, in words."""
        if self.near is not None:
            return f"within {self.near:.0%} of the data"
        return "" if self.above is None else f"≥ {self.above}"

    def passes(self, row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a mean return at the end is what is asked, beside the data's and that of the task `above` in rows."""
        mean, data_mean = row["return_mean"], row["data_mean"]
        is_near = self.near is None or abs(mean - data_mean) <= self.near * abs(data_mean)
        return is_near and (self.above is None or mean >= self._reference(row["seed"], rows))

    def _reference(self, seed: int, rows: Sequence[Mapping[str, Any]]) -> float:
        found = [row["return_mean"] for row in rows if (row["task"], row["seed"]) == (self.above, seed)]
        if not found:
            raise SystemExit(f"This task is compared with {self.above}: measure that with seed {seed} first.")
        return float(found[0])

    def measure(
        self, name: str, seed: int, rows: Sequence[Mapping[str, Any]], checkpoints: Path | None
    ) -> dict[str, Any]:
        """Train once and evaluate what came out; the seed is the learner's and its evaluation's."""
        if self.above is not None:
            self._reference(seed, rows)  # before minutes of training
        data = make_data(self.data)
        make_env = TASKS[RECIPES[self.data].task].make_env
        notes = Notes(None, {})  # counts seconds from here
        algorithm = self.algorithm(seed=seed, **self.settings).build(dataset=data.dataset)
        trainer = Trainer(algorithm, tracker=NullTracker(), eval_env=make_env, num_eval_envs=self.episodes)
        trainer.run(stop_conditions=[HitsUpperBound("algorithm/updates", self.updates)], progress="none")
        spent = notes.ended(trainer)
        result = trainer.eval(deterministic=True)
        trainer.close()
        return {
            **judged(result),
            "score": round(data.score(result["eval/returns/mean"]), 1),
            "data_mean": round(data.mean, 2),
            "data_score": round(data.score(data.mean), 1),
            "data_digest": data.dataset.digest,
            **spent,
        }


CRITICS = {"critic_hidden_sizes": [64, 64], "batch_size": 128}
FAST = {**CRITICS, "gamma": 0.97, "tau": 0.02}  # a few thousand updates: values have to travel quickly
FLAT = {"model_config": {"hidden_sizes": [64, 64], "layer_norm": False}}
CLONED = "cartpole-mixed-bc", "pendulum-mixed-bc"  # what the others are compared with


def mixed(env: str, algorithm: type[LearnerConfig], updates: int, above: str | None, **config: Any) -> OfflineTask:
    """Return the task of an environment's mixed data."""
    return OfflineTask(data=f"{env}-mixed", algorithm=algorithm, updates=updates, lr=1e-3, above=above, config=config)


DQN = {"cql_coeff": 1.0, "batch_size": 128, "target_interval": 200, **FLAT}
SAC = {**FAST, "cql_coeff": 1.0, "cql_samples": 4, "critic_layer_norm": True}
# The coefficient of TD3+BC is the paper's alpha of 2.5.
TD3_BC = {**FAST, "actor_bc_coeff": 0.4}
REBRAC = {**FAST, "actor_bc_coeff": 0.01, "critic_bc_coeff": 0.01, "critic_layer_norm": True}
# Without the normaliser the pole's angle, a tenth of the position, is hardly seen, and where the policy turns is not
# exact.
MEDIUM = {"updates": 5_000, "lr": 3e-3, "config": {"normalize_observations": True}, "near": 0.05}
OFFLINE = {
    "cartpole-medium-bc": OfflineTask(data="cartpole-medium", algorithm=BCConfig, **MEDIUM),
    "cartpole-mixed-bc": mixed("cartpole", BCConfig, 3_000, None),
    "cartpole-mixed-cql": mixed("cartpole", DQNConfig, 4_000, CLONED[0], **DQN),
    "cartpole-mixed-iql": mixed("cartpole", IQLConfig, 4_000, CLONED[0], **CRITICS),
    "pendulum-mixed-bc": mixed("pendulum", BCConfig, 3_000, None),
    "pendulum-mixed-iql": mixed("pendulum", IQLConfig, 4_000, CLONED[1], **CRITICS),
    "pendulum-mixed-cql": mixed("pendulum", SACConfig, 3_000, CLONED[1], **SAC),
    "pendulum-mixed-td3-bc": mixed("pendulum", TD3Config, 4_000, CLONED[1], **TD3_BC),
    "pendulum-mixed-rebrac": mixed("pendulum", TD3Config, 4_000, "pendulum-mixed-td3-bc", **REBRAC),
}
