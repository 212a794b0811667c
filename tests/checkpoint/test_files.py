import enum
import json
import os
import pickle
import subprocess
import threading
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoint import legal
from tests.checkpoint.legal import described, metadata
from tests.tracking.fakes import BothSides

from rl8x import NullTracker, PPOConfig
from rl8x.checkpoint import CheckpointError, Checkpoints, describe, files, find, listed, read
from rl8x.checkpoint.load import build_algorithm, changes, find_of_job, find_unfinished
from rl8x.checkpoint.manager import CheckpointManager
from rl8x.checkpoint.tree import AS_FIRST, clone, copied, num_ranks, of_rank, packed, unpacked
from rl8x.config import RunSpec
from rl8x.envs import CartPole
from rl8x.models import MLPModel
from rl8x.replay.ring import Segment
from rl8x.tracking.locks import FolderLock

# -- trees

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8]).map(
        lambda dtype: torch.arange(12).view(4, 3)[::2].to(dtype)
    ),
)
KEYS = st.text(max_size=4) | st.integers()
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


def same(left, right):
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and (left == right or (left != left and right != right))


def through_a_file(tree):
    return unpacked(packed(tree))


@given(TREES)
@settings(max_examples=200, deadline=None)
def test_a_tree_survives_a_file(tree):
    assert same(through_a_file(tree), tree)
    assert same(clone(tree), tree)


class Kind(enum.StrEnum):
    A = "a"


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float64(0.1), 0.1),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.str_("x"), "x"),
        (Kind.A, "a"),
        (enum.IntEnum("Number", {"B": 7}).B, 7),
        (torch.Size([2, 3]), (2, 3)),
        (OrderedDict(a=1), {"a": 1}),
    ],
)
def test_what_acts_as_a_plain_value_is_saved_as_one(value, plain):
    assert same(through_a_file({"x": [value]}), {"x": [plain]})


def test_a_rank_has_rank_0s_tensors_and_its_own(tmp_path):
    manager = opened(tmp_path)
    segment = Segment("a-0-1", lambda: {"x": torch.arange(3)})
    others = {"1": unpacked(packed({"w": AS_FIRST})) | {"g": torch.tensor(2), "n": (1, [segment])}}
    first = {"w": torch.tensor(0.5), "g": torch.tensor(1), "n": (0, [])}
    manager.save(1, metadata(), {"trainer": first, "ranks": others})
    state = read(manager.end()).state
    assert (num_ranks(state), of_rank(state["trainer"], state["ranks"], 0)) == (2, first)
    own = of_rank(state["trainer"], state["ranks"], 1)
    expected = (0.5, 2, 1, [0, 1, 2])
    assert (float(own["w"]), int(own["g"]), own["n"][0], own["n"][1][0].content()["x"].tolist()) == expected
    with pytest.raises(CheckpointError, match="its state of rank 1 is damaged"):
        of_rank({"g": torch.tensor(1)}, state["ranks"], 1)


def test_views_are_copied_without_their_neighbours():
    whole = torch.arange(1000.0)
    tree = copied({"a": whole[:3]})
    whole.zero_()
    assert tree["a"].tolist() == [0.0, 1.0, 2.0]
    assert tree["a"].untyped_storage().nbytes() == 12


@pytest.mark.parametrize(
    "tree", [{"a": object()}, {True: 2}, {0.5: 2}, {np.int64(1): 2}, [{"x": {2, 3}}], [b"x"], [1j], [np.zeros(2)]]
)
def test_what_has_no_form_is_refused(tree):
    with pytest.raises(TypeError, match=r"of a state are|a state holds"):
        copied(tree)


# -- files


def put(directory, steps=1, **metadata):
    state = copied({"x": torch.ones(3), "y": float("nan"), "n": [1, "two", None]})
    directory.mkdir(parents=True, exist_ok=True)
    return files.write(directory, steps, legal.metadata(**metadata), state)


def test_a_checkpoint_is_on_the_disk_before_it_is_told_of(tmp_path, monkeypatch):
    synced = []  # folders, with what they had
    monkeypatch.setattr(files, "sync_folder", lambda folder: synced.append((folder, sorted(os.listdir(folder)))))
    path = put(tmp_path)
    (unfinished, held), last = synced
    assert unfinished.parent == tmp_path
    assert held == sorted(item.name for item in path.iterdir())
    assert last == (tmp_path, [path.name])


