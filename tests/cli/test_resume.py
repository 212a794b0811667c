import contextlib
import dataclasses
import os
import signal
import subprocess
import sys

import pytest
import yaml
from tests.forks import ForkedPython

from rl8x import Checkpoints, PPOConfig
from rl8x.checkpoint import listed, read
from rl8x.cli.main import main
from rl8x.config.spec import FIELDS, default_of
from rl8x.trainers.record import Record

SMALL = ["--num-envs", "4", "--horizon", "4", "--no-tracking", "--device", "cpu", "--seed", "1", "--progress", "none"]
SMALL += ["algorithm_config.model_config.hidden_sizes=[8]"]


def train(folder, *words):
    return main(["train", "CartPole", *SMALL, f"checkpoints.directory={folder}", *words])


def state(folder):
    return read(listed(folder)[-1])


def test_a_run_that_is_over_says_that_nothing_was_trained_and_how_to_train_more(tmp_path, capsys):
    train(tmp_path / "a", "--max-steps", "2")
    told = "rl8x: nothing was trained: the run has come to its end (max_steps=2). To train more, resume it with a "
    told += "larger --max-steps or another --stop"
    for words, expected in (["--progress=none"], [told]), (["--progress=lines"], [told]), (["--max-steps", "3"], []):
        capsys.readouterr()
        assert main(["resume", str(tmp_path / "a"), "lr=1e-4", *words]) == 0
        out, error = capsys.readouterr()
        assert [line for line in error.splitlines() if "nothing was trained" in line] == expected
        assert f"{3 - len(expected)} steps" in out


def test_an_evaluation_before_the_end_says_of_which_step_it_is(tmp_path, capsys):
    """Evaluated every two steps: at step 2 of 3, 4 of 5; also of a run that is over, and told where it is the last."""
    folder, first = str(tmp_path / "a"), ["--steps-per-eval", "2", "--num-eval-envs", "2", "--max-steps", "3"]
    assert train(folder, *first) == 0
    told = {None: "at step 2 of 3", "3": "at step 2 of 3", "5": "at step 4 of 5", "6": "the final policy"}
    for more, when in told.items():
        assert more is None or main(["resume", folder, "--max-steps", more, "--progress", "none"]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("evaluated")]
        assert line.rpartition("deterministic, ")[2] == when


def test_auto_starts_goes_on_and_stays_at_the_end(tmp_path, capsys):
    folder = tmp_path / "job"
    for _ in range(2):
        assert train(folder, "--max-steps", "3", "--resume", "auto") == 0
        assert "stopped by max_steps=3" in capsys.readouterr().out
    assert len(listed(folder)) == 2
    newest = listed(folder)[-1]
    (newest / "state.pt").write_bytes(b"")
    assert main(["resume", str(folder)]) == 2
    assert "the newest good one is" in capsys.readouterr().err
    assert train(folder, "--max-steps", "3", "--resume", "auto") == 0
    assert state(folder).metadata["counters"]["algorithm/steps"] == 3


def test_a_run_file_that_goes_on_with_a_run_says_how_it_evaluates_and_saves(tmp_path):
    """What the file says is what happens, and what the next checkpoint says of it."""
    folder = tmp_path / "job"
    assert train(folder, "--max-steps", "2") == 0
    saved = {"directory": str(folder)}
    other = {"num_eval_envs": 2, "on_non_finite": "skip", "checkpoints": {**saved, "keep": 9}}
    words = ["--num-eval-envs", "2", "--on-non-finite", "skip", "checkpoints.keep=9", "--steps-per-eval", "1"]
    for steps, changed in ("3", other), ("4", {"num_eval_envs": None, "on_non_finite": "stop", "checkpoints": saved}):
        asked = words if changed is other else []
        assert train(folder, "--max-steps", steps, "--resume", str(folder), *asked) == 0
        now = state(folder).spec.trainer
        assert {name: getattr(now, name) for name in changed} == changed


@pytest.mark.parametrize(
    "given",
    [
        {"env": "CartPole", "env_config": {"length": {"uniform": {"low": 0.4, "high": 0.6}}}},
        {"env": "CartPole-v1", "env_kwargs": {"parameters": {"pull": {"scale": "gravity"}, "mass": "masscart"}}},
    ],
)
@pytest.mark.filterwarnings("ignore:GymnasiumEnv. a simulator's state:RuntimeWarning")
def test_auto_goes_on_with_its_run_however_often_that_is_interrupted(given, mlruns, monkeypatch):
    """Whatever the file writes out that another way of writing leaves out: it is the same file each time."""
    file = {name: default_of(field) for name, field in FIELDS.items() if name not in ("env", "preset", "seed")}
    config = {name: getattr(PPOConfig(), name) for name in ("lr", "gamma", "num_sgd_iters", "normalize_observations")}
    checkpoints = {field.name: default_of(field) for field in dataclasses.fields(Checkpoints)}
    stops = ["eval/returns/mean >= 1000 and env/steps >= 1e5", {"wall_time": 3600}]
    small = {"num_envs": 4, "horizon": 4, "device": "cpu", "seed": 1, "model_config": {"hidden_sizes": [8]}}
    file |= {"algorithm_config": {**config, **small}, "checkpoints": checkpoints, "stop_conditions": stops, **given}
    file |= {"steps_per_eval": 100, "num_eval_envs": 2, "progress": "none"}
    (mlruns.parent / "run.yaml").write_text(yaml.safe_dump(file))
    log = Record.log

    def logged(*args, **options):
        log(*args, **options)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Record, "log", logged)
    for steps in (1, 2, 3, 4):
        with pytest.raises(SystemExit, match="143"):
            main(["train", "-f", "run.yaml", "--resume", "auto"])
        (folder,) = (mlruns / "checkpoints").iterdir()
        assert state(folder).metadata["counters"]["algorithm/steps"] == steps


@pytest.mark.parametrize(
    ("begin", "numbers", "code"),
    [
        ((), [signal.SIGTERM], 143),
        pytest.param(  # as shells start the background jobs of a script: the SIGINT is not heard of
            *(("sh", "-c", 'trap "" INT; exec "$@"', "sh"), [signal.SIGINT, signal.SIGTERM], 143),
            marks=pytest.mark.long,
        ),
    ],
)
@pytest.mark.usefixtures("default_signals")
def test_signals_give_the_exit_code_and_auto_goes_on(tmp_path, begin, numbers, code):
    folder = tmp_path / "job"
    words = ["train", "CartPole", *SMALL, f"checkpoints.directory={folder}"]
    command = [*begin, sys.executable, "-m", "rl8x.cli.main", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Without a shell a fork, which has imported torch.
    start = subprocess.Popen if begin else ForkedPython
    process = start(command, env=environment, stderr=subprocess.PIPE, cwd=tmp_path)
    with contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        while not listed(folder) and process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        for number in numbers:
            process.send_signal(number)
        error = process.communicate(timeout=240)[1]
    assert process.returncode == code, error
    saved = state(folder)
    assert saved.metadata["status"] == "KILLED"
    steps = saved.metadata["counters"]["algorithm/steps"] + 1
    assert train(folder, "--max-steps", str(steps), "--resume", "auto") == 0
