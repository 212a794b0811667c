from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tests.probes import Probe, Steps

from rl8x.envs import BUILTIN, Env, GymnasiumEnv, validate
from rl8x.envs.base import Parameter
from rl8x.randomization import Uniform


class Good(Env):
    single_observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    single_action_space = spaces.Discrete(3)
    parameters = {"scale": Parameter(default=1.0, low=0.1, high=10.0, unit="", description="")}  # noqa: RUF012
    terminates = True
    reset_noise = 2
    step_noise = 1

    def initial_state(self, parameters, noise):
        return {"at": noise * parameters["scale"].unsqueeze(-1)}

    def transition(self, state, actions, parameters, noise):
        at = state["at"] + noise + (actions - 1).unsqueeze(-1)
        return {"at": at}, -at.abs().sum(-1), at.abs().amax(-1) > 3

    def observe(self, state, parameters):
        return state["at"]


class DictGood(Good):
    single_observation_space = spaces.Dict({"at": Good.single_observation_space, "first": spaces.Discrete(10)})

    def observe(self, state, parameters):
        return {"at": state["at"], "first": state["at"][:, 0].long().clamp(0, 9)}


class Cached(Good):
    """Keeps constants that it makes at the first use: they are no hidden state."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.constants = {}

    def observe(self, state, parameters):
        if not hasattr(self, "factor"):
            self.factor = self.constants["factor"] = torch.full((), 2.0)
        return state["at"] * self.factor * self.constants["factor"]


@pytest.mark.parametrize("env_class", [*BUILTIN.values(), Good, DictGood, Cached])
def test_good_environments_pass_and_stay_as_they_are(env_class):
    env = env_class(6, seed=0)
    name, parameter = next(iter(env.parameters.items()))
    env.reset(config={name: Uniform(parameter.default, parameter.default)})
    env.parameter_state.configure({name: [parameter.default] * 6})
    generator, carry, attributes = env.generator.get_state(), env.carry, dict(vars(env))
    kept = {key: value.clone() for key, value in carry["state"].items()}
    torch.manual_seed(3)
    torch_state = torch.get_rng_state()
    validate(env)
    assert torch.equal(env.generator.get_state(), generator)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert vars(env) == attributes
    assert env.carry is carry
    assert all(torch.equal(carry["state"][key], value) for key, value in kept.items())
    assert env.config == {name: {"uniform": [parameter.default] * 2}}


@pytest.mark.parametrize(
    ("low", "high", "value", "said"),
    [
        (-10.0, 10.0, 1000.0, ["Bad: obs has 1000, out of the bounds of its Box (-10 to 10). Nothing is cut off; "]),
        (0.0, np.inf, -1.0, ["Bad: obs has -1, out of the bounds of its Box (0 to inf). Nothing is cut off; "]),
        (-10.0, 10.0, 10.001, []),  # rounding
        (-np.inf, np.inf, 1e30, []),
    ],
)
@pytest.mark.parametrize("kind", ["tensors", "simulator"])
def test_observations_out_of_bounds_are_told_once(kind, low, high, value, said):
    space = spaces.Box(low, high, (2,), np.float32)
    far = type("Bad", (observing(lambda at: at * 0 + value),), {"single_observation_space": space})(5, seed=0)
    if kind == "simulator":
        seen = {"observation_space": space, "observation": lambda self: np.full(2, value, np.float32)}
        far = GymnasiumEnv(type("Bad", (Steps,), seen), 2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        validate(far)
    assert [str(each.message).removesuffix("mend `observation_space`, or the observation.") for each in told] == said


def bad(**methods):
    return type("Bad", (Good,), methods)


def observing(see):
    return bad(observe=lambda self, state, parameters: see(state["at"]))


def starting(make):
    return bad(initial_state=lambda self, parameters, noise: make(noise))


def moving(change):
    return bad(transition=lambda self, state, *given: change(state, *Good.transition(self, state, *given)))


def in_parts(see):
    return type("Bad", (DictGood,), {"observe": lambda self, state, parameters: see(state["at"])})


def in_place(state, *result):
    state["at"].add_(1)
    return result


def counting(self, state, actions, parameters, noise):
    self.count = getattr(self, "count", 0) + 1
    return Good.transition(self, state, actions, parameters, noise)


def writing(self, state, parameters):
    if not hasattr(self, "memory"):
        self.memory = torch.zeros(1)
    self.memory.add_(1)
    return state["at"]


def with_buffers(self, *given, **named):
    Good.__init__(self, *given, **named)
    self.buffers = {"rewards": torch.zeros(5), "counts": [0]}


def buffering(self, state, actions, parameters, noise):
    following, rewards, terminated = Good.transition(self, state, actions, parameters, noise)
    return following, self.buffers["rewards"].copy_(rewards + state["at"].sum(-1)), terminated


def rebinding(self, state, actions, parameters, noise):
    self.buffers = dict(self.buffers)
    return Good.transition(self, state, actions, parameters, noise)


def counting_aside(self, state, actions, parameters, noise):
    self.buffers["counts"][0] += 1
    return Good.transition(self, state, actions, parameters, noise)


DECLARED = {name: vars(Good)[name] for name in ("single_observation_space", "single_action_space")}
CASES = {  # environments, and what is said of each after its name
    "observation shape": (observing(lambda at: at[:, :1]), r"observe must return obs as \[5, 2\] .*; got \[5, 1\]"),
    "observation unbatched": (observing(lambda at: at[0]), r"observe must return obs as \[5, ...\]; got \[2\]"),
    "observation no tensor": (observing(lambda at: [1, 2]), "observe .* got list"),
    "observation NaN": (observing(lambda at: at / 0 * 0), "observe returned NaN"),
    "NaN of a part": (
        in_parts(lambda at: {"at": at / 0 * 0, "first": at[:, 0].long().clamp(0, 9)}),
        r"observe returned NaN in obs\['at'\]",
    ),
    "observation random": (observing(lambda at: at + torch.rand(2)), "observe gave two results for the same arguments"),
    "dict keys": (in_parts(lambda at: {"at": at}), r"observe .* as a dict with \['at', 'first'\], .*; got \['at'\]"),
    "dict entry": (
        in_parts(lambda at: {"at": at, "first": at[:, 0]}),
        r"observe must return obs\['first'\] as \[5\] torch.int64, .*; got \[5\] torch.float32",
    ),
    "initial state": (starting(lambda noise: noise), "initial_state must return the state as a dict .*; got Tensor"),
    "initial state rows": (starting(lambda noise: {"at": noise[:1]}), r"initial_state .* as \[5, ...\]; got \[1, 2\]"),
    "initial state random": (starting(lambda noise: {"at": torch.rand(5, 2)}), "initial_state gave two results"),
    "noise in place": (starting(lambda noise: {"at": noise.mul_(2)}), "initial_state changed `noise` in place"),
    "a parameter of one number": (
        bad(initial_state=lambda self, parameters, noise: {"at": noise * parameters["scale"]}),
        "initial_state raised RuntimeError: .*size",
    ),
    "state keys": (
        moving(lambda before, state, r, t: (state | {"more": r}, r, t)),
        r"transition must return state as a dict with \['at'\], as in the state before; got \['at', 'more'\]",
    ),
    "state shape": (
        moving(lambda before, state, r, t: ({"at": state["at"][:, :1]}, r, t)),
        r"transition must return state\['at'\] as \[5, 2\] torch.float32, as in the state before; got \[5, 1\]",
    ),
    "rewards shape": (
        moving(lambda before, state, r, t: (state, r.unsqueeze(1), t)),
        r"transition must return rewards as \[5\] torch.float32; got \[5, 1\]",
    ),
    "rewards infinite": (moving(lambda before, state, r, t: (state, r / 0, t)), "transition returned a reward of -inf"),
    "terminated dtype": (
        moving(lambda before, state, r, t: (state, r, t.float())),
        r"transition must return terminated as \[5\] torch.bool; got \[5\] torch.float32",
    ),
    "two results": (
        moving(lambda before, state, r, t: (state, r)),
        r"transition must return \(state, rewards, terminated\); got 2 values",
    ),
    "undeclared termination": (bad(terminates=False), "transition said terminated, but .*`terminates = False`"),
    "in place": (moving(in_place), "transition changed `state` in place"),
    "counter": (bad(transition=counting), "transition changed self.count"),
    "memory": (bad(observe=writing), "observe changed self.memory"),
    "rebound": (bad(__init__=with_buffers, transition=rebinding), "transition changed self.buffers;"),
    "buffer": (bad(__init__=with_buffers, transition=buffering), r"transition changed self.buffers\['rewards'\]"),
    "counter in a list": (
        bad(__init__=with_buffers, transition=counting_aside),
        r"transition changed self.buffers\['counts'\]\[0\]",
    ),
    "exception": (moving(lambda before, *result: before["velocity"]), "transition raised KeyError: 'velocity'"),
    "missing": (type("Bad", (Env,), DECLARED), "initial_state raised NotImplementedError"),
    "action space": (bad(single_action_space=spaces.Text(4)), "single_action_space must be .*; got Text"),
}


@pytest.mark.parametrize("case", CASES)
def test_faults_name_the_function(case):
    env_class, message = CASES[case]
    env = env_class(5, seed=0)
    state = env.generator.get_state()
    with pytest.raises(ValueError, match=rf"Bad\.{message}") as caught:
        validate(env)
    assert "\n" not in str(caught.value)
    assert torch.equal(env.generator.get_state(), state)


def test_attributes_may_be_tables_and_name_themselves():
    class Odd(Good):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            self.prices, self.graph = [0.5] * 10**6, {}
            self.graph["graph"] = self.graph

    validate(Odd(3))


def test_an_episode_may_terminate_with_nan():
    def explode(before, state, rewards, _):
        over = state["at"][:, 0] > state["at"][:, 1]
        return {"at": torch.where(over[:, None], torch.nan, state["at"])}, rewards, over

    validate(moving(explode)(5, seed=0))


class OnlyLegal(Probe):
    """Raises where anything but the last action of each choice is taken."""

    def __init__(self, num_envs, *, actions, mask):
        self.single_action_space, self.mask = actions, mask
        flags = spaces.MultiBinary(len(mask))
        self.single_observation_space = spaces.Dict({"x": Probe.single_observation_space, "action_mask": flags})
        super().__init__(num_envs)

    def transition(self, state, actions, parameters, noise):
        last = torch.as_tensor(getattr(self.single_action_space, "nvec", 1) - 1)
        assert bool((actions == last).all()), "an illegal action"
        return dict(state), torch.zeros(self.num_envs), torch.zeros(self.num_envs, dtype=torch.bool)

    def observe(self, state, parameters):
        return {"x": state["x"], "action_mask": torch.tensor([self.mask] * self.num_envs, dtype=torch.int8)}


@pytest.mark.parametrize(
    ("actions", "mask"), [(spaces.MultiDiscrete([2, 3]), [0, 1, 0, 0, 1]), (spaces.MultiBinary(2), [0, 0])]
)
def test_a_masked_environment_is_probed_with_legal_actions(actions, mask):
    validate(OnlyLegal(3, actions=actions, mask=mask))
    with pytest.raises(ValueError, match="an illegal action"):
        validate(OnlyLegal(3, actions=actions, mask=[1] * len(mask)))
