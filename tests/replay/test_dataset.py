from __future__ import annotations

import contextlib
import functools
import json
import math
import random
import re
import resource
import signal
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tests.probes import Steps

from rl8x import BCConfig, MemoryTracker, Trainer
from rl8x.cli.errors import is_users_mistake
from rl8x.envs import GymnasiumEnv
from rl8x.replay.dataset import Dataset, normalized_score
from rl8x.spaces import space_from_plain, space_to_plain


def episode_rows(lengths, ends, *, has_next=True):
    """Rows of episodes whose observations count on; ends are "terminated", "truncated" or "open"."""
    episodes = enumerate(zip(lengths, ends, strict=True))
    steps = [(100.0 * i + t, end, t == length - 1) for i, (length, end) in episodes for t in range(length)]
    obs = torch.tensor([[at] for at, *_ in steps])
    kinds = ("terminated", "truncated")
    flags = {kind: torch.tensor([last and end == kind for _, end, last in steps]) for kind in kinds}
    rows = {"obs": obs, "actions": torch.arange(len(steps)), "rewards": torch.arange(1.0, len(steps) + 1), **flags}
    return rows | ({"next_obs": obs + 1} if has_next else {})


def broken(**changes):
    """Two episodes with some columns changed, or without those that are None."""
    rows = episode_rows([3, 4], ["terminated", "truncated"])
    return {name: value for name, value in (rows | changes).items() if value is not None}


def all_rows(dataset, n=1, gamma=0.9):
    dataset = dataset.prepared(n, gamma)
    return dataset.gather(torch.arange(dataset.size))


# -- rows


def rows_by_hand(lengths, ends, n, *, has_next, next_actions):
    """What is prepared of episodes, step by step: observation, action, next one, return, discount and next action."""
    rows, first = [], 0
    for i, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        # What followed the last step may not be known, and then what was done after the one before it.
        unknown = 0 if end == "terminated" else (not has_next) + next_actions
        for t in range(length - unknown):
            steps = range(t, min(t + n, length - unknown))
            last, over = steps[-1], end == "terminated" and steps[-1] == length - 1
            after = 100.0 * i + last + (has_next or not over)
            total = sum(0.9**j * (first + step + 1) for j, step in enumerate(steps))
            discount = 0.0 if over else 0.9 ** len(steps)
            rows.append((100.0 * i + t, first + t, after, total, discount, first + last + (not over)))
        first += length
    return rows


@pytest.mark.parametrize("seed", range(80))
def test_prepared_rows_are_those_of_a_loop_over_episodes(seed, tmp_path):
    draw = random.Random(seed)
    has_next, n, next_actions = draw.random() < 0.6, draw.randrange(1, 5), draw.random() < 0.4
    lengths = [draw.randrange(1, 6) for _ in range(draw.randrange(1, 6))]
    # An open episode before another is a gap, which only `next_obs` tells.
    ends = draw.choices(["terminated", "truncated", "open"][: 2 + has_next], k=len(lengths) - 1)
    ends.append(draw.choice(["terminated", "truncated", "open"]))
    lasts = [length - (not has_next and end != "terminated") for length, end in zip(lengths, ends, strict=True)]
    if not any(lasts):
        return  # no `next_obs` is known
    dataset = Dataset.from_tensors(episode_rows(lengths, ends, has_next=has_next), gaps="truncate")
    goes_on = ends[-1] == "open"
    sums = [part.sum().item() for part in torch.arange(1.0, sum(lengths) + 1).split(lengths)]
    assert dataset.episode_returns.tolist() == sums[: len(sums) - goes_on]
    cuts = [end != "terminated" for end in ends[:-1]] + [ends[-1] == "truncated" or (goes_on and not has_next)]
    flags = [cut and t == last - 1 for cut, last in zip(cuts, lasts, strict=True) for t in range(last)]
    if draw.random() < 0.3:
        dataset.save(tmp_path / "data")
        loaded = Dataset.load(tmp_path / "data")
        assert (loaded.digest, loaded.episode_returns.tolist()) == (dataset.digest, dataset.episode_returns.tolist())
    expected = rows_by_hand(lengths, ends, n, has_next=has_next, next_actions=next_actions)
    if not expected:
        with pytest.raises(ValueError, match="no row has `next_actions`"):
            dataset.prepared(n, 0.9, next_actions=True)
        return
    replay = dataset.prepared(n, 0.9, torch.device("cpu"), next_actions=next_actions)
    found = replay.gather(torch.arange(replay.size))
    names = ("obs", "actions", "next_obs", "returns", "discounts", "next_actions")[: 5 + next_actions]
    assert found.keys() == {*names}
    for name, column in zip(names, zip(*expected, strict=True), strict=False):
        assert found[name].flatten().tolist() == pytest.approx(column, rel=1e-5), name
    assert dataset.transitions["truncated"].tolist() == flags


