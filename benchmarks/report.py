"""Tables from the JSON of a measurement; `docs/benchmarks.md` is what these functions make of `benchmarks/results/`."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks import replay, starting
from benchmarks.goals import goals_table, memory_table, ratio_table
from benchmarks.processes import PEERS
from benchmarks.tables import (
    Row,
    best,
    best_bandwidth,
    best_limits,
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

README_SECTION = re.compile(r"(<!-- speed -->\n).*?(<!-- /speed -->)", re.DOTALL)
# A section of the page that a file of results fills.
SECTION = re.compile(r"(<!-- results: (?P<file>[\w.-]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def render(result: Row) -> str:
    """Return every table that a result has, as markdown."""
    if "starting" in result:
        return starting.render(result)
    if "products" in result:
        return replay.render(result)
    parts = [describe(result)]
    if result.get("checks"):
        parts += ["### Checks before the measurement", checks_table(result["checks"])]
    if not result["settings"]["quick"]:
        parts += ["### Goals", goals_table(result)]
    if result.get("throughput"):
        parts += ["### Transitions a second", summary_table(result)]
        parts += ["### rl8x over the others", ratio_table(result)]
        parts += ["### Peak memory of a process, MB", memory_table(result)]
        for work in names(result["throughput"], "work"):
            parts += [f"#### {work}", describe_work(result["works"][work]), work_table(result, work)]
    if result.get("return"):
        parts += ["### Seconds of training to a return", return_table(result["return"])]
    if result.get("scaling"):
        parts += ["### Cost over the number of environments", scaling_table(result["scaling"])]
    if result.get("soak"):
        parts += ["### A long run", soak_table(result["soak"])]
    if result.get("tracking"):
        parts += ["### What logging a row takes of rl8x's training thread", tracking_table(result["tracking"])]
    return "\n\n".join(parts) + "\n"


def describe(result: Row) -> str:
    """Say where and with what a result was measured."""
    machine, settings = result["machine"], result["settings"]
    lines = [
        (f"{machine['gpu']}; " if "gpu" in machine else "")
        + f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']:.0f} GB, {machine['system']}, "
        f"Python {machine['python']}; "
        f"{settings['threads']} threads, device {settings['device']}, {result['date']}."
    ]
    if settings["quick"]:
        lines.append("**A quick run: tiny sizes, the rates mean nothing.**")
    versions = {}
    for group in ("throughput", "return", "scaling", "soak"):
        for row in result.get(group, []):
            if "version" in row:
                packages = {
                    name: version for name, version in row["packages"].items() if name in ("torch", "jax", "gymnax")
                }
                told = ", ".join(f"{name} {version}" for name, version in packages.items())
                versions[row["peer"]] = f"{row['library']} {row['version']} ({told})"
    if versions:
        lines.append("Versions: " + "; ".join(versions[peer] for peer in ordered(versions)) + ".")
    if best_limits(result.get("limits", [])):
        told = []
        for precision, widths in best_limits(result["limits"]).items():
            for width, limit in widths.items():
                told.append(f"{precision} {width}x{width}: {limit:.0f}")
        lines.append("Fastest matrix product, GFLOP/s: " + ", ".join(told) + ".")
        bandwidth = best_bandwidth(result["limits"])
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
    return table(
        ["check", "case", "held", "seen"],
        [[check["name"], check["case"], words[check["passed"]], check["told"]] for check in checks],
    )


def summary_table(result: Row) -> str:
    """Return a row for each work: rl8x in each mode, the others as they come and with malloc's settings."""
    rows = result["throughput"]
    columns = [(peer, variants_of(rows, peer)) for peer in ordered(names(rows, "peer"))]
    header = ["work", *(f"{PEERS[peer].title} ({' / '.join(variants)})" for peer, variants in columns)]
    lines = []
    for work in names(rows, "work"):
        cells = []
        for peer, variants in columns:
            rates = [select(rows, "transitions_per_s", work=work, peer=peer, variant=variant) for variant in variants]
            cells.append(" / ".join(short(statistics.median(rate)) if rate else "-" for rate in rates))
        lines.append([work, *cells])
    return table(header, lines)


def short_table(result: Row) -> str:
    """Return a row for each work, for the README: each library's fastest variant in fp32, rl8x's by mode."""
    rows = result["throughput"]
    modes = [variant for variant in variants_of(rows, "rl8x") if precision_of(variant) == "fp32"]
    others = [peer for peer in ordered(names(rows, "peer")) if peer != "rl8x"]
    lines = []
    for work in names(rows, "work"):
        own = [select(rows, "transitions_per_s", work=work, peer="rl8x", variant=mode) for mode in modes]
        cells = [short(statistics.median(rates)) if rates else "-" for rates in own]
        for peer in others:
            found = best(rows, work, peer)
            cells.append("-" if found is None else short(found.rate))
        shape = result["works"][work]
        told = (
            f"{shape['env']}, {shape['num_envs']} x {shape['horizon']}, {shape['hidden']} x 2, {shape['minibatches']}"
        )
        lines.append([told, *cells])
    titles = [f"rl8x {mode.split()[0]}" for mode in modes] + [PEERS[peer].title for peer in others]
    return table(["transitions/s: task, copies x steps, network, minibatches", *titles], lines)


