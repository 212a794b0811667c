"""`rl8x envs` and `tuned` list what there is; `ui`, `sync`, `cache` and `export` handle runs and programs."""

from __future__ import annotations

import datetime
import functools
import sys
from pathlib import Path
from typing import Any, Final

import click

from rl8x.cli.errors import Command, UserError, WholeRange, check_file, tracking_uri
from rl8x.importing import find_modules_here
from rl8x.output import counted, say, table


@click.command("envs", cls=Command)
@click.argument("name", required=False)
def envs(name: str | None) -> None:
    """List the built-in environments, or describe the one called NAME: spaces, episodes, what env_config may set.

    NAME is a built-in name, a Gymnasium id, or a dotted path to a class.
    """
    from rl8x.envs import BUILTIN, describe
    from rl8x.envs.registry import summarize

    if name is not None:
        find_modules_here([name])
        click.echo(describe(name))
        return
    click.echo("\n".join(summarize(cls) for cls in BUILTIN.values()))
    click.echo("\n`rl8x envs NAME` describes one; `rl8x train NAME` trains.")


_TUNED_EXAMPLES: Final = """\b
rl8x tuned                                            # all of them
rl8x train HalfCheetah-v5 --algorithm sac --tuned     # train with one
rl8x tuned HalfCheetah-v5 sac > run.yaml              # look at one, or change it
"""


@click.command("tuned", cls=Command, epilog=_TUNED_EXAMPLES)
@click.argument("task", required=False)
@click.argument("algorithm", default="PPO")
def tuned(task: str | None, algorithm: str) -> None:
    """List the tuned settings, or print the run file of the one for TASK and ALGORITHM, by default PPO.

    Returns are those of the final, deterministic policy in fresh episodes: the median over seeds, and the lowest and
    highest of them. Seconds are the time of training on one CPU thread.
    """
    from rl8x.config.tuned import tuned_file, tuned_rows

    if task is None:
        click.echo(table(tuned_rows()))
        click.echo("\n`rl8x train TASK --algorithm ALGORITHM --tuned` trains with one.")
        return
    click.echo(tuned_file(task, algorithm).read_text(encoding="utf-8"), nl=False)


@click.command("ui", cls=Command)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=WholeRange(1, 65535), default=5000, help="Port to listen on.")
@tracking_uri
@click.option("--browser/--no-browser", default=True, help="Open the page, if there is a display.")
def ui(host: str, port: int, tracking_uri: str | None, browser: bool) -> int:
    """Show MLflow's web page of the runs, opened at the newest run's experiment, until Ctrl-C.

    If a server keeps the runs, its own page is shown.
    """
    from rl8x.tracking import open_browser, runs_link, serve_ui
    from rl8x.tracking.location import locate

    database = None if tracking_uri is None else locate(tracking_uri).database
    if database is not None and not database.exists():  # only the default database is made if it is missing
        raise UserError(f"there are no runs: {database} does not exist; train, or give another --tracking-uri.")
    link, served = runs_link(tracking_uri, host, port)
    click.echo(link if served else f"{link} (Ctrl-C ends it)")
    if not served:
        return serve_ui(tracking_uri, host, port, link=link if browser else None)
    if browser:
        open_browser(link)
    return 0


@click.command("sync", cls=Command)
@click.argument("folder", required=False)
@click.option("--to", metavar="URI", help="Store to send to. Default: where each run was meant to go.")
@click.option("--yes", is_flag=True, help="Also send to stores that only a journal names, without asking.")
def sync(folder: str | None, to: str | None, yes: bool) -> int:
    """Send rows that were held back because MLflow could not be reached or a process was killed.

    FOLDER is a run's journal or a folder of journals, by default mlruns/spool in the working directory. Rows that have
    arrived are not added again, and those that the store refused are tried again. Rows go to the database next to the
    journals, or to the store that you use here; before they go to another one that a journal names, you are asked. The
    exit code is 1 if something could not be sent.
    """
    from rl8x.tracking import sync as send

    @functools.cache
    def agrees(shown: str) -> bool:
        """Ask on a terminal, once for each store; return False without a terminal."""
        terminal = sys.stdin is not None and sys.stdin.isatty()
        return terminal and click.confirm(f"A journal names the store {shown}. Send its rows there?", err=True)

    report = send(folder, to, allow=lambda location: yes or agrees(location.shown))
    click.echo(str(report))
    return 1 if report.num_failed else 0


