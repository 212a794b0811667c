"""A policy on a grid of physics: a row a cell, three metrics and one artifact; each cell has the value of its own."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
import pandas
import pytest
import torch
from tests.probes import Probe
from tests.trainers import helpers

from rl8x import BCConfig, MLflowTracker, NullTracker, PPOConfig, Trainer
from rl8x.envs import CartPole, Parameter
from rl8x.envs.cells import make_cells
from rl8x.replay.dataset import Dataset
from rl8x.trainers import plot_grid
from rl8x.trainers.grid import CellEvaluator, seed_of


class Product(Probe):
    """Three steps with a reward of a * b + c each: the return is 3 * (a * b + c)."""

    terminates = False
    default_time_limit = 3
    parameters: ClassVar = {
        "a": Parameter(default=1.0, low=-9.0, high=9.0, unit="m", description="a factor"),
        "b": Parameter(default=2.0, low=-9.0, high=9.0, unit="", description="a factor"),
        "c": Parameter(default=0.5, low=-9.0, high=9.0, unit="s", description="a summand"),
    }

    def transition(self, state, actions, parameters, noise):
        rewards = parameters["a"] * parameters["b"] + parameters["c"]
        return dict(state), rewards, torch.zeros(self.num_envs, dtype=torch.bool)


class Few(Product):
    max_num_envs = 7


class Named(Product):
    parameters: ClassVar = Product.parameters | {"lengths": Parameter(default=1.0, low=0.0, high=2.0)}


class Endless(Product):
    default_time_limit = None


def make(env=Product, **options):
    return helpers.make(env, trainer={"num_eval_envs": 4, "checkpoints": False, **options})


def test_each_cell_has_the_return_of_its_parameters_and_of_an_evaluation_of_its_own():
    trainer = make(env=Product)
    frame = trainer.evaluate_grid({"a": [1, 2], "b": np.array([0.0, 3.0])}, episodes=5)
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == ["a", "b", "episodes", "returns", "returns_std", "returns_min", "lengths"]
    # 3 * (a * b + 0.5), c having its default
    assert frame[["a", "b", "returns"]].values.tolist() == [[1, 0, 1.5], [1, 3, 10.5], [2, 0, 1.5], [2, 3, 19.5]]
    assert (frame["returns_min"] == frame["returns"]).all()
    assert set(frame["returns_std"]) == {0.0}
    assert set(frame["episodes"]) == {5}
    assert set(frame["lengths"]) == {3.0}
    for _, cell in frame.iterrows():
        stats = trainer.eval(env_config={"a": cell["a"], "b": cell["b"]})
        assert stats["eval/returns/mean"] == cell["returns"]


@pytest.mark.parametrize(("name", "called"), [(None, "a b"), ("my grid", "my grid")])
def test_the_run_gets_three_metrics_and_one_artifact(name, called):
    trainer, grid = make(), {"a": {"linspace": [-1, 1, 3]}, "b": [1, 2, 3]}
    trainer.step()
    before = {metric for row in trainer.tracker.rows for metric in row.metrics}
    trainer.evaluate_grid(grid, episodes=2, name=name)
    after = {metric for row in trainer.tracker.rows for metric in row.metrics}
    assert after - before == {f"grid/{called}/{value}" for value in ("mean", "worst_cell", "best_cell")}
    # a * b from -3 to 3, its mean 0
    assert trainer.tracker.rows[-1].metrics == {
        f"grid/{called}/mean": pytest.approx(1.5),
        f"grid/{called}/worst_cell": -7.5,
        f"grid/{called}/best_cell": 10.5,
    }
    assert trainer.tracker.rows[-1].step == trainer.state["env/steps"]
    assert trainer.tracker.artifacts == [f"grids/{called}/step-00000001"]


def test_mlflow_has_the_table_and_the_figure(mlruns, mlflow_client):
    trainer = make(tracker=MLflowTracker())
    frame = trainer.evaluate_grid({"a": [1, 2], "b": [0, 3]}, episodes=1)
    trainer.close()
    run_id = trainer.tracker.run_id
    folder = "grids/a b/step-00000000"
    expected = [f"{folder}/cells.csv", f"{folder}/returns.png"]
    assert [file.path for file in mlflow_client.list_artifacts(run_id, folder)] == expected
    kept = pandas.read_csv(mlflow_client.download_artifacts(run_id, f"{folder}/cells.csv"))
    pandas.testing.assert_frame_equal(kept, frame, check_dtype=False)
    metrics = mlflow_client.get_run(run_id).data.metrics
    assert metrics["grid/a b/best_cell"] == frame["returns"].max()


class Other(Product):
    """The return is 3 * (a + c)."""

    def transition(self, state, actions, parameters, noise):
        return dict(state), parameters["a"] + parameters["c"], torch.zeros(self.num_envs, dtype=torch.bool)


def test_a_grid_is_played_where_evaluations_are():
    assert make(Product, eval_env=Other).evaluate_grid({"a": [4]}, episodes=1)["returns"].tolist() == [13.5]
    assert make(Product, eval_env=False).evaluate_grid({"a": [4]}, episodes=1)["returns"].tolist() == [25.5]
    obs, zeros = torch.zeros(8, 1), torch.zeros(8)
    rows = {"obs": obs, "next_obs": obs, "actions": zeros.long(), "rewards": zeros, "terminated": zeros + 1}
    spaces = {"observation_space": Product.single_observation_space, "action_space": Product.single_action_space}
    data = Dataset.from_tensors(rows | {"truncated": zeros}, **spaces)
    config = BCConfig(device="cpu", seed=0, batch_size=4, model_config={"hidden_sizes": [8]})
    student = config.build(dataset=data)
    options = {"tracker": NullTracker(), "checkpoints": False}
    frame = Trainer(student, eval_env=Other, **options).evaluate_grid({"a": [4]}, episodes=1)
    assert frame["returns"].tolist() == [13.5]
    with pytest.raises(RuntimeError, match=r"nothing to evaluate in: .* Give the trainer an `eval_env`"):
        Trainer(student, **options).evaluate_grid({"a": [4]})


HUGE = {"linspace": [-9, 9, 1000]}


@pytest.mark.parametrize(
    ("env", "grid", "options", "message"),
    [
        (Product, {"aa": [1]}, {}, r"^Product: grid has no parameter 'aa'\. Did you mean 'a'\? Legal are a in"),
        (Product, {"a": [1, 10]}, {}, r"^Product: grid\['a'\] must be in \[-9, 9\] m; got 10"),
        (Product, {"a": np.zeros((2, 2))}, {}, r"^grid\['a'\] must have finite numbers; got \[0.0, 0.0\]"),
        (Product, {"a": {"uniform": [0, 1]}}, {}, r"^`grid` draws 'a': list its values"),
        (Product, {}, {}, r"^`grid` must give values to one parameter"),
        (Named, {"lengths": [1]}, {}, r"^`grid`: 'lengths' is a column of the results \(episodes, .*: give the"),
        (Product, {"a": HUGE, "b": HUGE}, {}, r"^`grid` has 1,000,000 cells; at most"),
        (Product, {"a": [1, 2]}, {"episodes": 0}, "`episodes` must be a whole number, at least 1; got 0"),
        (Product, {"a": [1, 2]}, {"seed": -1}, "`seed` must be a whole number, at least 0; got -1"),
        (Product, {"a": [1, 2]}, {"seed": None}, "`seed` must be a whole number, at least 0; got None"),
        (Few, {"a": [1, 2]}, {"episodes": 8}, "`episodes` is 8, .* Few has at most 7 copies"),
        (Endless, {"a": [1, 2]}, {}, "episodes of Endless never end"),
        (Product(4), {"a": [1, 2]}, {}, "the Product that was given cannot be made again .*: give a class, a name"),
        (Product, {"a": [1, 2]}, {"name": "a/"}, "name of an evaluation must be"),
    ],
)
def test_what_is_no_grid_or_cannot_be_played_ends_in_one_line(env, grid, options, message):
    trainer = make(env)
    with pytest.raises(ValueError, match=message) as error:
        trainer.evaluate_grid(grid, **options)
    assert "\n" not in str(error.value)
    assert trainer.tracker.rows == trainer.tracker.artifacts == []


def labels_of(figure):
    panel = figure.axes[0]
    return panel.get_xlabel(), panel.get_ylabel()


def test_one_parameter_is_a_curve_two_are_a_heat_map_and_of_three_it_has_the_two_that_explain_most():
    trainer = make()
    curve = plot_grid(trainer.evaluate_grid({"a": [1, 2, 4], "b": 2}, episodes=1))
    assert labels_of(curve) == ("a [m]", "mean return")
    assert curve.axes[0].lines[0].get_xydata().tolist() == [[1, 7.5], [2, 13.5], [4, 25.5]]
    for grid, labels, means, title in (
        # 3 * (2 a + c), and 3 * (a * b + 0.5), the mean over c
        ({"a": [1, 2, 4], "c": [0, 1]}, ("a [m]", "c [s]"), [[6, 12, 24], [9, 15, 27]], "mean return"),
        (
            {"a": [1, 9], "b": [1, 9], "c": [0, 1]},
            *(("a [m]", "b"), [[4.5, 28.5], [28.5, 244.5]], "mean return, averaged over c"),
        ),
    ):
        figure = plot_grid(trainer.evaluate_grid(grid, episodes=1))
        assert labels_of(figure) == labels
        assert figure.axes[0].collections[0].get_array().tolist() == means
        assert figure.axes[1].get_ylabel() == title
    # A cell whose return is not finite is missing from the figure, alone.
    frame = trainer.evaluate_grid({"a": [1, 2, 4], "c": [0, 1]}, episodes=1)
    for bad in (math.nan, math.inf, -math.inf):
        frame.loc[5, "returns"] = bad
        assert plot_grid(frame).axes[0].collections[0].get_array().tolist() == [[6, 12, 24], [9, 15, None]]
        one = plot_grid(frame[frame["c"] == 1]).axes[0]
        assert one.lines[0].get_xydata().tolist() == [[1, 9], [2, 15]]
    frame["returns"] = math.nan
    for empty in (frame, frame[frame["c"] == 1], trainer.evaluate_grid({"a": 1}, episodes=1)):
        with pytest.raises(
            ValueError, match=r"nothing to draw: give one parameter of the grid several values with finite"
        ):
            plot_grid(empty)


# -- all cells at once give what each gives by itself, whichever way the copies are put together

CELL_SIZES = {"num_envs": 16, "horizon": 16, "seed": 0, "device": "cpu", "model_config": {"hidden_sizes": [16]}}
CELLS = make_cells({"length": [0.1, 0.5, 2.0], "gravity": [2, 20]}, None, 0)


@pytest.fixture(scope="module")
def trained():
    algorithm = PPOConfig.rl8(**CELL_SIZES).build(CartPole)
    Trainer(algorithm, tracker=NullTracker(), checkpoints=False).run(max_steps=5, progress="none")
    return algorithm


def by_hand(algorithm, cell, noise, limit=600):
    """Play one copy's first episode by the environment's own `step`: a second formulation."""
    env = CartPole(1, seed=0)
    state_noise = iter(noise)
    env.noise = lambda steps: next(state_noise).view(1, 1, -1)
    obs, _ = env.reset(config=cell)
    total = length = 0
    policy = algorithm.policy
    with torch.no_grad():
        for _ in range(limit):
            act = policy.act(obs, policy.initial_state(1), torch.zeros(1, dtype=torch.bool), None)
            obs, rewards, terminated, truncated, _ = env.step(act.actions)
            total, length = total + float(rewards), length + 1
            if bool(terminated | truncated):
                break
    return total, length


def test_returns_are_those_of_the_episodes_played_one_by_one(trained):
    measured = CellEvaluator(trained, CELLS, episodes=2, seed=7).evaluate()
    for index in range(len(measured["returns"])):
        cell = {name: float(values[index]) for name, values in CELLS.items()}
        generator = torch.Generator().manual_seed(seed_of(7, index))
        first = torch.rand((1, 2, 4), generator=generator)
        chunks = torch.cat([torch.rand((16, 2, 4), generator=generator) for _ in range(38)])
        played = [by_hand(trained, cell, [first[0, copy], *chunks[:, copy]]) for copy in range(2)]
        returns, lengths = np.array(played).T
        assert measured["returns"][index] == returns.mean()
        assert measured["lengths"][index] == lengths.mean()
        assert measured["returns_min"][index] == returns.min()
        assert measured["returns_std"][index] == pytest.approx(returns.std())


def test_a_cell_is_the_same_in_any_batch(trained):
    whole = CellEvaluator(trained, CELLS, episodes=5, seed=1).evaluate()
    pieces = CellEvaluator(trained, CELLS, episodes=5, seed=1, copies=12).evaluate()  # two cells at once
    single = CellEvaluator(trained, CELLS, episodes=5, seed=1, copies=1).evaluate()  # one
    for name in ("returns", "returns_std", "returns_min", "lengths"):
        assert (whole[name] == pieces[name]).all()
        assert (whole[name] == single[name]).all()
    fewer = {name: values[:2] for name, values in CELLS.items()}
    assert (CellEvaluator(trained, fewer, episodes=5, seed=1).evaluate()["returns"] == whole["returns"][:2]).all()
    assert (CellEvaluator(trained, CELLS, episodes=5, seed=2).evaluate()["returns"] != whole["returns"]).any()


def test_episodes_that_are_cut_off_are_told_once(trained, monkeypatch):
    monkeypatch.setattr("rl8x.rollouts.episodes.MAX_STEPS", 4)
    evaluator = CellEvaluator(trained, CELLS, episodes=2, copies=4)
    says = "12 of 12 test episodes had not ended after 4 steps; they are counted"
    with pytest.warns(UserWarning, match=says) as told:
        assert evaluator.evaluate()["lengths"].tolist() == [4.0] * 6
    assert len(told) == 1


class Six(CartPole):
    max_num_envs = 6


def test_no_more_copies_are_made_than_an_environment_takes(trained):
    made = []

    def factory(num_envs, **kwargs):
        made.append(num_envs)
        return Six(num_envs, **kwargs)

    few = CellEvaluator(trained, CELLS, episodes=4, seed=1, env_factory=factory).evaluate()
    assert set(made) == {1, 4}  # one cell at a time
    assert (few["returns"] == CellEvaluator(trained, CELLS, episodes=4, seed=1).evaluate()["returns"]).all()


def test_an_instance_alone_is_refused():
    with pytest.raises(ValueError, match="from a class or a name"):
        CellEvaluator(PPOConfig(**CELL_SIZES).build(CartPole(16)), CELLS, episodes=1)


def test_the_training_notices_nothing(trained):
    def run(evaluates):
        algorithm = PPOConfig(**CELL_SIZES).build(CartPole)
        trainer = Trainer(algorithm, tracker=NullTracker(), checkpoints=False)
        for _ in range(2):
            trainer.step()
            if evaluates:
                CellEvaluator(algorithm, CELLS, episodes=2).evaluate()
        return torch.cat([value.reshape(-1) for value in algorithm.policy.state_dict().values()])

    assert torch.equal(run(False), run(True))