def test_gaps_are_refused_by_row_or_truncated():
    rows = episode_rows([3, 2], ["open", "terminated"])
    with pytest.raises(ValueError, match=r"row 2 ends no episode.*not the `obs` of row 3 \(there are 1 such rows\)"):
        Dataset.from_tensors(rows)
    order = torch.tensor([4, 1, 3, 0, 2])
    shuffled = all_rows(Dataset.from_tensors({name: part[order] for name, part in rows.items()}, gaps="truncate"))
    assert shuffled["returns"].tolist() == rows["rewards"][order].tolist()
    assert shuffled["next_obs"].tolist() == rows["next_obs"][order].tolist()


def test_trees_flags_as_numbers_and_columns_are_understood():
    rows = episode_rows([3], ["terminated"])
    image = torch.randint(255, (4, 2, 5, 5), dtype=torch.uint8)
    tree = {"x": rows["obs"].double(), "image": image[:3]}
    following = {"x": rows["next_obs"].double(), "image": image[1:]}
    numbers = {name: rows[name].float().unsqueeze(1) for name in ("rewards", "terminated", "truncated")}
    dataset = Dataset.from_tensors({**rows, **numbers, "obs": tree, "next_obs": following})
    found = all_rows(dataset)
    assert dataset.prepared_bytes() == sum(part.nbytes for part in found.values())
    with_actions = dataset.prepared(2, 0.9, next_actions=True).gather(torch.arange(3))
    assert dataset.prepared_bytes(next_actions=True) == sum(part.nbytes for part in with_actions.values())
    assert found["obs/x"].dtype == torch.float32
    assert torch.equal(found["next_obs/image"], image[1:])
    assert found["returns"].shape == (3,)
    assert dataset.as_tensordict()["obs", "image"].shape == (3, 2, 5, 5)
    assert list(dataset.obs_moments) == ["obs/x"]


# -- statistics


def test_statistics_by_hand():
    dataset = Dataset.from_tensors(episode_rows([2, 2, 1], ["terminated", "truncated", "open"]))
    # 0, 1, 100, 101, 200
    assert dataset.obs_moments["obs"].mean.item() == pytest.approx(80.4)
    assert dataset.normalized_score(random=1.0, expert=9.0) == pytest.approx(50.0)
    assert normalized_score(-200.0, random=-1200.0, expert=-200.0) == 100.0
    with pytest.raises(ValueError, match="must differ"):
        normalized_score(1.0, 2.0, 2.0)


# -- what is wrong


def spoiled(name, row, number):
    rows = broken()
    rows[name][row] = number
    return rows


VECTOR, IMAGE = spaces.Box(-np.inf, np.inf, (1,)), spaces.Box(0, 255, (3, 8, 8), dtype=np.uint8)
SEEN = spaces.Dict({"x": spaces.Box(-1e3, 1e3, (1,)), "action_mask": spaces.MultiBinary(3)})


def masked(actions, space):
    """Two legal actions; in the last row none, where all are: an illegal one would have no value to learn from."""
    rows, flags = broken(actions=torch.tensor(actions)), torch.tensor([[1, 1, 0]] * 6 + [[0, 0, 0]])
    seen = {name: {"x": rows[name], "action_mask": flags} for name in ("obs", "next_obs")}
    return rows | seen, {"observation_space": SEEN, "action_space": space, "gaps": "truncate"}


