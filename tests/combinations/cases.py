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

from rl8x import keys
from rl8x.algorithms import (
    AlgorithmConfig,
    BCConfig,
    DistillationConfig,
    DQNConfig,
    IQLConfig,
    PPOConfig,
    PQNConfig,
    SACConfig,
    TD3Config,
)
from rl8x.checkpoint import Checkpoints
from rl8x.conditions import (
    Condition,
    Confirmed,
    HitsLowerBound,
    HitsUpperBound,
    NonFinite,
    Plateau,
    StopsDecreasing,
    StopsIncreasing,
    WallTime,
)
from rl8x.envs import Env, GymnasiumEnv, env_maker
from rl8x.policy import Policy
from rl8x.randomization import Adaptive, Choice, Grid, Learnable, LogUniform, Normal, Scheduled, Uniform
from rl8x.replay.dataset import Dataset
from rl8x.replay.recording import record
from rl8x.tracking import MemoryTracker
from rl8x.trainers import Trainer

STEPS = 4
ALGORITHMS: dict[str, type[AlgorithmConfig]] = {
    "ppo": PPOConfig,
    "pqn": PQNConfig,
    "distillation": DistillationConfig,
    "dqn": DQNConfig,
    "sac": SACConfig,
    "td3": TD3Config,
    "bc": BCConfig,
    "iql": IQLConfig,
    "cql": DQNConfig,
    "offline sac": SACConfig,
    "offline td3": TD3Config,
}
WITH_A_REPLAY = ("dqn", "sac", "td3")
OFFLINE = ("bc", "iql", "cql", "offline sac", "offline td3")
LOSSES = {"ppo": "losses/total", "bc": "losses/bc", "distillation": "losses/distillation"}
# Where runs are, such as "cuda"; `make fuzz-cuda` has a simulated one.
DEVICE = os.environ.get("RL8X_FUZZ_DEVICE", "cpu")


def is_bounded(space: Space[Any]) -> bool:
    """Whether it is a box with finite bounds."""
    return isinstance(space, Box) and bool(np.isfinite([space.low, space.high]).all())


def fits(algorithm: str, space: Space[Any]) -> bool:
    """Whether an algorithm can have such actions."""
    if algorithm in ("ppo", "bc", "distillation"):
        return True
    if algorithm == "iql":
        return isinstance(space, Box | Discrete)
    bounded, discrete = is_bounded(space), isinstance(space, Discrete)
    return {"sac": bounded or discrete, "td3": bounded}.get(algorithm.removeprefix("offline "), discrete)


