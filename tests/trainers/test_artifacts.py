"""What a run shows of its policy: films, models, and curves of what the tracker has."""

import io

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.spaces import Box
from PIL import Image
from tests.probes import ActionMatches
from tests.trainers import helpers
from tests.trainers.helpers import rows, run

from rl8x import Confirmed, HitsUpperBound, MemoryTracker, MLflowTracker, NullTracker, PPOConfig, Trainer
from rl8x.algorithms import BCConfig
from rl8x.checkpoint import Checkpoints, listed, read
from rl8x.envs import AlgoTrading, CartPole, GymnasiumEnv, Pendulum
from rl8x.models import Model
from rl8x.randomization import Uniform


def make(env=CartPole, *, trainer=None, **options):
    return helpers.make(env, trainer={"checkpoints": False, "num_eval_envs": 4} | (trainer or {}), **options)


def test_every_second_evaluation_is_filmed_and_the_training_notices_nothing():
    options = {"steps_per_eval": 1, "max_steps": 5, "env_config": {"length": Uniform(0.3, 0.6)}}
    filmed, plain = make(), make()
    run(filmed, evals_per_film=2, **options)
    run(plain, **options)
    films = [name for name in filmed.tracker.artifacts if name.startswith("films/")]
    assert films == ["films/step-00000002.gif", "films/step-00000004.gif"]
    assert rows(filmed.tracker) == rows(plain.tracker)
    assert filmed.tracker.params["run.evals_per_film"] == 2


def test_a_film_has_the_physics_of_the_evaluations_or_those_asked_for(tmp_path):
    trainer = make()
    run(trainer, steps_per_eval=1, eval_env_config={"length": 0.7}, max_steps=1)
    made = trainer.play(max_steps=2)
    assert (made.suffix, made.returns.shape) == (".gif", (1, 1))
    captioned = Image.open(io.BytesIO(made.data))
    assert captioned.size == (480, 320 + 20 + 20)  # the parameter above, steps and return below
    assert Image.open(io.BytesIO(make().play(max_steps=2).data)).size == (480, 320 + 20)
    path = tmp_path / "wide" / "a.gif"
    wide = trainer.play(path, env_config={"length": [0.2, 0.5, 1.0]}, max_steps=2, episodes=2)
    assert wide.returns.tolist() == [[2.0] * 3] * 2
    assert path.read_bytes() == wide.data
    for values in (torch.tensor([0.2, 0.5, 1.0]), np.array([0.2, 0.5, 1.0]), (0.2, 0.5, 1.0)):
        assert trainer.play(env_config={"length": values}, max_steps=2).lengths.tolist() == [[2, 2, 2]]
    with pytest.raises(TypeError, match=r"env_config must be a mapping from parameter names to values; got \[0.2\]"):
        trainer.play(env_config=[0.2])
    with pytest.raises(ValueError, match="no parameter 'lenght'"):
        trainer.play(env_config={"lenght": 1.0})
    with pytest.raises(ValueError, match="num_envs must be at least 1; got 0"):
        trainer.play(copies=0)


def test_an_instance_is_copied_and_as_many_copies_are_seen_as_are_asked_for():
    env = CartPole(4, seed=0)
    trainer = make(env)
    made = trainer.play(copies=2, max_steps=3)
    assert made.returns.shape == (1, 2)
    made = trainer.play(env_config={"length": [0.2, 1.0]}, max_steps=3)
    assert made.returns.shape == (1, 2)
    assert env.carry is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("CartPole-v1", None),
        (CartPoleEnv, None),  # takes a render_mode
        (lambda: gymnasium.make("CartPole-v1"), "GymnasiumEnv renders no frames. Make it with render_mode='rgb_array'"),
        (lambda: gymnasium.make("CartPole-v1", render_mode="rgb_array"), None),
    ],
)
def test_a_simulator_that_renders_nothing_is_made_again_to_be_filmed(source, message):
    env = GymnasiumEnv(source, 4, seed=0)
    trainer = make(env)
    if message is not None:
        with pytest.raises(ValueError, match=message):
            trainer.play(max_steps=2)
        return
    pytest.importorskip("pygame", reason="pygame is not installed, by which Gymnasium draws CartPole")
    assert trainer.play(copies=2, max_steps=2).lengths.tolist() == [[2, 2]]
    assert env.render_mode in (None, "rgb_array")


@pytest.mark.parametrize("env", [AlgoTrading, Pendulum])
def test_masks_memories_and_normalisers_play(env):
    memory = {"model": "lstm", "model_config": {"hidden_size": 8}, "seq_len": 4}
    trainer = make(env, normalize_observations=True, **memory)
    trainer.step()
    assert trainer.play(max_steps=3).lengths.tolist() == [[3]]


