"""Tables of what `speed.py` measured: cells, the fastest of them, shares of the machine's limits."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks import results
from benchmarks.processes import PEERS
from benchmarks.results import Row, names, percent, select, short

PRECISIONS = ("fp32", "tf32", "bf16")
table = functools.partial(results.table, rule="| --- ")


class Cell(NamedTuple):
    """What was measured of a work by a variant of a library, over its processes."""

    work: Any
    peer: str
    variant: str
    rates: list[float]
    rows: list[Row]

    @property
    def rate(self) -> float:
        """The median of transitions a second."""
        return statistics.median(self.rates)

    @property
    def names(self) -> list[str]:
        """Library and variant, as tables begin."""
        return [PEERS[self.peer].title, self.variant]

    @property
    def spread(self) -> str:
        """The range of transitions a second."""
        return f"{short(min(self.rates))} - {short(max(self.rates))}"

    def most(self, key: str) -> float:
        """Return the largest of a value; NaN where it was not measured."""
        return max(select(self.rows, key), default=float("nan"))


def ordered(peers: Iterable[str]) -> list[str]:
    """Return peers in the order of the tables."""
    return [peer for peer in PEERS if peer in set(peers)]


def tried_variants(rows: Sequence[Row], peer: str) -> list[str]:
    """Return the variants of a peer that were tried: those that it always has, then others as they came."""
    tried = names(rows, "variant", peer=peer)
    known = [variant for variant in PEERS[peer].variants if variant in tried]
    return known + [variant for variant in tried if variant not in known]


def cells(rows: Sequence[Row], *peers: str, work: Any = None) -> list[Cell]:
    """Return the cells of rows, of all peers and works or of some, in the order of the tables."""
    return [
        Cell(each, peer, variant, select(mine, "transitions_per_s"), mine)
        for each in (names(rows, "work") if work is None else [work])
        for peer in peers or ordered(names(rows, "peer"))
        for variant in tried_variants(rows, peer)
        for mine in [[row for row in rows if (row["work"], row["peer"], row["variant"]) == (each, peer, variant)]]
    ]


def precision_of(variant: str) -> str:
    """Return the precision that a variant multiplies in."""
    return next((precision for precision in PRECISIONS if precision in variant), "fp32")


def own_precisions(rows: Sequence[Row]) -> list[str]:
    """Return the precisions in which rl8x was tried."""
    tried = {precision_of(variant) for variant in tried_variants(rows, "rl8x")}
    return [precision for precision in PRECISIONS if precision in tried]


def others(rows: Sequence[Row]) -> list[str]:
    """Return the libraries beside rl8x."""
    return [peer for peer in ordered(names(rows, "peer")) if peer != "rl8x"]


def best(rows: Sequence[Row], work: str, peer: str, precision: str | None = None) -> Cell | None:
    """Find the fastest variant of a library on a work, in a precision or in any; None where nothing was measured."""
    found = [cell for cell in cells(rows, peer, work=work) if precision in (None, precision_of(cell.variant))]
    return max((cell for cell in found if cell.rates), key=lambda cell: cell.rate, default=None)


def shown(cell: Cell | None, told: Callable[[Cell], str] = lambda cell: short(cell.rate)) -> str:
    """Write a cell's rate, or what else is told of it; a dash where nothing was measured."""
    return "-" if cell is None or not cell.rates else told(cell)


def best_limits(result: Row) -> dict[str, dict[str, float]]:
    """Return the highest GFLOP/s that was seen, by precision and width."""
    highest: dict[str, dict[str, float]] = {}
    for row in result.get("limits", []):
        for precision in PRECISIONS:
            for width, limit in row.get(precision, {}).items():
                known = highest.setdefault(precision, {})
                known[width] = max(known.get(width, 0.0), limit["gflops"])
    return highest


def best_bandwidth(result: Row) -> float | None:
    """Return the highest GB/s of memory that was seen; None where it was not measured."""
    return max(select(result.get("limits", []), "bytes_gb_per_s"), default=None)


def share_of_limit(result: Row, cell: Cell) -> float | None:
    """Return the share that a rate is of what the matrix product allows; None where that was not measured."""
    about = result["works"][cell.work]
    limit = best_limits(result).get(precision_of(cell.variant), {}).get(str(about["hidden"]))
    return None if not limit else cell.rate * about["flops"] / limit / 1e9