@pytest.mark.parametrize(
    ("rows", "options", "says"),
    [
        (broken(actions=None), {}, "has no actions"),
        (broken(infos=torch.zeros(7)), {}, "has infos, which is not known"),
        (broken(actions=torch.zeros(6)), {}, r"equally many rows.*'actions': 6"),
        ({name: part[:0] for name, part in broken().items()}, {}, "at least 1"),
        (broken(rewards=torch.zeros(7, 2)), {}, r"`rewards` must be one number a row; got the shape \[7, 2\]"),
        (broken(terminated=torch.full((7,), 2)), {}, "`terminated` must be true or false, or 0 or 1; got 2 in row 0"),
        (spoiled("rewards", 5, math.nan), {}, "`rewards` is not finite in row 5 of 7"),
        (spoiled("next_obs", 4, math.inf), {}, "`next_obs` is not finite in row 4 of 7"),
        (broken(obs=torch.full((7, 1), 1e300, dtype=torch.float64)), {}, "`obs` is not finite in row 0"),
        (broken(next_obs=torch.zeros(7, 2)), {}, r"must be alike; got torch.float32 \[1\] and torch.float32 \[2\]"),
        (broken(next_obs=None) | {"next_obs/x": torch.zeros(7, 1)}, {}, "has no `next_obs` to go with it"),
        (episode_rows([1, 1], ["truncated", "open"], has_next=False), {}, "no row has `next_obs`, .* Record longer"),
        (broken(), {"gaps": "ignore"}, "`gaps` must be"),
        # no elements of their spaces
        (broken(), {"observation_space": spaces.Box(-1, 1, (3,))}, r"`obs` must be elements of Box\(\[3\]"),
        (broken(), {"observation_space": spaces.Dict({"x": VECTOR})}, "needs `obs/x`; there are obs, actions"),
        (broken(), {"action_space": spaces.Discrete(1)}, r"`actions` must be from 0 to 0, .* got 0 to 6"),
        (broken(), {"action_space": VECTOR}, "`actions` must be elements of Box"),
        (broken(actions=torch.tensor([[1, 3]] * 7)), {"action_space": spaces.MultiDiscrete([2, 3])}, "got 3 to 3"),
        (broken(actions=torch.tensor([[5, 0]] * 7)), {"action_space": spaces.MultiBinary(2)}, "got 5 to 5"),
        (*masked([0, 1, 0, 2, 0, 2, 2], spaces.Discrete(3)), "`actions` is 2 in row 3, .* are 2 such rows"),
        (*masked([[0, 1]] * 7, spaces.MultiDiscrete([1, 2])), r"`actions` is \[0, 1\] in row 0, .*`action_mask`"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(rows, options, says):
    with pytest.raises(ValueError, match=says) as caught:
        Dataset.from_tensors(rows, **options)
    assert "\n" not in str(caught.value)


def test_where_a_mask_allows_nothing_everything_is_legal():
    rows, options = masked([0, 1, 0, 1, 0, 1, 2], spaces.Discrete(3))
    assert Dataset.from_tensors(rows, **options).size == 7


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_follows_a_termination_may_be_anything(wrong):
    next_obs = broken()["next_obs"].clone()
    next_obs[2] = wrong  # where the first episode terminated
    found = Dataset.from_tensors(broken(next_obs=next_obs)).transitions
    assert found["next_obs"].flatten().tolist() == [1.0, 2.0, 0.0, 101.0, 102.0, 103.0, 104.0]
    next_obs[6] = wrong  # where the second was truncated
    with pytest.raises(ValueError, match="`next_obs` is not finite in row 6 of 7"):
        Dataset.from_tensors(broken(next_obs=next_obs))


BOX = spaces.Box(np.array([-1, 0], np.float32), np.array([1, 5], np.float32))


@pytest.mark.parametrize(
    ("space", "actions", "says"),
    [
        (BOX, [[0, 0], [1, 5], [1.5, 9], [0, -3]], "in 2 of 4 rows, first in row 2: 1.5, where -1 to 1"),
        (BOX, [[0, 0], [1, 5], [0.5, 9], [0, 3]], "`actions` is .* in 1 of 4 rows, first in row 2: 9, where 0 to 5"),
        (BOX, [[0, 0], [1, 5.000001], [-1.000001, 0], [1, 5]], None),
        (spaces.Box(0, np.inf, (), np.float32), [3e9, 0, 1, 2], None),
        (spaces.Box(0, np.inf, (), np.float64), [3e9, 0, 1, -2], "in 1 of 4 rows, first in row 3: -2, where 0 to inf"),
        (spaces.Dict({"a": BOX, "b": spaces.Box(0, 1, (2, 0))}), [[2, 2]] * 4, "`actions/a` is .* in 4 of 4 rows"),
    ],
)
def test_actions_out_of_their_bounds_are_told_by_row(space, actions, says):
    rows, taken = episode_rows([4], ["terminated"]), torch.tensor(actions, dtype=torch.float32)
    rows["actions"] = {"a": taken, "b": torch.zeros(4, 2, 0)} if isinstance(space, spaces.Dict) else taken
    with contextlib.nullcontext() if says is None else pytest.warns(RuntimeWarning, match=says):
        found = Dataset.from_tensors(rows, action_space=space)
    assert torch.equal(found.transitions["actions/a" if isinstance(space, spaces.Dict) else "actions"], taken)


@pytest.mark.parametrize("actions", [spaces.Discrete(3), spaces.MultiBinary(3), spaces.MultiDiscrete([1, 2])])
def test_the_row_that_stands_in_for_a_data_set_is_legal(actions):
    for seed in range(20):
        SEEN.seed(seed), actions.seed(seed)
        assert Dataset.stand_in(SEEN, actions).size == 1


# -- spaces

PARTS = {"b": spaces.Discrete(2), "a": spaces.Tuple([spaces.Discrete(3)])}
SPACES = [VECTOR, IMAGE, spaces.Discrete(5, start=-2), spaces.MultiDiscrete([3, 4], start=[1, -1])]
SPACES += [spaces.MultiBinary([2, 3]), spaces.MultiBinary(2), spaces.Dict(PARTS)]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_spaces_come_back_equal_from_json(space):
    back = space_from_plain(json.loads(json.dumps(space_to_plain(space))))
    assert back == space
    if isinstance(space, spaces.Dict):
        assert list(back.spaces) == list(space.spaces)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32])
def test_whole_numbers_of_any_type_become_those_of_their_spaces_and_parts(dtype):
    space = spaces.Dict(one=spaces.Discrete(3, start=-1), two=spaces.MultiDiscrete([2, 3], start=[0, 1]))
    image, taken = torch.randint(256, (7, 3, 8, 8)), torch.tensor([[0, 1]] * 7).to(dtype)
    given = broken(actions={"one": torch.arange(7) % 3 - 1, "two": taken}, obs=image, next_obs=image)
    declared = {"gaps": "truncate", "observation_space": IMAGE, "action_space": space}
    found = Dataset.from_tensors(given, **declared).transitions
    assert (found["actions/two"].dtype, found["next_obs"].dtype) == (torch.int64, torch.uint8)
    assert torch.equal(found["actions/two"], taken.long())
    assert torch.equal(found["obs"], image.to(torch.uint8))
    with pytest.raises(ValueError, match="`obs` must be from 0 to 255, as Box"):
        Dataset.from_tensors(given | {"obs": image + 300}, **declared)
    given["actions"]["one"][0] = -2
    with pytest.raises(ValueError, match="`actions/one` must be from -1 to 1"):
        Dataset.from_tensors(given, **declared)


# -- files


def test_a_saved_data_set_is_loaded_as_it_was_whatever_its_parts_are_called(tmp_path):
    names = ["x.y", "x:y", "x%3Ay", "x y", "x_y", "", ".", "..", "a?b", "meta.json", "shape.", "ü"]
    rows, image = episode_rows([3, 4], ["terminated", "truncated"]), torch.randint(255, (7, 5, 5), dtype=torch.uint8)
    for obs in ("obs", "next_obs"):
        parts = {name: rows[obs] + 100.0 * i for i, name in enumerate(names)}
        rows[obs] = parts | {"in": {"a b": rows[obs]}, "image": image}
    dataset = Dataset.from_tensors(rows, gaps="truncate")
    dataset.save(tmp_path / "data")
    loaded = Dataset.load(tmp_path / "data", gaps="truncate")
    assert loaded.transitions.keys() == dataset.transitions.keys() != set()
    assert all(torch.equal(loaded.transitions[name], part) for name, part in dataset.transitions.items())
    for path in (tmp_path, "nothing"):
        with pytest.raises(ValueError, match="no data set in"):
            Dataset.load(path)
    with pytest.raises(FileExistsError, match="is there already"):
        dataset.save(tmp_path / "data")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    sums = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path / "data", capture_output=True, check=True)
    assert sums.stdout == b"transitions.safetensors: OK\n"


