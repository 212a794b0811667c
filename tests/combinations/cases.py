"""Runs drawn at random: a task, an algorithm's config, what is asked of the trainer, and what must be refused."""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, Space
from gymnasium.vector import AutoresetMode
from hypothesis import strategies as st
from tests.combinations.tasks import LoggedWalk, Simulator, Walk, mask_width
from tests.test_round_trip import ACTIONS, OBSERVATIONS

from rl8x import Checkpoints, MemoryTracker, Policy, Trainer, algorithms, conditions, keys
from rl8x.envs import Env, GymnasiumEnv, env_maker
from rl8x.randomization import Adaptive, Choice, Grid, Learnable, LogUniform, Normal, Scheduled, Uniform
from rl8x.replay.dataset import Dataset
from rl8x.replay.recording import record

STEPS = 4
ALGORITHMS: dict[str, type[algorithms.AlgorithmConfig]] = {
    "ppo": algorithms.PPOConfig,
    "pqn": algorithms.PQNConfig,
    "distillation": algorithms.DistillationConfig,
    "dqn": algorithms.DQNConfig,
    "sac": algorithms.SACConfig,
    "td3": algorithms.TD3Config,
    "bc": algorithms.BCConfig,
    "iql": algorithms.IQLConfig,
    "cql": algorithms.DQNConfig,
    "offline sac": algorithms.SACConfig,
    "offline td3": algorithms.TD3Config,
}
WITH_A_REPLAY = ("dqn", "sac", "td3")
OFFLINE = ("bc", "iql", "cql", "offline sac", "offline td3")
LOSSES = {"ppo": "losses/total", "bc": "losses/bc", "distillation": "losses/distillation"}
# Where runs are, such as "cuda"; `make fuzz-cuda` has a simulated one.
DEVICE = os.environ.get("RL8X_FUZZ_DEVICE", "cpu")


def fits(algorithm: str, space: Space[Any]) -> bool:
    if algorithm in ("ppo", "bc", "distillation"):
        return True
    if algorithm == "iql":
        return isinstance(space, Box | Discrete)
    bounded = isinstance(space, Box) and bool(np.isfinite([space.low, space.high]).all())
    discrete = isinstance(space, Discrete)
    return {"sac": bounded or discrete, "td3": bounded}.get(algorithm.removeprefix("offline "), discrete)


