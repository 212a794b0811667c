"""Copy artifacts into a journal, as `files/<key>/<name>`, and log policies as MLflow models, without pickle.

`mlflow.pyfunc.load_model(...).predict` has the inputs and outputs of `rl8x.export`, without `noise`. Both include the
policy's recurrent state, so that a server can stay stateless.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rl8x import __version__
from rl8x.tracking.journal import FILES, JOURNAL
from rl8x.tracking.protocol import TrackingError, artifact_name, digest, legal_name, readable

if TYPE_CHECKING:
    from rl8x.policy import Policy

# Torch is imported inside functions, since the process that talks to MLflow does not need it.


def keep(journal: Path, source: Path, besides: Collection[Path] = ()) -> str:
    """Copy a file or folder into a journal; return its path relative to that. All names in the copy are UTF-8."""
    target = journal / FILES / uuid.uuid4().hex[:16] / artifact_name(source.name)
    try:
        (journal / FILES).mkdir(exist_ok=True)  # without parents: a journal that was moved or deleted is not made
        target.parent.mkdir()
        if source.is_dir():
            journals = [path.parent for path in journal.parent.glob(f"*/{JOURNAL}")]
            left_out = {os.path.realpath(folder) for folder in (*besides, journal.parent, *journals)}
            shutil.copytree(source, target, ignore=lambda folder, names: _left_out(folder, names, left_out))
            _rename_non_utf8(target)
        else:
            shutil.copyfile(source, target)
    except OSError:
        shutil.rmtree(target.parent, ignore_errors=True)  # a partial copy would only take space that rows need
        raise
    return str(target.relative_to(journal))


def _left_out(folder: str, names: list[str], paths: set[str]) -> list[str]:
    """Return the names in a folder that resolve to one of `paths`, to the folder itself or to one of its parents."""
    here = Path(os.path.realpath(folder))
    back = paths | {str(path) for path in (here, *here.parents)}
    return [name for name in names if os.path.realpath(here / name) in back]


def _rename_non_utf8(folder: Path) -> None:
    """Rename files and folders whose names are not UTF-8, since no store accepts them."""
    for parent, folders, files in os.walk(folder, topdown=False):
        for name in (*folders, *files):
            if readable(name) != name:
                os.rename(os.path.join(parent, name), os.path.join(parent, artifact_name(name)))


def kept_path(journal: Path, file: str) -> Path:
    """Return the path of a copy; raise `TrackingError` if the op names a file outside the journal."""
    name = PurePosixPath(artifact_name(file))
    if name.parts[0] != FILES or len(name.parts) != 3:
        raise TrackingError(f"not a file of this journal: {name}")
    return journal / name


def checked_copy(journal: Path, file: str) -> Path:
    """Return `kept_path`; raise `TrackingError` if it is missing, or has a link, device or pipe in it or above."""
    path = kept_path(journal, file)
    if not os.path.lexists(path):
        raise TrackingError("its file is not in the journal")
    folders = [path.parent, path.parents[1]]
    inside = [Path(parent) / name for parent, *names in os.walk(path) for name in (*names[0], *names[1])]
    for entry in (*folders, path, *inside):  # `os.walk` does not follow links
        mode = entry.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise TrackingError(f"{entry.name} is no plain file: links are not followed, devices and pipes not read")
    return path


LOADER: Final = "rl8x.tracking.artifacts"
KEY_TAG: Final = "rl8x.model_key"
MODEL_TYPE: Final = "rl8x-policy"


def check_model_names(name: str, register: str | None, alias: str | None, mark: str = "") -> None:
    """Raise `ValueError` if MLflow would refuse a name; `mark` is put before the names of options in the message."""
    if not isinstance(name, str) or not name or re.search(r"[/:.%\"']", name):
        raise ValueError(f"a model has a name without any of / : . % \" '; got {name!r}.")
    if alias is not None and register is None:
        raise ValueError(f"{mark}alias names a version of a registered model: give {mark}register too.")
    if register is not None and (not register.strip() or re.search("[/:]", register)):
        raise ValueError(f"{mark}register: MLflow's models have names without '/' and ':'; got {register!r}.")
    if alias is not None and not re.fullmatch(r"(?!latest$|v\d+$)[\w-]+", alias, re.IGNORECASE):
        raise ValueError(f"{mark}alias: letters, digits, '_' and '-', and not 'latest' or 'v1'; got {alias!r}.")


def log_model(client: Any, run: Any, path: Path, about: Mapping[str, Any]) -> str:
    """Log a policy as a model of a run and return the model's ID; continue an existing model that has the same key."""
    from mlflow.entities import LoggedModelOutput, Metric

    run_id, experiment_id = run.info.run_id, run.info.experiment_id
    key = digest(about["key"])  # MLflow's filters have no escapes, and a key may have any character
    logged = client.search_logged_models([experiment_id], f"tags.`{KEY_TAG}` = '{key}'", max_results=1)
    if logged:
        model = logged[0]
    else:
        tags = {KEY_TAG: key, "rl8x.step": str(about["step"])}
        model = client.create_logged_model(experiment_id, about["name"], run_id, tags, None, MODEL_TYPE)
    if model.status.value != "READY":
        with tempfile.TemporaryDirectory() as folder:
            _save(Path(folder) / "model", model, run_id, path, about)
            client.log_model_artifacts(model.model_id, str(Path(folder) / "model"))
        values = {legal_name(name): value for name, value in about["metrics"].items()}
        points = [
            Metric(name, value, *_logged_at(client, run_id, name, value, about), model_id=model.model_id)
            for name, value in values.items()
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
    """Return the time and step at which the run has a value, so that logging it again adds no point to its chart."""
    history = client.get_metric_history(run_id, name)
    points = [(point.step, point.timestamp) for point in history if point.value == value]
    step, time_ms = max((at for at in points if at[0] <= about["step"]), default=(about["step"], about["time"]))
    return int(time_ms), int(step)


def _save(folder: Path, model: Any, run_id: str, path: Path, about: Mapping[str, Any]) -> None:
    """Write the folder of a model, without pickled files."""
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
    """Register a model as a version of `name`, unless it is registered already, and set the version's alias."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    # Not `models:/ID`: MLflow would look it up in the process's default store, not in the client's.
    source = str(model.artifact_location)
    versions = client.search_model_versions(f"run_id = '{run_id}'")  # not by name, which may have quotes
    version = next((version for version in versions if (version.name, version.source) == (name, source)), None)
    if version is None:
        version = client.create_model_version(name, source, run_id, model_id=model.model_id)
    if alias is not None:
        client.set_registered_model_alias(name, alias, version.version)


def model_about(description: Mapping[str, Any], **about: Any) -> dict[str, Any]:
    """Return the `about` of `log_model`: the result of `describe_model` with key, name, step, metrics and version."""
    return {"register": None, "alias": None, **description, "time": time.time_ns() // 1_000_000, **about}


_STATE: Final = "state/"
_PACKAGES: Final = ("torch", "numpy", "gymnasium", "safetensors")


class PolicyModel:
    """The wrapper of a policy that `mlflow.pyfunc` calls."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def predict(self, data: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Return actions for observations, and the next recurrent state if the policy has one."""
        import torch

        from rl8x.spaces import tree_of
        from rl8x.trees import flatten_tree, unflatten_tree

        options = {"deterministic": True, "seed": 0, **(params or {})}
        arrays = dict(data) if isinstance(data, Mapping) else {"obs": data}
        state = {name.removeprefix(_STATE): array for name, array in arrays.items() if name.startswith(_STATE)}
        decision = self.policy.decide(
            unflatten_tree("obs", arrays),
            state or None,
            starts=arrays.get("starts"),
            deterministic=bool(options["deterministic"]),
            generator=torch.Generator().manual_seed(int(options["seed"])),
        )
        outputs: dict[str, Any] = flatten_tree("actions", tree_of(decision.actions, np.asarray))  # type: ignore[arg-type]
        outputs |= {f"next_{_STATE}{name}": part.numpy() for name, part in decision.state.items()}
        return outputs["actions"] if set(outputs) == {"actions"} else outputs


def _load_pyfunc(path: str) -> PolicyModel:
    """Load a model from its file; MLflow calls this function by its name."""
    from rl8x.policy import Policy
    from rl8x.trusted import nothing_remembered

    # MLflow models may import anything, so that loading one means trusting it.
    with nothing_remembered():
        return PolicyModel(Policy.load(path, trust=True))


def describe_model(policy: Policy) -> dict[str, Any]:
    """Return a policy's signature, an example input and its pip requirements, as plain data for MLflow."""
    from rl8x.export import DecisionProgram

    inputs = {name: part.numpy() for name, part in DecisionProgram(policy, sampled=False).example(1).items()}
    outputs = PolicyModel(policy).predict(inputs)
    outputs = outputs if isinstance(outputs, dict) else {"actions": outputs}
    return {
        "inputs": [_spec(name, array) for name, array in inputs.items()],
        "outputs": [_spec(name, array) for name, array in outputs.items()],
        "example": {name: array.tolist() for name, array in inputs.items()},
        "requirements": [f"rl8x=={__version__}", *(f"{name}=={_version(name)}" for name in _PACKAGES)],
    }


def _spec(name: str, array: Any) -> list[Any]:
    return [name, array.dtype.name, list(array.shape[1:])]


def _version(name: str) -> str:
    """Return a package's version without the local part after `+`, which no registry has; "0" if not installed."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return "0"
