"""Parameters as a part of the observation: how they are scaled, where they are seen, and who sees them."""

from __future__ import annotations

import math

import gymnasium.spaces as spaces
import numpy as np
import pytest
import torch
from tests.envs.test_bindings import Echo
from tests.test_policy import SMALL
from torch import Tensor

from rl8x import BCConfig, Env, Parameter, Policy, PPOConfig, SACConfig, TD3Config
from rl8x.envs import Attribute, CartPole, GymnasiumEnv, ObservedParameters, Pendulum, env_maker, validate
from rl8x.envs.observed import ScaledParameters
from rl8x.randomization import Adaptive, Learnable, LogUniform, Uniform
from rl8x.replay.dataset import Dataset
from rl8x.replay.recording import record
from rl8x.spaces import critic_only, space_from_plain, space_to_plain
from rl8x.trees import flatten_tree

DRAWN = {"length": Uniform(0.2, 1.0), "gravity": LogUniform(4.0, 20.0)}


# -- scaling


@pytest.mark.parametrize(
    ("default", "low", "high", "values", "expected"),
    [
        # a decade or more: above 1 by log 5 / log 50, below by -log 4 / log 20
        (1.0, 0.05, 50.0, [5.0, 0.25], [math.log(5) / math.log(50), -math.log(4) / math.log(20)]),
        # 0.05 is less than a decade below 0.2, and more than one above 0.001
        (0.05, 0.001, 0.2, [0.125, 0.01], [0.5, -math.log(5) / math.log(50)]),
        (0.0, 0.0, 0.1, [0.0, 0.025, 0.1], [0.0, 0.25, 1.0]),
        # from -10 up to -1 is a decade, down to -20 is none
        (-10.0, -20.0, -1.0, [-1.0, -(10.0**0.5), -15.0, -20.0], [1, 0.5, -0.5, -1]),
        # without a bound it nears 1
        (0.2, -math.inf, math.inf, [0.4, 0.0, 1e9], [0.5, -0.5, 1.0]),
        (0.0, 0.0, math.inf, [3.0], [0.75]),
    ],
)
def test_sides_of_a_decade_are_logarithmic_and_others_linear(default, low, high, values, expected):
    parameters = {"x": Parameter(default=default, low=low, high=high)}
    scaled = ScaledParameters(parameters, torch.device("cpu"))({"x": torch.tensor(values)})
    assert scaled.squeeze(1).tolist() == pytest.approx(expected)


# -- where they are seen


class Turned(CartPole):
    """Declares its parameters in another order."""

    parameters = dict(reversed(CartPole.parameters.items()))  # noqa: RUF012


ADAPTIVE = {"thresholds": (2.0, 3.0), "episodes": 2, "step": 0.1, "boundary_share": 0.9}


@pytest.mark.parametrize(
    "config",
    [
        DRAWN,
        {"length": Adaptive((0.4, 0.6), **ADAPTIVE), "gravity": Adaptive((9.0, 10.0), **ADAPTIVE)},
        {"length": Learnable(DRAWN["length"], threshold=2.0), "gravity": Learnable(DRAWN["gravity"], threshold=2.0)},
    ],
)
def test_parameters_may_be_declared_in_any_order(config):
    """Noise, curricula and observations go by their names: whoever declares them otherwise resumes the same run."""
    options = {"num_envs": 4, "horizon": 8, "num_sgd_iters": 1, "device": "cpu", "seed": 0, "execution": "eager"}
    first, second = (
        PPOConfig.rl8(**options, model_config=SMALL["mlp"]).build(env, observe_parameters="all", time_limit=3)
        for env in (CartPole, Turned)
    )
    first.collect(env_config=config)
    first.step()
    second.collect(env_config=config)
    second.load_state_dict(first.state_dict())
    for _ in range(3):
        stats = [each.collect().read() | each.step().read() for each in (first, second)]
        assert stats[0] == stats[1]
    for name, part in first.rollout.tensors.items():
        assert torch.equal(part, second.rollout.tensors[name]), name
    assert torch.equal(first.optimizers[0].weights, second.optimizers[0].weights)