def share_of_memory(result: Row, cell: Cell) -> float | None:
    """Return the share that a rate is of what moving the activations allows; None where that was not measured."""
    bandwidth, numbers = best_bandwidth(result), result["works"][cell.work].get("activations")
    if bandwidth is None or numbers is None:
        return None
    return cell.rate * float(numbers) * (2 if precision_of(cell.variant) == "bf16" else 4) / bandwidth / 1e9


def seconds_of(cell: Cell) -> tuple[float, list[float]]:
    """Return median seconds to a return, a seed that failed being slower than any, and those of the other seeds."""
    seconds = select(cell.rows, "seconds", reached=True)
    tries = [*seconds, *[float("inf")] * (len(cell.rows) - len(seconds))]
    return statistics.median(tries) if tries else float("nan"), seconds


def render(result: Row) -> str:
    """Return every table that a result has, as Markdown."""
    if "starting" in result:
        parts = starting_parts(result)
    elif "products" in result:
        parts = replay_parts(result)
    else:
        parts = speed_parts(result)
    return "\n\n".join(parts) + "\n"


def speed_parts(result: Row) -> list[str]:
    """Return what a result of throughput and others has: titles, paragraphs and tables."""
    parts, rows = [describe(result)], result.get("throughput", [])
    if result.get("checks"):
        parts += ["### Checks before the measurement", checks_table(result["checks"])]
    if rows:
        parts += ["### rl8x over the others", ratio_table(rows)]
        for work in names(rows, "work"):
            parts += [f"#### {work}", describe_work(result["works"][work]), work_table(result, work)]
    for group, title, lay_out in (
        ("return", "Seconds of training to a return", return_table),
        ("scaling", "Cost over the number of environments", scaling_table),
        ("soak", "A long run", soak_table),
        ("tracking", "What logging a row takes of rl8x's training thread", tracking_table),
    ):
        if result.get(group):
            parts += [f"### {title}", lay_out(result[group])]
    return parts


def describe(result: Row) -> str:
    """Say where and with what a result was measured."""
    machine, settings = result["machine"], result["settings"]
    gpu = f"{machine['gpu']}; " if "gpu" in machine else ""
    about = f"{machine['cores']} cores, {machine['memory_gb']:.0f} GB, {machine['system']}, Python {machine['python']}"
    run = f"{settings['threads']} threads, device {settings['device']}, {result['date']}"
    lines = [f"{gpu}{machine['cpu']}, {about}; {run}."]
    if settings["quick"]:
        lines.append("**A quick run: tiny sizes, the rates mean nothing.**")
    versions = {}
    for group in ("throughput", "return", "scaling", "soak"):
        for row in result.get(group, []):
            if "version" in row:
                told = [
                    f"{name} {row['packages'][name]}" for name in ("torch", "jax", "gymnax") if name in row["packages"]
                ]
                versions[row["peer"]] = f"{row['library']} {row['version']} ({', '.join(told)})"
    if versions:
        lines.append("Versions: " + "; ".join(versions[peer] for peer in ordered(versions)) + ".")
    limits = best_limits(result)
    if limits:
        told = [f"{kind} {w}x{w}: {limit:.0f}" for kind, widths in limits.items() for w, limit in widths.items()]
        lines.append("Fastest matrix product, GFLOP/s: " + ", ".join(told) + ".")
        bandwidth = best_bandwidth(result)
        if bandwidth is not None:
            lines.append(f"Fastest copy of memory, bytes read and written: {bandwidth:.0f} GB/s.")
    if result.get("left_out"):
        lines.append("Left out for lack of time: " + ", ".join(result["left_out"]) + ".")
    return "\n".join(lines)


def describe_work(work: Row) -> str:
    """Say what an iteration of a work is."""
    return (
        f"{work['env']}, {work['num_envs']} x {work['horizon']} transitions, 2 x {work['hidden']} units, "
        f"{work['minibatches']} minibatches, {work['passes']} passes; {work['flops'] / 1e6:.2f} MFLOP a transition."
    )