def test_a_failed_or_killed_write_leaves_nothing(tmp_path, monkeypatch):
    good = put(tmp_path)
    for name in (".unfinished-1", ".removed-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.pt").touch()
    files.tidy(tmp_path)

    def full(path, data, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_synced", full)
    with pytest.raises(OSError, match="No space"):
        put(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [good.name]


@pytest.mark.parametrize("name", [files.DESCRIPTION, files.STATE, files.SUMS])
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_damage_goes_unseen(tmp_path_factory, name, data):
    directory = tmp_path_factory.mktemp("damaged")
    path = put(directory)
    content = bytearray((path / name).read_bytes())
    if data.draw(st.booleans()):
        bit = data.draw(st.integers(0, len(content) * 8 - 1))
        content[bit // 8] ^= 1 << bit % 8
    else:
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    (path / name).write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        read(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def signed(path, description=None):
    """Change a checkpoint and make its digests right again, as somebody who means harm would."""
    if description is not None:
        data = json.loads((path / files.DESCRIPTION).read_text())
        (path / files.DESCRIPTION).write_text(json.dumps(data | description))
    (path / files.SUMS).write_text(files._sums(path, files.kept_segments(path)))


class Harm:
    def __reduce__(self):
        return os.mkdir, ("harm-was-done",)


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, itself = with_segment(tmp_path / "run", {"x": torch.arange(3)}), []
    itself.append(itself)
    for save in (
        lambda: (path / files.STATE).write_bytes(pickle.dumps({"x": Harm()})),
        *(
            lambda odd=odd: torch.save(odd, path / files.STATE)
            for odd in ({"x": Harm()}, [torch.zeros(1)], {"x": itself}, {1.5: 2})
        ),
    ):
        save()
        signed(path)
        with pytest.raises(CheckpointError, match=r"state\.pt holds something other than tensors"):
            read(path)
    torch.save({"parts": [b"a-0-1"]}, path / files.STATE)
    (path / "a-0-1.segment.pt").write_bytes(pickle.dumps({"x": Harm()}))
    signed(path)
    (segment,) = read(path).state["parts"]
    with pytest.raises(CheckpointError, match=r"000001-step-1 cannot be used: a-0-1.segment.pt holds something other"):
        segment.content()
    assert not (tmp_path / "harm-was-done").exists()


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"version": 2}, r"version 2, and this rl8x reads up to 1: update rl8x"),
        ({"version": 1, "format": "other"}, "not that of an rl8x checkpoint"),
        ("[" * 100_000, "damaged"),
    ],
)
def test_newer_and_foreign_checkpoints_are_refused(tmp_path, description, message):
    path = put(tmp_path)
    if isinstance(description, dict):
        signed(path, description)
    else:
        (path / files.DESCRIPTION).write_text(description)
    with pytest.raises(CheckpointError, match=message):
        read(path)


@pytest.mark.parametrize("name", [files.DESCRIPTION, files.STATE, files.SUMS, "a-0-1.segment.pt", "b-0-1.segment.pt"])
def test_a_missing_file_is_named(tmp_path, name):
    path = with_segment(tmp_path, {"x": torch.arange(3)})
    if name.startswith("b-"):  # which the state names, and never was there
        torch.save({"parts": [b"b-0-1"]}, path / files.STATE)
        signed(path)
    (path / name).unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        read(path)


# -- segments


def with_segment(directory, content, shared=None, *, steps=1):
    segment = Segment("a-0-1", lambda: content)
    state = copied({"best": None, "parts": [segment]})
    directory.mkdir(parents=True, exist_ok=True)
    return files.write(directory, steps, metadata(), state, {segment.name: content}, shared)


def test_what_was_written_is_read_and_a_segment_is_a_file_of_its_own(tmp_path):
    path = with_segment(tmp_path, {"x": torch.arange(3)}, steps=7)
    assert path.name == "000001-step-7"
    assert describe(path)["status"] == "RUNNING"
    assert torch.load(path / "state.pt", weights_only=True) == {"best": None, "parts": [b"a-0-1"]}
    assert torch.load(path / "a-0-1.segment.pt", weights_only=True)["x"].tolist() == [0, 1, 2]
    (segment,) = read(path).state["parts"]
    assert (segment.name, segment.content()["x"].tolist()) == ("a-0-1", [0, 1, 2])
    files_there = ["SHA256SUMS", "a-0-1.segment.pt", "checkpoint.json", "state.pt"]
    assert sorted(item.name for item in path.iterdir()) == files_there
    assert {path.stat().st_mode & 0o777 for path in path.glob("*.*")} == {0o600}
    subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=path, check=True)


