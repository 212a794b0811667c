"""Learning from a data set through the same trainer: the clock, the rows, going on, and what is refused."""

import functools
import json

import gymnasium
import numpy as np
import pytest
import torch
from tests.probes import Steps

from rl8x import HitsUpperBound, NullTracker, Trainer, keys, load_algorithm
from rl8x.algorithms import (
    BCConfig,
    DQNConfig,
    IQLConfig,
    SACConfig,
    TD3Config,
)
from rl8x.checkpoint import CheckpointError, Checkpoints
from rl8x.cli.main import main
from rl8x.envs import CartPole, GymnasiumEnv, Pendulum
from rl8x.policy import Policy
from rl8x.replay.dataset import Dataset
from rl8x.spaces import space_from_plain, space_to_plain
from rl8x.tracking import MemoryTracker

SMALL = {"seed": 1, "device": "cpu", "batch_size": 16, "updates_per_step": 4, "model_config": {"hidden_sizes": [8]}}
CONFIGS = {"bc": BCConfig, "iql": IQLConfig, "dqn": DQNConfig, "sac": SACConfig, "td3": TD3Config}
EXTRA = {
    "iql": {"critic_hidden_sizes": [8]},
    "dqn": {
        "target_interval": 3,
        "cql_coeff": 0.1,
        "model_config": {"hidden_sizes": [8], "layer_norm": False},
    },
    "sac": {"critic_hidden_sizes": [8], "cql_coeff": 0.5, "cql_samples": 2},
    "td3": {"critic_hidden_sizes": [8], "actor_bc_coeff": 0.1, "critic_bc_coeff": 0.1},
}
ENVS = {"sac": Pendulum, "td3": Pendulum}


def dataset(env_class=CartPole, size=120, seed=3):
    """Transitions of no environment, in episodes of 10 of which every other one terminates."""
    env, generator = env_class(1), torch.Generator().manual_seed(seed)
    obs = torch.randn(size, *env.single_observation_space.shape, generator=generator)
    ends = torch.arange(1, size + 1) % 10 == 0
    terminated = ends & (torch.arange(size) % 20 < 10)
    discrete = isinstance(env.single_action_space, gymnasium.spaces.Discrete)
    box = 4 * torch.rand(size, 1, generator=generator) - 2
    next_obs = torch.where(ends.unsqueeze(1), torch.randn(obs.shape, generator=generator), obs.roll(-1, 0))
    return Dataset.from_tensors(
        {
            "obs": obs,
            "actions": torch.randint(2, (size,), generator=generator) if discrete else box,
            "rewards": torch.rand(size, generator=generator),
            "terminated": terminated,
            "truncated": ends & ~terminated,
            "next_obs": next_obs,
        },
        observation_space=env.single_observation_space,
        action_space=env.single_action_space,
    )


def build(name="bc", data=None, **options):
    config = CONFIGS[name](**{**SMALL, "execution": "eager", **EXTRA.get(name, {}), **options})
    return config.build(dataset=dataset(ENVS.get(name, CartPole)) if data is None else data)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_goes_by_its_updates(name):
    algorithm, env = build(name, lr_schedule=[[0, 1e-3], [8, 1e-4]]), ENVS.get(name, CartPole)
    trainer = Trainer(algorithm, tracker=MemoryTracker())
    stats = trainer.run(stop_conditions=[HitsUpperBound(keys.UPDATES, 20)], max_steps=50, progress="none")
    done = {"algorithm/steps": 5, "algorithm/updates": 20}
    assert algorithm.counters == dict.fromkeys(keys.COUNTERS, 0) | done
    clocks, rates = zip(*trainer.tracker.history("coefficients/lr"), strict=True)
    assert (clocks, rates) == ((4, 8, 12, 16, 20), pytest.approx((1e-3, 1e-3, 1e-4, 1e-4, 1e-4)))
    assert set(algorithm.update_metrics) <= stats.keys() <= trainer.metric_names
    assert not [
        each for each in trainer.metric_names if each.startswith(("returns/", "rewards/", "episodes/", "eval/"))
    ]
    params = trainer.tracker.params
    assert (params["dataset.transitions"], params["dataset.episodes"], params["batch_size"]) == (120, 12, 16)
    assert not params.keys() & {
        "num_envs",
        "horizon",
        "buffer_size",
        "warmup_steps",
        "updates_per_sample",
        "prioritized",
    }
    assert params["dataset.digest"] == dataset(env).digest != dataset(env, seed=4).digest
    assert not [each for each in params if each.startswith(("env", "eval", "num_eval"))]
    assert trainer.tracker.description.startswith("Stopped after 5 steps, 20 updates: ")


