"""One slot of a rollout: a policy acts, an environment steps; a pure function of tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rl8x import keys
from rl8x.envs.base import Carry, Env, Step
from rl8x.policy import Act, Policy, State
from rl8x.trees import Tree, flatten_tree


class Cursor(NamedTuple):
    """Where the environment and the policy stand between two steps.

    Attributes:
        obs: The observation to act on, `[num_envs, *obs]` or a dict of such.
        starts: Where it begins an episode, `[num_envs]`, bool.
        state: The policy's state before it, each `[num_envs, *]`.
    """

    obs: Tree
    starts: Tensor
    state: State


Transition = tuple[Carry, Cursor, Act, Step]


def act_and_step(
    policy: Policy, env: Env, carry: Carry, cursor: Cursor, env_noise: Tensor, policy_noise: Tensor | None
) -> Transition:
    """Act on the cursor's observation and step the environment: one slot of a rollout."""
    act = policy.act(cursor.obs, cursor.state, cursor.starts, policy_noise)
    actions = policy.env_actions(act.actions) if policy.clips else act.actions
    carry, step = env.advance(carry, actions, env_noise)
    return carry, Cursor(step.obs, step.terminated | step.truncated, act.state), act, step


def slot(cursor: Cursor, act: Act, step: Step) -> dict[str, Tensor]:
    """Name what one slot of a rollout holds but the values of final observations, each `[num_envs, ...]`."""
    named = {
        **flatten_tree(keys.OBS, cursor.obs),
        keys.STARTS: cursor.starts,
        **flatten_tree(keys.ACTIONS, act.actions),
        keys.LOGP: act.logp,
        keys.VALUES: act.values,
        keys.REWARDS: step.rewards,
        keys.TERMINATED: step.terminated,
        keys.TRUNCATED: step.truncated,
        keys.EPISODE_RETURNS: step.episode_returns,
        keys.EPISODE_LENGTHS: step.episode_lengths,
    }
    if step.valid is not None:
        named[keys.VALID] = step.valid
    return named | {f"{keys.METRICS}/{name}": figure for name, figure in step.metrics.items()}
