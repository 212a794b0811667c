"""Whole runs of features combined at random, and what must hold of each of them.

Each run trains a few steps, is evaluated, saved, killed and resumed. `make fuzz CASES=160` checks more of them,
`make fuzz MINUTES=120` draws others.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import shutil
import tempfile
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from tests.combinations.cases import ALGORITHMS, CONFIRMED, DEVICE, WITH_A_REPLAY, Case, cases
from tests.combinations.ledger import Horizon, check_rows_of_replay
from tests.probes import everything, traced_only
from tests.trainers.helpers import Killed, killed_at

from rl8x import MemoryTracker, MLflowTracker, keys
from rl8x.checkpoint import listed, read
from rl8x.checkpoint.tree import tensors_in
from rl8x.envs import GymnasiumEnv
from rl8x.envs.parameters import parsed, resolve_config
from rl8x.execution.compiler import CompiledProgram
from rl8x.trainers import NonFiniteError, Trainer

CASES = int(os.environ.get("RL8X_FUZZ_CASES", "30"))  # with fixed seeds; without a number of minutes
MINUTES = float(os.environ.get("RL8X_FUZZ_MINUTES", "0"))
LEARNED = ("losses/", "coefficients/", "monitors/q", "monitors/td_error", "monitors/grad_norm", "replay/")
DOCUMENTED_WARNINGS = (
    "a Gymnasium simulator's state cannot be saved",
    "evaluation episodes had not ended",
    "not finite at step",
    "the run had callbacks",
)


def check(case: Case, database: Path) -> None:
    if case.refusal is not None:
        with pytest.raises(ValueError, match=case.refusal):
            trained(case, callbacks=[fails])
        return
    straight = trained(case)
    check_rows(case, straight)
    check_params(case, straight)
    if case.offline:
        check_offline(case, straight)
    else:
        check_counters(case, straight)
    if case.algorithm in WITH_A_REPLAY:
        check_replay(case, straight)
    check_untouched_by_evaluation(case, straight)
    folder = Path(tempfile.mkdtemp(prefix="rl8x-combinations-"))
    try:
        check_resumed(case, straight, folder, database if case.mlflow else None)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a shipper may still be at its journal


def fails(trainer: Trainer, stats: object) -> None:
    """Be the callback of a run that must not begin."""
    raise AssertionError("trained a step before it was refused")


def trained(case: Case, trainer: Trainer | None = None, callbacks: Sequence[object] = (), **options) -> Trainer:
    """Run to the end, with each step's physics looked at; an end by non-finite numbers is an end like any other."""
    trainer = case.make_trainer(callbacks=callbacks) if trainer is None else trainer
    watch_parameters(case, trainer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.run(**(options or case.run_options()))
        except NonFiniteError:
            assert case.bad, "a number is not finite that was not asked for"
        finally:
            trainer.tracker.flush()
    for warning in caught:
        if issubclass(warning.category, RuntimeWarning):
            assert any(text in str(warning.message) for text in DOCUMENTED_WARNINGS), str(warning.message)
    return trainer


def watch_parameters(case: Case, trainer: Trainer) -> None:
    """Look at each collect: copies have the training's physics; keep what simulators counted, and what was given."""
    if case.offline:
        return
    algorithm, collect, evaluate = trainer.algorithm, trainer.algorithm.collect, trainer.algorithm.evaluate
    algorithm.collected, algorithm.ledger, algorithm.evaluated = 0, [], False

    def collect_and_look(**options):
        env, begins = algorithm.env, algorithm.horizons.collector.cursor is None
        follows = not (begins or algorithm.horizons.reset_is_due() or algorithm.evaluated)
        warms_up = trainer.state[keys.ENV_STEPS] < case.config.get("warmup_steps", 0)
        before = logged_transitions(env) if case.kind == "gymnasium" else 0
        stats = collect(**options)
        algorithm.evaluated = False
        slots = logged_slots(case, algorithm)
        algorithm.ledger.append(Horizon(trainer.state[keys.STEPS], slots, follows=follows, warms_up=warms_up))
        if case.kind == "gymnasium":
            algorithm.collected += logged_transitions(env) - before
        else:
            check_physics(env, case.run["env_config"] or {})
        return stats

    def evaluate_and_note(**options):
        algorithm.evaluated = True
        return evaluate(**options)

    algorithm.collect, algorithm.evaluate = collect_and_look, evaluate_and_note


def logged_slots(case: Case, algorithm) -> dict[str, torch.Tensor]:
    """Return the last horizon, as the environment logged it where it does so, else as the rollout has it."""
    horizon = algorithm.config.horizon
    if case.kind == "logged" and case.algorithm in WITH_A_REPLAY:
        steps = algorithm.env.log.steps[-horizon:]
        return {name: torch.stack([step[name] for step in steps]) for name in steps[0]}
    kept = (keys.OBS, keys.ACTIONS, keys.REWARDS, keys.TERMINATED, keys.TRUNCATED, keys.NEXT_OBS, keys.VALID)
    found = algorithm.rollout.tensors.items()
    return {name: part[:horizon].clone() for name, part in found if name.split("/")[0] in kept}


def check_physics(env, config: dict) -> None:
    about = {"num_envs": env.num_envs, "device": env.device, "metrics": env.metric_names}
    expected = resolve_config(parsed(config), env.parameters, owner="expected", **about)
    actual = env.carry["parameters"]
    for name, value in expected.fixed.items():
        assert torch.equal(actual[name].expand(env.num_envs), value.expand(env.num_envs)), (name, actual[name], value)
    moving = {name: member for group in expected.curricula for name, member in group.members.items()}
    for name, distribution in (expected.drawn | moving).items():
        low, high = distribution.support
        assert bool(((actual[name] >= low - 1e-6) & (actual[name] <= high + 1e-6)).all()), (name, actual[name])


def logged_transitions(env: GymnasiumEnv) -> int:
    return sum(copy.unwrapped.log.transitions for copy in env.vector_env.envs)


def rows(tracker: MemoryTracker) -> dict[tuple[int, str], list[float]]:
    """All points of a run but times and memory, by step and name."""
    found: dict[tuple[int, str], list[float]] = {}
    for step, row in tracker.rows:
        for name, value in row.items():
            if not name.startswith(("profiling/", "memory/")):
                found.setdefault((step, name), []).append(value)
    return found


def learned(trainer: Trainer) -> torch.Tensor:
    """All that was learned, and what draws batches, as one vector, float64; NaN is 9."""
    tensors = tensors_in(trainer.algorithm.learned_state())
    return torch.cat([tensor.flatten().cpu().to(torch.float64) for tensor in tensors.values()]).nan_to_num(9.0)


def same(left: object, right: object) -> bool:
    """Compare rows exactly, NaN being equal to NaN."""
    return repr(left) == repr(right)


def check_rows(case: Case, trainer: Trainer) -> None:
    """Metrics have names that the trainer foretold, the clock goes forward, and what is finite says so."""
    tracker = trainer.tracker
    told = {name for _, row in tracker.rows for name in row}
    assert told <= trainer.metric_names, sorted(told - trainer.metric_names)
    steps = [step for step, _ in tracker.history("algorithm/steps")]
    assert steps == sorted(steps)
    points = rows(tracker)
    for (_, name), values in points.items():
        if name.startswith(LEARNED) and not case.bad:
            assert all(map(math.isfinite, values)), (name, values)
    for (step, name), means in points.items():
        group = name.removesuffix("/mean")
        low, high = (points.get((step, f"{group}/{figure}"), [math.nan])[-1] for figure in ("min", "max"))
        if group != name and math.isfinite(low) and math.isfinite(high):
            slack = 1e-4 * max(1.0, abs(low), abs(high))
            assert low - slack <= means[-1] <= high + slack, (name, low, means, high)


def check_params(case: Case, trainer: Trainer) -> None:
    params = trainer.tracker.params
    for name, value in case.config.items():
        if isinstance(value, str | int | float) and name not in ("execution", "buffer_path", "teacher"):
            assert params[name] == value, name
    for name, value in case.config["model_config"].items():
        assert params[f"model_config.{name}"] == value, name
    if case.offline:
        path, dataset = case.recording
        assert params["dataset"] == (str(path) if case.in_a_folder else "given")
        assert (params["dataset.transitions"], params["dataset.digest"]) == (case.recorded, dataset.digest)
        return
    assert params["env.time_limit"] == case.task["time_limit"]
    if case.kind != "gymnasium":
        scale = (case.run["env_config"] or {}).get("scale", 1.0)
        shown = "Uniform(0.2, 0.3)" if isinstance(scale, dict) else scale
        assert str(params["env_config.scale"]) == str(shown)
        assert str(params["env_config.drift"]) == str((case.run["env_config"] or {}).get("drift", 0.0))


def check_counters(case: Case, trainer: Trainer, before: dict[str, int] | None = None) -> None:
    """Counters equal a recount from what the simulator itself logged, or from the shape of the rollouts."""
    state, config = trainer.state, case.config
    gone = {name: state[name] - (before or {}).get(name, 0) for name in state}
    evaluated = gone[keys.COLLECTS] - gone[keys.STEPS]
    horizon = config["num_envs"] * config["horizon"]
    if case.own_evaluation:
        assert evaluated == 0
    if case.kind == "gymnasium":
        logs = [copy.unwrapped.log for copy in trainer.algorithm.env.vector_env.envs]
        transitions, episodes = logged_transitions(trainer.algorithm.env), sum(log.episodes for log in logs)
        assert gone[keys.ENV_STEPS] == trainer.algorithm.collected
        if not evaluated:
            assert gone[keys.ENV_STEPS] == transitions
        if evaluated == 0 and case.reset_every < 0:
            assert gone[keys.ENV_EPISODES] == episodes
        return
    assert gone[keys.ENV_STEPS] == gone[keys.STEPS] * horizon
    if case.kind == "logged":
        log = trainer.algorithm.env.log
        assert gone[keys.ENV_STEPS] + evaluated * horizon == log.transitions
        if evaluated == 0 and case.reset_every < 0:
            assert gone[keys.ENV_EPISODES] == log.episodes


def check_offline(case: Case, trainer: Trainer) -> None:
    state, config = trainer.state, trainer.algorithm.config
    assert state[keys.UPDATES] == state[keys.STEPS] * config.updates_per_step
    assert state[keys.ENV_STEPS] == state[keys.ENV_EPISODES] == state[keys.COLLECTS] == 0


def check_replay(case: Case, trainer: Trainer, horizons: Sequence[Horizon] | None = None) -> None:
    """The replay has the rows of what the environment gave, finite ones, and updates were made for them."""
    algorithm, config, replay = trainer.algorithm, trainer.algorithm.config, trainer.algorithm.replay
    horizons = algorithm.ledger if horizons is None else horizons
    check_rows_of_replay(replay, horizons, *config.returns)
    due = config.update_ratio * sum(horizon.samples for horizon in horizons)
    assert trainer.state[keys.UPDATES] == (int(due) if replay.size else 0)
    assert trainer.state[keys.UPDATES] + algorithm.source.updates_owed == due
    if config.prioritized and replay.size:
        index = torch.arange(replay.size, device=replay.device)[None]
        weights, powers = replay.weights(index, 1.0), replay.state_dict()["powers"].view(-1)
        assert powers[: replay.size].min() > 0
        assert torch.isfinite(powers).all()
        assert torch.isfinite(weights).all()
        assert not powers[replay.size :].any()
        torch.testing.assert_close(replay.state_dict()["sums"].sum(), powers.double().sum())


def check_untouched_by_evaluation(case: Case, trainer: Trainer) -> None:
    """An evaluation in an environment of its own leaves no trace in training."""
    evaluates = case.run["steps_per_eval"] is not None or set(CONFIRMED) & set(case.conditions)
    if not case.own_evaluation or not trainer.state[keys.STEPS] or not evaluates:
        return
    options = {"stop_conditions": None, "steps_per_eval": None, "max_steps": trainer.state[keys.STEPS]}
    twin = trained(case, **case.run_options() | options)
    mine = {key: points for key, points in rows(trainer.tracker).items() if not key[1].startswith(keys.EVAL_PREFIX)}
    assert same(mine, rows(twin.tracker))
    assert torch.equal(learned(trainer), learned(twin))


def check_resumed(case: Case, straight: Trainer, folder: Path, database: Path | None) -> None:
    """Killed in the middle of a step and resumed, a run ends in the uninterrupted one's bits, with each point once."""
    tracker = second_tracker = MemoryTracker()
    if database is not None:
        at = {"tracking_uri": f"sqlite:///{database}", "spool_dir": folder / "spool"}
        tracker, second_tracker = MLflowTracker(experiment_name=uuid.uuid4().hex, **at), MLflowTracker(**at)
    killed = {"checkpoints": folder / "checkpoints", "callbacks": [killed_at(case.killed_at)]}
    first = case.make_trainer(algorithm=case.build(folder / "replay"), tracker=tracker, **killed)
    with contextlib.suppress(Killed):
        trained(case, first)
    by_file = case.in_a_folder if case.offline else not (case.kind == "gymnasium" or case.bad)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        second = Trainer.resume(
            folder / "checkpoints",
            algorithm=None if by_file else case.build(folder / "replay"),
            tracker=second_tracker,
            eval_env=case.eval_env if case.offline else ...,
        )
    before = dict(second.state)
    trained(case, second, progress="none")
    check_best(case, second, folder / "checkpoints")
    assert same(second.stop_reason, straight.stop_reason) or case.kind == "gymnasium", second.stop_reason
    if case.kind == "gymnasium":
        if second.state[keys.STEPS] > before[keys.STEPS] and not case.offline:
            check_counters(case, second, before)
        if case.algorithm in WITH_A_REPLAY:
            kept = [horizon for horizon in first.algorithm.ledger if horizon.step < before[keys.STEPS]]
            check_replay(case, second, kept + second.algorithm.ledger)
        if case.offline and not case.conditions:
            assert torch.equal(learned(second), learned(straight))
        return
    assert second.state == straight.state
    one, other = everything(second), everything(straight)
    assert one == other, [place for place in one.keys() | other.keys() if one.get(place) != other.get(place)]
    if case.algorithm in WITH_A_REPLAY:
        one, other = second.algorithm, straight.algorithm
        assert bool((one.replay.as_tensordict() == other.replay.as_tensordict()).all())
        assert (one.replay.total, one.source.updates_owed) == (other.replay.total, other.source.updates_owed)
    if database is None:
        assert same(sorted(rows(tracker).items()), sorted(rows(straight.tracker).items()))
    else:
        check_in_mlflow(second, straight, database)


def check_best(case: Case, trainer: Trainer, directory: Path) -> None:
    """The best checkpoint of a resumed run has the best value of all its rows, the first of equal ones."""
    # A simulator plays something else after a resume: rows of before the kill are then not this run's.
    if case.best is None or case.bad or case.kind == "gymnasium" or not isinstance(trainer.tracker, MemoryTracker):
        return
    metric, mode = case.best
    points = [(row[keys.STEPS], row[metric]) for _, row in trainer.tracker.rows if metric in row]
    saved = [path for path in listed(directory) if read(path).metadata["is_best"]]
    if not points:
        assert not saved
        return
    steps, value = (max if mode == "max" else min)(points, key=lambda point: point[1])
    assert trainer.checkpoints.best == {"metric": metric, "mode": mode, "value": value, "steps": steps}
    assert read(saved[-1]).metadata["counters"][keys.STEPS] == steps


def check_in_mlflow(trainer: Trainer, straight: Trainer, database: Path) -> None:
    """What MLflow gives back is what an uninterrupted run said: each point once, params, status."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{database}")
    run = client.get_run(trainer.tracker.run_id)
    expected = rows(straight.tracker)
    for name in {name for _, name in expected}:
        history = client.get_metric_history(run.info.run_id, name)
        points = sorted((point.step, stored(point.value)) for point in history)
        said = [(step, stored(each)) for (step, at), values in expected.items() if at == name for each in values]
        assert same(points, sorted(said)), name
    failed = straight.stop_reason is not None and straight.stop_reason.startswith("NonFiniteError")
    assert run.info.status == ("FAILED" if failed else "FINISHED")
    params = {name: str(value) for name, value in straight.tracker.params.items()}
    own = {"buffer_path": run.data.params["buffer_path"]} if "buffer_path" in params else {}  # a folder of its own
    assert run.data.params == params | own


def stored(value: float) -> float:
    """SQL stores keep infinities as the largest number."""
    return math.copysign(1.7976931348623157e308, value) if math.isinf(value) else value


@pytest.fixture(scope="module")
def database(mlflow_template, tmp_path_factory):
    path = tmp_path_factory.mktemp("combinations") / "mlruns" / "mlflow.db"
    path.parent.mkdir()
    shutil.copyfile(mlflow_template, path)
    return path


@pytest.mark.long
@pytest.mark.parametrize("half", [0, 1])
def test_features_combined(half, database, monkeypatch):
    """Compiled programs are recorded as ever and run as they are recorded: only C++ is left out, but in a few."""
    compile_really = CompiledProgram._compile
    traced_only(monkeypatch)
    if not MINUTES:
        for algorithm in ALGORITHMS:
            drawn(half, (CASES // len(ALGORITHMS) + 1 - half) // 2, algorithm, lambda case: check(case, database))()
        return
    faults: dict[str, str] = {}
    begin, count = time.monotonic(), 0

    def collect(case: Case) -> None:
        nonlocal count
        count += 1
        traced_only(monkeypatch)
        if count % 50 == 0:
            monkeypatch.setattr(CompiledProgram, "_compile", compile_really)
        try:
            check(case, database)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            fault = f"{type(error).__name__} in {Path(place.filename).name}:{place.lineno}: {error!s:.200}"
            if fault not in faults:
                faults[fault] = repr(case)
                print(f"\n{fault}\n{case!r}", flush=True)

    while time.monotonic() - begin < MINUTES * 60:
        drawn(random.randrange(2**62), 10, random.choice(list(ALGORITHMS)), collect)()
    print(f"\n{count} runs, {len(faults)} faults")
    assert not faults, f"{len(faults)} faults in {count} runs: {faults}"


def drawn(seed: int, examples: int, algorithm: str, function: Callable[[Case], None]) -> Callable[[], None]:
    """Return a test that calls a function for so many random cases; the first that fails is not made smaller."""
    # A program takes seconds to record, and a run has a dozen.
    one_in = 4 if DEVICE != "cpu" else 20 if MINUTES else 100
    calls = itertools.count()

    def but_the_first(case: Case) -> None:  # which is the simplest, whatever the seed
        if next(calls):
            function(case)

    given = hypothesis.given(cases(algorithm, compiled_one_in=one_in))(but_the_first)
    chosen = settings(
        max_examples=examples + 1, database=None, suppress_health_check=HealthCheck, phases=[Phase.generate]
    )
    return hypothesis.seed(seed)(chosen(given))
