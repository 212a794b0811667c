"""SIGKILLs of the trainer, its shipper, or both, at random instants of random runs, which are resumed as users do."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import torch
from hypothesis import HealthCheck, Phase
from tests.combinations.cases import ALGORITHMS, OFFLINE, Case, cases
from tests.faults.tries import SMALL, Ended, Record, Run, Try, command, merged
from tests.faults.truth import Held, Points, compared
from tests.ranks.launch import TRACKS, end, torchrun

from rl8x.checkpoint import CheckpointError, files
from rl8x.checkpoint.tree import mapped, tensors_in
from rl8x.replay.ring import Replay
from rl8x.tracking import MLflowTracker
from rl8x.trainers import Checkpoints, Trainer

KILLS = 10  # of each run
REAL_ONE_IN = 10  # runs whose shipper imports MLflow, as it is for users
WHOM = (("trainer",), ("trainer",), ("shipper",), ("trainer", "shipper"), ("in a write",))
CONDITIONS: list[Any] = [
    {"plateau": {"name": "losses/total", "patience": 6, "rtol": 0.5}},
    {"hits_upper_bound": ["env/steps", 900]},
    {"any": [{"stops_increasing": {"name": "rewards/mean", "patience": 9}}, {"wall_time": "1h"}]},
    {"all": [{"hits_lower_bound": ["losses/total", 1e9]}, {"hits_upper_bound": ["algorithm/steps", 20]}]},
]

NUM_RANKS = 2
JOB = """
import subprocess
from tests.forks import ForkedPython
from tests.ranks.launch import as_a_script
from rl8x.algorithms import PPOConfig
from rl8x.envs import CartPole
from rl8x.trainers import Checkpoints, Trainer

def main():
    options = {"execution": "eager", "normalize_observations": True, "model_config": {"hidden_sizes": [16]}}
    config = PPOConfig(num_envs=8, horizon=16, num_sgd_iters=2, device="cpu", num_threads=1, seed=5, **options)
    trainer = Trainer(config.build(CartPole), checkpoints=Checkpoints(every_steps=5))
    trainer.run(max_steps=100, steps_per_eval=20, progress="none")

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
        in_write = functools.partial(kill_in_write, attempt.random.randrange(1, 40), attempt.random.random())
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
    job, kills, before = start_job(attempt.work), 0, set[int]()
    while job.poll() is None and kills < KILLS:
        deadline = time.monotonic() + 120
        while len(ranks := ranks_of(job.pid)) < NUM_RANKS or before & ranks:
            if job.poll() is not None or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(attempt.random.uniform(0.0, expected.seconds))
        if ranks_of(job.pid) != ranks or len(ranks) < NUM_RANKS:  # one of them has come to its end
            break
        os.kill(attempt.random.choice(sorted(ranks)), signal.SIGKILL)
        before, kills = before | ranks, kills + 1
    try:
        said, _ = job.communicate(timeout=10 * expected.seconds + 60)
        attempt.said.append(Ended(job.returncode, said if job.returncode else "", ""))
    except subprocess.TimeoutExpired:
        end(job)
        attempt.note("hung", f"after {kills} kills of ranks")
    attempt.sync()
    compare(attempt, expected)
    return kills


@functools.lru_cache(maxsize=1)
def whole_job(template: Path) -> "Expected":
    """Have a job of torchrun that nobody kills."""
    folder, began = emptied(template), time.monotonic()
    said, _ = start_job(folder).communicate(timeout=500)
    points = {
        key: set(values)
        for run in Held.read(folder / "mlruns" / "mlflow.db").runs.values()
        for key, values in run.items()
    }
    assert points, said
    return Expected(time.monotonic() - began, points, state(folder))


def start_job(folder: Path) -> subprocess.Popen[str]:
    """Start the job in a folder."""
    (folder / "job.py").write_text(JOB)
    return torchrun(["job.py"], num_ranks=NUM_RANKS, folder=folder, options=["--max-restarts=99"], forks=TRACKS)


def ranks_of(torchrun: int) -> set[int]:
    """Return the process IDs of the ranks that torchrun has, without those that have ended."""
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(torchrun).children()
        return {child.pid for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE}
    return set()


def compare(attempt: Try, expected: "Expected") -> None:
    """Compare what a run came to with what it comes to that nobody kills."""
    held = attempt.held()
    if held.tracked != ["FINISHED"]:
        extra = len(held.tracked) - 1
        attempt.note("second run" if extra > 0 else "status", str(held.tracked), max(1, extra))
    for what, found in compared(expected.points, held).items():
        if found:
            attempt.note(what, f"{len(found)} points: {sorted(found)[:3]}", len(found))
    more = {
        key for run in held.runs.values() for key in run if not key[0].startswith("system/")
    } - expected.points.keys()
    if more:
        attempt.note("wrong", f"{sorted(more)[:3]} are logged in the run that was killed alone", len(more))
    if state(attempt.work) != expected.state:
        attempt.note("wrong", "the last checkpoint has other bits")


@dataclasses.dataclass
class Expected:
    """What a run comes to that nobody kills."""

    seconds: float
    points: Points
    state: str | None


