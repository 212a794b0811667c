from __future__ import annotations

import dataclasses
import errno
import functools
import json
import math
import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from rl8x.algorithms import BCConfig
from rl8x.envs import GymnasiumEnv
from rl8x.replay import dataset_files
from rl8x.replay.dataset import Dataset, normalized_score
from rl8x.tracking import MemoryTracker
from rl8x.trainers import Trainer


def episode_rows(lengths, ends, *, start=0.0):
    """Rows of episodes whose observations count on; ends are "terminated", "truncated" or "open"."""
    obs, next_obs, terminated, truncated = [], [], [], []
    for number, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        for t in range(length):
            obs.append([start + 100.0 * number + t])
            next_obs.append([start + 100.0 * number + t + 1])
            terminated.append(end == "terminated" and t == length - 1)
            truncated.append(end == "truncated" and t == length - 1)
    count = len(obs)
    return {
        "obs": torch.tensor(obs),
        "actions": torch.arange(count),
        "rewards": torch.arange(1.0, count + 1),
        "terminated": torch.tensor(terminated),
        "truncated": torch.tensor(truncated),
        "next_obs": torch.tensor(next_obs),
    }


def without_next(rows):
    return {name: tensor for name, tensor in rows.items() if name != "next_obs"}


def all_rows(dataset, n=1, gamma=0.9):
    dataset.prepare(n, gamma)
    return dataset.gather(torch.arange(dataset.size))


# -- rows


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_returns_are_those_of_a_loop_that_stops_at_ends(data):
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    ends = data.draw(
        st.lists(st.sampled_from(["terminated", "truncated"]), min_size=len(lengths), max_size=len(lengths))
    )
    if data.draw(st.booleans()):
        ends[-1] = "open"
    n, gamma = data.draw(st.integers(1, 4)), 0.9
    rows = episode_rows(lengths, ends)
    found = all_rows(Dataset.from_tensors(rows), n, gamma)
    count = len(rows["rewards"])
    assert {name: len(tensor) for name, tensor in found.items()} == dict.fromkeys(
        ("obs", "actions", "returns", "discounts", "next_obs"), count
    )
    for i in range(count):
        total, discount, j = 0.0, 1.0, i
        while True:
            total += discount * rows["rewards"][j].item()
            discount *= gamma
            if rows["terminated"][j] or rows["truncated"][j] or j == i + n - 1 or j == count - 1:
                break
            j += 1
        discount *= not rows["terminated"][j]
        assert found["returns"][i].item() == pytest.approx(total, rel=1e-5)
        assert found["discounts"][i].item() == pytest.approx(discount, rel=1e-5)
        assert found["next_obs"][i].item() == rows["next_obs"][j].item()
        assert (found["obs"][i].item(), found["actions"][i].item()) == (rows["obs"][i].item(), i)


def test_without_next_obs_rows_are_left_out_of_which_it_is_not_known():
    # Rows 0-2 terminate, 3-5 are truncated, 6 is an episode of one truncated step, 7-8 stay open.
    rows = without_next(episode_rows([3, 3, 1, 2], ["terminated", "truncated", "truncated", "open"]))
    dataset = Dataset.from_tensors(rows)
    found = all_rows(dataset)
    assert found["actions"].tolist() == [0, 1, 2, 3, 4, 7]
    assert found["next_obs"].flatten().tolist() == [1.0, 2.0, 2.0, 101.0, 102.0, 301.0]
    assert found["discounts"].tolist() == pytest.approx([0.9, 0.9, 0.0, 0.9, 0.9, 0.9])
    assert dataset.transitions["truncated"].tolist() == [False, False, False, False, True, True]
    # The returns still have the rewards of what was left out: 1 + 2 + 3, 4 + 5 + 6, 7.
    assert dataset.episode_returns.tolist() == [6.0, 15.0, 7.0]
    two = all_rows(dataset, n=2)
    assert two["returns"].tolist() == pytest.approx([1 + 1.8, 2 + 2.7, 3, 4 + 4.5, 5, 8])


