"""SIGKILLs of the trainer, its shipper, or both, at random instants of random runs, which are resumed as users do."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import torch
from hypothesis import HealthCheck, Phase
from tests.combinations.cases import ALGORITHMS, OFFLINE, Case, cases
from tests.faults.tries import RUN, Ended, Record, Run, Try, command, merged
from tests.faults.truth import Points
from tests.ranks.launch import TRACKS, end, torchrun

from rl8x import Checkpoints, MLflowTracker, Trainer
from rl8x.checkpoint import CheckpointError, files
from rl8x.checkpoint.tree import mapped, tensors_in
from rl8x.replay.ring import Replay

KILLS = 10  # of each run
REAL_ONE_IN = 10  # runs whose shipper imports MLflow, as it is for users
WHOM = (("trainer",), ("trainer",), ("shipper",), ("trainer", "shipper"), ("in a write",))
JOB = """
import subprocess
from tests.forks import ForkedPython
from tests.ranks.launch import as_a_script
from rl8x.algorithms import PPOConfig
from rl8x.envs import CartPole
from rl8x.trainers import Checkpoints, Trainer

def main():
    config = PPOConfig(num_envs=8, horizon=16, num_sgd_iters=2, device="cpu", num_threads=1, seed=5, execution="eager")
    trainer = Trainer(config.build(CartPole), checkpoints=Checkpoints(every_steps=5))
    trainer.run(max_steps=40, steps_per_eval=10, progress="none")

