"""What environments, their parameters and their tests in cells refuse, each in a line that says what is legal."""

from __future__ import annotations

import functools

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TimeLimit

from rl8x import DQNConfig, Env, Parameter, Policy, PQNConfig
from rl8x.envs import (
    Attribute,
    CartPole,
    DiscreteDummy,
    GymnasiumEnv,
    ModelField,
    NumpyEnv,
    ObservedParameters,
    Pendulum,
    Scale,
    Spread,
    env_maker,
    validate,
)
from rl8x.envs.cells import check_test, make_cells
from rl8x.envs.episode_metrics import EpisodeMetrics
from rl8x.envs.simulator import SimulatorEnv
from rl8x.models import MLPModel, Model
from rl8x.randomization import Adaptive, Grid, Learnable, Normal, Scheduled, Uniform


class One(gymnasium.Env):
    observation_space, action_space = spaces.Box(-9.0, 9.0, (1,), np.float32), spaces.Discrete(2)


class Two(VectorEnv):
    num_envs, metadata = 2, {"autoreset_mode": AutoresetMode.SAME_STEP}
    single_observation_space, single_action_space = One.observation_space, One.action_space


class Silent(CartPole):
    draw = Env.draw

    def __init__(self, num_envs):
        super().__init__(num_envs)
        self.reset()


class Simulated(SimulatorEnv):
    parameters = {"x": Parameter(default=1.0, low=0.0, high=2.0)}  # noqa: RUF012
    single_observation_space, single_action_space = CartPole.single_observation_space, CartPole.single_action_space


class Blind(Model):
    def __init__(self, observation_space, num_features):
        super().__init__(observation_space, num_features)


def gym(*given, env="CartPole-v1", **options):
    return GymnasiumEnv(env, *(given or (2,)), **options)


def stepped(env, actions):
    env.reset(seed=0)
    env.step(actions)


def made(name, bases, **attributes):
    return type(name, bases, attributes)


def declaring(parameters):
    spaces_of = {name: getattr(CartPole, name) for name in ("single_observation_space", "single_action_space")}
    return made("Wrong", (Env,), parameters=parameters, **spaces_of)(2)


def set_value(env, value):
    """Set nothing."""


def reset(**config):
    parameters = {"length": Attribute("length", high=2.0, unit="m"), "push": "force_mag"}
    gym(parameters=parameters).reset(config=config)


def moving_simulator():
    Simulated(2).parameter_state.configure({"x": ADAPTIVE})


def learnable(threshold):
    return Learnable(Uniform(1, 2), threshold=threshold)


def built(config, **options):
    config(num_envs=2, device="cpu").build(CartPole, **options)


def policy(**options):
    return Policy(HIDDEN, spaces.Discrete(2), **options)