@dataclasses.dataclass
class Case:
    """One run. `config` has the hyperparameters, `trainer` the trainer's arguments, `run` those of `run()`.

    `recorded` are the transitions of its data set, `best` the metric and the mode by which a policy is the best.
    """

    algorithm: str
    kind: str
    task: dict[str, Any]
    config: dict[str, Any]
    trainer: dict[str, Any]
    killed_at: int
    run: dict[str, Any] = dataclasses.field(default_factory=dict)
    conditions: tuple[str, ...] = ()
    bad: bool = False
    mlflow: bool = False
    recorded: int = 0
    in_a_folder: bool = False
    best: tuple[str, str] | None = None

    @property
    def offline(self) -> bool:
        return self.algorithm in OFFLINE

    @property
    def episodic(self) -> bool:
        # Gymnasium's have episodes by definition, even where this one has no end
        return self.kind == "gymnasium" or self.task["time_limit"] is not None or self.task["end_chance"] > 0

    @property
    def reset_every(self) -> int:
        once = self.episodic or self.algorithm in WITH_A_REPLAY
        return self.config["horizons_per_env_reset"] or (-1 if once else 1)

    @property
    def own_evaluation(self) -> bool:
        auto = self.trainer["eval_env"] == "auto" and self.episodic and not self.offline
        return self.trainer["eval_env"] is True or auto

    @property
    def refusal(self) -> str | None:
        """Words of the refusal that this run must meet before its first step; None where it must train."""
        if self.task.get("observe_parameters") == "critic":
            if self.algorithm in ("pqn", "dqn", "cql"):
                return "a Q-network acts by its values"
            if self.algorithm in ("ppo", "iql") and self.config["model_config"]["shared"]:
                return "needs actor and critic apart"
        if self.config.get("normalize_advantages") and self.config["num_envs"] == self.config["horizon"] == 1:
            return "leaves the only advantage of a collect 0"
        if self.trainer["eval_env"] is True and not self.episodic:
            return "never ends"
        if self.offline:
            return "|".join(self._without_an_environment) or None
        never = self.reset_every < 0 and not self.own_evaluation
        if never and self.run["eval_env_config"] is not None:
            return "would never apply"
        moves = any(isinstance(value, Adaptive | Learnable) for value in (self.run["env_config"] or {}).values())
        if moves and self.reset_every < 0 and not self.episodic:
            return "none ever ends"
        return None

    @property
    def _without_an_environment(self) -> list[str]:
        """Words of the refusals of what a run on a data set is asked for in vain."""
        found = ["`env_config` would never apply"] if self.run["env_config"] is not None else []
        found += ["Unknown metric"] if set(self.conditions) & {*ON_REWARDS, *ON_STEPS} else []
        found += ["no evaluation of this trainer measures"] if set(self.conditions) & set(CONFIRMED) else []
        if self.own_evaluation:
            return found
        found += ["`eval_env_config` would never apply"] if self.run["eval_env_config"] is not None else []
        found += ["nothing to evaluate in"] if self.run["steps_per_eval"] is not None else []
        found += ["Unknown metric"] if set(self.conditions) & set(ON_EVALUATIONS) else []
        return found

    @property
    def env(self) -> functools.partial[Env]:
        return env_of(self.kind, self.task)

    @property
    def recording(self) -> tuple[Path, Dataset]:
        return recording(self.kind, tuple(self.task.items()), self.recorded)

    def build(self, buffer_path: Path | None = None) -> Any:
        """Make the algorithm; a replay that is on a disk lies in a folder of its own, or the one given."""
        options = dict(self.config)
        if options.get("buffer_path") is not None:
            options["buffer_path"] = str(buffer_path or tempfile.mkdtemp(dir=FOLDER.name))
        config = ALGORITHMS[self.algorithm](**options)
        if self.offline:
            path, dataset = self.recording
            return config.build(dataset=str(path) if self.in_a_folder else dataset)
        env = self.env
        if self.algorithm == "distillation":
            config = dataclasses.replace(config, teacher=untrained(env, config.teacher))
        if self.kind == "gymnasium":
            return config.build(env)
        algorithm = config.build(env.func, **env.arguments)
        algorithm.env.bad = self.bad
        return algorithm

    def make_trainer(self, *, algorithm=None, checkpoints=False, **options) -> Trainer:
        if checkpoints:
            best = {} if self.best is None else dict(zip(("best", "mode"), self.best, strict=True))
            checkpoints = Checkpoints(checkpoints, every_steps=1, every_minutes=None, **best)
        options = {"tracker": MemoryTracker(), **self.trainer, "eval_env": self.eval_env, **options}
        return Trainer(self.build() if algorithm is None else algorithm, checkpoints=checkpoints, **options)

    @property
    def eval_env(self) -> Any:
        """What the trainer is given: without an environment to train in, what makes one."""
        return self.env if self.offline and self.own_evaluation else self.trainer["eval_env"]

    def run_options(self) -> dict[str, Any]:
        """The arguments of `run()`, with conditions of their own, since those remember."""
        made = [CONDITIONS[name](LOSSES.get(self.algorithm, "losses/q")) for name in self.conditions]
        return {**self.run, "stop_conditions": made, "progress": "none"}


CONDITIONS = {
    "transitions": lambda loss: conditions.HitsUpperBound("env/steps", 60),
    "plateau": lambda loss: conditions.Plateau(loss, patience=2, rtol=0.5),
    "stalled": lambda loss: (
        conditions.StopsIncreasing("rewards/mean", patience=3) | conditions.StopsDecreasing(loss, patience=3)
    ),
    "both": lambda loss: conditions.HitsLowerBound(loss, 1e9) & conditions.HitsUpperBound("algorithm/steps", 3),
    "long": lambda loss: conditions.WallTime("1h") & ~conditions.NonFinite(),
    "confirmed": lambda loss: conditions.Confirmed(conditions.HitsUpperBound("rewards/mean", 0.3)),
    "confirmed twice": lambda loss: conditions.Confirmed(
        conditions.HitsUpperBound("rewards/mean", -1e9), evaluations=2
    ),
    "evaluated": lambda loss: conditions.HitsUpperBound("eval/rewards/mean", 1.0),
    "evaluations stall": lambda loss: conditions.Plateau("eval/rewards/mean", patience=2, rtol=0.1),
}
ON_EVALUATIONS = ("evaluated", "evaluations stall")
CONFIRMED = ("confirmed", "confirmed twice")
ON_REWARDS = ("stalled", *CONFIRMED)
ON_STEPS = ("transitions",)


FOLDER = tempfile.TemporaryDirectory(prefix="rl8x-combinations-")  # until the process ends


