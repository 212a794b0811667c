"""Tianshou: its SAC by its own trainer, on its vector environment of Gymnasium's Pendulum, without a logger."""

from __future__ import annotations

import gymnasium
from tianshou.algorithm import SAC
from tianshou.algorithm.modelfree.sac import AutoAlpha, SACPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OffPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic

from benchmarks.recorder import Recorder, recorded
from benchmarks.works import MAX_ITERATIONS, Job, ReplayWork


def sac(work: ReplayWork, env: gymnasium.Env[object, object]) -> SAC:
    """Make the `SAC` of a work."""
    widths, space = work.widths, env.action_space
    assert isinstance(space, gymnasium.spaces.Box)
    assert env.observation_space.shape is not None
    adam, shape = AdamOptimizerFactory(lr=work.lr), env.observation_space.shape
    actor = ContinuousActorProbabilistic(
        preprocess_net=Net(state_shape=shape, hidden_sizes=widths),
        action_shape=space.shape,
        unbounded=True,
        conditioned_sigma=True,
    )
    critics = [
        ContinuousCritic(
            preprocess_net=Net(state_shape=shape, action_shape=space.shape, hidden_sizes=widths, concat=True)
        )
        for _ in range(2)
    ]
    return SAC(
        policy=SACPolicy(actor=actor, action_space=space),
        policy_optim=adam,
        critic=critics[0],
        critic_optim=adam,
        critic2=critics[1],
        critic2_optim=adam,
        tau=work.tau,
        gamma=work.gamma,
        alpha=AutoAlpha(-float(space.shape[0]), 0.0, adam),
    )


def train(job: Job, recorder: Recorder) -> None:
    """Train with `run_training`."""
    work = job.work
    envs = DummyVectorEnv([lambda: gymnasium.make("Pendulum-v1") for _ in range(work.num_envs)])
    algorithm = sac(work, gymnasium.make("Pendulum-v1"))
    collector = Collector(algorithm, envs, VectorReplayBuffer(work.buffer_size, work.num_envs))
    collector.reset()
    collector.collect(n_step=work.warmup_steps, random=True)
    recorder.start()
    algorithm.run_training(
        OffPolicyTrainerParams(
            training_collector=collector,
            max_epochs=1,
            epoch_num_steps=MAX_ITERATIONS * work.transitions,
            collection_step_num_env_steps=work.num_envs * work.horizon,
            update_step_num_gradient_steps_per_sample=work.updates_per_sample,
            batch_size=work.batch_size,
            training_fn=lambda *_: recorder.block(),
            show_progress=False,
            verbose=False,
        )
    )


answer = recorded(train, "tianshou", "torch", "gymnasium", "numpy")
