"""What rl8x's own modules refuse, each in a line that says what came and what is legal; packages have their tables."""

import functools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tests.probes import Steps
from tests.test_policy import MIXED, SMALL, X, critic_space, flags

import rl8x
from rl8x import DQNConfig, Policy, PPOConfig, PQNConfig, SACConfig, TD3Config, compare, keys
from rl8x.conditions import (
    And,
    Confirmed,
    HitsLowerBound,
    HitsUpperBound,
    NonFinite,
    Plateau,
    StopsDecreasing,
    StopsIncreasing,
    WallTime,
    from_spec,
    to_spec,
)
from rl8x.conditions.base import as_conditions, check_names
from rl8x.config import RunSpec, apply_overrides, dump_run
from rl8x.distributions import NoisyDeterministic, SquashedNormal
from rl8x.envs import CartPole, Env, GymnasiumEnv, Pendulum
from rl8x.envs.parameters import parsed
from rl8x.importing import import_named
from rl8x.keys import ACTION_MASK
from rl8x.models import GRUModel, MLPModel, Model
from rl8x.names import check_arguments, class_named
from rl8x.replay.dataset import Dataset
from rl8x.replay.recording import record
from rl8x.schedules import Schedule
from rl8x.spaces import AsymmetricDict, check_supported, space_to_plain
from rl8x.studies.report import report
from rl8x.studies.statistics import bootstrap, mean
from rl8x.video import film

do = functools.partial

# -- conditions

LOSS, EVAL = "losses/total", "eval/returns/mean"
ASKED = HitsUpperBound("returns/mean", 9)
UNBALANCED = r"A metric, a number or a parenthesis is missing, or there is one too many\."
TEXTS = {  # that are no conditions, and why
    "env/steps": "",
    "env/steps >= 5 and": UNBALANCED,
    "> 5": UNBALANCED,
    "env/steps = 5": r"'= 5' cannot be read\.",
    "env/steps ** 2 >= 5": r"'\*\* 2 >= 5' cannot be read\.",
    "env/steps >= 50,000": r"',000' cannot be read\.",
    "env/steps >= eval/returns/mean": r"one must be a metric and the other a number\.",
    "env/steps >= nan": r"one must be a metric and the other a number\.",
    "env/steps >= 1e999": r"must be a finite number; got inf\.",
    "(env/steps >= 5": UNBALANCED,
    "env/steps >= 5)": UNBALANCED,
    "env/steps >= 5 not": UNBALANCED,
    "wall_time and a >= 1": r"'wall_time' is compared with nothing\.",
    "__import__('os') >= 1": r"'__import__' is compared with nothing\.",
    "__import__('os').getcwd() >= 1": UNBALANCED,
    "() >= 1 or a": r"`\(\)` has nothing in it\.",
    "(" * 1000 + "a > 1" + ")" * 1000: r"It is nested too deeply\.",
}


class Countdown(HitsUpperBound):
    def __init__(self, rows):
        super().__init__(LOSS, 1)
        self.rows = rows


def of_a_function():
    class Inside(Countdown): ...

    return to_spec(Inside(3) & WallTime(1))


def other_state(condition):
    Plateau(LOSS).load_state_dict(condition.state_dict())