def test_a_disk_without_room_is_a_line_and_leaves_nothing(tmp_path):
    rows = episode_rows([3, 4], ["terminated", "truncated"]) | {"obs": torch.zeros(7, 9000)}
    dataset = Dataset.from_tensors(rows | {"next_obs": torch.zeros(7, 9000)}, gaps="truncate")
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))  # it ends a write, as a full disk does
        with pytest.raises(ValueError, match=f"data set cannot be written to {tmp_path}/new: .*File too large"):
            dataset.save(tmp_path / "new" / "data")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert list((tmp_path / "new").iterdir()) == []


def damaged(content, draw):
    """A file with one of a few kinds of damage at a random place, and where."""
    at, some = draw.randrange(len(content)), bytearray(content)
    match draw.randrange(4):
        case 0:
            some[at] ^= 1 << draw.randrange(8)
        case 1:
            some[at : at + 16] = draw.randbytes(len(some[at : at + 16]))
        case 2:
            some[at : at + 8] = b"\xff" * len(some[at : at + 8])
        case 3:
            some = some[:at]
    return bytes(some)


def outcome(path, **options):
    """The transitions of a data set, or the line that refuses it."""
    try:
        return Dataset.load(path, **options)
    except ValueError as error:
        refusal, ours = str(error), is_users_mistake(error)
    assert ours, refusal
    assert "\n" not in refusal
    return refusal


