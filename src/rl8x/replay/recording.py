"""Recording what a policy does in an environment, or random actions, as a data set to learn from offline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rl8x import keys
from rl8x.envs import Env
from rl8x.envs.base import advanced
from rl8x.policy import Policy
from rl8x.replay.dataset import Dataset
from rl8x.spaces import only_legal, tree_of, where_rows
from rl8x.trees import first_tensor, flatten_tree

# Where an episode ended by itself, beside `truncated`, which the end of the recording sets too.
_ENDED: Final = "ended"


class Recording(NamedTuple):
    """Transitions, one copy's after the other's, and the returns of episodes that ended in them, of a team together."""

    dataset: Dataset
    returns: Tensor


@torch.no_grad()
def record(
    policy: Policy | None,
    env: Env,
    transitions: int,
    *,
    epsilon: float = 0.0,
    deterministic: bool = False,
    seed: int = 0,
    env_config: Mapping[str, Any] | None = None,
) -> Recording:
    """Step a policy in an environment, which is reset, and keep so many transitions.

    Where the recording of a copy ends in the middle of an episode, that is marked as truncated.

    Args:
        policy: What acts; None draws all actions from the action space.
        env: The environment; actions are those that it gets.
        transitions: How many are kept.
        epsilon: The share of actions that are drawn.
        deterministic: Whether the others are the most likely ones rather than samples.
        seed: Seeds the environment and the actions.
        env_config: Values of the environment's parameters; None changes nothing.
    """
    generator = torch.Generator(env.device if policy is None else policy.device).manual_seed(seed)
    env.action_space.seed(seed)
    obs, _ = env.reset(seed=seed, config=env_config)
    carry, state = env.carry, {} if policy is None else policy.initial_state(env.num_envs)
    assert carry is not None
    starts = torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
    slots: list[dict[str, Tensor]] = []
    of_teams: list[Tensor] = []
    kept = 0
    while kept < transitions:
        if policy is None:
            actions = _drawn(obs, env)
        else:
            if policy.state_reset_every and len(slots) % policy.state_reset_every == 0:
                state = {**state, **policy.forgotten(env.num_envs)}
            noise = None if deterministic else policy.noise(1, env.num_envs, generator)[0]
            act = policy.act(obs, state, starts, noise)
            state = act.state
            actions = policy.env_actions(act.actions)
            if epsilon:
                device = first_tensor(actions).device
                random = torch.rand(env.num_envs, generator=generator, device=device) < epsilon
                actions = where_rows(random, _drawn(obs, env), actions)
        carry, step = advanced(env, carry, actions, env.noise(1)[0])
        ends = step.terminated | step.truncated
        valid = torch.ones_like(ends) if step.valid is None else step.valid
        slots.append(
            {
                **flatten_tree(keys.OBS, obs),
                **flatten_tree(keys.ACTIONS, actions),
                keys.REWARDS: step.rewards,
                keys.TERMINATED: step.terminated,
                keys.TRUNCATED: step.truncated,
                **flatten_tree(keys.NEXT_OBS, step.final_obs),
                keys.VALID: valid,
                keys.EPISODE_RETURNS: step.episode_returns,
                _ENDED: ends,
            }
        )
        if env.team is not None:
            left_out = valid & (kept + valid.cumsum(0) > transitions)
            whole = env.team.of_agents(step.is_over & ~left_out).all(0)
            of_teams.append(env.team.returns(step.episode_returns)[whole].cpu())
        obs, starts, kept = step.obs, ends, kept + int(valid.sum())
    rows = _in_order({name: torch.stack([slot[name] for slot in slots]).cpu() for name in slots[0]}, transitions)
    returns = rows.pop(keys.EPISODE_RETURNS)[rows.pop(_ENDED)]
    returns = returns if env.team is None else torch.cat(of_teams)
    spaces: Any = {"observation_space": env.single_observation_space, "action_space": env.single_action_space}
    return Recording(Dataset(rows, **spaces), returns)


def _drawn(obs: Any, env: Env) -> Any:
    """Draw actions `[num_envs, *action]` from the action space, of those that a mask allows."""
    drawn = tree_of(env.action_space.sample(), lambda part: torch.as_tensor(part, device=env.device))
    if isinstance(obs, Mapping) and keys.ACTION_MASK in obs:
        drawn = only_legal(drawn, obs[keys.ACTION_MASK], env.single_action_space)
    return drawn


def _in_order(slots: dict[str, Tensor], transitions: int) -> dict[str, Tensor]:
    """Return slots `[steps, num_envs, ...]` as rows, one copy's after the other's; what is left over is left out.

    Each copy has as many, as far as that goes: a copy that is cut short has its last steps left out.
    """
    valid = slots.pop(keys.VALID)
    order = valid.cumsum(1) + torch.cat([valid.new_zeros(1, dtype=torch.int64), valid.sum(1).cumsum(0)[:-1]])[:, None]
    kept = (valid & (order <= transitions)).T  # the first ones by time, [num_envs, steps]
    rows = {name: tensor.transpose(0, 1)[kept] for name, tensor in slots.items()}
    lengths = kept.sum(1)
    last = (lengths.cumsum(0) - 1)[lengths > 0]
    rows[keys.TRUNCATED][last] |= ~rows[keys.TERMINATED][last]
    return rows