DURATIONS = ["", "soon", "2", "1h x", "-1h", 0, -3, math.nan, math.inf, True, None, "0s"]
OUT_OF_RANGE = [
    lambda: Plateau(LOSS, patience=0),
    lambda: Plateau(LOSS, patience=True),
    lambda: Plateau(LOSS, rtol=math.nan),
    lambda: Plateau(LOSS, after=-1),
    lambda: StopsDecreasing(LOSS, patience=-1),
    lambda: StopsIncreasing(LOSS, rtol=-0.1),
    lambda: StopsIncreasing(LOSS, patience="5"),
    lambda: HitsUpperBound(LOSS, math.nan),
    lambda: HitsLowerBound(LOSS, "5"),
    lambda: NonFinite([]),
    lambda: Confirmed(HitsUpperBound(EVAL, 1), evaluations=0),
    lambda: And(),
]
UNDECIDED = [Plateau(LOSS), HitsUpperBound(keys.ENV_STEPS, 9), lambda stats: True, WallTime(9), NonFinite()]
CONDITIONS = [
    *(
        (rf"^unknown stop condition .*{why} There are all, .*confirmed\.$", do(from_spec, text))
        for text, why in TEXTS.items()
    ),
    *((r"WallTime needs positive seconds.*got", do(WallTime, duration)) for duration in DURATIONS),
    *((r"(must be|needs) .*got", make) for make in OUT_OF_RANGE),
    *(("an evaluation cannot decide", do(Confirmed, inner)) for inner in UNDECIDED),
    *(("Resume with the conditions saved", do(other_state, each)) for each in (ASKED, And(Plateau(LOSS)), WallTime(5))),
    (r"compose with &, \| and ~", lambda: ASKED and ASKED),
    (
        r"Unknown metric 'return/mean' in And\(.*Nearest: returns/mean",
        lambda: check_names([ASKED & Plateau("return/mean")], keys.TRAINER_METRICS),
    ),
    (r"got 'x >= 5'\. `rl8x.conditions.from_spec\('x >= 5'\)` makes one", do(as_conditions, "x >= 5")),
    (r"got 'x >= 5'\. `rl8x.conditions.from_spec\('x >= 5'\)` makes one", do(as_conditions, ["x >= 5"])),
    (r"'platteau'\. Did you mean 'plateau'\? There are all, .*confirmed\.$", do(from_spec, {"platteau": {}})),
    ("takes name, patience, rtol, atol, after; .*'patienc'", do(from_spec, {"plateau": {"name": LOSS, "patienc": 3}})),
    ("written as one entry", do(from_spec, {"plateau": LOSS, "wall_time": 3})),
    ("'all' takes a list of conditions", do(from_spec, {"all": {"plateau": LOSS}})),
    ("at least one", do(from_spec, {"all": []})),
    ("unknown stop condition", do(from_spec, {"my.module.Condition": 5})),
    ("not a subclass", do(from_spec, {"my.Other": 3}, find={"my.Other": int}.__getitem__)),
    ("Inside has no form in a run file: define it outside of functions", of_a_function),
    ("no form in a run file: an argument is a value of type set", lambda: to_spec(~Countdown({3}))),
    ("no form in a run file", lambda: to_spec(ASKED & (lambda stats: True))),
]

# -- runs as plain data, and what they name