def odd_rewards(h5py, other):
    """What may be in the place of rewards, and what is said of it."""
    virtual = h5py.VirtualLayout((7,), "f4")
    virtual[:] = h5py.VirtualSource(str(other), "x", (7,))
    ragged = h5py.vlen_dtype("f4")
    return [
        ("lies in another file", lambda f: f.create_dataset("rewards", (7,), "f4", external=[(str(other), 0, 28)])),
        ("lies in another file", lambda f: f.create_virtual_dataset("rewards", virtual, fillvalue=1.0)),
        ("is a link to something else", lambda f: f.__setitem__("rewards", h5py.ExternalLink(str(other), "/x"))),
        ("is a link to something else", lambda f: f.__setitem__("rewards", h5py.SoftLink("/terminals"))),
        ("is not an array of numbers", lambda f: f.create_group("rewards/x")),
        ("is not an array of numbers", lambda f: f.create_dataset("rewards", data=["a"] * 7)),
        ("is not an array of numbers", lambda f: f.create_dataset("rewards", data=np.zeros(7, complex))),
        ("not all was ever written", lambda f: f.create_dataset("rewards", (7,), dtype=ragged, chunks=(7,))),
        ("not all was ever written", lambda f: f.create_dataset("rewards", (10**11, 3), "f4", chunks=(1000, 3))),
        ("not all was ever written", lambda f: f.create_dataset("rewards", (10**11,), "f4")),
        ("is empty", lambda f: f.__setitem__("rewards", h5py.Empty("f4"))),
        ("numbers that no tensor holds", lambda f: f.__setitem__("rewards", np.full(7, 2**64 - 1))),
        ("equally many rows", lambda f: f.__setitem__("rewards", 1.0)),
    ]


def test_only_numbers_that_an_hdf5_file_holds_are_read(tmp_path):
    h5py = pytest.importorskip("h5py", reason="h5py is not installed, which reads D4RL's files")
    rows = broken()
    (tmp_path / "other").write_bytes(bytes(4096))
    for number, (says, make) in enumerate(odd_rewards(h5py, tmp_path / "other")):
        arrays = {name: rows[ours].numpy() for name, ours in D4RL.items() if ours != "rewards"}
        write_hdf5(tmp_path / f"{number}.h5", arrays, make)
        with pytest.raises(ValueError, match=f"rewards.* {says}|needs {says}"):
            Dataset.load(tmp_path / f"{number}.h5")


@pytest.mark.parametrize("kind", [">f8", "<f2", ">i4", "u2", "u4", "u8", "i1", "?"])
def test_numbers_of_any_type_are_read_as_they_are(kind, tmp_path):
    rows = episode_rows([3, 4], ["terminated", "truncated"])
    arrays = {name: rows[ours].numpy() for name, ours in D4RL.items()} | {"rewards": np.arange(7).astype(kind)}
    write_hdf5(tmp_path / "data.hdf5", arrays | {"timeouts": rows["truncated"].numpy()})
    found = Dataset.load(tmp_path / "data.hdf5").transitions["rewards"].tolist()
    assert found == [1.0 if kind == "?" and i else float(i) for i in range(6)]