@dataclasses.dataclass(frozen=True)
class Case:
    """One run. `config` has the hyperparameters, `trainer` the trainer's arguments, `run` those of `run()`.

    `recorded` are the transitions of its data set, `best` the metric and the mode by which a policy is the best.
    """

    algorithm: str
    kind: str
    task: dict[str, Any]
    bad: bool
    config: dict[str, Any]
    trainer: dict[str, Any]
    run: dict[str, Any]
    conditions: tuple[str, ...]
    killed_at: int
    mlflow: bool
    recorded: int = 0
    in_a_folder: bool = False
    best: tuple[str, str] | None = None

    @property
    def offline(self) -> bool:
        return self.algorithm in OFFLINE

    @property
    def time_limit(self) -> int | None:
        return self.task["time_limit"]

    @property
    def episodic(self) -> bool:
        # Gymnasium's have episodes by definition, even where this one has no end
        return self.kind == "gymnasium" or self.time_limit is not None or self.task["end_chance"] > 0

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
        found += ["Unknown metric"] if set(self.conditions) & set(ON_REWARDS) else []
        found += ["no evaluation of this trainer measures"] if set(self.conditions) & set(CONFIRMED) else []
        if self.own_evaluation:
            return found
        found += ["`eval_env_config` would never apply"] if self.run["eval_env_config"] is not None else []
        found += ["nothing to evaluate in"] if self.run["steps_per_eval"] is not None else []
        found += ["Unknown metric"] if set(self.conditions) & set(ON_EVALUATIONS) else []
        return found

    @property
    def env(self) -> functools.partial[Env]:
        """What makes the environment, given a number of copies."""
        return env_of(self.kind, self.task)

    @property
    def recording(self) -> tuple[Path, Dataset]:
        """The data set that it learns from: its folder, and the transitions."""
        return recording(self.kind, tuple(self.task.items()), self.recorded)

    def build(self, buffer_path: Path | None = None) -> Any:
        """Make the algorithm; a replay that is on a disk lies in a folder of its own, or the one given."""
        options = dict(self.config)
        if options.get("buffer_path") is not None:
            options["buffer_path"] = str(buffer_path or tempfile.mkdtemp(dir=folder()))
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

    def make_trainer(self, *, algorithm=None, tracker=None, checkpoints=False, callbacks=()) -> Trainer:
        """Make the trainer of the run; `checkpoints` is a folder."""
        if checkpoints:
            best = {} if self.best is None else dict(zip(("best", "mode"), self.best, strict=True))
            checkpoints = Checkpoints(checkpoints, every_steps=1, every_minutes=None, **best)
        return Trainer(
            self.build() if algorithm is None else algorithm,
            tracker=MemoryTracker() if tracker is None else tracker,
            checkpoints=checkpoints,
            callbacks=callbacks,
            **{**self.trainer, "eval_env": self.eval_env},
        )

    @property
    def eval_env(self) -> Any:
        """What the trainer is given: without an environment to train in, what makes one."""
        return self.env if self.offline and self.own_evaluation else self.trainer["eval_env"]

    def run_options(self) -> dict[str, Any]:
        """The arguments of `run()`, with conditions of their own, since those remember."""
        return {**self.run, "stop_conditions": self.make_conditions(), "progress": "none"}

    def make_conditions(self) -> list[Condition]:
        """Make the conditions; each looks at a loss that the algorithm has."""
        loss = LOSSES.get(self.algorithm, "losses/q")
        return [CONDITIONS[name](loss) for name in self.conditions]


CONDITIONS = {
    "transitions": lambda loss: HitsUpperBound("env/steps", 60),
    "plateau": lambda loss: Plateau(loss, patience=2, rtol=0.5),
    "stalled": lambda loss: StopsIncreasing("rewards/mean", patience=3) | StopsDecreasing(loss, patience=3),
    "both": lambda loss: HitsLowerBound(loss, 1e9) & HitsUpperBound("algorithm/steps", 3),
    "long": lambda loss: WallTime("1h") & ~NonFinite(),
    "confirmed": lambda loss: Confirmed(HitsUpperBound("rewards/mean", 0.3)),
    "confirmed twice": lambda loss: Confirmed(HitsUpperBound("rewards/mean", -1e9), evaluations=2),
    "evaluated": lambda loss: HitsUpperBound("eval/rewards/mean", 1.0),
    "evaluations stall": lambda loss: Plateau("eval/rewards/mean", patience=2, rtol=0.1),
}
ON_EVALUATIONS = ("evaluated", "evaluations stall")
CONFIRMED = ("confirmed", "confirmed twice")
ON_REWARDS = ("stalled", *CONFIRMED)


_FOLDER = tempfile.TemporaryDirectory(prefix="rl8x-combinations-")