def test_rows_are_an_algorithms_own():
    data = dataset()
    algorithm = build("dqn", data, n_step=3, gamma=0.5)
    rows = algorithm.replay.gather(torch.arange(data.size))
    assert rows["discounts"][[0, 8, 9, 18, 19]].tolist() == [0.125, 0.0, 0.0, 0.25, 0.5]
    build("dqn", data, n_step=1, gamma=0.9)
    assert torch.equal(algorithm.replay.gather(torch.arange(data.size))["returns"], rows["returns"])


@pytest.mark.parametrize("name", ["bc", "td3"])
def test_what_was_learned_acts_without_the_data_set(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = ENVS.get(name, CartPole)
    dataset(env).save("data")
    algorithm = build(name, "data", normalize_observations=True)
    trainer = Trainer(algorithm, tracker=NullTracker(), checkpoints="run")
    trainer.step()
    trainer.save()
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    assert main(["export", "run", "--output", "policy.safetensors"]) == 0
    assert main(["collect", "run", "--env", env.__name__, "--transitions", "9", "--output", "recorded"]) == 0
    obs = torch.randn(5, *env(1).single_observation_space.shape)
    expected = algorithm.policy.decide(obs).actions
    np.testing.assert_array_equal(Policy.load("policy.safetensors").decide(obs).actions, expected)
    np.testing.assert_array_equal(load_algorithm("run").policy.decide(obs).actions, expected)
    with pytest.raises(ValueError, match="no data set in 'data'"):
        Trainer.resume("run", tracker=NullTracker())


def test_what_was_learned_from_tensors_in_memory_acts_too(tmp_path):
    trainer = Trainer(build("bc", dataset()), tracker=NullTracker(), checkpoints=tmp_path)
    trainer.step()
    trainer.save()
    obs = torch.randn(5, 4)
    expected = trainer.algorithm.policy.decide(obs).actions
    np.testing.assert_array_equal(load_algorithm(tmp_path).policy.decide(obs).actions, expected)
    with pytest.raises(CheckpointError, match="`dataset` is Dataset, which cannot be saved to a file"):
        Trainer.resume(tmp_path, tracker=NullTracker())


def test_another_data_set_under_the_same_path_is_refused(tmp_path):
    dataset().save(tmp_path / "data")
    first = Trainer(
        build("bc", str(tmp_path / "data")), tracker=NullTracker(), checkpoints=Checkpoints(tmp_path / "run")
    )
    first.step()
    first.save()
    (tmp_path / "data").rename(tmp_path / "before")
    dataset(seed=4).save(tmp_path / "data")
    with pytest.raises(ValueError, match=r"learned from a data set of the digest .* Give the same transitions"):
        Trainer.resume(tmp_path / "run", tracker=NullTracker()).step()


def test_observations_are_normalised_by_the_moments_of_the_data():
    data = dataset()
    algorithm = build("bc", data, normalize_observations=True)
    (moments,) = algorithm.policy.obs_moments.values()
    torch.testing.assert_close(moments.mean.float(), data.transitions["obs"].mean(0))
    assert moments.count.item() == 120


class Doubles(Steps):
    """Its observations are float64, as those of MuJoCo's tasks, and so are those that Minari has of them."""

    observation_space = gymnasium.spaces.Dict({"x": gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float64)})

    def observation(self):
        return {"x": np.zeros(4)}


def test_what_was_recorded_in_float64_is_evaluated_in_the_simulator():
    rows, env = dataset().transitions, functools.partial(GymnasiumEnv, Doubles, time_limit=3)
    renamed = {f"{name}/x" if "obs" in name else name: tensor.double() for name, tensor in rows.items()}
    renamed["actions"] = rows["actions"]
    data = Dataset(renamed, observation_space=Doubles.observation_space, action_space=Doubles.action_space)
    trainer = Trainer(build("bc", data), tracker=NullTracker(), eval_env=env, num_eval_envs=2)
    trainer.step()
    assert trainer.eval()["eval/returns/mean"] == 3.0


