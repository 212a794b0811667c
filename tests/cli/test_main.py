from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys

import click
import pytest

import rl8x.cli.main as cli
from rl8x.cli.errors import FiniteRange, WholeRange, show_warning
from rl8x.cli.main import COMMANDS, main


@pytest.mark.long
def test_a_command_imports_neither_mlflow_nor_what_compiles(tmp_path):
    code = (
        "import sys\nfrom rl8x.cli.main import main\n"
        "assert main(['train', 'CartPole', '--max-steps', '1', '--num-envs', '4', '--progress', 'none']) == 0\n"
        "print({'mlflow', 'sqlalchemy', 'pandas', 'torch._dynamo', 'torch._inductor'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize("words", ["train --help", pytest.param("tuned", marks=pytest.mark.long)])
def test_an_output_that_cannot_be_written_is_one_line(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rl8x", *words.split()], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr == "rl8x: error: the output could not be written: No space left on device\n"


def test_letters_that_a_terminal_lacks_are_escaped():
    program = "import click, sys; from rl8x.cli import main\n"
    program += "main._run = lambda *_: click.echo('run \\U0001f389 \\xfc'); sys.exit(main.main())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, env=os.environ | {"PYTHONIOENCODING": "latin-1"}
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"run \\U0001f389 \xfc\n", b"")


@pytest.fixture
def started(monkeypatch, default_signals):
    """What the process that talks to MLflow was started early for, in order, and "ended" for its end."""
    calls: list[object] = []
    monkeypatch.setattr("rl8x.tracking.shipping.start_early", calls.append)
    monkeypatch.setattr("rl8x.tracking.shipping.end_unused", lambda: calls.append("ended"))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    return calls


def run(words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rl8x", *words])
    return main()


UNTRACKED = ["train", "train --help", "train CartPole --dry-run", "train NoSuchEnv --no-tracking"]


@pytest.mark.parametrize("line", [*UNTRACKED, "train NoSuchEnv tracking=false", "envs NoSuchEnv", "resume"])
def test_where_nothing_is_tracked_no_process_is_started_for_it(line, started, monkeypatch, capsys):
    run(line.split(), monkeypatch)
    assert started == []


@pytest.mark.parametrize(
    ("uri", "variables", "expected"),
    [
        ([], {}, ["mlruns/mlflow.db", "ended"]),
        (["--tracking-uri", "http://127.0.0.1:9"], {}, [None, "ended"]),
        (["--tracking-uri=http://127.0.0.1:9"], {}, [None, "ended"]),
        ([], {"MLFLOW_TRACKING_URI": "htp://wrong"}, ["ended"]),
        ([], {"RANK": "1"}, []),  # of several ranks the first alone tracks
    ],
)
def test_where_a_run_is_likely_it_is_started_early(uri, variables, expected, started, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run(["train", "NoSuchEnv", *uri], monkeypatch) == 2
    assert started == [tmp_path / each if each == "mlruns/mlflow.db" else each for each in expected]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_has_help(command, capsys):
    assert main([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: rl8x {command} [OPTIONS]")


@pytest.mark.parametrize("words", [["--tracking-uri", "htp://me:p4ss@host"], ["x", "http://me:p4ss@host"]])
def test_no_mistake_repeats_a_password(words, capsys):
    assert main(["train", "CartPole", "--debug", *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.splitlines()[-1].startswith("rl8x: error: ")
    assert "p4ss" not in err


def test_a_warning_of_ours_is_one_line_and_others_are_as_they_were(capsys):
    show_warning(UserWarning("the critic\n learns nothing"), RuntimeWarning, cli.__file__, 7)
    show_warning(UserWarning("mine"), UserWarning, "my_env.py", 3)
    err = capsys.readouterr().err
    assert err == "rl8x: warning: the critic learns nothing\nmy_env.py:3: UserWarning: mine\n"


def test_the_module_that_torchrun_starts_takes_nothing_from_the_working_directory(tmp_path):
    for name in ("click", "mlflow", "yaml", "torch", "gymnasium", "tensordict", "psutil", "sqlalchemy"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not this one')\n")
    command = [sys.executable, "-m", "rl8x", "train", "CartPole", "--max-steps", "1", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "env: CartPole\n" in done.stdout


@pytest.mark.parametrize(
    ("text", "value"),
    [("20", 20), ("1e3", 1000), ("2.0", 2), (str(2**63 - 1), 2**63 - 1), ("0", None), ("1.5", None), ("inf", None)],
)
def test_options_of_every_command_take_whole_numbers_as_a_run_file_does(text, value):
    for name, (module, _) in COMMANDS.items():
        for each in getattr(importlib.import_module(module), name).params:
            for kind, ours in ((click.IntRange, WholeRange), (click.FloatRange, FiniteRange)):
                assert isinstance(each.type, ours) or not isinstance(each.type, kind), (name, each.name)
    if value is not None:
        assert WholeRange(min=1).convert(text, None, None) == value
        return
    with pytest.raises(click.BadParameter, match=r"not a whole number|not in the range"):
        WholeRange(min=1).convert(text, None, None)


@pytest.mark.parametrize("function", ["start_early", "end_unused"])
def test_ctrl_c_before_and_after_a_command_is_one_line(function, started, monkeypatch, tmp_path, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"rl8x.tracking.shipping.{function}", interrupted)
    assert run(["train", "NoSuchEnv"], monkeypatch) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "rl8x: interrupted"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("command", ["train", "resume"])
def test_a_signal_before_a_run_ends_it_in_a_line(command, number, started, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rl8x.cli.main._run", lambda *_: os.kill(os.getpid(), number))
    with pytest.raises(SystemExit) as ended:
        run([command, "NoSuchEnv"], monkeypatch)
    assert ended.value.code == 128 + number
    assert capsys.readouterr().err == f"rl8x: ended by {number.name}\n"


def test_a_signal_that_is_ignored_before_a_run_stays_ignored(started, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run(["train", "NoSuchEnv"], monkeypatch)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
