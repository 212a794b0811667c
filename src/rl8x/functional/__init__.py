"""Pure tensor functions of RL algorithms: returns, advantages, categorical values, and moments."""

from rl8x.functional.categorical import expectation, project
from rl8x.functional.estimates import (
    Moments,
    RunningMoments,
    explained_variance,
    generalized_advantages,
    moments,
    running_returns,
)

__all__ = [
    "Moments",
    "RunningMoments",
    "expectation",
    "explained_variance",
    "generalized_advantages",
    "moments",
    "project",
    "running_returns",
]