def write_hdf5(path, arrays, make_more=lambda file: None, **options):
    h5py = pytest.importorskip("h5py", reason="h5py is not installed, which reads D4RL's files")
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, **options)
        file["infos/qpos"] = np.zeros((7, 3))
        make_more(file)


D4RL = {"observations": "obs", "actions": "actions", "rewards": "rewards", "terminals": "terminated"}
NEXT = {"next_observations": "next_obs"}


@pytest.mark.parametrize("has_next", [False, True])
def test_a_file_in_the_layout_of_d4rl(tmp_path, has_next):
    rows = episode_rows([3, 4], ["terminated", "truncated"])
    names = D4RL | {"timeouts": "truncated"} | (NEXT if has_next else {})
    write_hdf5(tmp_path / "data.hdf5", {name: rows[ours].numpy() for name, ours in names.items()})
    dataset = Dataset.load(tmp_path / "data.hdf5")
    expected = Dataset.from_tensors(rows if has_next else broken(next_obs=None))
    assert dataset.size == (7 if has_next else 6)
    assert all(torch.equal(dataset.transitions[name], part) for name, part in expected.transitions.items())
    write_hdf5(tmp_path / "bad.h5", {"observations": rows["obs"].numpy()})
    with pytest.raises(ValueError, match="has no actions, rewards, terminals"):
        Dataset.load(tmp_path / "bad.h5")
    (tmp_path / "text.h5").write_text("no data")
    with pytest.raises(ValueError, match=f"{tmp_path}/text.h5 is not a file in the layout of D4RL, or damaged"):
        Dataset.load(tmp_path / "text.h5")


