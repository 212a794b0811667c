"""Tables of what `speed.py` measured: cells, the fastest of them, shares of the machine's limits."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.processes import PEERS
from benchmarks.results import Row, names, select, short, table

PRECISIONS = ("fp32", "tf32", "bf16")


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

    @property
    def precision(self) -> str:
        """The precision that the variant multiplies in."""
        return next((precision for precision in PRECISIONS if precision in self.variant), "fp32")

    def most(self, key: str) -> float:
        """Return the largest of a value; NaN where it was not measured."""
        return max(select(self.rows, key), default=float("nan"))


def cells(rows: Sequence[Row], **tags: Any) -> list[Cell]:
    """Return the cells of the rows with these tags: works as they came, libraries as in `PEERS`, then precisions."""
    found: dict[tuple[Any, str, str], list[Row]] = {}
    for row in rows:
        if row.items() >= tags.items():
            found.setdefault((row["work"], row["peer"], row["variant"]), []).append(row)
    made = [Cell(*key, select(mine, "transitions_per_s"), mine) for key, mine in found.items()]
    works, peers = names(rows, "work"), [*PEERS]

    def place(cell: Cell) -> tuple[int, ...]:
        return works.index(cell.work), peers.index(cell.peer), PRECISIONS.index(cell.precision)

    return sorted(made, key=place)


def over_works(rows: Sequence[Row]) -> list[dict[Any, Cell]]:
    """Return the cells of each library and variant, by their work."""
    found: dict[tuple[str, str], dict[Any, Cell]] = {}
    for cell in cells(rows):
        found.setdefault((cell.peer, cell.variant), {})[cell.work] = cell
    return sorted(found.values(), key=lambda mine: [*PEERS].index(next(iter(mine.values())).peer))


def others(rows: Sequence[Row]) -> list[str]:
    """Return the libraries beside rl8x."""
    return [peer for peer in PEERS if peer in names(rows, "peer") and peer != "rl8x"]


def best(rows: Sequence[Row], work: str, peer: str, precision: str | None = None) -> Cell | None:
    """Find the fastest variant of a library on a work, in a precision or in any; None where nothing was measured."""
    found = [cell for cell in cells(rows, peer=peer, work=work) if precision in (None, cell.precision)]
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


def shares(result: Row, cell: Cell) -> list[str]:
    """Write the shares that a rate is of what the matrix product, and what moving the activations, allow.

    A share whose limit was not measured is empty.
    """
    about, size = result["works"][cell.work], 2 if cell.precision == "bf16" else 4
    product = best_limits(result).get(cell.precision, {}).get(str(about["hidden"]))
    needs = ((about["flops"], product), (about.get("activations", 0) * size, best_bandwidth(result)))
    return [f"{cell.rate * need / limit / 1e9:.0%}" if need and limit else "" for need, limit in needs]


def seconds_of(cell: Cell) -> tuple[float, list[float]]:
    """Return median seconds to a return, a seed that failed being slower than any, and those of the other seeds."""
    seconds = select(cell.rows, "seconds", reached=True)
    tries = [*seconds, *[float("inf")] * (len(cell.rows) - len(seconds))]
    return statistics.median(tries) if tries else float("nan"), seconds


def render(result: Row) -> str:
    """Return every table that a result has, as Markdown."""
    lay_out = starting_parts if "starting" in result else replay_parts if "products" in result else speed_parts
    is_quick = ["**A quick run: tiny sizes, the rates mean nothing.**"] * result["settings"]["quick"]
    return "\n\n".join([*is_quick, *lay_out(result)]) + "\n"


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
    lines, versions = [f"{gpu}{machine['cpu']}, {about}; {run}."], {}
    for row in [row for group in ("throughput", "return", "scaling", "soak") for row in result.get(group, [])]:
        if "version" in row:
            packages = [
                f"{name} {row['packages'][name]}" for name in ("torch", "jax", "gymnax") if name in row["packages"]
            ]
            versions[row["peer"]] = f"{row['library']} {row['version']} ({', '.join(packages)})"
    if versions:
        lines.append("Versions: " + "; ".join(versions[peer] for peer in PEERS if peer in versions) + ".")
    if limits := best_limits(result):
        told = [f"{kind} {w}x{w}: {limit:.0f}" for kind, widths in limits.items() for w, limit in widths.items()]
        lines.append("Fastest matrix product, GFLOP/s: " + ", ".join(told) + ".")
        lines.append(f"Fastest copy of memory, bytes read and written: {best_bandwidth(result):.0f} GB/s.")
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
        own = [cell for cell in cells(rows, peer="rl8x", work=work) if cell.precision == "fp32"]
        found = [*own, *(best(rows, work, peer) for peer in others(rows))]
        lines.append([f"{shape['env']}, {sizes}", *map(shown, found)])
    titles = [f"rl8x {cell.variant.split()[0]}" for cell in own] + [PEERS[peer].title for peer in others(rows)]
    return table(["transitions/s: task, copies x steps, network, minibatches", *titles], lines)


def ratio_table(rows: Sequence[Row]) -> str:
    """Return how many times as fast rl8x is as each other library, in each precision, the fastest variant of each."""
    tried, lines = {cell.precision for cell in cells(rows, peer="rl8x")}, []
    precisions = [precision for precision in PRECISIONS if precision in tried]
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
    mine = cells(result["throughput"], work=work)
    on_device = any("peak_device_mb" in row for cell in mine for row in cell.rows)
    header = ["library", "variant", "transitions/s", "range", "first iteration, s", "peak memory, MB"]
    header += ["share of the limit", *(["share of memory's", "peak device memory, MB"] if on_device else [])]
    lines = []
    for cell in mine:
        line = [*cell.names, "failed", *[""] * (len(header) - 3)]
        if cell.rates:
            first = statistics.median(select(cell.rows, "first_iteration_s"))
            line = [*cell.names, shown(cell), cell.spread, f"{first:.2f}", f"{cell.most('peak_rss_mb'):.0f}"]
            line += [*shares(result, cell), f"{cell.most('peak_device_mb'):.0f}"][: 3 if on_device else 1]
        lines.append(line)
    return table(header, lines)


def return_table(rows: Sequence[Row]) -> str:
    """Return a row for each library and variant: median seconds, range, how many seeds reached it."""
    works, lines = names(rows, "work"), []
    for mine in over_works(rows):
        line = next(iter(mine.values())).names
        for cell in map(mine.get, works):
            middle, seconds = (float("inf"), []) if cell is None else seconds_of(cell)
            line += [f"{middle:.2f}" if middle < float("inf") else "-"]
            line += [f"{min(seconds):.2f} - {max(seconds):.2f}" if seconds else ""]
            line += ["" if cell is None else f"{len(seconds)} of {len(cell.rows)}"]
        lines.append(line)
    header = [column for work in works for column in (f"{work}, s", "range", "seeds that reached it")]
    return table(["library", "variant", *header], lines)


def scaling_table(rows: Sequence[Row]) -> str:
    """Return a row for each library and variant: transitions a second at each number of environments."""
    counts, lines = names(rows, "work"), []
    for mine in over_works(rows):
        first, last = mine.get(counts[0]), mine.get(counts[-1])
        ratio = f"{last.rate / first.rate:.2f}" if first and last and first.rates and last.rates else ""
        memory = shown(last, lambda cell: f"{cell.most('peak_rss_mb'):.0f}")
        lines.append([*next(iter(mine.values())).names, *map(shown, map(mine.get, counts)), ratio, memory])
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
    compared = "last hundred / first hundred | last hundred / fresh processes then"
    return table(f"library | variant | iterations | {compared} | MB after the first | MB after the last", lines)


def tracking_table(rows: Sequence[Row]) -> str:
    """Return a row for each process: the store, and milliseconds a row of metrics."""
    columns = ("metrics", "steps", "first_ms", "median_ms", "p99_ms", "max_ms")
    lines = [[row["store"], *(str(row[name]) for name in columns)] for row in rows if "median_ms" in row]
    milliseconds = "the first row, ms | median, ms | 99th percentile | longest"
    return table(f"MLflow's store | metrics a row | rows | {milliseconds}", lines)


def replay_parts(result: Row) -> list[str]:
    """Return what a result of algorithms with a replay has."""
    settings, rows = result["settings"], result["rows"]
    parts = [f"{result['machine']['cpu']}, {settings['threads']} threads, {result['date']}."]
    for name in names(rows, "work"):
        parts += [f"### {name}", replay_table(result, name)]
    return parts


def replay_table(result: Row, name: str) -> str:
    """Return a row for each library and variant: transitions/s, updates/s, and the share of the products' rate."""
    lines = []
    for cell in cells(result["rows"], work=name):
        line = [*cell.names, "failed", "", "", ""]
        if cell.rates:
            updates = cell.rate * result["works"][name]["updates_per_sample"]
            limit = result["products"][name][cell.precision]
            share = "" if limit is None else f"{updates / limit:.0%} of {short(limit)}"
            line = [*cell.names, shown(cell), cell.spread, short(updates), share]
        lines.append(line)
    return table("library | variant | transitions/s | range | updates/s | of the products' rate", lines)


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