def env_of(kind: str, task: Mapping[str, Any]) -> functools.partial[Env]:
    """Return what makes an environment of a kind, given a number of copies."""
    options = dict(task)
    if kind != "gymnasium":
        return env_maker(Walk if kind == "tensors" else LoggedWalk, options)
    limit, mode = options.pop("time_limit"), AutoresetMode[options.pop("autoreset")]
    vector = {"autoreset_mode": mode}
    return functools.partial(GymnasiumEnv, Simulator, time_limit=limit, vector_kwargs=vector, limit=limit, **options)


def untrained(make: functools.partial[Env], model: str) -> Policy:
    """Return a policy for an environment, the same for the same one."""
    env = make(1, seed=0)
    sizes = {"hidden_size": 8} if model == "gru" else {"hidden_sizes": [8]}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Policy(env.single_observation_space, env.single_action_space, model=model, model_config=sizes)


@functools.lru_cache(maxsize=4)
def recording(kind: str, task: tuple[tuple[str, Any], ...], transitions: int) -> tuple[Path, Dataset]:
    make = env_of(kind, dict(task))
    dataset = record(untrained(make, "mlp"), make(2, seed=0), transitions, epsilon=0.5).dataset
    path = Path(tempfile.mkdtemp(dir=FOLDER.name)) / "recorded"
    dataset.save(path)
    return path, dataset


WIDENING = Scheduled([(0, Uniform(0.9, 1.1)), (60, Uniform(0.2, 2.0))])
EASY = {"thresholds": (-0.2, 0.2), "step": 0.2, "episodes": 2}
TABLE = {"levels": 2, "candidates": 3, "episodes": 2}
MOVING: list[dict[str, Any]] = [
    {"scale": WIDENING},
    {"scale": Adaptive((0.9, 1.1), **EASY, limits=(0.2, 2.0))},
    {"scale": Adaptive(1.0, **EASY, metric="scale"), "drift": Adaptive(0.0, **EASY, metric="scale")},
    {"scale": Learnable(LogUniform(0.5, 2.0), **TABLE, threshold=0.0)},
    {"scale": Learnable(Uniform(0.5, 2.0), **TABLE, bounds=(-1, 1)), "drift": Adaptive(0.5, **EASY)},
]


def values_of_scale(num_envs: int) -> st.SearchStrategy[Any]:
    """What `env_config` may have for the parameter `scale`."""
    return st.one_of(
        st.sampled_from([0.5, 2.0, 10.0]),
        st.sampled_from([Uniform(0.5, 2.0), LogUniform(0.1, 10.0), Normal(1.0, 0.3), Choice([0.5, 3.0])]),
        st.sampled_from([Grid([0.5]), Grid([1.0, 2.0][:num_envs])]),
        st.just([0.5 + i for i in range(num_envs)]),
        st.just({"uniform": [0.2, 0.3]}),
    )