def test_a_kept_segment_has_the_digest_that_was_written(tmp_path):
    first = with_segment(tmp_path, {"x": torch.arange(3)})
    kept = first / "a-0-1.segment.pt"
    second = with_segment(tmp_path, None, first)
    assert (second / "a-0-1.segment.pt").samefile(kept)
    content = bytearray(kept.read_bytes())
    content[10] ^= 1
    kept.write_bytes(content)
    third = with_segment(tmp_path, None, first)
    for path in (first, second, third):
        with pytest.raises(CheckpointError, match=r"a-0-1\.segment\.pt does not have the digest"):
            read(path)


def test_only_files_of_the_folder_are_kept(tmp_path):
    path = with_segment(tmp_path, {"x": torch.arange(3)})
    sums = (path / files.SUMS).read_text()
    digest = "0" * 64
    (path / files.SUMS).write_text(
        f"{sums}{digest}  ../secret.segment.pt\n{digest}  gone.segment.pt\n{digest}  b.segment.pt\n"
    )
    (tmp_path / "secret.segment.pt").touch()
    (path / "b.segment.pt").symlink_to(tmp_path / "secret.segment.pt")
    assert files.kept_segments(path) == {"a-0-1"}
    assert files.kept_segments(tmp_path / "nothing") == frozenset()


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/b", "A", "a.b", "a" * 101, "\udcff"])
def test_no_path_is_taken_from_a_segments_name(tmp_path, name):
    path = with_segment(tmp_path, {"x": torch.arange(3)})
    torch.save({"parts": [name.encode(errors="surrogateescape")]}, path / files.STATE)
    signed(path)
    with pytest.raises(CheckpointError, match=r"a segment with the name .*, which is none"):
        read(path)
    with pytest.raises(ValueError, match="a segment's name has"):
        Segment(name, dict)


# -- finding


def test_a_damaged_one_names_the_newest_good_one_and_auto_takes_it(tmp_path):
    paths = [put(tmp_path, steps) for steps in (1, 2, 3, 4)]
    for path in paths[2:]:
        (path / files.STATE).write_bytes(b"")
    for source in (tmp_path, paths[3], paths[2]):
        with pytest.raises(CheckpointError, match=r"the newest good one is .*000002-step-2$"):
            find(source)
        assert find(source, auto=True).path == paths[1]
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*; the newest good one is .*000002-step-2$"):
        find(tmp_path / "000009-step-9")
    assert find(tmp_path / "000009-step-9", auto=True).path == paths[1]


def test_a_run_in_mlflow_without_checkpoints_is_refused_by_its_id(mlflow_client):
    run = mlflow_client.create_run("0", run_name="a loop").info.run_id
    for name in ("a loop", run):
        with pytest.raises(CheckpointError, match=rf"the run '{name}' \({run}\) has no checkpoints in .*trainer\.save"):
            find(name)


def test_a_run_is_found_by_what_its_checkpoints_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = put(tmp_path / "mlruns" / "checkpoints" / "abc", run={"key": "k", "id": "the-id", "handle": "journal-xyz"})
    for name in ("abc", "journal-abc", "the-id", "journal-xyz"):
        assert find(name).path == path
    (path / files.SUMS).unlink()
    with pytest.raises(CheckpointError, match="no good one beside it"):
        find("abc", auto=True)


