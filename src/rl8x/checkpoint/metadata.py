"""What `checkpoint.json` and `state.pt` have of a run, and the check of their shape."""

from __future__ import annotations

import types
from typing import Any, Final, Literal, TypedDict, cast, get_args, get_origin, get_type_hints, is_typeddict

from rl8x import keys
from rl8x.checkpoint.tree import CheckpointError
from rl8x.config.spec import FIELDS, AlgorithmSpec, EnvSpec, RunSpec
from rl8x.importing import Trust

DESCRIPTION: Final = "checkpoint.json"
FORMAT: Final = "rl8x-checkpoint"
VERSION: Final = 1
STATE: Final = "state.pt"
_WORDS: Final = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "a dict",
    types.NoneType: "null",
}


class Tracked(TypedDict):
    """The tracked run; paths are relative to the run's folder of checkpoints."""

    key: str
    job: str | None
    tracker: str
    handle: str | None
    id: str | None
    location: str | None
    spool: str | None
    names: dict[str, dict[str, str]] | None
    database: str | None


class Resolved(TypedDict):
    """What an algorithm was built with, beside the spec of its run: all hyperparameters, a drawn seed among them."""

    config: dict[str, Any]
    env_class: str | None
    spaces: list[dict[str, Any] | None]
    policy: dict[str, Any] | None
    algorithm: str
    state_reset_every: int
    clock: str


class Metadata(TypedDict):
    """What a checkpoint is."""

    format: str
    version: int
    created: str
    versions: dict[str, str]
    status: Literal["RUNNING", "KILLED", "FINISHED"]
    stop_reason: str | None
    counters: dict[str, int]
    run: Tracked
    spec: dict[str, Any]
    resolved: Resolved
    is_best: bool


class SavedCondition(TypedDict):
    """The state of a stop condition, and whether the last row met it."""

    repr: str
    state: dict[str, Any]
    met: bool


class SavedRun(TypedDict):
    """How far a `run()` has come; `callbacks` are names."""

    steps: int
    max_steps: int | None
    conditions: list[SavedCondition]
    callbacks: list[str]
    row: dict[str, float] | None
    stop_reason: str | None


class Best(TypedDict):
    """The best value so far."""

    metric: str
    mode: str
    value: float
    steps: int


class State(TypedDict):
    """The state of a run, beside the differences of further ranks."""

    trainer: dict[str, Any]
    run: SavedRun | None
    best: Best | None
    results: dict[str, Any]
    torch_generators: dict[str, Any]


def as_built(resolved: Resolved) -> RunSpec:
    """Return a spec with all that an algorithm was built with, to compare it with another's."""
    algorithm = AlgorithmSpec(algorithm=resolved["algorithm"], algorithm_config=resolved["config"])
    return RunSpec(env=EnvSpec(env=resolved["env_class"] or ""), algorithm=algorithm)


def checked_state(state: dict[str, Any]) -> State:
    """Return a checkpoint's state, if it is that of a run."""
    _check(state, State, "", STATE)
    return cast("State", state)


def checked(data: Any) -> Metadata:
    """Return the content of a checkpoint's description, if it is one."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise CheckpointError(f"{DESCRIPTION} is not that of an rl8x checkpoint")
    version = data.get("version")
    if type(version) is not int or version > VERSION:
        raise CheckpointError(f"its format has version {version!r}, and this rl8x reads up to {VERSION}: update rl8x")
    _check(data, Metadata, "", DESCRIPTION)
    metadata = cast("Metadata", data)
    for counter in (keys.STEPS, metadata["resolved"]["clock"]):
        if counter not in metadata["counters"]:
            raise CheckpointError(f"{DESCRIPTION} is odd: `counters` have no {counter!r}")
    if len(metadata["resolved"]["spaces"]) != 2:
        raise CheckpointError(f"{DESCRIPTION} is odd: `resolved.spaces` must be two, of observations and actions")
    spec_of(metadata)
    return metadata


def spec_of(metadata: Metadata, *, trust: Trust = False) -> RunSpec:
    """Return the spec of a checkpoint's run."""
    unknown = [name for name in metadata["spec"] if name not in FIELDS]
    if unknown:
        raise CheckpointError(f"{DESCRIPTION} is odd: `spec` has {unknown[0]!r:.80}, which this rl8x does not know")
    try:
        return RunSpec.read(metadata["spec"], trust=trust)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{DESCRIPTION} is odd: `spec`: {error}") from None


def _check(value: Any, kind: Any, name: str, file: str) -> None:
    """Raise `CheckpointError` unless a value is of the kind that a type hint says."""
    kinds = get_args(kind) if get_origin(kind) is types.UnionType else (kind,)
    found = next((each for each in kinds if _is_of(value, each)), None)
    if found is None:
        legal = " or ".join(map(_word, kinds))
        raise CheckpointError(f"{file} is odd: `{name}` must be {legal}; got {value!r:.80}")
    if is_typeddict(found):
        for key, hint in get_type_hints(found).items():
            dotted = f"{name}.{key}".removeprefix(".")
            if key not in value:
                raise CheckpointError(f"{file} is odd: `{dotted}` is missing")
            _check(value[key], hint, dotted, file)
    elif get_origin(found) in (dict, list):
        for place, item in value.items() if isinstance(value, dict) else enumerate(value):
            _check(item, get_args(found)[-1], f"{name}[{place!r}]", file)


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind, whatever is in it; JSON writes some floats as whole numbers."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    outer = dict if is_typeddict(kind) else get_origin(kind) or kind
    return outer is Any or type(value) is outer or (outer is float and type(value) is int)


def _word(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return _WORDS[dict if is_typeddict(kind) else get_origin(kind) or kind]