def scaled_by_hand(env: Env, values: dict[str, Tensor]) -> Tensor:
    each = [ScaledParameters({name: one}, torch.device("cpu"))(values) for name, one in sorted(env.parameters.items())]
    return torch.cat(each, -1)


def test_after_a_reset_there_are_the_new_episodes_parameters_and_before_it_the_old_ones():
    env, plain = ObservedParameters(CartPole(6, seed=3, time_limit=4), "all"), CartPole(6, seed=3, time_limit=4)
    obs, _ = env.reset(config=DRAWN)
    bare, _ = plain.reset(config=DRAWN)
    for t in range(12):
        before = scaled_by_hand(env, env.carry["parameters"])
        torch.testing.assert_close(obs["parameters"], before, rtol=0, atol=0)
        assert torch.equal(obs["obs"], bare)
        actions = torch.arange(6) % 2
        obs, rewards, terminated, truncated, info = env.step(actions)
        bare, bare_rewards, *_, bare_info = plain.step(actions)
        done = terminated | truncated
        assert bool(done.all()) == (t % 4 == 3)
        assert torch.equal(rewards, bare_rewards)
        assert torch.equal(info["final_obs"]["parameters"], before)
        assert torch.equal(info["final_obs"]["obs"], bare_info["final_obs"])
        # Two of the six are drawn anew, where an episode ended.
        assert torch.equal((obs["parameters"] != before).sum(1), 2 * done)


def test_a_wrapper_is_the_environment_but_for_what_it_observes():
    inner = CartPole(3, seed=0, observe_parameters="none")
    env = ObservedParameters(inner, "all")
    assert len({each.program_key for each in (inner, env, ObservedParameters(inner, "critic"))}) == 3
    assert (env.unwrapped, env.num_envs, env.draws, isinstance(env, Env)) == (inner, 3, True, True)
    obs, _ = env.reset(seed=4)
    assert torch.equal(env.another(seed=4).reset()[0]["obs"], obs["obs"])
    env.carry, _ = env.advance(env.carry, torch.ones(3, dtype=torch.int64), env.noise(1)[0])
    assert inner.carry is env.carry
    del env
    assert not inner.closed


def test_a_simulator_shows_the_parameters_of_its_carry():
    simulated = GymnasiumEnv(Echo, 4, seed=0, parameters={"wind": Attribute("wind", low=0.5, high=3.0)})
    env = ObservedParameters(simulated, "all").another(3, seed=1)
    obs, _ = env.reset(config={"wind": Uniform(1.0, 2.0)})
    changed = 0
    for _ in range(9):
        assert torch.allclose(obs["parameters"], (obs["obs"][:, :1] - 1.0) / 2.0)
        before = obs
        obs, *_, info = env.step(torch.zeros(3, dtype=torch.int64))
        assert torch.equal(info["final_obs"]["parameters"], before["parameters"])
        changed += int((obs["parameters"] != before["parameters"]).sum())
    assert changed > 5


# -- who sees them


@pytest.mark.parametrize("model", SMALL)
@pytest.mark.parametrize("mode", ["critic", "all"])
def test_the_actor_sees_them_with_all_alone(model, mode):
    env = ObservedParameters(CartPole(3, seed=0), mode)
    options = {"model": model, "model_config": SMALL[model], "normalize_observations": True}
    policy = Policy(env.single_observation_space, env.single_action_space, **options)
    obs, _ = env.reset()
    moved = {**obs, "parameters": obs["parameters"] + 0.5}
    state, starts = policy.initial_state(3), torch.ones(3, dtype=torch.bool)
    one, other = (
        policy.predict({name: part.unsqueeze(0) for name, part in each.items()}, state, starts.unsqueeze(0))
        for each in (obs, moved)
    )
    assert torch.equal(one.features, other.features) == (mode == "critic")
    assert not torch.equal(one.values, other.values)
    assert not torch.equal(policy.values(obs, state, starts), policy.values(moved, state, starts))