def test_an_algorithm_without_an_environment_plays_in_that_of_its_evaluations(tmp_path):
    from rl8x.replay.recording import record

    record(make().algorithm.policy, CartPole(2, seed=0), 40).dataset.save(tmp_path / "data")
    config = BCConfig(
        dataset=str(tmp_path / "data"), device="cpu", seed=0, batch_size=4, model_config={"hidden_sizes": [8]}
    )
    trainer = Trainer(config.build(), tracker=NullTracker(), checkpoints=False, eval_env="CartPole", num_eval_envs=3)
    assert trainer.play(max_steps=2).returns.shape == (1, 1)
    alone = Trainer(config.build(), tracker=NullTracker(), checkpoints=False)
    with pytest.raises(ValueError, match="there is nothing to film: the algorithm trains without an environment"):
        alone.play()


CONFIG = {"num_envs": 8, "horizon": 8, "device": "cpu", "seed": 0, "execution": "eager", "lr": 0.05}
METRIC = "eval/returns/mean"


def patient():
    """A tracker that waits for all to arrive, on a busy machine too."""
    return MLflowTracker(finish_timeout_s=300)


def trained(tracker, **options):
    config = PPOConfig(**CONFIG, model_config={"hidden_sizes": [8]}, normalize_observations=True)
    trainer = Trainer(config.build(ActionMatches), tracker=tracker, num_eval_envs=16, **options)
    trainer.run(max_steps=4, steps_per_eval=1, progress="none")
    return trainer


def logged_policies(client):
    """Return the policies that MLflow has, with their metrics and steps, by the models' names."""
    from rl8x.tracking.artifacts import _load_pyfunc

    experiment = client.get_experiment_by_name("rl8x").experiment_id
    found = {}
    for model in client.search_logged_models([experiment]):
        folder = model.artifact_location.removeprefix("file://")
        policy = _load_pyfunc(f"{folder}/data/policy.safetensors").policy
        found[model.name] = policy, {each.key: each.value for each in model.metrics}, {e.step for e in model.metrics}
    return found


def test_a_run_ends_with_its_last_and_best_policy_as_models(mlflow_client):
    checkpoints = Checkpoints(best=METRIC, mode="min", keep=1)  # untrained is worst, so that the best is an early one
    trainer = trained(patient(), log_models=True, checkpoints=checkpoints)
    found = logged_policies(mlflow_client)
    assert set(found) == {"last", "best"}
    run_id = trainer.tracker.run_id
    history = {point.step: point.value for point in mlflow_client.get_metric_history(run_id, METRIC)}
    assert len(history) == len(mlflow_client.get_metric_history(run_id, METRIC)) == 4
    obs = np.linspace(-1, 1, 33, dtype=np.float32)[:, None]
    best_step = min(history, key=lambda step: (history[step], step))
    for name, step in (("last", 4 * 64), ("best", best_step)):
        _, metrics, steps = found[name]
        assert (metrics[METRIC], steps) == (history[step], {step})
        assert {"episodes/returns/mean", "returns/mean"} <= set(metrics)
    last = trainer.algorithm.policy
    assert np.array_equal(found["last"][0].decide(obs).actions, last.decide(obs).actions)
    states = [read(path).state["trainer"]["algorithm"]["policy"] for path in listed(trainer.checkpoints.directory)]
    weights = found["best"][0].state_dict()
    assert any(all(torch.equal(state[name], weights[name]) for name in weights) for state in states)
    if best_step != 4 * 64:
        assert not torch.equal(weights["model.actor.0.weight"], found["last"][0].state_dict()["model.actor.0.weight"])
    # A resumed run has models of its own.
    run(Trainer.resume(trainer.checkpoints.directory, tracker=patient()), max_steps=6)
    experiment = mlflow_client.get_experiment_by_name("rl8x").experiment_id
    models = [model for model in mlflow_client.search_logged_models([experiment]) if model.name == "last"]
    assert sorted(int(model.tags["rl8x.step"]) for model in models) == [4 * 64, 6 * 64]


def test_the_best_model_has_the_evaluation_of_a_condition_that_made_it_the_best(tmp_path):
    config = PPOConfig(**CONFIG, model_config={"hidden_sizes": [8]})
    tracker, checkpoints = MemoryTracker(), Checkpoints(tmp_path, best=METRIC)
    trainer = Trainer(config.build(ActionMatches), tracker=tracker, checkpoints=checkpoints, log_models=True)
    asked = Confirmed(HitsUpperBound("episodes/returns/mean", -1.0), by=HitsUpperBound(METRIC, 2.0))
    trainer.run(max_steps=4, stop_conditions=[asked], progress="none")
    history = dict(tracker.history(METRIC))
    best = max(history, key=lambda step: (history[step], -step))
    about = tracker.models["best"]
    assert (about["step"], about["metrics"][METRIC]) == (best, history[best])


REFUSED = [
    ({"register": "team/match"}, "register: MLflow's models have names without '/' and ':'; got 'team/match'"),
    ({"alias": "champion"}, "alias names a version of a registered model: give register too"),
    ({"register": "match", "alias": "v2"}, "alias: .* not 'latest' or 'v1'; got 'v2'"),
    ({"name": "best/1.5"}, "a model has a name without any of .*; got 'best/1.5'"),
]


