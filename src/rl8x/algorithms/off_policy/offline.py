"""Learning from a data set alone, which replaces the replay; the clock counts updates."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any, Final, TypeVar

import gymnasium

from rl8x import keys
from rl8x.algorithms.base import AlgorithmConfig, EnvFactory
from rl8x.algorithms.memory_check import check_dataset
from rl8x.algorithms.off_policy.config import LearnerConfig, OffPolicyConfig, ValueConfig
from rl8x.algorithms.off_policy.learner import Learner
from rl8x.distributed import ranks
from rl8x.envs import Env
from rl8x.replay.dataset import Dataset
from rl8x.spaces import describe_space
from rl8x.trees import tree_map, unflatten_tree

LearnerConfigT = TypeVar("LearnerConfigT", bound=LearnerConfig)

# Hyperparameters of collecting into a replay, which have no effect with a data set.
_COLLECTING: Final = {field.name for field in dataclasses.fields(OffPolicyConfig)} - {
    field.name for field in dataclasses.fields(ValueConfig)
}


class OfflineAlgorithm(Learner[LearnerConfigT]):
    """Learns from a data set; a step makes `updates_per_step` updates.

    Args:
        config: The hyperparameters, `dataset` among them.
        env: None.
        seed: The seed in use, also where the config leaves it open.
        env_factory: None.

    Attributes:
        dataset: The data set, as it was read.
        replay: Its rows, with the returns that the algorithm wants, on the device.

    Raises:
        ValueError: If there is no `dataset`, its spaces are not known or do not fit, or ranks cannot share
            `batch_size`.
    """

    replay: Dataset

    def __init_subclass__(cls, *, config: type[AlgorithmConfig] | None = None, **options: Any) -> None:
        """Have a config class build this class where it has a data set; one that can do without builds another too."""
        can_do_without = config is not None and issubclass(config, OffPolicyConfig)
        super().__init_subclass__(config=None if can_do_without else config, **options)
        if config is not None and issubclass(config, LearnerConfig):
            config.offline_algorithm = cls

    def __init__(
        self, config: LearnerConfigT, env: Env | None, seed: int, env_factory: EnvFactory | None = None
    ) -> None:
        if config.dataset is None:
            raise ValueError(
                f"{type(self).__name__} learns from recorded transitions: give `dataset`, such as the folder that "
                "`rl8x collect RUN` writes."
            )
        self.dataset = config.dataset if isinstance(config.dataset, Dataset) else Dataset.load(config.dataset)
        if config.batch_size % ranks().size:
            raise ValueError(
                f"`batch_size` is shared out and must be a multiple of the {ranks().size} ranks; got "
                f"{config.batch_size}. Try {-(-config.batch_size // ranks().size) * ranks().size}."
            )
        super().__init__(config, env, seed, env_factory)
        wanted = {"next_actions": self.reads_next_actions}
        check_dataset(self.dataset.size, self.device, self.dataset.prepared_bytes(**wanted))
        self.replay = self.dataset.prepared(*config.returns, self.device, **wanted)
        if self.policy.obs_moments is not None:  # otherwise observations would needlessly be on the device twice
            obs = unflatten_tree(keys.OBS, self.dataset.transitions)
            self.policy.observe(tree_map(lambda part: part.unsqueeze(1).to(self.device), obs), shared=True)

    @property
    def batch_size(self) -> int:
        """Rows of a batch on this rank: its share."""
        return self.config.batch_size // ranks().size

    @property
    def reads_next_actions(self) -> bool:
        """Whether updates also read `next_actions`, which not all rows have; see `Dataset.prepare`."""
        return False

    def find_spaces(self) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]]:
        """Return those of the data set.

        Raises:
            ValueError: If it does not know them.
        """
        spaces = self.dataset.observation_space, self.dataset.action_space
        if spaces[0] is None or spaces[1] is None:
            raise ValueError(
                "the data set does not say what its spaces are: make it by `Dataset.load(..., observation_space=..., "
                "action_space=...)` or `from_tensors`, and `save` it to have them in its folder."
            )
        return spaces[0], spaces[1]

    def _take_due(self) -> int:
        return self.config.updates_per_step

    @property
    def updates_per_step(self) -> Fraction:
        """Updates of one `step()`."""
        return Fraction(self.config.updates_per_step)

    @property
    def params(self) -> dict[str, Any]:
        """The effective hyperparameters by name, without those of collecting, and what identifies the data set."""
        dataset = self.dataset
        return {
            **{name: value for name, value in super().params.items() if name.split(".")[0] not in _COLLECTING},
            "dataset": self.config.dataset if isinstance(self.config.dataset, str) else "given",
            "dataset.transitions": dataset.size,
            "dataset.episodes": len(dataset.episode_returns),
            "dataset.digest": dataset.digest,
            "dataset.observation_space": describe_space(self.observation_space),
            "dataset.action_space": describe_space(self.action_space),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all state that the next step depends on, with a digest in place of the data set."""
        return {**super().state_dict(), "dataset": self.dataset.digest}

    def load_state_dict(self, state: Any) -> None:
        """Restore the state of `state_dict`; training continues with the same bits.

        Raises:
            ValueError: If the data set is another.
        """
        if state["dataset"] != self.dataset.digest:
            raise ValueError(
                f"the run learned from a data set of the digest {state['dataset']}; {self.config.dataset!r} has "
                f"{self.dataset.digest}. Give the same transitions."
            )
        super().load_state_dict(state)