RUN = {"env": "CartPole", "steps_per_eval": 5}
OVERRIDES = {
    "lr": "is KEY=VALUE",
    "a..b=5": "is KEY=VALUE",
    "steps_per_eval.x=5": "steps_per_eval is 5, not a mapping",
    "env.time_limit=null": r"`env` is a name; got 'env.time_limit=null'\. Arguments of .* are under `env_kwargs`",
    "a={b: !!python/name:os.system x}": "not a list or mapping in YAML",
}
PATHS = {
    "nowhere_at_all.Env": "No module named 'nowhere_at_all'.*working directory",
    "__main__.Net": "module '__main__' has no 'Net'. It stood in the script that ran then: define it in",
    "rl8x.keys.OBSS": "module 'rl8x.keys' has no 'OBSS'. Did you mean 'OBS'",
    "Env": r"looks like package\.module\.Name; got 'Env'",
    "os.system('ls')": r"looks like package\.module\.Name",
    "..x": r"looks like package\.module\.Name",
}
RUNS = [
    ("`env` must be a text; got 5", {"env": 5}),
    ("`env` must have a value", {"env": None}),
    ("unknown key 'steps_per_evl'. Did you mean 'steps_per_eval'", {"env": "A", "steps_per_evl": 5}),
    ("'train': it is one of a study, which `rl8x study -f FILE` runs", {"env": "A", "train": {"a": {}}}),
    ("'num_envs': it is a hyperparameter. Put it under `algorithm_config`", {"env": "A", "num_envs": 5}),
    ("`max_steps` must be a whole number; got 'many'", {"env": "A", "max_steps": "many"}),
    ("`eval_env` must be auto, true, false or an environment's name; got 3", {"env": "A", "eval_env": 3}),
    ("'PPOO'; there are BC, .*, FastSAC, FlashSAC, SAC, .*Did you mean 'PPO'", {"env": "A", "algorithm": "PPOO"}),
    ("must name a subclass", {"env": "A", "algorithm": "rl8x.keys.OBS"}),
    ("`seed` is 1, but algorithm_config has 2", {"env": "A", "seed": 1, "algorithm_config": {"seed": 2}}),
    (r"stop_conditions\[1\]: unknown.*'plateau'", {"env": "A", "stop_conditions": [{"wall_time": 1}, {"platea": 2}]}),
    ("'env_cls' is another name of 'env', and both are given", {"env": "Pendulum", "env_cls": "CartPole"}),
]
NETWORK = torch.nn.Sequential(torch.nn.Linear(2, 2))  # its repr has several lines
# What other libraries call an option, which none has here.
OPTIONS = [
    (r"^PPOConfig has no option 'learning_rate'\. It is 'lr' here\.", do(PPOConfig, learning_rate=1)),
    (r"It is 'horizon' here\.", do(PPOConfig, n_steps=1)),
    (r"It is 'n_step' here\.", do(DQNConfig, n_steps=1)),
    (r"It is 'entropy_coeff' here\.", do(PPOConfig, ent_coef=1)),
    (r"It is 'alpha' here\.", do(SACConfig, ent_coef=1)),
    (r"It is 'epsilon' here\.", do(PQNConfig, start_e=1)),
    (r'Here that is `model_config=\{"hidden_sizes": \[64, 64\]\}`\.', do(PPOConfig, net_arch=1)),
    (r'Here that is `HitsUpperBound\("env/steps", N\)` in `run\(', do(PPOConfig, total_timesteps=1)),
    (r"no option 'num_env'\. Did you mean 'num_envs' or 'num_threads'", do(PPOConfig, num_env=1)),
    (r"It is 'lr' here\.$", do(PPOConfig.preset, "rl8", learning_rate=1)),
    (r"no option 'steps_per_eval'\. Here that is `run\(steps_per_eval=\.\.\.\)`\.$", do(PPOConfig, steps_per_eval=1)),
    (r"Here that is `Trainer\(num_eval_envs=\.\.\.\)`\.$", do(PPOConfig, n_eval_episodes=1)),
    ("There are seed, device,", do(PPOConfig, qqq=1)),
    ("^AlgorithmConfig, a base of configs such as PPOConfig, has no option", do(rl8x.AlgorithmConfig, num_envs=1)),
    (
        r"^`model` must be a name .*; got Sequential\(.*\)\.$",
        do(class_named, "model", NETWORK, {"mlp": MLPModel}, Model, ""),
    ),
    (
        "no argument 'hidden_sizes'.*It is 'hidden_size' here",
        lambda: check_arguments(GRUModel, {"hidden_sizes": 8}, "", num_positional=2),
    ),
    (
        "no argument 'hidden_size'.*It is 'hidden_sizes' here",
        lambda: check_arguments(MLPModel, {"hidden_size": 8}, "", num_positional=2),
    ),
    (r"no attribute 'DDPG'\. Here that is `TD3Config\(num_critics=1, ", lambda: rl8x.DDPG),
    ("no attribute 'whatever'$", lambda: rl8x.whatever),
]
PLAIN = [
    *((message, do(apply_overrides, RUN, [word])) for word, message in OVERRIDES.items()),
    *((message, do(import_named, path, trust=True)) for path, message in PATHS.items()),
    *((message, do(RunSpec.from_plain, data)) for message, data in RUNS),
    ("a run file holds plain data alone; got <object", do(dump_run, {"env": {"x": [object()]}})),
    (r"`spec` must be a RunSpec, as RunSpec.from_file\(.*got 'run.yaml'", do(rl8x.Trainer.from_spec, "run.yaml")),
]

# -- schedules

POINTS = [[0, 1.0], [100, 0.5], [200, 0.0]]
UNORDERED = [[], [[5, 1.0]], [[0, 1.0], [10, 0.5], [10, 0.1]], [[0, float("nan")]], [[0, 1.0], [0.5, 1.0]]]
SCHEDULES = [
    *(
        (r"pairs.*finite numbers all, with whole transitions that begin at 0 and increase; got", each)
        for each in UNORDERED
    ),
    *(("pairs.*; got", each) for each in ([[0, 1.0, 2.0]], [0, 1.0], ["ab"], [[0, True]])),
    ("keys kind, points; got points", {"points": POINTS}),
    ("'step' or 'interp'; got 'cosine'", {"points": POINTS, "kind": "cosine"}),
]