@pytest.mark.parametrize(("config", "env"), [(SACConfig, Pendulum), (TD3Config, Pendulum), (SACConfig, CartPole)])
def test_critics_of_a_replay_see_what_the_actor_does_not(config, env):
    options = {"num_envs": 2, "horizon": 4, "batch_size": 4, "device": "cpu", "seed": 0}
    config = config(**options, model_config=SMALL["mlp"], critic_hidden_sizes=[8])
    algorithm = config.build(env, observe_parameters="critic", time_limit=3)
    name = next(iter(env.parameters))
    for _ in range(3):
        algorithm.collect(env_config={name: LogUniform(5.0, 20.0)})
        algorithm.step()
    width, parameters = env.single_observation_space.shape[0], len(env.parameters)
    assert algorithm.policy.model.flat.width == width
    assert algorithm.critics.flat.width == width + parameters
    rows = algorithm.replay.gather(torch.arange(algorithm.replay.size))
    # What followed is of the same episode, also where a time limit truncated it and the next one has other parameters.
    torch.testing.assert_close(rows["next_obs/parameters"], rows["obs/parameters"], rtol=0, atol=0)
    assert len(torch.unique(rows["obs/parameters"][:, sorted(env.parameters).index(name)])) > 2


# -- what else they go through


def test_data_sets_have_them_and_know_who_sees_them(tmp_path):
    env = ObservedParameters(CartPole(2, seed=0, time_limit=5), "critic")
    policy = Policy(env.single_observation_space, env.single_action_space, model_config=SMALL["mlp"])
    options = {"epsilon": 0.5, "deterministic": False, "seed": 0, "env_config": DRAWN}
    dataset = record(policy, env, 24, **options).dataset
    assert len(torch.unique(dataset.transitions["obs/parameters"][:, sorted(env.parameters).index("length")])) > 2
    dataset.save(tmp_path / "data")
    algorithm = BCConfig(dataset=str(tmp_path / "data"), model_config=SMALL["mlp"], batch_size=8, device="cpu").build()
    assert critic_only(Dataset.load(tmp_path / "data").observation_space) == ("parameters",)
    assert algorithm.policy.hidden == ("parameters",)  # behaviour cloning has no critic
    assert algorithm.policy.model.actor[0].in_features == 4
    space = env.single_observation_space
    assert repr(space_from_plain(space_to_plain(space))) == repr(space)


def test_moments_of_a_part_may_have_the_name_of_a_module_attribute():
    part = spaces.Box(-1, 1, (2,), np.float32)
    space = spaces.Dict(dict.fromkeys(("parameters", "training", "x.y"), part))
    policy = Policy(space, spaces.Discrete(2), normalize_observations=True, model_config=SMALL["mlp"])
    obs = {name: torch.randn(5, 4, 2) + i for i, name in enumerate(space.spaces)}
    policy.observe(obs)
    seen, _ = policy.model_inputs(obs)
    for part in flatten_tree("", seen).values():
        torch.testing.assert_close(part.flatten(0, 1).mean(0), torch.zeros(2), atol=1e-3, rtol=0)


class OwnConstructor(CartPole):
    """An author who never heard of the keyword, and whose `advance` calls the base class's."""

    def __init__(self, num_envs, device="cpu", seed=None, time_limit=...):
        super().__init__(num_envs, device=device, seed=seed, time_limit=time_limit)
        assert self.single_observation_space.shape == (4,)  # what he wrote is there while he constructs

    def advance(self, carry, actions, noise):
        carry, step = super().advance(carry, actions, noise)
        assert isinstance(step.obs, Tensor)
        return carry, step._replace(rewards=step.rewards * 2)


def test_a_constructor_that_does_not_know_the_keyword_works():
    env = env_maker(OwnConstructor, {"observe_parameters": "all"})(2, seed=0)
    env.reset()
    obs, rewards, *_ = env.step(torch.ones(2, dtype=torch.int64))
    assert {name: list(part.shape) for name, part in obs.items()} == {"obs": [2, 4], "parameters": [2, 6]}
    assert rewards.tolist() == [2.0, 2.0]
    validate(env)
    assert env_maker(OwnConstructor)(2).reset()[0].shape == (2, 4)
