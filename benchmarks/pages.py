"""Fill the sections of pages that results fill, or check that the pages say what the results say.

    python -m benchmarks.pages            # writes README.md, docs/, curves, and what `rl8x tuned` tells
    python -m benchmarks.pages --check    # changes nothing; exit code 1 and a line for each thing that does not fit

A section stands between marks, `<!-- envs -->` and `<!-- /envs -->`. Sentences that quote a result are checked too.
"""

from __future__ import annotations

import argparse
import functools
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import agents, costs, figures, learning_tables, scaling, speed_tables, stop_conditions
from benchmarks.learning import TABLES
from benchmarks.learning_tables import rows_of
from benchmarks.learning_tasks import TASKS
from benchmarks.results import RESULTS, ROOT, held, short

SETTINGS = ROOT / "src" / "rl8x" / "config" / "settings" / "measured.json"


@functools.cache
def result(name: str) -> dict[str, Any]:
    """Return what a file of results holds."""
    return held(RESULTS / f"{name}.json")


def speed(name: str) -> str:
    """Return all tables of a file of speeds."""
    return "\n" + speed_tables.render(result(name))


# What fills the sections, by page and mark.
SECTIONS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {
        "speed": lambda: speed_tables.short_table(result("cpu")),
        "learning": lambda: learning_tables.report(learning_tables.SHOWN),
    },
    "docs/agents.md": {"agents": lambda: "\n" + agents.report(result("agents")) + "\n"},
    "docs/benchmarks.md": {
        name: functools.partial(speed, name) for name in ("starting", "replay", "replay-2-threads", "cpu", "cuda")
    },
    "docs/conditions.md": {"curves": stop_conditions.report},
    "docs/environments.md": {"envs": lambda: costs.envs_table(result("envs"))},
    "docs/export.md": {"export": lambda: costs.export_table(result("export"))},
    "docs/learning.md": {
        "learning": lambda: learning_tables.report([*TASKS]),
        "defaults": learning_tables.report_defaults,
        "near-defaults": learning_tables.report_near,
        "offline": learning_tables.report_offline,
        "precision": learning_tables.report_precision,
    },
    "docs/scaling.md": {"scaling": lambda: scaling.report(result("scaling"))},
    "docs/studies.md": {
        "study": lambda: figures.study_table(result("study")),
        "randomization": learning_tables.report_randomization,
    },
    "docs/which-algorithm.md": {"learning": lambda: learning_tables.report(learning_tables.COMPARED)},
}


def small_speeds() -> str:
    """Return the sentence about the small work on a newer machine."""
    rows = result("cpu-small")["throughput"]
    peers = (("rl8x", "fp32"), ("rejax", None), ("sb3", None))
    own, rejax, sb3 = (short(speed_tables.best(rows, "small", *peer).rate) for peer in peers)
    return f"rl8x compiled {own} transitions/s, rejax {rejax}, Stable-Baselines3 {sb3}, medians"


def largest_difference() -> str:
    """Return the sentence about exports."""
    largest = max(row["difference"] for row in result("export-matrix")["rows"])
    return f"The largest difference there is {largest:.1e}.".replace("e-0", "e-")


def replay_costs() -> str:
    """Return the sentence about checkpoints."""
    waits, written = (row["median"] for row in result("replay_costs")["rows"])
    return f"the training thread waits {waits:.0f} ms, and {written:.0f} MB are written"


def distillation() -> Iterator[str]:
    """Return the sentences about students."""
    rows = rows_of("distillation")
    mean = {name: f"{statistics.median(row['return_mean'] for row in mine):.0f}" for name, mine in rows.items()}
    cpu = {name: statistics.median(row["cpu_s"] for row in mine) for name, mine in rows.items()}
    yield f"the teacher reaches {mean['teacher']};"
    yield f"a GRU reaches {mean['student-gru']} and a network without memory {mean['student-mlp']} in as many"
    yield f"transitions ({rows['student-gru'][0]['env_steps']:,})"
    yield f"reaches {mean['ppo-gru']} in those, in {cpu['ppo-gru'] / cpu['student-gru']:.1f} times the processor time"
    yield f"and {mean['ppo-gru-both']} in the transitions of teacher and student together"


def ant() -> str:
    """Return the sentence about Ant by the settings of Stable-Baselines3's zoo."""
    rows, known = result("learning-sb3")["rows"], {1: "one seed", 2: "two seeds", 3: "three seeds"}
    best, last = (statistics.mean(row[key] for row in rows) for key in ("best", "return_mean"))
    return f"{best:.0f} on the way and {last:.0f} at its end ({known[len(rows)]})"


# What sentences quote, by page.
QUOTES: dict[str, Callable[[], list[str]]] = {
    "docs/algorithms.md": lambda: [*distillation()],
    "docs/benchmarks.md": lambda: [small_speeds()],
    "docs/checkpoints.md": lambda: [replay_costs()],
    "docs/export.md": lambda: [largest_difference()],
    "docs/learning.md": lambda: [ant()],
}


def filled(name: str, text: str) -> str:
    """Return a page with its sections made anew."""
    for mark, make in SECTIONS[name].items():
        pattern = re.compile(f"(<!-- {mark} -->\n)(.*?)(<!-- /{mark} -->)", re.DOTALL)
        made = make()
        text, count = pattern.subn(lambda match, made=made: f"{match[1]}{made}\n{match[3]}", text)
        assert count == 1, f"{name} has {count} sections {mark}"
    return text


def write() -> None:
    """Write all sections, the curves, and what `rl8x tuned` tells."""
    for name in SECTIONS:
        page = ROOT / name
        page.write_text(filled(name, page.read_text()))
    SETTINGS.write_text(learning_tables.of_settings())
    for name, tasks in learning_tables.curves().items():
        learning_tables.draw(tasks, ROOT / "docs" / "images" / name)


def check() -> list[str]:
    """Return what does not fit: sections and sentences, results under other settings or that miss what is asked."""
    wrong = [fault for table in TABLES for fault in learning_tables.faults(table)]
    for name in SECTIONS:
        text = (ROOT / name).read_text()
        for mine, made in zip(text.split("<!-- "), filled(name, text).split("<!-- "), strict=True):
            if mine != made:
                wrong.append(f"{name}: the section {made.partition(' -->')[0]} is not what the results say")
    for name, quotes in QUOTES.items():
        words = " ".join((ROOT / name).read_text().split())
        wrong += [f"{name} does not say: {quote}" for quote in quotes() if quote not in words]
    if SETTINGS.read_text() != learning_tables.of_settings():
        wrong.append(f"{SETTINGS.relative_to(ROOT)} is not what the results say")
    return wrong


def main(argv: list[str] | None = None) -> int:
    """Write, or check and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say what does not fit")
    if not parser.parse_args(argv).check:
        write()
        return 0
    wrong = check()
    print("\n".join(wrong) or "The pages say what the results say.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