@click.command("cache", cls=Command)
@click.option("--clear", is_flag=True, help="Remove all of them; runs compile again what they need.")
def cache(clear: bool) -> None:
    """List the compiled programs that are kept for later runs, the most recently used first.

    They are in RL8X_CACHE_DIR, by default this user's cache folder. RL8X_CACHE_MB limits their size, by default to 500;
    programs that were used within the last hour are always kept.
    """
    from rl8x.execution.artifacts import Artifacts, limit_mb

    artifacts = Artifacts()
    if clear:
        click.echo(f"{artifacts.clear() / 1e6:.1f} MB removed from {artifacts.folder}")
        return
    limit = limit_mb()
    kept = artifacts.list()
    rows: list[tuple[str, ...]] = [("key", "MB", "last used", "torch")]
    for artifact in kept:
        used = datetime.datetime.fromtimestamp(artifact.used).astimezone().strftime("%Y-%m-%d %H:%M")
        rows.append((artifact.key[:12], f"{artifact.size / 1e6:.1f}", used, artifact.torch))
    if kept:
        click.echo(table(rows) + "\n")
    total = sum(artifact.size for artifact in kept) / 1e6
    click.echo(f"{counted(len(kept), 'program')}, {total:.1f} of {limit:g} MB, in {artifacts.folder}")


_FORMAT: Final = (
    "safetensors, which rl8x's Policy.load reads; pt2, for torch.export.load; onnx. [default: by the suffix of "
    "--output, else safetensors]"
)
_CHECKPOINT: Final = "The run's last checkpoint, or its best by the metric that its checkpoints keep. [default: last]"
_EXPORT_EXAMPLES: Final = """\b
rl8x export abundant-crane-42                            # policy.safetensors, for Policy.load
rl8x export abundant-crane-42 --checkpoint best --format onnx
rl8x export mlruns/checkpoints/1b2f... --output pilot.pt2 --sampled
rl8x export abundant-crane-42 --log --register cartpole --alias champion
"""


@click.command("export", cls=Command, epilog=_EXPORT_EXAMPLES)
@click.argument("run")
@click.option("--format", "format_name", type=click.Choice(["safetensors", "pt2", "onnx"]), help=_FORMAT)
@click.option("--checkpoint", "which", type=click.Choice(["last", "best"]), help=_CHECKPOINT)
@click.option("--sampled", is_flag=True, help="Return sampled actions, drawn by means of one more input, `noise`.")
@click.option("--output", metavar="FILE", help="The file to write. [default: policy.FORMAT]")
@click.option("--log", is_flag=True, help="Log the policy as a model of its run in MLflow, too.")
@click.option("--register", metavar="NAME", help="Register that model as a version of NAME; implies --log.")
@click.option("--alias", metavar="ALIAS", help="Alias of that version, such as champion: models:/NAME@champion.")
@click.option("--trust", is_flag=True, help="Import the modules that the checkpoint names: their code runs.")
@click.option("--tracking-uri", metavar="URI", help="Where the run is. Default: as in training.")
def export(run: str, output: str | None, register: str | None, alias: str | None, **how: Any) -> None:
    """Write the policy of RUN as one file: observation in, action for the environment out.

    RUN is a run's name or ID, its folder of checkpoints, or one checkpoint. The file includes the observation
    normaliser, action mask and scaling; a recurrent policy's state is among its inputs and outputs. Before it is
    written, it is compared with the policy on 1,000 observations, and refused if an action differs by more than 1e-4.
    """
    from rl8x.tracking.artifacts import check_model_names

    check_model_names(how["which"] or "last", register, alias, mark="--")  # before torch is imported
    from rl8x.checkpoint import find, load_policy
    from rl8x.export import export_policy
    from rl8x.tracking.location import typed_store
    from rl8x.trainers.artifacts import log_to_run, stored_run

    chosen, which, uri = how["format_name"], how["which"], how["tracking_uri"]
    if output is None:
        chosen = chosen or "safetensors"
        output = f"policy.{chosen}"
    check_file(output, "--output")
    with typed_store(uri):
        find_modules_here(how["trust"])
        checkpoint = find(run, best=which == "best")
        # Raise before a file is written if the policy cannot be logged.
        stored = stored_run(checkpoint, uri) if how["log"] or register is not None else None
        policy = load_policy(checkpoint, trust=how["trust"])
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        written = export_policy(policy, output, format=chosen, sampled=how["sampled"])
        say(f"{checkpoint.path.name} -> {written}")
        if stored is not None:
            about = {"name": which or "last", "register": register, "alias": alias}
            model_id = log_to_run(checkpoint, policy, stored, **about)
            say(f"logged as models:/{model_id}" + (f" and models:/{register}@{alias}" if alias else ""))