def test_a_checkpoint_knows_its_own_folder_by_any_path(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    paths = [files.write(folder, i, metadata(), {}) for i in (1, 2)]
    (tmp_path / "link").symlink_to(paths[1])
    monkeypatch.chdir(folder)
    named = {str(paths[1]): True, paths[1].name: True, "../link": True, str(paths[0]): False, ".": False, "a\0b": False}
    assert {source: read(paths[1]).is_at(source) for source in named} == named


def test_a_job_finds_its_run_though_the_newest_checkpoint_is_damaged(tmp_path):
    resolved = {**legal.RESOLVED, "env_class": "E", "config": {"seed": 1}}
    for steps in (1, 2):
        path = put(tmp_path / "a", steps, run={"key": "k", "job": "mine"}, resolved=resolved)
    (path / files.DESCRIPTION).write_text("{")
    other = {**resolved, "config": {"seed": 2}}
    for job, now, root, any_seed, found in (
        ("mine", resolved, tmp_path / "a", False, True),
        ("mine", resolved, tmp_path, False, True),
        ("another", resolved, tmp_path / "a", False, False),
        ("mine", {**resolved, "algorithm": "DQN"}, tmp_path, False, False),
        ("mine", other, tmp_path, False, False),
        ("mine", other, tmp_path, True, True),
    ):
        assert find_of_job(job, now, root, any_seed=any_seed) == (tmp_path / "a" if found else None)


def test_a_run_that_was_killed_before_its_store_had_all_has_not_finished(tmp_path):
    plain = {"env": "CartPole"}
    config = RunSpec.read(plain)
    folder = tmp_path / "mlruns/checkpoints/a"
    header = {"op": "open", "version": 1, "journal_id": "a", "t": 1, "uri": "http://x"}
    journal = BothSides(tmp_path / "spools", header)
    put(folder, spec=plain, status="FINISHED", run={"key": "k", "journal": "../../../spools/a"})
    assert find_unfinished(config, folder.parent) == folder
    journal.acknowledge(finished=True)
    assert find_unfinished(config, folder.parent) is None  # what is still there was set aside
    journal.acknowledge(journal.end)
    journal.close()
    assert find_unfinished(config, folder.parent) is None
    (folder / "lock").write_text("12345")  # of a process that was killed before it told its end
    assert find_unfinished(config, folder.parent) == folder
    with FolderLock(folder):
        assert find_unfinished(config, folder.parent) is None
    assert find_unfinished(config, folder.parent) is None


def test_the_newest_unfinished_run_of_a_run_file_is_found(tmp_path):
    plain = {"env": "CartPole", "tracking_uri": "http://me:p4ss@host"}
    spec = RunSpec.read(plain)
    for name, created, status in (("a", "1", "RUNNING"), ("b", "2", "KILLED"), ("c", "3", "FINISHED")):
        path = put(tmp_path / name, spec=plain, created=created, status=status)
        assert "p4ss" not in (path / files.DESCRIPTION).read_text()
    put(tmp_path / "d", spec={"env": "Pendulum"}, created="4", status="RUNNING")
    assert find_unfinished(spec, tmp_path) == tmp_path / "b"
    assert find_unfinished(RunSpec.read({**plain, "progress": "none"}), tmp_path) == tmp_path / "b"
    for other in ({"env": "Acrobot"}, {**plain, "tracking_uri": "http://you:p4ss@host"}):
        assert find_unfinished(RunSpec.read(other), tmp_path) is None
    manager = opened(tmp_path / "b")
    assert find_unfinished(spec, tmp_path) == tmp_path / "a"  # somebody is at b
    manager.end()


# -- when and which


def opened(directory, key="k", best_before=None, **options):
    manager = CheckpointManager(Checkpoints(directory, **options), NullTracker())
    manager.key, manager.best = key, best_before
    manager.take()
    return manager


def test_the_last_and_the_best_are_kept(tmp_path):
    manager = opened(tmp_path, keep=2)
    for steps in range(1, 7):
        counters = {"algorithm/steps": steps, "env/steps": 4 * steps}
        about = metadata(counters=counters, is_best=steps in (2, 3))
        manager.save(steps, about, {"x": torch.tensor(steps)})
    assert manager.end() == tmp_path / "000006-step-6"
    assert [path.name for path in listed(tmp_path)] == ["000003-step-3", "000005-step-5", "000006-step-6"]
    manager = opened(tmp_path, keep=1, best_before={"steps": 3})
    manager.save(7, metadata(), {})
    manager.end()
    assert [path.name for path in listed(tmp_path)] == ["000003-step-3", "000007-step-7"]


@pytest.mark.parametrize("look", [1, 2])  # when it reads the newest, and after that, when it has listed all
def test_the_newest_and_the_best_of_a_run_that_saves_another_meanwhile_are_found(look, tmp_path, monkeypatch):
    manager, looks, describes = opened(tmp_path, keep=1), [], files.describe

    def save(steps):
        counters = {"algorithm/steps": steps, "env/steps": 4 * steps}
        manager.best = {"metric": "m", "mode": "max", "value": float(steps), "steps": steps}
        manager.save(steps, metadata(counters=counters, is_best=True), {"best": manager.best})
        return manager.wait()

    def slowly(path):
        looks.append(path)
        if len(looks) == look:
            save(2)
            assert not path.exists()
        return describes(path)

    save(1)
    monkeypatch.setattr(files, "describe", slowly)
    assert find(tmp_path, best=look == 2).path.name == "000002-step-2"
    manager.end()


def test_a_state_is_copied_when_save_returns(tmp_path, monkeypatch):
    go, write = threading.Event(), files.write

    def late(*args):
        go.wait(10)
        return write(*args)

    monkeypatch.setattr(files, "write", late)
    manager, state = opened(tmp_path), {"x": torch.zeros(2), "n": [1]}
    manager.save(1, metadata(), state)
    state["x"].fill_(9.0)
    state["n"].append(2)
    go.set()
    assert same(read(manager.end()).state, {"x": torch.zeros(2), "n": [1]})


def test_due(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("rl8x.checkpoint.manager.time.monotonic", lambda: now[0])
    manager = opened(tmp_path, every_steps=3, every_minutes=1.0)
    assert [manager.due(steps) for steps in range(1, 8)] == [False, False, True, False, False, True, False]
    now[0] += 60.0
    assert manager.due(7)
    manager.save(7, metadata(), {})
    assert not manager.due(8)
    manager.end()


@pytest.mark.parametrize(("mode", "improves"), [("max", [1, 0, 0, 1, 0]), ("min", [1, 0, 1, 0, 0])])
def test_the_best_is_better_than_ever_and_fresh(tmp_path, mode, improves):
    manager = opened(tmp_path, best="m", mode=mode)
    values = [2.0, 2.0, 1.0, 3.0, float("nan")]
    seen = [manager.improved({"m": value}, frozenset({"m"}), steps) for steps, value in enumerate(values)]
    assert seen == [bool(better) for better in improves]
    assert not manager.improved({"m": 99.0 if mode == "max" else -99.0}, frozenset(), 9)
    expected = {"metric": "m", "mode": mode, "value": 3.0 if mode == "max" else 1.0, "steps": 3 if mode == "max" else 2}
    assert manager.best == expected
    manager.end()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("keep", 0), ("every_steps", 0), ("every_steps", 1.5), ("every_minutes", -1), ("mode", "most")],
        *[("directory", "a\0b"), ("directory", ""), ("directory", " ")],
    ],
)
def test_options_are_checked(name, value):
    with pytest.raises((TypeError, ValueError), match=f"`{name}` must be"):
        Checkpoints(**{name: value})


