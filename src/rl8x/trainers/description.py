"""A run in words: its page in MLflow, and how to go on with it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from rl8x import keys, models
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.algorithms.hyperparameters import qualified_name
from rl8x.checkpoint import listed
from rl8x.checkpoint.files import Resolved
from rl8x.checkpoint.load import names_in, problems_of
from rl8x.config.files import unwritable_in
from rl8x.config.spec import RunSpec, default_of
from rl8x.envs.parameters import function_name, shown_value
from rl8x.importing import import_named, is_dotted, keys_in, needs_word
from rl8x.output import counted, is_interactive
from rl8x.tracking import MLflowTracker, Tracker
from rl8x.tracking.protocol import Status
from rl8x.tracking.runs import Whereabouts, shown_path
from rl8x.tracking.secrets import hide, hide_in_words
from rl8x.trainers.resume import REMADE
from rl8x.trainers.rows import Results, counter_name
from rl8x.trainers.run_state import RunState

RUN_FILE: Final = "run.yaml"
_MAX_LENGTH: Final = 600  # of one text in a description: MLflow cuts the whole at 8000
_MAX_CONFIGURATION: Final = 2000
_ALWAYS: Final = ("num_envs", "horizon", "seed")
_ENDED: Final = {"FINISHED": "Stopped", "FAILED": "Failed", "KILLED": "Interrupted"}


def command() -> str:
    """Return the command line of this process, as one could type it, without passwords and tokens."""
    program, *words = sys.argv or [""]
    parts = Path(program).parts
    ours = parts[-1:] == ("rl8x",) or parts[-2:] == ("rl8x", "__main__.py") or parts[-3:] == ("rl8x", "cli", "main.py")
    return shlex.join(["rl8x" if ours else program, *hide_in_words(words)])


def describe(
    algorithm: GenericAlgorithmBase[Any], run: RunState | None, calls: Mapping[str, str], ending: str | None = None
) -> str:
    """Describe a run in Markdown, first what came out of it; `calls` are what can be done with it, and how."""
    lines = [ending] if ending else []
    model = f", model {_code(model_name(algorithm))}"
    lines += [f"**{type(algorithm).__name__} on {_code(task_name(algorithm))}**{model}: {_configuration(algorithm)}"]
    plan = "" if run is None else _plan(run)
    lines += [plan] if plan else []
    if "".join(sys.argv[:1]) not in ("", "-c"):
        lines.append(f"Command: {_code(command())}")
    lines += [f"{use[0].upper()}{use[1:]}: {_code(call)}" for use, call in calls.items()]
    return "\n\n".join(lines)


def labels(algorithm: GenericAlgorithmBase[Any]) -> dict[str, str]:
    """Return tags that distinguish runs in MLflow's list."""
    named = {"task": task_name(algorithm), "algorithm": type(algorithm).__name__, "model": model_name(algorithm)}
    return {f"rl8x.{name}": value for name, value in named.items()}


def task_name(algorithm: GenericAlgorithmBase[Any]) -> str:
    """Return the name of the task: a Gymnasium id, the environment's class, or the data set."""
    if algorithm.env is not None:
        return str(algorithm.env.params.get("id", type(algorithm.env.unwrapped).__name__))
    dataset = getattr(algorithm.config, "dataset", None)
    return dataset if isinstance(dataset, str) else "data set"


def model_name(algorithm: GenericAlgorithmBase[Any]) -> str:
    """Return the name of the policy's model: as in a config if it is built in, else its class."""
    cls = type(algorithm.policy.model)
    return next((name for name, known in models.BUILTIN.items() if known is cls), cls.__name__)


def _configuration(algorithm: GenericAlgorithmBase[Any]) -> str:
    """Write the size of the run and hyperparameters that are not at their defaults, as many as there is room for."""
    fields, parts = {field.name: field for field in dataclasses.fields(algorithm.config)}, list[str]()
    for name in dict.fromkeys((*_ALWAYS, *fields)):
        value = getattr(algorithm.config, name, None)
        if name in fields and (name in _ALWAYS or value != default_of(fields[name])):
            # Of a mapping with a param of its own that one: of a teacher who it is, not how it is made.
            value = algorithm.params.get(name, value) if name == "seed" or isinstance(value, Mapping) else value
            parts.append(f"{name} {_code(value.__name__ if isinstance(value, type) else value)}")
    lengths = itertools.accumulate(map(len, parts))
    shown = 1 + sum(length <= _MAX_CONFIGURATION for length in lengths)
    rest = len(parts) - shown
    return ", ".join(parts[:shown]) + (f" and {rest} more" if rest > 0 else "")


