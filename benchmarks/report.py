"""Tables from the JSON of a measurement; `docs/benchmarks.md` is what these functions make of `benchmarks/results/`."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import PEERS

Row = dict[str, Any]
# A section of the page that a file of results fills.
SECTION = re.compile(r"(<!-- results: (?P<file>[\w.-]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def render(result: Row) -> str:
    """Return every table that a result has, as markdown."""
    parts = [describe(result)]
    if result.get("throughput"):
        parts += ["### Transitions a second", summary_table(result)]
        for work in names(result["throughput"], "work"):
            parts += [f"#### {work}", describe_work(result["works"][work]), work_table(result, work)]
    if result.get("return"):
        parts += ["### Seconds of training to a return", return_table(result["return"])]
    if result.get("scaling"):
        parts += ["### Cost over the number of environments", scaling_table(result["scaling"])]
    if result.get("soak"):
        parts += ["### A long run", soak_table(result["soak"])]
    return "\n\n".join(parts) + "\n"


def describe(result: Row) -> str:
    """Say where and with what a result was measured."""
    machine, settings = result["machine"], result["settings"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']:.0f} GB, {machine['system']}, "
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
    if result.get("limits"):
        told = []
        for precision, widths in best_limits(result["limits"]).items():
            for width, limit in widths.items():
                told.append(f"{precision} {width}x{width}: {limit:.0f}")
        lines.append("Fastest matrix product, GFLOP/s: " + ", ".join(told) + ".")
    return "\n".join(lines)


def describe_work(work: Row) -> str:
    """Say what an iteration of a work is."""
    return (
        f"{work['env']}, {work['num_envs']} x {work['horizon']} transitions, 2 x {work['hidden']} units, "
        f"{work['minibatches']} minibatches, {work['passes']} passes; {work['flops'] / 1e6:.2f} MFLOP a transition."
    )


def best_limits(limits: Iterable[Row]) -> dict[str, dict[str, float]]:
    """Return the highest GFLOP/s that was seen, by precision and width."""
    best: dict[str, dict[str, float]] = {}
    for row in limits:
        for precision, widths in row.items():
            if precision == "error":
                continue
            for width, limit in widths.items():
                known = best.setdefault(precision, {})
                known[width] = max(known.get(width, 0.0), limit["gflops"])
    return best


def names(rows: Sequence[Row], key: str) -> list[Any]:
    """Return the values of a key, in the order of their first row."""
    return list(dict.fromkeys(row[key] for row in rows))


def ordered(peers: Iterable[str]) -> list[str]:
    """Return peers in the order of the tables."""
    return [peer for peer in PEERS if peer in set(peers)]


def select(rows: Sequence[Row], key: str, **tags: Any) -> list[float]:
    """Return the values of a key in the rows with these tags."""
    return [row[key] for row in rows if key in row and all(row.get(name) == value for name, value in tags.items())]


def short(rate: float) -> str:
    """Write a rate: 3.2M, 412k, 4.7k, 83."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if rate >= size:
            number = rate / size
            return f"{number:.1f}{unit}" if number < 10 else f"{number:.0f}{unit}"
    return f"{rate:.0f}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def summary_table(result: Row) -> str:
    """Return a row for each work: rl8x in each mode, the others as they come and with malloc's settings."""
    rows = result["throughput"]
    columns = [
        (peer, [variant for variant in PEERS[peer].variants if select(rows, "variant", peer=peer, variant=variant)])
        for peer in ordered(names(rows, "peer"))
    ]
    header = ["work", *(f"{PEERS[peer].title} ({' / '.join(variants)})" for peer, variants in columns)]
    lines = []
    for work in names(rows, "work"):
        cells = []
        for peer, variants in columns:
            rates = [select(rows, "transitions_per_s", work=work, peer=peer, variant=variant) for variant in variants]
            cells.append(" / ".join(short(statistics.median(rate)) if rate else "-" for rate in rates))
        lines.append([work, *cells])
    return table(header, lines)


def work_table(result: Row, work: str) -> str:
    """Return a row for each library and variant: rate, range, first iteration, memory, share of the limit."""
    rows = [row for row in result["throughput"] if row["work"] == work]
    limits = best_limits(result.get("limits", []))
    lines = []
    for peer in ordered(names(rows, "peer")):
        for variant in PEERS[peer].variants:
            rates = select(rows, "transitions_per_s", peer=peer, variant=variant)
            if not rates:
                if select(rows, "error", peer=peer, variant=variant):
                    lines.append([PEERS[peer].title, variant, "failed", "", "", "", ""])
                continue
            middle = statistics.median(rates)
            first = statistics.median(select(rows, "first_iteration_s", peer=peer, variant=variant))
            memory = max(select(rows, "peak_rss_mb", peer=peer, variant=variant))
            precision = "bf16" if "bf16" in variant else "fp32"
            limit = limits.get(precision, {}).get(str(result["works"][work]["hidden"]))
            share = f"{middle * result['works'][work]['flops'] / limit / 1e9:.0%}" if limit else ""
            spread = f"{short(min(rates))} - {short(max(rates))}"
            lines.append([PEERS[peer].title, variant, short(middle), spread, f"{first:.2f}", f"{memory:.0f}", share])
    header = [
        "library",
        "variant",
        "transitions/s",
        "range",
        "first iteration, s",
        "peak memory, MB",
        "share of the limit",
    ]
    return table(header, lines)


def return_table(rows: Sequence[Row]) -> str:
    """Return a row for each library and variant: median seconds, range, how many seeds reached it."""
    works = names(rows, "work")
    lines = []
    for peer in ordered(names(rows, "peer")):
        for variant in PEERS[peer].variants:
            if not select(rows, "variant", peer=peer, variant=variant):
                continue
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
        for variant in PEERS[peer].variants:
            rates = [select(rows, "transitions_per_s", peer=peer, variant=variant, work=count) for count in counts]
            if any(rates):
                memory = select(rows, "peak_rss_mb", peer=peer, variant=variant, work=counts[-1])
                told = [short(statistics.median(rate)) if rate else "-" for rate in rates]
                lines.append([PEERS[peer].title, variant, *told, f"{max(memory):.0f}" if memory else ""])
    return table(["library", "variant", *(f"{count:,}" for count in counts), f"peak MB at {counts[-1]:,}"], lines)


def soak_table(rows: Sequence[Row]) -> str:
    """Return a row for each library and variant: how the end of a long run compares with its start."""
    lines = []
    for row in rows:
        if "transitions_per_s" in row:
            before, after = row["resident_mb"]
            ratio = f"{row['last_over_first']:.3f}" if "last_over_first" in row else ""
            lines.append(
                [
                    PEERS[row["peer"]].title,
                    row["variant"],
                    str(row["iterations"]),
                    ratio,
                    f"{before:.0f}",
                    f"{after:.0f}",
                ]
            )
    header = [
        "library",
        "variant",
        "iterations",
        "last hundred / first hundred",
        "MB after the first",
        "MB after the last",
    ]
    return table(header, lines)


def filled(page: str, results: Path) -> str:
    """Return a page with its sections made anew from the files that they name."""

    def fill(match: re.Match[str]) -> str:
        path = results / match["file"]
        text = render(json.loads(path.read_text())) if path.exists() else "Not measured yet.\n"
        return f"{match[1]}\n{text}\n{match[3]}"

    return SECTION.sub(fill, page)


def write_page(page: Path, results: Path) -> None:
    """Make the sections of a page anew, where there is one."""
    if page.exists():
        page.write_text(filled(page.read_text(), results))
