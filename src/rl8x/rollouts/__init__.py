"""Rollouts: steps, horizons and episodes of a policy in an environment, the rollout buffer, and statistics."""