def test_what_is_not_installed_is_named(tmp_path, monkeypatch):
    for name in ("h5py", "minari"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    (tmp_path / "data.hdf5").write_bytes(b"")
    with pytest.raises(ImportError, match="pip install h5py"):
        Dataset.load(tmp_path / "data.hdf5")
    with pytest.raises(ImportError, match=r"'D4RL/pen/human-v2' is not a file here.*pip install 'minari\[hdf5\]'"):
        Dataset.load("D4RL/pen/human-v2")


def recorded(episodes, **spaces_of):
    """What a data set of Minari's has."""
    return SimpleNamespace(iterate_episodes=lambda: iter(episodes), **spaces_of)


def episode(number, steps, end, **changes):
    """What Minari's `EpisodeData` has."""
    flags = np.arange(steps) == steps - 1
    values: dict[str, Any] = {
        "observations": {"x": np.arange(steps + 1.0)[:, None] + 10 * number},
        "actions": (np.arange(steps), np.zeros((steps, 2), np.float32)),
        "rewards": np.ones(steps),
        "terminations": flags & (end == "terminated"),
        "truncations": flags & (end == "truncated"),
    }
    return SimpleNamespace(id=number, **(values | changes))


def test_minaris_episodes_keep_their_true_final_observations():
    episodes = [episode(0, 3, "terminated"), episode(1, 2, "truncated"), episode(2, 1, "open")]
    dataset = Dataset.from_minari(recorded(episodes))
    found = all_rows(dataset)
    assert found["obs/x"].flatten().tolist() == [0.0, 1.0, 2.0, 10.0, 11.0, 20.0]
    assert found["next_obs/x"].flatten().tolist() == [1.0, 2.0, 3.0, 11.0, 12.0, 21.0]
    assert found["actions/0"].tolist() == [0, 1, 2, 0, 1, 0]
    assert found["actions/1"].shape == (6, 2)
    assert found["discounts"].tolist() == pytest.approx([0.9, 0.9, 0.0, 0.9, 0.9, 0.9])
    assert dataset.episode_returns.tolist() == [3.0, 2.0, 1.0]
    with pytest.raises(ValueError, match="episode 7 has 3 rewards"):
        Dataset.from_minari(recorded([episode(7, 3, "open", actions=np.zeros(2))]))
    for changes in (
        {"actions": np.zeros((3, 2), np.float32)},
        {"observations": {"x": np.zeros((4, 2))}},
        {"observations": {"y": np.zeros((4, 1))}},
        {"observations": {"x": np.zeros((4, 1), np.int64)}},
    ):
        with pytest.raises(ValueError, match="episodes differ in the names, shapes or types"):
            Dataset.from_minari(recorded([episode(0, 3, "open"), episode(1, 3, "open", **changes)]))
    for empty in ([], [episode(0, 0, "open")]):
        with pytest.raises(ValueError, match="no steps"):
            Dataset.from_minari(recorded(empty))
    nothing = episode(1, 0, "open", actions=[], rewards=[])  # of another type, as nothing says which
    assert len(all_rows(Dataset.from_minari(recorded([episodes[0], nothing])))["returns"]) == 3


class FromThree(Steps):
    """Two steps an episode; the reward is the action, which is 3 or 4."""

    action_space = spaces.Discrete(2, start=3)
    length = 2

    def step(self, action):
        assert action in (3, 4)
        obs, _, *ends, info = super().step(action)
        return obs, float(action), *ends, info


def test_minaris_actions_are_as_recorded_and_are_evaluated_in_the_simulator_they_came_from():
    observations = np.arange(3, dtype=np.float32)[:, None]
    made = [episode(i, 2, "terminated", observations=observations, actions=np.full(2, 4)) for i in range(8)]
    spaces_of = {"observation_space": FromThree.observation_space, "action_space": FromThree.action_space}
    dataset = Dataset.from_minari(recorded(made, **spaces_of))
    assert dataset.action_space == spaces.Discrete(2, start=3)
    assert dataset.transitions["actions"].tolist() == [4] * 16
    config = BCConfig(dataset=dataset, device="cpu", seed=0, batch_size=16, lr=1e-2, updates_per_step=50)
    make = functools.partial(GymnasiumEnv, FromThree)
    trainer = Trainer(config.build(), eval_env=make, num_eval_envs=2, tracker=MemoryTracker())
    trainer.step()
    assert trainer.eval()["eval/returns/mean"] == 8.0  # 4, twice


@pytest.mark.parametrize("n", [1, 3])
def test_rows_stay_on_the_device_of_the_transitions(n):
    rows = broken(next_obs=None)
    expected = Dataset(rows).prepared(n, 0.9, torch.device("cpu"))
    with torch.device("meta"):  # what names no device of its own is made there, and mixes with nothing
        dataset = Dataset(rows).prepared(n, 0.9, torch.device("cpu"))
    found, wanted = (each.gather(torch.arange(each.size)) for each in (dataset, expected))
    assert all(torch.equal(part, wanted[name]) for name, part in found.items())


OTHER_ENV = {"env_spec": json.dumps({"id": "antigravity:X-v0", "entry_point": "antigravity:X", "kwargs": {}})}
HUGE = {"type": "Box", "dtype": "float32", "shape": [10**6, 10**6], "low": 0.0, "high": 1.0}
HUGE = {"observation_space": json.dumps(HUGE)}


@pytest.fixture
def minaris(tmp_path, monkeypatch):
    """A data set as Minari itself writes it, and the folder of its files."""
    minari = pytest.importorskip("minari", reason="Minari is not installed, whose data sets are read")
    pytest.importorskip("h5py", reason="h5py is not installed, which Minari writes with")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    episodes = [vars(episode(i, 3 + i, end)) for i, end in enumerate(("terminated", "truncated"))]
    flat = [each | {"observations": each["observations"]["x"], "actions": each["actions"][0]} for each in episodes]
    buffers = [minari.data_collector.EpisodeBuffer(**each) for each in flat]
    given = {"observation_space": spaces.Box(-np.inf, np.inf, (1,), np.float64), "action_space": spaces.Discrete(4)}
    with warnings.catch_warnings(action="ignore"):  # that nobody describes it
        minari.create_dataset_from_buffers("test/data-v0", buffers, **given)
    return Dataset.load("test/data-v0"), tmp_path / "test" / "data-v0" / "data"


def test_minaris_own_data_sets_are_read_by_id(minaris):
    found, _ = minaris
    assert found.transitions["obs"].flatten().tolist() == [0.0, 1.0, 2.0, 10.0, 11.0, 12.0, 13.0]
    assert found.transitions["actions"].tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert (found.episode_returns.tolist(), found.action_space) == ([3.0, 4.0], spaces.Discrete(4))
    with pytest.raises(ValueError, match="Minari has no data set 'test/other-v0'"):
        Dataset.load("test/other-v0")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        # Minari would make this environment, which imports its module.
        (lambda data: data.pop("action_space") and data.update(OTHER_ENV), "its metadata do not say the action_space"),
        (lambda data: data.update(total_episodes=1), "its metadata say .'episodes': 1, 'steps': 7., and its file has"),
        (lambda data: data.update(total_steps=9), "its metadata say .'episodes': 2, 'steps': 9., and its file has"),
        (lambda data: data.update(data_format="unknown"), "damaged: 'unknown'"),
        (lambda data: data.update(minari_version="99"), "does not support"),
        (lambda data: data.update(HUGE), r"a Box has at most 268,435,456 numbers; got \[1000000, 1000000\]"),
        (lambda data: data.update(observation_space="[" * 10_000), "damaged: "),
    ],
)
def test_metadata_of_minaris_that_cannot_be_are_one_line(change, says, minaris):
    file = minaris[1] / "metadata.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    found = outcome("test/data-v0")
    assert isinstance(found, str)
    assert re.search(f"{minaris[1]} is not one of Minari's data sets, or .*{says}", found), found
    assert "antigravity" not in sys.modules


