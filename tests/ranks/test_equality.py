"""Two ranks do what one process does with twice the copies on the same noise."""

import pytest
from tests.ranks import problems, scenarios
from tests.ranks.launch import launch


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("ranks"), "scenarios", ["ppo_equals_one_process"])


# Times and memory are rank 0's own.
OWN = ("profiling/", "memory/")


def test_ppo_equals_one_process(found):
    alone = scenarios.ppo_equals_one_process()
    first, second = found["ppo_equals_one_process"]
    assert first["weights"] == second["weights"]
    assert problems.furthest(first["weights"], alone["weights"]) < 1e-6
    assert first["state"] == second["state"] == alone["state"]
    for one, two, single in zip(first["rows"], second["rows"], alone["rows"], strict=True):
        assert one == two
        names = {name for name in single if not name.startswith(OWN)}
        assert names == {name for name in one if not name.startswith(OWN)}
        for name in names:
            assert one[name] == pytest.approx(single[name], rel=1e-4, abs=1e-5), name
