"""Learning from a data set through the same trainer: the clock, the rows, going on, and what is refused."""

import functools

import gymnasium
import numpy as np
import pytest
import torch
from tests.algorithms.by_hand import dataset
from tests.algorithms.test_conformance import CASES, build
from tests.probes import Steps

from rl8x import HitsUpperBound, MemoryTracker, NullTracker, Policy, Trainer, keys, load_algorithm
from rl8x.checkpoint import CheckpointError
from rl8x.cli.main import main
from rl8x.envs import GymnasiumEnv
from rl8x.replay.dataset import Dataset

OFFLINE = [case for case in CASES if "from data" in case]


@pytest.mark.parametrize("case", OFFLINE)
def test_a_run_goes_by_its_updates(case):
    algorithm, env = build(case, lr_schedule=[[0, 1e-3], [8, 1e-4]]), CASES[case][1]
    trainer = Trainer(algorithm, tracker=MemoryTracker())
    stats = trainer.run(stop_conditions=[HitsUpperBound(keys.UPDATES, 20)], max_steps=50, progress="none")
    done = {"algorithm/steps": 5, "algorithm/updates": 20}
    assert algorithm.counters == dict.fromkeys(keys.COUNTERS, 0) | done
    clocks, rates = zip(*trainer.tracker.history("coefficients/lr"), strict=True)
    assert (clocks, rates) == ((4, 8, 12, 16, 20), pytest.approx((1e-3, 1e-3, 1e-4, 1e-4, 1e-4)))
    assert set(algorithm.update_metrics) <= stats.keys() <= trainer.metric_names
    assert not {each.split("/")[0] for each in trainer.metric_names} & {"returns", "rewards", "episodes", "eval"}
    params = trainer.tracker.params
    assert (params["dataset.transitions"], params["dataset.episodes"], params["batch_size"]) == (120, 12, 16)
    assert params["dataset.digest"] == dataset(env).digest != dataset(env, seed=4).digest
    online = ("env", "eval", "num_e", "horizon", "buffer_size", "warmup_steps", "updates_per_sample", "prioritized")
    assert not [each for each in params if each.startswith(online)]
    assert trainer.tracker.description.startswith("Stopped after 5 steps, 20 updates: ")


def test_rows_and_the_moments_of_observations_are_an_algorithms_own():
    data = dataset()
    algorithm = build("dqn from data", dataset=data, n_step=3, gamma=0.5)
    rows = algorithm.replay.gather(torch.arange(data.size))
    assert rows["discounts"][[0, 8, 9, 18, 19]].tolist() == [0.125, 0.0, 0.0, 0.25, 0.5]
    (moments,) = build("bc from data", dataset=data).policy.obs_moments.values()
    torch.testing.assert_close(moments.mean.float(), data.transitions["obs"].mean(0))
    assert moments.count.item() == 120
    build("dqn from data", dataset=data, n_step=1, gamma=0.9)
    assert torch.equal(algorithm.replay.gather(torch.arange(data.size))["returns"], rows["returns"])


@pytest.mark.parametrize(
    ("case", "folder", "says"),
    [
        ("bc from data", "there", r"no data set in .*data"),
        ("td3 from data", "there", r"no data set in .*data"),
        ("bc from data", "changed", r"learned from a data set of the digest .* Give the same transitions"),
        ("bc from data", None, "`dataset` is Dataset, which cannot be saved to a file"),
    ],
)
def test_what_was_learned_acts_without_the_data_set_and_goes_on_with_no_other(
    case, folder, says, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    env = CASES[case][1]
    algorithm = build(case, tmp_path if folder else None)
    trainer = Trainer(algorithm, tracker=NullTracker(), checkpoints="run")
    trainer.step()
    trainer.save()
    if folder:
        (tmp_path / "data").rename(tmp_path / "elsewhere")
    if folder == "changed":
        dataset(seed=4).save(tmp_path / "data")
    assert main(["export", "run", "--output", "policy.safetensors"]) == 0
    assert main(["collect", "run", "--env", env.__name__, "--transitions", "9", "--output", "recorded"]) == 0
    obs = torch.randn(5, *env(1).single_observation_space.shape)
    expected = algorithm.policy.decide(obs).actions
    np.testing.assert_array_equal(Policy.load("policy.safetensors").decide(obs).actions, expected)
    np.testing.assert_array_equal(load_algorithm("run").policy.decide(obs).actions, expected)
    with pytest.raises((ValueError, CheckpointError), match=says):
        Trainer.resume("run", tracker=NullTracker()).step()


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
    trainer = Trainer(build("bc from data", dataset=data), tracker=NullTracker(), eval_env=env, num_eval_envs=2)
    trainer.step()
    assert trainer.eval()["eval/returns/mean"] == 3.0
