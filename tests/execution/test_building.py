import os

import pytest

from rl8x.execution.building import build, remove_unfinished


def test_an_error_is_that_of_the_source_and_names_it_first(tmp_path):
    with pytest.raises(RuntimeError, match=r"^[^\n]*error: [^\n]*no_such_name"):
        build("int answer() { return no_such_name; }", tmp_path / "answer.so")
    assert not [*tmp_path.iterdir()]


def test_what_a_killed_process_left_is_removed_when_it_is_old(tmp_path):
    for age, which in ((3600, "old"), (1, "new")):
        folder, *files = (tmp_path / f"{name}-{which}" for name in (".build", ".key.lock", "key.so"))
        folder.mkdir()
        (folder / "program.cpp").touch()
        for left in (*files, folder):
            left.touch()
            os.utime(left, (left.stat().st_mtime - age,) * 2)
    remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".build-new",
        ".key.lock-new",
        "key.so-new",
        "key.so-old",
    ]