# -- spaces

NUMBERS = spaces.Box(-1, 1, (2,), np.float32)
NESTED = {"a": spaces.Discrete(2), "b": spaces.Dict({"c": spaces.Box(0, 1, ())})}
NO_KEY = r"^space\['x'\] must have texts without '/' as keys; got"
UNSUPPORTED = [
    ("got None", None),
    (r"^space must be a gymnasium.spaces.*; got Text", spaces.Text(3)),
    (r"space\['a'\]\[1\] must be .*; got ", spaces.Dict({"a": spaces.Tuple([spaces.Discrete(2), spaces.Text(3)])})),
    (r"space must have at least one part; got Tuple\(\)", spaces.Tuple([])),
    (rf"{NO_KEY} 0\.", spaces.Dict({"x": spaces.Dict({0: NUMBERS})})),
    (rf"{NO_KEY} 'arm/angle'\.", spaces.Dict({"x": spaces.Dict({"arm/angle": NUMBERS})})),
]
EMPTY = spaces.Box(-1, 1, (0,), np.float32)
EMPTY_SPACES = [
    (r"Box\(\[0\], float32\)", EMPTY),
    (r"Box\(\[3, 0\], float32\)", spaces.Box(-1, 1, (3, 0), np.float32)),
    (r"MultiDiscrete\(\[0\], int64\)", spaces.MultiDiscrete(np.zeros(0, np.int64))),
    ("Dict", spaces.Dict({"a": EMPTY, "b": spaces.Tuple([EMPTY])})),
]


def simulate(observation_space, action_space):
    declared = {"observation_space": observation_space, "action_space": action_space}
    return GymnasiumEnv(type("Mine", (Steps,), declared), 2)


LARGEST = {dtype: float(np.finfo(dtype).max) for dtype in (np.float16, np.float32, np.float64)}
HUGE = [  # bounds that nothing can be scaled to
    *((low, LARGEST[dtype], dtype) for dtype in LARGEST for low in (-LARGEST[dtype], 0.0)),
    *((-bound, 1.0, np.float64) for bound in (LARGEST[np.float32], 1e300, 1e12, np.inf)),
]
SCALES = {
    "TD3": do(TD3Config),
    "SquashedNormal": do(PPOConfig, distribution=SquashedNormal),
    "NoisyDeterministic": do(PPOConfig, distribution=NoisyDeterministic),
}


def bounded(config, low, high, dtype):
    moves = type("Moves", (Steps,), {"action_space": spaces.Box(low, high, (2,), dtype)})
    config(num_envs=2, horizon=4, device="cpu", execution="eager").build(do(GymnasiumEnv, moves))


NO_BOUNDS = r"needs actions with finite bounds; got Box.* up to .*as good as no"
SPACES = [
    *((message, do(check_supported, space, "space")) for message, space in UNSUPPORTED),
    *(
        (rf"single_{owner}_space must have at least one number; got {shown}", do(simulate, *both))
        for shown, space in EMPTY_SPACES
        for owner, both in (("observation", (space, NUMBERS)), ("action", (NUMBERS, space)))
    ),
    *(("a space must have at least one number", do(space_to_plain, space)) for _, space in EMPTY_SPACES),
    (r"`critic_only` names parts: a, b; got 'x'", do(AsymmetricDict, NESTED, critic_only=["b", "x"])),
    (r"`critic_only` names parts: a, b; got 'c'", do(AsymmetricDict, NESTED, critic_only="bc")),
    *((f"SAC {NO_BOUNDS}", do(bounded, SACConfig, *bounds)) for bounds in HUGE),
    *((f"{owner} {NO_BOUNDS}", do(bounded, config, *HUGE[2])) for owner, config in SCALES.items()),
]

# -- policies

