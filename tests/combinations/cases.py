"""Runs drawn at random: a task, an algorithm's config, what is asked of the trainer, and what must be refused."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from gymnasium.vector import AutoresetMode
from hypothesis import strategies as st
from tests.combinations.tasks import LoggedWalk, Simulator, Walk, mask_width
from tests.test_round_trip import ACTIONS, OBSERVATIONS

from rl8x.algorithms import PPOConfig
from rl8x.checkpoint import Checkpoints
from rl8x.conditions import (
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


@dataclasses.dataclass(frozen=True)
class Case:
    """One run. `config` has PPO's hyperparameters, `trainer` the trainer's arguments, `run` those of `run()`."""

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
        return self.config["horizons_per_env_reset"] or (-1 if self.episodic else 1)

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
        options = dict(self.task)
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
            return PPOConfig(**self.config).build(env)
        algorithm = PPOConfig(**self.config).build(Walk if self.kind == "tensors" else LoggedWalk, **options)
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
        return {**self.run, "stop_conditions": [CONDITIONS[name]() for name in self.conditions], "progress": "none"}


CONDITIONS = {
    "transitions": lambda: HitsUpperBound("env/steps", 60),
    "plateau": lambda: Plateau("losses/total", patience=2, rtol=0.5),
    "stalled": lambda: StopsIncreasing("rewards/mean", patience=3) | StopsDecreasing("losses/vf", patience=3),
    "both": lambda: HitsLowerBound("losses/total", 1e9) & HitsUpperBound("algorithm/steps", 3),
    "long": lambda: WallTime("1h") & ~NonFinite(),
    "confirmed": lambda: Confirmed(HitsUpperBound("rewards/mean", 0.3)),
    "confirmed twice": lambda: Confirmed(HitsUpperBound("rewards/mean", -1e9), evaluations=2),
    "evaluated": lambda: HitsUpperBound("eval/rewards/mean", 1.0),
    "evaluations stall": lambda: Plateau("eval/rewards/mean", patience=2, rtol=0.1),
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
def configs(draw: Any, kind: str, actions: str, modes: tuple[str, ...]) -> dict[str, Any]:
    """PPO's hyperparameters, legal ones."""
    num_envs, horizon = draw(st.sampled_from([4, 1, 2, 3, 6])), draw(st.sampled_from([4, 1, 2, 6, 8]))
    model = draw(st.sampled_from([None, "lstm", "gru", "attention", "mlp"]))
    recurrent = model in ("lstm", "gru", "attention")
    sizes = {
        "lstm": {"hidden_size": 8},
        "gru": {"hidden_size": 8, "encoder_sizes": [4]},
        "attention": {"window": draw(st.sampled_from([2, 5])), "width": 8, "num_heads": 2},
    }.get(model, {"hidden_sizes": [8]})
    seq_len = draw(st.sampled_from(divisors(horizon)))
    minibatch = draw(st.none() | st.sampled_from([n for n in divisors(num_envs * horizon) if n % seq_len == 0]))
    resets = draw(st.sampled_from([-1, *divisors(horizon // seq_len)])) if recurrent else None
    optimizer = draw(st.sampled_from(["adam", "adamw", "sgd"]))
    return {
        "num_envs": num_envs,
        "horizon": horizon,
        "seed": draw(st.integers(0, 3)),
        "device": "cpu",
        "model": model,
        "model_config": {**sizes, "shared": draw(st.booleans())},
        "seq_len": seq_len,
        "seqs_per_state_reset": resets,
        "sgd_minibatch_size": minibatch,
        "num_sgd_iters": draw(st.sampled_from([2, 1])),
        "horizons_per_env_reset": draw(st.sampled_from([None, 1, 2, -1])),
        "shuffle_minibatches": draw(st.booleans()),
        "accumulate_grads": draw(st.booleans()),
        "optimizer": optimizer,
        "optimizer_config": {"momentum": 0.9} if optimizer == "sgd" and draw(st.booleans()) else {},
        "normalize_advantages": draw(st.booleans()),
        "normalize_rewards": draw(st.booleans()),
        "normalize_observations": draw(st.booleans()),
        "normalize_values": draw(st.booleans()),
        "vf_clip_param": draw(st.sampled_from([5.0, None])),
        "dual_clip_param": draw(st.sampled_from([None, 3.0])),
        "target_kl_div": draw(st.sampled_from([None, 1e-7, 0.01])),
        "max_grad_norm": draw(st.sampled_from([5.0, None])),
        "entropy_coeff": draw(st.sampled_from([0.0, 0.01])),
        "lr_schedule": draw(st.sampled_from([None, [[0, 1e-2], [40, 1e-3]]])),
        "distribution": "squashed_normal" if actions == "bounded" and draw(st.booleans()) else None,
        "execution": draw(st.sampled_from(modes)),
        "precision": draw(st.sampled_from(["fp32", "fp32", "bf16"])),
    }


@st.composite
def cases(draw: Any, *, compiled_one_in: int) -> Case:
    """A run; where something about it must be refused, `Case.refusal` says so."""
    modes = (*["eager"] * (compiled_one_in - 1), "compile")
    kind = draw(st.sampled_from(["tensors", "logged", "gymnasium"]))
    actions, observations = draw(st.sampled_from(list(ACTIONS))), draw(st.sampled_from(list(OBSERVATIONS)))
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
    config = draw(configs(kind, actions, modes))
    if "image" in observations and config["model"] is None:
        config["model_config"] = {"shared": config["model_config"]["shared"], "hidden_sizes": [8]}
    bad = kind != "gymnasium" and non_finite != "stop" and draw(st.booleans())
    case = Case(kind, task, bad, config, {}, {}, (), draw(st.integers(1, STEPS)), draw(st.integers(0, 19)) == 0)
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
