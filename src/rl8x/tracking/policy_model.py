"""A saved policy as a model of MLflow, which loads it by this module and without pickle.

`mlflow.pyfunc.load_model(...).predict` takes and gives what `rl8x.export` calls inputs and outputs, but without
`noise`: an array of observations, or a dict of arrays by name where there is more than one. What a policy remembers is
among both, so that a server answers each request by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import numpy as np
import torch

from rl8x._version import __version__
from rl8x.policy import Policy
from rl8x.portable import zeros
from rl8x.spaces import tree_of
from rl8x.trees import flatten_tree, unflatten_tree
from rl8x.trusted import nothing_remembered

_STATE: Final = "state/"
_PACKAGES: Final = ("torch", "numpy", "gymnasium", "safetensors")


class PolicyModel:
    """The model that `mlflow.pyfunc` calls.

    Args:
        policy: The policy.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def predict(self, data: Any, params: Mapping[str, Any] | None = None) -> Any:
        """Decide for observations.

        Args:
            data: Observations `[num, *obs]`, or arrays by name: `obs` or `obs/<part>`, and of a policy with a memory
                `state/<name>` and `starts`.
            params: `deterministic`, whether to take the most likely actions; and a `seed` for others.

        Returns:
            Actions `[num, *action]`, or arrays by name: `actions` or `actions/<part>`, and `next_state/<name>`.
        """
        options = {"deterministic": True, "seed": 0, **(params or {})}
        arrays = dict(data) if isinstance(data, Mapping) else {"obs": data}
        generator = torch.Generator().manual_seed(int(options["seed"]))
        state = {
            name.removeprefix(_STATE): torch.as_tensor(np.asarray(array))
            for name, array in arrays.items()
            if name.startswith(_STATE)
        }
        decision = self.policy.decide(
            unflatten_tree("obs", arrays),
            state or None,
            starts=arrays.get("starts"),
            deterministic=bool(options["deterministic"]),
            generator=generator,
        )
        outputs: dict[str, Any] = flatten_tree("actions", tree_of(decision.actions, np.asarray))  # type: ignore[arg-type]
        outputs |= {f"next_{_STATE}{name}": part.numpy() for name, part in decision.state.items()}
        return outputs["actions"] if set(outputs) == {"actions"} else outputs


def _load_pyfunc(path: str) -> PolicyModel:
    """Load a model from its file, as MLflow asks for it, by this name."""
    # Models of MLflow may import anything: loading one means to trust it.
    with nothing_remembered():
        return PolicyModel(Policy.load(path, trust=True))


def describe_model(policy: Policy) -> dict[str, Any]:
    """Return as plain data what MLflow keeps beside a policy: its signature, an example of an input, what it needs.

    A signature lists the name, type and shape of each array, without the axis of observations.
    """
    policy_inputs = flatten_tree("obs", zeros(policy.seen_space, 1))
    memory = {f"{_STATE}{name}": part for name, part in policy.memory(1).items()}
    inputs = {name: part.numpy() for name, part in (policy_inputs | memory).items()}
    if memory:
        inputs["starts"] = np.ones(1, dtype=bool)
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
    """Return the version of a package, without a local build's mark, which no registry has."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return "0"
