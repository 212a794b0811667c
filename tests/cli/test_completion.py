"""What a shell is offered, asked as its script asks, and that it imports little."""

import subprocess
import sys

import pytest

from rl8x.cli.main import algorithm_names, environments, rl8x, tuned_tasks
from rl8x.config.files import algorithm_configs
from rl8x.config.tuned import tuned_files
from rl8x.envs import registry
from rl8x.tracking.location import locate
from rl8x.tracking.store import MLflowStore, NewRun


@pytest.fixture
def asked(mlruns, monkeypatch, capsys):
    """What bash is offered at the end of a line, each with its type."""

    def ask(line):
        monkeypatch.setenv("_RL8X_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        with pytest.raises(SystemExit) as end:
            rl8x.main([], "rl8x")
        assert end.value.code == 0
        return capsys.readouterr().out.split()

    return ask


def test_what_is_offered_without_imports_is_what_there_is():
    assert environments() == list(registry.BUILTIN)
    assert tuned_tasks() == list(tuned_files())
    assert sorted(algorithm_names()) == sorted(algorithm_configs())


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("rl8x re", ["plain,resume", "plain,report"]),
        ("rl8x train Cart", ["plain,CartPole", "plain,CartPoleInfinite"]),
        ("rl8x train --lr 1e-3 --algorithm s", ["plain,sac"]),
        ("rl8x train CartPole --algorithm FastS", ["plain,FastSAC"]),
        ("rl8x train -f exam", ["file,exam"]),
        ("rl8x envs Pend", ["plain,Pendulum"]),
        ("rl8x tuned Half", ["plain,HalfCheetah-v5"]),
        ("rl8x tuned HalfCheetah-v5 s", ["plain,sac"]),
        ("rl8x compare nothing-is-cal", ["file,nothing-is-cal"]),
        ("rl8x train CartPole --resume a", ["plain,auto"]),
        ("rl8x cache --cl", ["plain,--clear"]),
        ("rl8x train CartPole --steps-per", ["plain,--steps-per-eval"]),
    ],
)
def test_what_is_offered(line, offered, asked):
    assert asked(line) == offered


def test_runs_are_offered_by_name(mlruns, asked):
    store = MLflowStore(locate())
    for number, name in enumerate(("calm-ant", "calm-bee", "odd-cat")):
        run = store.create_run(NewRun(str(number), "e", None, name, 1000))
    store.delete_run(run)
    for line in ("rl8x resume ", "rl8x compare calm-ant ", "rl8x play "):
        assert asked(line) == ["plain,calm-ant", "plain,calm-bee"]
    assert asked("rl8x resume calm-b") == ["plain,calm-bee"]
    (mlruns / "mlflow.db").write_bytes(b"no database")
    assert asked("rl8x resume calm-b") == ["file,calm-b"]


def test_help_and_asking_import_neither_torch_nor_mlflow(mlruns):
    code = (
        "import os, sys\nfrom rl8x.cli.main import main, rl8x\n"
        "assert main(['--help']) == main(['--version']) == 0\n"
        "import rl8x.cli.doctor as says_what_is_broken\n"
        "assert not {'torch', 'mlflow', 'numpy'} & set(sys.modules)\n"
        "os.environ['_RL8X_COMPLETE'] = 'bash_complete'\n"
        "for line in ('rl8x ', 'rl8x train Cart', 'rl8x resume '):\n"
        "    os.environ['COMP_WORDS'], os.environ['COMP_CWORD'] = line, str(len(line.split(' ')) - 1)\n"
        "    try:\n        rl8x.main([], 'rl8x')\n    except SystemExit:\n        pass\n"
        "assert not {'torch', 'mlflow'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"plain,train", "plain,CartPole"} <= set(done.stdout.splitlines())