def test_a_saved_data_set_has_the_returns_of_rows_that_were_left_out(tmp_path):
    rows = without_next(episode_rows([3, 3, 1, 2], ["terminated", "truncated", "truncated", "open"]))
    dataset = Dataset.from_tensors(rows)
    dataset.save(tmp_path / "data")
    loaded = Dataset.load(tmp_path / "data")
    assert loaded.episode_returns.equal(dataset.episode_returns)
    assert loaded.normalized_score(0.0, 28.0) == dataset.normalized_score(0.0, 28.0) == pytest.approx(100 / 3)
    assert loaded.digest == dataset.digest
    (tmp_path / "data" / "episodes.json").write_text('{"returns"')
    with pytest.raises(ValueError, match=r"episodes\.json does not say the returns of episodes"):
        Dataset.load(tmp_path / "data")


def test_where_no_row_is_known_to_lead_anywhere_it_is_refused():
    with pytest.raises(ValueError, match="no row has `next_obs`"):
        Dataset.from_tensors(without_next(episode_rows([1, 1], ["truncated", "open"])))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_next_actions_are_those_recorded_on_the_next_observation(data):
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    ends = data.draw(
        st.lists(st.sampled_from(["terminated", "truncated"]), min_size=len(lengths), max_size=len(lengths))
    )
    if data.draw(st.booleans()):
        ends[-1] = "open"
    n = data.draw(st.integers(1, 4))
    rows = episode_rows(lengths, ends)
    # By observation: the action on it and the reward after it. Of no truncated step's `next_obs` is there one.
    action_on = dict(zip(rows["obs"].flatten().tolist(), rows["actions"].tolist(), strict=True))
    reward_on = dict(zip(rows["obs"].flatten().tolist(), rows["rewards"].tolist(), strict=True))
    has_one = [
        rows["terminated"][i].item() or rows["next_obs"][i].item() in action_on for i in range(len(rows["rewards"]))
    ]
    dataset = Dataset.from_tensors(rows)
    if not any(has_one):
        with pytest.raises(ValueError, match="no row has `next_actions`"):
            dataset.prepare(n, 0.9, next_actions=True)
        return
    replay = dataset.prepared(n, 0.9, torch.device("cpu"), next_actions=True)
    found = replay.gather(torch.arange(replay.size))
    assert found["actions"].tolist() == [i for i, kept in enumerate(has_one) if kept]
    for i in range(replay.size):
        start, stop, discount = found["obs"][i].item(), found["next_obs"][i].item(), found["discounts"][i].item()
        assert 1 <= stop - start <= n
        if discount:  # what follows is valued: it is the action on `next_obs`
            assert found["next_actions"][i].item() == action_on[stop]
            assert discount == pytest.approx(0.9 ** (stop - start))
        else:
            assert action_on[stop - 1] == found["next_actions"][i].item()
        rewards = [reward_on[start + j] for j in range(int(stop - start))]
        assert found["returns"][i].item() == pytest.approx(sum(0.9**j * r for j, r in enumerate(rewards)), rel=1e-5)
        # Shorter than n only where nothing else is recorded.
        if stop - start < n:
            assert not discount or action_on[stop] not in found["actions"].tolist()
    assert dataset.size == len(has_one)
    assert "next_actions" not in all_rows(dataset, n)


def test_gaps_are_refused_by_row_or_truncated():
    rows = episode_rows([3, 2], ["open", "terminated"])
    with pytest.raises(ValueError, match=r"row 2 ends no episode.*not the `obs` of row 3 \(there are 1 such rows\)"):
        Dataset.from_tensors(rows)
    dataset = Dataset.from_tensors(rows, gaps="truncate")
    found = all_rows(dataset, n=3)
    assert found["next_obs"].flatten().tolist() == [3.0, 3.0, 3.0, 102.0, 102.0]
    assert dataset.episode_returns.tolist() == [1.0 + 2.0 + 3.0, 4.0 + 5.0]
    order = torch.tensor([4, 1, 3, 0, 2])
    shuffled = all_rows(Dataset.from_tensors({name: part[order] for name, part in rows.items()}, gaps="truncate"))
    assert shuffled["returns"].tolist() == rows["rewards"][order].tolist()
    assert shuffled["next_obs"].tolist() == rows["next_obs"][order].tolist()
    with pytest.raises(ValueError, match="`gaps` must be"):
        Dataset.from_tensors(rows, gaps="ignore")


