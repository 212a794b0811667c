"""Code that all measured processes share: definitions of the work, the clock, and the result as a line of JSON.

This file runs in the virtual environments of all peers, so it imports nothing but the standard library (and, where it
evaluates a policy, numpy).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

# glibc unmaps blocks over 32 MB when they are freed, and the next ones page-fault again; with these it keeps them.
MALLOC_SETTINGS = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
OBSERVATIONS = {"cartpole": 4, "pendulum": 3}
OUTPUTS = {"cartpole": 2, "pendulum": 1}
TIME_LIMITS = {"cartpole": 500, "pendulum": 200}
TARGETS = {"cartpole": 475.0, "pendulum": -200.0}
EVAL_EPISODES = 128
LAST = 100  # iterations at either end of a long run that are compared


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What one iteration does, the same for every library: a horizon of every copy, then passes over the data.

    Attributes:
        env: `"cartpole"` (CartPole-v1, 500 steps) or `"pendulum"` (Pendulum-v1, 200 steps).
        num_envs: Copies of the environment.
        horizon: Steps of each copy an iteration.
        hidden: Width of the two hidden layers of the actor and of the critic.
        minibatches: Minibatches of a pass.
        passes: Passes over the data of an iteration.
        iterations: Iterations that are timed, at least.
        normalize_rewards: Whether rewards are scaled, in the way that the library has.
    """

    env: str
    num_envs: int
    horizon: int
    hidden: int
    minibatches: int
    passes: int
    lr: float = 1e-3
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy_coeff: float = 0.0
    max_grad_norm: float = 0.5
    normalize_rewards: bool = False
    iterations: int = 8

    @property
    def transitions(self) -> int:
        """Transitions of one iteration."""
        return self.num_envs * self.horizon

    @property
    def minibatch_size(self) -> int:
        """Transitions of one minibatch."""
        return self.transitions // self.minibatches

    @property
    def flops(self) -> float:
        """Floating-point operations of the matrix products of one transition: acting, values, and the passes over it.

        F = 2 P (1 + 1/T) + E (6 P - 4 d h),  P = 2 d h + 2 h^2 + h (a + 1)
        """
        d, h, a = OBSERVATIONS[self.env], self.hidden, OUTPUTS[self.env]
        products = 2 * d * h + 2 * h * h + h * (a + 1)
        return 2 * products * (1 + 1 / self.horizon) + self.passes * (6 * products - 4 * d * h)

    @property
    def activations(self) -> float:
        """Numbers of hidden layers that one transition moves to and from memory, where nothing stays in a cache.

        Two networks of two layers of h. Acting writes each layer and reads it once; a pass writes it, reads it for the
        next layer and for the gradient of that one's weights, and does the same with its gradient: six times.

        A = 4 h (2 (1 + 1/T) + 6 E)
        """
        return 4 * self.hidden * (2 * (1 + 1 / self.horizon) + 6 * self.passes)

    def described(self) -> dict[str, Any]:
        """Return the fields and what is computed of them, for the result."""
        return {**dataclasses.asdict(self), "flops": self.flops, "activations": self.activations}