subprocess.Popen = ForkedPython
as_a_script(main)
"""


def kill(attempt: Try, *, compiled: bool = False) -> int:
    """SIGKILL a random run, a new one every few seeds, and compare with the same run that nobody killed."""
    plan, expected = reference(attempt.seed // KILLS, attempt.template, compiled)
    whom = ("trainer",) if compiled else attempt.random.choice(WHOM)
    attempt.title += f": {whom}, {plan!r:.300}"
    over = False
    for _ in range(attempt.random.choice([1, 1, 2])):
        if over:  # it said that it was over: nobody starts it again
            break
        in_write = functools.partial(kill_in_write, attempt.random.randrange(6), attempt.random.uniform(0.0, 0.01))
        run = plan.start(attempt.work, in_write if whom == ("in a write",) else None)
        run.killed(*whom, after_s=attempt.random.uniform(0.0, expected.seconds))
        attempt.said.append(ended := run.ended())
        over = ended.code == 0 or "to continue training: " in ended.said
    if not over:
        attempt.said.append(ended := plan.start(attempt.work).ended())
        if ended.code != 0:
            attempt.note("exit code", f"the run that is resumed exits with {ended.code}: {ended.last}")
    attempt.sync()
    compare(attempt, expected)
    return 1


def kill_ranks(attempt: Try) -> int:
    """SIGKILL random ranks of a job of torchrun until it ends, and compare with a job that nobody killed."""
    expected = whole_job(attempt.template)
    job, kills = start_job(attempt.work), 0
    while kills < KILLS and has_ranks(job):
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(attempt.random.uniform(0.0, expected.seconds))
        if ranks := ranks_of(job.pid):
            kills += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(attempt.random.choice(ranks), signal.SIGKILL)
    try:
        said, _ = job.communicate(timeout=10 * expected.seconds + 300)
        attempt.said.append(Ended(job.returncode, said if job.returncode else ""))
    except subprocess.TimeoutExpired:
        end(job)
        attempt.note("hung", f"after {kills} kills of ranks")
    attempt.sync()
    compare(attempt, expected)
    return kills


@functools.lru_cache(maxsize=1)
def whole_job(template: Path) -> "Expected":
    """Have a job of torchrun that nobody kills."""
    whole = undisturbed(template)
    job = start_job(whole.work)
    has_ranks(job)
    began = time.monotonic()
    said, _ = job.communicate(timeout=2000)
    (run,) = whole.held().runs.values()
    assert whole.held().tracked == ["FINISHED"], said
    return Expected(time.monotonic() - began, {key: set(values) for key, values in run.items()}, state(whole.work))


def start_job(folder: Path) -> subprocess.Popen[str]:
    (folder / "job.py").write_text(JOB)
    return torchrun(["job.py"], folder=folder, options=["--max-restarts=99"], forks=TRACKS)


def has_ranks(job: subprocess.Popen[str]) -> bool:
    """Wait until a job has ranks; False where it has ended."""
    while job.poll() is None and not ranks_of(job.pid):
        time.sleep(0.05)
    return job.returncode is None


def ranks_of(torchrun: int) -> list[int]:
    """Return the process IDs of the ranks that torchrun has, without those that have ended."""
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(torchrun).children()
        return [child.pid for child in children if child.status() != psutil.STATUS_ZOMBIE]
    return []


def compare(attempt: Try, expected: "Expected") -> None:
    """Compare what a run came to with what it comes to that nobody kills."""
    held = attempt.held()
    attempt.check_held(held, expected.points, "FINISHED")
    keys = {key for run in held.runs.values() for key in run if not key[0].startswith("system/")}
    if more := keys - expected.points.keys():
        attempt.note("wrong", f"{sorted(more)[:3]} are logged in the run that was killed alone", len(more))
    if state(attempt.work) != expected.state:
        attempt.note("wrong", "the last checkpoint has other bits")


@dataclasses.dataclass
class Expected:
    seconds: float
    points: Points
    state: str | None


@functools.lru_cache(maxsize=2)
def reference(number: int, template: Path, compiled: bool) -> tuple["Plan", Expected]:
    """Draw a run that finishes, and train it without a fault."""
    for seed in range(number, number + 50_000_000, 1_000_000):  # some end as FAILED, by numbers that are not finite
        plan = Plan(seed, compiled=compiled, forks=number % REAL_ONE_IN != REAL_ONE_IN - 1)
        for _ in range(1 + compiled):  # what is compiled is found in a cache the second time
            whole, began = undisturbed(template), time.monotonic()
            ended = plan.start(whole.work, record=whole.record).ended(500)
            seconds, points = time.monotonic() - began, merged(whole.record.rows())
        logged = Counter(key for row in whole.record.rows() for key in row)
        once = max(logged.values(), default=1) == 1  # else `Confirmed` evaluates several times in a step
        if ended.code == 0 and once and whole.held().tracked == ["FINISHED"]:
            whole.check_held(whole.held(), points, "FINISHED")
            assert not whole.why, f"without any fault: {whole.why}"
            return plan, Expected(seconds, points, state(whole.work))
    raise RuntimeError("no run finishes")


def undisturbed(template: Path) -> Try:
    """Return a try for what nobody kills."""
    folder = template.parent / f"reference-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    return Try(folder, "reference", 0, template)


class Plan:
    """A run that can be begun, and gone on with after a kill, by starting it again and again: a script, or a run file.

    Scripts train the tasks of tests/combinations; each does what a user's does that is started again after a crash.
    """

    def __init__(self, seed: int, *, compiled: bool, forks: bool = True) -> None:
        source = random.Random(seed)
        self.forks = forks
        mode = {"execution": "compile" if compiled else "eager"}
        case = drawn_case(seed)
        self.case = dataclasses.replace(case, config={**case.config, **mode})
        self.checkpoints = {
            "every_steps": source.choice([1, 2, 3, 5, 7, None]),
            "every_minutes": None,
            "keep": source.choice([1, 3]),
        }
        # Conditions end a run somewhere; several run() calls are for runs of a known length.
        parts = 1 if self.case.conditions else source.choice([1, 1, 2, 3])
        self.limits = [source.randrange(6, 25) * (number + 1) for number in range(parts)]
        self.file: dict[str, Any] | None = None
        if source.random() < 0.3:
            drawn = {"normalize_observations": source.random() < 0.5, "normalize_rewards": source.random() < 0.5}
            config = {**RUN["algorithm_config"], **mode, **drawn, "seed": source.randrange(9)}
            physics = source.choice([{}, {"env_config": {"length": {"uniform": [0.4, 0.6]}}}])
            stop = source.choice([[], [{"hits_upper_bound": ["env/steps", 300]}], [{"wall_time": "1h"}]])
            self.file = {**RUN, "algorithm_config": config, **physics, "stop_conditions": stop}

    def __repr__(self) -> str:
        return f"{self.file or self.case!r}, {self.checkpoints}, limits {self.limits}"

    def start(self, folder: Path, first: Callable[[], None] | None = None, record: Record | None = None) -> Run:
        """Begin the run in a folder, or go on with it, to its end, in a process of its own."""

        def do() -> None:
            if first is not None:
                first()
            (record or Record()).noting(self._script if self.file is None else self._command)

        return Run(do, folder, forks=self.forks)

    def _command(self) -> None:
        Path("run.json").write_text(json.dumps({**self.file, "checkpoints": self.checkpoints}))
        command("train", "-f", "run.json", "--resume", "auto")

    def _script(self) -> None:
        case, folder = self.case, Path("checkpoints").absolute()
        options: dict[str, Any] = {"tracker": MLflowTracker()}
        try:
            algorithm = case.build(Path("replay").absolute()) if case.bad else None
            trainer = Trainer.resume(folder, auto=True, algorithm=algorithm, **options)
        except CheckpointError:
            options |= {"checkpoints": Checkpoints(folder, **self.checkpoints), **case.trainer}
            trainer = Trainer(case.build(Path("replay").absolute()), **options)
            trainer.run(**{**case.run_options(), "max_steps": self.limits[0]})
        else:
            trainer.run(progress="none")
        for limit in self.limits[1:]:
            left = limit - trainer.state["algorithm/steps"]
            if left > 0:
                trainer.run(**{**case.run_options(), "max_steps": left})


def drawn_case(seed: int) -> Case:
    """Draw one of the runs of tests/combinations that must train, and of which all can be saved."""
    found: list[Case] = []

    def keep(case: Case) -> None:
        if case.refusal is None and case.kind != "gymnasium":
            found.append(case)

    # The data sets of the others are made by the process that trains, which is killed.
    algorithm = random.Random(seed).choice([name for name in ALGORITHMS if name not in OFFLINE])
    # The first that hypothesis draws are always the same.
    checks, phases = list(HealthCheck), [Phase.generate]
    chosen = hypothesis.settings(
        max_examples=12, deadline=None, database=None, suppress_health_check=checks, phases=phases
    )
    hypothesis.seed(seed)(chosen(hypothesis.given(cases(algorithm, compiled_one_in=2))(keep)))()
    return found[-1] if found else drawn_case(seed + 1_000_000)


def kill_in_write(number: int, after_s: float) -> None:
    """Have this process killed within the n-th write of a checkpoint."""
    write, numbers = files.write, itertools.count()

    def deadly(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) == number:
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return write(*args, **kwargs)

    files.write = deadly


def state(work: Path) -> str | None:
    """Return a digest of the newest checkpoint: weights, optimizer, normalisers, counters, how the run ended."""
    folders = {path.parent for path in work.rglob("0*-step-*") if path.is_dir()}
    try:
        checkpoint = files.read(files.listed(max(folders, key=lambda path: path.stat().st_mtime))[-1])
    except (CheckpointError, IndexError, ValueError):
        return None
    state = checkpoint.state["trainer"]["algorithm"]
    if "replay" in state:  # its rows for their segments, which no two runs name alike
        plain = {name: value for name, value in state["replay"].items() if name != "segments"}
        replay = Replay(plain["capacity"], torch.device("cpu"))
        replay.load_state_dict(state["replay"])
        rows = replay.as_tensordict().flatten_keys("/") if replay.size else {}
        state = state | {"replay": plain | {"rows": dict(rows)}}
    plain, tensors = mapped(lambda leaf, _: None if isinstance(leaf, torch.Tensor) else leaf, state), tensors_in(state)
    about = [checkpoint.metadata[name] for name in ("status", "stop_reason", "counters")]
    hashed = hashlib.sha256(repr((plain, about, sorted(tensors))).encode())
    for name in sorted(tensors):
        hashed.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()