def test_it_is_sampled_as_a_replay_is():
    dataset = Dataset.from_tensors(episode_rows([50], ["terminated"]))
    with pytest.raises(RuntimeError, match="prepare"):
        dataset.gather(torch.zeros(1, dtype=torch.int64))
    dataset.prepare(1, 0.9)
    index = dataset.sample(200, 64, torch.Generator().manual_seed(0))
    assert (index.shape, index.dtype) == ((200, 64), torch.int64)
    counts = torch.bincount(index.flatten(), minlength=50).double()
    chi_square = ((counts - 256).square() / 256).sum().item()
    assert chi_square < 49 + 5 * math.sqrt(2 * 49)  # mean 49, variance 98
    batch = dataset.gather(index)
    assert batch["obs"].shape == (200, 64, 1)
    assert torch.equal(batch["actions"], index)
    assert torch.equal(batch["returns"], index + 1.0)


def test_trees_flags_as_numbers_and_columns_are_understood():
    rows = episode_rows([3], ["terminated"])
    image = torch.randint(255, (4, 2, 5, 5), dtype=torch.uint8)
    tree = {"x": rows["obs"].double(), "image": image[:3]}
    following = {"x": rows["next_obs"].double(), "image": image[1:]}
    numbers = {name: rows[name].float().unsqueeze(1) for name in ("rewards", "terminated", "truncated")}
    dataset = Dataset.from_tensors({**rows, **numbers, "obs": tree, "next_obs": following})
    found = all_rows(dataset)
    assert found["obs/x"].dtype == torch.float32
    assert torch.equal(found["next_obs/image"], image[1:])
    assert found["returns"].shape == (3,)
    assert dataset.as_tensordict()["obs", "image"].shape == (3, 2, 5, 5)
    assert list(dataset.obs_moments) == ["obs/x"]


@pytest.mark.parametrize("next_actions", [False, True])
def test_the_memory_of_its_rows_is_known_before(next_actions):
    rows = episode_rows([3, 4], ["terminated", "terminated"])
    rows |= {"obs": {"x": rows["obs"], "image": torch.zeros(7, 2, 5, 5, dtype=torch.uint8)}}
    rows |= {"next_obs": rows["obs"] | {"x": rows["next_obs"]}, "actions": torch.zeros(7, 3)}
    dataset = Dataset.from_tensors(rows)
    dataset.prepare(2, 0.9, next_actions=next_actions)
    found = dataset.gather(torch.arange(7))
    assert dataset.prepared_bytes(next_actions=next_actions) == sum(part.nbytes for part in found.values())


# -- statistics


def test_statistics_by_hand():
    dataset = Dataset.from_tensors(episode_rows([2, 2, 1], ["terminated", "truncated", "open"]))
    assert dataset.episode_returns.tolist() == [3.0, 7.0]
    # 0, 1, 100, 101, 200
    assert dataset.obs_moments["obs"].mean.item() == pytest.approx(80.4)
    assert dataset.normalized_score(random=1.0, expert=9.0) == pytest.approx(50.0)
    assert normalized_score(-200.0, random=-1200.0, expert=-200.0) == 100.0
    with pytest.raises(ValueError, match="must differ"):
        normalized_score(1.0, 2.0, 2.0)


# -- what is wrong


def broken(**changes):
    rows = episode_rows([3, 4], ["terminated", "truncated"])
    return {name: value for name, value in (rows | changes).items() if value is not None}