def work_table(result: Row, work: str) -> str:
    """Return a row for each library and variant: rate, range, first iteration, memory, share of the limits."""
    rows = [row for row in result["throughput"] if row["work"] == work]
    on_device = bool(select(rows, "peak_device_mb"))
    header = ["library", "variant", "transitions/s", "range", "first iteration, s", "peak memory, MB"]
    header += ["share of the limit", *(["share of memory's", "peak device memory, MB"] if on_device else [])]
    lines = []
    for peer in ordered(names(rows, "peer")):
        for variant in variants_of(rows, peer):
            tags = {"peer": peer, "variant": variant}
            rates = select(rows, "transitions_per_s", **tags)
            if not rates:
                lines.append([PEERS[peer].title, variant, "failed", *[""] * (len(header) - 3)])
                continue
            middle, precision = statistics.median(rates), precision_of(variant)
            first = statistics.median(select(rows, "first_iteration_s", **tags))
            cells = [short(middle), f"{short(min(rates))} - {short(max(rates))}", f"{first:.2f}"]
            cells += [f"{max(select(rows, 'peak_rss_mb', **tags)):.0f}"]
            cells += [percent(share_of_limit(result, work, middle, precision))]
            if on_device:
                cells += [percent(share_of_memory(result, work, middle, precision))]
                cells += [f"{max(select(rows, 'peak_device_mb', **tags), default=0.0):.0f}"]
            lines.append([PEERS[peer].title, variant, *cells])
    return table(header, lines)


def share_of_memory(result: Row, work: str, rate: float, precision: str) -> float | None:
    """Return the share that a rate is of what moving the activations allows; None where that was not measured."""
    bandwidth, numbers = best_bandwidth(result.get("limits", [])), result["works"][work].get("activations")
    if bandwidth is None or numbers is None:
        return None
    return rate * float(numbers) * (2 if precision == "bf16" else 4) / bandwidth / 1e9


def return_table(rows: Sequence[Row]) -> str:
    """Return a row for each library and variant: median seconds, range, how many seeds reached it."""
    works = names(rows, "work")
    lines = []
    for peer in ordered(names(rows, "peer")):
        for variant in variants_of(rows, peer):
            cells = []
            for work in works:
                tags = {"peer": peer, "variant": variant, "work": work}
                tried = select(rows, "run", **tags)
                seconds = select(rows, "seconds", **tags, reached=True)
                # A seed that failed is slower than any that did not: the median is of all of them.
                middle = (
                    statistics.median([*seconds, *[float("inf")] * (len(tried) - len(seconds))])
                    if tried
                    else float("nan")
                )
                told = f"{middle:.2f}" if middle < float("inf") else "-"
                spread = f"{min(seconds):.2f} - {max(seconds):.2f}" if seconds else ""
                cells += [told, spread, f"{len(seconds)} of {len(tried)}" if tried else ""]
            lines.append([PEERS[peer].title, variant, *cells])
    header = ["library", "variant"]
    for work in works:
        header += [f"{work}, s", "range", "seeds that reached it"]
    return table(header, lines)


def scaling_table(rows: Sequence[Row]) -> str:
    """Return a row for each library and variant: transitions a second at each number of environments."""
    counts = names(rows, "work")
    lines = []
    for peer in ordered(names(rows, "peer")):
        for variant in variants_of(rows, peer):
            rates = [select(rows, "transitions_per_s", peer=peer, variant=variant, work=count) for count in counts]
            if any(rates):
                memory = select(rows, "peak_rss_mb", peer=peer, variant=variant, work=counts[-1])
                middles = [statistics.median(rate) if rate else None for rate in rates]
                told = ["-" if middle is None else short(middle) for middle in middles]
                ends = f"{middles[-1] / middles[0]:.2f}" if middles[0] and middles[-1] else ""
                lines.append([PEERS[peer].title, variant, *told, ends, f"{max(memory):.0f}" if memory else ""])
    header = ["library", "variant", *(f"{count:,}" for count in counts)]
    return table([*header, f"{counts[-1]:,} over {counts[0]:,}", f"peak MB at {counts[-1]:,}"], lines)


def soak_table(rows: Sequence[Row]) -> str:
    """Return a row for each library and variant: how the end of a long run compares with its start."""
    lines = []
    for row in rows:
        if "transitions_per_s" in row:
            names_of_ratios = ("last_over_first", "last_over_fresh")
            ratios = [f"{row[name]:.3f}" if name in row else "" for name in names_of_ratios]
            memory = [f"{resident:.0f}" for resident in row["resident_mb"]]
            lines.append([PEERS[row["peer"]].title, row["variant"], str(row["iterations"]), *ratios, *memory])
    header = [
        "library",
        "variant",
        "iterations",
        "last hundred / first hundred",
        "last hundred / fresh processes then",
        "MB after the first",
        "MB after the last",
    ]
    return table(header, lines)


def tracking_table(rows: Sequence[Row]) -> str:
    """Return a row for each process: the store, and milliseconds a row of metrics."""
    columns = ("metrics", "steps", "first_ms", "median_ms", "p99_ms", "max_ms")
    return table(
        ["MLflow's store", "metrics a row", "rows", "the first row, ms", "median, ms", "99th percentile", "longest"],
        [[row["store"], *(str(row[name]) for name in columns)] for row in rows if "median_ms" in row],
    )


def filled(page: str, results: Path) -> str:
    """Return a page with its sections made anew from the files that they name."""

    def fill(match: re.Match[str]) -> str:
        path = results / match["file"]
        text = render(json.loads(path.read_text())) if path.exists() else "Not measured yet.\n"
        return f"{match[1]}\n{text}\n{match[3]}"

    return SECTION.sub(fill, page)


def filled_readme(readme: str, results: Path) -> str:
    """Return the README with its table of speeds made anew."""
    path = results / "cpu.json"
    text = short_table(json.loads(path.read_text())) if path.exists() else "Not measured yet."
    return README_SECTION.sub(lambda match: f"{match[1]}{text}\n{match[2]}", readme)


def write_pages(root: Path, results: Path) -> None:
    """Make what the page and the README show of the results anew."""
    for page, fill in ((root / "docs" / "benchmarks.md", filled), (root / "README.md", filled_readme)):
        page.write_text(fill(page.read_text(), results))
