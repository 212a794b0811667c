"""Signals, and the agreement of ranks: they check that they are alike, and decide together when to stop and save.

Rank 0 owns the tracker, the bar and the checkpoints. All ranks see the same rows, so their conditions and callbacks
decide the same. After each step they share what only one of them knows, such as a signal.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch

from rl8x import __version__
from rl8x.algorithms.base import GenericAlgorithmBase
from rl8x.algorithms.hyperparameters import RULE
from rl8x.checkpoint.tree import packed, unpacked
from rl8x.distributed import RankError, ranks
from rl8x.output import counted, described
from rl8x.trainers.rows import TrainStats

_SIGNALS: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
_MAX_SHOWN: Final = 200


# -- signals


def interruption(error: BaseException) -> str:
    """Return the stop reason of a run that a KeyboardInterrupt or SystemExit ended."""
    return f"sys.exit({error.code!r:.100})" if isinstance(error, SystemExit) else "interrupted"


class SignalGuard:
    """Notes signals within a block: SIGINT, SIGTERM and SIGHUP end the run, SIGUSR1 saves it."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.stop: signal.Signals | None = None  # the first that asked the run to end
        self.save = False  # whether a checkpoint was asked for since the last `agree`
        self.quiet = quiet
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalGuard:
        if threading.current_thread() is threading.main_thread():  # Python allows no other
            for name in _SIGNALS:
                number = getattr(signal, name, None)
                # Ignored ones stay so, as SIGINT in a shell's background job or SIGHUP under `nohup`. A handler that is
                # None was not installed by Python, and could not be restored.
                if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if received.name == "SIGUSR1":
            self.save = True
            return
        if received == signal.SIGINT and self.stop is not None:
            raise KeyboardInterrupt
        if self.stop is None:
            self.stop = received
            # If the process was started without standard error, descriptor 2 may be any file that was opened later.
            if not self.quiet and sys.__stderr__ is not None:
                # Not print(): the signal may have come in the middle of one.
                with contextlib.suppress(OSError):
                    os.write(2, f"rl8x: {received.name}: ending after this step; Ctrl-C ends at once\n".encode())

    def exception(self) -> BaseException:
        """Return the exception with the signal's exit code: KeyboardInterrupt, or SystemExit(128 + n)."""
        assert self.stop is not None
        return KeyboardInterrupt() if self.stop == signal.SIGINT else SystemExit(128 + self.stop)


def end_saved(parent: int, stop: Path, patience_s: float) -> None:
    """Save the training and end this process, from a thread, once its parent is gone or the file `stop` exists."""
    while os.getppid() == parent and not stop.exists():
        time.sleep(0.2)
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:  # `SignalGuard` handles it until all is saved
            os.kill(os.getpid(), signal.SIGTERM)
        elif os.getppid() != parent:
            break
        time.sleep(0.1)
    os._exit(1)


# -- at the start


def begin(algorithm: GenericAlgorithmBase[Any]) -> None:
    """Raise if the ranks are not alike; else give all of them the weights of rank 0."""
    params = {name: value for name, value in algorithm.params.items() if name != "device"}
    code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.parent.rglob("*.py")))
    versions = {"rl8x": __version__, "the code of rl8x": hashlib.sha256(code).hexdigest()[:12]}
    check_alike("the start", {**params, **versions, "torch": torch.__version__, "the rule of seeds": RULE})
    _copy_from_first(algorithm)


def from_first(state: Any) -> Any:
    """Return rank 0's state, or None; the state must have no segments."""
    if ranks().size == 1:
        return state
    content = packed(state) if ranks().is_first else b""
    return unpacked(ranks().spread("a state", content))


def take_over(algorithm: GenericAlgorithmBase[Any], state: Mapping[str, Any]) -> None:
    """Load rank 0's learned state; other ranks keep their own parts, such as generators."""
    own = algorithm.learned_state()
    stays = () if ranks().is_first else algorithm.of_rank
    algorithm.load_learned_state({**state, **{name: own[name] for name in stays}})