def checks_table(checks: Sequence[Row]) -> str:
    """Return a row for each check: what, on what, whether it held, and what was seen."""
    words = {True: "yes", False: "**no**", None: "not possible here"}
    lines = [[check["name"], check["case"], words[check["passed"]], check["told"]] for check in checks]
    return table(["check", "case", "held", "seen"], lines)


def short_table(result: Row) -> str:
    """Return a row for each work, for the README: each library's fastest variant in fp32, rl8x's by mode."""
    rows, lines = result["throughput"], []
    for work in names(rows, "work"):
        shape = result["works"][work]
        sizes = f"{shape['num_envs']} x {shape['horizon']}, {shape['hidden']} x 2, {shape['minibatches']}"
        own = [cell for cell in cells(rows, "rl8x", work=work) if precision_of(cell.variant) == "fp32"]
        found = [*own, *(best(rows, work, peer) for peer in others(rows))]
        lines.append([f"{shape['env']}, {sizes}", *map(shown, found)])
    modes = [variant for variant in tried_variants(rows, "rl8x") if precision_of(variant) == "fp32"]
    titles = [f"rl8x {mode.split()[0]}" for mode in modes] + [PEERS[peer].title for peer in others(rows)]
    return table(["transitions/s: task, copies x steps, network, minibatches", *titles], lines)


def ratio_table(rows: Sequence[Row]) -> str:
    """Return how many times as fast rl8x is as each other library, in each precision, the fastest variant of each."""
    precisions, lines = own_precisions(rows), []
    for work in names(rows, "work"):
        own = [best(rows, work, "rl8x", precision) for precision in precisions]
        line = [[shown(one, lambda cell: f"{short(cell.rate)} ({cell.variant.split()[0]})") for one in own]]
        for peer in others(rows):
            other = best(rows, work, peer)
            line.append(["-" if one is None or other is None else f"{one.rate / other.rate:.2f}" for one in own])
        lines.append([work, *map(" / ".join, line)])
    kinds = " / ".join(precisions)
    return table(["work", f"rl8x, {kinds}", *(f"rl8x over {PEERS[peer].title}" for peer in others(rows))], lines)


def work_table(result: Row, work: str) -> str:
    """Return a row for each library and variant: rate, range, first iteration, memory, share of the limits."""
    mine = [cell for cell in cells(result["throughput"], work=work) if cell.rows]
    on_device = any("peak_device_mb" in row for cell in mine for row in cell.rows)
    header = ["library", "variant", "transitions/s", "range", "first iteration, s", "peak memory, MB"]
    header += ["share of the limit", *(["share of memory's", "peak device memory, MB"] if on_device else [])]
    lines = []
    for cell in mine:
        line = [*cell.names, "failed", *[""] * (len(header) - 3)]
        if cell.rates:
            first = statistics.median(select(cell.rows, "first_iteration_s"))
            line = [*cell.names, shown(cell), cell.spread, f"{first:.2f}", f"{cell.most('peak_rss_mb'):.0f}"]
            line += [percent(share_of_limit(result, cell))]
            if on_device:
                line += [percent(share_of_memory(result, cell)), f"{cell.most('peak_device_mb'):.0f}"]
        lines.append(line)
    return table(header, lines)


def return_table(rows: Sequence[Row]) -> str:
    """Return a row for each library and variant: median seconds, range, how many seeds reached it."""
    works, lines = names(rows, "work"), []
    for cell in cells(rows, work=works[0]):
        line = cell.names
        for work in works:
            mine = next(each for each in cells(rows, cell.peer, work=work) if each.variant == cell.variant)
            middle, seconds = seconds_of(mine)
            line.append(f"{middle:.2f}" if middle < float("inf") else "-")
            line.append(f"{min(seconds):.2f} - {max(seconds):.2f}" if seconds else "")
            line.append(f"{len(seconds)} of {len(mine.rows)}" if mine.rows else "")
        lines.append(line)
    header = [column for work in works for column in (f"{work}, s", "range", "seeds that reached it")]
    return table(["library", "variant", *header], lines)


