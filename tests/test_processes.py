"""Processes that rl8x starts run no module of the working directory, and no warning of a library ends a command."""

import ast
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import psutil
import pytest
from tests.ports import free_port

from rl8x import processes
from rl8x.processes import python_process, tolerate_warnings

PACKAGE = Path(processes.__file__).parent
STANDARD = [name for name in sorted(sys.stdlib_module_names) if importlib.util.find_spec(name)]
OTHERS = ["torch", "rl8x", "numpy", "mlflow", "joblib", "uvicorn", "sqlalchemy", "sitecustomize", "usercustomize"]
OTHERS += ["click", "yaml", "gymnasium", "tensordict", "psutil"]
SMALL = ["num_envs=4", "horizon=4", "device=cpu", "num_threads=1", "model_config.hidden_sizes=[4]"]
STUDY = """
env: mine.Mine
algorithm_config: {num_envs: 4, horizon: 4, device: cpu, num_threads: 1, model_config: {hidden_sizes: [4]}}
max_steps: 1
train: {fixed: {length: 0.5}}
test: {length: [0.5]}
seeds: 2
episodes: 1
tracking: false
progress: none
"""


def fill(folder, names=(*STANDARD, *OTHERS)):
    """Put modules into a folder that leave a mark there when they are run, and fail."""
    folder.mkdir(exist_ok=True)
    code = f"import sys\nopen({str(folder / 'executed')!r}, 'a').write(f'{{__name__}} {{sys.orig_argv}}\\n')\n"
    for name in names:
        (folder / f"{name}.py").write_text(f"{code}raise ImportError('hostile')\n")
    return folder


def executed(folder):
    mark = folder / "executed"
    return mark.read_text() if mark.exists() else ""


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    monkeypatch.chdir(fill(tmp_path / "hostile"))
    return tmp_path / "hostile"


CODE = "import json, queue, sys, rl8x; print(json.dumps([sys.path, rl8x.__file__]))"


@pytest.mark.parametrize("path", [None, "", ":/x", "/x:", "/x::/y", ".", "relative:/x"])
def test_a_process_of_ours_finds_nothing_in_the_working_directory(hostile, monkeypatch, path):
    monkeypatch.delenv("PYTHONPATH", raising=False) if path is None else monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr(sys, "path", ["", *sys.path, ".", str(hostile), "beside"])
    done = subprocess.run(**python_process("-c", CODE), capture_output=True, text=True, check=False)
    assert executed(hostile) == ""
    found, package = json.loads(done.stdout)
    assert not {"", ".", str(hostile)} & {*found}
    assert all(map(os.path.isabs, found))
    assert str(hostile / "beside") in found
    assert Path(package).parent == PACKAGE


def test_no_other_file_starts_a_python():
    """`ui_command` is a command for others to run, and `doctor` prints the name."""
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    named = {path: ast.walk(ast.parse(text)) for path, text in texts.items() if "executable" in text}
    naming = {
        str(path.relative_to(PACKAGE))
        for path, nodes in named.items()
        if any(isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable" for node in nodes)
    }
    assert naming == {"processes.py", "tracking/ui.py", "cli/doctor.py"}


# -- warnings


@pytest.mark.parametrize("kinds", ["error", "error::DeprecationWarning", "default,er:x", "ignore::UserWarning,error"])
def test_no_warning_is_an_error_in_a_process_of_ours(monkeypatch, kinds):
    monkeypatch.setenv("PYTHONWARNINGS", kinds)
    code = "import warnings; [warnings.warn('x', kind) for kind in (UserWarning, DeprecationWarning)]"
    assert subprocess.run(**python_process("-c", code), capture_output=True, check=False).returncode == 0


def test_warnings_of_libraries_are_no_errors_and_those_of_rl8x_are_as_before():
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.filterwarnings("ignore", "y")
        warnings.simplefilter("error")
        warnings.filterwarnings("error", module="rl8x", category=RuntimeWarning)
        tolerate_warnings()
        with warnings.catch_warnings(record=True):
            warnings.warn("x", UserWarning, stacklevel=1)
        assert [each[0] for each in warnings.filters] == ["error", "ignore"]


# -- commands


def command(folder, *words, python=(), **variables):
    """Return the arguments of a process that is `rl8x` as its script is, where all warnings are errors."""
    (folder / "executed").unlink(missing_ok=True)
    script = folder.parent / "rl8x"
    script.write_text("from rl8x.cli.main import main\nraise SystemExit(main())\n")
    environment = {**os.environ, "PYTHONWARNINGS": "error", "RL8X_CACHE_DIR": str(folder.parent / "cache"), **variables}
    return {"args": [sys.executable, *python, str(script), *words], "cwd": folder, "env": environment}


def check_command(folder, *words, **options):
    """Run `rl8x`, which must end well and run nothing of the folder that it works in."""
    done = subprocess.run(**command(folder, *words, **options), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert executed(folder) == ""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, mlflow_template):
    """A folder with a run, a study's file, and modules that nobody asked for."""
    folder = fill(tmp_path_factory.mktemp("commands") / "sent")
    (folder / "mine.py").write_text("from rl8x.envs import CartPole\nclass Mine(CartPole): pass\n")
    (folder / "study.yaml").write_text(STUDY)
    (folder / "mlruns").mkdir()
    shutil.copyfile(mlflow_template, folder / "mlruns/mlflow.db")
    check_command(folder, "train", "CartPole", *SMALL, "--max-steps", "1", "checkpoints.directory=one")
    return folder


COMMANDS = {  # those that start processes of their own, as `train` does
    "study": ["study", "-f", "study.yaml", "--jobs", "2", "--trust"],
    "bench": ["bench", "CartPole", *SMALL, "--modes", "eager", "--passes", "1", "--seconds", "0.1"],
    "doctor": ["doctor"],
}


@pytest.mark.long
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_command_runs_nothing_of_the_folder_that_it_works_in(run_folder, words):
    check_command(run_folder, *words)


@pytest.mark.long
def test_warnings_are_no_errors_where_python_was_told_so_by_an_option(run_folder):
    check_command(run_folder, "play", "one", "--episodes", "1", python=["-W", "error"])


def test_an_empty_entry_of_pythonpath_is_not_the_working_directory(tmp_path):
    """As after `PYTHONPATH=$PYTHONPATH:/x`; what Python itself imports before the command is out of our hands."""
    folder = fill(tmp_path / "sent", ["json", "queue", "torch", "click", "yaml"])
    check_command(folder, "train", "CartPole", *SMALL, "--dry-run", PYTHONPATH=f"{PACKAGE.parent}::/x:")


@pytest.mark.long
def test_the_page_ends_with_its_command_and_leaves_the_port(run_folder):
    port = free_port()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(**command(run_folder, "ui", "--no-browser", "--port", str(port)), **quiet) as page:
        try:
            deadline, answers = time.monotonic() + 120, False
            while not answers:
                assert page.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.2)
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    answers = True
            family = psutil.Process(page.pid).children(recursive=True)
            page.send_signal(signal.SIGTERM)
            assert page.wait(120) == 0
        finally:
            page.kill()  # which is waited for, also where it did not end by itself
    assert len(family) == 3
    assert not any(process.is_running() for process in family)
    with socket.create_server(("127.0.0.1", port)):  # it is free at once
        pass
    assert executed(run_folder) == ""
