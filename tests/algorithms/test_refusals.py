"""What algorithms and their configs refuse, each in a line that says what came and what is legal."""

import math

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, MultiBinary, MultiDiscrete
from tests.algorithms.by_hand import dataset
from tests.probes import OneStep

from rl8x.algorithms import (
    AlgorithmConfig,
    BCConfig,
    DQNConfig,
    FastTD3Config,
    IQLConfig,
    PPOConfig,
    PQNConfig,
    SACConfig,
    TD3Config,
)
from rl8x.envs import CartPole, Pendulum, Spread
from rl8x.replay.dataset import Dataset

SMALL = {"num_envs": 8, "horizon": 16, "device": "cpu"}
DATA = {"device": "cpu", "batch_size": 16}


def acting_in(space):
    return type("Acting", (OneStep,), {"single_action_space": space})


def switches():
    """Rows of actions that are neither in a box nor one of several."""
    rows, env = dataset().transitions, CartPole(1)
    actions = {**rows, "actions": rows["actions"].unsqueeze(1)}
    return Dataset(actions, observation_space=env.single_observation_space, action_space=MultiBinary(1))


def ppo(env=CartPole, **options):
    return PPOConfig.rl8(**SMALL | options).build(env)


def of(config, env, **options):
    return config(**SMALL | options).build(env)


Unbounded = acting_in(Box(-np.inf, np.inf, (2,), np.float32))
Fixed = acting_in(Box(np.array([-1, 2], np.float32), np.array([1, 2], np.float32)))
Counts, Many = acting_in(Box(0, 5, (2,), np.int64)), acting_in(MultiDiscrete([2, 3]))
APART = {"separate": True}
GRU = {"model": "gru", "model_config": {}}


class NobodysConfig(AlgorithmConfig):
    """No algorithm names it."""


