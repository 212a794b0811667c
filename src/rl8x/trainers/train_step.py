"""One step of a trainer: collect, learn, track the row of metrics, handle non-finite numbers, call the callbacks."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Final

import psutil
import torch

from rl8x import keys
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.distributed import ranks
from rl8x.envs.parameters import AnyEnvConfig
from rl8x.rollouts.statistics import Stats
from rl8x.trainers.callbacks import Callback, returned_metrics
from rl8x.trainers.non_finite import Guard, OnNonFinite, take_counts
from rl8x.trainers.ranks import execute_alike, pooled_row
from rl8x.trainers.record import Record
from rl8x.trainers.statistics import Timer, TrainStats

# Asking the system takes as long as a step of a small environment.
_SECONDS_PER_MEMORY: Final = 0.5


class TrainStep:
    """Makes a trainer's steps, and keeps the latest row and the latest evaluation.

    Args:
        algorithm: The algorithm that is trained.
        record: Tracks the rows.
        on_non_finite: What to do if numbers are not finite, see `Trainer`.

    Attributes:
        row: The latest row, with the metrics that joined it later; empty before the first step.
        eval_row: The latest of the run's own evaluations, under `eval/`; empty before the first.
        evaluated_at: Steps of the trainer before that evaluation.
        open_row: The row that the last single `step()` returned: an evaluation before the next step joins it.
        unseen: Metrics of an evaluation that are in no row yet.
        in_run: Whether a `run()` is in progress.
        calls_back: Whether a callback is being called.
        asked_to_stop: Why somebody wants the run to end after this step; None if nobody does.
    """

    def __init__(self, algorithm: GenericAlgorithmBase[Any], record: Record, on_non_finite: OnNonFinite) -> None:
        self.row: dict[str, float] = {}
        self.eval_row: dict[str, float] = {}
        self.evaluated_at = 0
        self.open_row: TrainStats | None = None
        self.unseen: frozenset[str] = frozenset()
        self.in_run = self.calls_back = False
        self.asked_to_stop: str | None = None
        self._algorithm = algorithm
        self._record = record
        self._guard = Guard(on_non_finite)
        self._process, self._memory_mb, self._measured_at = psutil.Process(), 0.0, -math.inf
        self._timers = Timer(algorithm.device), Timer(algorithm.device)
        self._evaluated: dict[str, float] = {}  # by evaluations within the present callback

    @property
    def is_in_progress(self) -> bool:
        """Whether a run or a callback is in progress, so that no other may begin."""
        return self.in_run or self.calls_back

    def take_stop(self) -> str | None:
        """Return why the run is to end after this step, once; None if nobody wants that."""
        why, self.asked_to_stop = self.asked_to_stop, None
        return why

    @property
    def known(self) -> dict[str, float]:
        """What an `env_config` may depend on: metrics of the latest row and evaluation, and the counters."""
        return {**self.row, **self.eval_row, **self._algorithm.counters}

    def begin(self) -> None:
        """Prepare compiled programs, or switch to them, if the step that follows is the one for it."""
        algorithm = self._algorithm
        if algorithm.execution.begin_step(algorithm.counters[keys.STEPS], prepared=algorithm.prepared):
            self._record.update_params()

    def make_row(self, env_config: AnyEnvConfig | None) -> dict[str, float]:
        """Collect, learn, and track the row; then handle non-finite numbers.

        Raises:
            NonFiniteError: If numbers are not finite, and `on_non_finite` is "stop".
        """
        algorithm, counters, (collecting, learning) = self._algorithm, self._algorithm.counters, self._timers
        transitions, begin, self.open_row = counters[keys.ENV_STEPS], time.perf_counter(), None
        self._guard.before_step(algorithm)
        with collecting:
            algorithm.follow(self.known)
            collected = algorithm.collect(env_config=env_config)
            self._record.note_config(env_config)
        with learning, torch.enable_grad():
            learned = algorithm.step()

        def measure() -> dict[str, float]:
            gathered = counters[keys.ENV_STEPS] - transitions
            return self._profile(gathered / (time.perf_counter() - begin))

        stats = Stats.merge(collected, learned)
        row, measured, fallen = pooled_row(stats, measure, algorithm.execution.fell_back)  # the one copy to the host
        not_finite = take_counts(row)
        counters[keys.ENV_EPISODES] += int(row.get(keys.EPISODES_ENDED, 0))
        row.update(counters)
        row.update(measured)
        self._record.log(row)
        decision = self._guard.judge(algorithm, not_finite)
        if decision is not None:
            self._guard.act_on(decision, algorithm, self._record.tracker, self._record.checkpoints)
        execute_alike(algorithm, fallen)
        algorithm.watch(row)
        return row

    def _profile(self, env_steps_per_s: float) -> dict[str, float]:
        """Return the times, the rate and the memory of this rank, after the step's numbers came to the host."""
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

    def take_evaluation(self, own: dict[str, float], tracked: dict[str, float], *, is_of_run: bool) -> None:
        """Track an evaluation; the run's own joins the rows from now on.

        Its `own` metrics are as `eval()` returns them; the `tracked` ones are under other names, with its duration. The
        run's own evaluation has no other name or `env_config`.
        """
        if is_of_run:
            self.eval_row, self.evaluated_at = own, self._algorithm.counters[keys.STEPS]
            if self.open_row is None:
                self.unseen = frozenset(own)
            else:
                self.open_row.add(own)
        self._record.log(tracked, trains=False)
        self._evaluated |= tracked

    def finish(self, row: dict[str, float], trainer: Any) -> TrainStats:
        """Call all callbacks with a row, and track what they return.

        `row` is what `make_row` returned, with what was measured since; what returns also has the latest evaluation and
        the callbacks' metrics.
        """
        stats = TrainStats({**self.eval_row, **row}, frozenset(row), earlier=self.unseen)
        self.unseen = frozenset()
        for callback in trainer.callbacks:
            evaluation = self.eval_row
            returned = self._call(callback, trainer, stats)
            new = {name: value for name, value in returned.items() if self._evaluated.get(name) != value}
            if new:
                self._record.log(new)
            stats.add((self.eval_row if self.eval_row is not evaluation else {}) | returned)
        self.unseen = frozenset()
        self.row = dict(stats)
        return stats

    def _call(self, callback: Callback, trainer: Any, stats: TrainStats) -> dict[str, float]:
        """Call a callback with a row; return the metrics that it measured on rank 0."""
        self._evaluated, self.calls_back = {}, True
        try:
            returned = returned_metrics(callback, callback(trainer, stats), self._evaluated, stats)
        finally:
            self.calls_back = False
        return dict(ranks().first("what a callback measured", returned))

    def state_dict(self) -> dict[str, Any]:
        """Return what the next step depends on, except for the algorithm's own state."""
        return {
            "eval_row": dict(self.eval_row),
            "evaluated_at": self.evaluated_at,
            "row": dict(self.row),
            "unseen": sorted(self.unseen),
            "compiled_since": self._algorithm.execution.compiled_since,
            "verdicts": dict(self._algorithm.execution.verdicts),
            "waits": self._algorithm.execution.waits,
            "non_finite_in_a_row": self._guard.in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self.eval_row, self.evaluated_at = dict(state["eval_row"]), state["evaluated_at"]
        self.row = dict(state.get("row", {}))
        self.unseen = frozenset(state.get("unseen", ()))
        self._algorithm.execution.compiled_since = state.get("compiled_since")
        self._algorithm.execution.verdicts.update(state.get("verdicts", {}))
        self._algorithm.execution.waits = state.get("waits", True)
        if not self.in_run:  # else it goes back within a run, whose end is planned for
            self._algorithm.plan_execution(math.inf)
        self._guard.in_a_row = state.get("non_finite_in_a_row", 0)
