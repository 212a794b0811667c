"""The kills of ranks: what they find, and what the page says of them."""

import copy
import json

from benchmarks import rank_kills

PAGE = (rank_kills.OUT.parents[2] / "docs" / "scaling.md").read_text()


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
