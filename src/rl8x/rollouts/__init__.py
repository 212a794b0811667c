"""Rollouts: steps and horizons of a policy in an environment, the rollout buffer, statistics, and data sets."""