BOTH = [True, False]
EPSILONS = [None, [[0, 1.0], [20, 0.1]], {"kind": "interp", "points": [[0, 1.0], [40, 0.0]]}]
COMMON: dict[str, list[Any]] = {
    "seed": [0, 1, 2, 3],
    "device": [DEVICE],
    "optimizer": ["adam", "adamw", "sgd", "radam"],
    "normalize_observations": BOTH,
    "max_grad_norm": [5.0, None],
    "lr_schedule": [None, [[0, 1e-2], [40, 1e-3]]],
    "precision": ["fp32", "fp32", "bf16"],
}
ONLINE = {"num_envs": [4, 1, 2, 3, 6], "horizon": [4, 1, 2, 6, 8], "horizons_per_env_reset": [None, 1, 2, -1]}
# What learns from a rollout in epochs, from targets, from a replay, which is full after a step or two in some, and from
# a data set.
ON_ROLLOUTS = ONLINE | {"num_sgd_iters": [2, 1], "shuffle_minibatches": BOTH, "accumulate_grads": BOTH}
TO_TARGETS = {"batch_size": [4, 1, 9], "n_step": [1, 2, 3, 11], "tau": [1.0, 0.1], "target_interval": [1, 3]}
ON_REPLAY = (
    ONLINE
    | TO_TARGETS
    | {
        "buffer_size": [1000, 30, 7],
        "buffer_path": [None, None, "of its own"],
        "updates_per_sample": [0.25, 1 / 3, 0.07, 1.0, 1.7],
        "warmup_steps": [0, 10, 20, 1000],
        "prioritized": BOTH,
        "priority_alpha": [0.6, 0.0, 1.0],
        "priority_beta_schedule": [None, {"kind": "interp", "points": [[0, 0.4], [40, 1.0]]}],
    }
)
ON_DATA = {"batch_size": [4, 1, 9], "updates_per_step": [3, 1, 20]}
OF_Q = {"double": BOTH, "dueling": BOTH, "huber_delta": [None, 1.0], "num_atoms": [1, 1, 1, 5], "num_quantiles": [1, 4]}
OF_VALUES = {"critic_hidden_sizes": [[8]], "critic_layer_norm": BOTH, "critic_init": ["orthogonal", "uniform"]}
OF_CRITICS = OF_VALUES | {"policy_delay": [1, 2, 3], "num_critics": [2, 1, 3], "num_atoms": [1, 5]}
OF_SAC = OF_CRITICS | {"alpha": [None, None, 0.1, 0.0], "target_entropy": [None, 0.2]}
SQUASHED = {"distribution": ["squashed_normal", None]}
# What each algorithm may have; `drawn_config` says what of it goes together.
OPTIONS: dict[str, dict[str, list[Any]]] = {
    "ppo": {
        **(ON_ROLLOUTS | SQUASHED),
        "normalize_advantages": BOTH,
        "normalize_rewards": BOTH,
        "normalize_values": BOTH,
        "vf_clip_param": [5.0, None],
        "dual_clip_param": [None, 3.0],
        "target_kl_div": [None, 1e-7, 0.01],
        "entropy_coeff": [0.0, 0.01],
    },
    "pqn": {
        **ON_ROLLOUTS,
        "q_lambda": [0.0, 0.65, 1.0],
        "epsilon_schedule": EPSILONS,
        "dueling": BOTH,
        "reward_scale": [1.0, 0.1],
    },
    "distillation": {  # the teacher is an untrained policy with the named model
        **ON_ROLLOUTS,
        "teacher": ["mlp", "gru"],
        "loss": [None, "nll"],
        "beta": [0.0, 0.5, 1.0],
        "sample_actions": [None, False],
    },
    "dqn": ON_REPLAY | OF_Q | {"epsilon_schedule": EPSILONS},
    "sac": ON_REPLAY | OF_SAC | {"return_bound": [None, 5.0]},
    "td3": {
        **(ON_REPLAY | OF_CRITICS),
        "exploration_noise": [0.1, 2.0],
        "exploration_noise_min": [None, 0.01],
        "target_noise": [0.2, 0.0],
        "return_bound": [None, 5.0],
    },
    "bc": ON_DATA | SQUASHED,
    "iql": ON_DATA | TO_TARGETS | OF_VALUES | SQUASHED | {"expectile": [0.7, 0.5], "temperature": [3.0, 0.0]},
    "cql": ON_DATA | TO_TARGETS | OF_Q | {"cql_coeff": [1.0, 0.0]},
    "offline sac": ON_DATA | TO_TARGETS | OF_SAC | {"cql_coeff": [1.0, 0.0], "cql_samples": [10, 1]},
    "offline td3": {
        **(ON_DATA | TO_TARGETS | OF_CRITICS),
        "actor_bc_coeff": [0.5, None],
        "critic_bc_coeff": [0.5, 0.0],
    },
}