def _plan(run: RunState) -> str:
    """Write in Markdown when a run stops and evaluates, and the `env_config` of training and evaluations."""
    ends = list(map(_code, run.names))
    if run.options.max_steps is not None:
        ends.append(_code(f"max_steps={run.options.max_steps}"))
    parts = [f"until {' or '.join(ends)}"] if ends else []
    every = run.options.steps_per_eval
    if every is not None:
        parts.append(f"evaluated after every {'step' if every == 1 else f'{every:,} steps'}")
    for name, words in (("env_config", "under"), ("eval_env_config", "evaluated under")):
        config, function = getattr(run, name), function_name(getattr(run.options, name))
        if function is not None:
            parts.append(f"{words} the function {_code(function)}")
        elif config:
            values = (_code(f"{parameter}={shown_value(value)}") for parameter, value in config.items())
            parts.append(f"{words} {', '.join(values)}")
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def steps_made(algorithm: GenericAlgorithmBase[Any], run: RunState | None) -> str:
    """Say how many steps a trainer has made, and where `run()` was called again how many of them by the last one."""
    steps = algorithm.counters[keys.STEPS]
    own = "" if run is None or run.steps == steps else f", {run.steps:,} of them by the last run()"
    return counted(steps, "step") + own


def describe_ending(
    algorithm: GenericAlgorithmBase[Any],
    run: RunState | None,
    status: str,
    stop_reason: str | None,
    evaluation: Mapping[str, float],
    results: Results,
) -> str:
    """Write in Markdown a run's best, its last evaluation, and how and why it ended; first that where it failed."""
    counters, clock = algorithm.counters, algorithm.clock
    reason = "" if stop_reason is None else f": {_code(stop_reason)}"
    count = f"{counters[clock]:,} {counter_name(clock)}"
    end = f"{_ENDED[status]} after {steps_made(algorithm, run)}, {count}{reason}."
    lines = []
    if results.headline is not None:
        name, course = results.headline
        lines.append(f"Best {_code(name)}: {course.best:.4g}, at {course.best_step:,} {counter_name(clock)}.")
    for name in ("returns", "horizon_returns"):
        mean, std = (evaluation.get(f"{keys.EVAL_PREFIX}{name}/{part}") for part in ("mean", "std"))
        if mean is not None and std is not None:
            evaluated = results.courses.get(f"{keys.EVAL_PREFIX}{name}/mean")
            early = evaluated is not None and evaluated.last_step != counters[clock]
            when = f", at {evaluated.last_step:,} of {count}" if evaluated is not None and early else ""
            lines.append(f"Last evaluation{when}: {_code(f'{keys.EVAL_PREFIX}{name}')} {mean:.4g} ± {std:.3g}.")
    return " ".join([*lines, end] if status == "FINISHED" else [end, *lines])


def _code(value: object) -> str:
    """Write a text as Markdown code, in a fence of more backticks than it has in a row."""
    text = " ".join(hide(str(value)).split()) or " "  # hidden before it is cut, maybe within a password
    text = text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]} ..."
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if text[0] == "`" or text[-1] == "`" else f"{fence}{text}{fence}"


