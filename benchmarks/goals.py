"""The goals of speed, beside what was reached. The standard library alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.processes import PEERS, STORES
from benchmarks.results import Row, percent, select, short
from benchmarks.speed_cells import (
    best,
    cells,
    own_precisions,
    precision_of,
    seconds_of,
    share_of_limit,
    table,
    variants_of,
)

# Work, precision of rl8x, the library it is compared with, how many times as fast it is to be. rl8x counts in its
# fastest mode, the others in their faster variant.
RATIOS = (
    ("pendulum-64", "fp32", "rejax", 1.4),
    ("pendulum-64", "bf16", "rejax", 2.5),
    ("cartpole-64", "fp32", "rejax", 1.4),
    ("cartpole-64", "bf16", "rejax", 2.5),
    ("pendulum-256", "fp32", "rejax", 1.2),
    ("pendulum-256", "bf16", "rejax", 1.8),
    ("rl8-defaults", "fp32", "rl8", 4.0),
    ("rl8-defaults", "fp32", "rejax", 1.2),
    ("rl8-defaults", "bf16", "rl8", 7.0),
    ("small", "fp32", "sb3", 8.0),
    ("small", "fp32", "rejax", 1.0),
)
MEMORY_MB = {"rl8-defaults": 1000.0}
LIMIT_SHARES = {"pendulum-256": 0.55, "rl8-defaults": 0.55}
SECONDS_TO_RETURN = {"cartpole": 0.85, "pendulum": 1.0}
SOAK_RATIO = 1.05
TRACKING_MS = 1.0
CUDA_RATIO, CUDA_RATE = 10.0, 30e6
# How many times as many transitions a second as another library a variant of rl8x is to make, with a replay.
REPLAY = {
    "dqn-64": (("compile fp32", "sb3", 11.0),),
    "dqn-256": (("compile fp32", "sb3", 3.5),),
    "sac-256": (
        ("eager fp32", "sb3", 1.4),
        ("compile fp32", "sb3", 3.0),
        ("compile bf16", "sb3", 4.0),
        ("compile fp32", "tianshou", 3.0),
    ),
}


class Goal(NamedTuple):
    """What was to be reached on a work, what was, and whether that is enough; None where it was not measured."""

    work: str
    wanted: str
    reached: str
    met: bool | None


def goals_table(result: Row) -> str:
    """Return what was to be reached beside what was."""
    words = {True: "yes", False: "no", None: "not measured"}
    lines = [[goal.work, goal.wanted, goal.reached, words[goal.met]] for goal in goals(result)]
    return table(["work", "goal", "reached", "met"], lines)


def goals(result: Row) -> Iterator[Goal]:
    """Go through the goals of a result's device."""
    rows = result.get("throughput", [])
    if result["settings"]["device"] != "cpu":
        yield _ratio_goal(rows, "rl8-defaults", None, "rl8", CUDA_RATIO)
        fastest = best(rows, "rl8-defaults", "rl8x")
        wanted = f"at least {short(CUDA_RATE)} transitions/s"
        reached = "" if fastest is None else f"{short(fastest.rate)} ({fastest.variant})"
        yield Goal("rl8-defaults", wanted, reached, None if fastest is None else fastest.rate >= CUDA_RATE)
        return
    for work, precision, peer, factor in RATIOS:
        yield _ratio_goal(rows, work, precision, peer, factor)
    for work, most in MEMORY_MB.items():
        found = [best(rows, work, "rl8x", precision) for precision in own_precisions(rows)]
        peak = max((one.most("peak_rss_mb") for one in found if one is not None), default=None)
        reached = "" if peak is None else f"{peak:.0f} MB"
        yield Goal(work, f"at most {most:.0f} MB", reached, None if peak is None else peak <= most)
    for work, least in LIMIT_SHARES.items():
        fastest = best(rows, work, "rl8x", "fp32")
        share = None if fastest is None else share_of_limit(result, fastest)
        wanted = f"fp32 at least {least:.0%} of what the matrix product allows"
        yield Goal(work, wanted, percent(share), None if share is None else share >= least)
    yield from _return_goals(result.get("return", []))
    yield from _soak_goals(result.get("soak", []))
    yield from _tracking_goals(result.get("tracking", []))


