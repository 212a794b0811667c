"""Records a run: its tracked run and the description on its page, its checkpoints' metadata and its final report."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from rl8x import __version__, keys, models
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.algorithms.hyperparameters import flatten_params, qualified_name
from rl8x.checkpoint import Checkpoint, listed
from rl8x.checkpoint.files import Resolved
from rl8x.checkpoint.load import CHECKPOINTS_TAG, journal_of, names_in, problems_of, resolve
from rl8x.checkpoint.manager import CheckpointManager
from rl8x.checkpoint.tree import RANKS, gathered, num_ranks
from rl8x.config.describe import run_spec
from rl8x.config.files import unwritable_in
from rl8x.config.spec import RunSpec, TrainerSpec, default_of
from rl8x.distributed import ranks
from rl8x.envs.parameters import AnyEnvConfig, Parsed, function_form, function_name, inherited_config, shown_value
from rl8x.importing import import_named, is_dotted, keys_in, needs_trust, texts
from rl8x.output import counted, is_interactive, measured
from rl8x.plain import dump_run
from rl8x.tracking import MLflowTracker, NullTracker, Tracker
from rl8x.tracking.location import database_beside
from rl8x.tracking.protocol import Status
from rl8x.tracking.runs import HANDLE_PREFIX, Whereabouts, shown_path
from rl8x.tracking.secrets import hide, hide_in_data, hide_in_words
from rl8x.trainers.evaluation import Evaluations, begins, values_under
from rl8x.trainers.resume import REMADE, Origin, handle_for, job, torch_generators
from rl8x.trainers.rows import Results, counter_name
from rl8x.trainers.run_state import RunState

RUN_FILE: Final = "run.yaml"
_CONFIGS: Final = ("env_config.", "eval_env_config.")
_MAX_LENGTH: Final = 600  # characters of one text in a description, which MLflow cuts at 8000
_ENDED: Final = {"FINISHED": "Stopped", "FAILED": "Failed", "KILLED": "Interrupted"}


@dataclasses.dataclass(eq=False)
class Record:
    """Records a trainer's runs in one tracked run, in its checkpoints and in a final report."""

    algorithm: GenericAlgorithmBase[Any]
    tracker: Tracker
    checkpoints: CheckpointManager
    trainer_spec: TrainerSpec
    evaluations: Evaluations
    _: dataclasses.KW_ONLY
    run: RunState | None = None  # in progress, or the last one
    plan: RunState | None = None  # the same, but None in a loop over `step()`, which no `run()` plans
    results: Results = dataclasses.field(default_factory=Results)  # its mean returns so far
    env_config_function: str | None = None  # name of the function given as `env_config`, which cannot be saved
    is_written: bool = False  # whether a run file or a `RunSpec` describes the run
    is_open: bool = False  # whether the tracked run has begun or continued, and not ended since
    log_ms: float = 0.0  # time to log the last row
    _handle: str | None = None
    _process: int | None = None  # the process that began the run, if anything of it is stored
    _repeats: bool = False
    _only_adds: bool = False
    _resume_tags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # All params that the run has; `...`: with a value of an earlier process.
    _logged: dict[str, Any] = dataclasses.field(default_factory=dict)
    _tagged: Path | None = None
    _database: str | None = None
    # The training's `env_config`; None until it is known, as in a run that begins with an evaluation.
    _config: Parsed | None = None

    @functools.cached_property
    def spec(self) -> RunSpec:
        """The spec of the run: the one that made the trainer, else derived from its parts; each `run()` replaces it."""
        return run_spec(self.algorithm, self.trainer_spec)

    @functools.cached_property
    def resolved(self) -> Resolved:
        """The values that supplement the spec: all hyperparameters, the drawn seed, the spaces and the policy."""
        return resolve(self.algorithm)

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the run: the task (an ID, the environment's class or a data set), the algorithm and the model."""
        algorithm, cls = self.algorithm, type(self.algorithm.policy.model)
        if algorithm.env is not None:
            task = str(algorithm.env.params.get("id", type(algorithm.env.unwrapped).__name__))
        else:
            dataset = getattr(algorithm.config, "dataset", None)
            task = dataset if isinstance(dataset, str) else "data set"
        model = next((name for name, known in models.BUILTIN.items() if known is cls), cls.__name__)
        return {"task": task, "algorithm": type(algorithm).__name__, "model": model}

    # -- the tracked run

    def resume(
        self,
        checkpoint: Checkpoint,
        origin: Origin,
        results: Mapping[str, Any],
        eval_config: Parsed | None = None,
    ) -> None:
        """Continue another process's tracked run and checkpoints; rows after the checkpoint may be logged again."""
        self.checkpoints.go_on_from(checkpoint, origin.newest or checkpoint.path)
        self.resolved = resolve(self.algorithm)  # with the seed that was drawn then
        tracked = checkpoint.metadata["run"]
        handle = handle_for(tracked, self.tracker)
        if isinstance(self.tracker, MLflowTracker):
            self.tracker.resumed_journal = journal = journal_of(checkpoint.path.parent, checkpoint.metadata)
            self.tracker.names_before = tracked["names"] or {}
            if handle is not None and journal is not None:
                handle = HANDLE_PREFIX + journal.name  # a power cut may leave a journal without the ID
        self.results.load_state_dict(results)
        trained = {} if self.algorithm.env is None else self.algorithm.env.parameter_state.current.config
        function = function_name(checkpoint.spec.run.env_config)
        logged = {*self._config_params(trained, eval_config, function)}
        for name, value in checkpoint.metadata["resolved"]["config"].items():
            logged |= flatten_params(name, value).keys() if name in origin.overrides else set()
        logged |= self._params_of_ranks(num_ranks(checkpoint.state)).keys()
        self._logged = dict.fromkeys(logged, ...)
        self._handle, self._repeats, self._resume_tags = handle, True, origin.tags

    def prepare(self, run: RunState) -> None:
        """Store the options of a `run()` before it begins."""
        self.run = self.plan = run
        self.env_config_function = function_name(run.options.env_config)
        self.spec = replace(self.spec, run=run.options)
        horizons, given = self.algorithm.horizons, None if callable(run.env_config) else run.env_config
        if horizons is not None:
            following = self.evaluations.next_config if given is None else given
            current = horizons.env.parameter_state.current.config
            self._config = following if horizons.reset_is_due() else current

    def open(self, *, trains: bool = True) -> None:
        """Begin or continue the tracked run; without `trains`, additions to an ended run keep its status."""
        self.check_process()
        if self.is_open:
            if not (trains and self._only_adds):
                return
            self.close("FINISHED")
        if not (isinstance(self.tracker, NullTracker) and self.checkpoints.options is None):
            self._process = os.getpid()
        fresh = self._handle is None
        self._only_adds = not fresh and not trains
        known = self._config is not None or self.algorithm.env is None
        params = {name: value for name, value in self.params.items() if known or not name.startswith(_CONFIGS)}
        self._logged |= params
        self.tracker.start(
            params=params,
            tags={
                "rl8x.version": __version__,
                "rl8x.command": command(),
                **{f"rl8x.{name}": value for name, value in self.labels.items()},
                **({} if fresh or self._only_adds else {"rl8x.stop_reason": ""}),  # until it ends again
                **self._resume_tags,
            },
            resume=self._handle,
            # Additions to an ended run do not repeat rows of its training.
            repeats=self._repeats and not self._only_adds,
            keeps_status=self._only_adds,
        )
        self._handle, self._repeats = self.tracker.resume_handle, self._repeats and self._only_adds
        self.is_open = True
        if not self._only_adds:
            self._describe(finished=False)
        if fresh and self.run is not None:
            self._log_run_file(self.run)

    def _log_run_file(self, run: RunState) -> None:
        """Log the run file, if a file can describe the whole run; it cannot hold callbacks."""
        plain = self.spec.to_plain()
        is_whole = self.is_written or not (run.callbacks or _of_script(texts(plain)))
        if is_whole and not [*unwritable_in(plain)]:
            self.tracker.log_text(dump_run(dict(hide_in_data(plain))), RUN_FILE)

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process is a fork of the one that began the run."""
        return self._process not in (None, os.getpid())

    def check_process(self) -> None:
        """Raise `RuntimeError` if the run belongs to another process."""
        if self.is_elsewhere:
            raise RuntimeError(
                f"this trainer's run belongs to process {self._process}, and this is a fork of it, which would write "
                "into that run: make a trainer here, or go on with the run by Trainer.resume(...) once it has ended."
            )

    def log(self, row: Mapping[str, float], *, trains: bool = True) -> None:
        """Log a row at the step of the algorithm's clock; for `trains` see `open`."""
        self.open(trains=trains)
        begin, step = time.perf_counter(), self.algorithm.counters[self.algorithm.clock]
        # MLflow's pages list metrics in the order of their first logging, and compare runs by the first one.
        first = {name: row[name] for name in (*keys.EVALUATED_RETURNS, *keys.TRAINED_RETURNS) if name in row}
        self.tracker.log_metrics({**first, **row}, step)
        self.results.take(row, step)
        self.log_ms = (time.perf_counter() - begin) * 1e3

    def close(
        self, status: Status, stop_reason: str | None = None, evaluation: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """End the tracked run if it is open, with the last `evaluation`; without `stop_reason` it keeps its own."""
        if not self.is_open or self.is_elsewhere:
            return
        if not self._only_adds:
            self.update_params("lr_schedule")  # callbacks may have set the learning rate
        self.is_open = False
        if stop_reason is not None:
            self.tracker.set_tags({"rl8x.stop_reason": stop_reason})
        self.tracker.set_tags(self.algorithm.tags)
        if self._tagged is not None:
            self.tag_checkpoints()
        if not self._only_adds:
            self._log_results(finished=status == "FINISHED")
            ended = self.ending(status, stop_reason, evaluation)
            self._describe(finished=status == "FINISHED", ended=ended)
        self.tracker.finish(status)

    def _log_results(self, *, finished: bool) -> None:
        """Log the results as a tag; in MLflow also a figure of the curves and, if `finished`, the final metrics."""
        courses, row = self.results.courses, self.results.row
        if not row:
            return
        self.tracker.set_tags({"rl8x.result": str(self.results)})
        if not isinstance(self.tracker, MLflowTracker):
            return
        clock = self.algorithm.clock
        if finished:
            self.tracker.log_metrics(row, self.algorithm.counters[clock])
        series = {name: course.points for name, course in courses.items()}
        if any(len(points) > 1 for points in series.values()):
            title = f"{self.labels['algorithm']} on {self.labels['task']}"
            self.tracker.log_curves(series, title, counter_name(clock))

    # -- params

    @property
    def params(self) -> dict[str, Any]:
        """The params of the run: hyperparameters, physics, options, versions and the machine."""
        config = self.evaluations.next_config if self._config is None else self._config
        present = {
            **self.algorithm.params,
            **self._params_of_ranks(ranks().size),
            **({} if self.plan is None else self.spec.params),
            **self._config_params(config, self.evaluations.env_config, self.env_config_function),
            "versions.rl8x": __version__,
            "versions.torch": torch.__version__,
            "versions.python": platform.python_version(),
        }
        # Params that no longer apply become None, as MLflow keeps their old values.
        return present | dict.fromkeys(sorted(self._logged.keys() - present.keys()))

    def _params_of_ranks(self, size: int) -> dict[str, int]:
        """Return the params of a run with `size` ranks; empty for one rank."""
        env = self.algorithm.env
        total = {} if env is None else {"num_envs.total": env.num_copies * size}
        return {"ranks": size, **total} if size > 1 else {}

    def _config_params(self, config: Parsed, eval_config: Parsed | None, function: str | None) -> dict[str, Any]:
        """Return the environment's parameters as params, and those of evaluations that differ or were logged before."""
        env, evaluations = self.algorithm.env, self.evaluations
        trained = {} if env is None or function is not None else values_under(config, env)
        params = {f"env_config.{name}": shown_value(value) for name, value in trained.items()}
        if function is not None:
            params["env_config"] = f"function {function}"
        played = evaluations.env_in_use
        if played is None:
            return params
        if eval_config is not None or function is None:
            config = inherited_config(config, played.num_copies) if eval_config is None else eval_config
            for name, value in values_under(config, played).items():
                param = f"eval_env_config.{name}"
                if name in (eval_config or {}) or value != trained.get(name) or param in self._logged:
                    params[param] = shown_value(value)
        params["num_eval_envs"] = evaluations.num_envs
        params["eval_env"] = "training environment" if evaluations.env is None else type(played.unwrapped).__name__
        return params

    def note_config(self, env_config: AnyEnvConfig | None) -> None:
        """Log the `env_config` of a collect if it is new; of a function only its name, as rows have the values."""
        env, function, config = self.algorithm.env, self.env_config_function, self._config
        if callable(env_config):
            function = function_name(function_form(env_config))
        elif env is not None:
            current = env.parameter_state.current
            function, config = function if current.steered else None, current.config
        if (function, config) != (self.env_config_function, self._config):
            old = None if function else self._config
            if env is not None and old is not None and config is not None and begins(old, env) != begins(config, env):
                is_apart = self.evaluations.env is None or self.evaluations.env_config is not None
                self.measure_anew(evaluates_alike=is_apart, trains_alike=False)
            self.env_config_function, self._config = function, config
            self.update_params()

    def measure_anew(self, *, evaluates_alike: bool, trains_alike: bool) -> None:
        """Forget the best of metrics that are measured differently from here on."""
        for each in (self.checkpoints, self.results):
            each.forget_best(lambda name: not (evaluates_alike if name.startswith(keys.EVAL_PREFIX) else trains_alike))

    def update_params(self, *names: str) -> None:
        """Log params that are new or have changed; `names` limits them, none means all."""
        present = {name: value for name, value in self.params.items() if not names or name in names}
        new = {name: value for name, value in present.items() if str(self._logged.get(name, ...)) != str(value)}
        if self.is_open and new:
            self.tracker.log_params(new)
            self._logged |= new

    # -- checkpoints

    def tag_checkpoints(self) -> None:
        """Tag the tracked run with the folder of its checkpoints, if that has changed."""
        directory = self.checkpoints.directory
        if directory is not None and directory != self._tagged:
            self.tracker.set_tags({CHECKPOINTS_TAG: str(directory.absolute())})
            self._tagged = directory

    def save(
        self, state: Mapping[str, Any], run: RunState | None, status: str = "RUNNING", *, is_best: bool = False
    ) -> None:
        """Write a checkpoint in the background, if checkpoints are on; `run` is None in a loop over `step()`."""
        manager, counters = self.checkpoints, self.algorithm.counters
        if not ranks().first("whether there are checkpoints", manager.is_ready(counters[keys.STEPS])):
            return
        own = {"trainer": state, "torch_generators": torch_generators(self.algorithm.device)}
        try:
            others = gathered(own, manager.kept_segments if manager.is_open else ())
            # A condition's state may have become one that cannot be saved.
            run_state = None if run is None else run.state_dict()
        except TypeError as error:
            if manager.is_open:
                manager.skip(counters[keys.STEPS], error)
            return
        if not manager.is_open:  # only rank 0 writes them
            return
        metadata = {
            "status": status,
            "stop_reason": run.last.stop_reason if run is not None and run.last is not None else None,
            "counters": dict(counters),
            "run": {"key": manager.key, "job": job(), **self._tracked_run()},
            "spec": self.spec.to_plain(),
            "resolved": self.resolved,
            "is_best": is_best,
        }
        all_state = {
            **own,
            "run": run_state,
            "best": manager.best,
            **({RANKS: others} if others else {}),
            "results": self.results.state_dict(),
        }
        manager.save(counters[keys.STEPS], metadata, all_state)

    def _tracked_run(self) -> dict[str, Any]:
        """Return metadata that identifies the tracked run, with paths relative to the folder of checkpoints."""
        tracker, directory = self.tracker, self.checkpoints.directory
        journal: Path | None = getattr(tracker, "journal_folder", None)
        relative = None
        if journal is not None and directory is not None:
            relative = os.path.relpath(journal.resolve(), directory.resolve())
        # The tracker names the database's original path; the folder of both may have been moved since.
        if directory is not None:
            self._database = database_beside(directory, getattr(tracker, "database", None)) or self._database
        return {
            "tracker": qualified_name(type(tracker)),
            "handle": tracker.resume_handle,
            "id": tracker.run_id,
            "location": tracker.location,
            "journal": relative,
            "names": getattr(tracker, "names", None),
            "database": self._database,
        }

    # -- its page

    def _describe(self, *, finished: bool, ended: str | None = None) -> None:
        """Describe the run in Markdown: how it ended, its configuration, and commands that use it."""
        directory, (task, algorithm, model) = self.checkpoints.directory, self.labels.values()
        lines = [ended] if ended else []
        lines += [f"**{algorithm} on {_code(task)}**, model {_code(model)}: {self._configuration()}"]
        plan = "" if self.plan is None else _plan(self.plan)
        lines += [plan] if plan else []
        if "".join(sys.argv[:1]) not in ("", "-c"):
            lines.append(f"Command: {_code(command())}")
        lines += [f"{use[0].upper()}{use[1:]}: {_code(call)}" for use, call in self._calls(finished=finished).items()]
        folder = None if directory is None else shlex.quote(str(directory.absolute()))
        self.tracker.describe("\n\n".join(lines), folder)

    def _configuration(self) -> str:
        """Return the size and the hyperparameters with other values than their defaults."""
        config, params = self.algorithm.config, self.algorithm.params
        fields, parts = {field.name: field for field in dataclasses.fields(config)}, list[str]()
        always = ("seed",) if self.algorithm.env is None else ("num_envs", "horizon", "seed")
        for name in dict.fromkeys((*always, *fields)):
            value = getattr(config, name, None)
            if name in fields and (name in always or value != default_of(fields[name])):
                # A mapping is shown by its param if it has one: a teacher by its name, not its configuration.
                value = params.get(name, value) if name == "seed" or isinstance(value, Mapping) else value
                parts.append(f"{name} {_code(value.__name__ if isinstance(value, type) else value)}")
        return ", ".join(parts)

    @property
    def steps_made(self) -> str:
        """Text with the number of steps made, and how many of them the last `run()` made if there were several."""
        steps = self.algorithm.counters[keys.STEPS]
        own = "" if self.run is None or self.run.steps == steps else f", {self.run.steps:,} of them by the last run()"
        return counted(steps, "step") + own

    def ending(self, status: Status, stop_reason: str | None, evaluation: Mapping[str, float]) -> str:
        """Return Markdown with the best result, the last evaluation and the end, which comes first unless FINISHED."""
        results, at = self.results, self.algorithm.counters[self.algorithm.clock]
        unit = counter_name(self.algorithm.clock)
        reason = "" if stop_reason is None else f": {_code(stop_reason)}"
        end = f"{_ENDED[status]} after {self.steps_made}, {at:,} {unit}{reason}."
        lines = []
        if results.headline is not None:
            name, course = results.headline
            lines.append(f"Best {_code(name)}: {measured(course.best)}, at {course.best_step:,} {unit}.")
        for name in (f"{keys.EVAL_PREFIX}returns", f"{keys.EVAL_PREFIX}horizon_returns"):
            if f"{name}/std" in evaluation:
                evaluated_at = results.measured_at(f"{name}/mean")
                when = "" if evaluated_at in (None, at) else f", at {evaluated_at:,} of {at:,} {unit}"
                mean, std = evaluation[f"{name}/mean"], evaluation[f"{name}/std"]
                lines.append(f"Last evaluation{when}: {_code(name)} {measured(mean)} ± {std:.3g}.")
        return " ".join([*lines, end] if status == "FINISHED" else [end, *lines])

    # -- how to continue

    @property
    def _where(self) -> Whereabouts | None:
        return self.tracker.whereabouts() if isinstance(self.tracker, MLflowTracker) else None

    def report(self, status: Status) -> list[str]:
        """Return lines for the user: where the tracked run is stored, and how to continue the run."""
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
        # If the steps differ, the last checkpoint could not be written.
        finished = status == "FINISHED" and int(step) == self.algorithm.counters[keys.STEPS]
        limit = self.run.limit_reached if finished else None
        purpose = "to continue training" if finished else f"to continue from step {step}"
        word = None if where is None else where.resume_word
        call = self._call(shown_path(directory.absolute()), word, finished=finished)
        return [*lines, f"{purpose}: {call}" + ("" if limit is None else f", N above {max(limit, self.run.steps)}")]

    def _calls(self, *, finished: bool) -> dict[str, str]:
        """Return commands or calls that use the run, by their purpose; `finished`: whether it has ended."""
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
            if self.evaluations.env_in_use is not None and not _of_script(named):
                own, env = spec.trainer.eval_env, spec.env.env
                lacks = (not env or [*unwritable_in(env)]) and (not isinstance(own, str) or own == "auto")
                calls["to watch it play"] = f"rl8x play {_trusted(folder, names + named)}{' --env ENV' * bool(lacks)}"
        return calls

    def _call(self, folder: str, word: str | None, *, finished: bool) -> str:
        """Return the command that continues the run, by its folder or a short `word`, else a Python call."""
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
        if not (missing or asks or self.env_config_function is not None or _of_script(names)):
            option = "" if word is not None or store == "--trust" else store
            trust = any(map(needs_trust, names)) or (word is None and store == "--trust")
            call = "rl8x resume" + " --trust" * trust + f" {option}" * bool(option) + f" {word or shlex.quote(folder)}"
            return call + " --max-steps N" * (limit is not None) + " --stop CONDITION" * met
        _, given, uri = store.partition("--tracking-uri ")
        named = [f"tracker=MLflowTracker(tracking_uri={' '.join(shlex.split(uri))!r})"] * bool(given)
        # A function is only called if its file is trusted.
        dotted = [name for name in names_in(spec, resolved) if is_dotted(name)]
        called = [name for name in dotted if not isinstance(import_named(name, trust=True), type)]
        trust = store == "--trust" or any(map(needs_trust, called))
        arguments = [repr(folder), *missing, *named, *["trust=True"] * trust]
        options = ["max_steps=N"] * (limit is not None) + ["stop_conditions=[...]"] * (met or asks)
        options += ["env_config=..."] * (self.env_config_function is not None)
        return f"Trainer.resume({', '.join(arguments)}).run({', '.join(options)})"


def command() -> str:
    """Return the command line of this process, quoted for a shell, without passwords and tokens."""
    program, *words = sys.argv or [""]
    parts = Path(program).parts
    ours = parts[-1:] == ("rl8x",) or parts[-2:] == ("rl8x", "__main__.py") or parts[-3:] == ("rl8x", "cli", "main.py")
    return shlex.join(["rl8x" if ours else program, *hide_in_words(words)])


def _plan(run: RunState) -> str:
    """Return Markdown that says when a run stops and evaluates, and under which `env_config`."""
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
    """Return a text as Markdown code, fenced by more backticks than its longest run of them."""
    text = " ".join(hide(str(value)).split()) or " "  # secrets are hidden before a cut could split one
    text = text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]} ..."
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if text[0] == "`" or text[-1] == "`" else f"{fence}{text}{fence}"


def _trusted(folder: str, names: Iterable[str]) -> str:
    """Return a run's folder as arguments of a command, with `--trust` if a name needs code that is not trusted yet."""
    return f"{shlex.quote(folder)}{' --trust' * any(map(needs_trust, names))}"


def _of_script(names: Iterable[str]) -> bool:
    """Whether a name belongs to this process's script, so that no other process can import it."""
    return any(name.startswith("__main__.") for name in names)