class Products:
    """The matrix products of a perceptron on a batch, `[m, k] x [k, n]` as (m, k, n), for each layer from the first.

    Attributes:
        forward: Of the outputs.
        by_weights: Of the gradients of the weights.
        by_inputs: Of the gradients of what goes into each layer.
    """

    def __init__(self, batch_size: int, widths: Sequence[int]) -> None:
        layers = list(itertools.pairwise(widths))
        self.forward = [(batch_size, inputs, outputs) for inputs, outputs in layers]
        self.by_weights = [(outputs, batch_size, inputs) for inputs, outputs in layers]
        self.by_inputs = [(batch_size, outputs, inputs) for inputs, outputs in layers]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayWork:
    """What an iteration of an algorithm with a replay does, the same for every library.

    Attributes:
        algorithm: `"dqn"`, without the options of later papers, or `"sac"`, with two critics and a learned temperature.
        env: As `Work` has it.
        num_envs: Copies of the environment.
        horizon: Steps of each copy before the updates that are due for them.
        hidden: Width of the two hidden layers of each network.
        batch_size: Transitions of an update.
        updates_per_sample: Updates for each transition.
        max_grad_norm: DQN's largest norm of a gradient; SAC clips none.
        tau: Share of the way that SAC's targets go in each update.
        blocks: Times that an iteration collects and updates.
        iterations: Iterations that are timed, at least.
    """

    algorithm: str
    env: str
    num_envs: int
    horizon: int
    hidden: int
    batch_size: int
    updates_per_sample: float
    lr: float = 1e-3
    gamma: float = 0.99
    max_grad_norm: float = 10.0
    buffer_size: int = 100_000
    warmup_steps: int = 1024
    updates_per_target: int = 250
    tau: float = 0.005
    epsilon: float = 0.05
    blocks: int = 32
    iterations: int = 8

    @property
    def transitions(self) -> int:
        """Transitions of one iteration."""
        return self.num_envs * self.horizon * self.blocks

    @property
    def updates_per_block(self) -> int:
        """Updates after `horizon` steps of each copy."""
        return round(self.num_envs * self.horizon * self.updates_per_sample)

    @property
    def products(self) -> list[tuple[int, int, int]]:
        """The matrix products of one update, `[m, k] x [k, n]` as (m, k, n).

        DQN's network goes forward and back on a batch, the target network forward once. SAC's targets take the policy
        and both target critics forward; both critics go forward and back for their loss, and for the policy's forward
        and back again, now for the gradient of the actions and not of the weights.
        """
        d, h, a = OBSERVATIONS[self.env], self.hidden, OUTPUTS[self.env]
        if self.algorithm == "dqn":
            network = Products(self.batch_size, (d, h, h, a))
            return 2 * network.forward + network.by_weights + network.by_inputs[1:]
        policy, critic = Products(self.batch_size, (d, h, h, 2 * a)), Products(self.batch_size, (d + a, h, h, 1))
        targets = policy.forward + 2 * critic.forward
        of_critics = 2 * (critic.forward + critic.by_weights + critic.by_inputs[1:])
        of_policy = policy.forward + policy.by_weights + policy.by_inputs[1:] + 2 * (critic.forward + critic.by_inputs)
        return targets + of_critics + of_policy

    def described(self) -> dict[str, Any]:
        """Return the fields and what is computed of them, for the result."""
        return {**dataclasses.asdict(self), "products": self.products}


REPLAY_WORKS = {
    **{
        f"dqn-{hidden}": ReplayWork(
            algorithm="dqn",
            env="cartpole",
            num_envs=64,
            horizon=2,
            hidden=hidden,
            batch_size=64,
            updates_per_sample=0.25,
        )
        for hidden in (64, 256)
    },
    "sac-256": ReplayWork(
        algorithm="sac",
        env="pendulum",
        num_envs=16,
        horizon=4,
        hidden=256,
        batch_size=256,
        updates_per_sample=1.0,
        blocks=2,
    ),
}

WORKS = {
    "pendulum-64": Work(env="pendulum", num_envs=4096, horizon=32, hidden=64, minibatches=8, passes=4),
    "cartpole-64": Work(env="cartpole", num_envs=4096, horizon=32, hidden=64, minibatches=8, passes=4),
    "pendulum-256": Work(env="pendulum", num_envs=4096, horizon=32, hidden=256, minibatches=8, passes=4, iterations=3),
    "rl8-defaults": Work(
        env="cartpole",
        num_envs=8192,
        horizon=32,
        hidden=256,
        minibatches=1,
        passes=4,
        gamma=0.95,
        max_grad_norm=5.0,
        normalize_rewards=True,
        iterations=2,
    ),
    "small": Work(
        env="cartpole", num_envs=16, horizon=128, hidden=64, minibatches=32, passes=10, lr=3e-4, iterations=12
    ),
}


