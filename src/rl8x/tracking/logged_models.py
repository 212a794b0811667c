"""Policies as MLflow's logged models: with metrics of their step, so that they can be ranked, and in its registry."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rl8x.tracking.names import digest, legal_name

# By name, as importing it would import torch, which the process that talks to MLflow does not need.
LOADER: Final = "rl8x.tracking.policy_model"
KEY_TAG: Final = "rl8x.model_key"
MODEL_TYPE: Final = "rl8x-policy"


def log_model(client: Any, run: Any, path: Path, about: Mapping[str, Any]) -> str:
    """Log a policy as a model of a run, and register it where that is asked for.

    Safe to repeat: a model with the same key that is there already is gone on with.

    Args:
        client: MLflow's client.
        run: The run, as the client gives it.
        path: The file of the policy.
        about: What `describe_model` gave, and beside it `key`, `name`, `step`, `time` in milliseconds, `metrics` at
            that step, and `register` and `alias`, which may be None.

    Returns:
        The model's ID.
    """
    from mlflow.entities import LoggedModelOutput, Metric

    run_id, experiment_id = run.info.run_id, run.info.experiment_id
    key = digest(about["key"])  # MLflow's filters have no escapes, and a key may have any letters
    logged = client.search_logged_models([experiment_id], f"tags.`{KEY_TAG}` = '{key}'", max_results=1)
    tags = {KEY_TAG: key, "rl8x.step": str(about["step"])}
    model = (
        logged[0]
        if logged
        else client.create_logged_model(experiment_id, about["name"], run_id, tags, None, MODEL_TYPE)
    )
    if model.status.value != "READY":
        with tempfile.TemporaryDirectory() as folder:
            _save(Path(folder) / "model", model, run_id, path, about)
            client.log_model_artifacts(model.model_id, str(Path(folder) / "model"))
        points = [
            Metric(name, value, *_logged_at(client, run_id, name, value, about), model_id=model.model_id)
            for name, value in ((legal_name(name), value) for name, value in about["metrics"].items())
        ]
        client.log_batch(run_id, metrics=points)
        linked = [] if run.outputs is None else run.outputs.model_outputs
        if model.model_id not in {output.model_id for output in linked}:
            client.log_outputs(run_id, [LoggedModelOutput(model.model_id, about["step"])])
        client.finalize_logged_model(model.model_id, "READY")
    if about["register"] is not None:
        _register(client, model, run_id, about["register"], about["alias"])
    return str(model.model_id)


def _logged_at(client: Any, run_id: str, name: str, value: float, about: Mapping[str, Any]) -> tuple[int, int]:
    """Return time and step of a value in the run, so that linking it to a model adds no point to the run's chart.

    The last evaluation may have been some steps before the model.
    """
    history = client.get_metric_history(run_id, name)
    points = [(point.step, point.timestamp) for point in history if point.value == value]
    step, time_ms = max((at for at in points if at[0] <= about["step"]), default=(about["step"], about["time"]))
    return int(time_ms), int(step)


def _save(folder: Path, model: Any, run_id: str, path: Path, about: Mapping[str, Any]) -> None:
    """Write the folder of a model: nothing in it is pickled."""
    import mlflow
    import numpy as np
    from mlflow.models import Model, ModelSignature
    from mlflow.pyfunc import save_model
    from mlflow.types import DataType, ParamSchema, ParamSpec, Schema, TensorSpec

    def schema(specs: list[list[Any]], alone: str) -> Schema:
        unnamed = [name for name, _, _ in specs] == [alone]
        return Schema(
            [TensorSpec(np.dtype(dtype), (-1, *shape), None if unnamed else name) for name, dtype, shape in specs]
        )

    params = [ParamSpec("deterministic", DataType.boolean, True), ParamSpec("seed", DataType.long, 0)]
    dtypes = {name: dtype for name, dtype, _ in about["inputs"]}
    example = {name: np.asarray(values, dtypes[name]) for name, values in about["example"].items()}
    save_model(
        str(folder),
        loader_module=LOADER,
        data_path=str(path),
        mlflow_model=Model(artifact_path=model.artifact_location, run_id=run_id, model_id=model.model_id),
        signature=ModelSignature(
            inputs=schema(about["inputs"], "obs"),
            outputs=schema(about["outputs"], "actions"),
            params=ParamSchema(params),
        ),
        input_example=example["obs"] if set(example) == {"obs"} else example,
        pip_requirements=[f"mlflow=={mlflow.__version__}", *about["requirements"]],
    )


def _register(client: Any, model: Any, run_id: str, name: str, alias: str | None) -> None:
    """Make a model a version of a registered one, unless it is one already, and give it an alias."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    # Not `models:/ID`, which MLflow looks up in the process's own store, whichever this client's is.
    source = str(model.artifact_location)
    versions = client.search_model_versions(f"run_id = '{run_id}'")  # not by the name, which may have quotes
    version = next((version for version in versions if (version.name, version.source) == (name, source)), None)
    if version is None:
        version = client.create_model_version(name, source, run_id, model_id=model.model_id)
    if alias is not None:
        client.set_registered_model_alias(name, alias, version.version)


def model_about(
    description: Mapping[str, Any],
    *,
    key: str,
    name: str,
    step: int,
    metrics: Mapping[str, float],
    register: str | None = None,
    alias: str | None = None,
) -> dict[str, Any]:
    """Return the `about` of `log_model`, from what `describe_model` returned and the model's name and step."""
    logged = {"key": key, "name": name, "step": step, "time": time.time_ns() // 1_000_000, "metrics": dict(metrics)}
    return {**description, **logged, "register": register, "alias": alias}
