"""Runs drawn at random for benchmarks/faults.py to kill: as scripts write them, and as run files for the command line.

Scripts train the tasks of tests/combinations; each does what a user's does that is started again after a crash.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from tests.combinations.cases import ALGORITHMS, OFFLINE, Case, cases

from benchmarks.fault_tools import tracker
from rl8x.checkpoint import CheckpointError
from rl8x.envs import BUILTIN
from rl8x.tracking import MLflowTracker
from rl8x.trainers import Checkpoints, Trainer

ENDLESS = ("CartPoleInfinite", "AlgoTrading", "DiscreteDummy", "ContinuousDummy")
CONDITIONS: list[Any] = [
    {"plateau": {"name": "losses/total", "patience": 6, "rtol": 0.5}},
    {"hits_upper_bound": ["env/steps", 900]},
    {"any": [{"stops_increasing": {"name": "rewards/mean", "patience": 9}}, {"wall_time": "1h"}]},
    {"all": [{"hits_lower_bound": ["losses/total", 1e9]}, {"hits_upper_bound": ["algorithm/steps", 20]}]},
]


class Plan:
    """A run that can be begun, and gone on with after a kill, by calling it in a fresh process again and again.

    Args:
        seed: Names it: the same seed is the same run.
        compiled: Whether it is compiled.
        forks: As `Child` takes it.
    """

    def __init__(self, seed: int, *, compiled: bool, forks: bool = True) -> None:
        self.forks = forks
        self.source = random.Random(seed)
        mode = "compile" if compiled else "eager"
        self.case: Case | None = None
        self.file: dict[str, Any] | None = None
        if self.source.random() < 0.35:
            self.file = self._drawn_file(mode)
        else:
            case = _drawn_case(seed)
            self.case = dataclasses.replace(case, config={**case.config, "execution": mode})
        self.checkpoints = {
            "every_steps": self.source.choice([1, 2, 3, 5, 7, None]),
            "every_minutes": None,
            "keep": self.source.choice([1, 3]),
        }
        # Conditions end a run somewhere; several run() calls are for runs of a known length.
        parts = 1 if self.case is None or self.case.conditions else self.source.choice([1, 1, 2, 3])
        self.limits = [self.source.randrange(6, 25) * (number + 1) for number in range(parts)]
        self.with_callback = self.source.random() < 0.4

    def __repr__(self) -> str:
        """Write what it is made of."""
        what = self.case if self.file is None else self.file
        return f"{what!r}, {self.checkpoints}, limits {self.limits}, callback {self.with_callback}"

    def folder(self, root: Path) -> Path | None:
        """Find the checkpoints of the run in a try's folder."""
        folders = [path.parent for path in root.rglob("0*-step-*") if path.is_dir()]
        return max(folders, key=lambda path: path.stat().st_mtime) if folders else None

    def __call__(self, root: Path) -> None:
        """Begin the run in a folder, or go on with it, to its end."""
        if self.file is None:
            self._script(root)
        else:
            self._command(root)

    def _command(self, root: Path) -> None:
        from rl8x.cli.main import main

        assert self.file is not None
        defaults = MLflowTracker.__init__.__kwdefaults__
        assert defaults is not None
        defaults["interval_s"] = 0.1
        (root / "run.json").write_text(json.dumps({**self.file, "checkpoints": self.checkpoints}))
        raise SystemExit(main(["train", "-f", "run.json", "--resume", "auto"]))

    def _script(self, root: Path) -> None:
        case = self.case
        assert case is not None
        folder, made = root / "checkpoints", tracker(root)
        callbacks = [doubled_reward] if self.with_callback else []
        try:
            algorithm = case.build(root / "replay") if case.bad else None
            trainer = Trainer.resume(folder, auto=True, tracker=made, algorithm=algorithm, callbacks=callbacks)
        except CheckpointError:
            options = {"checkpoints": Checkpoints(folder, **self.checkpoints), "callbacks": callbacks, **case.trainer}
            trainer = Trainer(case.build(root / "replay"), tracker=made, **options)
            trainer.run(**{**case.run_options(), "max_steps": self.limits[0]})
        else:
            trainer.run(progress="none")
        for limit in self.limits[1:]:
            left = limit - trainer.state["algorithm/steps"]
            if left > 0:
                trainer.run(**{**case.run_options(), "max_steps": left})

    def _drawn_file(self, mode: str) -> dict[str, Any]:
        source = self.source
        name = source.choice(list(BUILTIN))
        recurrent = source.choice([None, None, "lstm", "gru", "attention"])
        sizes = (
            {"hidden_sizes": [8]}
            if recurrent is None
            else {"width": 8}
            if recurrent == "attention"
            else {"hidden_size": 8}
        )
        several = mode == "compile" and recurrent is None and source.random() < 0.3  # chunks, shared by two workers
        config = {
            "num_envs": 1024 if several else source.choice([1, 4, 8]),
            "horizon": 32 if several else 8,
            "num_threads": 2 if several else 1,
            "seed": source.randrange(9),
            "device": "cpu",
            "model": recurrent,
            "model_config": sizes,
            "num_sgd_iters": source.choice([1, 2]),
            "sgd_minibatch_size": None if several else source.choice([None, 8]),
            "seq_len": 1 if recurrent is None else source.choice([2, 8]),
            "normalize_observations": source.random() < 0.5,
            "normalize_rewards": source.random() < 0.5,
            "normalize_values": source.random() < 0.5,
            "optimizer": source.choice(["adam", "adamw", "sgd"]),
            "lr_schedule": source.choice([None, [[0, 1e-2], [400, 1e-4]]]),
            "execution": mode,
        }
        run: dict[str, Any] = {"env": name, "algorithm_config": config, "max_steps": source.randrange(8, 40)}
        run["progress"] = "none"
        if source.random() < 0.6:
            run["steps_per_eval"] = source.choice([2, 4]) * (2 if name in ENDLESS else 1)
            run["num_eval_envs"] = 2
        if name in ENDLESS:
            config["horizons_per_env_reset"] = source.choice([1, 2])
        if name.startswith(("MountainCar", "Acrobot")):
            run["env_kwargs"] = {"time_limit": 20}
        if source.random() < 0.6:
            parameter, bounds = source.choice(list(BUILTIN[name].parameters.items()))
            low, high = sorted((0.9 * bounds.default + 0.1 * bounds.low, 0.9 * bounds.default + 0.1 * bounds.high))
            run["env_config"] = {parameter: source.choice([bounds.default, {"uniform": [low, high]}])}
        if source.random() < 0.5:
            run["stop_conditions"] = [source.choice(CONDITIONS)]
        return run


def doubled_reward(trainer: object, stats: Any) -> dict[str, float]:
    """Measure something, as a callback does."""
    return {"doubled/reward": 2 * stats["rewards/mean"]}


doubled_reward.metric_names = ("doubled/reward",)  # type: ignore[attr-defined]


def _drawn_case(seed: int) -> Case:
    """Draw one of the runs of tests/combinations that must train, and of which all can be saved."""
    found: list[Case] = []

    def keep(case: Case) -> None:
        if case.refusal is None and case.kind != "gymnasium":
            found.append(case)

    # The data sets of the others are made by the process that trains, which is killed.
    algorithm = random.Random(seed).choice([name for name in ALGORITHMS if name not in OFFLINE])
    # The first that hypothesis draws are always the same.
    chosen = hypothesis.settings(
        max_examples=12, deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
    )
    draw: Callable[[], None] = hypothesis.seed(seed)(
        chosen(hypothesis.given(cases(algorithm, compiled_one_in=2))(keep))
    )
    draw()
    return found[-1] if found else _drawn_case(seed + 1_000_000)