def test_what_does_not_fit_is_refused():
    data = dataset()
    unknown = Dataset(data.transitions)
    with pytest.raises(ValueError, match="does not say what its spaces are"):
        build("bc", unknown)
    with pytest.raises(ValueError, match="BC learns from recorded transitions: give `dataset`"):
        BCConfig().build()
    with pytest.raises(TypeError, match=r"without an environment; got .* give it as `eval_env`"):
        BCConfig(dataset=data).build("CartPole")
    with pytest.raises(TypeError, match="without an environment"):
        DQNConfig().build(CartPole, dataset=data)
    with pytest.raises(ValueError, match="give `env`, such as CartPole, or `dataset`"):
        DQNConfig().build()
    for wrong in ({"prioritized": True}, {"num_envs": 4}, {"buffer_path": "here"}):
        (given,) = wrong
        with pytest.raises(ValueError, match=rf"`{given}` is about an environment or a replay: leave it out with a"):
            build("dqn", **wrong)
    with pytest.raises(ValueError, match=r"`updates_per_step` needs a data set: .*; got 7\."):
        DQNConfig(updates_per_step=7).build(CartPole)
    with pytest.raises(ValueError, match="must have the training environment's spaces"):
        Trainer(build(), tracker=NullTracker(), eval_env="Pendulum")
    with pytest.raises(ValueError, match="DQN needs a Discrete action space"):
        build("dqn", dataset(Pendulum))
    with pytest.raises(ValueError, match="no data set in 'nothing'"):
        BCConfig(dataset="nothing").build()
    with pytest.raises(TypeError, match="`dataset` must be a path"):
        BCConfig(dataset=3)
    with pytest.raises(ValueError, match="Unknown metric 'returns/mean'"):
        Trainer(build(), tracker=NullTracker()).run(max_steps=1, stop_conditions=[HitsUpperBound("returns/mean", 1)])


# -- spaces of a data set


BOX, IMAGE = CartPole.single_observation_space, gymnasium.spaces.Box(0, 255, (3, 8, 8), dtype=np.uint8)
PARTS = {"b": gymnasium.spaces.Discrete(2), "a": gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(3)])}
SPACES = [
    *(BOX, IMAGE, gymnasium.spaces.Discrete(5, start=-2), gymnasium.spaces.MultiDiscrete([3, 4], start=[1, -1])),
    *(gymnasium.spaces.MultiBinary([2, 3]), gymnasium.spaces.MultiBinary(2), gymnasium.spaces.Dict(PARTS)),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_spaces_come_back_equal_from_json(space):
    back = space_from_plain(json.loads(json.dumps(space_to_plain(space))))
    assert back == space
    if isinstance(space, gymnasium.spaces.Dict):
        assert list(back.spaces) == list(space.spaces)


def acted(*actions):
    return torch.tensor(actions).repeat(60, 1)


@pytest.mark.parametrize(
    ("changes", "spaces", "message"),
    [
        (
            {},
            {"observation_space": Pendulum.single_observation_space},
            r"`obs` must be elements of Box\(\[3\]",
        ),
        ({}, {"observation_space": gymnasium.spaces.Dict({"x": BOX})}, "needs `obs/x`; there are obs, actions"),
        ({}, {"action_space": gymnasium.spaces.Discrete(1)}, r"`actions` must be from 0 to 0, .* got 0 to 1"),
        ({}, {"action_space": Pendulum.single_action_space}, "`actions` must be elements of Box"),
        (
            {"actions": acted([0, 1], [1, 3])},
            {"action_space": gymnasium.spaces.MultiDiscrete([2, 3])},
            "`actions` must be from 0 to 2, .* got 1 to 3",
        ),
        (
            {"actions": acted([0, 1], [5, 0])},
            {"action_space": gymnasium.spaces.MultiBinary(2)},
            "`actions` must be from 0 to 1, .* got 0 to 5",
        ),
    ],
)
def test_rows_that_are_no_elements_of_the_spaces_are_refused(changes, spaces, message):
    with pytest.raises(ValueError, match=message):
        Dataset(dataset().transitions | changes, **spaces)


def test_whole_numbers_of_any_type_become_those_of_their_spaces():
    rows, image = dataset().transitions, torch.randint(256, (120, 3, 8, 8))
    for dtype in (torch.bool, torch.uint8, torch.int32):
        given = rows | {"actions": rows["actions"].to(dtype), "obs": image, "next_obs": image}
        found = Dataset(given, gaps="truncate", observation_space=IMAGE, action_space=gymnasium.spaces.Discrete(2))
        assert (found.transitions["actions"].dtype, found.transitions["next_obs"].dtype) == (torch.int64, torch.uint8)
        assert torch.equal(found.transitions["actions"], rows["actions"])
        assert torch.equal(found.transitions["obs"], image.to(torch.uint8))
    with pytest.raises(ValueError, match=r"`obs` must be from 0 to 255, as Box.* says; got -?\d+ to "):
        Dataset(given | {"obs": image + 300}, gaps="truncate", observation_space=IMAGE)
