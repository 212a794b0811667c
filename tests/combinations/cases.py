"""Runs drawn at random: a task, an algorithm's config, what is asked of the trainer, and what must be refused."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from gymnasium.spaces import Discrete
from gymnasium.vector import AutoresetMode
from hypothesis import strategies as st
from tests.combinations.tasks import LoggedWalk, Simulator, Walk, mask_width
from tests.test_round_trip import ACTIONS, OBSERVATIONS

from rl8x.algorithms import DQNConfig, OnlineConfig, PPOConfig, PQNConfig
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
from rl8x.envs import GymnasiumEnv
from rl8x.randomization import Choice, Grid, LogUniform, Normal, Uniform
from rl8x.tracking import MemoryTracker
from rl8x.trainers import Trainer

STEPS = 4
ALGORITHMS: dict[str, type[OnlineConfig]] = {"ppo": PPOConfig, "pqn": PQNConfig, "dqn": DQNConfig}
DISCRETE = ("pqn", "dqn")
WITH_A_REPLAY = ("dqn",)


@dataclasses.dataclass(frozen=True)
class Case:
    """One run. `config` has the hyperparameters, `trainer` the trainer's arguments, `run` those of `run()`."""

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
        return self.trainer["eval_env"] is True or (self.trainer["eval_env"] == "auto" and self.episodic)

    @property
    def refusal(self) -> str | None:
        """Words of the refusal that this run must meet before its first step; None where it must train."""
        if self.trainer["eval_env"] is True and not self.episodic:
            return "never ends"
        never = self.reset_every < 0 and not self.own_evaluation
        if never and self.run["eval_env_config"] is not None:
            return "would never apply"
        return None

    def build(self) -> Any:
        """Make the algorithm."""
        options, config = dict(self.task), ALGORITHMS[self.algorithm](**self.config)
        if self.kind == "gymnasium":
            limit, mode = options.pop("time_limit"), AutoresetMode[options.pop("autoreset")]
            env = functools.partial(
                GymnasiumEnv,
                Simulator,
                time_limit=limit,
                vector_kwargs={"autoreset_mode": mode},
                limit=limit,
                **options,
            )
            return config.build(env)
        algorithm = config.build(Walk if self.kind == "tensors" else LoggedWalk, **options)
        algorithm.env.bad = self.bad
        return algorithm

    def make_trainer(self, *, tracker=None, checkpoints=False, callbacks=()) -> Trainer:
        """Make the trainer of the run; `checkpoints` is a folder."""
        if checkpoints:
            checkpoints = Checkpoints(checkpoints, every_steps=1, every_minutes=None)
        tracker = MemoryTracker() if tracker is None else tracker
        return Trainer(self.build(), tracker=tracker, checkpoints=checkpoints, callbacks=callbacks, **self.trainer)

    def run_options(self) -> dict[str, Any]:
        """The arguments of `run()`, with conditions of their own, since those remember."""
        return {**self.run, "stop_conditions": self.make_conditions(), "progress": "none"}

    def make_conditions(self) -> list[Condition]:
        """Make the conditions; each looks at a loss that the algorithm has."""
        loss = "losses/total" if self.algorithm == "ppo" else "losses/q"
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
        "num_envs": draw(st.sampled_from([4, 1, 2, 3, 6])),
        "horizon": draw(st.sampled_from([4, 1, 2, 6, 8])),
        "seed": draw(st.integers(0, 3)),
        "device": "cpu",
        "model": model,
        "model_config": {**sizes, "shared": draw(st.booleans())},
        "horizons_per_env_reset": draw(st.sampled_from([None, 1, 2, -1])),
        "optimizer": optimizer,
        "optimizer_config": {"momentum": 0.9} if optimizer == "sgd" and draw(st.booleans()) else {},
        "normalize_observations": draw(st.booleans()),
        "max_grad_norm": draw(st.sampled_from([5.0, None])),
        "lr_schedule": draw(st.sampled_from([None, [[0, 1e-2], [40, 1e-3]]])),
        "execution": draw(st.sampled_from(modes)),
        "precision": draw(st.sampled_from(["fp32", "fp32", "bf16"])),
    }