NAN = episode_rows([3, 4], ["terminated", "truncated"])["rewards"].clone()
NAN[5] = math.nan
BAD_NEXT = episode_rows([3, 4], ["terminated", "truncated"])["next_obs"].clone()
BAD_NEXT[4] = math.inf


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (broken(actions=None), "has no actions"),
        (broken(infos=torch.zeros(7)), "has infos, which is not known"),
        (broken(actions=torch.zeros(6)), r"equally many rows.*'actions': 6"),
        ({name: part[:0] for name, part in broken().items()}, "at least 1"),
        (broken(rewards=torch.zeros(7, 2)), r"`rewards` must be one number a row; got the shape \[7, 2\]"),
        (broken(terminated=torch.full((7,), 2)), "`terminated` must be true or false, or 0 or 1; got 2 in row 0"),
        (broken(truncated=torch.full((7,), math.nan)), "`truncated` must be true or false.*got nan in row 0"),
        (broken(rewards=NAN), "`rewards` is not finite in row 5 of 7"),
        (broken(next_obs=BAD_NEXT), "`next_obs` is not finite in row 4 of 7"),
        (broken(obs=torch.full((7, 1), 1e300, dtype=torch.float64)), "`obs` is not finite in row 0"),
        (broken(next_obs=torch.zeros(7, 2)), r"must be alike; got torch.float32 \[1\] and torch.float32 \[2\]"),
        (broken(next_obs=None) | {"next_obs/x": torch.zeros(7, 1)}, "has no `next_obs` to go with it"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(rows, says):
    with pytest.raises(ValueError, match=says) as caught:
        Dataset.from_tensors(rows)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_follows_a_termination_may_be_anything(wrong):
    next_obs = broken()["next_obs"].clone()
    next_obs[2] = wrong  # where the first episode terminated
    found = Dataset.from_tensors(broken(next_obs=next_obs)).transitions
    assert found["next_obs"].flatten().tolist() == [1.0, 2.0, 0.0, 101.0, 102.0, 103.0, 104.0]
    next_obs[6] = wrong  # where the second was truncated
    with pytest.raises(ValueError, match="`next_obs` is not finite in row 6 of 7"):
        Dataset.from_tensors(broken(next_obs=next_obs))


SEEN = spaces.Dict({"x": spaces.Box(-1e3, 1e3, (1,)), "action_mask": spaces.MultiBinary(3)})


def masked_rows(mask, actions):
    rows, flags = episode_rows([3, 4], ["terminated", "truncated"]), torch.as_tensor(mask)
    seen = {name: {"x": rows[name], "action_mask": flags} for name in ("obs", "next_obs")}
    return rows | seen | {"actions": torch.tensor(actions)}


def test_an_action_that_its_mask_forbids_is_refused_by_row():
    """It has no value: the loss of Q-learning was infinite, and that of cloning 1e36, without a word of why."""
    spaces_of = {"observation_space": SEEN, "action_space": spaces.Discrete(3), "gaps": "truncate"}
    only_two = [[1, 1, 0]] * 6 + [[0, 0, 0]]  # where nothing is allowed, everything is
    Dataset.from_tensors(masked_rows(only_two, [0, 1, 0, 1, 0, 1, 2]), **spaces_of)
    with pytest.raises(ValueError, match=r"`actions` is 2 in row 3, .*`action_mask`.* illegal \(there are 2 such rows"):
        Dataset.from_tensors(masked_rows(only_two, [0, 1, 0, 2, 0, 2, 2]), **spaces_of)
    # Of two choices, each with flags of its own.
    spaces_of["action_space"] = spaces.MultiDiscrete([1, 2])
    with pytest.raises(ValueError, match=r"`actions` is \[0, 1\] in row 0"):
        Dataset.from_tensors(masked_rows(only_two, [[0, 1]] * 7), **spaces_of)


@pytest.mark.parametrize("actions", [spaces.Discrete(3), spaces.MultiBinary(3), spaces.MultiDiscrete([1, 2])])
def test_the_row_that_stands_in_for_a_data_set_is_legal(actions):
    for seed in range(20):
        SEEN.seed(seed), actions.seed(seed)
        assert Dataset.stand_in(SEEN, actions).size == 1


# -- files


def test_a_saved_data_set_is_loaded_as_it_was(tmp_path):
    rows = episode_rows([3, 4], ["terminated", "truncated"])
    image = torch.randint(255, (7, 5, 5), dtype=torch.uint8)
    rows |= {"obs": {"x.y": rows["obs"], "image": image}, "next_obs": {"x.y": rows["next_obs"], "image": image}}
    dataset = Dataset.from_tensors(rows, gaps="truncate")
    dataset.save(tmp_path / "data")
    loaded = Dataset.load(tmp_path / "data", gaps="truncate")
    assert list(loaded.transitions) != []
    assert loaded.transitions.keys() == dataset.transitions.keys()
    assert all(torch.equal(loaded.transitions[name], part) for name, part in dataset.transitions.items())
    assert TensorDict.load_memmap(tmp_path / "data")["obs", "image"].shape == (7, 5, 5)
    with pytest.raises(FileExistsError, match="is there already"):
        dataset.save(tmp_path / "data")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    (tmp_path / "data" / "actions.memmap").write_bytes(b"1234")
    with pytest.raises(ValueError, match=r"actions\.memmap must have 56 bytes"):
        Dataset.load(tmp_path / "data")


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system cannot be asked for a file's space")
def test_a_disk_without_room_is_a_line_and_no_death_by_a_signal(tmp_path, monkeypatch):
    """Its files are mapped: what a full disk does not take would end the process."""
    asked = []

    def refuse(file, offset, size):
        asked.append(size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    dataset = Dataset.from_tensors(episode_rows([3, 4], ["terminated", "truncated"]))
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ValueError, match=f"data set of 0.000 GB cannot be written to {tmp_path}/new: No space left"):
        dataset.save(tmp_path / "new" / "data")
    assert list((tmp_path / "new").iterdir()) == []
    monkeypatch.undo()
    dataset.save(tmp_path / "data")
    assert asked[0] >= sum(-(-file.stat().st_size // 4096) * 4096 for file in (tmp_path / "data").iterdir())


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no data set in"):
        Dataset.load(tmp_path)
    with pytest.raises(ValueError, match="no data set in"):
        Dataset.load("nothing")
    (tmp_path / "meta.json").write_text('{"obs": {"shape": [2], "dtype": "torch.load"}}')
    with pytest.raises(ValueError, match=r"`obs` has the unknown dtype 'torch\.load'"):
        Dataset.load(tmp_path)


@pytest.mark.parametrize("meta", ["{", "[]", '{"obs": {"dtype": "torch.float32"}}', '{"obs": {}}', "\xff"])
def test_a_damaged_folder_is_one_line(meta, tmp_path):
    (tmp_path / "meta.json").write_bytes(meta.encode("latin-1"))
    with pytest.raises(ValueError, match=f"{tmp_path} is not a memory-mapped TensorDict, or damaged"):
        Dataset.load(tmp_path)


@pytest.mark.parametrize("name", [".", ""])
def test_a_folder_that_names_itself_is_not_read_for_ever(name, tmp_path):
    (tmp_path / "meta.json").write_text(json.dumps({name: {}}))
    with pytest.raises(ValueError, match="this one has no obs"):
        Dataset.load(tmp_path)


@pytest.mark.parametrize("content", ["text", "groups"])
def test_a_damaged_hdf5_file_is_one_line(content, tmp_path):
    h5py = pytest.importorskip("h5py", reason="h5py is not installed, which reads D4RL's files")
    path = tmp_path / "data.hdf5"
    if content == "text":
        path.write_text("no data")
    else:
        with h5py.File(path, "w") as file:
            file["observations/x"] = np.zeros(3)
    with pytest.raises(ValueError, match=f"{path} is not a file in the layout of D4RL, or damaged"):
        Dataset.load(path)


def write_hdf5(path, arrays):
    h5py = pytest.importorskip("h5py", reason="h5py is not installed, which reads D4RL's files")
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array
        file["infos/qpos"] = np.zeros((7, 3))


D4RL = {"observations": "obs", "actions": "actions", "rewards": "rewards", "terminals": "terminated"}


@pytest.mark.parametrize("has_next", [False, True])
def test_a_file_in_the_layout_of_d4rl(tmp_path, has_next):
    rows = episode_rows([3, 4], ["terminated", "truncated"])
    names = D4RL | {"timeouts": "truncated"} | ({"next_observations": "next_obs"} if has_next else {})
    write_hdf5(tmp_path / "data.hdf5", {name: rows[ours].numpy() for name, ours in names.items()})
    dataset = Dataset.load(tmp_path / "data.hdf5")
    expected = Dataset.from_tensors(rows if has_next else without_next(rows))
    assert dataset.size == (7 if has_next else 6)
    assert all(torch.equal(dataset.transitions[name], part) for name, part in expected.transitions.items())
    write_hdf5(tmp_path / "bad.h5", {"observations": rows["obs"].numpy()})
    with pytest.raises(ValueError, match="has no actions, rewards, terminals"):
        Dataset.load(tmp_path / "bad.h5")


def test_what_is_not_installed_is_named(tmp_path, monkeypatch):
    for name in ("h5py", "minari"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    (tmp_path / "data.hdf5").write_bytes(b"")
    with pytest.raises(ImportError, match="pip install h5py"):
        Dataset.load(tmp_path / "data.hdf5")
    with pytest.raises(ImportError, match=r"'D4RL/pen/human-v2' is not a file here.*pip install 'minari\[hdf5\]'"):
        Dataset.load("D4RL/pen/human-v2")


@dataclasses.dataclass
class Episode:
    """What Minari's `EpisodeData` has."""

    id: int
    observations: Any
    actions: Any
    rewards: np.ndarray
    terminations: np.ndarray
    truncations: np.ndarray


class Recorded:
    def __init__(self, episodes):
        self.episodes = episodes

    def iterate_episodes(self):
        return iter(self.episodes)


def episode(number, steps, end, **changes):
    flags = [t == steps - 1 for t in range(steps)]
    values: dict[str, Any] = {
        "observations": {"x": np.arange(steps + 1.0)[:, None] + 10 * number},
        "actions": (np.arange(steps), np.zeros((steps, 2), np.float32)),
        "rewards": np.ones(steps),
        "terminations": np.array(flags) & (end == "terminated"),
        "truncations": np.array(flags) & (end == "truncated"),
    }
    return Episode(number, **(values | changes))


def test_minaris_episodes_keep_their_true_final_observations():
    episodes = [episode(0, 3, "terminated"), episode(1, 2, "truncated"), episode(2, 1, "open")]
    dataset = Dataset.from_minari(Recorded(episodes))
    found = all_rows(dataset)
    assert found["obs/x"].flatten().tolist() == [0.0, 1.0, 2.0, 10.0, 11.0, 20.0]
    assert found["next_obs/x"].flatten().tolist() == [1.0, 2.0, 3.0, 11.0, 12.0, 21.0]
    assert found["actions/0"].tolist() == [0, 1, 2, 0, 1, 0]
    assert found["actions/1"].shape == (6, 2)
    assert found["discounts"].tolist() == pytest.approx([0.9, 0.9, 0.0, 0.9, 0.9, 0.9])
    assert dataset.episode_returns.tolist() == [3.0, 2.0, 1.0]
    with pytest.raises(ValueError, match="episode 7 has 3 rewards"):
        Dataset.from_minari(Recorded([episode(7, 3, "open", actions=np.zeros(2))]))
    with pytest.raises(ValueError, match="no episodes"):
        Dataset.from_minari(Recorded([]))


class FromThree(gymnasium.Env):
    """Two steps an episode; the reward is the action, which is 3 or 4."""

    observation_space = spaces.Box(0.0, 9.0, (1,), np.float32)
    action_space = spaces.Discrete(2, start=3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert action in (3, 4)
        self.time += 1
        return np.full(1, self.time, np.float32), float(action), self.time == 2, False, {}


def test_minaris_actions_count_from_0_and_are_evaluated_in_the_simulator_they_came_from():
    observations = np.arange(3, dtype=np.float32)[:, None]
    source = Recorded([episode(i, 2, "terminated", observations=observations, actions=np.full(2, 4)) for i in range(8)])
    source.observation_space, source.action_space = FromThree.observation_space, FromThree.action_space
    dataset = Dataset.from_minari(source)
    assert dataset.action_space == spaces.Discrete(2)
    assert dataset.transitions["actions"].tolist() == [1] * 16
    kept = Dataset.from_minari(source, action_space=source.action_space)
    assert kept.transitions["actions"].tolist() == [4] * 16  # as recorded, where the space is given
    config = BCConfig(dataset=dataset, device="cpu", seed=0, batch_size=16, lr=1e-2, updates_per_step=50)
    make = functools.partial(GymnasiumEnv, FromThree)
    trainer = Trainer(config.build(), eval_env=make, num_eval_envs=2, tracker=MemoryTracker())
    trainer.step()
    assert trainer.eval()["eval/returns/mean"] == 8.0  # action 1 of the policy is 4 of the simulator, twice


def test_only_what_there_is_to_count_is_counted_from_0():
    space = spaces.Dict(
        {"one": spaces.Discrete(3, start=-1), "two": spaces.MultiDiscrete([2, 3], start=[5, 0]), "x": spaces.Box(-1, 1)}
    )
    actions = {"one": np.array([-1, 1]), "two": np.array([[5, 2], [6, 0]], np.uint8), "x": np.ones((2, 1), np.float32)}
    source = Recorded([episode(0, 2, "terminated", actions=actions)])
    source.observation_space, source.action_space = spaces.Dict({"x": spaces.Box(-99.0, 99.0, (1,))}), space
    dataset = Dataset.from_minari(source)
    assert dataset.transitions["actions/one"].tolist() == [0, 2]
    assert dataset.transitions["actions/two"].tolist() == [[0, 2], [1, 0]]
    assert dataset.transitions["actions/x"].tolist() == [[1.0], [1.0]]
    assert dataset.action_space["two"] == spaces.MultiDiscrete([2, 3])
    source.episodes[0].actions["one"][0] = -2
    with pytest.raises(ValueError, match="`actions/one` must be from 0 to 2"):
        Dataset.from_minari(source)


@pytest.mark.parametrize("n", [1, 3])
def test_rows_stay_on_the_device_of_the_transitions(n):
    rows = without_next(episode_rows([3, 4], ["terminated", "truncated"]))
    expected = Dataset(rows).prepared(n, 0.9, torch.device("cpu"))
    with torch.device("meta"):  # what names no device of its own is made there, and mixes with nothing
        dataset = Dataset(rows).prepared(n, 0.9, torch.device("cpu"))
    found, wanted = (each.gather(torch.arange(each.size)) for each in (dataset, expected))
    assert all(torch.equal(part, wanted[name]) for name, part in found.items())


def test_minaris_own_data_sets_are_read_by_id(tmp_path, monkeypatch):
    minari = pytest.importorskip("minari", reason="Minari is not installed, whose data sets are read")
    pytest.importorskip("h5py", reason="h5py is not installed, which Minari writes with")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env, buffers = gymnasium.make("CartPole-v1", max_episode_steps=12), []
    for seed in range(3):
        steps: dict[str, list[Any]] = {name: [] for name in ("rewards", "terminations", "truncations")}
        observations, ended = [env.reset(seed=seed)[0]], False
        while not ended:
            obs, reward, terminated, truncated, _ = env.step(seed % 2)
            observations.append(obs)
            for name, value in zip(steps, (float(reward), terminated, truncated), strict=True):
                steps[name].append(value)
            ended = terminated or truncated
        actions = np.full(len(observations) - 1, seed % 2)
        buffers.append(
            minari.data_collector.EpisodeBuffer(id=seed, observations=np.stack(observations), actions=actions, **steps)
        )
    made = minari.create_dataset_from_buffers("test/cartpole-v0", buffers, env=env)
    dataset = Dataset.load("test/cartpole-v0")
    assert dataset.size == made.total_steps
    assert dataset.episode_returns.tolist() == [float(each.rewards.sum()) for each in made.iterate_episodes()]
    with pytest.raises(ValueError, match="Minari has no data set 'test/other-v0'"):
        Dataset.load("test/other-v0")


def test_nothing_of_a_folder_is_unpickled():
    source = Path(dataset_files.__file__).read_text()
    assert "pickle" not in source
    assert "torch.load(" not in source
