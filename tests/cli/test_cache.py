import os
import re

import pytest
import torch

from rl8x.execution.artifacts import Artifacts


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("RL8X_CACHE_DIR", str(tmp_path / "cache"))
    artifacts = Artifacts()
    artifacts.make_folder()
    for i, key in enumerate(("a" * 40, "b" * 40)):
        built = artifacts.folder / ".built.so"
        built.write_bytes(bytes(250_000 * (i + 1)))
        artifacts.put(key, built)
        os.utime(artifacts.library(key), (1000 + i, 1000 + i))
    return artifacts


def test_programs_are_listed_the_one_used_last_first_and_removed(kept, call):
    head, first, second, _, total = call("cache").splitlines()
    assert head.split() == ["key", "MB", "last", "used", "torch"]
    assert re.fullmatch(rf"b{{12}} +0\.5 +19\d\d-.* +{re.escape(torch.__version__)}", first)
    assert second.startswith(f"{'a' * 12} ")
    assert total == f"2 programs, 0.8 of 500 MB, in {kept.folder}"
    assert call("cache", "--clear") == f"0.8 MB removed from {kept.folder}\n"
    assert kept.list() == []
    assert call("cache") == f"0 programs, 0.0 of 500 MB, in {kept.folder}\n"
