"""Pure tensor functions of RL algorithms: returns, advantages, categorical values, and moments."""

from rl8x.functional.returns import generalized_advantages, running_returns
from rl8x.functional.statistics import Moments, RunningMoments, expectation, explained_variance, moments, project

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