def test_minaris_file_holds_its_own_arrays(minaris):
    import h5py

    made, folder = minaris
    (folder / "other").write_bytes(bytes(4096))
    elsewhere = {"shape": (4,), "dtype": "f4", "external": [(str(folder / "other"), 0, 16)]}
    with h5py.File(folder / "main_data.hdf5", "a") as file:
        del file["episode_1/rewards"]
        file.create_dataset("episode_1/rewards", **elsewhere)
    assert "`episode_1/rewards` lies in another file" in outcome("test/data-v0")
    with h5py.File(folder / "main_data.hdf5", "a") as file:
        del file["episode_1/rewards"]
        file["episode_1/rewards"] = made.transitions["rewards"][3:].numpy()
        file["episode_1/more/all"] = file["episode_1"]
    assert "`episode_1/more/all` is there twice" in outcome("test/data-v0")


DAMAGED = {  # by file: how many of 82 are refused at least, and whether what is read must be the very same
    "SHA256SUMS": (78, True),
    "transitions.safetensors": (78, True),
    "plain.hdf5": (16, False),
    "checked.hdf5": (16, True),
    "metadata.json": (50, True),
    "main_data.hdf5": (16, False),
}


def written(name, folder, request):
    """Write a data set that has a file of this name; return the file, and what `load` takes."""
    if name in ("metadata.json", "main_data.hdf5"):
        return request.getfixturevalue("minaris")[1] / name, "test/data-v0"
    if name.endswith("hdf5"):
        rows = episode_rows([9, 20], ["terminated", "truncated"])
        stored = {"chunks": True, "compression": "gzip", "fletcher32": True} if name == "checked.hdf5" else {}
        write_hdf5(folder / name, {theirs: rows[ours].numpy() for theirs, ours in (D4RL | NEXT).items()}, **stored)
        return folder / name, folder / name
    space, seen = spaces.Dict({"x": VECTOR, "y": VECTOR}), broken()["obs"]
    rows = broken(obs={"x": seen, "y": seen}, next_obs={"x": seen + 1, "y": seen + 1}, actions=torch.arange(7) % 2)
    Dataset.from_tensors(rows, observation_space=space, action_space=spaces.Discrete(2)).save(folder / "data")
    return folder / "data" / name, folder / "data"


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_in_one_line_or_read_as_it_was(name, tmp_path, request):
    file, path = written(name, tmp_path, request)
    made, whole, draw, refused = outcome(path, gaps="truncate"), file.read_bytes(), random.Random(2), 0
    least, is_same = DAMAGED[name]
    for content in (None, b"", *(damaged(whole, draw) for _ in range(80))):
        file.unlink() if content is None else file.write_bytes(content)
        found = outcome(path, gaps="truncate")
        if isinstance(found, str):
            refused += 1
            continue
        assert (found.transitions.keys(), found.size) == (made.transitions.keys(), made.size)
        if is_same:
            assert (found.digest, found.episode_returns.tolist()) == (made.digest, made.episode_returns.tolist())
            assert (found.observation_space, found.action_space) == (made.observation_space, made.action_space)
    assert refused >= least
