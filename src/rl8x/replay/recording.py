"""Records the transitions of a policy, or of random actions, as a data set in rl8x's layout or Minari's."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import gymnasium
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl8x import keys
from rl8x.envs import Env
from rl8x.envs.base import advanced
from rl8x.plain import checked_number
from rl8x.policy import Policy, check_fits
from rl8x.replay.dataset import Dataset
from rl8x.spaces import element_of, only_legal, tree_of, where_rows
from rl8x.trees import first_tensor, flatten_tree, is_part, unflatten_tree

# Where an episode really ended; the end of the recording sets `truncated` too.
_ENDED: Final = "ended"
_ID: Final = re.compile(r"[-_\w][-_\w/]*[-_\w]+/[-_\w]+-v\d+", re.ASCII)


class Recording(NamedTuple):
    """Transitions, in the order of copies, and the returns of episodes that ended in them, for a team the team's."""

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
    """Reset an environment, step a policy in it, or random actions with None, and keep `transitions` transitions.

    If a copy's recording ends within an episode, the episode is marked as truncated. The share `epsilon` of actions is
    drawn from the action space; the others are samples of the policy or, if `deterministic`, its most likely actions.
    """
    transitions = checked_number(transitions, "transitions", least=1, whole=True)
    seed = checked_number(seed, "seed", least=0, whole=True)
    if policy is not None:
        check_fits(policy, env)
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
                state = {**state, **policy.state_at_reset(env.num_envs)}
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
    """Draw actions `[num_envs, *action]` from the action space, legal ones if there is a mask."""
    drawn = tree_of(env.action_space.sample(), lambda part: torch.as_tensor(part, device=env.device))
    if isinstance(obs, Mapping) and keys.ACTION_MASK in obs:
        drawn = only_legal(drawn, obs[keys.ACTION_MASK], env.single_action_space)
    return drawn


def _in_order(slots: dict[str, Tensor], transitions: int) -> dict[str, Tensor]:
    """Return the first `transitions` rows by time of slots `[steps, num_envs, ...]`, in the order of copies."""
    valid = slots.pop(keys.VALID)
    order = valid.cumsum(1) + torch.cat([valid.new_zeros(1, dtype=torch.int64), valid.sum(1).cumsum(0)[:-1]])[:, None]
    kept = (valid & (order <= transitions)).T  # the first ones by time, [num_envs, steps]
    rows = {name: tensor.transpose(0, 1)[kept] for name, tensor in slots.items()}
    lengths = kept.sum(1)
    last = (lengths.cumsum(0) - 1)[lengths > 0]
    rows[keys.TRUNCATED][last] |= ~rows[keys.TERMINATED][last]
    return rows


# -- Minari's format


def check_new_id(name: str) -> None:
    """Raise `ValueError` if a data set cannot be written under a Minari id."""
    if not _ID.fullmatch(name):
        raise ValueError(
            "an id of Minari's is NAMESPACE/NAME-vNUMBER, of letters, digits, - and _, at least two in NAMESPACE, such "
            f"as cartpole/medium-v0; got {name!r}."
        )
    if (folder := _root() / name).exists():
        raise ValueError(f"Minari has {name!r} already, in {folder}: give another id.")


def write_minari(name: str, dataset: Dataset, *, algorithm_name: str) -> None:
    """Write a data set atomically under a Minari id; images are stored without loss, not as JPEG."""
    check_new_id(name)
    import minari
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage
    from minari.namespace import create_namespace, list_local_namespaces

    spaces = dataset.observation_space, dataset.action_space
    # A hidden folder next to it, which Minari does not list.
    beside = _root() / f".rl8x-{os.getpid()}"
    try:
        (beside / "data").mkdir(parents=True)
        storage = MinariStorage.new(beside / "data", *spaces, data_format="hdf5", jpeg_encoding=False)
        version = {"minari_version": minari.__version__, "dataset_id": name}
        storage.update_metadata({**version, "algorithm_name": algorithm_name})
        storage.update_episodes(EpisodeBuffer(**episode) for episode in _episodes(dataset, *spaces))
        namespace = name.rpartition("/")[0]
        if namespace not in list_local_namespaces():
            create_namespace(namespace)
        beside.rename(_root() / name)
    except NotImplementedError as error:
        raise ValueError(f"Minari cannot store these spaces: {error}.") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _episodes(dataset: Dataset, obs_space: Any, action_space: Any) -> Iterator[dict[str, Any]]:
    """Yield the episodes of a data set as the arguments of Minari's `EpisodeBuffer`."""
    rows = {name: tensor.cpu() for name, tensor in dataset.transitions.items()}
    truncated = rows[keys.TRUNCATED].clone()
    truncated[-1] |= ~rows[keys.TERMINATED][-1]
    ends = ((rows[keys.TERMINATED] | truncated).nonzero().squeeze(1) + 1).tolist()
    for start, stop in zip([0, *ends[:-1]], ends, strict=True):
        part = {key: tensor[start:stop] for key, tensor in rows.items()}
        for key in [key for key in part if is_part(key, keys.OBS)]:
            last = rows[keys.NEXT_OBS + key.removeprefix(keys.OBS)][stop - 1 : stop]
            part[key] = torch.cat([part[key], last])
        yield {
            "observations": element_of(obs_space, unflatten_tree(keys.OBS, part), _array),
            "actions": element_of(action_space, unflatten_tree(keys.ACTIONS, part), _array),
            "rewards": part[keys.REWARDS].numpy(),
            "terminations": part[keys.TERMINATED].numpy(),
            "truncations": truncated[start:stop].numpy(),
        }


def _array(space: gymnasium.Space[Any], part: Tensor) -> NDArray[Any]:
    return part.numpy().astype(space.dtype, copy=False)


def _root() -> Path:
    """Return the folder of Minari's data sets."""
    try:
        import h5py  # noqa: F401
        from minari.storage import get_dataset_path
    except ImportError as error:
        raise ImportError("to write a data set in Minari's format needs Minari: pip install 'minari[hdf5]'.") from error
    return Path(get_dataset_path())
