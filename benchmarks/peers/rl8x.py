"""rl8x: its own config and trainer, tracking to MLflow as it does by itself."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch

from benchmarks.recorder import Recorder, main
from benchmarks.works import Job, ReplayWork, Work
from rl8x import HitsUpperBound, NullTracker, Trainer, keys
from rl8x.algorithms import DQNConfig, OffPolicyConfig, OnlineConfig, PPOConfig, SACConfig
from rl8x.envs import CartPole, Pendulum

ENVS = {"cartpole": CartPole, "pendulum": Pendulum}


def make_config(job: Job) -> OnlineConfig:
    """Return the hyperparameters of a job."""
    work: Work | ReplayWork = job.work
    shared: dict[str, Any] = {"num_threads": job.threads, "device": job.device, "seed": job.seed}
    shared |= {"execution": job.execution, "precision": job.precision}
    if isinstance(work, ReplayWork):
        return replay_config(work, shared)
    return PPOConfig.rl8(**settings(work), **shared)


def replay_config(work: ReplayWork, shared: dict[str, Any]) -> OffPolicyConfig:
    """Return the hyperparameters of a work with a replay."""
    fields: dict[str, Any] = {
        "num_envs": work.num_envs,
        "horizon": work.horizon,
        "model_config": {"hidden_sizes": [work.hidden, work.hidden]},
        "batch_size": work.batch_size,
        "updates_per_sample": work.updates_per_sample,
        "buffer_size": work.buffer_size,
        "warmup_steps": work.warmup_steps,
        "gamma": work.gamma,
        "lr": work.lr,
        **shared,
    }
    if work.algorithm == "sac":
        widths = [work.hidden, work.hidden]
        return SACConfig(**fields, tau=work.tau, critic_hidden_sizes=widths, max_grad_norm=None)
    fields["model_config"]["layer_norm"] = False
    return DQNConfig(
        **fields,
        n_step=1,
        target_interval=round(work.updates_per_target / work.updates_per_sample),
        epsilon=work.epsilon,
        epsilon_decay_steps=0,
        max_grad_norm=work.max_grad_norm,
        double=False,
    )


def settings(work: Work) -> dict[str, Any]:
    """Return what PPO's config has of a work."""
    return {
        "num_envs": work.num_envs,
        "horizon": work.horizon,
        "model_config": {"hidden_sizes": [work.hidden, work.hidden]},
        "sgd_minibatch_size": None if work.minibatches == 1 else work.minibatch_size,
        "num_sgd_iters": work.passes,
        "gamma": work.gamma,
        "gae_lambda": work.gae_lambda,
        "clip_param": work.clip,
        "vf_clip_param": None,  # the default silences large errors of values, and rewards are not always scaled
        "entropy_coeff": work.entropy_coeff,
        "max_grad_norm": work.max_grad_norm,
        "normalize_rewards": work.normalize_rewards,
        "lr": work.lr,
    }


def train(job: Job, recorder: Recorder) -> None:
    """Train with rl8x's trainer."""
    work = job.work
    algorithm = make_config(job).build(ENVS[work.env])
    policy = algorithm.policy
    steps = work.blocks if isinstance(work, ReplayWork) else 1

    def act(obs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        with torch.no_grad():
            batch = torch.from_numpy(obs).to(job.device)
            starts = torch.zeros(len(obs), dtype=torch.bool, device=job.device)
            chosen = policy.act(batch, policy.initial_state(len(obs)), starts)
            return policy.env_actions(chosen.actions).cpu().numpy()

    is_tracked = job.tracks and importlib.util.find_spec("mlflow") is not None
    options: dict[str, Any] = {} if is_tracked else {"tracker": NullTracker()}
    if job.transitions is not None:
        options |= {"callbacks": [lambda *_: recorder.tick()], "checkpoints": False, "eval_env": False}
    trainer = Trainer(algorithm, **options)
    recorder.start()
    if job.transitions is not None:  # `execution="auto"` compiles in a run that says how long it will be
        trainer.run(stop_conditions=[HitsUpperBound(keys.ENV_STEPS, job.transitions)], progress="none")
    for _ in range(steps):
        trainer.step()
    recorder.tick(act)
    if job.target is None:
        # MLflow's process makes its database beside the first iterations, which is not what is timed.
        trainer.tracker.flush()
        recorder.start()
    while True:
        for _ in range(steps):
            trainer.step()
        recorder.tick(act)


if __name__ == "__main__":
    main("rl8x", train, ("torch", "tensordict", "mlflow", "numpy"))