def folder() -> Path:
    """Return a folder that is there until the process ends."""
    return Path(_FOLDER.name)


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
    """Record what a policy does in a task, half of it at random; returns the folder and the data set."""
    make = env_of(kind, dict(task))
    dataset = record(untrained(make, "mlp"), make(2, seed=0), transitions, epsilon=0.5).dataset
    path = Path(tempfile.mkdtemp(dir=folder())) / "recorded"
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


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@st.composite
def common(draw: Any, modes: tuple[str, ...], models: list[str | None]) -> dict[str, Any]:
    """Hyperparameters that all algorithms have, legal ones."""
    model = draw(st.sampled_from(models))
    sizes = {
        "lstm": {"hidden_size": 8},
        "gru": {"hidden_size": 8, "encoder_sizes": [4]},
        "attention": {"window": draw(st.sampled_from([2, 5])), "width": 8, "num_heads": 2},
    }.get(model, {"hidden_sizes": [8]})
    optimizer = draw(st.sampled_from(["adam", "adamw", "sgd", "radam"]))
    return {
        "seed": draw(st.integers(0, 3)),
        "device": DEVICE,
        "model": model,
        "model_config": {**sizes, "shared": draw(st.booleans())},
        "optimizer": optimizer,
        "optimizer_config": {"momentum": 0.9} if optimizer == "sgd" and draw(st.booleans()) else {},
        "normalize_observations": draw(st.booleans()),
        "max_grad_norm": draw(st.sampled_from([5.0, None])),
        "lr_schedule": draw(st.sampled_from([None, [[0, 1e-2], [40, 1e-3]]])),
        "execution": draw(st.sampled_from(modes)),
        "precision": draw(st.sampled_from(["fp32", "fp32", "bf16"])),
    }


@st.composite
def online(draw: Any, modes: tuple[str, ...], models: list[str | None]) -> dict[str, Any]:
    """Hyperparameters of what has an environment."""
    return draw(common(modes, models)) | {
        "num_envs": draw(st.sampled_from([4, 1, 2, 3, 6])),
        "horizon": draw(st.sampled_from([4, 1, 2, 6, 8])),
        "horizons_per_env_reset": draw(st.sampled_from([None, 1, 2, -1])),
    }


