import itertools
import warnings

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit
from tests import probes
from tests.probes import traced_only

from rl8x import PPOConfig, keys
from rl8x.envs import CartPole, GymnasiumEnv, Pendulum, env_maker
from rl8x.models import BUILTIN
from rl8x.randomization import Uniform


@pytest.fixture(autouse=True)
def _traced_only(monkeypatch):
    """Run the record itself: what a compiled program computes, without the half minute that compiling takes."""
    traced_only(monkeypatch)


def build(env, **options):
    defaults = {"num_envs": 4, "horizon": 6, "seed": 2, "device": "cpu", "model_config": {"hidden_sizes": [8]}}
    return PPOConfig.rl8(**{**defaults, "num_sgd_iters": 1, **options}).build(env)


class Swapped(BUILTIN["lstm"]):
    """Returns its state in another order than it begins with."""

    def forward(self, obs, state, starts):
        features, values, after = super().forward(obs, state, starts)
        return features, values, dict(reversed(after.items()))


CASES = {  # others are those of algorithms/test_conformance.py
    "randomised, and observed": (
        env_maker(CartPole, {"observe_parameters": "all", "time_limit": 5}),
        {},
        {"length": Uniform(0.3, 0.6), "gravity": [9.0, 9.5, 10.0, 11.0]},
    ),
    "lstm, forgetful": (
        env_maker(Pendulum, {"time_limit": 5}),
        {"model": "lstm", "model_config": {"hidden_size": 8}, "seq_len": 3, "seqs_per_state_reset": 1},
        None,
    ),
    "a state in another order": (
        env_maker(Pendulum, {"time_limit": 5}),
        {"model": Swapped, "model_config": {"hidden_size": 8}, "seq_len": 3},
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_recorded_steps_equal_eager_ones_also_after_updates(case):
    env, options, env_config = CASES[case]
    options = options | {"random_start": True}  # so that limits cut several copies in some steps, and one in others
    eager, recorded = build(env, **options, execution="eager"), build(env, **options, execution="compile")
    for _ in range(3):  # the second collect must see the first update's weights and moments
        for algorithm in (eager, recorded):
            algorithm.collect(env_config=env_config)
            algorithm.step()
        stored, found = ({**each.rollout.tensors, **each.rollout.states} for each in (eager, recorded))
        assert stored.keys() == found.keys()
        for name, value in stored.items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4, msg=name)
        rows = (stored[keys.FINAL_VALUES] != 0).sum(1)
        assert len(set(rows[rows > 0].tolist())) > 1
    assert recorded.horizons.collector.stepper.compiles_env
    assert dict(recorded.evaluate()) == pytest.approx(dict(eager.evaluate()), rel=1e-4)  # by a program of its own


class TwoSteps(probes.Steps):
    """Terminates in its second step, in which a time limit of two cuts too."""

    length = 2


@pytest.mark.parametrize(
    ("env", "model", "execution"),
    [
        *itertools.product(["tensors", *AutoresetMode], ["lstm", "gru", "attention"], ["eager"]),
        ("tensors", "gru", "compile"),
        (AutoresetMode.SAME_STEP, "gru", "compile"),
    ],
)
def test_no_value_is_asked_for_where_all_that_time_limits_cut_terminates(env, model, execution):
    copies = [lambda: TimeLimit(TwoSteps(), 2)] * 4
    made = probes.OneStep if env == "tensors" else GymnasiumEnv(SyncVectorEnv(copies, autoreset_mode=env))
    sizes = {"attention": {"width": 8, "num_heads": 1}}.get(model, {"hidden_size": 8})
    config = PPOConfig.rl8(
        num_envs=4, horizon=6, seq_len=3, seed=2, model=model, model_config=sizes, execution=execution
    )
    algorithm = config.build(made, **({"time_limit": 1} if env == "tensors" else {}))
    algorithm.collect()
    algorithm.step()
    valid = algorithm.rollout.tensors.get(keys.VALID, torch.ones(7, 4, dtype=torch.bool))
    assert (algorithm.rollout[keys.TRUNCATED] & algorithm.rollout[keys.TERMINATED]).any()
    assert (algorithm.rollout[keys.FINAL_VALUES][valid] == 0).all()


class Frames(probes.Probe):
    """Never ends, and remembers what it showed: what was `now` is `before`, by the same tensor."""

    single_observation_space = Box(-100.0, 100.0, (3,), np.float32)
    first = later = ("now", "before", "shown")

    def initial_state(self, parameters, noise):
        frames = {"now": noise, "before": noise - 1, "shown": (noise - 2).expand(-1, 2)}
        return {name: frames[name] for name in self.first}

    def transition(self, state, actions, parameters, noise):
        frames = {"now": state["now"] + actions.unsqueeze(-1), "before": state["now"]}
        frames["shown"] = torch.cat((state["before"], state["shown"][:, :1]), 1)
        frames = {name: frames[name] for name in self.later}
        return frames, state["shown"][:, 1], torch.zeros(self.num_envs, dtype=torch.bool)

    def observe(self, state, parameters):
        return torch.cat((state["now"], state["before"], state["shown"][:, :1]), 1)


class OtherOrder(Frames):
    """Names the parts of its state in another order in its steps than at first."""

    first, later = ("before", "now", "shown"), ("now", "shown", "before")


@pytest.mark.parametrize("env", [Frames, OtherOrder])
def test_a_state_that_goes_on_as_another_one_is_what_that_one_was(env):
    eager, recorded = (build(env, execution=mode, horizons_per_env_reset=2) for mode in ("eager", "compile"))
    for _ in range(3):  # the second ends by a reset, whose final values are not of the third
        for algorithm in (eager, recorded):
            algorithm.collect()
        for name in (keys.OBS, keys.REWARDS, keys.FINAL_VALUES):
            torch.testing.assert_close(recorded.rollout[name], eager.rollout[name])
    assert recorded.horizons.collector.stepper.compiles_env


class CountsInPython(probes.OneStep):
    """Not pure: pays what it has counted outside of its state, which a record would pay for ever."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.count = 0

    def advance(self, carry, actions, noise):
        self.count += 1
        carry, step = super().advance(carry, actions, noise)
        return carry, step._replace(rewards=step.rewards * self.count)


class LooksAtValues(probes.Forever):
    """Branches on a number on the host, which cannot be recorded."""

    def transition(self, state, actions, parameters, noise):
        state, rewards, terminated = super().transition(state, actions, parameters, noise)
        return state, rewards * 2 if actions.sum().item() > 2 else rewards, terminated


class Simulator(GymnasiumEnv):
    """Runs eagerly without a word."""

    def __init__(self, num_envs, **options):
        super().__init__("CartPole-v1", num_envs, **options)


@pytest.mark.parametrize("env", [CountsInPython, LooksAtValues, Simulator])
def test_an_environment_that_cannot_be_recorded_runs_eagerly_with_one_warning(env):
    eager, algorithm = build(env, execution="eager"), build(env, execution="compile")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RuntimeWarning)
        for each in (algorithm, algorithm, eager, eager):
            each.collect()
    said = [str(each.message) for each in told if f"{env.__name__} runs eagerly around a compiled" in str(each.message)]
    assert len(said) == (env is not Simulator)
    assert not algorithm.horizons.collector.stepper.compiles_env
    if env is CountsInPython:
        assert len(algorithm.rollout[keys.REWARDS][:6].unique()) == 6  # it still counts
    else:
        torch.testing.assert_close(algorithm.rollout[keys.OBS], eager.rollout[keys.OBS])