@functools.lru_cache(maxsize=1)
def reference(number: int, template: Path, compiled: bool) -> tuple["Plan", Expected]:
    """Draw a run that finishes, and train it without a fault."""
    for seed in range(number, number + 50_000_000, 1_000_000):  # some end as FAILED, by numbers that are not finite
        plan = Plan(seed, compiled=compiled, forks=number % REAL_ONE_IN != REAL_ONE_IN - 1)
        for _ in range(1 + compiled):  # what is compiled is found in a cache the second time
            folder, record, began = emptied(template), Record(), time.monotonic()
            ended = plan.start(folder, record=record).ended(500)
            seconds = time.monotonic() - began
        held = Held.read(folder / "mlruns" / "mlflow.db")
        if ended.code == 0 and held.tracked == ["FINISHED"]:
            points = merged(record.rows())
            found = compared(points, held)
            assert not any(found.values()), f"without any fault: {found}"
            return plan, Expected(seconds, points, state(folder))
    raise RuntimeError("no run finishes")


def emptied(template: Path) -> Path:
    """Return a folder for what nobody kills, with an empty database."""
    folder = template.parent / f"reference-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "mlruns").mkdir(parents=True)
    shutil.copy(template, folder / "mlruns" / "mlflow.db")
    return folder


class Plan:
    """A run that can be begun, and gone on with after a kill, by starting it again and again: a script, or a run file.

    Scripts train the tasks of tests/combinations; each does what a user's does that is started again after a crash.
    """

    def __init__(self, seed: int, *, compiled: bool, forks: bool = True) -> None:
        source = random.Random(seed)
        self.forks = forks
        mode = "compile" if compiled else "eager"
        self.file = drawn_file(source, mode) if source.random() < 0.35 else None
        case = drawn_case(seed)
        self.case = dataclasses.replace(case, config={**case.config, "execution": mode})
        self.checkpoints = {
            "every_steps": source.choice([1, 2, 3, 5, 7, None]),
            "every_minutes": None,
            "keep": source.choice([1, 3]),
        }
        # Conditions end a run somewhere; several run() calls are for runs of a known length.
        parts = 1 if self.case.conditions else source.choice([1, 1, 2, 3])
        self.limits = [source.randrange(6, 25) * (number + 1) for number in range(parts)]
        self.callbacks = [doubled_reward] if source.random() < 0.4 else []

    def __repr__(self) -> str:
        """Write what it is made of."""
        return f"{self.file or self.case!r}, {self.checkpoints}, limits {self.limits}, {self.callbacks}"

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
        options: dict[str, Any] = {"tracker": MLflowTracker(), "callbacks": self.callbacks}
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


def drawn_file(source: random.Random, mode: str) -> dict[str, Any]:
    """Draw a run file; chunks of the large ones are shared by two threads where they are compiled."""
    name, (parameter, low, high) = source.choice(
        [
            ("CartPole", ("length", 0.4, 0.6)),
            ("Pendulum", ("mass", 0.9, 1.1)),
            ("CartPoleInfinite", ("length", 0.4, 0.6)),
        ]
    )
    model, sizes = source.choice(
        [("lstm", {"hidden_size": 8}), ("attention", {"width": 8}), *[(None, {"hidden_sizes": [8]})] * 2]
    )
    large = mode == "compile" and model is None and source.random() < 0.3
    config = {
        **SMALL,
        "num_envs": 1024 if large else source.choice([1, 4, 8]),
        "horizon": 32 if large else 8,
        "num_threads": 2 if large else 1,
        "seed": source.randrange(9),
        "model": model,
        "model_config": sizes,
        "seq_len": 1 if model is None else source.choice([2, 8]),
        "normalize_observations": source.random() < 0.5,
        "normalize_rewards": source.random() < 0.5,
        "normalize_values": source.random() < 0.5,
        "lr_schedule": source.choice([None, [[0, 1e-2], [400, 1e-4]]]),
        "horizons_per_env_reset": source.choice([1, 2]) if name == "CartPoleInfinite" else -1,
        "execution": mode,
    }
    run: dict[str, Any] = {"env": name, "algorithm_config": config, "max_steps": source.randrange(8, 40)}
    run |= {"progress": "none", "steps_per_eval": source.choice([None, 4, 8]), "num_eval_envs": 2}
    run["env_config"] = source.choice([None, {parameter: low}, {parameter: {"uniform": [low, high]}}])
    run["stop_conditions"] = [source.choice(CONDITIONS)] if source.random() < 0.5 else []
    return run


def doubled_reward(trainer: object, stats: Any) -> dict[str, float]:
    """Measure something, as a callback does."""
    return {"doubled/reward": 2 * stats["rewards/mean"]}


doubled_reward.metric_names = ("doubled/reward",)


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


def kill_in_write(calls: int, part: float) -> None:
    """Have this process killed at its n-th call that changes a checkpoint's folder, files half written too."""
    left = calls

    def deadly(function: Callable[..., Any], before: Callable[..., None] = lambda *args: None) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                before(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    def half(path: Path, data: Any) -> None:
        Path(path).write_bytes(bytes(data)[: int(len(data) * part)])

    files.write_synced = deadly(files.write_synced, half)
    files.sync_folder = deadly(files.sync_folder)
    files.os = type("os", (), {**vars(os), "rename": staticmethod(deadly(os.rename))})
    remove = deadly(shutil.rmtree, lambda path: next(Path(path).iterdir()).unlink())
    files.shutil = type("shutil", (), {"rmtree": staticmethod(remove)})


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