THREE = spaces.Discrete(3)
MASKS = [
    (r"'action_mask' must be shaped \[3\].*got Box\(\[4\]", flags(4), THREE),
    (r"shaped \[5\]", flags(4), spaces.MultiDiscrete([2, 3])),
    ("needs discrete actions", flags(2), X),
    ("must be a Dict with masks for some of gear, legs, on", flags(4), MIXED),
    ("'leg'.*legs", spaces.Dict({"leg": flags(5)}), MIXED),
    (r"'action_mask/legs' must be shaped \[5\]", spaces.Dict({"legs": flags(4)}), MIXED),
]
SEEN = [  # what the critic alone may see
    ("'hiden'.*hidden", {"critic_obs": ["hiden"]}),
    ("shared=False", {"critic_obs": ["hidden"], "shared": True}),
    ("nothing to see", {"critic_obs": ["x", "hidden", "kind"]}),
    (r"Try \['hidden'\]", {"critic_obs": "hidden"}),
]
VECTOR = spaces.Box(-np.inf, np.inf, (4,), np.float32)
ROW = [0.1, 0.2, 0.3, 0.4]


def decide(obs, space=VECTOR, **options):
    return Policy(space, spaces.Discrete(2), model_config={"hidden_sizes": [8]}).decide(obs, **options)


BYTES = spaces.Box(0, 255, (2,), np.uint8)
WHOLE = [  # observations that are no elements of their space
    (r"Discrete\(3\); got 3", THREE, 3),
    (r"Discrete\(3\); got -1", THREE, [0, -1]),
    (r"Discrete\(3\), whole numbers; got 1\.5", THREE, 1.5),
    (r"Discrete\(3\), whole numbers; got nan", THREE, np.nan),
    (r"Discrete\(3, start=5\); got 4", spaces.Discrete(3, start=5), 4),
    (r"MultiDiscrete\(\[2\], int64\); got 3", spaces.MultiDiscrete([2, 3]), [1, 3]),
    (r"Box\(\[2\], uint8\), whole numbers; got 0\.25", BYTES, [0.25, 1.0]),
    (r"Box\(\[2\], uint8\), whole numbers; got 300", BYTES, [300, 0]),
    (r"Box\(\[2\], int8\), whole numbers; got inf", spaces.Box(-8, 8, (2,), np.int8), torch.tensor([[0.0, np.inf]])),
]
NO_NUMBERS = ["left", None, [None] * 3, [[1.0] * 4, [1.0]], [1j] * 4, torch.zeros(4, dtype=torch.complex64)]
PARTS = {"own": VECTOR, "agent_id": THREE}
ACTING = r"^to act, call `policy.decide\(obs\)`"


def recurrent():
    return Policy(VECTOR, X, model="gru", model_config=SMALL["gru"])


def remembering(state):
    return recurrent().decide([ROW], state)


POLICIES = [
    *((says, do(Policy, spaces.Dict({"x": X, ACTION_MASK: mask}), actions)) for says, mask, actions in MASKS),
    *((says, do(Policy, critic_space(), THREE, model_config=config)) for says, config in SEEN),
    ("parts of a Dict", do(Policy, X, THREE, model_config={"critic_obs": ["x"]})),
    ("beside 'action_mask'", do(Policy, spaces.Dict({ACTION_MASK: flags(3)}), THREE)),
    *((f"`obs` must be elements of {shown}", do(decide, wrong, space)) for shown, space, wrong in WHOLE),
    *((r"`obs` must be numbers; got|the observation has no `obs`", do(decide, wrong)) for wrong in NO_NUMBERS),
    *(
        (rf"`obs` must be finite; got {bad} in row 1\.", do(decide, [ROW, [*ROW[1:], bad]]))
        for bad in (np.nan, -np.inf)
    ),
    (r"`obs` must be finite; got inf in row 0\.", do(decide, [*ROW[1:], np.inf])),
    (
        r"`obs/own` must be finite; got nan in row 0\.",
        do(decide, {"own": [np.nan] * 4, "agent_id": 1}, spaces.Dict(PARTS)),
    ),
    (r"has no `obs/agent_id`.* by name: 'agent_id', 'own'\.", do(decide, ROW, spaces.Dict(PARTS))),
    *(  # of which one flag would have been taken for all three
        (r"`starts` must be one flag an observation, \[3\]; got", do(decide, [ROW] * 3, starts=starts))
        for starts in ([True], [True, False], True)
    ),
    *(
        ("the state has no `actor_h`: give what the last decision returned", do(remembering, state))
        for state in ({}, {"h": [0.0]}, torch.zeros(1, 4), ([0], {}))
    ),
    *(
        (r"the state `actor_h` of 1 observations must be shaped \[1, 4\]; got", do(remembering, {"actor_h": part}))
        for part in (torch.zeros(2, 4), np.zeros((1, 3)), [0.0] * 4)
    ),
    ("the state `actor_h` must be numbers; got 'x'", do(remembering, {"actor_h": "x"})),
    (ACTING, lambda: recurrent().predict(ROW)),
    (ACTING, lambda: recurrent().predict(ROW, None, episode_start=True)),
    (r"^there is no file 'run' .*: rl8x.load_algorithm\('run'\).policy$", do(Policy.load, "run")),
    (r"^there is no file '/' .*: rl8x.load_algorithm\('/'\).policy$", do(Policy.load, "/")),
    ("Policy.save: `path` must be a path, without NUL; got ", lambda: recurrent().save("a\0b")),
    (r"Policy.load: `path` must be a path, without NUL; got ''", do(Policy.load, "")),
    (
        r"`buffer_path` must be a path, without NUL; got 'a\\x00b'",
        lambda: DQNConfig(num_envs=2, device="cpu", buffer_path="a\0b").build(CartPole),
    ),
]

