"""Whatever `checkpoint.json` says: a resume, `rl8x play` and the rest end in one line, or go on."""

import copy
import json
import os
import random
import shutil
import warnings

import pytest
import torch
from tests.checkpoint.legal import metadata

from rl8x import keys
from rl8x.checkpoint import CheckpointError, files, listed
from rl8x.checkpoint.files import checked, checked_state
from rl8x.cli.main import main

SMALL = ["--num-envs", "2", "--horizon", "4", "--device", "cpu", "--seed", "1", "--execution", "eager"]
SMALL += ["algorithm_config.model_config.hidden_sizes=[4]", "--progress", "none", "--max-steps", "1"]
ODD = [None, True, 0, -1, 3, 2.5, "", "x", "rl8x.PPOConfig", [], [1, "a"], {}, {"a": 1}, {"$class": 3}, [None]]
LEGAL = {"format": "rl8x-checkpoint", "version": 1, **metadata()}
NUM = int(os.environ.get("RL8X_MUTATIONS", "40"))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("counters",), [1], "`counters` must be a dict; got [1]"),
        (("counters", keys.STEPS), "3", f"`counters['{keys.STEPS}']` must be a whole number; got '3'"),
        (("counters", keys.STEPS), ..., f"`counters` have no '{keys.STEPS}'"),
        (("run",), ..., "`run` is missing"),
        (("run", "key"), None, "`run.key` must be a text; got None"),
        (("run", "id"), 7, "`run.id` must be a text or null; got 7"),
        (("run", "names"), {"metrics": {"a": 1}}, "`run.names['metrics']['a']` must be a text; got 1"),
        (("resolved", "config"), ..., "`resolved.config` is missing"),
        (("resolved", "spaces"), [None], "`resolved.spaces` must be two, of observations and actions"),
        (("spec", "eval_env"), 2, "`spec`: `eval_env` must be auto, true, false or an environment's name; got 2."),
        (("spec", "env"), 2, "`spec`: `env` must be a text; got 2. Put it in quotes."),
        (("spec", "look_ahead"), 2, "`spec` has 'look_ahead', which this rl8x does not know"),
        (("spec", "max_steps"), "9", "`spec`: `max_steps` must be a whole number; got '9'."),
        (("status",), "DONE", "`status` must be 'RUNNING' or 'KILLED' or 'FINISHED'; got 'DONE'"),
        (("is_best",), 0, "`is_best` must be true or false; got 0"),
    ],
)
def test_what_is_odd_is_named(place, value, message):
    data = copy.deepcopy(LEGAL)
    changed(data, place, value)
    with pytest.raises(CheckpointError) as error:
        checked(data)
    assert str(error.value) == f"checkpoint.json is odd: {message}"
    assert checked(LEGAL) is LEGAL


ODD_STATES = [
    (("run",), ..., "`run` is missing"),
    (("run", "max_steps"), "9", "`run.max_steps` must be a whole number or null; got '9'"),
    (("run", "steps"), None, "`run.steps` must be a whole number; got None"),
    (("run", "conditions"), [{"repr": "x"}], "`run.conditions[0].state` is missing"),
    (("run", "row"), [], "`run.row` must be a dict or null; got []"),
    (("best",), {"metric": "a", "mode": "max", "value": "1", "steps": 1}, "`best.value` must be a number; got '1'"),
    (("torch_generators",), [], "`torch_generators` must be a dict; got []"),
]


def test_an_odd_state_is_one_line(saved, tmp_path, capsys, monkeypatch):
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    path = listed("run")[-1]
    state = torch.load(path / files.STATE, weights_only=True)
    for place, value, message in ODD_STATES:
        odd = copy.deepcopy(state)
        changed(odd, place, value)
        with pytest.raises(CheckpointError) as error:
            checked_state(odd)
        assert str(error.value) == f"state.pt is odd: {message}"
    torch.save(odd, path / files.STATE)
    (path / files.SUMS).write_text(files._sums(path, files.kept_segments(path)))
    capsys.readouterr()
    assert main(["resume", str(path), "--max-steps", "2", "--progress", "none"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(str(error.value))


def changed(data, place, value):
    """Put a value to a place; `...` removes what is there."""
    for key in place[:-1]:
        data = data[key]
    if value is ...:
        del data[place[-1]]
    else:
        data[place[-1]] = value


def places(data, place=()):
    """List the places of all values in nested dicts and lists."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [found for key, item in items for found in [(*place, key), *places(item, (*place, key))]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, mlflow_template):
    """Folders of checkpoints of two runs: one typed, one of a run file that evaluates and is kept in MLflow."""
    folders, before = [tmp_path_factory.mktemp("saved") / name for name in ("typed", "file")], os.getcwd()
    for folder, words in zip(folders, (["--no-tracking"], ["--steps-per-eval", "1"]), strict=True):
        (folder / "mlruns").mkdir(parents=True)
        shutil.copyfile(mlflow_template, folder / "mlruns/mlflow.db")
        os.chdir(folder)
        try:
            assert main(["train", "CartPole", *SMALL, "checkpoints.directory=run", *words]) == 0
        finally:
            os.chdir(before)
    return folders


@pytest.mark.parametrize("seed", range(NUM))
def test_an_odd_description_is_one_line_or_the_run_goes_on(seed, saved, tmp_path, capsys, monkeypatch):
    draw = random.Random(seed)
    shutil.copytree(saved[draw.random() < 0.5], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    path = listed("run")[-1]
    data = json.loads((path / files.DESCRIPTION).read_bytes())
    for _ in range(draw.choice([1, 1, 3])):
        depth = draw.choice([1, 2, 9])  # most places are in the algorithm's config, which has checks of its own
        place = draw.choice([place for place in places(data) if len(place) <= depth])
        value = draw.choice([..., ..., *ODD])
        changed(data, place, value)
    (path / files.DESCRIPTION).write_text(json.dumps(data))
    (path / files.SUMS).write_text(files._sums(path, files.kept_segments(path)))
    before = sorted(os.listdir("run"))
    capsys.readouterr()
    words = draw.choice(
        [
            ["resume", str(path), "--max-steps", "2"],
            ["play", str(path), "--episodes", "1"],
            ["resume", str(path), "--lr", "0.1"],
        ]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = main([*words, *(["--progress", "none"] if words[0] == "resume" else [])])
    out, error = capsys.readouterr()
    told = f"{place} = {value!r}: {words}: {out}{error}"
    assert code in (0, 2), told
    assert "Traceback" not in error, told
    if code == 0:
        assert words[0] == "play" or "stopped by" in out, told
    if code == 2:
        assert [line for line in error.splitlines() if not line.startswith("hint")][1:] == [], told
        assert sorted(os.listdir("run")) == before, told
