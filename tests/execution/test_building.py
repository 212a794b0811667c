"""C++ is built with precompiled headers where they are, and without where they are not, or are damaged."""

import ctypes
import os
import shutil

import pytest

from rl8x.execution import building
from rl8x.execution.artifacts import Artifacts
from rl8x.execution.building import Headers, build, remove_unfinished

SOURCE = """
#include <vector>
#ifdef RL8X_SEES_HEADERS
#define ANSWER 1
#else
#define ANSWER 0
#endif
extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER + 41; }
"""


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder with precompiled headers that can be told from those that are not: they define a name.

    They are a few, not all of torch's, which take ten seconds.
    """
    monkeypatch.setattr(building, "_PREFIX", "#include <vector>")
    monkeypatch.setattr(building, "HOST", tmp_path / "host.h")
    building.HOST.write_text("#include <string>\nint more;\n")
    folder = tmp_path / "cache"
    folder.mkdir()
    headers = Headers(folder)
    assert headers.text == "#include <vector>\n#include <string>\n"
    headers.text += "#define RL8X_SEES_HEADERS\n"
    headers.precompile()
    return folder


def answer(folder):
    build(SOURCE, folder / "answer.so")
    return ctypes.CDLL(str(folder / "answer.so")).answer()


def test_what_is_precompiled_is_what_a_source_sees(folder):
    assert answer(folder) == 42


def test_all_that_programs_include_is_precompiled(give_headers, tmp_path):
    """A source that includes nothing is built with torch's vectors and a string."""
    give_headers(tmp_path)
    source = SOURCE.replace("#include <vector>", "static std::string text(at::vec::Vectorized<float>::size(), '-');")
    build(source.replace("ANSWER + 41", "text.size()"), tmp_path / "answer.so")
    assert ctypes.CDLL(str(tmp_path / "answer.so")).answer() >= 4
    Headers(tmp_path).remove()
    with pytest.raises(RuntimeError, match="error: "):
        build(source, tmp_path / "answer.so")


def test_without_headers_a_source_is_built_all_the_same(tmp_path):
    assert Headers(tmp_path).find() is None
    assert answer(tmp_path) == 41


def test_damaged_headers_are_removed_and_built_without(folder):
    [damaged] = folder.glob("*.h.?ch")
    content = damaged.read_bytes()
    damaged.write_bytes(content[: len(content) // 2])
    assert answer(folder) in (41, 42)  # a compiler that sees the damage reads the text instead
    Headers(folder).precompile()
    assert Artifacts(folder).find(Headers(folder).key) is not None
    assert answer(folder) == 41  # as precompiled anew, which is without the name


def test_an_error_is_that_of_the_source_and_names_it_first(folder):
    with pytest.raises(RuntimeError, match=r"^[^\n]*error: [^\n]*no_such_name"):
        build(SOURCE + "int other() { return no_such_name; }", folder / "answer.so")
    assert Headers(folder).find() is not None
    assert not (folder / "answer.so").exists()


def test_headers_count_in_the_size_of_the_folder_and_make_room(folder, monkeypatch):
    artifacts = Artifacts(folder)
    [headers] = artifacts.list()
    assert (headers.kind, headers.key) == ("headers", Headers(folder).key)
    assert headers.size > 1e6
    monkeypatch.setenv("RL8X_CACHE_MB", "1")
    artifacts.trim()
    assert not [*folder.glob("*.h*")]


def test_a_folder_for_little_gets_no_headers(tmp_path, monkeypatch):
    monkeypatch.setenv("RL8X_CACHE_MB", "200")
    monkeypatch.setattr(building, "_run", lambda *_, **__: pytest.fail("precompiled"))
    Headers(tmp_path).precompile()
    assert not [*tmp_path.iterdir()]


def test_what_a_killed_process_left_is_removed_when_it_is_old(tmp_path, monkeypatch):
    folder, temporary = tmp_path / "programs", tmp_path / "temporary"
    monkeypatch.setattr(building.tempfile, "gettempdir", lambda: str(temporary))
    for place, name in ((folder, ".headers"), (folder, ".key.lock"), (temporary, "rl8x-compile"), (temporary, "other")):
        for age, which in ((3600, "old"), (1, "new")):
            left = place / f"{name}-{which}"
            left.mkdir(parents=True)
            (left / "program.cpp").touch()
            if name.endswith("lock"):
                shutil.rmtree(left)
                left.touch()
            when = left.stat().st_mtime - age
            os.utime(left, (when, when))
    remove_unfinished(folder)
    assert sorted(path.name for path in folder.iterdir()) == [".headers-new", ".key.lock-new"]
    assert sorted(path.name for path in temporary.iterdir()) == ["other-new", "other-old", "rl8x-compile-new"]