@st.composite
def on_rollouts(draw: Any, modes: tuple[str, ...]) -> dict[str, Any]:
    """Hyperparameters of what learns from a rollout in epochs."""
    config = draw(online(modes, [None, "lstm", "gru", "attention", "mlp"]))
    num_envs, horizon = config["num_envs"], config["horizon"]
    seq_len = draw(st.sampled_from(divisors(horizon)))
    recurrent = config["model"] in ("lstm", "gru", "attention")
    return config | {
        "seq_len": seq_len,
        "seqs_per_state_reset": draw(st.sampled_from([-1, *divisors(horizon // seq_len)])) if recurrent else None,
        "sgd_minibatch_size": draw(
            st.none() | st.sampled_from([n for n in divisors(num_envs * horizon) if n % seq_len == 0])
        ),
        "num_sgd_iters": draw(st.sampled_from([2, 1])),
        "shuffle_minibatches": draw(st.booleans()),
        "accumulate_grads": draw(st.booleans()),
    }


@st.composite
def ppo(draw: Any, actions: str, modes: tuple[str, ...]) -> dict[str, Any]:
    """PPO's hyperparameters."""
    return draw(on_rollouts(modes)) | {
        "normalize_advantages": draw(st.booleans()),
        "normalize_rewards": draw(st.booleans()),
        "normalize_values": draw(st.booleans()),
        "vf_clip_param": draw(st.sampled_from([5.0, None])),
        "dual_clip_param": draw(st.sampled_from([None, 3.0])),
        "target_kl_div": draw(st.sampled_from([None, 1e-7, 0.01])),
        "entropy_coeff": draw(st.sampled_from([0.0, 0.01])),
        "distribution": "squashed_normal" if actions == "bounded" and draw(st.booleans()) else None,
    }


@st.composite
def distillation(draw: Any, actions: str, modes: tuple[str, ...]) -> dict[str, Any]:
    """Distillation's hyperparameters; the teacher is an untrained policy with the named model."""
    return draw(on_rollouts(modes)) | {
        "teacher": draw(st.sampled_from(["mlp", "gru"])),
        "loss": draw(st.sampled_from([None, "nll"])),
        "beta": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "sample_actions": draw(st.sampled_from([None, False])),
    }


EPSILONS = [None, [[0, 1.0], [20, 0.1]], {"kind": "interp", "points": [[0, 1.0], [40, 0.0]]}]


@st.composite
def pqn(draw: Any, actions: str, modes: tuple[str, ...]) -> dict[str, Any]:
    """PQN's hyperparameters."""
    return draw(on_rollouts(modes)) | {
        "q_lambda": draw(st.sampled_from([0.0, 0.65, 1.0])),
        "epsilon_schedule": draw(st.sampled_from(EPSILONS)),
        "dueling": draw(st.booleans()),
        "reward_scale": draw(st.sampled_from([1.0, 0.1])),
    }


@st.composite
def on_targets(draw: Any) -> dict[str, Any]:
    """Hyperparameters of what learns values towards targets."""
    return {
        "batch_size": draw(st.sampled_from([4, 1, 9])),
        "n_step": draw(st.sampled_from([1, 2, 3, 11])),
        "tau": draw(st.sampled_from([1.0, 0.1])),
        "target_interval": draw(st.sampled_from([1, 3])),
    }


@st.composite
def on_replay(draw: Any, modes: tuple[str, ...]) -> dict[str, Any]:
    """Hyperparameters of what learns from a replay, which is full after a step or two in some."""
    config = draw(online(modes, [None, "mlp"])) | draw(on_targets())
    priorities = {  # without `prioritized` they would be warned of
        "priority_alpha": draw(st.sampled_from([0.6, 0.0, 1.0])),
        "priority_beta_schedule": draw(st.sampled_from([None, {"kind": "interp", "points": [[0, 0.4], [40, 1.0]]}])),
    }
    prioritized = draw(st.booleans())
    return config | {
        "buffer_size": draw(st.sampled_from([1000, 30, 7])),
        "buffer_path": draw(st.sampled_from([None, None, "of its own"])),
        "updates_per_sample": draw(st.sampled_from([0.25, 1 / 3, 0.07, 1.0, 1.7])),
        "warmup_steps": draw(st.sampled_from([0, 10, 20, 1000])),
        "prioritized": prioritized,
        **(priorities if prioritized else {}),
    }


@st.composite
def of_q(draw: Any) -> dict[str, Any]:
    """Hyperparameters of deep Q-learning, from a replay or a data set."""
    atoms, quantiles = draw(st.sampled_from([(1, 1), (1, 1), (5, 1), (1, 4)]))
    return {
        "double": draw(st.booleans()),
        "dueling": draw(st.booleans()),
        "huber_delta": draw(st.sampled_from([None, 1.0])) if atoms == 1 else None,
        "num_atoms": atoms,
        "num_quantiles": quantiles,
    }


@st.composite
def dqn(draw: Any, actions: str, modes: tuple[str, ...]) -> dict[str, Any]:
    """DQN's hyperparameters."""
    return draw(on_replay(modes)) | draw(of_q()) | {"epsilon_schedule": draw(st.sampled_from(EPSILONS))}


@st.composite
def of_critics(draw: Any, *, atoms: bool) -> dict[str, Any]:
    """Hyperparameters of a policy that critics train, from a replay or a data set."""
    return {
        "policy_delay": draw(st.sampled_from([1, 2, 3])),
        "num_critics": draw(st.sampled_from([2, 1, 3])),
        "critic_hidden_sizes": [8],
        "critic_layer_norm": draw(st.booleans()),
        "critic_init": draw(st.sampled_from(["orthogonal", "uniform"])),
        "num_atoms": draw(st.sampled_from([1, 5])) if atoms else 1,
    }


@st.composite
def of_sac(draw: Any, actions: str) -> dict[str, Any]:
    """SAC's hyperparameters, for actions in a box or numbered ones, wherever rows come from."""
    alpha, target_entropy = draw(st.sampled_from([None, None, 0.1, 0.0])), draw(st.sampled_from([None, 0.2]))
    return draw(of_critics(atoms=not isinstance(ACTIONS[actions], Discrete))) | {
        "alpha": alpha,
        "target_entropy": target_entropy if alpha is None else None,
    }


@st.composite
def sac(draw: Any, actions: str, modes: tuple[str, ...]) -> dict[str, Any]:
    """SAC's hyperparameters."""
    bound = {"return_bound": draw(st.sampled_from([None, 5.0]))}
    return draw(on_replay(modes)) | draw(of_sac(actions)) | bound


@st.composite
def td3(draw: Any, actions: str, modes: tuple[str, ...]) -> dict[str, Any]:
    """TD3's hyperparameters."""
    return (
        draw(on_replay(modes))
        | draw(of_critics(atoms=True))
        | {
            "exploration_noise": draw(st.sampled_from([0.1, 2.0])),
            "exploration_noise_min": draw(st.sampled_from([None, 0.01])),
            "target_noise": draw(st.sampled_from([0.2, 0.0])),
            "return_bound": draw(st.sampled_from([None, 5.0])),
        }
    )


@st.composite
def offline(draw: Any, modes: tuple[str, ...]) -> dict[str, Any]:
    """Hyperparameters of what learns from a data set."""
    updates = {"updates_per_step": draw(st.sampled_from([3, 1, 20]))}
    return draw(common(modes, [None, "mlp"])) | {"batch_size": draw(st.sampled_from([4, 1, 9]))} | updates


@st.composite
def bc(draw: Any, actions: str, modes: tuple[str, ...]) -> dict[str, Any]:
    """Behaviour cloning's hyperparameters."""
    squashed = actions == "bounded" and draw(st.booleans())
    return draw(offline(modes)) | {"distribution": "squashed_normal" if squashed else None}


@st.composite
def iql(draw: Any, actions: str, modes: tuple[str, ...]) -> dict[str, Any]:
    """IQL's hyperparameters."""
    return (
        draw(bc(actions, modes))
        | draw(on_targets())
        | {
            "expectile": draw(st.sampled_from([0.7, 0.5])),
            "temperature": draw(st.sampled_from([3.0, 0.0])),
            "critic_hidden_sizes": [8],
            "critic_layer_norm": draw(st.booleans()),
            "critic_init": draw(st.sampled_from(["orthogonal", "uniform"])),
        }
    )


@st.composite
def cql(draw: Any, actions: str, modes: tuple[str, ...]) -> dict[str, Any]:
    """Discrete CQL's hyperparameters."""
    return draw(offline(modes)) | draw(on_targets()) | draw(of_q()) | {"cql_coeff": draw(st.sampled_from([1.0, 0.0]))}


@st.composite
def offline_sac(draw: Any, actions: str, modes: tuple[str, ...]) -> dict[str, Any]:
    """SAC's hyperparameters with a data set."""
    tried = {"cql_coeff": draw(st.sampled_from([1.0, 0.0])), "cql_samples": draw(st.sampled_from([10, 1]))}
    return draw(offline(modes)) | draw(on_targets()) | draw(of_sac(actions)) | tried


@st.composite
def offline_td3(draw: Any, actions: str, modes: tuple[str, ...]) -> dict[str, Any]:
    """TD3's hyperparameters with a data set."""
    penalties = {
        "actor_bc_coeff": draw(st.sampled_from([0.5, None])),
        "critic_bc_coeff": draw(st.sampled_from([0.5, 0.0])),
    }
    return draw(offline(modes)) | draw(on_targets()) | draw(of_critics(atoms=True)) | penalties


CONFIGS = {
    "ppo": ppo,
    "pqn": pqn,
    "distillation": distillation,
    "dqn": dqn,
    "sac": sac,
    "td3": td3,
    "bc": bc,
    "iql": iql,
    "cql": cql,
    "offline sac": offline_sac,
    "offline td3": offline_td3,
}


@st.composite
def cases(draw: Any, algorithm: str, *, compiled_one_in: int) -> Case:
    """A run of an algorithm; where something about it must be refused, `Case.refusal` says so."""
    modes = (*["eager"] * (compiled_one_in - 1), "compile" if DEVICE == "cpu" else "graph")
    kind = draw(st.sampled_from(["tensors", "logged", "gymnasium"]))
    fitting = [name for name, space in ACTIONS.items() if fits(algorithm, space)]
    actions, observations = draw(st.sampled_from(fitting)), draw(st.sampled_from(list(OBSERVATIONS)))
    task = {
        "observations": observations,
        "actions": actions,
        "masked": mask_width(ACTIONS[actions]) is not None and draw(st.booleans()),
        "end_chance": draw(st.sampled_from([0.1, 0.0, 0.5, 1.0])),
        "time_limit": draw(st.sampled_from([5, None, 1, 2, 20])),
    }
    # What a simulator logs is what it shows without them, as rows of a replay then are not.
    if kind == "tensors" or (kind == "logged" and algorithm not in WITH_A_REPLAY):
        task["observe_parameters"] = draw(st.sampled_from(["none", "none", "critic", "all"]))
    non_finite = draw(st.sampled_from(["stop", "skip", "rollback"]))
    if kind == "gymnasium":
        task["autoreset"] = draw(st.sampled_from([mode.name for mode in AutoresetMode]))
        task["time_limit"] = task["time_limit"] or 30
    config = draw(CONFIGS[algorithm](actions, modes))
    if "image" in observations and config["model"] is None:
        config["model_config"] = {"shared": config["model_config"]["shared"], "hidden_sizes": [8]}
    off = algorithm in OFFLINE
    bad = kind != "gymnasium" and non_finite != "stop" and not off and draw(st.booleans())
    case = Case(
        algorithm, kind, task, bad, config, {}, {}, (), draw(st.integers(1, STEPS)), draw(st.integers(0, 19)) == 0
    )
    num_eval_envs = draw(st.sampled_from([2, 1, 3]))
    trainer = {
        "eval_env": draw(st.sampled_from(["auto", False, True])),
        "num_eval_envs": num_eval_envs,
        "on_non_finite": non_finite,
    }
    case = dataclasses.replace(case, trainer=trainer)
    if off:
        recorded, in_a_folder = draw(st.sampled_from([30, 3, 1])), draw(st.booleans())
        case = dataclasses.replace(case, recorded=recorded, in_a_folder=in_a_folder)
        if recorded < 30 or task["time_limit"] in (1, 2):  # there may be no action after another
            config |= {"critic_bc_coeff": 0.0} if "critic_bc_coeff" in config else {}
    # What such a run cannot be asked for is asked for in a few, to be refused.
    fair = not off or draw(st.integers(0, 7)) > 0
    chosen = draw(st.lists(st.sampled_from(list(CONDITIONS)), max_size=2, unique=True))
    if off and fair:
        left_out = {*ON_REWARDS, *(() if case.own_evaluation else ON_EVALUATIONS)}
        chosen = [name for name in chosen if name not in left_out]
    every = 1 if off else max(1, case.reset_every) * draw(st.sampled_from([1, 2]))
    evaluates = case.own_evaluation or not (off and fair)
    per_eval = draw(st.sampled_from([every, None])) if not set(chosen) & set(ON_EVALUATIONS) else every
    run = {"max_steps": STEPS, "steps_per_eval": per_eval if evaluates else None}
    run |= {"env_config": None, "eval_env_config": None}
    if kind != "gymnasium":
        num_envs = config.get("num_envs", 1)
        copies = num_eval_envs if case.own_evaluation else num_envs
        drawn = st.fixed_dictionaries({"scale": values_of_scale(num_envs)})
        env_config = draw(st.none() | drawn | st.sampled_from(MOVING))
        eval_env_config = draw(
            st.none() | st.just({}) | st.fixed_dictionaries({"scale": values_of_scale(copies), "drift": st.just(0.5)})
        )
        run["env_config"] = None if off and fair else env_config
        run["eval_env_config"] = eval_env_config if evaluates else None
    best = draw(st.sampled_from([None, (LOSSES.get(algorithm, "losses/q"), "min"), (keys.UPDATES, "max")]))
    return dataclasses.replace(case, run=run, conditions=tuple(chosen), best=best)
