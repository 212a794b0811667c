"""`rl8x export`: a run's policy as a program for other runtimes, or as a model in MLflow."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rl8x import keys
from rl8x.cli.errors import UserError, users_mistakes
from rl8x.cli.options import find_modules_here
from rl8x.output import say
from rl8x.tracking.location import typed_store

if TYPE_CHECKING:
    from rl8x.checkpoint import Checkpoint
    from rl8x.policy import Policy

_FORMAT = (
    "safetensors, which rl8x's Policy.load reads; pt2, for torch.export.load; onnx. [default: by the suffix of "
    "--output, else safetensors]"
)
_CHECKPOINT = "Which of the run's checkpoints; best is by the metric that checkpoints go by. [default: last]"
_EXAMPLES = """\b
rl8x export abundant-crane-42                            # policy.safetensors, for Policy.load
rl8x export abundant-crane-42 --checkpoint best --format onnx
rl8x export mlruns/checkpoints/1b2f... --output pilot.pt2 --sampled
rl8x export abundant-crane-42 --log --register cartpole --alias champion
"""


@click.command("export", epilog=_EXAMPLES, context_settings={"max_content_width": 120})
@click.argument("run")
@click.option("--format", "format_name", type=click.Choice(["safetensors", "pt2", "onnx"]), help=_FORMAT)
@click.option("--checkpoint", "which", type=click.Choice(["last", "best"]), help=_CHECKPOINT)
@click.option("--sampled", is_flag=True, help="Actions are samples, made of a further input `noise`.")
@click.option("--output", metavar="FILE", help="The file to write. [default: policy.FORMAT]")
@click.option("--log", is_flag=True, help="Log the policy as a model of its run in MLflow, too.")
@click.option("--register", metavar="NAME", help="Make that model a version of this registered one; means --log.")
@click.option("--alias", metavar="ALIAS", help="Call that version so, such as champion: models:/NAME@champion.")
@click.option("--trust", is_flag=True, help="Import what the checkpoint names, whose code then runs.")
@click.option("--tracking-uri", metavar="URI", help="Where the run is. Default: as in training.")
def export(run: str, output: str | None, register: str | None, alias: str | None, **how: Any) -> None:
    """Write the policy of RUN as one file: observation in, action for the environment out.

    RUN is a run's name or ID, its folder of checkpoints, or one checkpoint. Observation normaliser, action mask and
    scaling are inside, and what a policy remembers is among its inputs and outputs. The file is compared with the
    policy on 1,000 observations before it is written, and refused where an action differs by more than 1e-4.
    """
    if alias is not None and register is None:
        raise UserError("--alias names a version of a registered model: give --register NAME too.")
    from rl8x.checkpoint import load_policy
    from rl8x.export import export_policy
    from rl8x.trainers.artifacts import about_policy

    chosen, which, uri = how["format_name"], how["which"], how["tracking_uri"]
    if output is None:
        chosen = chosen or "safetensors"
        output = f"policy.{chosen}"
    if not Path(output).absolute().parent.is_dir():
        raise UserError(f"there is no folder {Path(output).parent} to write {Path(output).name} to: make it first.")
    with users_mistakes(), typed_store(uri):
        find_modules_here(how["trust"])
        checkpoint = find_checkpoint(run, which)
        policy = load_policy(checkpoint, trust=how["trust"])
        written = export_policy(policy, output, format=chosen, sampled=how["sampled"])
        say(f"{checkpoint.path.name} -> {written}")
        if how["log"] or register is not None:
            about = {**about_policy(checkpoint), "name": which or "last", "register": register, "alias": alias}
            model_id = log_to_run(checkpoint, policy, about, uri)
            say(f"logged as models:/{model_id}" + (f" and models:/{register}@{alias}" if alias else ""))


def find_checkpoint(run: str, which: str | None) -> Checkpoint:
    """Find the checkpoint that is meant: the last of a run, or the best."""
    from rl8x.checkpoint import CheckpointError, describe, find, listed, read

    checkpoint = find(run)
    if which != "best":
        return checkpoint
    paths = listed(checkpoint.path.parent)
    described = {path: describe(path) for path in paths}
    best = {about["counters"][keys.STEPS]: path for path, about in described.items() if about["is_best"]}
    if not best:
        raise CheckpointError(
            f"no checkpoint in {checkpoint.path.parent} is the best of a metric: train with a metric to save by, such "
            "as checkpoints={'best': 'eval/returns/mean'}, or export the last"
        )
    # After a rollback to an older checkpoint, later ones that were best do not belong to the run any more.
    newest = checkpoint if checkpoint.path.name == paths[-1].name else read(paths[-1])
    known = newest.state["best"]
    return read(best.get(known and known["steps"], [*best.values()][-1]))


def log_to_run(checkpoint: Checkpoint, policy: Policy, about: dict[str, Any], tracking_uri: str | None) -> str:
    """Log the policy of a checkpoint as a model of the run; return the model's ID."""
    from rl8x.tracking import TrackingError
    from rl8x.tracking.artifacts import describe_model, model_about
    from rl8x.tracking.runs import RunReader

    run, reader = checkpoint.metadata["run"], RunReader(tracking_uri)
    record = reader.run_of_spool(str(run["handle"])) if run["id"] is None else None
    run_id = run["id"] or (record and record.id)
    if run_id is None:
        raise TrackingError(f"MLflow does not have the run of {checkpoint.path}: `rl8x sync` sends what it lacks")
    key = f"{run['key']}/{checkpoint.path.name}/{about['name']}"
    with tempfile.TemporaryDirectory() as folder:
        path = policy.save(Path(folder) / "policy.safetensors")
        return reader.log_model(run_id, path, model_about(describe_model(policy), key=key, **about))
