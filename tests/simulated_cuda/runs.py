"""Trains on the CPU and on the simulated device, and prints what of each run as a line of JSON; a process of its own.

LD_PRELOAD=LIBRARY python -m tests.simulated_cuda.runs LIBRARY [RUN ...]
"""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from tests.simulated_cuda.device import Device, join_by_gloo

from rl8x import DQNConfig, IQLConfig, NullTracker, PPOConfig, PQNConfig, SACConfig, Trainer
from rl8x.checkpoint.tree import tensors_in
from rl8x.envs import CartPole, Pendulum
from rl8x.execution import programs
from rl8x.randomization import Adaptive, Learnable, Uniform
from rl8x.replay.recording import record

STEPS = 4
COUNTED = 2

Swing = functools.partial(Pendulum, time_limit=10)
SMALL: dict[str, Any] = {"num_envs": 4, "horizon": 8, "seed": 1, "model_config": {"hidden_sizes": [8]}}
REPLAY = {"batch_size": 8, "buffer_size": 100, "warmup_steps": 32, "updates_per_sample": 0.25}
MOVING = {
    "length": Adaptive(0.5, thresholds=(5, 10), step=0.1, episodes=2, limits=(0.2, 2.0)),
    "gravity": Learnable(Uniform(5, 20), levels=2, candidates=3, episodes=2, threshold=12.0),
    "masscart": Uniform(0.5, 2.0),
}


def by_steps(row):
    return {"length": 0.4 if row["env/steps"] < 64 else 0.8}


GRU = {"model": "gru", "model_config": {"hidden_size": 8}, "seq_len": 4}
BY_KL = {"lr_schedule": {"kind": "adaptive"}, "recompute_advantages": True, "lr": 2e-3}
NORMALISED = {"normalize_observations": True, "normalize_rewards": True, "normalize_values": True}
ATOMS = {"num_atoms": 11, "v_min": 0.0, "v_max": 20.0, "dueling": True}
ATOMS |= {"model_config": {"hidden_sizes": [8], "layer_norm": False}}
# What differs from the small PPO on CartPole, and how often the host may wait for the device in a step: once for the
# statistics, and once where the host must know of the rows before it goes on.
RUNS: dict[str, tuple[Any, Any, Any, dict[str, Any], int]] = {
    "ppo, moving physics, normalised": (PPOConfig, CartPole, MOVING, {"sgd_minibatch_size": 16, **NORMALISED}, 1),
    "ppo, memory, a function's physics": (PPOConfig, CartPole, by_steps, {**GRU, "accumulate_grads": True}, 1),
    "ppo, rate by KL, advantages anew": (PPOConfig, Swing, None, {"sgd_minibatch_size": 16, **BY_KL}, 1),
    "ppo, memory, eager, the same": (PPOConfig, Swing, None, {**GRU, **BY_KL, "execution": "eager"}, 1),
    "ppo, eager, limited": (PPOConfig, Swing, None, {"execution": "eager", "target_kl_div": 0.01}, 2),
    "pqn": (PQNConfig, CartPole, None, {"sgd_minibatch_size": 32}, 1),
    "dqn": (
        *(DQNConfig, CartPole, {"length": Uniform(0.3, 1.0)}),
        {**REPLAY, **ATOMS, "prioritized": True, "n_step": 3},
        2,
    ),
    "sac": (SACConfig, Swing, None, {**REPLAY, "normalize_observations": True}, 2),
    "iql": (IQLConfig, CartPole, None, {"batch_size": 8, "updates_per_step": 4}, 1),
}


def make(name: str, device: str) -> Trainer[Any]:
    """Make the trainer of a run; a data set is what an untrained policy does."""
    algorithm, env, _, options, _ = RUNS[name]
    shared: Any = {"tracker": NullTracker(), "num_eval_envs": 2, "checkpoints": False, "eval_env": env}
    if algorithm is IQLConfig:
        policy = PPOConfig(**SMALL, device="cpu").build(CartPole).policy
        dataset = record(policy, CartPole(2, seed=0), 100, epsilon=0.5).dataset
        small = {"seed": 1, "model_config": {"hidden_sizes": [8]}, "device": device}
        return Trainer(IQLConfig(**small, **options, dataset=dataset).build(), **shared)
    return Trainer(algorithm(**{**SMALL, **options, "device": device}).build(env), **shared)


def numbers(state: Any) -> torch.Tensor:
    tensors = tensors_in(state)
    return torch.cat([tensor.detach().cpu().flatten().double() for tensor in tensors.values()])


def run(name: str, device: Device) -> dict[str, Any]:
    *_, env_config, options, _ = RUNS[name]
    given = {} if RUNS[name][0] is IQLConfig else {"env_config": env_config}
    host, other = make(name, "cpu"), make(name, "cuda")
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = False, True  # by other code
    for trainer in (host, other):
        for step in range(STEPS):
            trainer.step(**given)
            if step == STEPS // 2:  # captured programs read it from where it lay
                trainer.algorithm.set_lr(None if "lr_schedule" in options else 0.1)
    apart = float((numbers(host.algorithm.learned_state()) - numbers(other.algorithm.learned_state())).abs().max())
    before = device.waits
    for _ in range(COUNTED):
        other.step(**given)
    waits = (device.waits - before) / COUNTED
    played = other.eval(deterministic=True)["eval/returns/mean"]
    restored = make(name, "cuda")
    restored.load_state_dict(other.state_dict())
    same = torch.equal(numbers(restored.state_dict()), numbers(other.state_dict()))
    convolutions = [torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32]
    found = {"run": name, "apart": apart, "waits": waits, "mode": other.algorithm.execution.mode, "played": played}
    return found | {"restored": same, "convolutions": convolutions}


def refusals(device: Device) -> dict[str, Any]:
    """Do what a GPU refuses, and twice what waits for it."""

    def item_while_capturing():
        with device.refusing_waits():
            torch.zeros(2, device="cuda").sum().item()

    wrong = (
        lambda: torch.zeros(2, 2, device="cuda").index_select(0, torch.tensor([0])),
        lambda: torch.rand(2, device="cuda", generator=torch.Generator()),
        item_while_capturing,
    )
    said = []
    for call in wrong:
        try:
            call()
        except RuntimeError as error:
            said.append(str(error).partition(",")[0].partition(":")[0])
    before = device.waits
    torch.ones(2).to("cuda").tolist()
    return {"run": "refusals", "refused": said, "waits": device.waits - before}


def main() -> None:
    torch.set_num_threads(1)
    device = Device(Path(sys.argv[1]))
    if "RANK" in os.environ:
        join_by_gloo()
    programs.capture_cuda = device.capture
    warnings.simplefilter("error", RuntimeWarning)
    for name in sys.argv[2:]:
        row = json.dumps(refusals(device) if name == "refusals" else run(name, device))
        os.write(1, f"{row}\n".encode())  # at once: ranks share the pipe


if __name__ == "__main__":
    main()