def test_a_model_is_logged_when_it_is_asked_for_and_names_that_mlflow_refuses_are_refused_there(mlflow_client):
    trainer = trained(patient(), checkpoints=False)
    for names, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            trainer.log_model(**names)
    trainer.log_model("champion of today", register="match", alias="champion")
    trainer.close()
    version = mlflow_client.get_model_version_by_alias("match", "champion")
    assert version.run_id == trainer.tracker.run_id
    assert mlflow_client.get_run(version.run_id).info.status == "FINISHED"
    assert set(logged_policies(mlflow_client)) == {"champion of today"}


class Sums(Model):
    """A model that is given as an instance."""

    def __init__(self):
        super().__init__(Box(-1.0, 1.0, (1,), np.float32), 2)
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, obs, state, starts):
        return obs * self.weight, obs.sum(-1), state


def test_what_cannot_be_logged_is_said_before_training():
    algorithm = PPOConfig(**CONFIG, model=Sums()).build(ActionMatches)
    with pytest.raises(TypeError, match="`model` of this policy cannot be saved to a file"):
        Trainer(algorithm, tracker=MemoryTracker(), log_models=True)

    class Deaf(MemoryTracker):
        log_model = property()

    with pytest.raises(TypeError, match="Deaf keeps no models"):
        Trainer(PPOConfig(**CONFIG).build(ActionMatches), tracker=Deaf(), log_models=True)


def test_a_killed_run_has_models_too_and_a_failed_one_has_none():
    def interrupt(trainer, row):
        raise error

    for error, names in ((KeyboardInterrupt(), ["last"]), (RuntimeError("mine"), [])):
        tracker = MemoryTracker()
        with pytest.raises(type(error)):
            trained(tracker, log_models=True, callbacks=[interrupt], checkpoints=False)
        assert list(tracker.models) == names


def test_a_model_has_the_metrics_of_its_step_and_none_of_an_earlier_evaluation():
    def milestone(trainer, stats):
        trainer.log_model(f"after {stats['algorithm/steps']:.0f}")

    tracker = MemoryTracker()
    trainer = Trainer(PPOConfig(**CONFIG).build(ActionMatches), tracker=tracker, callbacks=[milestone], log_models=True)
    trainer.run(max_steps=4, steps_per_eval=3, progress="none")
    assert list(tracker.models) == ["after 1", "after 2", "after 3", "after 4", "last"]
    for name in ("episodes/returns/mean", "returns/mean", METRIC):
        history = dict(tracker.history(name))
        for about in tracker.models.values():
            assert about["metrics"].get(name) == history.get(about["step"])


def plotted(tracker, env=CartPole, **options):
    trainer = make(env, trainer={"tracker": tracker, "num_eval_envs": 2}, horizon=32)
    run(trainer, max_steps=4, **options)
    return trainer


def curves(panel):
    return {line.get_label(): line.get_xydata().tolist() for line in panel.get_lines()}


@pytest.mark.parametrize("env", [CartPole, AlgoTrading], ids=["evaluated in its own", "in the training's"])
def test_returns_of_training_and_evaluations_are_in_one_panel(env):
    tracker = MemoryTracker()
    figure = plotted(tracker, env, steps_per_eval=2).plot()
    (panel,) = figure.axes
    drawn = curves(panel)
    assert list(drawn) == ["episodes of the training", "evaluations"]
    for label, name in zip(drawn, ("episodes/returns/mean", "eval/returns/mean"), strict=True):
        finite = [[step, value] for step, value in tracker.history(name) if np.isfinite(value)]
        assert np.array(drawn[label]) == pytest.approx(np.array(finite))
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("transitions of training", "mean return")
    image = Image.open(io.BytesIO(figure._repr_png_()))
    assert image.size == (720, 390)


def test_metrics_that_are_named_have_a_panel_each_and_mlflow_is_read(mlruns):
    trainer = plotted(MLflowTracker())
    figure = trainer.plot("losses/vf", "losses/policy", "rewards/mean", "monitors/kl_div")
    labels = [panel.get_ylabel() for panel in figure.axes if panel.get_visible()]
    assert labels == ["losses/vf", "losses/policy", "rewards/mean", "monitors/kl_div"]
    ((steps),) = curves(figure.axes[0]).values()
    assert [step for step, _ in steps] == [128, 256, 384, 512]


def test_before_an_episode_has_ended_horizons_are_drawn():
    trainer = make(horizon=2)  # no pole falls in four steps
    run(trainer, max_steps=2)
    (panel,) = trainer.plot().axes
    assert list(curves(panel)) == ["horizons of the training"]


def test_what_cannot_be_drawn_is_said():
    trainer = plotted(MemoryTracker())
    with pytest.raises(ValueError, match=r"no metric 'losses/fv'. Nearest: losses/vf"):
        trainer.plot("losses/fv")
    with pytest.raises(ValueError, match=r"no metric 'eval/returns/mean'. It has no value yet"):
        trainer.plot("eval/returns/mean")
    with pytest.raises(ValueError, match="a NullTracker keeps no metrics to read back"):
        plotted(NullTracker()).plot()
    with pytest.raises(ValueError, match="has logged no returns yet"):
        make().plot()
