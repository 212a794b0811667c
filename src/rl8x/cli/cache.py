"""`rl8x cache`: the compiled programs that are kept for later runs."""

from __future__ import annotations

import datetime

import click

from rl8x.cli.errors import users_mistakes
from rl8x.output import counted, table


@click.command("cache")
@click.option("--clear", is_flag=True, help="Remove them all; what a run needs is compiled again.")
def cache(clear: bool) -> None:
    """List the compiled programs that are kept for later runs, the one used last first.

    They are in RL8X_CACHE_DIR, or this user's cache folder; RL8X_CACHE_MB limits their size (500); programs
    that were used within the last hour stay.
    """
    from rl8x.execution.artifacts import Artifacts

    artifacts = Artifacts()
    if clear:
        click.echo(f"{artifacts.clear() / 1e6:.1f} MB removed from {artifacts.folder}")
        return
    with users_mistakes():
        limit = artifacts.limit_mb
    kept = artifacts.list()
    rows: list[tuple[str, ...]] = [("key", "MB", "last used", "torch")]
    for artifact in kept:
        used = datetime.datetime.fromtimestamp(artifact.used).astimezone().strftime("%Y-%m-%d %H:%M")
        rows.append((artifact.key[:12], f"{artifact.size / 1e6:.1f}", used, artifact.torch))
    if kept:
        click.echo(table(rows) + "\n")
    total = sum(artifact.size for artifact in kept) / 1e6
    click.echo(f"{counted(len(kept), 'program', 'programs')}, {total:.1f} of {limit:g} MB, in {artifacts.folder}")
