"""rejax: its PPO on gymnax environments, one compiled program an iteration. It has no logging to include.

The changes of values are clipped (by `clip`, as those of the policy), which rejax has no way to leave out.
rejax 0.1 expects the five results of a step that gymnax gave before its version 1.0; the adapters restore them.
"""

from __future__ import annotations

from typing import Any

import jax
from gymnax.environments.classic_control import cartpole, pendulum
from jax import numpy as jnp
from rejax import PPO

from benchmarks.peers.envs import Array
from benchmarks.recorder import Recorder, recorded
from benchmarks.works import Job


class FiveResults:
    """What a step gave before gymnax 1.0."""

    def step(self, key: Any, state: Any, action: Any, params: Any = None) -> tuple[Any, ...]:
        """Move one copy."""
        obs, state, reward, terminated, truncated, info = super().step(key, state, action, params)
        return obs, state, reward, terminated | truncated, info


class CartPole(FiveResults, cartpole.CartPole):
    """CartPole-v1."""


class Pendulum(FiveResults, pendulum.Pendulum):
    """Pendulum-v1."""

    def reset_env(self, key: Any, params: Any) -> tuple[Any, Any]:
        """Start an episode, with the types that a step returns: else the second iteration compiles again."""
        obs, state = super().reset_env(key, params)
        return obs, state.replace(last_u=jnp.zeros((), jnp.float32))


def train(job: Job, recorder: Recorder) -> None:
    """Run `train_iteration` under `jax.jit`; the first iteration includes the compilation."""
    work = job.work
    algorithm = PPO.create(
        **work.fields("num_envs", "gamma", "gae_lambda", "max_grad_norm", "normalize_rewards"),
        env={"cartpole": CartPole, "pendulum": Pendulum}[work.env](),
        agent_kwargs={"activation": "relu", "hidden_layer_sizes": tuple(work.widths)},
        num_steps=work.horizon,
        num_minibatches=work.minibatches,
        num_epochs=work.passes,
        learning_rate=work.lr,
        clip_eps=work.clip,
        ent_coef=work.entropy_coeff,
        reward_normalization_discount=work.gamma,
    )
    state = algorithm.init_state(jax.random.PRNGKey(job.seed))
    # With the types that an iteration returns: else the second one compiles again.
    state = state.replace(rew_rms_state=jax.tree.map(jnp.float32, state.rew_rms_state))
    iterate = jax.jit(algorithm.train_iteration)
    likeliest = jax.jit(lambda params, obs: algorithm.actor.apply(params, obs, method="_action_dist").mode())

    def act(obs: Array) -> Array:
        return likeliest(state.actor_ts.params, obs)

    recorder.start()
    while True:
        state = jax.block_until_ready(iterate(state))
        recorder.tick(act)


answer = recorded(train, "rejax", "jax", "jaxlib", "gymnax", "flax", "optax", "distrax", "numpy")
