from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from rl8x.algorithms import PPOConfig
from rl8x.cli import train
from rl8x.cli.main import main
from rl8x.cli.options import read_run
from rl8x.config import RunSpec
from rl8x.config.spec import FIELDS
from rl8x.distributed import RankError

SMALL = ["--num-envs", "4", "--horizon", "4", "--no-tracking", "--device", "cpu", "--progress", "none"]


def read(*words, file=None, stop=(), **options):
    return read_run({"words": words, "file": file, "trust": False, **options}, stop)


# -- training for real ----------------------------------------------------------------------------------


def test_training_by_options(call):
    words = ["--max-steps", "2", "--steps-per-eval", "1", "--num-eval-envs", "2"]
    out = [" ".join(line.split()) for line in call("train", "CartPole", *SMALL, *words).splitlines()]
    assert out[0] == "stopped by max_steps=2"
    assert out[1].startswith("trained 2 steps, 32 transitions, ")
    evaluated = r"evaluated return \S+ \+- \S+ \(.*\), 2 whole episodes, deterministic, the final policy"
    assert re.fullmatch(evaluated, out[2])


def test_a_tracked_run_keeps_the_run_file_that_a_dry_run_prints(mlruns, mlflow_client, tmp_path, call):
    words = ["CartPole", *SMALL, "--tracking", "--max-steps", "1", "--lr", "3e-4", "env_config.length=0.7"]
    before = sorted(mlruns.parent.rglob("*"))
    printed = call("train", *words, "--dry-run")
    assert sorted(mlruns.parent.rglob("*")) == before
    call("train", *words)
    (run,) = mlflow_client.search_runs([mlflow_client.get_experiment_by_name("rl8x").experiment_id])
    path = mlflow_client.download_artifacts(run.info.run_id, "run.yaml", str(tmp_path))
    assert Path(path).read_text() == printed


# -- putting a run together -----------------------------------------------------------------------------


def test_later_wins_file_then_overrides_then_options(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "env: Pendulum\nmax_steps: 1\nseed: 1\nalgorithm_config: {lr: 0.1, gamma: 0.5, num_envs: 2}\n"
        "stop_conditions: [{wall_time: 5}]\n"
    )
    run = read("CartPole", "max_steps=2", "algorithm_config.lr=0.2", file=path, lr=0.3, max_steps=3, seed=4)
    assert (run.env.env, run.run.max_steps, repr(run.run.conditions())) == ("CartPole", 3, "[WallTime(5)]")
    assert run.algorithm.algorithm_config == {"lr": 0.3, "gamma": 0.5, "num_envs": 2, "seed": 4}
    assert run.algorithm.make_config().seed == 4
    run = read("env_cls=CartPole", file=path, stop=("hits_upper_bound: [env/steps, 1e6]", "non_finite"))
    assert run.env.env == "CartPole"
    assert repr(run.run.conditions()) == "[HitsUpperBound('env/steps', 1000000.0), NonFinite()]"


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        ("env/steps >= 1e6", "HitsUpperBound('env/steps', 1000000.0)"),
        ("'eval/a and b' >= 5", "HitsUpperBound('eval/a and b', 5)"),  # no YAML
        ("not: env/steps <= 5", "Not(HitsLowerBound('env/steps', 5))"),
        ("all: [env/steps >= 5, {wall_time: 3}]", "And(HitsUpperBound('env/steps', 5), WallTime(3))"),
        ("hits_upper_bound: ['a > b', 5]", "HitsUpperBound('a > b', 5)"),
        ("plateau: eval/returns/mean", "Plateau('eval/returns/mean', patience=5, rtol=0.001)"),
    ],
)
def test_stop_conditions_are_comparisons_or_yaml_and_a_file_may_hold_both(stop, shown):
    run = read("CartPole", stop=(stop,))
    assert repr(run.run.conditions()) == f"[{shown}]"
    assert repr(RunSpec.from_plain(run.to_plain()).run.conditions()) == f"[{shown}]"


def test_every_hyperparameter_and_run_key_has_an_option():
    context = train.train.make_context("train", ["CartPole"])
    flags = {name for parameter in train.train.get_params(context) for name in parameter.opts}
    fields = [*dataclasses.fields(PPOConfig), *FIELDS.values()]
    missing = {"--" + field.name.replace("_", "-") for field in fields} - flags
    assert missing == {"--env", "--algorithm-config", "--stop-conditions"}
    assert all(field.metadata.get("help") for field in fields)


# -- mistakes -------------------------------------------------------------------------------------------


def test_a_working_directory_that_is_gone(tmp_path, monkeypatch, call):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    said = call("train", "CartPole", *SMALL, code=2)
    assert said == "rl8x: error: the working directory does not exist any more: change to another\n"


@pytest.mark.parametrize(
    ("place", "error", "execution", "message"),
    [
        ("execution.compiler.Compiler.request", OSError("no g++"), "compile", "execution='compile' is not possible"),
        ("trainers.trainer.check_alike", RankError("rank 1 is not like 0"), "eager", "rank 1 is not like 0\n"),
    ],
)
def test_what_this_machine_or_these_ranks_cannot_do_is_said_in_one_line(
    place, error, execution, message, monkeypatch, capsys
):
    def refuse(*_):
        raise error

    monkeypatch.setattr(f"rl8x.{place}", refuse)
    monkeypatch.setattr("rl8x.execution.compiler.Compiler.start", lambda _: None)
    assert main(["train", "CartPole", *SMALL, "--max-steps", "2", "--execution", execution]) == 2
    assert capsys.readouterr().err.splitlines(keepends=True)[-1].startswith(f"rl8x: error: {message}")


NO_EVALUATIONS = "has no effect: the run makes no evaluations. Give steps_per_eval, such as 10, or leave it out."


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-eval-envs", "7"], "`num_eval_envs=7` " + NO_EVALUATIONS),
        (
            ["--log-models"],
            "`log_models=True` has no effect: the run is not tracked. Leave it out, or have the run tracked in MLflow: "
            "tracking=true.",
        ),
    ],
)
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_what_has_no_effect_is_warned_of_in_one_line(dry, words, message, call):
    with pytest.warns(RuntimeWarning, match=f"^{re.escape(message)}$"):
        call("train", "CartPole", *SMALL, "--max-steps", "1", *words, *dry)


def test_the_summary_says_what_an_evaluation_in_the_training_environment_measured(call):
    words = ["--eval-env", "false", "--max-steps", "1", "--steps-per-eval", "1"]
    assert "evaluated   return of a horizon 4 +- 0" in call("train", "CartPole", *SMALL, *words)
