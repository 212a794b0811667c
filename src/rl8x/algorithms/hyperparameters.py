"""What all configs share: fields with default, legal range and help text in one place, presets, seeds of the parts."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import nn

from rl8x.distributed import ranks
from rl8x.execution.execution import kept_generators
from rl8x.importing import NOT_PLAIN, to_plain
from rl8x.names import did_you_mean
from rl8x.output import shown
from rl8x.plain import MAX_WHOLE, frozen, own_values

T = TypeVar("T")
# Largest divisor that is tried: no memory holds its square, and typing errors with more zeros are refused at once.
_MOST_TRIED: Final = 10**6


class Default(int):
    """A default that a better fit may replace; `dataclasses.replace` and copies keep it as a default."""


def option(
    default: T,
    help: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: float = -math.inf,
    choices: Iterable[Any] = (),
    offline: bool = False,
    idle: Callable[[Any], str | None] = lambda config: None,
) -> T:
    """Declare a hyperparameter; `offline`: only for data sets; `idle`: returns why a config makes it ineffective."""
    bounds = {"low": low, "high": high, "above": above, "choices": tuple(choices)}
    metadata = {"help": help, **bounds, "offline": offline, "idle": idle}
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def kind_of(field: dataclasses.Field[Any]) -> str:
    """Return a field's type as written, such as `int | None`, whether its module postpones annotations or not."""
    return field.type.__name__ if isinstance(field.type, type) else str(field.type)


def check_options(config: Any) -> None:
    """Check every field of a config against its `option`; replace its value by a read-only one of run files' types."""
    for field in dataclasses.fields(config):
        kind, value = kind_of(field), getattr(config, field.name)
        if isinstance(value, Mapping) and kind.startswith("dict"):
            value = dict(value)
        if isinstance(value, os.PathLike) and "str" in kind:
            value = os.fspath(value)
        object.__setattr__(config, field.name, frozen(own_values(value)))
        if field.metadata:
            _check_option(field, kind, getattr(config, field.name))


def _check_option(field: dataclasses.Field[Any], kind: str, value: Any) -> None:
    name, declared = field.name, field.metadata
    may_be_none = field.default is None or kind == "Any" or "None" in kind or "Optional" in kind
    if value is None and may_be_none:
        return
    if value is None:
        raise TypeError(f"`{name}` must be {kind}; got None. Leave it out for its default.")
    if declared["choices"]:
        if not isinstance(value, tuple(map(type, declared["choices"]))) or value not in declared["choices"]:
            listed = ", ".join(map(repr, declared["choices"]))
            raise ValueError(f"`{name}` must be one of {listed}; got {shown(value)}.")
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    example = re.search(r"such as \{(?:[^{}]|\{[^{}]*\})*\}", declared["help"])
    for begins, fits, legal in (
        ("int", is_number and isinstance(value, int), "a whole number"),
        ("float", is_number or kind not in ("float", "float | None"), "a number"),
        ("bool", isinstance(value, bool), "true or false"),
        ("dict", isinstance(value, dict), f"a mapping of names to values{f', {example[0]}' if example else ''}"),
    ):
        if kind.startswith(begins) and not fits:
            hint = " None is null in YAML." if str(value) == "None" and may_be_none else ""
            raise TypeError(f"`{name}` must be {legal}; got {shown(value)}.{hint}")
    low, high, above = declared["low"], declared["high"], declared["above"]
    most = MAX_WHOLE if kind.startswith("int") else sys.float_info.max
    if not is_number or (low <= value <= high and value > above and abs(value) <= most):
        return
    limits = (("greater than", above), ("at least", low), ("at most", high))
    bounds = [f"{words} {limit:g}" for words, limit in limits if math.isfinite(limit)]
    if not abs(value) <= most:
        bounds = [*bounds, "of at most 63 bits"] if kind.startswith("int") else ["finite"]
    raise ValueError(f"`{name}` must be {' and '.join(bounds)}; got {shown(value)}.")


def check_names(names: Iterable[str], config_class: type[Any]) -> None:
    """Raise a `ValueError` at the first name that is not a hyperparameter of a config class, with suggestions."""
    owner = config_class.__name__ + ("" if config_class.algorithm else ", a base of configs such as PPOConfig,")
    check_names_in(names, [field.name for field in dataclasses.fields(config_class)], owner)


def check_names_in(names: Iterable[str], legal: Iterable[str], owner: str) -> None:
    """Raise a `ValueError` at the first name that is not among the legal ones, with suggestions."""
    legal = list(legal)
    for name in names:
        if name not in legal:
            hint = did_you_mean(name, legal, most=3, cutoff=0.5) or f" There are {', '.join(legal)}."
            raise ValueError(f"{owner} has no option {name!r}.{hint}")


def ineffective_values(config: Any, reasons: Mapping[str, str]) -> dict[str, str]:
    """Return those of the values without effect, by name, that were given: `name=value`, each with the reason."""
    given = {field.name for field in dataclasses.fields(config) if getattr(config, field.name) != field.default}
    return {f"{name}={getattr(config, name)!r}": why for name, why in reasons.items() if name in given}


def scheduled(config: Any) -> list[str]:
    """Return the hyperparameters that have a schedule, `NAME_schedule`."""
    kinds = {field.name: kind_of(field) for field in dataclasses.fields(config)}
    return [name for name in kinds if "list[list[float]]" in kinds.get(f"{name}_schedule", "")]


