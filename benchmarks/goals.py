"""Compare rl8x with other libraries on each workload, and check the performance goals."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.processes import PEERS, STORES
from benchmarks.tables import (
    PRECISIONS,
    Row,
    best,
    names,
    ordered,
    percent,
    precision_of,
    select,
    share_of_limit,
    short,
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


class Goal(NamedTuple):
    """What was to be reached on a work, what was, and whether that is enough; None where it was not measured."""

    work: str
    wanted: str
    reached: str
    met: bool | None


def ratio_table(result: Row) -> str:
    """Return how many times as fast rl8x is as each other library, in each precision, the fastest variant of each."""
    rows = result["throughput"]
    precisions = own_precisions(rows)
    others = [peer for peer in ordered(names(rows, "peer")) if peer != "rl8x"]
    lines = []
    for work in names(rows, "work"):
        own = [best(rows, work, "rl8x", precision) for precision in precisions]
        cells = [" / ".join("-" if one is None else f"{short(one.rate)} ({one.variant.split()[0]})" for one in own)]
        for peer in others:
            other = best(rows, work, peer)
            told = ["-" if one is None or other is None else f"{one.rate / other.rate:.2f}" for one in own]
            cells.append(" / ".join(told))
        lines.append([work, *cells])
    kinds = " / ".join(precisions)
    return table(["work", f"rl8x, {kinds}", *(f"rl8x over {PEERS[peer].title}" for peer in others)], lines)


def memory_table(result: Row) -> str:
    """Return the peak memory of each library's fastest variant on each work, in MB."""
    rows = result["throughput"]
    precisions, peers = own_precisions(rows), ordered(names(rows, "peer"))
    columns = [("rl8x", precision) for precision in precisions] + [(peer, None) for peer in peers if peer != "rl8x"]
    lines = []
    for work in names(rows, "work"):
        found = [best(rows, work, peer, precision) for peer, precision in columns]
        lines.append([work, *("-" if one is None else f"{one.memory_mb:.0f}" for one in found)])
    header = [PEERS[peer].title + (f" {precision}" if precision else "") for peer, precision in columns]
    return table(["work", *header], lines)


def own_precisions(rows: Sequence[Row]) -> list[str]:
    """Return the precisions in which rl8x was tried."""
    tried = {precision_of(variant) for variant in variants_of(rows, "rl8x")}
    return [precision for precision in PRECISIONS if precision in tried]


def goals_table(result: Row) -> str:
    """Return what was to be reached beside what was."""
    words = {True: "yes", False: "no", None: "not measured"}
    return table(
        ["work", "goal", "reached", "met"],
        [[goal.work, goal.wanted, goal.reached, words[goal.met]] for goal in goals(result)],
    )


def goals(result: Row) -> Iterator[Goal]:
    """Go through the goals of a result's device."""
    if result["settings"]["device"] != "cpu":
        yield from _cuda_goals(result)
        return
    rows = result.get("throughput", [])
    for work, precision, peer, factor in RATIOS:
        yield _ratio_goal(rows, work, precision, peer, factor)
    for work, most in MEMORY_MB.items():
        found = [best(rows, work, "rl8x", precision) for precision in own_precisions(rows)]
        peak = max((one.memory_mb for one in found if one is not None), default=None)
        reached = "" if peak is None else f"{peak:.0f} MB"
        yield Goal(work, f"at most {most:.0f} MB", reached, None if peak is None else peak <= most)
    for work, least in LIMIT_SHARES.items():
        fastest = best(rows, work, "rl8x", "fp32")
        share = None if fastest is None else share_of_limit(result, work, fastest.rate, "fp32")
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
        tried = [(*_to_return(rows, env, variant), variant) for variant in variants_of(rows, "rl8x")]
        tried = [one for one in tried if one[1]]
        if not tried:
            yield Goal(env, wanted, "", None)
            continue
        seconds, count, successes, variant = min(tried)
        told = "-" if seconds == float("inf") else f"{seconds:.2f} s"
        met = seconds <= most and successes == count and count >= 10
        yield Goal(env, wanted, f"{told}, {successes} of {count} ({variant})", met)


def _to_return(rows: Sequence[Row], env: str, variant: str) -> tuple[float, int, int]:
    """Return the median seconds of rl8x, a seed that failed being slower than any, seeds, and seeds that reached it."""
    tags = {"peer": "rl8x", "variant": variant, "work": env}
    count, seconds = len(select(rows, "run", **tags)), select(rows, "seconds", **tags, reached=True)
    if not count:
        return float("inf"), 0, 0
    return statistics.median([*seconds, *[float("inf")] * (count - len(seconds))]), count, len(seconds)


def _soak_goals(rows: Sequence[Row]) -> Iterator[Goal]:
    """Compare both ratios of a long run with what they may be; of several runs the worst counts."""
    for name, than in (("last_over_first", "the first"), ("last_over_fresh", "those of a fresh process then")):
        wanted = f"the last hundred iterations take at most {SOAK_RATIO - 1:.0%} longer than {than}, in every run"
        measured = False
        for variant in variants_of(rows, "rl8x"):
            ratios = select(rows, name, peer="rl8x", variant=variant)
            if ratios:
                measured = True
                told = ", ".join(f"{ratio - 1:+.1%}" for ratio in ratios)
                yield Goal("a long run", wanted, f"{told} ({variant})", max(ratios) <= SOAK_RATIO)
        if not measured:
            yield Goal("a long run", wanted, "", None)


def _tracking_goals(rows: Sequence[Row]) -> Iterator[Goal]:
    for store in STORES:
        wanted = f"logging a row to {store} takes less than {TRACKING_MS:g} ms of the training thread"
        found = select(rows, "median_ms", store=store)
        reached = statistics.median(found) if found else None
        told = "" if reached is None else f"{reached:.2f} ms"
        yield Goal("tracking", wanted, told, None if reached is None else reached < TRACKING_MS)


def _cuda_goals(result: Row) -> Iterator[Goal]:
    rows = result.get("throughput", [])
    yield _ratio_goal(rows, "rl8-defaults", None, "rl8", CUDA_RATIO)
    fastest = best(rows, "rl8-defaults", "rl8x")
    wanted = f"at least {short(CUDA_RATE)} transitions/s"
    reached = "" if fastest is None else f"{short(fastest.rate)} ({fastest.variant})"
    yield Goal("rl8-defaults", wanted, reached, None if fastest is None else fastest.rate >= CUDA_RATE)
