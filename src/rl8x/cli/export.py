"""`rl8x export`: a run's policy as a program for other runtimes, or as a model in MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rl8x.cli.errors import Command, check_file
from rl8x.importing import find_modules_here
from rl8x.output import say
from rl8x.tracking.artifacts import check_model_names
from rl8x.tracking.location import typed_store

_FORMAT = (
    "safetensors, which rl8x's Policy.load reads; pt2, for torch.export.load; onnx. [default: by the suffix of "
    "--output, else safetensors]"
)
_CHECKPOINT = "The run's last checkpoint, or its best by the metric that its checkpoints keep. [default: last]"
_EXAMPLES = """\b
rl8x export abundant-crane-42                            # policy.safetensors, for Policy.load
rl8x export abundant-crane-42 --checkpoint best --format onnx
rl8x export mlruns/checkpoints/1b2f... --output pilot.pt2 --sampled
rl8x export abundant-crane-42 --log --register cartpole --alias champion
"""


@click.command("export", cls=Command, epilog=_EXAMPLES)
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
    check_model_names(how["which"] or "last", register, alias, mark="--")
    from rl8x.checkpoint import find, load_policy
    from rl8x.export import export_policy
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
