"""What a notebook does: the example runs cell by cell under IPython, shows pictures, and a cell can be interrupted."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from pathlib import Path

import pytest
from PIL import Image

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook.ipynb"
IPYTHON = pytest.importorskip("IPython", reason="IPython is not installed, which runs cells: pip install 'rl8x[dev]'")

# Sizes in the notebook, and what the test makes of them.
SMALLER = {
    "num_envs=64": "num_envs=16",
    "num_eval_envs=32": "num_eval_envs=2",
    "120_000": "1_000",
    "max_steps=100": "max_steps=3",
}


@pytest.fixture
def shell(mlruns, monkeypatch):
    """An interactive shell, as a notebook's kernel has it, in an empty folder."""
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.setattr("sys.ps1", "In : ", raising=False)  # before IPython does, for good
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    shell.history_manager.enabled = False
    yield shell
    InteractiveShell.clear_instance()


def cells(kind="code"):
    book = json.loads(NOTEBOOK.read_text())
    for cell in book["cells"]:
        if cell["cell_type"] == kind:
            yield "".join(cell["source"])


def run(shell, code):
    """Run a cell; returns what it evaluates to, and that in the forms in which a notebook shows it."""
    done = shell.run_cell(code)
    done.raise_error()
    shown, _ = shell.display_formatter.format(done.result)
    return done.result, shown


def test_the_notebook_runs_and_shows_its_pictures(shell, mlflow_client, capsys):
    shown = {}
    assert all(text in "".join(cells()) for text in SMALLER)
    for code in cells():
        for text, smaller in SMALLER.items():
            code = code.replace(text, smaller)
        _, shown[code.split("(")[0] + code[-12:]] = run(shell, code)
    first, second, film = list(shown.values())[-3:]
    assert [Image.open(io.BytesIO(each["image/png"])).format for each in (first, second)] == ["PNG", "PNG"]
    assert film["text/html"].startswith('<img src="data:image/gif;base64,')
    assert "HitsUpperBound('env/steps', 1000)" in capsys.readouterr().out
    (found,) = mlflow_client.search_runs(["0", "1"])
    assert found.info.status == "FINISHED"


def test_the_notebook_is_committed_without_outputs():
    book = json.loads(NOTEBOOK.read_text())
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in book["cells"] if "outputs" in cell)
    assert NOTEBOOK.stat().st_size < 10_000


def test_an_interrupted_cell_ends_the_run_says_what_to_do_and_goes_on(shell, mlflow_client, capfd, default_signals):
    run(shell, "from rl8x import PPOConfig, Trainer")
    small = "num_envs=4, horizon=4, device='cpu', seed=0, model_config={'hidden_sizes': [4]}"
    run(shell, f"trainer = Trainer(PPOConfig({small}).build('CartPole'), callbacks=[lambda t, row: interrupt(row)])")
    steps = []

    def interrupt(row):
        steps.append(row["algorithm/steps"])
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    shell.user_ns["interrupt"] = interrupt
    done = shell.run_cell("trainer.run(max_steps=6)")
    assert isinstance(done.error_in_exec or done.error_before_exec, KeyboardInterrupt)
    told = re.sub(r"\s+", " ", capfd.readouterr().err)
    assert "stopped after 3 steps: interrupted by SIGINT" in told
    assert "to continue in this session: call run() of this trainer again" in told
    assert re.search(r"to continue from step 3: Trainer.resume\('\S+', callbacks=\[...\]\).run\(\)", told)
    (found,) = mlflow_client.search_runs(["0", "1"])
    assert found.info.status == "KILLED"
    assert found.data.tags["rl8x.stop_reason"] == "interrupted by SIGINT"
    run(shell, "stats = trainer.run(max_steps=2)")
    assert steps == [1, 2, 3, 4, 5]
    (again,) = mlflow_client.search_runs(["0", "1"])
    assert (again.info.run_id, again.info.status) == (found.info.run_id, "FINISHED")


def test_an_interrupted_loop_over_steps_ends_the_run_too(shell, mlflow_client, monkeypatch):
    run(shell, "from rl8x import PPOConfig, Trainer\nfrom rl8x.algorithms import PPO")
    small = "num_envs=4, horizon=4, device='cpu', seed=0, model_config={'hidden_sizes': [4]}"
    run(shell, f"trainer = Trainer(PPOConfig({small}).build('CartPole'))")
    algorithm, calls = shell.user_ns["trainer"].algorithm, []
    step = algorithm.step

    def interrupted():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(algorithm, "step", interrupted)
    done = shell.run_cell("for stats in trainer:\n    pass")
    assert isinstance(done.error_in_exec, KeyboardInterrupt)
    (found,) = mlflow_client.search_runs(["0", "1"])
    assert (found.info.status, found.data.metrics["algorithm/steps"]) == ("KILLED", 2)
