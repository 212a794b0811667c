"""`rl8x study` from a file: what it prints, its exit codes, and mistakes in one line."""

from __future__ import annotations

import pytest

from rl8x.cli.main import main

FILE = """\
env: CartPole
max_steps: 1
algorithm_config: {num_envs: 8, horizon: 8, device: cpu, model_config: {hidden_sizes: [8]}}
tracking: false
train: {fixed: {length: 0.5}, wide: {length: {uniform: [0.25, 1.0]}}}
test: {length: [0.25, 0.5, 2.0]}
episodes: 2
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(FILE)
    return tmp_path / "tiny.yaml"


NONE = "no test cell is inside of what it is trained on: none has "
MOON = f"moon: {NONE}all of it at once (a parameter that the test does not name has its default)"


def test_a_study_runs_and_says_what_came_out(file, capsys):
    words = ["study", "-f", "tiny.yaml", "seeds=[3]", "train={fixed: {length: 0.5}, moon: {gravity: 1.6}}"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].split() == ["training", "seeds", "return", "inside", "outside", "own", "worst", "cell"]
    assert [line.split()[:2] for line in lines[1:3]] == [["fixed", "1"], ["moon", "1"]]
    assert lines[3:] == [MOON, f"to look at it: rl8x report {file.parent / 'mlruns' / 'studies' / 'tiny'}"]
    said = [line for line in err.splitlines() if line.startswith("rl8x: ")]
    expected = ["fixed seed=3", "fixed seed=3", "moon seed=3", "moon seed=3"]
    assert [line.split(":")[1].strip() for line in said] == expected
    assert "(2/2)" in said[-1]
    assert main(words) == 0  # which only reads
    again, err = capsys.readouterr()
    assert again == out
    assert "begins" not in err


def test_a_dry_run_lists_the_trainings_and_writes_nothing(file, call):
    lines = call("study", "-f", "tiny.yaml", "seeds=2", "vary.lr=[1e-3, 1e-2]", "--dry-run").splitlines()
    assert len(lines) == 10
    assert lines[1] == "fixed lr=0.001 seed=1"
    assert lines[-2:] == ["8 trainings", "each tested in 3 cells, 2 episodes in each: 6 episodes a policy"]
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(
    ("train", "test", "notes"),
    [
        # A grid that misses the default
        ("{calm: {}, wide: {length: {uniform: [0.2, 1]}}}", "{length: [0.3, 0.7]}", [f"calm: {NONE}length 0.5"]),
        (
            "{drawn: {length: {uniform: [1, 2]}}, fixed: {force_mag: 7}}",
            "{length: {linspace: [0.1, 0.9, 5]}, force_mag: [7, 10]}",
            [f"drawn: {NONE}length from 1 to 2"],
        ),
        # All is at its default but the gravity, which the test does not name
        ("{moon: {gravity: 1.6}}", "{length: [0.5, 1]}", [MOON]),
        ("{lists: {length: {choice: [0.5, 1]}}}", "{length: [0.5, 3]}", []),
    ],
)
def test_a_training_without_a_cell_inside_says_why(file, call, train, test, notes):
    out = call("study", "-f", "tiny.yaml", "seeds=[3]", f"train={train}", f"test={test}", "--dry-run")
    assert [line for line in out.splitlines() if "inside of what" in line] == notes


def test_trainings_that_fail_are_named_and_the_exit_code_is_1(file, call, monkeypatch):
    answer = lambda job: {"key": job["key"], "error": "the disk is full"}  # noqa: E731
    monkeypatch.setattr("rl8x.studies.study.run_job", answer)
    assert "failed: wide seed=0: the disk is full" in call("study", "-f", "tiny.yaml", code=1).splitlines()
