import json
import os

import pytest
import torch

from rl8x.execution import Execution
from rl8x.execution import artifacts as module
from rl8x.execution.artifacts import Artifacts, key_of, limit_mb, surroundings


def kept(folder, key, content=b"library", used=None):
    artifacts = Artifacts(folder)
    folder.mkdir(exist_ok=True)
    built = folder / ".built.so"
    built.write_bytes(content)
    artifacts.put(key, built)
    built.unlink()
    if used is not None:
        os.utime(artifacts.library(key), (used, used))
    return artifacts


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
DAMAGE = {
    "another library": lambda path: path.write_bytes(path.read_bytes().replace(b"library", b"librarz")),
    "half a library": lambda path: path.write_bytes(path.read_bytes()[4:]),
    "no notes": lambda path: path.write_bytes(b"library"),
    "half the notes": lambda path: path.write_bytes(path.read_bytes()[:-4]),
    "other notes": lambda path: path.write_bytes(b"library\n[]"),
    "nothing": lambda path: path.write_bytes(b""),
    "writable by all": lambda path: path.chmod(0o666),
    "writable by a group": lambda path: path.chmod(0o664),
    "a link": lambda path: path.symlink_to(path.rename(path.parent.parent / path.name)),
}
ANOTHER = pytest.param(lambda path: os.chown(path, 12345, -1), marks=as_root, id="another user's")


@pytest.mark.parametrize("damage", [*[pytest.param(each, id=name) for name, each in DAMAGE.items()], ANOTHER])
def test_what_is_damaged_or_others_can_change_is_never_found_and_made_anew(tmp_path, damage):
    artifacts = kept(tmp_path / "cache", "a")
    damage(artifacts.library("a"))
    assert [each.key for each in artifacts.list()] == ["a"]
    assert artifacts.find("a") is None
    assert kept(tmp_path / "cache", "a").find("a") is not None


@pytest.mark.parametrize(("limit", "stays"), [("1.3", "acd"), ("0", "ad")])
def test_the_ones_unused_for_longest_make_room_but_not_those_that_a_run_is_about_to_load(
    limit, stays, tmp_path, monkeypatch
):
    for i, key in enumerate("abc"):
        kept(tmp_path, key, bytes(400_000), used=1000 + i)
    Artifacts(tmp_path).find("a")  # used just now
    monkeypatch.setenv("RL8X_CACHE_MB", limit)
    artifacts = kept(tmp_path, "d", bytes(400_000))
    assert {key for key in "abcd" if artifacts.find(key) is not None} == {*stays}


@pytest.mark.parametrize("limit", ["a lot", "", "nan", "inf", "-inf", "-1"])
def test_a_limit_that_is_no_number_is_named_before_anything_is_compiled(limit, monkeypatch):
    monkeypatch.setenv("RL8X_CACHE_MB", limit)
    for refused in (limit_mb, lambda: Execution("auto", "fp32", torch.device("cpu"))):
        message = f"RL8X_CACHE_MB must be a number of megabytes, finite and at least 0; got '{limit}'"
        with pytest.raises(ValueError, match=message):
            refused()
    Execution("eager", "fp32", torch.device("cpu"))


def test_a_verdict_is_kept_with_its_program_and_what_is_cleared_is_rl8xs_alone(tmp_path):
    folder = tmp_path / "cache"
    Artifacts(folder).make_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    artifacts = kept(folder, "a")
    artifacts.judge("b", "off by 1")  # of which there is no program
    assert artifacts.find("b") is None
    assert "verdict" not in artifacts.find("a")
    for verdict in ("", "off by 1"):
        artifacts.judge("a", verdict)
        assert Artifacts(folder).find("a")["verdict"] == verdict
    assert artifacts.list()[0].torch == torch.__version__
    kept(folder, "a")  # built anew
    assert "verdict" not in artifacts.find("a")
    (folder / "gone.so").symlink_to(folder / "nowhere")  # another process has removed it since it was listed
    (folder / "mine.txt").write_text("mine")
    artifacts.trim()
    assert artifacts.find("a") is not None
    assert artifacts.clear() == 8 + len(json.dumps({"sha256": "0" * 64, "torch": torch.__version__}))
    assert [path.name for path in folder.iterdir() if path.exists()] == ["mine.txt"]
    assert Artifacts(folder / "nowhere").clear() == 0


