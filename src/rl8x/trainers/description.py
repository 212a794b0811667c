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
from rl8x.checkpoint.load import names_in, problems_of, resolve
from rl8x.checkpoint.manager import CheckpointManager
from rl8x.config.describe import run_spec
from rl8x.config.files import unwritable_in
from rl8x.config.spec import RunSpec, TrainerSpec, default_of
from rl8x.envs.parameters import function_name, shown_value
from rl8x.importing import import_named, is_dotted, keys_in, needs_word
from rl8x.output import counted, is_interactive
from rl8x.tracking import MLflowTracker, Tracker
from rl8x.tracking.protocol import Status
from rl8x.tracking.runs import Whereabouts, shown_path
from rl8x.tracking.secrets import hide, hide_in_words
from rl8x.trainers.evaluation import Evaluations
from rl8x.trainers.resume import REMADE
from rl8x.trainers.rows import Results, counter_name
from rl8x.trainers.run_state import RunState

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


class Description:
    """A trainer's run in words: what it is, how it ended, and how to go on with it."""

    def __init__(
        self,
        algorithm: GenericAlgorithmBase[Any],
        tracker: Tracker,
        checkpoints: CheckpointManager,
        trainer: TrainerSpec,
        evaluations: Evaluations,
    ) -> None:
        self.algorithm, self.tracker, self.checkpoints = algorithm, tracker, checkpoints
        self.evaluations = evaluations
        self.run: RunState | None = None  # in progress, or the last one
        self.results = Results()  # the courses of its mean returns so far
        self.steered_by: str | None = None  # the function that its `env_config` is, which cannot be saved
        self._trainer = trainer

    @functools.cached_property
    def spec(self) -> RunSpec:
        """How the run is made: by what made the trainer, else by what it is made of; each `run()` has a new one."""
        return run_spec(self.algorithm, self._trainer)

    @functools.cached_property
    def resolved(self) -> Resolved:
        """What stands beside the spec: all hyperparameters, the drawn seed, the spaces, the policy."""
        return resolve(self.algorithm)

    @property
    def labels(self) -> dict[str, str]:
        """What tells runs apart: the task (an id, the environment's class or a data set), the algorithm, the model."""
        algorithm, cls = self.algorithm, type(self.algorithm.policy.model)
        if algorithm.env is not None:
            task = str(algorithm.env.params.get("id", type(algorithm.env.unwrapped).__name__))
        else:
            dataset = getattr(algorithm.config, "dataset", None)
            task = dataset if isinstance(dataset, str) else "data set"
        model = next((name for name, known in models.BUILTIN.items() if known is cls), cls.__name__)
        return {"task": task, "algorithm": type(algorithm).__name__, "model": model}

    # -- its page

    def page(self, ending: str | None = None, *, finished: bool) -> str:
        """Describe the run in Markdown, first how it ended, last what can be done with it."""
        task, algorithm, model = self.labels.values()
        lines = [ending] if ending else []
        lines += [f"**{algorithm} on {_code(task)}**, model {_code(model)}: {self._configuration()}"]
        plan = "" if self.run is None else _plan(self.run)
        lines += [plan] if plan else []
        if "".join(sys.argv[:1]) not in ("", "-c"):
            lines.append(f"Command: {_code(command())}")
        lines += [f"{use[0].upper()}{use[1:]}: {_code(call)}" for use, call in self._calls(finished=finished).items()]
        return "\n\n".join(lines)

    def _configuration(self) -> str:
        """Write the size and the hyperparameters that are not at their defaults, as many as there is room for."""
        config, params = self.algorithm.config, self.algorithm.params
        fields, parts = {field.name: field for field in dataclasses.fields(config)}, list[str]()
        for name in dict.fromkeys((*_ALWAYS, *fields)):
            value = getattr(config, name, None)
            if name in fields and (name in _ALWAYS or value != default_of(fields[name])):
                # Of a mapping with a param of its own that one: of a teacher who it is, not how it is made.
                value = params.get(name, value) if name == "seed" or isinstance(value, Mapping) else value
                parts.append(f"{name} {_code(value.__name__ if isinstance(value, type) else value)}")
        lengths = itertools.accumulate(map(len, parts))
        shown = 1 + sum(length <= _MAX_CONFIGURATION for length in lengths)
        rest = len(parts) - shown
        return ", ".join(parts[:shown]) + (f" and {rest} more" if rest > 0 else "")

    @property
    def steps_made(self) -> str:
        """How many steps the trainer has made, and where `run()` was called again how many of them by the last one."""
        steps = self.algorithm.counters[keys.STEPS]
        own = "" if self.run is None or self.run.steps == steps else f", {self.run.steps:,} of them by the last run()"
        return counted(steps, "step") + own

    def ending(self, status: Status, stop_reason: str | None, evaluation: Mapping[str, float]) -> str:
        """Write in Markdown the best, the last evaluation, and how and why it ended; first that where it failed."""
        results, at = self.results, self.algorithm.counters[self.algorithm.clock]
        unit = counter_name(self.algorithm.clock)
        reason = "" if stop_reason is None else f": {_code(stop_reason)}"
        end = f"{_ENDED[status]} after {self.steps_made}, {at:,} {unit}{reason}."
        lines = []
        if results.headline is not None:
            name, course = results.headline
            lines.append(f"Best {_code(name)}: {course.best:.4g}, at {course.best_step:,} {unit}.")
        for name in (f"{keys.EVAL_PREFIX}returns", f"{keys.EVAL_PREFIX}horizon_returns"):
            if f"{name}/std" in evaluation:
                evaluated = results.courses.get(f"{name}/mean")
                early = evaluated is not None and evaluated.last_step != at
                when = f", at {evaluated.last_step:,} of {at:,} {unit}" if evaluated is not None and early else ""
                mean, std = evaluation[f"{name}/mean"], evaluation[f"{name}/std"]
                lines.append(f"Last evaluation{when}: {_code(name)} {mean:.4g} ± {std:.3g}.")
        return " ".join([*lines, end] if status == "FINISHED" else [end, *lines])

    # -- how to continue

    @property
    def _where(self) -> Whereabouts | None:
        return self.tracker.whereabouts() if isinstance(self.tracker, MLflowTracker) else None

    def report(self, status: Status) -> list[str]:
        """Return lines that say where the run and its tracked run are, and how to continue it."""
        tracker, directory = self.tracker, self.checkpoints.directory
        where = self._where
        if where is not None:
            lines = where.lines()
        else:
            lines = [] if tracker.resume_handle is None else [f"run {tracker.resume_handle} is in {tracker.location}"]
        saved = [] if directory is None else listed(directory)
        if directory is None or not saved or self.run is None:
            return lines
        if status == "KILLED" and is_interactive():
            lines.append("to continue in this session: call run() of this trainer again")
        step = saved[-1].name.rpartition("-")[2]
        # Else the last checkpoint could not be written.
        finished = status == "FINISHED" and int(step) == self.algorithm.counters[keys.STEPS]
        limit = self.run.limit_reached if finished else None
        purpose = "to continue training" if finished else f"to continue from step {step}"
        word = None if where is None else where.resume_word
        call = self._call(shown_path(directory.absolute()), word, finished=finished)
        return [*lines, f"{purpose}: {call}" + ("" if limit is None else f", N above {max(limit, self.run.steps)}")]

    def _calls(self, *, finished: bool) -> dict[str, str]:
        """Return what can be done with the run, with a command or call for each; `finished`: whether it has ended."""
        spec, resolved, directory = self.spec, self.resolved, self.checkpoints.directory
        if directory is None or not (self.run is not None or listed(directory)):
            return {}
        folder = str(directory.absolute())
        calls = {"to continue training" if finished else "to continue it": self._call(folder, None, finished=finished)}
        is_apart = resolved["policy"] is not None  # else it is made with its algorithm
        names = [*names_in(spec, resolved, *["policy"] * is_apart)]
        if (is_apart or not problems_of(spec, resolved)) and not _of_script(names):
            calls["to take its policy elsewhere"] = f"rl8x export {_trusted(folder, names)} --format pt2"
            named = [*names_in(spec, resolved, "env")]
            if self.evaluations.played_in is not None and not _of_script(named):
                own, env = spec.trainer.eval_env, spec.env.env
                lacks = (not env or [*unwritable_in(env)]) and (not isinstance(own, str) or own == "auto")
                calls["to watch it play"] = f"rl8x play {_trusted(folder, names + named)}{' --env ENV' * bool(lacks)}"
        return calls

    def _call(self, folder: str, word: str | None, *, finished: bool) -> str:
        """Write the command that continues the run by its folder or a `word` for it, or a Python call if none can."""
        spec, resolved, run, directory = self.spec, self.resolved, self.run, self.checkpoints.directory
        limit = run.limit_reached if finished and run is not None else None
        met = finished and run is not None and (bool(run.met) or limit is None)
        asks = bool([*unwritable_in(spec.run.stop_conditions)])  # for conditions that no file can hold
        needed = {
            "algorithm=...": bool(problems_of(spec, resolved)),
            "tracker=...": qualified_name(type(self.tracker)) not in REMADE,
            "eval_env=...": bool([*unwritable_in(spec.trainer.eval_env)]),
            "callbacks=[...]": run is not None and bool(run.callbacks),
        }
        missing = [argument for argument, is_needed in needed.items() if is_needed]
        # The option with which a command with the folder uses the store; mostly empty.
        where = self._where
        store = "" if where is None or directory is None else where.resume_option(directory)
        names = [*names_in(spec, resolved), *keys_in(spec.run.stop_conditions)]  # that are imported
        if not (missing or asks or self.steered_by is not None or _of_script(names)):
            option = "" if word is not None or store == "--trust" else store
            trust = any(map(needs_word, names)) or (word is None and store == "--trust")
            call = "rl8x resume" + " --trust" * trust + f" {option}" * bool(option) + f" {word or shlex.quote(folder)}"
            return call + " --max-steps N" * (limit is not None) + " --stop CONDITION" * met
        _, given, uri = store.partition("--tracking-uri ")
        named = [f"tracker=MLflowTracker(tracking_uri={' '.join(shlex.split(uri))!r})"] * bool(given)
        # A function is only called where its file is trusted.
        dotted = [name for name in names_in(spec, resolved) if is_dotted(name)]
        called = [name for name in dotted if not isinstance(import_named(name, trust=True), type)]
        trust = store == "--trust" or any(map(needs_word, called))
        arguments = [repr(folder), *missing, *named, *["trust=True"] * trust]
        options = ["max_steps=N"] * (limit is not None) + ["stop_conditions=[...]"] * (met or asks)
        options += ["env_config=..."] * (self.steered_by is not None)
        return f"Trainer.resume({', '.join(arguments)}).run({', '.join(options)})"


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


def _code(value: object) -> str:
    """Write a text as Markdown code, in a fence of more backticks than it has in a row."""
    text = " ".join(hide(str(value)).split()) or " "  # hidden before it is cut, maybe within a password
    text = text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]} ..."
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if text[0] == "`" or text[-1] == "`" else f"{fence}{text}{fence}"


def _trusted(folder: str, names: Iterable[str]) -> str:
    """Write a run's folder as a command takes it, with `--trust` where names run code that nobody trusted here."""
    return f"{shlex.quote(folder)}{' --trust' * any(map(needs_word, names))}"


def _of_script(names: Iterable[str]) -> bool:
    """Whether one of some names is of this process's script, which no other process finds."""
    return any(name.startswith("__main__.") for name in names)
