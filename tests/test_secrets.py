"""A password in a tracking URI: what a run, its failure and a dry run leave and print has it in no form."""

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest
from tests.ports import free_port

from rl8x.cli.main import main
from rl8x.config import load_run_file

PASSWORD = "hu/nt:er@2"
FORMS = (PASSWORD, quote(PASSWORD), quote(PASSWORD, safe=""), quote(PASSWORD, safe="").lower())
TASK = '''
import os, sys, time
import psutil
from rl8x.envs import CartPole

class Fails(CartPole):
    """Fails in the second step, once the process that talks to MLflow is there."""
    steps = 0

    def transition(self, *args):
        Fails.steps += os.path.exists("mlruns/checkpoints")
        if Fails.steps == 6 and "--tracking-uri" in sys.argv:
            deadline = time.monotonic() + 120
            while not psutil.Process().children() and time.monotonic() < deadline:
                time.sleep(0.1)
            commands = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
            open("commands.txt", "w").write("\\n".join(commands))
            raise OSError(f"no answer of {sys.argv[-1]}")
        return super().transition(*args)
'''
SMALL = ["num_envs=4", "horizon=4", "device=cpu", "model_config.hidden_sizes=[4]"]


def left_in(folder):
    """The text of every file below a folder, by its path."""
    return {path: path.read_bytes().decode(errors="replace") for path in folder.rglob("*") if path.is_file()}


def assert_hidden(*texts):
    for text in texts:
        found = [form for form in FORMS if form in text]
        assert not found, text[max(0, text.index(found[0]) - 200) :][:400]


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "secret_task.py").write_text(TASK)
    return tmp_path


@pytest.mark.long
def test_a_password_is_in_nothing_that_a_run_leaves_nor_in_a_command(work, capsys):
    uri = f"http://me:{quote(PASSWORD, safe='')}@127.0.0.1:{free_port()}"
    shown = uri.replace(quote(PASSWORD, safe=""), "***")
    words = ["train", "secret_task.Fails", *SMALL, "--max-steps", "2", "--tracking-uri", uri]
    paths = os.pathsep.join([str(work), *sys.path])
    command = [sys.executable, "-m", "rl8x.cli.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 1
    assert f"OSError: no answer of {shown}" in done.stderr  # the traceback of what is a bug, or the environment's
    assert f"did not reach {shown}" in done.stderr
    assert "tracking.shipper" in (work / "commands.txt").read_text()
    assert_hidden(done.stdout, done.stderr, *left_in(work).values())
    (folder,) = (work / "mlruns/checkpoints").iterdir()
    assert main(["resume", str(folder)]) == 2
    needed = f": the password of {shown} is needed: set MLFLOW_TRACKING_URI to the whole URI\n"
    (told,) = capsys.readouterr().err.splitlines(keepends=True)
    assert told.startswith("rl8x: error: cannot resume from ")
    assert told.endswith(needed)


def test_a_dry_run_prints_no_password_and_its_file_asks_for_it(work, monkeypatch, capsys):
    uri = "http://me:p%40ssw0rd@127.0.0.1:1"
    assert main(["train", "CartPole", *SMALL, "--max-steps", "1", "--tracking-uri", uri, "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "ssw0rd" not in printed.out + printed.err
    expected = "rl8x: passwords are printed as ***; to train from this, set MLFLOW_TRACKING_URI or put them in\n"
    assert printed.err == expected
    Path("run.yaml").write_text(printed.out)
    assert load_run_file("run.yaml")["tracking_uri"] == "http://me:***@127.0.0.1:1"
    monkeypatch.setattr("rl8x.tracking.secrets._given", {})  # another process
    assert main(["train", "-f", "run.yaml", "--dry-run"]) == 2
    assert "the password of http://me:***@127.0.0.1:1 is needed: set MLFLOW_TRACKING_URI" in capsys.readouterr().err
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert main(["train", "-f", "run.yaml", "--dry-run"]) == 0