CHANGED = {
    "rl8x": lambda patch: patch.setattr(module, "__version__", "0.0.0"),
    "torch": lambda patch: patch.setattr("torch.__version__", "9.9.9"),
    "torch's build": lambda patch: patch.setattr("torch.version.git_version", "0" * 40),
    "the C++ compiler": lambda patch: patch.setenv("CXX", "another"),
    "the processor": lambda patch: patch.setattr(module.Path, "exists", lambda _: False),
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_each_of_a_programs_surroundings_makes_another_key(monkeypatch, request, change):
    before = key_of("program")
    request.addfinalizer(surroundings.cache_clear)
    change(monkeypatch)
    surroundings.cache_clear()
    assert key_of("program") != before
    monkeypatch.undo()
    surroundings.cache_clear()
    assert key_of("program") == before != key_of("another")


OTHERS = {
    "a folder that all may write to": lambda folder: folder.chmod(0o777),
    "a folder that a group may write to": lambda folder: folder.chmod(0o770),
    "a folder with a sticky bit": lambda folder: folder.chmod(0o1777),
    "another user's folder": lambda folder: os.chown(folder, 12345, -1),
    "a parent that all may write to": lambda folder: folder.parent.chmod(0o777),
    "another user's parent": lambda folder: os.chown(folder.parent, 12345, -1),
    "a group's parent": lambda folder: (os.chown(folder.parent, -1, 12345), folder.parent.chmod(0o775)),
}


@as_root
@pytest.mark.parametrize("expose", OTHERS.values(), ids=OTHERS)
def test_nothing_is_taken_from_a_folder_that_others_can_change(tmp_path, monkeypatch, expose):
    folder = tmp_path / "parent" / "cache"
    folder.parent.mkdir()
    kept(folder, "a")
    monkeypatch.setenv("RL8X_CACHE_DIR", str(folder))
    folder.parent.chmod(0o770)  # of the user's own group, as with a umask of 002
    assert Artifacts().find("a") is not None
    expose(folder)
    artifacts = Artifacts()
    with pytest.warns(RuntimeWarning, match=f"neither taken from {folder} nor kept there, since .*RL8X_CACHE_DIR"):
        assert artifacts.find("a") is None
    assert artifacts.left.startswith(f"{folder} is not safe")
    assert artifacts.folder.stat().st_mode & 0o777 == 0o700
    artifacts.make_folder()
    assert [path.name for path in folder.iterdir()] == ["a.so"]


def test_what_a_killed_process_left_is_removed_when_it_is_old(tmp_path):
    for age, which in ((3600, "old"), (1, "new")):
        (tmp_path / f".build-{which}").mkdir()
        for name in (".lock", "so", ".build"):
            left = tmp_path / f"{name}-{which}"
            left.is_dir() or left.touch()
            os.utime(left, (left.stat().st_mtime - age,) * 2)
    Artifacts(tmp_path).remove_unfinished()
    assert {path.name for path in tmp_path.iterdir()} == {".build-new", ".lock-new", "so-new", "so-old"}


@pytest.mark.parametrize("place", ["file/cache", "read-only"])
def test_where_the_folder_cannot_be_written_it_is_one_of_the_process(place, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("RL8X_CACHE_DIR", str(tmp_path / place))
    artifacts = Artifacts()
    assert artifacts.folder == tmp_path / place
    monkeypatch.setattr(os, "access", lambda path, _: path.name != "read-only" and path.is_dir())
    artifacts.make_folder()
    assert artifacts.folder != tmp_path / place
    assert artifacts.left == f"{tmp_path / place} cannot be written to"
    kept(artifacts.folder, "a")
    assert artifacts.find("a") is not None
    monkeypatch.delenv("RL8X_CACHE_DIR")
    assert Artifacts().folder.name == "rl8x"