def quick(work: Work) -> Work:
    """Shrink a work to a second or two, to see that a library runs at all; the rates mean nothing."""
    num_envs, horizon = min(work.num_envs, 64), min(work.horizon, 16)
    return dataclasses.replace(
        work,
        num_envs=num_envs,
        horizon=horizon,
        minibatches=min(work.minibatches, 4),
        hidden=32,
        passes=2,
        iterations=2,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What one process is asked to do.

    Attributes:
        work: The work of an iteration.
        threads: CPU threads.
        device: Where torch libraries put everything.
        seed: Seed of the run.
        target: Stop when a deterministic evaluation reaches this return; None times `work.iterations` iterations.
        budget_s: With a target: give up after so many seconds of training.
        warmup_s: Without a target: iterations of so many seconds after the first, which never counts, do not count, so
            that what a library does in the background when it starts (creating a database, say) is over.
        timed_s: Without a target: time for at least so many seconds.
        fresh: Without a target: so many times during the last hundred iterations, pause and have a fresh process time
            the same work, which tells how fast the machine is then.
        execution: rl8x only: how it executes.
        precision: rl8x only: the numbers it multiplies.
        tracks: rl8x only: whether it tracks to MLflow, as it does by itself.
    """

    work: Work | ReplayWork
    threads: int = 2
    device: str = "cpu"
    seed: int = 0
    target: float | None = None
    budget_s: float = 30.0
    warmup_s: float = 5.0
    timed_s: float = 4.0
    fresh: int = 0
    execution: str = "eager"
    precision: str = "fp32"
    tracks: bool = True

    @property
    def max_iterations(self) -> int:
        """Iterations that the library is asked for; the recorder stops it."""
        return 1_000_000

    def to_json(self) -> str:
        """Return the job as one line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        kind = ReplayWork if "algorithm" in fields["work"] else Work
        return cls(**{**fields, "work": kind(**fields["work"])})


class DoneError(Exception):
    """Raised out of a library's own training loop when enough was measured."""


Act = Callable[[Any], Any]


class Recorder:
    """Times iterations; with a target, evaluates after each, outside the time, and stops when it is reached."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.durations: list[float] = []
        self.fresh: list[float] = []
        self.resident_mb: list[float] = []
        self.returns: list[float] = []
        self.reached = False
        self.warmup = 1
        self._mark = 0.0

    def start(self) -> None:
        """Call this when everything is built and training begins."""
        self._synchronize()
        self._mark = time.perf_counter()

    def tick(self, act: Act | None = None) -> None:
        """Call this when an iteration has ended.

        Args:
            act: The deterministic policy, from observations `[n, d]` to actions `[n]` or `[n, 1]`, numpy arrays.

        Raises:
            DoneError: When enough was measured.
        """
        self._synchronize()
        self.durations.append(time.perf_counter() - self._mark)
        self.resident_mb.append(resident_mb())
        if self.job.target is not None and act is not None:
            self.returns.append(evaluate(self.job.work.env, act, seed=1000 + len(self.returns)))
            self.reached = self.returns[-1] >= self.job.target
        if self._enough():
            raise DoneError
        self._time_fresh()
        self._mark = time.perf_counter()

    def _enough(self) -> bool:
        job, total = self.job, sum(self.durations)
        if job.target is not None:
            return self.reached or total > job.budget_s
        if total - self.durations[0] < job.warmup_s:
            self.warmup = len(self.durations)
        timed = self.durations[self.warmup :]
        return len(timed) >= job.work.iterations and sum(timed) >= job.timed_s

    def _synchronize(self) -> None:
        if self.job.device != "cpu":
            sys.modules["torch"].cuda.synchronize()

    def _time_fresh(self) -> None:
        """In turn with the last hundred iterations, time half as many of a fresh process on the same work."""
        job, left = self.job, self.job.work.iterations - (len(self.durations) - self.warmup)
        if not job.fresh or not 0 < left <= LAST or left % (LAST // job.fresh):
            return
        work = dataclasses.replace(job.work, iterations=LAST // 2)
        other = dataclasses.replace(job, fresh=0, timed_s=0.0, work=work)
        command = [sys.executable, "-m", sys.modules["__main__"].__spec__.name]
        done = subprocess.run(command, input=other.to_json(), capture_output=True, text=True, check=True)
        row = json.loads(done.stdout.strip().splitlines()[-1])
        self.fresh.append(job.work.transitions / row["transitions_per_s"])

    def row(self) -> dict[str, Any]:
        """Summarise what was measured."""
        work, timed = self.job.work, self.durations[self.warmup :]
        row: dict[str, Any] = {
            "first_iteration_s": round(self.durations[0], 4),
            "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6, 1),
            "resident_mb": [round(self.resident_mb[0], 1), round(self.resident_mb[-1], 1)],
        }
        if self.job.device != "cpu":
            row["peak_device_mb"] = round(sys.modules["torch"].cuda.max_memory_allocated() / 1e6, 1)
        if self.job.target is not None:
            total = sum(self.durations)
            row.update(
                reached=self.reached,
                seconds=round(total, 3),
                iterations=len(self.durations),
                final_return=round(self.returns[-1], 1),
            )
        elif timed:
            rates = [work.transitions / seconds for seconds in timed]
            row.update(
                transitions_per_s=round(work.transitions / statistics.median(timed), 1),
                iterations=len(timed),
                warmup_iterations=self.warmup,
                rates=thinned(rates),
            )
            if len(timed) >= 4 * LAST:
                last = statistics.median(timed[-LAST:])
                row["last_over_first"] = round(last / statistics.median(timed[:LAST]), 4)
                if self.fresh:
                    row["last_over_fresh"] = round(last / statistics.median(self.fresh), 4)
        return row


def thinned(rates: list[float]) -> list[float]:
    """Round rates, and keep at most a hundred of them, evenly spaced."""
    step = max(1, len(rates) // 100)
    return [round(rate, 1) for rate in rates[::step]]


def resident_mb() -> float:
    """Return the memory of this process that is in RAM now, in MB (10^6 bytes)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def evaluate(env_name: str, act: Act, *, seed: int, episodes: int = EVAL_EPISODES) -> float:
    """Return the mean return of the first episode of each of some fresh copies."""
    import numpy as np

    from benchmarks.peers.numpy_envs import make

    env = make(env_name, episodes, seed)
    obs = env.reset()
    returns, running = np.zeros(episodes), np.ones(episodes, dtype=bool)
    for _ in range(TIME_LIMITS[env_name]):
        step = env.step(np.asarray(act(obs)))
        obs = step.obs
        returns += np.where(running, step.rewards, 0.0)
        running &= ~(step.terminated | step.truncated)
        if not running.any():
            break
    return float(returns.mean())


def main(library: str, train: Callable[[Job, Recorder], None], packages: tuple[str, ...] = ()) -> None:
    """Read a job from standard input, do it, and print one line of JSON.

    Args:
        library: Name of the library's distribution.
        train: Builds the work with the library, calls `recorder.start()`, and `recorder.tick()` after every iteration.
        packages: Distributions whose versions are told beside the library's.
    """
    job = Job.from_json(sys.stdin.read())
    cores = sorted(os.sched_getaffinity(0))[: job.threads]
    os.sched_setaffinity(0, cores)  # some libraries have no other way to be told how many threads to use
    answer = os.dup(1)
    os.dup2(2, 1)  # what the library prints while it trains is no part of the answer
    recorder = Recorder(job)
    with contextlib.suppress(DoneError):
        train(job, recorder)
    row = {
        "library": library,
        "version": version(library),
        "packages": {name: version(name) for name in packages},
        "python": platform.python_version(),
        "threads": job.threads,
        "device": job.device,
        "seed": job.seed,
        **recorder.row(),
    }
    sys.stdout.flush()
    os.write(answer, (json.dumps(row) + "\n").encode())
    # Threads of a library's logger must not keep the process, and nothing that they still write is wanted.
    os._exit(0)


def version(distribution: str) -> str:
    """Return the version of an installed distribution, without a local build's mark."""
    try:
        return importlib.metadata.version(distribution).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "absent"