# -- building again


def config(**options):
    return PPOConfig(**({"num_envs": 4, "horizon": 4, "seed": 1, "device": "cpu"} | options))


def test_a_hyperparameter_that_an_older_checkpoint_lacks_takes_its_default_with_a_word():
    algorithm = config(gamma=0.5).build(CartPole)
    run = described(algorithm)
    for name in ("vf_coeff", "optimizer_config"):
        del run[1]["config"][name]
    again = build_algorithm(*run, {})
    with pytest.warns(RuntimeWarning, match=r"take their defaults: optimizer_config=\{\}, vf_coeff=1\.0$"):
        assert changes(run[1], again) == {}
    assert again.config == algorithm.config
    with pytest.warns(RuntimeWarning, match="vf_coeff"):
        assert changes(run[1], build_algorithm(*run, {"vf_coeff": 0.5})) == {"vf_coeff": (1.0, 0.5)}


def test_what_has_no_form_in_a_file_is_not_taken_for_a_missing_hyperparameter(recwarn):
    model = MLPModel(CartPole(1).single_observation_space, 2)
    algorithm = config(model=model).build(CartPole)
    assert changes(described(algorithm)[1], algorithm) == {}
    assert list(recwarn) == []


def test_a_hyperparameter_of_a_newer_version_is_one_clear_error():
    algorithm = config().build(CartPole)
    run = described(algorithm)
    run[1]["config"] |= {"look_ahead": 3}
    for attempt in (lambda: build_algorithm(*run, {}), lambda: changes(run[1], algorithm)):
        with pytest.raises(CheckpointError, match=r"^PPOConfig of rl8x .* not have the hyperparameters `look_ahead`"):
            attempt()
