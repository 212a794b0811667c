"""The hyperparameters of algorithms that learn from stored transitions, each explained once, at its field."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, ClassVar, Final

from rl8x.algorithms.base import AlgorithmConfig, EnvFactory
from rl8x.algorithms.config import OnlineConfig, TrainedConfig
from rl8x.algorithms.hyperparameters import Default, option
from rl8x.algorithms.memory_check import Space, slot_bytes
from rl8x.envs import Env
from rl8x.models.layers import INITS
from rl8x.replay.dataset import Dataset

# Largest denominator of the fraction that `updates_per_sample` is converted to, so that 1 / 3 is exactly a third.
_LARGEST_DENOMINATOR: Final = 10**9


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerConfig(TrainedConfig):
    """Hyperparameters of every algorithm that learns from batches of stored transitions."""

    dataset: str | Dataset | None = option(
        None,
        "Recorded transitions to learn from, without an environment: a folder written by `rl8x collect` or "
        "`Dataset.save`, a Minari id, a .hdf5 file (with `eval_env` naming the environment that has its spaces), or "
        "in Python a Dataset.",
    )
    updates_per_step: int = option(
        100, "Gradient updates per step of the trainer, when learning from a data set.", low=1, offline=True
    )
    batch_size: int = option(256, "Transitions per batch.", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.dataset, str | Dataset | None):
            raise TypeError(f"`dataset` must be a path, a Minari id or a Dataset; got {self.dataset!r}.")

    def build(self, env: Any = None, /, *, dataset: str | Dataset | None = None, **env_kwargs: Any) -> Any:
        """Return the algorithm, after checking that config, environment and data set fit.

        Args:
            env: The training environment; None to learn from a data set.
            dataset: The data set, in place of the config's.
            env_kwargs: Keyword arguments for the environment's constructor, such as `time_limit`.

        Raises:
            TypeError: If an environment is given beside a data set.
            ValueError: If there is neither, or its spaces do not fit.
        """
        config = self if dataset is None else dataclasses.replace(self, dataset=dataset)
        return AlgorithmConfig.build(config, env, **env_kwargs)

    def make_env(self, env: Any, seed: int, env_kwargs: Mapping[str, Any]) -> tuple[Env | None, EnvFactory | None]:
        """Raise a `TypeError` if an environment is given beside a data set, else return None for both."""
        if env is not None or env_kwargs:
            raise TypeError(
                f"{type(self).__name__} learns from a data set, without an environment; got {env!r}. To evaluate in "
                "it, give it as `eval_env`."
            )
        return None, None

    @property
    def returns(self) -> tuple[int, float]:
        """Steps and discount of the returns in a row; a single reward for algorithms that use no returns."""
        return 1, 1.0


@functools.lru_cache
def updates_for(samples: int, updates_per_sample: float, num_ranks: int = 1) -> Fraction:
    """Return the number of updates due on each rank for `samples` of all ranks, as an exact fraction."""
    return Fraction(updates_per_sample).limit_denominator(_LARGEST_DENOMINATOR) * Fraction(samples, num_ranks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueConfig(LearnerConfig):
    """Hyperparameters of algorithms that learn values with target networks."""

    n_step: int = option(
        1,
        "Rewards in an n-step return; fewer where an episode ends. Rows of a replay keep the n_step and gamma that "
        "they were stored with.",
        low=1,
    )
    gamma: float = option(0.99, "Discount factor; for a replay see n_step.", low=0.0, high=1.0)
    tau: float = option(
        0.005,
        "Polyak coefficient of the target networks: target = (1 - tau) target + tau network; 1 copies the weights.",
        above=0.0,
        high=1.0,
    )
    target_interval: int = option(1, "Updates between two updates of the target networks.", low=1)

    @property
    def returns(self) -> tuple[int, float]:
        """Steps and discount of the returns in a row."""
        return self.n_step, self.gamma

    def tau_of(self, update: int) -> float:
        """Return tau of the target networks after an update, in [0, 1]; 0 leaves them unchanged.

        Args:
            update: Number of the update, counted from 1.
        """
        return 0.0 if update % self.target_interval else self.tau


def _drawn_uniformly(config: Any) -> str | None:
    """Return why priorities have no effect, if there are none."""
    return None if config.prioritized else "transitions are drawn uniformly. Give prioritized=True, or leave it out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffPolicyConfig(ValueConfig, OnlineConfig):
    """Hyperparameters of every algorithm that learns from a replay; a step makes the updates due for its horizon."""

    num_envs: int = option(
        Default(64),
        "Parallel copies of the environment, stepped as one batch. Where it is not given: 16 of a simulator that is "
        "stepped copy by copy, as many as an instance has.",
        low=1,
    )
    horizon: int = option(
        2,
        "Environment steps of each copy per rollout, and so between blocks of updates. num_envs * horizon of about "
        "128 learns as fast as 16; far below, the fixed cost of a trainer step dominates.",
        low=1,
    )
    horizons_per_env_reset: int | None = option(
        None,
        "k > 0: reset the environment before every k-th rollout; k < 0: only before the first. None: only before the "
        "first.",
    )
    buffer_size: int = option(1_000_000, "Capacity of the replay in transitions; new ones overwrite the oldest.", low=1)
    buffer_path: str | None = option(
        None, "Folder for a memory-mapped replay on disk. None: the replay is in the device's memory."
    )
    updates_per_sample: float = option(
        1.0,
        "Gradient updates per collected transition (replay ratio), after the warm-up. Fractions carry over, so that "
        "the ratio is exact in the long run.",
        low=1e-6,
        high=1e6,
    )
    warmup_steps: int = option(
        1000,
        "Environment steps, over all copies, with random actions before the first update.",
        low=0,
    )
    prioritized: bool = option(
        False,
        "Whether to sample transitions in proportion to their last TD errors (prioritised replay, arXiv:1511.05952).",
    )
    priority_alpha: float = option(
        0.6, "Exponent of the priorities: 0 samples uniformly.", low=0.0, high=1.0, idle=_drawn_uniformly
    )
    priority_beta: float = option(
        0.4,
        "Exponent of the importance weights: 1 corrects fully for prioritised sampling.",
        low=0.0,
        high=1.0,
        idle=_drawn_uniformly,
    )
    priority_beta_schedule: list[list[float]] | dict[str, Any] | None = option(
        None, "priority_beta over transitions, in the form of lr_schedule; replaces it.", idle=_drawn_uniformly
    )

    resets_once: ClassVar[bool] = True

    def check_source(self) -> None:
        """Raise a `ValueError` for collecting options with a data set, and for data-set options without one."""
        fields = {field.name: field for field in dataclasses.fields(self)}
        if self.dataset is None:
            names = [name for name, field in fields.items() if field.metadata.get("offline")]
            why = "needs a data set: give `dataset`, or leave it out"
        else:
            names, why = collecting_options(), "is about an environment or a replay: leave it out with a data set"
        for name in names:
            if getattr(self, name) != fields[name].default:
                raise ValueError(f"`{name}` {why}; got {getattr(self, name)!r}.")

    @property
    def update_ratio(self) -> Fraction:
        """`updates_per_sample` as a fraction, so that counts are exact."""
        return updates_for(1, self.updates_per_sample)

    def make_env(  # type: ignore[override] # none where there is a data set
        self, env: Any, seed: int, env_kwargs: Mapping[str, Any]
    ) -> tuple[Env | None, EnvFactory | None]:
        """Make the environment, or none if there is a data set; raise if there is neither, or both."""
        nothing = None if self.dataset is None else super().make_env(env, seed, env_kwargs)
        self.check_source()
        if nothing is not None:
            return nothing
        if env is None:
            raise ValueError("no environment is named: give `env`, such as CartPole, or `dataset`.")
        return OnlineConfig.make_env(self, env, seed, env_kwargs)

    def rollout_bytes(self, observation: Space | None, action: Space | None) -> int:
        """Return a lower bound of the memory that the experience of one collect takes."""
        next_obs = slot_bytes(observation, None) - slot_bytes(None, None)
        return super().rollout_bytes(observation, action) + self.num_envs * (self.horizon + 1) * next_obs


@functools.cache
def collecting_options() -> list[str]:
    """Return the names of the hyperparameters of collecting into a replay, which learning from a data set ignores."""
    of_data = {field.name for field in dataclasses.fields(ValueConfig)}
    return [field.name for field in dataclasses.fields(OffPolicyConfig) if field.name not in of_data]


def no_atoms(config: Any) -> str | None:
    """Return why bounds of atoms have no effect, if there are no atoms."""
    return "there are no atoms. Give num_atoms, such as 51, or leave it out" if config.num_atoms == 1 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorCriticConfig(OffPolicyConfig):
    """Hyperparameters of every algorithm that trains a policy by critics, Q(s, a), from a replay."""

    policy_delay: int = option(1, "Critic updates per policy update.", low=1, high=10_000)
    num_critics: int = option(2, "Number of critics; targets use the smallest of their values.", low=1)
    critic_hidden_sizes: list[int] | None = option(None, "Widths of the critics' hidden layers. None: [256, 256].")
    critic_layer_norm: bool = option(
        False, "Whether the critics' hidden layers have layer normalisation before their activations."
    )
    critic_init: str = option(
        "orthogonal",
        "How the critics' weights begin: orthogonal, or uniform within 1 / sqrt(inputs), as PyTorch has them. The "
        "policy's: model_config's init.",
        choices=INITS,
    )
    num_atoms: int = option(
        1,
        "Atoms of a categorical critic, from v_min to v_max (arXiv:1707.06887); 1: the critic predicts the mean "
        "return alone. For continuous actions. An update has batch_size * num_atoms^2 numbers.",
        low=1,
        high=1000,
    )
    v_min: float = option(-5.0, "Lowest atom; must be less than v_max.", idle=no_atoms)
    v_max: float = option(5.0, "Highest atom.", idle=no_atoms)
    return_bound: float | None = option(
        None,
        "Scale rewards in updates so that discounted returns lie within plus and minus this; atoms from -5 to 5 then "
        "fit any task. None: no scaling.",
        above=0.0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not -math.inf < self.v_min < self.v_max < math.inf:
            raise ValueError(f"`v_min` must be less than `v_max`, both finite; got {self.v_min} and {self.v_max}.")

    fixed: ClassVar[tuple[str, ...]] = ("return_bound", "num_atoms", "v_min", "v_max")

    def check_source(self) -> None:
        """Raise also if `return_bound` is given beside a data set, whose returns are not measured."""
        super().check_source()
        if self.dataset is not None and self.return_bound is not None:
            raise ValueError(
                f"`return_bound` measures returns where they are collected; got {self.return_bound} with a data set. "
                "Use None, and `v_min` and `v_max` that the data's returns lie between."
            )