def _ratio_goal(rows: Sequence[Row], work: str, precision: str | None, peer: str, factor: float) -> Goal:
    own, other = best(rows, work, "rl8x", precision), best(rows, work, peer)
    times = "as fast as" if factor == 1.0 else f"at least {factor:g} times"
    wanted = f"{precision or 'rl8x'} {times} {PEERS[peer].title}{', the aim' if factor == 1.0 else ''}"
    if own is None or other is None:
        return Goal(work, wanted, "", None)
    ratio = own.rate / other.rate
    told = f"{ratio:.2f} ({own.variant} {short(own.rate)}, {other.variant} {short(other.rate)})"
    return Goal(work, wanted, told, ratio >= factor)


def _return_goals(rows: Sequence[Row]) -> Iterator[Goal]:
    for env, most in SECONDS_TO_RETURN.items():
        wanted = f"at most {most:g} s of training to the return, every seed of 10"
        tried = [(*seconds_of(cell), cell) for cell in cells(rows, "rl8x", work=env) if cell.rows]
        if not tried:
            yield Goal(env, wanted, "", None)
            continue
        middle, reached, cell = min(tried, key=lambda one: one[0])
        told = "-" if middle == float("inf") else f"{middle:.2f} s"
        count = len(cell.rows)
        met = middle <= most and len(reached) == count and count >= 10
        yield Goal(env, wanted, f"{told}, {len(reached)} of {count} ({cell.variant})", met)


def _soak_goals(rows: Sequence[Row]) -> Iterator[Goal]:
    """Compare both ratios of a long run with what they may be; of several runs the worst counts."""
    for name, than in (("last_over_first", "the first"), ("last_over_fresh", "those of a fresh process then")):
        wanted = f"the last hundred iterations take at most {SOAK_RATIO - 1:.0%} longer than {than}, in every run"
        measured = [
            (variant, select(rows, name, peer="rl8x", variant=variant)) for variant in variants_of(rows, "rl8x")
        ]
        for variant, ratios in measured:
            if ratios:
                told = ", ".join(f"{ratio - 1:+.1%}" for ratio in ratios)
                yield Goal("a long run", wanted, f"{told} ({variant})", max(ratios) <= SOAK_RATIO)
        if not any(ratios for _, ratios in measured):
            yield Goal("a long run", wanted, "", None)


def _tracking_goals(rows: Sequence[Row]) -> Iterator[Goal]:
    for store in STORES:
        wanted = f"logging a row to {store} takes less than {TRACKING_MS:g} ms of the training thread"
        found = select(rows, "median_ms", store=store)
        reached = statistics.median(found) if found else None
        told = "" if reached is None else f"{reached:.2f} ms"
        yield Goal("tracking", wanted, told, None if reached is None else reached < TRACKING_MS)


def replay_goals_table(result: Row, name: str) -> str:
    """Return how many times as many transitions a second rl8x made as other libraries, beside what is wanted.

    And beside the most that could be reached, if there were nothing but the products of the updates.
    """
    found = {(cell.peer, cell.variant): cell for cell in cells(result["rows"], work=name) if cell.rates}
    updates, lines = result["works"][name]["updates_per_sample"], []
    for variant, peer, goal in REPLAY[name]:
        own, other = found.get(("rl8x", variant)), found.get((peer, "as it comes"))
        if own and other:
            limit = result["products"][name][precision_of(variant)]
            most = "" if limit is None else f"{limit / updates / other.rate:.1f}"
            lines.append([variant, PEERS[peer].title, f"{own.rate / other.rate:.1f}", f"{goal:g}", most])
    return table(["rl8x", "beside", "times", "wanted", "at most, by the products"], lines)
