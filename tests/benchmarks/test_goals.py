"""Ratios and goals, by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.common import WORKS  # noqa: E402
from benchmarks.tables import best, variants_of  # noqa: E402

from benchmarks import goals, report  # noqa: E402


def rate(peer, variant, value, work="pendulum-64", memory=400.0):
    named = {"peer": peer, "variant": variant, "work": work, "run": 0}
    return {**named, "transitions_per_s": value, "first_iteration_s": 1.0, "peak_rss_mb": memory}


def result(rows, **others):
    works = {name: work.described() for name, work in WORKS.items()}
    return {"settings": {"device": "cpu", "quick": False}, "works": works, "throughput": rows, **others}


ROWS = [
    rate("rl8x", "eager fp32", 300_000.0),
    rate("rl8x", "compile fp32", 420_000.0, memory=700.0),
    rate("rl8x", "compile bf16", 900_000.0),
    rate("rejax", "as it comes", 290_000.0),
    rate("rejax", "malloc", 300_000.0, memory=1500.0),
    rate("sb3", "as it comes", 200_000.0),
]


def goal(found, work, start):
    (one,) = [goal for goal in goals.goals(found) if goal.work == work and goal.wanted.startswith(start)]
    return one


def test_the_fastest_variant_counts_on_both_sides():
    assert best(ROWS, "pendulum-64", "rl8x", "fp32") == ("compile fp32", 420_000.0, 700.0)
    assert best(ROWS, "pendulum-64", "rejax") == ("malloc", 300_000.0, 1500.0)
    assert best(ROWS, "pendulum-64", "rl8") is None
    assert best(ROWS, "small", "rl8x") is None


def test_the_median_of_the_passes_counts():
    rows = [rate("rl8x", "eager fp32", value, memory=value) for value in (100.0, 900.0, 200.0)]
    assert best(rows, "pendulum-64", "rl8x") == ("eager fp32", 200.0, 900.0)


def test_ratios_to_each_library():
    lines = goals.ratio_table(result(ROWS)).splitlines()
    assert lines[0] == "| work | rl8x, fp32 / bf16 | rl8x over Stable-Baselines3 | rl8x over rejax (JAX) |"
    # 420 / 200, 900 / 200; 420 / 300, 900 / 300
    assert lines[2] == "| pendulum-64 | 420k (compile) / 900k (compile) | 2.10 / 4.50 | 1.40 / 3.00 |"


def test_memory_of_the_fastest_variants():
    lines = goals.memory_table(result(ROWS)).splitlines()
    assert lines[0] == "| work | rl8x fp32 | rl8x bf16 | Stable-Baselines3 | rejax (JAX) |"
    assert lines[2] == "| pendulum-64 | 700 | 400 | 400 | 1500 |"


def test_goals_of_ratios():
    found = result(ROWS)
    fp32 = goal(found, "pendulum-64", "fp32")
    assert fp32.wanted == "fp32 at least 1.4 times rejax (JAX)"
    assert fp32.reached == "1.40 (compile fp32 420k, malloc 300k)"
    assert fp32.met
    assert goal(found, "pendulum-64", "bf16").met
    slower = result([*ROWS[:1], *ROWS[3:]])
    assert goal(slower, "pendulum-64", "fp32").met is False
    assert goal(slower, "pendulum-64", "bf16").met is None
    assert "| cartpole-64 | fp32 at least 1.4 times rejax (JAX) |  | not measured |" in goals.goals_table(found)
    assert "| small | fp32 as fast as rejax (JAX), the aim |  | not measured |" in goals.goals_table(found)


@pytest.mark.parametrize(("memory", "met"), [(999.0, True), (1001.0, False)])
def test_goal_of_memory(memory, met):
    rows = [
        rate("rl8x", "eager fp32", 1e5, "rl8-defaults", 500.0),
        rate("rl8x", "eager bf16", 2e5, "rl8-defaults", memory),
    ]
    assert goal(result(rows), "rl8-defaults", "at most").met is met


def test_goal_of_the_share_of_the_limit():
    # 3.47 MFLOP a transition: 100k/s are 347 GFLOP/s, 58% of 600 and 50% of 700.
    rows = [rate("rl8x", "eager fp32", 1e5, "rl8-defaults")]
    for limit, told, met in ((600.0, "58%", True), (700.0, "50%", False)):
        found = result(rows, limits=[{"fp32": {"256": {"gflops": limit}}}])
        assert goal(found, "rl8-defaults", "fp32 at least 55%")[2:] == (told, met)
    assert goal(result(rows), "rl8-defaults", "fp32 at least 55%").met is None


def seeds(variant, seconds, env="cartpole"):
    return [
        {"peer": "rl8x", "variant": variant, "work": env, "run": run, "seconds": value, "reached": value < 100}
        for run, value in enumerate(seconds)
    ]


def test_goal_of_seconds_to_a_return():
    found = result([], **{"return": seeds("eager fp32", [0.5] * 10) + seeds("eager bf16", [0.7] * 10)})
    assert goal(found, "cartpole", "at most")[2:] == ("0.50 s, 10 of 10 (eager fp32)", True)
    assert goal(found, "pendulum", "at most").met is None
    missed = result([], **{"return": seeds("eager fp32", [0.5] * 9 + [120.0])})
    assert goal(missed, "cartpole", "at most")[2:] == ("0.50 s, 9 of 10 (eager fp32)", False)
    few = result([], **{"return": seeds("eager fp32", [0.5] * 3)})
    assert goal(few, "cartpole", "at most").met is False


def test_goal_of_a_long_run():
    soak = [
        {"peer": peer, "variant": variant, "last_over_first": raw, "last_over_fresh": fresh}
        for peer, variant, raw, fresh in (
            ("rl8x", "eager fp32", 1.3, 1.03),
            ("rl8x", "eager fp32", 1.04, 1.05),
            ("rl8x", "compile fp32", 1.0, 1.06),
            ("sb3", "as it comes", 2.0, 2.0),
        )
    ]
    beside_first, beside_fresh = (
        [one[2:] for one in goals.goals(result([], soak=soak)) if one.work == "a long run" and than in one.wanted]
        for than in ("than the first", "fresh process")
    )
    assert beside_first == [("+30.0%, +4.0% (eager fp32)", False), ("+0.0% (compile fp32)", True)]
    assert beside_fresh == [("+3.0%, +5.0% (eager fp32)", True), ("+6.0% (compile fp32)", False)]


def test_a_long_run_without_fresh_processes_beside_it_was_not_compared_with_them():
    soak = [{"peer": "rl8x", "variant": "eager fp32", "last_over_first": 1.0}]
    found = [one.met for one in goals.goals(result([], soak=soak)) if one.work == "a long run"]
    assert found == [True, None]


def test_variants_that_a_library_does_not_always_have_come_last():
    rows = [rate("rl8x", variant, 1.0) for variant in ("graph tf32", "compile fp32", "eager fp32")]
    assert variants_of(rows, "rl8x") == ["eager fp32", "compile fp32", "graph tf32"]


def test_a_page_without_results_says_so(tmp_path):
    page = "a\n<!-- results: cpu.json -->\nold\n<!-- end of results -->\nb\n"
    filled = report.filled(page, tmp_path)
    assert filled == "a\n<!-- results: cpu.json -->\n\nNot measured yet.\n\n<!-- end of results -->\nb\n"
    assert report.filled(filled, tmp_path) == filled


def test_goal_of_tracking():
    rows = [{"store": "sqlite", "median_ms": ms} for ms in (0.5, 0.9, 1.4)] + [{"store": "http", "median_ms": 1.1}]
    found = [one[2:] for one in goals.goals(result([], tracking=rows)) if one.work == "tracking"]
    assert found == [("0.90 ms", True), ("1.10 ms", False)]
    assert [one.met for one in goals.goals(result([])) if one.work == "tracking"] == [None, None]