# -- films


class Plain(CartPole):
    draw = Env.draw


def of_pendulum(function, env, *args, **options):
    own = Pendulum(1)
    return function(Policy(own.single_observation_space, own.single_action_space), env, *args, **options)


filmed = functools.partial(of_pendulum, film)


FILMS = [
    ("`episodes` must be a whole number, at least 1; got 0", lambda: filmed(Pendulum(1), episodes=0)),
    ("`columns` must be a whole number, at least 1; got 1.5", lambda: filmed(Pendulum(1), columns=1.5)),
    *(
        (f"`fps` must be a finite number, at least 0.01; got {fps}", do(filmed, Pendulum(1), fps=fps))
        for fps in (math.inf, -5, 1e-9)
    ),
    *(
        (f"`seed` must be a whole number, at least 0.*; got {seed}", do(filmed, Pendulum(1), seed=seed))
        for seed in (-1, 0.5, 2**64)
    ),
    *(
        (
            r"is for observations of Box\(\[-1.*; the environment has Box\(\[-4",
            do(of_pendulum, function, CartPole(1), *args),
        )
        for function, *args in ((film,), (record, 8))
    ),
    ("render_mode='rgb_array'", lambda: filmed(GymnasiumEnv("CartPole-v1", 1))),
    ("Plain cannot be rendered: give it a `draw`", lambda: filmed(Plain(1))),
    ("films are of a Policy in an Env; got None and .*Pendulum", lambda: film(None, Pendulum(1))),
    (r"one of \.gif, \.mp4; got '\.avi'", lambda: filmed(Pendulum(1), suffix=".avi")),
]
# -- what is shown in several lines


