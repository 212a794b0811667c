"""`rl8x ui` and `rl8x sync`: the runs that are kept in MLflow."""

from __future__ import annotations

import click

from rl8x.cli.errors import users_mistakes


@click.command("ui")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=5000, show_default=True, help="Port to listen on.")
@click.option("--tracking-uri", metavar="URI", help="Where the runs are. Default: as in training.")
def ui(host: str, port: int, tracking_uri: str | None) -> int:
    """Serve MLflow's web page on the runs until Ctrl-C."""
    from rl8x.tracking import serve_ui

    with users_mistakes():
        return int(serve_ui(host=host, port=port, tracking_uri=tracking_uri) or 0)


@click.command("sync")
@click.option("--tracking-uri", metavar="URI", help="Where the rows go. Default: where each run was meant to go.")
def sync(tracking_uri: str | None) -> None:
    """Send rows that were kept back while MLflow could not be reached."""
    from rl8x.tracking import sync as send

    with users_mistakes():
        click.echo(send(tracking_uri=tracking_uri))
