"""What happens to a run when things break: killed processes, damaged files, servers that go away, non-finite numbers.

    python -m benchmarks.faults                          # the full table, about an hour on two cores
    python -m benchmarks.faults --tries 0.05             # a twentieth of every number of tries
    python -m benchmarks.faults --only kill write        # some rows; the output keeps the others
    python -m benchmarks.faults --only disk --seed 17    # one try again, which the table names as an offender

Children are forked from this process after everything is imported, so that a try costs what training costs. Rows of
many tries do two at a time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.fault_configs import configs
from benchmarks.fault_disk import disk
from benchmarks.fault_http import http
from benchmarks.fault_kill import kill, kill_compiled
from benchmarks.fault_secrets import secrets
from benchmarks.fault_server import server, several
from benchmarks.fault_spools import spools
from benchmarks.fault_tools import child, config, ended, scratch, train
from benchmarks.results import version
from rl8x.algorithms import PPOConfig
from rl8x.checkpoint import CheckpointError, files
from rl8x.envs import CartPole
from rl8x.tracking import NullTracker
from rl8x.trainers import Checkpoints, NonFiniteError, Trainer

QUANTITIES = ("observations", "rewards", "actions", "losses", "gradients", "parameters")


def write(tries: int) -> dict[str, Any]:
    """SIGKILL inside a checkpoint write: at a random system call of a random checkpoint, files half written too."""
    random.seed(1)
    steps, resumed, equal = 40, 0, 0
    with scratch() as root:
        assert ended(child(lambda: train(root, tracked=False, steps=steps))) == 0, "the uninterrupted run failed"
        result = json.loads((root / "result.json").read_text())
    for _ in range(tries):
        with scratch() as root:

            def killed(root: Path = root) -> None:
                _kill_in_write(random.randrange(1, 40), random.random())
                train(root, tracked=False, steps=steps)

            code = ended(child(killed))
            assert code in (0, -signal.SIGKILL), f"the run that was to be killed ended with {code}"
            resumed += ended(child(lambda root=root: train(root, tracked=False, steps=steps))) == 0
            equal += json.loads((root / "result.json").read_text()) == result
            random.random()
    ok = resumed == equal == tries
    return {"fault": "SIGKILL inside a checkpoint write", "tries": tries, "ok": ok, "resumed": resumed, "equal": equal}


def _kill_in_write(calls: int, part: float) -> None:
    """Have this process killed at its n-th call that changes a checkpoint's folder."""
    left = calls

    def deadly(function: Callable[..., Any], before: Callable[..., None] | None = None) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                if before is not None:
                    before(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    def half(path: Path, data: Any) -> None:
        Path(path).write_bytes(bytes(data)[: int(len(data) * part)])

    def some(path: Path) -> None:
        next(Path(path).iterdir()).unlink()

    files.write_synced = deadly(files.write_synced, half)
    files.sync_folder = deadly(files.sync_folder)
    files.os = type("os", (), {**vars(os), "rename": staticmethod(deadly(os.rename))})
    files.shutil = type("shutil", (), {"rmtree": staticmethod(deadly(shutil.rmtree, some))})


def damage(tries: int) -> dict[str, Any]:
    """Flip a bit of a checkpoint, or cut, lengthen or remove one of its files."""
    random.seed(2)
    errors = right = wrong = 0
    with scratch() as root:
        trainer = Trainer(
            config().build(CartPole), tracker=NullTracker(), checkpoints=Checkpoints(root / "checkpoints")
        )
        trainer.step()
        path = trainer.save()
        assert path is not None
        original = fingerprint(files.read(path))
        for number in range(tries):
            copy = root / "damaged" / path.name
            shutil.copytree(path, copy)
            _damage(random.choice(sorted(copy.iterdir())), number)
            try:
                same = fingerprint(files.read(copy)) == original
                right, wrong = right + same, wrong + (not same)
            except CheckpointError as error:
                errors += "\n" not in str(error)
            shutil.rmtree(copy)
    fault = "flipped or cut bytes in a checkpoint"
    ok = not wrong and errors + right == tries
    return {"fault": fault, "tries": tries, "ok": ok, "clear_errors": errors, "right": right, "wrong": wrong}


def fingerprint(checkpoint: files.Checkpoint) -> str:
    """Return a text that differs where anything in a checkpoint does."""
    hashed = hashlib.sha256()

    def walk(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            hashed.update(f"{value.dtype}{list(value.shape)}".encode())
            hashed.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key, item in value.items():
                hashed.update(key.encode())
                walk(item)
        elif isinstance(value, list | tuple):
            for item in value:
                walk(item)
        else:
            hashed.update(repr(value).encode())

    walk([checkpoint.metadata, checkpoint.state])
    return hashed.hexdigest()


def _damage(file: Path, number: int) -> None:
    data = bytearray(file.read_bytes())
    kind = number % 4
    if kind in (0, 1):
        place = random.randrange(len(data) * 8)
        data[place // 8] ^= 1 << place % 8
    elif kind == 2:
        del data[random.randrange(len(data)) :]
    elif number % 8 == 3:
        data += random.randbytes(random.randrange(1, 64))
    else:
        file.unlink()
        return
    file.write_bytes(bytes(data))


def cost(tries: int) -> dict[str, Any]:
    """Time a checkpoint of rl8's default problem, on the training thread and until it is on the disk."""
    thread, disk = [], []
    with scratch() as root:
        trainer = Trainer(
            PPOConfig.rl8(seed=0, device="cpu").build(CartPole), tracker=NullTracker(), checkpoints=root / "c"
        )
        trainer.step()
        for _ in range(tries):
            trainer.checkpoints.begin()
            began = time.perf_counter()
            trainer.record.save(trainer.state_dict(), None)
            thread.append((time.perf_counter() - began) * 1e3)
            trainer.checkpoints.end()
            disk.append((time.perf_counter() - began) * 1e3)
    figures = {"max_thread_ms": round(max(thread), 1), "max_disk_ms": round(max(disk), 1)}
    return {"fault": "none: a checkpoint of the default problem", "tries": tries, "ok": max(thread) < 100, **figures}


def non_finite(tries: int) -> dict[str, Any]:
    """Put NaN or infinity into each quantity; every try does all of them."""
    found, total, missed = 0, 0, []
    for number in range(tries):
        for quantity in QUANTITIES:
            for value in (float("nan"), float("inf")):
                total += 1
                step = 2 + number % 5
                named, at = _injected(quantity, value, step)
                if (named, at) == (quantity, step):
                    found += 1
                else:
                    missed.append([quantity, value, named, at])
    fault = "non-finite values injected into each quantity"
    return {"fault": fault, "tries": total, "ok": found == total, "named_in_that_step": found, "missed": missed[:5]}


def _injected(quantity: str, value: float, step: int) -> tuple[str | None, int | None]:
    """Train with one bad number in a step; return the quantity and the step that the trainer named."""
    # One update a step: what breaks weights shows in the losses of the next.
    trainer = Trainer(config(num_sgd_iters=1).build(CartPole), tracker=NullTracker())
    for _ in range(step - 1):
        trainer.step()
    inject(trainer, quantity, value)
    try:
        for _ in range(3):
            trainer.step()
    except NonFiniteError as error:
        return error.diagnosis["quantity"], error.diagnosis["step"]
    return None, None


def inject(trainer: Trainer, quantity: str, value: float) -> None:
    """Have the next step meet a bad number in copy 5 of the environment, or in the update."""
    algorithm, env, policy = trainer.algorithm, trainer.algorithm.env, trainer.algorithm.policy
    if quantity in ("observations", "rewards"):
        advance, calls = env.advance, iter(range(10_000))

        def bad_advance(*args: Any) -> Any:
            carry, step = advance(*args)
            name = "obs" if quantity == "observations" else "rewards"
            changed = getattr(step, name).clone()
            if next(calls) == 3:
                changed[5] = value
            return carry, step._replace(**{name: changed})

        env.advance = bad_advance
    elif quantity == "actions":
        sample = policy.distribution.sample

        def bad_sample(*args: Any) -> Any:
            actions, logp = sample(*args)
            logp = logp.clone()
            logp[5] = value
            return actions, logp

        policy.distribution.sample = bad_sample
    elif quantity == "losses":
        logp = policy.distribution.logp
        policy.distribution.logp = lambda *args: logp(*args) * value
    elif quantity == "gradients":
        next(policy.parameters()).register_hook(lambda gradient: gradient * value)
    else:
        step_weights = algorithm.updater.step

        def bad_step(*args: Any) -> None:
            step_weights(*args)
            next(policy.parameters()).data.view(-1)[0] = value

        algorithm.updater.step = bad_step


FAULTS: dict[str, tuple[Callable[..., dict[str, Any]], int]] = {
    "kill": (kill, 400),
    "kill_compiled": (kill_compiled, 100),
    "disk": (disk, 200),
    "http": (http, 200),
    "secrets": (secrets, 60),
    "spools": (spools, 200),
    "write": (write, 50),
    "server": (server, 50),
    "several": (several, 5),
    "damage": (damage, 200),
    "cost": (cost, 20),
    "non_finite": (non_finite, 5),
    "configs": (configs, 2000),
}
SEEDED = ("kill", "kill_compiled", "disk", "http", "secrets")


def main() -> int:
    """Run the faults and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=float, default=1.0, metavar="SHARE", help="share of the full number of tries")
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--seed", type=int, help="do one try only, the one of this seed")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "faults.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.nice = lambda increment: 0  # type: ignore[assignment] # on a busy machine a shipper would take minutes
    if {"server", "several"} & set(arguments.only):
        import mlflow  # noqa: F401 - once here rather than in every child
    if arguments.seed is not None and not set(arguments.only) <= set(SEEDED):
        parser.error(f"--seed needs --only with one of {', '.join(SEEDED)}")

    table = []
    for name in arguments.only:
        function, tries = FAULTS[name]
        began = time.monotonic()
        tries = max(1, round(tries * arguments.tries))
        row = function(tries) if arguments.seed is None else function(1, arguments.seed)
        table.append(row | {"seconds": round(time.monotonic() - began, 1)})
        print(json.dumps(table[-1]), flush=True)
    if arguments.seed is not None:
        return 0 if all(row["ok"] for row in table) else 1
    packages = {package: version(package) for package in ("rl8x", "torch", "mlflow")}
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    before = json.loads(arguments.output.read_text())["faults"] if arguments.output.exists() else []
    kept = [row for row in before if row["fault"] not in {new["fault"] for new in table}]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps({"machine": machine | packages, "faults": kept + table}, indent=1) + "\n")
    return 0 if all(row["ok"] for row in table) else 1


if __name__ == "__main__":
    sys.exit(main())
