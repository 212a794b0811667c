"""Small trainers, what happens to them, and what is read back of them."""

import os

import torch

from rl8x import MemoryTracker, PPOConfig, Trainer, keys
from rl8x.checkpoint import listed
from rl8x.checkpoint.tree import tensors_in
from rl8x.envs import CartPole

SMALL = {"num_envs": 4, "horizon": 8, "seed": 5, "device": "cpu", "model_config": {"hidden_sizes": [8]}}


def config(**options):
    return PPOConfig.rl8(**(SMALL | {"num_sgd_iters": 1} | options))


def make(env=CartPole, *, trainer=None, **options):
    return Trainer(config(**options).build(env), **({"tracker": MemoryTracker()} | (trainer or {})))


def run(trainer, **options):
    return trainer.run(progress="none", **options)


def at_step(step, do):
    """Return a callback that does something with the trainer after a step."""

    def callback(trainer, stats):
        if stats[keys.STEPS] == step:
            do(trainer)

    return callback


class Killed(BaseException):
    """As if the process had ended here: nothing that `run()` does afterwards matters to what is on the disk."""


def killed_at(step):
    def kill(trainer):
        raise Killed

    return at_step(step, kill)


def sends(number, step, times=1):
    """Return a callback that sends this process a signal after a step."""
    return at_step(step, lambda trainer: [os.kill(os.getpid(), number) for _ in range(times)])


def saved_steps(folder):
    """The steps of the checkpoints in a folder."""
    return [int(path.name.rpartition("-")[2]) for path in listed(folder)]


def weights(trainer):
    state = trainer.algorithm.state_dict()
    tensors = tensors_in([state["policy"], state.get("optimizer", state.get("nets"))])
    return torch.cat([tensor.flatten().to(torch.float64) for tensor in tensors.values()])


def rows(tracker):
    """All points by step and name, each of which is there once, but times and memory."""
    found = [(row.step, name) for row in tracker.rows for name in row.metrics]
    assert len(found) == len(set(found)), "a row is there twice"
    timeless = {}
    for row in tracker.rows:
        named = {(row.step, name): value for name, value in row.metrics.items()}
        timeless |= {key: value for key, value in named.items() if not key[1].startswith(("profiling/", "memory/"))}
    return timeless


class LinesTracker(MemoryTracker):
    """Somebody else's."""

    location = "lines.txt"
