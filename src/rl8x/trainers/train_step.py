"""One step of a trainer: collect, learn, track the row, handle numbers that are not finite, call the callbacks.

Statistics include counts of non-finite values, under `finite/` and the quantity's name; they are copied to the host
with the other statistics. The tensors themselves are searched only if a count is not 0.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, Literal

import numpy as np
import psutil
import torch
from torch import Tensor

from rl8x import keys
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.algorithms.horizons import COLLECTED
from rl8x.checkpoint.tree import clone
from rl8x.distributed import ranks
from rl8x.envs.parameters import AnyEnvConfig
from rl8x.names import did_you_mean
from rl8x.output import shown
from rl8x.rollouts.statistics import Stats
from rl8x.tracking.protocol import legal_name, metric_value
from rl8x.trainers.ranks import execute_alike, from_first, one_diagnosis, take_over
from rl8x.trainers.record import Record
from rl8x.trainers.rows import Timer, TrainStats, pooled_row

# -- numbers that are not finite

OnNonFinite = Literal["stop", "skip", "rollback"]
PREFIX: Final = "finite/"
TAG: Final = "rl8x.non_finite"
# Causes before effects; of the collected quantities the earliest in the horizon comes first.
QUANTITIES: Final[tuple[str, ...]] = (*COLLECTED, "losses", "gradients", "parameters")
# Endless skipping would hide that the algorithm no longer learns.
MAX_IN_A_ROW: Final = 10


class NonFiniteError(ArithmeticError):
    """A quantity was not finite.

    Args:
        message: Which quantity, where and when.
        diagnosis: The quantities and places, as plain data.
    """

    def __init__(self, message: str, diagnosis: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.diagnosis = dict(diagnosis)


def diagnose(algorithm: GenericAlgorithmBase[Any], counts: Mapping[str, float]) -> dict[str, Any]:
    """Locate the non-finite values of `counts` in the last experience and the weights; return plain data."""
    places, parameters = algorithm.locate_non_finite(), dict(algorithm.policy.named_parameters())

    def order(quantity: str) -> tuple[bool, float, int]:
        gathered, rank = quantity in COLLECTED, [*QUANTITIES, quantity].index(quantity)
        return not gathered, places[quantity]["slot"] if gathered and quantity in places else math.inf, rank

    def odd(tensors: Mapping[str, Tensor | None]) -> list[str]:
        return [name for name, each in tensors.items() if each is not None and not torch.isfinite(each.detach()).all()]

    quantity = min(counts, key=order)
    place = places.get(quantity, {})
    diagnosis = {
        "quantity": quantity,  # the first that was not finite
        "also": [name for name in QUANTITIES if name in counts and name != quantity],
        "environments": place.get("environments", []),
        "num_environments": place.get("num_environments", 0),
        "slot": place.get("slot"),
        "final": place.get("final", False),  # whether in the final observation of an episode truncated in this slot
        "step": algorithm.counters[keys.STEPS],
        "counters": dict(algorithm.counters),
        "rollout": places,
        "parameters": odd(parameters),
        "gradients": odd({name: parameter.grad for name, parameter in parameters.items()}),
    }
    env = algorithm.env
    if env is None:
        return diagnosis
    return diagnosis | {"env": type(env.unwrapped).__name__, "env_config": env.config, "num_envs": env.num_copies}


def message(diagnosis: Mapping[str, Any]) -> str:
    """Return a diagnosis as one line of text."""
    where = "in no single environment"
    if diagnosis["environments"]:
        listed = ", ".join(map(str, diagnosis["environments"]))
        more = diagnosis["num_environments"] - len(diagnosis["environments"])
        where = (
            f"in environments {listed}{f' and {more} more' if more else ''}, slot {diagnosis['slot']} of the horizon"
        )
        where += ", in the final observation of an episode that was cut" if diagnosis["final"] else ""
    where += f" of rank {diagnosis['rank']}" if "rank" in diagnosis else ""
    also = f"; then {', '.join(diagnosis['also'])}" if diagnosis["also"] else ""
    return f"{diagnosis['quantity']} not finite at step {diagnosis['step']}, {where}{also}"


# -- the step

# Called with the trainer and a row.
Callback = Callable[[Any, TrainStats], Mapping[str, float] | None]
# Reading the process's memory takes as long as a step of a small environment.
_SECONDS_PER_MEMORY: Final = 0.5


class TrainStep:
    """Makes a trainer's steps, applies `on_non_finite`, and keeps the latest row and the latest evaluation."""

    def __init__(self, algorithm: GenericAlgorithmBase[Any], record: Record, on_non_finite: OnNonFinite) -> None:
        self.row: dict[str, float] = {}  # the latest row, with metrics added later
        self.eval_row: dict[str, float] = {}  # the run's latest own evaluation, under `eval/`
        self.evaluated_at = 0  # the trainer's steps at that evaluation
        # The row of the last step: an evaluation before the next one is added to it. None after a run.
        self.open_row: TrainStats | None = None
        self.pending: frozenset[str] = frozenset()  # metrics of an evaluation that are in no row yet
        self.in_run = self.calls_back = False
        self.asked_to_stop: str | None = None  # the reason given to `stop`, to end the run after this step
        self._algorithm = algorithm
        self._record = record
        self._on_non_finite = on_non_finite
        self._non_finite_in_a_row = 0  # steps
        self._before: dict[str, Any] = {}  # the learned state before the step, if it may be restored
        self._process, self._memory_mb, self._measured_at = psutil.Process(), 0.0, -math.inf
        self._timers = Timer(algorithm.device), Timer(algorithm.device)
        self._evaluated: dict[str, float] = {}  # metrics of evaluations in the current callback

    @property
    def is_in_progress(self) -> bool:
        """Whether a run or a callback is in progress, so that no other run may begin."""
        return self.in_run or self.calls_back

    def take_stop(self) -> str | None:
        """Return and clear the reason to end the run after this step; None if there is none."""
        why, self.asked_to_stop = self.asked_to_stop, None
        return why

    @property
    def known(self) -> dict[str, float]:
        """The input of an `env_config` function: metrics of the latest row and evaluation, and the counters."""
        return {**self.row, **self.eval_row, **self._algorithm.counters}

    def begin(self) -> bool:
        """Prepare compiled programs, or switch to them, at the planned step; whether waiting for them is new."""
        algorithm, execution = self._algorithm, self._algorithm.execution
        planned = execution.waits
        if execution.begin_step(algorithm.counters[keys.STEPS], prepared=algorithm.prepared):
            self._record.update_params()
        return execution.waits and not planned

    def make_row(self, env_config: AnyEnvConfig | None) -> dict[str, float]:
        """Collect, learn, and track the row; then handle non-finite numbers."""
        algorithm, counters, (collecting, learning) = self._algorithm, self._algorithm.counters, self._timers
        transitions, begin, self.open_row = counters[keys.ENV_STEPS], time.perf_counter(), None
        if self._on_non_finite != "stop":
            self._before = clone(algorithm.learned_state())
        with collecting:
            algorithm.follow(self.known)
            collected = algorithm.collect(env_config=env_config)
            self._record.note_config(env_config)
        with learning, torch.enable_grad():
            learned = algorithm.step()

        def measure() -> dict[str, float]:
            return self._profile((counters[keys.ENV_STEPS] - transitions) / (time.perf_counter() - begin))

        stats = Stats.merge(collected, learned)
        row, measured, fallen = pooled_row(stats, measure, algorithm.execution.fell_back)  # the only copy to the host
        counts = {name.removeprefix(PREFIX): row.pop(name) for name in list(row) if name.startswith(PREFIX)}
        counters[keys.ENV_EPISODES] += int(row.get(keys.EPISODES_ENDED, 0))
        row.update(counters)
        row.update(measured)
        self._record.log(row)
        if any(counts.values()):
            self._judge_non_finite({quantity: count for quantity, count in counts.items() if count != 0})
        else:
            self._non_finite_in_a_row = 0
        if any(fallen) and not all(fallen):
            execute_alike(algorithm, fallen)
        algorithm.watch(row)
        return row

    def _profile(self, env_steps_per_s: float) -> dict[str, float]:
        """Return this rank's times, rate and memory, after the step's statistics were copied to the host."""
        collecting, learning = self._timers
        measured = {"profiling/collect_ms": collecting.elapsed_ms, "profiling/step_ms": learning.elapsed_ms}
        if self._algorithm.env is not None:
            measured["profiling/env_steps_per_s"] = env_steps_per_s
        measured["profiling/tracking_ms"] = self._record.log_ms
        if time.monotonic() - self._measured_at >= _SECONDS_PER_MEMORY:
            self._memory_mb, self._measured_at = self._process.memory_info().rss / 1e6, time.monotonic()
        measured["memory/process_mb"] = self._memory_mb
        device = self._algorithm.device
        if device.type == "cuda":
            measured["memory/device_mb"] = torch.cuda.memory_allocated(device) / 1e6
        return measured

    def _judge_non_finite(self, counts: Mapping[str, float]) -> None:
        """Stop with the diagnosis, or restore earlier weights and warn."""
        algorithm, tracker, checkpoints = self._algorithm, self._record.tracker, self._record.checkpoints
        diagnosis = one_diagnosis(diagnose(algorithm, counts))
        text = message(diagnosis)
        if self._on_non_finite == "stop" or self._non_finite_in_a_row >= MAX_IN_A_ROW:
            tracker.set_tags({TAG: text})
            written = json.dumps(diagnosis, indent=1, default=str) + "\n"
            tracker.log_text(written, "diagnosis.json")
            tracker.log_text(text + "\n", "diagnosis.txt")
            path = checkpoints.write_text(f"diagnosis-step-{diagnosis['step']}.json", written)
            raise NonFiniteError(text if path is None else f"{text}; see {path}", diagnosis)
        self._non_finite_in_a_row += 1
        checkpoint = checkpoints.last_good() if self._on_non_finite == "rollback" else None
        learned, where = None, "in the last checkpoint" if checkpoint is None else f"in {checkpoint.path.name}"
        if checkpoint is not None:  # without a replay, which each rank keeps
            state = checkpoint.state["trainer"]["algorithm"]
            learned = {name: state[name] for name in algorithm.learned_state() if name in state}
        saved = from_first(learned)
        if saved is None:
            where = "before the step"
            algorithm.load_learned_state(self._before)
        else:
            take_over(algorithm, saved)
        # Counters stay, and so does the experience unless it was not finite itself.
        if diagnosis["quantity"] in COLLECTED:
            algorithm.discard_experience()
        text = f"{text}; the weights are as they were {where}"
        tracker.set_tags({TAG: text})
        warnings.warn(text, RuntimeWarning, stacklevel=4)

    def take_evaluation(self, own: dict[str, float], tracked: dict[str, float], *, is_of_run: bool) -> None:
        """Log an evaluation under its `tracked` names; if it is the run's own, add it to rows under its `own` names."""
        if is_of_run:
            self.eval_row, self.evaluated_at = own, self._algorithm.counters[keys.STEPS]
            if self.open_row is None:
                self.pending = frozenset(own)
            else:
                self.open_row.add(own)
        self._record.log(tracked, trains=False)
        self._evaluated |= tracked

    def forget_evaluation(self) -> None:
        """Leave the latest evaluation out of later rows, as their run evaluates under another configuration."""
        self.row = {name: value for name, value in self.row.items() if name not in self.eval_row}
        self.eval_row, self.pending = {}, frozenset()

    def finish(self, row: dict[str, float], trainer: Any) -> TrainStats:
        """Call all callbacks with a row of `make_row` and the latest evaluation; return it with their metrics."""
        stats = TrainStats({**self.eval_row, **row}, frozenset(row), before_step=self.pending)
        self.pending = frozenset()
        self.row = self.open_row = stats  # a callback may evaluate, and log a model with these metrics
        for callback in trainer.callbacks:
            self._evaluated, self.calls_back = {}, True
            try:
                returned = returned_metrics(callback, callback(trainer, stats), self._evaluated, stats)
            finally:
                self.calls_back = False
            returned = dict(ranks().first("what a callback measured", returned))
            new = {name: value for name, value in returned.items() if self._evaluated.get(name) != value}
            if new:
                self._record.log(new)
            stats.add(returned)
        self.row = dict(stats)
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next step depends on, except the algorithm's."""
        return {
            "eval_row": dict(self.eval_row),
            "evaluated_at": self.evaluated_at,
            "row": dict(self.row),
            "pending": sorted(self.pending),
            "compiled_since": self._algorithm.execution.compiled_since,
            "verdicts": dict(self._algorithm.execution.verdicts),
            "waits": self._algorithm.execution.waits,
            "non_finite_in_a_row": self._non_finite_in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.eval_row, self.evaluated_at = dict(state["eval_row"]), state["evaluated_at"]
        self.row, self.pending = dict(state["row"]), frozenset(state["pending"])
        execution = self._algorithm.execution
        execution.compiled_since, execution.waits = state["compiled_since"], state["waits"]
        execution.verdicts.update(state["verdicts"])
        if not self.in_run:  # a run that is in progress has planned for its own end
            self._algorithm.plan_execution(math.inf)
        self._non_finite_in_a_row = state["non_finite_in_a_row"]


# -- metrics of callbacks: declared by name, so that conditions can read them, and tracked


def declared_metrics(callback: object) -> tuple[str, ...]:
    """Return the metrics that a callback declares in its attribute `metric_names`, if it has one."""
    names: Any = getattr(callback, "metric_names", ())
    if isinstance(names, str) or not isinstance(names, Collection):  # an iterator would be used up
        raise TypeError(f"`metric_names` of {callback_name(callback)} must be a list of names; got {shown(names)}.")
    return tuple(names)


def declared_by(callbacks: Iterable[Callback]) -> set[str]:
    """Return the metrics that any of the callbacks declares."""
    return {name for callback in callbacks for name in declared_metrics(callback)}


def checked_callbacks(callbacks: Iterable[Callback], known: Collection[str]) -> tuple[Callback, ...]:
    """Return callbacks as a tuple; raise if one is not callable, or declares an illegal or taken metric name."""
    if not isinstance(callbacks, Iterable):
        raise TypeError(f"`callbacks` must be a list of functions, [...]; got {shown(callbacks)}.")
    callbacks = tuple(callbacks)
    taken = dict.fromkeys((name for name in known if not name.startswith(keys.EVAL_PREFIX)), "the trainer")
    for callback in callbacks:
        if isinstance(callback, type) or not callable(callback):
            raise TypeError(f"A callback is called with the trainer and a row of statistics; got {shown(callback)}.")
        for name in declared_metrics(callback):
            declared = f"The callback {callback_name(callback)} declares {name!r}, which is"
            if not isinstance(name, str) or not name.strip("/") or legal_name(name) != name:
                raise ValueError(f"{declared} not a legal name of a metric.")
            if name in taken:
                raise ValueError(f"{declared} a metric of {taken[name]}. Give it another name.")
            taken[name] = f"the callback {callback_name(callback)}"
    return callbacks


def returned_metrics(
    callback: Callback, returned: object, evaluated: Mapping[str, float], row: Collection[str] = ()
) -> dict[str, float]:
    """Return a callback's metrics: returned ones, and declared ones of its evaluations; warn of undeclared new ones."""
    declared, called = declared_metrics(callback), callback_name(callback)
    if not declared:
        meant = None
        if isinstance(returned, bool | np.bool_) and not returned:
            meant = "False, which does not end the run: call trainer.stop('why') for that, and return nothing."
        elif isinstance(returned, Mapping):
            known, others = {*evaluated, *row}, (keys.EVAL_PREFIX, "profiling/")
            new = [name for name in returned if name not in known and not str(name).startswith(others)]
            if new:
                declares = f"Write {called}.metric_names = {new!r}."
                meant = f"{new[0]!r}, which is not tracked: it declares no metrics. {declares}"
        if meant is not None:
            warnings.warn(f"the callback {called} returned {meant}", RuntimeWarning, stacklevel=4)
        return {}
    measured = {name: evaluated[name] for name in declared if name in evaluated}
    if returned is None:
        return measured
    if not isinstance(returned, Mapping):
        raise TypeError(
            f"The callback {called} must return its metrics by name, or None; got {shown(returned)}. To end the "
            "run call trainer.stop('why')."
        )
    for name in returned:
        if name not in declared and name not in evaluated:
            lacking = f"which its `metric_names` do not have.{did_you_mean(name, declared, cutoff=0.0)}"
            raise ValueError(f"The callback {called} returned {name!r}, {lacking}")
    return measured | {name: metric_value(name, value) for name, value in returned.items()}


def callback_name(callback: object) -> str:
    """Return the name of a callback in messages: its own, or that of its class."""
    name: str = getattr(callback, "__qualname__", None) or type(callback).__name__
    return name.rpartition("<locals>.")[-1]
