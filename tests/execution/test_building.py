import os
import shutil

import pytest

from rl8x.execution import building
from rl8x.execution.building import build, remove_unfinished


def test_an_error_is_that_of_the_source_and_names_it_first(tmp_path):
    with pytest.raises(RuntimeError, match=r"^[^\n]*error: [^\n]*no_such_name"):
        build("int answer() { return no_such_name; }", tmp_path / "answer.so")
    assert not [*tmp_path.iterdir()]


def test_what_a_killed_process_left_is_removed_when_it_is_old(tmp_path, monkeypatch):
    folder, temporary = tmp_path / "programs", tmp_path / "temporary"
    monkeypatch.setattr(building.tempfile, "gettempdir", lambda: str(temporary))
    for place, name in ((folder, ".part"), (folder, ".key.lock"), (temporary, "rl8x-compile"), (temporary, "other")):
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
    assert sorted(path.name for path in folder.iterdir()) == [".key.lock-new", ".part-new"]
    assert sorted(path.name for path in temporary.iterdir()) == ["other-new", "other-old", "rl8x-compile-new"]