def _copy_from_first(algorithm: GenericAlgorithmBase[Any]) -> None:
    state = from_first(algorithm.learned_state())
    if not ranks().is_first:
        take_over(algorithm, state)


def check_alike(what: str, values: Mapping[str, Any]) -> None:
    """Raise `RankError` if a rank's values differ from rank 0's as texts, apart from memory addresses."""
    shown = {name: re.sub(r" at 0x[0-9a-f]+", "", str(value)) for name, value in values.items()}
    first, *others = ranks().share(what, shown)
    for rank, other in enumerate(others, 1):
        for name in dict.fromkeys((*first, *other)):
            mine, its = first.get(name, "missing"), other.get(name, "missing")
            if mine != its:
                raise RankError(
                    f"rank {rank} is not like rank 0: {name} is {its:.{_MAX_SHOWN}}, and {mine:.{_MAX_SHOWN}} on rank "
                    "0. Start all ranks with the same script, options and version, and do on all what a callback does."
                )


def execute_alike(algorithm: GenericAlgorithmBase[Any], fallen: Sequence[bool]) -> None:
    """Make all ranks run eagerly once one has fallen back, from rank 0's weights, as programs give other bits."""
    execution = algorithm.execution
    if not execution.fell_back:
        execution.fall_back()
        warnings.warn(
            f"rank {fallen.index(True)} cannot run programs, as it says itself: all ranks run eagerly.",
            RuntimeWarning,
            stacklevel=4,
        )
    _copy_from_first(algorithm)


def warn_of_other_number(before: int, algorithm: GenericAlgorithmBase[Any]) -> None:
    """Warn of what changes if another number of ranks saved the run."""
    now = ranks().size
    if before == now:
        return
    copies = 0 if algorithm.env is None else algorithm.env.num_copies
    changed = f"; {copies * now} copies of the environment instead of {copies * before}" if copies else ""
    if before < now:
        told = "new ranks begin new episodes, with random numbers and a replay of their own"
    else:
        told = "what the ranks that are gone had, such as episodes and a replay, is lost"
    saved = f"the run was saved by {counted(before, 'rank')} and goes on with {now}"
    warnings.warn(f"{saved}{changed}; {told}", RuntimeWarning, stacklevel=5)


# -- decisions


def agree(stats: TrainStats, signals: SignalGuard, saves: bool) -> tuple[bool, bool, bool]:
    """Share all ranks' decisions after a step: whether a signal ends the run, whether to save, and if a signal asks."""
    asked = signals.save  # another signal, which may come while ranks share, counts after the next step
    if asked:
        signals.save = False
    if ranks().size == 1:
        return signals.stop is not None, saves, asked
    stop = None if signals.stop is None else int(signals.stop)
    decisions = ranks().share("what follows a step", [stats.stop_reason, stop, asked, saves])
    reasons = [reason for reason, _, _, _ in decisions]
    rank = next((rank for rank, reason in enumerate(reasons) if reason is not None), None)
    if rank is not None:
        # A reason that all ranks have, such as a time limit, may be worded differently by each.
        stats.stop_reason = f"{reasons[rank]} (rank {rank})" if None in reasons else reasons[rank]
    stops = [number for _, number, _, _ in decisions if number is not None]
    if signals.stop is None and stops:
        signals.stop = signal.Signals(stops[0])
    return bool(stops), any(due for *_, due in decisions), any(asked for _, _, asked, _ in decisions)


def one_diagnosis(diagnosis: dict[str, Any]) -> dict[str, Any]:
    """Return the diagnosis of the first rank that found affected environments, the same on all ranks."""
    if ranks().size == 1:
        return diagnosis
    diagnoses = ranks().share(
        "a diagnosis", json.loads(json.dumps({**diagnosis, "rank": ranks().rank}, default=described))
    )
    return next((of_rank for of_rank in diagnoses if of_rank["environments"]), diagnoses[0])