NEEDS_DATA = r"needs a data set: give `dataset`, or leave it out; got"
REFUSED = {  # messages, and what gets them
    r"`sgd_minibatch_size` must divide num_envs \* horizon = 128; got 100. Try 128": lambda: ppo(
        sgd_minibatch_size=100
    ),
    r"`seq_len` must divide `horizon`; got 5 and 16. Try 4": lambda: ppo(seq_len=5),
    "multiple of `seq_len`": lambda: ppo(**GRU, seq_len=4, sgd_minibatch_size=2),
    "seqs_per_state_reset=2": lambda: ppo(**GRU, seq_len=4, seqs_per_state_reset=3),
    "`seqs_per_state_reset` must be positive, or -1": lambda: ppo(seqs_per_state_reset=0),
    "`num_envs` is 8, but the environment given has 4": lambda: ppo(CartPole(4)),
    "`num_envs` is 8, but the environment given has 2 copies": lambda: ppo(gymnasium.make_vec("CartPole-v1", 2)),
    "`clip_param` must be greater than 0; got 0.0": lambda: ppo(clip_param=0.0),
    "`gamma` must be at least 0 and at most 1; got 1.5": lambda: ppo(gamma=1.5),
    "`gamma` must be finite; got nan": lambda: ppo(gamma=math.nan),
    "`horizons_per_env_reset` must be positive": lambda: ppo(horizons_per_env_reset=0),
    "`lr` must be finite; got inf": lambda: PPOConfig(lr=math.inf),
    "`target_entropy` must be finite; got inf": lambda: SACConfig(target_entropy=math.inf),
    r"`entropy_coeff_schedule` must stay at least 0; got -1\.0": lambda: PPOConfig(entropy_coeff_schedule=[[0, -1.0]]),
    "`optimizer` must be one of 'adam', 'adamw', 'radam', 'sgd'; got 'adan'": lambda: ppo(optimizer="adan"),
    "has no option 'beta'. Did you mean 'betas'": lambda: ppo(optimizer_config={"beta": 1}),
    "`device` must be 'auto' or a device of this machine; got 'gpu'": lambda: ppo(device="gpu"),
    "tf32": lambda: ppo(precision="tf32"),
    "mlp": lambda: ppo(model="mpl"),
    "hidden_sizes": lambda: ppo(model_config={"hiden_sizes": [3]}),
    "`lr_schedule`.* begin at 0": lambda: ppo(lr_schedule=[[5, 1.0]]),
    r"PQN needs a Discrete action space; got Box.* Use PPO\.": lambda: of(PQNConfig, Pendulum),
    "`epsilon` must be at least 0 and at most 1": lambda: PQNConfig(epsilon=1.5),
    r"`epsilon_schedule` must stay at least 0 and at most 1; got 2\.0": lambda: PQNConfig(epsilon_schedule=[[0, 2.0]]),
    "`epsilon_schedule`.* begin at 0 and increase": lambda: PQNConfig(epsilon_schedule=[[0, 1.0], [0, 0.5]]),
    r"DQN needs a Discrete action space; got Box.* Use PPO\.": lambda: of(DQNConfig, Pendulum),
    "DQN trains feedforward models; GRUModel is recurrent": lambda: of(DQNConfig, CartPole, **GRU),
    rf"`cql_coeff` {NEEDS_DATA} 1\.0": lambda: of(DQNConfig, CartPole, cql_coeff=1.0),
    "`priority_beta_schedule` must stay": lambda: DQNConfig(priority_beta_schedule=[[0, 0.4], [100, 2.0]]),
    "`updates_per_sample` must be at least": lambda: DQNConfig(updates_per_sample=0),
    "`tau` must be greater than 0 and at most 1": lambda: DQNConfig(tau=0.0),
    r"buffer_size=1,000,000,000,000 needs .* Lower `buffer_size`": lambda: of(DQNConfig, CartPole, buffer_size=10**12),
    "`num_atoms` and `num_quantiles` exclude each other; got 51 and 200": lambda: DQNConfig(
        num_atoms=51, num_quantiles=200
    ),
    "`num_atoms` must be at least 1 and at most 1000; got 0": lambda: DQNConfig(num_atoms=0),
    r"SAC needs a Box action space of floats, or a Discrete one; .* PPO\.": lambda: of(SACConfig, Many),
    r"SAC needs actions with finite bounds; got Box.*RescaleAction.*or use PPO": lambda: of(SACConfig, Unbounded),
    "SAC trains feedforward models; GRUModel is recurrent": lambda: of(SACConfig, Pendulum, **GRU),
    "`policy_delay` must be at least 1": lambda: SACConfig(policy_delay=0),
    rf"`cql_coeff` {NEEDS_DATA} 2\.0": lambda: of(SACConfig, Pendulum, cql_coeff=2.0),
    rf"`cql_samples` {NEEDS_DATA} 3": lambda: of(SACConfig, Pendulum, cql_samples=3),
    "`num_atoms` must be 1 for discrete actions; got 51": lambda: of(SACConfig, CartPole, num_atoms=51),
    "`v_min` must be less than `v_max`, both finite; got 1 and 1": lambda: SACConfig(v_min=1, v_max=1),
    "`v_max` must be finite; got inf": lambda: SACConfig(v_min=-5, v_max=math.inf),
    r"TD3 needs a Box .* of floats; got Discrete\(2\)\. Use DQN or SAC\.": lambda: of(TD3Config, CartPole),
    r"TD3 needs a Box action space of floats; got MultiDiscrete.*Use PPO\.": lambda: of(TD3Config, Many),
    r"TD3 needs a Box action space of floats; got Box": lambda: of(TD3Config, Counts),
    r"TD3 needs .*finite bounds; got Box.*RescaleAction.*or use PPO": lambda: of(TD3Config, Unbounded),
    r"TD3 needs .* low < high .* got \[-1.0, 2.0\] and \[1.0, 2.0\].* use PPO": lambda: of(TD3Config, Fixed),
    rf"`actor_bc_coeff` {NEEDS_DATA} 0\.1": lambda: of(TD3Config, Pendulum, actor_bc_coeff=0.1),
    rf"`critic_bc_coeff` {NEEDS_DATA} 0\.1": lambda: of(TD3Config, Pendulum, critic_bc_coeff=0.1),
    r"`warmup_steps` is about an environment or a replay: .* data set; got 7": lambda: TD3Config(
        **DATA, warmup_steps=7
    ).build(dataset=dataset(Pendulum)),
    r"`return_bound` measures returns where they are collected; got 5\.0": lambda: FastTD3Config().build(
        dataset=dataset(Pendulum)
    ),
    "TD3 trains feedforward models; GRUModel is recurrent": lambda: of(TD3Config, Pendulum, **GRU),
    r"`exploration_noise_min` must be at most .*; got 0.2 and 0.1": lambda: TD3Config(
        exploration_noise=0.1, exploration_noise_min=0.2
    ),
    "`critic_hidden_sizes` must be a list of whole numbers": lambda: of(TD3Config, Pendulum, critic_hidden_sizes=[0]),
    "a copy of CartPole has one agent": lambda: PPOConfig(model_config=APART).build(CartPole),
    "`model_config.separate` must be true or false; got 3": lambda: PPOConfig(model_config={"separate": 3}),
    "no argument 'separate'": lambda: PPOConfig(model="lstm", model_config=APART).build(Spread),
    "is for PPO; SACConfig has one policy for all agents": lambda: SACConfig(model_config=APART),
    "`critic_init` must be one of 'orthogonal', 'uniform'; got 'zeros'": lambda: TD3Config(critic_init="zeros"),
    r"IQL needs a Box or Discrete action space; got MultiBinary.* Use BC": lambda: IQLConfig(**DATA).build(
        dataset=switches()
    ),
    "does not say what its spaces are": lambda: BCConfig(**DATA).build(dataset=Dataset(dataset().transitions)),
    "BC learns from recorded transitions: give `dataset`": lambda: BCConfig().build(),
    "give `env`, such as CartPole, or `dataset`": lambda: DQNConfig().build(),
    "no data set in 'nothing'": lambda: BCConfig(dataset="nothing").build(),
    r"`updates_per_step` needs a data set: .*; got 7\.": lambda: DQNConfig(updates_per_step=7).build(CartPole),
    **{
        f"`{name}` is about an environment or a replay: leave it out with a": (
            lambda name=name, given=given: DQNConfig(**DATA, **{name: given}).build(dataset=dataset())
        )
        for name, given in {"prioritized": True, "num_envs": 4, "buffer_path": "here"}.items()
    },
}
WRONG_KINDS = {
    "NobodysConfig has no algorithm: declare one by": lambda: NobodysConfig().build(),
    r"without an environment; got .* give it as `eval_env`": lambda: BCConfig(dataset=dataset()).build("CartPole"),
    "without an environment": lambda: DQNConfig().build(CartPole, dataset=dataset()),
    "`dataset` must be a path": lambda: BCConfig(dataset=3),
    "`num_envs` must be a whole number; got 2.5": lambda: ppo(num_envs=2.5),
    "`num_envs` must be a whole number; got True": lambda: ppo(num_envs=True),
    "`gamma` must be a number; got 'high'": lambda: ppo(gamma="high"),
    "`shuffle_minibatches` must be true or false; got 1": lambda: ppo(shuffle_minibatches=1),
    r"it made TimeLimit\. Let GymnasiumEnv make the copies": lambda: ppo(
        lambda *_, **__: gymnasium.make("CartPole-v1")
    ),
    r"'CartPole-v1' is one copy .*Pass its id, or functools\.partial.*GymnasiumEnv": lambda: ppo(
        gymnasium.make("CartPole-v1")
    ),
    r"\(time_limit\) need a class or a name": lambda: PPOConfig.rl8(**SMALL).build(CartPole(8), time_limit=3),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_legal_is_refused_with_what_is(message):
    with pytest.raises(ValueError, match=message) as error:
        REFUSED[message]()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("message", WRONG_KINDS)
def test_what_is_of_another_kind_is_refused(message):
    with pytest.raises(TypeError, match=message) as error:
        WRONG_KINDS[message]()
    assert "\n" not in str(error.value)
