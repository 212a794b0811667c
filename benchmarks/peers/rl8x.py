"""rl8x: its own config and trainer, tracking to MLflow as it does by itself."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from benchmarks.peers.envs import Array
from benchmarks.recorder import Recorder, recorded
from benchmarks.works import Job, Work
from rl8x import HitsUpperBound, NullTracker, Trainer, keys
from rl8x.algorithms import DQNConfig, OnlineConfig, PPOConfig, SACConfig
from rl8x.envs import CartPole, Pendulum

ENVS = {"cartpole": CartPole, "pendulum": Pendulum}


def make_config(job: Job) -> OnlineConfig:
    """Return the hyperparameters of a job."""
    work = job.work
    fields = work.fields("num_envs", "horizon", "gamma", "lr") | {"model_config": {"hidden_sizes": work.widths}}
    fields |= {"num_threads": job.threads, "device": job.device, "seed": job.seed}
    fields |= {"execution": job.execution, "precision": job.precision}
    if isinstance(work, Work):
        return PPOConfig.rl8(
            **fields,
            **work.fields("gae_lambda", "entropy_coeff", "max_grad_norm", "normalize_rewards"),
            sgd_minibatch_size=None if work.minibatches == 1 else work.minibatch_size,
            num_sgd_iters=work.passes,
            clip_param=work.clip,
            vf_clip_param=None,  # the default silences large errors of values, and rewards are not always scaled
        )
    fields |= work.fields("batch_size", "updates_per_sample", "buffer_size", "warmup_steps")
    if work.algorithm == "sac":
        return SACConfig(**fields, tau=work.tau, critic_hidden_sizes=work.widths, max_grad_norm=None)
    fields["model_config"]["layer_norm"] = False
    return DQNConfig(
        **fields,
        n_step=1,
        target_interval=work.transitions_per_target,
        epsilon=work.epsilon,
        epsilon_decay_steps=0,
        max_grad_norm=work.max_grad_norm,
        double=False,
    )


def train(job: Job, recorder: Recorder) -> None:
    """Train with rl8x's trainer."""
    work = job.work
    algorithm = make_config(job).build(ENVS[work.env])
    policy = algorithm.policy

    def act(obs: Array) -> Array:
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
    for _ in range(work.blocks):
        trainer.step()
    recorder.tick(act)
    if job.target is None:
        # MLflow's process makes its database beside the first iterations, which is not what is timed.
        trainer.tracker.flush()
        recorder.start()
    while True:
        for _ in range(work.blocks):
            trainer.step()
        recorder.tick(act)


answer = recorded(train, "rl8x", "torch", "tensordict", "mlflow", "numpy")
