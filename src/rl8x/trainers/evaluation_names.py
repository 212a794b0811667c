"""How the metrics of evaluations are called: by what they measure, by a name that was given, or by an `env_config`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from rl8x import keys
from rl8x.envs import Env
from rl8x.tracking.names import MAX_NAME_LENGTH, legal_name

# First parts of the metrics that an evaluation without a name has.
_GROUPS: Final = ("returns", "horizon_returns", "rewards", "episodes")
_MAX_VALUE_NAME: Final = 60
_MAX_CONFIG_NAME: Final = 150


class EvaluationNames:
    """What an evaluation measures, and which of its metrics stands for which of a training row.

    Args:
        env: Where evaluations play; None where there are none.
        whole_episodes: Whether they play whole episodes, in an environment of their own.
    """

    def __init__(self, env: Env | None, *, whole_episodes: bool) -> None:
        self._renamed: dict[str, str | None] = {keys.EPISODES_ENDED: None}
        info = keys.info_metrics(() if env is None else env.metric_names)
        lasting = (*keys.summary("episodes/lengths"), keys.EPISODES_ENDED, *info)
        returns = keys.summary("returns")
        measured: tuple[str, ...] = ()
        if env is None:
            pass
        elif not env.episodic:
            measured = (*returns, *keys.summary("rewards"))
        elif whole_episodes:
            self._renamed |= dict.fromkeys(returns)
            self._renamed |= dict(zip(keys.summary("episodes/returns"), returns, strict=True))
            measured = (*returns, *keys.summary("rewards"), *lasting)
        else:
            sums = keys.summary("horizon_returns")
            self._renamed |= dict(zip(returns, sums, strict=True))
            measured = (*sums, *keys.summary("rewards"), *keys.summary("episodes/returns"), *lasting)
        self.measured: Final = frozenset(measured)
        """All of its metrics, without `eval/`."""

    def of(self, name: str) -> str | None:
        """Translate a metric as `conditions.base.EvaluationName` says."""
        if not _is_collected(name):
            return name
        counterpart = self._renamed.get(name, name)
        return keys.EVAL_PREFIX + counterpart if counterpart in self.measured else None

    def renamed(self, stats: Mapping[str, float]) -> dict[str, float]:
        """Return what was measured in the training environment under the names that it has in an evaluation."""
        named = {self._renamed.get(name) or name: value for name, value in stats.items()}
        return {name: value for name, value in named.items() if name in self.measured or not _is_collected(name)}


def in_group(stats: Mapping[str, float], group: str | None) -> dict[str, float]:
    """Put the metrics of an evaluation under `eval/`, or under its name there."""
    prefix = keys.EVAL_PREFIX if group is None else f"{keys.EVAL_PREFIX}{group}/"
    return {prefix + name: value for name, value in stats.items()}


def _is_collected(name: str) -> bool:
    return name in keys.COLLECT_METRICS or name.startswith(keys.INFO_PREFIX)


def config_name(config: Mapping[str, Any]) -> str:
    """Name an evaluation by its `env_config` in plain form, with characters that MLflow takes: `gravity 50`."""
    text = " ".join(f"{name} {_value_name(value)}" for name, value in config.items()) or "defaults"
    return legal_name(text if len(text) <= _MAX_CONFIG_NAME else f"{text[:_MAX_CONFIG_NAME]} {_digest(text)}")


def _value_name(value: Any) -> str:
    """Write a number, `uniform 0.25 1`, or a short digest of many values."""
    numbers = json.dumps(value, default=str)
    if len(numbers) > _MAX_VALUE_NAME:
        count = f"{len(value)} values " if isinstance(value, list | tuple) else ""
        return count + _digest(numbers)
    text = re.sub(r"[^\w.\-]+", " ", re.sub(r"\.0\b", "", numbers.replace("e+", "e")))
    return text.strip()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def check_evaluation_name(name: str) -> None:
    """Check the name of an evaluation, which its metrics have after `eval/`.

    Raises:
        TypeError: If it is no text.
        ValueError: If MLflow does not take it as it is, or an evaluation without a name has such metrics.
    """
    if not isinstance(name, str):
        raise TypeError(f"The name of an evaluation must be a text; got {name!r}.")
    longest = f"{keys.EVAL_PREFIX}{name}/episodes/lengths/mean"
    if not name.strip() or name != name.strip("/ ") or legal_name(longest) != longest:
        raise ValueError(
            "The name of an evaluation must be letters, digits, spaces and `_ - . : /`, no '/' or space at an end, "
            f"and at most {MAX_NAME_LENGTH - len(longest) + len(name)} characters; got {name!r}."
        )
    if name.split("/")[0] in _GROUPS:
        raise ValueError(
            f"An evaluation cannot be called {name!r}: eval/{name.split('/')[0]}/ are metrics of those without a name."
        )