def scaling_table(rows: Sequence[Row]) -> str:
    """Return a row for each library and variant: transitions a second at each number of environments."""
    counts, lines = names(rows, "work"), []
    for first, *between, last in zip(*(cells(rows, work=count) for count in counts), strict=True):
        if first.rates or last.rates:
            ratio = f"{last.rate / first.rate:.2f}" if first.rates and last.rates else ""
            memory = f"{last.most('peak_rss_mb'):.0f}" if last.rates else ""
            lines.append([*first.names, *map(shown, (first, *between, last)), ratio, memory])
    ends = [f"{counts[-1]:,} over {counts[0]:,}", f"peak MB at {counts[-1]:,}"]
    return table(["library", "variant", *(f"{count:,}" for count in counts), *ends], lines)


def soak_table(rows: Sequence[Row]) -> str:
    """Return a row for each library and variant: how the end of a long run compares with its start."""
    lines = []
    for row in rows:
        if "transitions_per_s" in row:
            ratios = [f"{row[name]:.3f}" if name in row else "" for name in ("last_over_first", "last_over_fresh")]
            memory = [f"{resident:.0f}" for resident in row["resident_mb"]]
            lines.append([PEERS[row["peer"]].title, row["variant"], str(row["iterations"]), *ratios, *memory])
    header = "library | variant | iterations | last hundred / first hundred | last hundred / fresh processes then"
    return table([*header.split(" | "), "MB after the first", "MB after the last"], lines)


def tracking_table(rows: Sequence[Row]) -> str:
    """Return a row for each process: the store, and milliseconds a row of metrics."""
    columns = ("metrics", "steps", "first_ms", "median_ms", "p99_ms", "max_ms")
    header = "MLflow's store | metrics a row | rows | the first row, ms | median, ms | 99th percentile | longest"
    lines = [[row["store"], *(str(row[name]) for name in columns)] for row in rows if "median_ms" in row]
    return table(header.split(" | "), lines)


# -- results of their own


def replay_parts(result: Row) -> list[str]:
    """Return what a result of algorithms with a replay has."""
    settings = result["settings"]
    parts = [f"{result['machine']['cpu']}, {settings['threads']} threads, {result['date']}."]
    if settings["quick"]:
        parts.append("**A quick run: tiny sizes, the rates mean nothing.**")
    for name in names(result["rows"], "work"):
        parts += [f"### {name}", replay_table(result, name)]
    return parts


def replay_table(result: Row, name: str) -> str:
    """Return a row for each library and variant: transitions/s, updates/s, and the share of the products' rate."""
    lines = []
    for cell in cells(result["rows"], work=name):
        if not cell.rows:
            continue
        line = [*cell.names, "failed", "", "", ""]
        if cell.rates:
            updates = cell.rate * result["works"][name]["updates_per_sample"]
            limit = result["products"][name][precision_of(cell.variant)]
            share = "" if limit is None else f"{updates / limit:.0%} of {short(limit)}"
            line = [*cell.names, shown(cell), cell.spread, short(updates), share]
        lines.append(line)
    return table(["library", "variant", "transitions/s", "range", "updates/s", "of the products' rate"], lines)


def starting_parts(result: Row) -> list[str]:
    """Return what a result of how soon a run is fast has."""
    machine, settings, commands = result["machine"], result["settings"], result["commands"]
    rows = {(row["work"], row["case"]): row for row in result["rows"]}
    cases, lines = names(result["rows"], "case"), []
    for work, count in result["starting"].items():
        line = [f"{work}: {count / 1e6:g}M"]
        for case in cases:
            row = rows.get((work, case), {})
            seconds = row.get("seconds_to_all")
            line.append("-" if seconds is None else f"{seconds:.0f} ({row['first_iteration_s']:.1f})")
        lines.append(line)
    returns = ", ".join(
        f"{row['case']} {' / '.join(f'{seconds:.1f}' for seconds in row['seconds'])} s" for row in result["to_return"]
    )
    threads = f"{settings['threads']} threads, {result['date']}"
    return [
        f"{machine['cpu']}, {machine['cores']} cores, torch {result['torch']}; {threads}.",
        "Seconds of training to so many transitions; in brackets those of the first iteration.",
        table(["transitions", *cases], lines),
        f"Importing Trainer and PPOConfig after torch: {commands['import_s']:.2f} s. "
        "`rl8x train CartPole --preset rl8 --max-steps 1`, 262,144 transitions: "
        f"{commands['train_one_step_s']:.1f} s. CartPole to a return of 475, by seed: {returns}.",
    ]