def nearest_divisor(number: int, wanted: int) -> int:
    """Return the divisor of a number that is nearest to the wanted value, for numbers up to `_MOST_TRIED` squared."""
    lows = range(1, min(math.isqrt(number), _MOST_TRIED) + 1)  # finds all divisors of those
    divisors = {size for low in lows if number % low == 0 for size in (low, number // low)}
    return min(divisors, key=lambda divisor: (abs(divisor - wanted), divisor))


def flatten_params(name: str, value: Any) -> dict[str, Any]:
    """Flatten nested mappings, except schedules, to dotted names; show classes by name, and others as a file would."""
    if isinstance(value, Mapping) and not name.endswith("_schedule"):
        flat: dict[str, Any] = {}
        for key, item in value.items():
            flat.update(flatten_params(f"{name}.{key}", item))
        return flat
    if isinstance(value, type | nn.Module):
        return {name: qualified_name(value if isinstance(value, type) else type(value))}
    plain = to_plain(own_values(value))  # a tuple, or NumPy's number, reads as it does once a file has had it
    return {name: value if plain is NOT_PLAIN else plain}


def qualified_name(cls: type) -> str:
    """Return the dotted path of a class, or its bare name if it is rl8x's own."""
    return cls.__name__ if cls.__module__.startswith("rl8x.") else f"{cls.__module__}.{cls.__qualname__}"


# The seeds of these parts are the words of one SeedSequence, in this order. Any other part has its own sequence.
_PARTS: Final = ("env", "weights", "sampling", "minibatches", "eval_env", "eval_sampling")
RULE: Final = "NumPy's SeedSequence of the seed; of ranks from 1 on, of seed, rank and part"
"""Version of the derivation; ranks with different versions might draw the same numbers."""
# Parts whose seeds are the same on all ranks; all others differ between ranks.
_SHARED: Final = ("weights",)


def draw_seed(seed: int | None) -> int:
    """Return the seed given, or draw one, the same on all ranks."""
    return ranks().first("the seed", secrets.randbelow(2**31)) if seed is None else seed


def part_seed(seed: int, part: str, rank: int | None = None) -> int:
    """Derive the seed of one part of a run, in [0, 2^63)."""
    entropy: int | list[int] = seed if part in _PARTS else [seed, 1, *part.encode()]
    rank = ranks().rank if rank is None else rank
    if rank and part not in _SHARED:
        entropy = [seed, 2, rank, *part.encode()]
    words = np.random.SeedSequence(entropy).generate_state(len(_PARTS), dtype=np.uint64) >> np.uint64(1)
    return int(words[_PARTS.index(part) if part in _PARTS and isinstance(entropy, int) else 0])


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators, the CPU's and the device's, within the context; restore them afterwards."""
    with kept_generators(device):
        torch.manual_seed(seed)
        yield


PRESETS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "PPO": {
        # rl8's defaults: one batch of many copies.
        "rl8": {
            "num_envs": Default(8192),
            "horizon": 32,
            "gamma": 0.95,
            "lr": 1e-3,
            "lr_schedule": None,
            "num_sgd_iters": 4,
            "sgd_minibatch_size": None,
            "max_grad_norm": 5.0,
            "normalize_observations": False,
            "model_config": {"hidden_sizes": [256, 256]},
        },
        # Thousands of copies on a GPU: few epochs of large minibatches, a 16th of the rollout each.
        "gpu": {
            "num_envs": Default(4096),
            "horizon": 32,
            "gamma": 0.99,
            "lr_schedule": {"kind": "adaptive", "high": 1e-2},
            "num_sgd_iters": 5,
            "max_grad_norm": 1.0,
            "model_config": {"hidden_sizes": [256, 256]},
        },
    },
    # FastSAC's (Seo et al. 2025, arXiv:2512.01996).
    "SAC": {
        "gpu": {
            "num_envs": Default(1024),
            "horizon": 1,
            "batch_size": 8192,
            "updates_per_sample": 8 / 1024,
            "warmup_steps": 10 * 1024,
            "gamma": 0.97,
            "tau": 0.125,
            "critic_layer_norm": True,
            "num_atoms": 101,
            "return_bound": 5.0,
            "policy_delay": 4,
            "initial_alpha": 0.001,
        },
    },
    # FastTD3's (Seo et al. 2025, arXiv:2505.22642).
    "TD3": {
        "gpu": {
            "num_envs": Default(1024),
            "horizon": 1,
            "batch_size": 32768,
            "updates_per_sample": 2 / 1024,
            "warmup_steps": 10 * 1024,
            "buffer_size": 10 * 1024 * 1024,
            "gamma": 0.97,
            "tau": 0.1,
            "target_interval": 1,
            "exploration_noise": 0.4,
            "exploration_noise_min": 0.001,
            "target_noise": 0.001,
            "optimizer": "adamw",
            "optimizer_config": {"weight_decay": 0.1},
            "normalize_observations": True,
            "model_config": {"hidden_sizes": [512, 256, 128]},
            "critic_hidden_sizes": [1024, 512, 256],
            "num_atoms": 101,
            "return_bound": 5.0,
        },
    },
}


def with_preset(config_class: type, name: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a preset, updated by the given ones."""
    if name is None:
        return dict(given)
    algorithms = [cls.__name__.removesuffix("Config") for cls in config_class.__mro__]
    algorithm = next((each for each in algorithms if each in PRESETS), algorithms[0])
    presets = PRESETS.get(algorithm, {})
    if name not in presets:
        others = ", ".join(f"{other} ({', '.join(names)})" for other, names in PRESETS.items())
        listed = f"{algorithm} has {' and '.join(presets)}" if presets else f"{algorithm} has none; others do: {others}"
        raise ValueError(f"no preset {name!r}: {listed}.")
    left_out = {"model_config"} if given.get("model") is not None else set()
    return {key: value for key, value in presets[name].items() if key not in left_out} | dict(given)
