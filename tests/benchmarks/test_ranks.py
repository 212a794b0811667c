"""The benchmarks of several ranks: their arithmetic, and what the page says of them."""

import copy
import json

import pytest

from benchmarks import rank_kills, scaling

PAGE = scaling.PAGE.read_text()


def test_costs_are_medians_of_pairs_in_the_same_round():
    found = {
        "1 process": [(1.0, 0.5), (3.0, 0.5), (2.0, 0.5)],
        "2 processes": [(1.0, 0.5), (3.3, 0.5), (2.1, 0.5)],
        "2 ranks": [(1.1, 0.6), (3.6, 0.5), (2.2, 0.55)],
    }
    _, apart, two = scaling.summarised(found)
    assert apart["cost"] == pytest.approx(0.05)  # of 1.0, 1.1 and 1.05
    assert apart["cost_beside_as_many_processes"] == 0
    assert two["cost"] == pytest.approx(0.1)  # of 1.1, 1.2 and 1.1
    assert two["cost_beside_as_many_processes"] == pytest.approx(3.6 / 3.3 - 1, abs=1e-4)  # of 1.1, 1.0909 and 1.0476
    assert (two["step_ms"], two["processor_ms"]) == (2200, 550)


def test_the_page_has_the_measured_scaling():
    document = json.loads(scaling.DEFAULT_OUT.read_text())
    assert f"<!-- scaling -->\n{scaling.table(document)}\n<!-- /scaling -->" in PAGE


def test_the_page_has_the_measured_kills():
    found = json.loads(rank_kills.OUT.read_text())
    assert found["kills"] >= 50
    assert found["hangs"] == 0
    assert found["differences"] == []
    assert found["restarts"] + found["clean_ends"] == found["kills"]
    assert f"<!-- kills -->\n{rank_kills.sentence(found)}\n<!-- /kills -->" in PAGE


def test_what_a_kill_must_not_change_is_found():
    points = {"losses/total": [(1, 0.5), (2, 0.25)], "memory/process_mb": [(1, None), (2, None)]}
    whole = {"runs": [("FINISHED", points)], "digest": "a", "spools": []}
    assert rank_kills.differences(copy.deepcopy(whole), whole) == []
    doubled = copy.deepcopy(whole)
    doubled["runs"][0][1]["losses/total"].append((2, 0.25))
    assert rank_kills.differences(doubled, whole) == ["losses/total: steps [1, 2, 2]"]
    other = {"runs": [("RUNNING", {**points, "losses/total": [(1, 0.5), (2, 0.3)]})], "digest": "b", "spools": ["x"]}
    assert rank_kills.differences(other, whole) == [
        "the spool x is left",
        "the weights differ",
        "the run is RUNNING",
        "losses/total: other values",
    ]
    two = {**whole, "runs": whole["runs"] * 2}
    assert rank_kills.differences(two, whole)[0].startswith("2 runs")