@st.composite
def on_rollouts(draw: Any, modes: tuple[str, ...]) -> dict[str, Any]:
    """Hyperparameters of what learns from a rollout in epochs."""
    config = draw(common(modes, [None, "lstm", "gru", "attention", "mlp"]))
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
def dqn(draw: Any, actions: str, modes: tuple[str, ...]) -> dict[str, Any]:
    """DQN's hyperparameters, with replays that are full after a step or two among them."""
    return draw(common(modes, [None, "mlp"])) | {
        "buffer_size": draw(st.sampled_from([1000, 30, 7])),
        "batch_size": draw(st.sampled_from([4, 1, 9])),
        "updates_per_sample": draw(st.sampled_from([0.25, 1 / 3, 0.07, 1.0, 1.7])),
        "warmup_steps": draw(st.sampled_from([0, 10, 20, 1000])),
        "prioritized": draw(st.booleans()),
        "priority_alpha": draw(st.sampled_from([0.6, 0.0, 1.0])),
        "priority_beta_schedule": draw(st.sampled_from([None, {"kind": "interp", "points": [[0, 0.4], [40, 1.0]]}])),
        "n_step": draw(st.sampled_from([1, 2, 3, 11])),
        "tau": draw(st.sampled_from([1.0, 0.1])),
        "target_interval": draw(st.sampled_from([1, 3])),
        "epsilon_schedule": draw(st.sampled_from(EPSILONS)),
        "double": draw(st.booleans()),
        "dueling": draw(st.booleans()),
        "huber_delta": draw(st.sampled_from([None, 1.0])),
    }


CONFIGS = {"ppo": ppo, "pqn": pqn, "dqn": dqn}


@st.composite
def cases(draw: Any, *, compiled_one_in: int, algorithms: tuple[str, ...] = tuple(ALGORITHMS)) -> Case:
    """A run; where something about it must be refused, `Case.refusal` says so."""
    algorithm = draw(st.sampled_from(algorithms))
    modes = (*["eager"] * (compiled_one_in - 1), "compile")
    kind = draw(st.sampled_from(["tensors", "logged", "gymnasium"]))
    fitting = [name for name, space in ACTIONS.items() if algorithm not in DISCRETE or isinstance(space, Discrete)]
    actions, observations = draw(st.sampled_from(fitting)), draw(st.sampled_from(list(OBSERVATIONS)))
    task = {
        "observations": observations,
        "actions": actions,
        "masked": mask_width(ACTIONS[actions]) is not None and draw(st.booleans()),
        "end_chance": draw(st.sampled_from([0.1, 0.0, 0.5, 1.0])),
        "time_limit": draw(st.sampled_from([5, None, 1, 2, 20])),
    }
    non_finite = draw(st.sampled_from(["stop", "skip", "rollback"]))
    if kind == "gymnasium":
        task["autoreset"] = draw(st.sampled_from([mode.name for mode in AutoresetMode]))
        task["time_limit"] = task["time_limit"] or 30
    config = draw(CONFIGS[algorithm](actions, modes))
    if "image" in observations and config["model"] is None:
        config["model_config"] = {"shared": config["model_config"]["shared"], "hidden_sizes": [8]}
    bad = kind != "gymnasium" and non_finite != "stop" and draw(st.booleans())
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
    chosen = tuple(draw(st.lists(st.sampled_from(list(CONDITIONS)), max_size=2, unique=True)))
    every = max(1, case.reset_every) * draw(st.sampled_from([1, 2]))
    per_eval = draw(st.sampled_from([every, None])) if not set(chosen) & set(ON_EVALUATIONS) else every
    run = {"max_steps": STEPS, "steps_per_eval": per_eval, "env_config": None, "eval_env_config": None}
    if kind != "gymnasium":
        copies = num_eval_envs if case.own_evaluation else config["num_envs"]
        run["env_config"] = draw(st.none() | st.fixed_dictionaries({"scale": values_of_scale(config["num_envs"])}))
        run["eval_env_config"] = draw(
            st.none() | st.just({}) | st.fixed_dictionaries({"scale": values_of_scale(copies), "drift": st.just(0.5)})
        )
    return dataclasses.replace(case, run=run, conditions=chosen)