ROWS = {name: torch.ones(1) for name in ("obs", "actions", "rewards", "terminated", "truncated")}
MODULE, LINES = torch.nn.Sequential(torch.nn.Linear(1, 1)), r"got Sequential\(\\n  \(0\): Linear"
SHOWN = [
    (f"films are of a Policy in an Env; {LINES}", lambda: film(MODULE, None)),
    (f"a trainer needs an algorithm like .*; {LINES}", lambda: rl8x.Trainer(MODULE)),
    (r"An environment is a class, .*; got tensor\(\[\[0\.\],\\n", lambda: PPOConfig().build(torch.zeros(2, 1))),
    *((f"`{name}` must be .*; {LINES}", do(PPOConfig, **{name: MODULE})) for name in ("lr", "optimizer", "num_envs")),
    (f"Plateau: `patience` must be a whole number, at least 1; {LINES}", lambda: Plateau(LOSS, patience=MODULE)),
    (f"env_config must be a mapping .*; {LINES}", lambda: parsed(MODULE)),
    (r"no tuned setting of a\\nb\.", lambda: rl8x.tuned("a\nb")),
    ("no tuned setting of CartPole by 3; there are those by ppo", lambda: rl8x.tuned("CartPole", 3)),
    ("`lr` must be finite; got 1000", lambda: PPOConfig(lr=10**400)),
]
ARRAY = np.zeros(3)
# What torch, NumPy or Python would refuse deep inside.
ODD = [
    *((f"`{name}` must be .*; got array", do(PPOConfig, **{name: ARRAY})) for name in ("lr", "seed", "execution")),
    *((f"`{name}` must be .*; got array", do(PPOConfig, **{name: ARRAY})) for name in ("model_config", "gae_lambda")),
    *(
        (f"`device` must be 'auto' or a device of this machine; got '.*{shown}", do(make, device=device))
        for shown, device in ((r"1\.5", 1.5), ("x", "x"), ("None", None), ("18446", 2**64), (r"\[\]", []))
        for make in (functools.partial(CartPole, 2), functools.partial(Dataset.from_tensors, ROWS))
    ),
    *(
        (f"`{name}` is a hyperparameter", lambda name=name: PPOConfig(device="cpu").build(CartPole, **{name: 1}))
        for name in ("num_envs", "seed", "device")
    ),
    ("`buffer_path` must be a path", lambda: SACConfig(buffer_path=1.5, device="cpu").build(Pendulum)),
    ("`transitions` must be a whole number, at least 1; got nan", lambda: record(None, CartPole(1), math.nan)),
    ("`seed` must be a whole number, at least 0; got 'x'", lambda: record(None, CartPole(1), 1, seed="x")),
]
# Whole numbers that run files do not hold.
LARGE = [
    (f"{name} must be .*of at most 63 bits; got -?9223372036854775808", call)
    for name, call in {
        "`seed`": lambda: PPOConfig(seed=2**63),
        "`seqs_per_state_reset`": lambda: PPOConfig(seqs_per_state_reset=-(2**63)),
        "`seed`.*": lambda: RunSpec.from_plain({"env": "CartPole", "seed": 2**63}),
        "`test_seed`": lambda: rl8x.Study({"a": {}}, {"length": [1]}, env="CartPole", max_steps=1, test_seed=2**63),
        "`keep`": lambda: rl8x.Checkpoints(keep=2**63),
        "Plateau: `patience`": lambda: Plateau(LOSS, patience=2**63),
        "`num_eval_envs`": lambda: rl8x.Trainer(PPOConfig().build(CartPole), num_eval_envs=2**63),
    }.items()
]
# -- of a trainer, its tracker and its checkpoints


@functools.cache
def trainer():
    config = PPOConfig(num_envs=2, horizon=4, device="cpu", execution="eager")
    return rl8x.Trainer(config.build(CartPole), tracker=rl8x.MemoryTracker(), checkpoints=False)


GRID = torch.zeros(2, 2)
NO_MAPPINGS, NO_FLAGS, NO_SECONDS = (
    (3, "x", [1], {1}, iter(()), GRID, int),
    ("no", 1, GRID),
    (-1, math.inf, 10**400, "1"),
)
NO_TEXTS = (3, b"x", Path("x"), GRID)
GIVEN = {  # argument: what it must be, what came, and the call
    "eval_env_config": ("must be a mapping", NO_MAPPINGS, lambda **given: trainer().check_run(**given)),
    "env_config": ("must be a mapping", NO_MAPPINGS, lambda **given: trainer().eval(**given)),
    "`deterministic`": ("must be True or False", NO_FLAGS, lambda **given: trainer().eval(**given)),
    "`overrides`": ("must be a mapping", NO_MAPPINGS, do(rl8x.Trainer.resume, "x")),
    "`why`": ("must be a text", (3, GRID), lambda **given: trainer().stop(**given)),
    "`progress`": ("must be one of", (False, GRID, GRID.numpy()), lambda **given: trainer().run(max_steps=1, **given)),
    "`log_models`": ("must be true or false", (GRID, GRID.numpy()), lambda **given: of_algorithm(**given)),
    "`checkpoints`": ("must be a Checkpoints, a path", (3, GRID, [1]), lambda **given: of_algorithm(**given)),
    "`directory`": ("must be a path", (3, b"x", GRID), rl8x.Checkpoints),
    "`best`": ("must be a text", (3, GRID), rl8x.Checkpoints),
    **{f"`{name}`": ("must be a text", NO_TEXTS, rl8x.MLflowTracker) for name in ("run_name", "tracking_uri")},
    **{f"`{name}`": ("must be a mapping", NO_MAPPINGS, rl8x.MLflowTracker) for name in ("tags", "params")},
    **{f"`{name}`": ("must be True, False", NO_FLAGS, rl8x.MLflowTracker) for name in ("curves", "system_metrics")},
    "`spool_dir`": ("must be a path", (3, b"x", GRID), rl8x.MLflowTracker),
    "`thinning`": ("must be a Thinning", (True, 100, GRID), rl8x.MLflowTracker),
    "`finish_timeout_s`": ("must be a finite number", NO_SECONDS, rl8x.MLflowTracker),
    **{f"`{name}`": ("must be a finite number", (10**400, GRID, -1), do(Plateau, LOSS)) for name in ("rtol", "atol")},
    "`after`": ("must be a whole number, at least 0", (-1, 0.5), do(Plateau, LOSS)),
    "`evaluations`": ("must be a whole number, at least 1", (0, 1.5), do(Confirmed, Plateau(LOSS))),
}