# -- how to continue


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoingOn:
    """Says how to continue a run: by which command, or by which call where no command can."""

    spec: RunSpec
    resolved: Resolved
    run: RunState | None
    tracker: Tracker
    directory: Path | None  # of its checkpoints
    steps: int  # of the trainer
    steered: bool  # whether its `env_config` was a function, which cannot be saved
    plays: bool  # whether it has an environment to be filmed in

    @functools.cached_property
    def where(self) -> Whereabouts | None:
        """Where the tracked run is."""
        return self.tracker.whereabouts() if isinstance(self.tracker, MLflowTracker) else None

    @functools.cached_property
    def store(self) -> str:
        """The option with which a command with the folder uses the store; mostly empty."""
        return "" if self.where is None or self.directory is None else self.where.resume_option(self.directory)

    @functools.cached_property
    def asks(self) -> bool:
        """Whether it has a condition that no file can hold."""
        return bool([*unwritable_in(self.spec.run.stop_conditions)])

    def lines(self, status: Status) -> list[str]:
        """Return lines that say where the run and its tracked run are, and how to continue it."""
        where, tracker, directory = self.where, self.tracker, self.directory
        if where is not None:
            lines = where.lines()
        else:
            lines = [] if tracker.resume_handle is None else [f"run {tracker.resume_handle} is in {tracker.location}"]
        saved = [] if directory is None else listed(directory)
        if directory is None or not saved or self.run is None:
            return lines
        if status == "KILLED" and is_interactive():
            lines.append("to continue in this session: call run() of this trainer again")
        word, step = None if where is None else where.resume_word, saved[-1].name.rpartition("-")[2]
        finished = status == "FINISHED" and int(step) == self.steps  # else the last checkpoint could not be written
        limit = self.run.limit_reached if finished else None
        purpose = "to continue training" if finished else f"to continue from step {step}"
        call = self._call(shown_path(directory.absolute()), word, finished=finished)
        lines.append(f"{purpose}: {call}" + ("" if limit is None else f", N above {max(limit, self.run.steps)}"))
        return lines

    def calls(self, *, finished: bool) -> dict[str, str]:
        """Return what can be done with the run, with a command or call for each; `finished`: whether it has ended."""
        if self.directory is None or not (self.run is not None or listed(self.directory)):
            return {}
        folder = str(self.directory.absolute())
        run = shlex.quote(folder)
        calls = {"to continue training" if finished else "to continue it": self._call(folder, None, finished=finished)}
        is_apart = self.resolved["policy"] is not None  # else it is made with its algorithm
        names = [*names_in(self.spec, self.resolved, *["policy"] * is_apart)]
        if (is_apart or not problems_of(self.spec, self.resolved)) and not _of_script(names):
            calls["to take its policy elsewhere"] = f"rl8x export {_trusted(run, names)} --format pt2"
            named = [*names_in(self.spec, self.resolved, "env")]
            if self.plays and not _of_script(named):
                own, env = self.spec.trainer.eval_env, self.spec.env.env
                lacks = (not env or [*unwritable_in(env)]) and (not isinstance(own, str) or own == "auto")
                calls["to watch it play"] = f"rl8x play {_trusted(run, names + named)}{' --env ENV' * bool(lacks)}"
        return calls

    def _call(self, folder: str, word: str | None, *, finished: bool) -> str:
        """Write the command that continues the run by its folder or a `word` for it, or a Python call if none can."""
        limit = self.run.limit_reached if finished and self.run is not None else None
        met = finished and self.run is not None and (bool(self.run.met) or limit is None)
        missing, store = self._missing(), self.store
        if not (missing or self.asks or self.steered or _of_script(self._names())):
            option = "" if word is not None else store
            trust = any(map(needs_word, self._names())) or option == "--trust"
            command = "rl8x resume" + " --trust" * trust + (f" {option}" if option not in ("", "--trust") else "")
            call = f"{command} {word or shlex.quote(folder)}"
            return call + " --max-steps N" * (limit is not None) + " --stop CONDITION" * met
        _, given, uri = store.partition("--tracking-uri ")
        named = [f"tracker=MLflowTracker(tracking_uri={' '.join(shlex.split(uri))!r})"] * bool(given)
        # A function is only called where its file is trusted.
        dotted = [name for name in names_in(self.spec, self.resolved) if is_dotted(name)]
        called = [name for name in dotted if not isinstance(import_named(name, trust=True), type)]
        trust = store == "--trust" or any(map(needs_word, called))
        arguments = [repr(folder), *missing, *named, *["trust=True"] * trust]
        options = ["max_steps=N"] * (limit is not None) + ["stop_conditions=[...]"] * (met or self.asks)
        options += ["env_config=..."] * self.steered
        return f"Trainer.resume({', '.join(arguments)}).run({', '.join(options)})"

    def _names(self) -> list[str]:
        """List the names that continuing imports."""
        return [*names_in(self.spec, self.resolved), *keys_in(self.spec.run.stop_conditions)]

    def _missing(self) -> list[str]:
        """List the arguments that `Trainer.resume` needs because no checkpoint has them."""
        missing = {
            "algorithm=...": bool(problems_of(self.spec, self.resolved)),
            "tracker=...": qualified_name(type(self.tracker)) not in REMADE,
            "eval_env=...": bool([*unwritable_in(self.spec.trainer.eval_env)]),
            "callbacks=[...]": self.run is not None and bool(self.run.callbacks),
        }
        return [argument for argument, is_missing in missing.items() if is_missing]


def _trusted(run: str, names: Iterable[str]) -> str:
    """Write a run as a command takes it, with `--trust` where names run code that nobody has trusted here."""
    return f"{run}{' --trust' * any(map(needs_word, names))}"


def _of_script(names: Iterable[str]) -> bool:
    """Whether one of some names is of this process's script, which no other process finds."""
    return any(name.startswith("__main__.") for name in names)
