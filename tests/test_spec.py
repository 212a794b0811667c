"""One description of a run: what it is compared by, what a script's run says of itself, what `run()` takes from it."""

import json

import pytest

from rl8x import HitsUpperBound, MemoryTracker, Plateau, PPOConfig, Trainer
from rl8x.checkpoint import Checkpoints, find
from rl8x.checkpoint.load import problems_of
from rl8x.config import RunSpec
from rl8x.config.files import unwritable_in
from rl8x.envs import CartPole
from rl8x.models import MLPModel

SMALL = {"num_envs": 2, "horizon": 4, "device": "cpu", "execution": "eager", "sgd_minibatch_size": 8}
SMALL |= {"model_config": {"hidden_sizes": [4]}}
PLAIN = {"env": "CartPole", "algorithm_config": SMALL, "steps_per_eval": 2, "eval_env": False, "max_steps": 3}
SPEC = RunSpec.from_plain({**PLAIN, "progress": "none"})


@pytest.mark.parametrize(
    ("fields", "different"),
    [
        ({}, {}),
        ({"progress": "bar"}, {}),
        ({"max_steps": None}, {"max_steps": (3, None)}),
        ({"env_kwargs": {"time_limit": 5}}, {"env_kwargs": (None, {"time_limit": 5})}),
        (
            {"algorithm_config": {**SMALL, "horizon": 8, "lr": 0.1}},
            {"algorithm_config.horizon": (4, 8), "algorithm_config.lr": (None, 0.1)},
        ),
        ({"stop_conditions": ["env/steps >= 9"]}, {"stop_conditions": (None, ["env/steps >= 9"])}),
        ({"tracking_uri": "sqlite:///x"}, {"tracking_uri": (None, "sqlite:///x")}),
    ],
)
def test_two_runs_differ_in_what_makes_a_run(fields, different):
    other = SPEC.replace(**fields)
    assert SPEC.diff(other) == different
    assert other.diff(SPEC) == {name: (now, before) for name, (before, now) in different.items()}
    assert not other.diff(RunSpec.read(json.loads(json.dumps(other.to_plain()))))


def test_params_show_conditions_as_python_does_and_what_no_file_can_hold_by_its_name():
    written = ["env/steps >= 9", {"wall_time": "1m"}, {"nowhere.Mine": {"rows": 3}}, {"$unwritable": "<lambda>"}]
    spec = RunSpec.read({**PLAIN, "stop_conditions": written})
    assert spec.params == {
        "run.steps_per_eval": 2,
        "run.evals_per_film": None,
        "run.max_steps": 3,
        "run.stop_conditions": [
            "HitsUpperBound('env/steps', 9)",
            "WallTime('1m')",
            "{'nowhere.Mine': {'rows': 3}}",
            "<lambda>",
        ],
    }


def test_a_run_takes_the_options_that_are_not_given_from_its_spec_once(tmp_path):
    trainer = Trainer.from_spec(SPEC.replace(checkpoints={"directory": str(tmp_path)}), tracker=MemoryTracker())
    assert trainer.run(max_steps=2)["algorithm/steps"] == 2
    assert trainer.tracker.params["run.steps_per_eval"] == 2
    assert find(tmp_path).spec.diff(trainer.record.spec) == {}
    assert SPEC.diff(find(tmp_path).spec) == {"checkpoints": (None, {"directory": str(tmp_path)}), "max_steps": (3, 2)}
    trainer.run(stop_conditions=[HitsUpperBound("algorithm/steps", 3)])
    options = find(tmp_path).spec.run
    assert (options.steps_per_eval, options.max_steps) == (None, None)
    assert list(options.stop_conditions) == [{"hits_upper_bound": {"name": "algorithm/steps", "bound": 3}}]


def test_a_resumed_run_has_its_spec_and_what_is_given_anew(tmp_path):
    spec = SPEC.replace(checkpoints={"directory": str(tmp_path), "keep": 2}, tracking=False)
    Trainer.from_spec(spec).run()
    trainer = Trainer.resume(tmp_path, overrides={"lr": 0.5}, eval_env=True, checkpoints=Checkpoints(tmp_path, keep=1))
    trainer.run(max_steps=4)
    checkpoint = find(tmp_path)
    assert spec.diff(checkpoint.spec) == {
        "eval_env": (False, True),
        "checkpoints": ({"directory": str(tmp_path), "keep": 2}, {"keep": 1}),
        "max_steps": (3, 4),
    }
    assert checkpoint.metadata["resolved"]["config"]["lr"] == 0.5  # the next resume builds with it
    assert Trainer.resume(tmp_path).algorithm.config.lr == 0.5


@pytest.mark.parametrize("largest", [2**63 - 1])
def test_the_run_file_of_any_legal_run_is_legal(tmp_path, largest):
    config = PPOConfig(**SMALL, seed=largest, seqs_per_state_reset=largest)
    stops = [HitsUpperBound("env/steps", largest + 1), Plateau("losses/total", patience=largest)]
    trainer = Trainer(config.build(CartPole), tracker=MemoryTracker(), checkpoints=Checkpoints(tmp_path, keep=largest))
    trainer.run(max_steps=1, steps_per_eval=largest, stop_conditions=stops, progress="none")
    file = tmp_path / "run.yaml"
    file.write_text(trainer.tracker.texts["run.yaml"])
    spec = RunSpec.from_file(file)
    assert not spec.diff(trainer.record.spec)
    assert spec.algorithm.make_config() == config


def test_what_no_file_can_hold_says_why_in_its_place():
    model = MLPModel(CartPole(1).single_observation_space, 2)
    algorithm = PPOConfig(num_envs=2, device="cpu", model=model).build(CartPole(2))
    trainer = Trainer(algorithm, tracker=MemoryTracker(), eval_env=CartPole)
    trainer.run(max_steps=1, stop_conditions=[lambda row: False], progress="none")
    spec = trainer.record.spec
    instance = "the environment was given as an instance"
    lost = "`model` is MLPModel, which cannot be saved to a file"
    assert spec.to_plain()["env"] == {"$unwritable": instance}
    assert spec.algorithm.algorithm_config["model"] == {"$unwritable": lost}
    assert [*unwritable_in(spec.to_plain())][:2] == [instance, lost]
    assert len([*unwritable_in(spec.to_plain())]) == 4  # the evaluation environment and the condition too
    assert problems_of(spec, trainer.record.resolved)[:2] == [lost, instance]