def of_algorithm(**given):
    return rl8x.Trainer(trainer().algorithm, **{"tracker": rl8x.NullTracker(), **given})


def distil(teacher):
    rl8x.DistillationConfig(teacher=teacher, device="cpu").build(CartPole)


def begins_twice(tracker):
    tracker.start(params={}, tags={})
    tracker.start(params={}, tags={})


TRAINERS = [
    *(
        (f"{argument} {legal}.*; got ", do(call, **{argument.strip("`"): value}))
        for argument, (legal, values, call) in GIVEN.items()
        for value in values
    ),
    *(("^`level` must be .*; got", do(compare, "x", level=each)) for each in (GRID, None, "x", 1, math.nan)),
    *(("^`level` must be .*; got", do(bootstrap, mean, [[1.0]], level=each)) for each in (GRID, None, "x", 0)),
    *(("^`study`, a folder or .*; got", do(report, each)) for each in (GRID, None, 3, "")),
    ("Study.*mapping|`vary` must be .*; got", lambda: rl8x.Study({"a": {}}, {"length": 1.0}, vary=GRID)),
    *(("^An environment is .*; got", do(of_algorithm, eval_env=each)) for each in (GRID, GRID.numpy())),
    *(
        ("env_config must be .*; got <class", lambda each=each: trainer().step(env_config=each))
        for each in (int, CartPole)
    ),
    *(
        ("env_config must be .*; got <class", lambda each=each: trainer().check_run(env_config=each))
        for each in (int, Env)
    ),
    *(("called with the trainer .*; got", do(of_algorithm, callbacks=[each])) for each in (int, 3, GRID)),
    ("^`tracker` must keep runs, .*; got tensor", do(of_algorithm, tracker=GRID)),
    *(("NonFinite: `name` must be a metric's name, .*; got", do(NonFinite, each)) for each in (3, Path("x"), int)),
    ("WallTime needs positive seconds", do(WallTime, GRID)),
    *(("A stop condition is .*; got tensor", do(make, GRID)) for make in (And, Confirmed, as_conditions)),
    *(("^no tuned setting of", do(rl8x.tuned, each)) for each in ([1], {}, GRID, 3)),
    *(("^`teacher` must be a run .*; got", do(distil, each)) for each in ({"a": 1}, {}, [1], GRID)),
    *(("^CartPole: num_envs must be a whole number; got", do(CartPole(2).another, each)) for each in ("x", GRID, 1.5)),
    *(("^CartPole: num_envs must be .* at most 2,147,483,647; got", do(CartPole, each)) for each in (2**31, 2**70)),
    ("^CartPole: num_envs must be a whole number; got tensor", do(CartPole, GRID)),
    ("a tracker of its own", do(begins_twice, rl8x.MemoryTracker())),
]
REFUSED = [
    *LARGE,
    *ODD,
    *CONDITIONS,
    *PLAIN,
    *OPTIONS,
    *((f"`lr_schedule`.*{message}", do(Schedule.make, spec, name="lr_schedule")) for message, spec in SCHEDULES),
    *SPACES,
    *POLICIES,
    *FILMS,
    *SHOWN,
    *TRAINERS,
]
ERRORS = (ValueError, RuntimeError, TypeError, AttributeError, FileNotFoundError, IsADirectoryError)


@pytest.mark.filterwarnings("error:overflow")
@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_what_is_not_legal_is_refused_in_a_line_with_what_is(message, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ERRORS, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