THE_ONE = One()
ADAPTIVE = Adaptive(0.5, (0, 1), 0.1)
KNOWN = Parameter(default=4.0, low=1.0, high=100.0)
ACTING = {  # messages, and the actions that get them
    r"actions must be shaped \[4\]; got \[1\]": (CartPole(4), torch.tensor([1])),
    r"actions must be shaped \[3, 1\]; got \[3\]": (Pendulum(3), torch.zeros(3)),
    "actions must be numbers; got None": (CartPole(2), None),
    r"actions must be numbers; got \[\[0\.5\], \[0\.5, 0\.5\]\]": (Pendulum(2), [[0.5], [0.5, 0.5]]),
    r"actions must be shaped \[1\]; got a dict": (CartPole(1), {"push": torch.tensor([1])}),
    r"CartPole: actions must be elements of Discrete\(2\); got 7": (CartPole(2), torch.tensor([0, 7])),
    r"must be elements of Discrete\(2\); got nan": (DiscreteDummy(1), torch.tensor([np.nan])),
}
DECLARE = r"^Wrong: declare `parameters` as \{name: rl8x.Parameter\(.*; got "
DECLARED = [  # parameters of a class, and what is said to have been got
    ({"most": KNOWN, "a": (1, 0, 2)}, r"\{'a': \(1, 0, 2\)\}"),
    ({1: KNOWN}, r"\{1: Parameter\(.*\)\}"),
    (None, "None"),
]
BOUND = {  # messages, and the bindings of parameters that get them
    r"parameters\['l'\]: CartPoleEnv has no 'lenght' .* Did you mean 'length'": "lenght",
    "must be a number or an array; it is 'euler'": "kinematics_integrator",
    r"parameters\['l'\]: a path looks like": "length..x",
    "must be one of Attribute, ModelField, Scale, Function, or its plain form; got 3": 3,
    "must have one of the keys attribute, model_field, scale; got": {"attribut": "x"},
    "'attribute' does not take that": {"attribute": "length", "lowest": 1},
    r"set by the function set_value, .* use Function\(set_value, default=...\)": set_value,
    "default must lie in its bounds; got 0.5": Attribute("length", low=0.6),
    "must be a number or an array": "state",
    "CartPoleEnv has no MuJoCo model": ModelField("body_mass"),
    r"parameters\['l'\]: Attribute\('screen_width'\) is a whole number, which has no factors": Scale("screen_width"),
}
TOO_MANY = {name: {"linspace": [0, 1, 400]} for name in ("length", "gravity")}
CELLS = [  # what is said of a test, the test, and how many samples it has
    (r"`test` must give values to one parameter .*; got \{\}\. `rl8x envs", {}, None),
    (r"test\['length'\] has no values", {"length": []}, None),
    ("no cell", {"length": {"linspace": [0, 1, 0]}}, None),
    ("low < high", {"length": {"linspace": [1, 0, 3]}}, None),
    ("low > 0", {"length": {"geomspace": [0, 1, 3]}}, None),
    (r"takes \[low, high, count\]", {"length": {"linspace": [0, 1]}}, None),
    ("Did you mean 'linspace'", {"length": {"linspce": [0, 1, 3]}}, None),
    ("must be a list of numbers", {"length": {"grid": [0, 1]}}, None),
    ("twice", {"length": [1, 1]}, None),
    ("finite numbers", {"length": [float("nan")]}, None),
    ("say by `test_cells`", {"length": {"uniform": [0, 1]}}, None),
    ("list them all", {"length": {"uniform": [0, 1]}, "gravity": [1, 2]}, 5),
    ("samples", {"length": [1, 2]}, 5),
    ("`low` must not exceed", {"length": {"uniform": [1, 0]}}, 5),
    ("1,000,000,000,000 values are too many", {"length": {"linspace": [0, 1, 1e12]}}, None),
    ("160,000 cells", TOO_MANY, None),
]
TESTED = [
    (r"^CartPole: test has no parameter 'lenght'.*Did you mean 'length'", {"lenght": np.array([1.0])}),
    (r"^CartPole: test\['length'\] must be in", {"length": np.array([1.0, -1.0])}),
]
MOVING = [  # configurations of CartPole whose ranges move
    ("goes by the metric 'success', .* They have returns", {"length": Adaptive(0.5, (0, 1), 0.1, metric="success")}),
    ("its start lies outside of the parameter's bounds", {"length": Adaptive(20.0, (0, 1), 0.1)}),
    ("must stay in .*reaches from 0.5 to 99", {"length": Scheduled([(0, 0.5), (1, 99.0)])}),
    ("must stay in", {"length": Learnable(Uniform(0, 1), threshold=1)}),
    ("drawn together .* same `thresholds`; got ", {"length": ADAPTIVE, "gravity": Adaptive(9.8, (0, 2), 1)}),
    ("by one Learnable, .* same `threshold`; got 2.0 and 1.0", {"length": learnable(1), "gravity": learnable(2)}),
]
WRONG = [  # an `env_config` of 2 copies of CartPole, and what is said of it
    ({"lenght": 1.0}, r"Did you mean 'length'.*gravity in \[0.1, 100\] m/s\^2"),
    ({"length": 99.0}, r"\['length'\] must be in \[0.025, 10\] m; got 99"),
    ({"length": [0.5, -1.0]}, "got -1"),
    ({"length": float("nan")}, "got nan"),
    ({"length": "long"}, "got 'long'"),
    ({"length": True}, "must be a number, .*; got True"),
    ({"length": [0.5, 0.5, 0.5]}, r"has 3 values for 2 copies \(`num_envs`\)"),
    ({"length": np.full((2, 1), 0.5)}, r"got shape \[2, 1\]"),
    ({"length": Grid([0.1, 0.2, 0.3])}, r"Grid of 3 values, but there are 2 copies \(`num_envs`\).*num_envs=3"),
    ({"length": Uniform(0.1, 50)}, "reaches from 0.1 to 50"),
    ({"length": Normal(20, 1)}, "mean lies outside"),
    ({"length": {"uniform": [0.2, 0.1]}}, "must not exceed"),
]
TAKEN = made("Taken", (CartPole,), single_observation_space=spaces.Dict({"parameters": spaces.Discrete(2)}))
HIDDEN = ObservedParameters(CartPole(1), "critic").single_observation_space
ALONE = r"'parameters' to the critic alone.*critic_obs.*shared"
BY_VALUES = "Q-network acts by its values.*'parameters'.*PPO, SAC or TD3"
UNKNOWN = r"^'CartPole-v1' takes no argument 'sutton_reward'. Did you mean 'sutton_barto_reward'\? It takes "
SAME = r"2 copies are 1 environment\(s\), .* must make a new one at each call"
WRAP = r": .*Wrap the environment, .*ObservedParameters\(.*\(...\), 'all'\)"
RESETS = AutoresetMode.SAME_STEP
VALUES = [
    ("num_envs must be at least 1; got 0", lambda: CartPole(0)),
    ("at least 1 and at most 4; got 5", lambda: made("Few", (CartPole,), max_num_envs=4)(5)),
    ("time_limit must be at least 1 or None; got 0", lambda: CartPole(1, time_limit=0)),
    ("one seed for all copies", lambda: NumpyEnv(CartPole(2)).reset(seed=[1, 2])),
    ("default must lie in its bounds", lambda: Parameter(default=2.0, low=0.0, high=1.0)),
    *((message, functools.partial(stepped, *given)) for message, given in ACTING.items()),
    ("Spread: num_agents must be", lambda: Spread(2, num_agents=0)),
    ("Silent cannot be rendered: give it a `draw`", lambda: Silent(1).render()),
    (r"'lst' of 'x' in `metrics`.*last", lambda: EpisodeMetrics({"x": "lst"})),
    # Gymnasium's
    ("num_envs must be at least 1; got None", lambda: GymnasiumEnv("CartPole-v1")),
    ("GymnasiumEnv: time_limit must be at least", lambda: gym(time_limit=0)),
    ("'CartPol-v1' is registered. Did you mean CartPole-v1", lambda: gym(env="CartPol-v1")),
    ("'Maze-v0' is registered.* of yours .* 'module:Maze-v0'", lambda: gym(env="Maze-v0")),
    ("be made with vectorization='vector': .* entry point", lambda: gym(env="Pendulum-v1", vectorization="vector")),
    ("'sync', 'async', 'vector'; got 'asink'", lambda: gym(vectorization="asink")),
    ("one copy at a time", lambda: gym(env=One, vectorization="vector")),
    ("has 2 copies; got num_envs=3", lambda: GymnasiumEnv(Two(), 3)),
    ("taken as it is; set time_limit where it is made", lambda: GymnasiumEnv(Two(), time_limit=3)),
    ("has no parameters", lambda: gym().reset(config={"length": 1})),
    *((UNKNOWN, lambda kind=kind: gym(vectorization=kind, sutton_reward=1)) for kind in ("sync", "async", "vector")),
    (r"gymnasium:CartPole-v1' takes no argument 'x'\.", lambda: gym(env="gymnasium:CartPole-v1", x=1)),
    (SAME, lambda: gym(env=lambda: THE_ONE)),
    (SAME, lambda: gym(env=lambda: TimeLimit(THE_ONE, 3))),
    (SAME, lambda: GymnasiumEnv(SyncVectorEnv([lambda: THE_ONE] * 2, autoreset_mode=RESETS))),
    *((message, lambda given=given: gym(parameters={"l": given})) for message, given in BOUND.items()),
    (r"env_config\['length'\] must be in \[0, 2\] m; got 3", lambda: reset(length=3.0)),
    (r"no parameter 'lenght'\. Did you mean 'length'", lambda: reset(lenght=1.0)),
    (r"must be in \[0, inf\]; got -1", lambda: reset(push=-1.0)),
    # cells
    *((message, functools.partial(make_cells, *given, 0)) for message, *given in CELLS),
    *((message, lambda cells=cells: check_test(CartPole(1), cells, 1, name="CartPole")) for message, cells in TESTED),
    *((f"CartPole: env_config.*{says}", lambda given=given: CartPole(2).reset(config=given)) for given, says in WRONG),
    # parameters that move
    *((f"CartPole: env_config.*{says}", functools.partial(CartPole(4).plain_config, given)) for says, given in MOVING),
    (r"env_config\['x'\] moves with the returns of episodes, and a simulator", moving_simulator),
    ("a function gives distributions that stand still", lambda: CartPole(2).steer_config({"length": ADAPTIVE})),
    # parameters that are observed
    (r"'none', 'critic', 'all'; got 'al'. Did you mean 'all'", lambda: ObservedParameters(CartPole(2), "al")),
    ("must be one of", lambda: env_maker(CartPole, {"observe_parameters": None})(2)),
    (r"GymnasiumEnv: .* this environment has none", lambda: env_maker("CartPole-v1", {"observe_parameters": "all"})(2)),
    ("such a part already", lambda: ObservedParameters(TAKEN(2), "all")),
    (BY_VALUES, lambda: built(DQNConfig, observe_parameters="critic")),
    (BY_VALUES, lambda: built(PQNConfig, observe_parameters="critic")),
    (ALONE, lambda: policy(model=Blind)),
    (ALONE, lambda: policy(model=MLPModel(HIDDEN, 2))),
    ("shared=False", lambda: policy(model_config={"shared": True})),
]
KINDS = [
    ("CartPole: num_envs must be a whole number; got '8'", lambda: CartPole("8")),
    ("CartPole: time_limit must be a whole number; got True", lambda: CartPole(1, time_limit=True)),
    (r"CartPole: seed must be a whole number; got 0\.5", lambda: CartPole(1).reset(seed=0.5)),
    ("NumpyEnv: `env` must be an rl8x Env", lambda: NumpyEnv("CartPole")),
    ("a parameter's `default` must be a number; got", lambda: Parameter(default="1", low=0.0, high=1.0)),
    ("Bare: declare `single_observation_space`, .*; got None", lambda: made("Bare", (Env,))(1)),
    *((rf"{DECLARE}{got}\.$", functools.partial(declaring, wrong)) for wrong, got in DECLARED),
    ("validate checks an instance of an Env, such as CartPole", lambda: validate(CartPole)),
    ("Spread: num_agents must be", lambda: Spread(2, num_agents=1.5)),
    ("env must be an id, .*; got 7", lambda: gym(env=7)),
    (f"CartPole{WRAP}", lambda: CartPole(2, observe_parameters="all")),
    (f"GymnasiumEnv{WRAP}", lambda: gym(observe_parameters="all")),
]
OUT_OF_TURN = [
    ("call reset", lambda: CartPole(1).step(torch.tensor([0]))),
    (r"call reset\(\)", lambda: gym(1).step(np.array([0]))),
    (r"call reset\(\) before render", lambda: CartPole(1).render()),
]
REFUSED = [(ValueError, *each) for each in VALUES] + [(TypeError, *each) for each in KINDS]
REFUSED += [(RuntimeError, *each) for each in OUT_OF_TURN]


@pytest.mark.parametrize(("error", "message", "call"), REFUSED)
def test_what_is_not_legal_is_refused_in_a_line_with_what_is(error, message, call):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
