"""Rollouts: one step of a policy in an environment, horizons of steps, the buffer that keeps them, their statistics."""