def one_of(options: Mapping[str, list[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({name: st.sampled_from(values) for name, values in options.items()})


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@st.composite
def drawn_config(draw: Any, algorithm: str, actions: str, modes: tuple[str, ...]) -> dict[str, Any]:
    config = draw(one_of(COMMON | OPTIONS[algorithm]))
    in_epochs = "num_sgd_iters" in config
    model = draw(st.sampled_from([None, "lstm", "gru", "attention", "mlp"] if in_epochs else [None, "mlp"]))
    sizes = {
        "lstm": {"hidden_size": 8},
        "gru": {"hidden_size": 8, "encoder_sizes": [4]},
        "attention": {"window": draw(st.sampled_from([2, 5])), "width": 8, "num_heads": 2},
    }.get(model, {"hidden_sizes": [8]})
    config |= {"model": model, "model_config": {**sizes, "shared": draw(st.booleans())}}
    momentum = config["optimizer"] == "sgd" and draw(st.booleans())
    config |= {"optimizer_config": {"momentum": 0.9} if momentum else {}, "execution": draw(st.sampled_from(modes))}
    if in_epochs:
        num_envs, horizon = config["num_envs"], config["horizon"]
        seq_len = draw(st.sampled_from(divisors(horizon)))
        resets = st.sampled_from([-1, *divisors(horizon // seq_len)])
        batches = st.sampled_from([size for size in divisors(num_envs * horizon) if size % seq_len == 0])
        config |= {"seq_len": seq_len, "sgd_minibatch_size": draw(st.none() | batches)}
        config["seqs_per_state_reset"] = draw(resets) if model in ("lstm", "gru", "attention") else None
    if "distribution" in config and actions != "bounded":
        config["distribution"] = None
    if config.get("prioritized") is False:  # they would be warned of
        config = {name: value for name, value in config.items() if not name.startswith("priority_")}
    if "num_quantiles" in config and config["num_atoms"] > 1:
        config |= {"num_quantiles": 1, "huber_delta": None}
    if "alpha" in config:
        config["num_atoms"] = 1 if isinstance(ACTIONS[actions], Discrete) else config["num_atoms"]
        config["target_entropy"] = config["target_entropy"] if config["alpha"] is None else None
    return config


@st.composite
def cases(draw: Any, algorithm: str, *, compiled_one_in: int) -> Case:
    """A run of an algorithm; where something about it must be refused, `Case.refusal` says so."""
    modes = (*["eager"] * (compiled_one_in - 1), "compile" if DEVICE == "cpu" else "graph")
    fitting = [name for name, space in ACTIONS.items() if fits(algorithm, space)]
    task = draw(
        one_of(
            {
                "observations": list(OBSERVATIONS),
                "actions": fitting,
                "masked": BOTH,
                "end_chance": [0.1, 0.0, 0.5, 1.0],
                "time_limit": [5, None, 1, 2, 20],
            }
        )
    )
    task["masked"] &= mask_width(ACTIONS[task["actions"]]) is not None
    kind, off = draw(st.sampled_from(["tensors", "logged", "gymnasium"])), algorithm in OFFLINE
    # What a simulator logs is what it shows without them, as rows of a replay then are not.
    if kind == "tensors" or (kind == "logged" and algorithm not in WITH_A_REPLAY):
        task["observe_parameters"] = draw(st.sampled_from(["none", "none", "critic", "all"]))
    if kind == "gymnasium":
        task["autoreset"] = draw(st.sampled_from([mode.name for mode in AutoresetMode]))
        task["time_limit"] = task["time_limit"] or 30
    config = draw(drawn_config(algorithm, task["actions"], modes))
    modes_of_non_finite = ["stop", "skip", "rollback"]
    trainer = draw(
        one_of({"eval_env": ["auto", False, True], "num_eval_envs": [2, 1, 3], "on_non_finite": modes_of_non_finite})
    )
    case = Case(algorithm, kind, task, config, trainer, killed_at=draw(st.integers(1, STEPS)))
    case.mlflow = draw(st.integers(0, 19)) == 0
    case.best = draw(st.sampled_from([None, (LOSSES.get(algorithm, "losses/q"), "min"), (keys.UPDATES, "max")]))
    case.bad = kind != "gymnasium" and trainer["on_non_finite"] != "stop" and not off and draw(st.booleans())
    if off:
        case.recorded, case.in_a_folder = draw(st.sampled_from([30, 3, 1])), draw(st.booleans())
        if "critic_bc_coeff" in config and (case.recorded < 30 or task["time_limit"] in (1, 2)):
            config["critic_bc_coeff"] = 0.0  # there may be no action after another
    # What such a run cannot be asked for is asked for in a few, to be refused.
    fair = not off or draw(st.integers(0, 7)) > 0
    evaluates = case.own_evaluation or not (off and fair)
    evaluated = () if case.own_evaluation else ON_EVALUATIONS
    left_out = {*ON_REWARDS, *ON_STEPS, *evaluated} if off and fair else set()
    offered = [name for name in CONDITIONS if name not in left_out]
    case.conditions = tuple(draw(st.lists(st.sampled_from(offered), max_size=2, unique=True)))
    every = 1 if off else max(1, case.reset_every) * draw(st.sampled_from([1, 2]))
    per_eval = every if set(case.conditions) & set(ON_EVALUATIONS) else draw(st.sampled_from([every, None]))
    case.run = {"max_steps": STEPS, "steps_per_eval": per_eval if evaluates else None}
    case.run |= {"env_config": None, "eval_env_config": None}
    if kind != "gymnasium":
        scales = {"scale": values_of_scale(config.get("num_envs", 1))}
        env_config = draw(st.none() | st.fixed_dictionaries(scales) | st.sampled_from(MOVING))
        if case.own_evaluation:
            scales = {"scale": values_of_scale(trainer["num_eval_envs"])}
        tested = st.fixed_dictionaries(scales | {"drift": st.just(0.5)})
        eval_env_config = draw(st.none() | st.just({}) | tested)
        case.run["env_config"] = None if off and fair else env_config
        case.run["eval_env_config"] = eval_env_config if evaluates else None
    return case
