import copy
import functools
import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.algorithms.test_conformance import train
from tests.probes import Probe, Steps
from tests.rollouts.test_statistics import COPIES, rollout
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl8x import HitsUpperBound, NullTracker, Trainer
from rl8x.algorithms import DQN, DQNConfig
from rl8x.algorithms.off_policy.sources import collected_stats
from rl8x.algorithms.off_policy.updates import Nets, update_stats
from rl8x.algorithms.optimizer import FlatOptimizer, make_rule
from rl8x.checkpoint.tree import clone
from rl8x.envs import CartPole, GymnasiumEnv
from rl8x.rollouts.statistics import numpy_if_small

SMALL = {"num_envs": 8, "horizon": 2, "n_step": 1, "seed": 1, "device": "cpu", "model_config": {"hidden_sizes": [8]}}


def build(env=CartPole, **options):
    config = {**SMALL, "warmup_steps": 16, "batch_size": 4, "buffer_size": 100, "execution": "eager", **options}
    return DQNConfig(**config).build(env)


class Counting(Probe):
    """Observes how many steps were taken since its reset, and is rewarded with that number."""

    single_observation_space = Box(0.0, np.inf, (1,), dtype=np.float32)
    default_time_limit = None

    def transition(self, state, actions, parameters, noise):
        x = state["x"] + 1
        return {"x": x}, x.squeeze(1), torch.zeros(self.num_envs, dtype=torch.bool)


# -- the updates that are due


@settings(max_examples=8, deadline=None)
@given(
    ratio=st.sampled_from([0.1, 1 / 3, 0.7, 1.0, 1 / 64]),
    n_step=st.integers(1, 5),
    horizon=st.integers(1, 4),
    warmup=st.integers(0, 40),
)
def test_counters_say_what_was_done(ratio, n_step, horizon, warmup):
    algorithm = build(updates_per_sample=ratio, n_step=n_step, horizon=horizon, warmup_steps=warmup)
    steps = 8
    train(algorithm, steps)
    collected = 8 * horizon
    warm = -(-warmup // collected)
    expected = math.floor(Fraction(ratio).limit_denominator(1000) * collected * (steps - warm))
    assert algorithm.counters == {
        "algorithm/collects": steps,
        "algorithm/steps": steps,
        "algorithm/updates": expected,
        "env/steps": steps * collected,
        "env/episodes": 0,
    }
    taken = algorithm.nets.trained["q"].moments["step"].item()
    assert taken == expected
    assert algorithm.replay.total == collected * steps - 8 * (n_step - 1)


def test_a_row_without_updates_has_no_losses_and_conditions_wait_for_them():
    trainer = Trainer(build(updates_per_sample=1 / 64), tracker=NullTracker(), eval_env=False)
    condition, found = HitsUpperBound("losses/q", 0.0), []
    for _ in range(6):
        row = trainer.step()
        found.append(("losses/q" in row, condition(row)))
        assert not any(math.isnan(value) for value in row.values())
    assert found == [(here, here) for here in (False, False, False, False, True, False)]


# -- what is stored


@pytest.mark.parametrize(
    ("evaluates", "spans"),
    [  # where rows begin and end
        # Steps 4 and 5 were the evaluation's; the rows of steps 2 and 3 end before it.
        (True, [(0, 3), (1, 4), (2, 4), (3, 4), (6, 9), (7, 10)]),
        # A reset truncates what goes on.
        (False, [(0, 3), (1, 4), (2, 4), (3, 4)]),
    ],
)
def test_no_return_reaches_across_an_evaluation_or_a_reset_of_the_training_environment(evaluates, spans):
    algorithm = build(Counting, n_step=3, gamma=0.5, horizons_per_env_reset=-1 if evaluates else 2)
    train(algorithm, 2)
    if evaluates:
        algorithm.evaluate()
    train(algorithm, 2)
    stored = algorithm.replay.as_tensordict()
    begin, after = stored["obs"].squeeze(1), stored["next_obs"].squeeze(1)
    assert sorted(set(zip(begin.tolist(), after.tolist(), strict=True))) == spans
    assert stored["returns"][begin == 3].unique().tolist() == [4.0]
    assert stored["discounts"][begin == 3].unique().tolist() == [0.5]


def test_observations_are_kept_as_they_were_and_normalised_where_they_are_used():
    algorithm = build(Counting, normalize_observations=True, warmup_steps=1000)
    train(algorithm, 4)
    (moments,) = algorithm.policy.obs_moments.values()
    assert moments.count.item() == 64
    assert moments.mean.item() == pytest.approx(3.5)
    assert algorithm.replay.as_tensordict()["obs"].max().item() == 7.0


# -- numbers that are not finite


class Poisoned(Counting):
    """Its step 41, after those that `validate` tries, has a NaN in one copy: in a reward, or in the observation."""

    where = "reward"

    def transition(self, state, actions, parameters, noise):
        state, rewards, ended = super().transition(state, actions, parameters, noise)
        bad = (state["x"].squeeze(1) == 41) & (torch.arange(self.num_envs) == 3)
        if self.where == "reward":
            return state, torch.where(bad, torch.nan, rewards), ended
        return {"x": torch.where(bad.unsqueeze(1), torch.nan, state["x"])}, rewards, ended


class PoisonedObs(Poisoned):
    where = "observation"


class PoisonedFinalObs(PoisonedObs):
    default_time_limit = 41


@pytest.mark.parametrize("env", [Poisoned, PoisonedObs, PoisonedFinalObs])
@pytest.mark.parametrize("n_step", [1, 3])
def test_a_block_with_nan_is_dropped_and_never_trained_on(env, n_step):
    algorithm = build(env, n_step=n_step, horizon=10, buffer_size=1000, normalize_observations=True)
    trainer = Trainer(algorithm, tracker=NullTracker(), eval_env=False, on_non_finite="skip")
    for _ in range(4):
        trainer.step()
    before = clone(algorithm.learned_state())
    slot = 1 if env is PoisonedObs else 0  # the observation after slot 0 is that of slot 1, if the episode goes on
    with pytest.warns(RuntimeWarning, match=rf"not finite at step 5, in environments 3, slot {slot} of the horizon"):
        trainer.step()
    assert algorithm.replay.total == 8 * (40 - n_step + 1)
    after = algorithm.learned_state()
    assert all(map(torch.equal, before["policy"].values(), after["policy"].values()))
    for _ in range(3):
        trainer.step()
    stored = algorithm.replay.as_tensordict()
    assert all(torch.isfinite(stored[name]).all() for name in ("obs", "next_obs", "returns", "discounts"))
    assert all(torch.isfinite(tensor).all() for tensor in algorithm.nets.state)
    # New episodes began, and what waited for the dropped block ended where that began.
    assert stored["next_obs"].max().item() == 40.0
    assert algorithm.replay.total == 8 * (40 + 30 - n_step + 1)
    assert algorithm.counters["env/steps"] == 8 * 80


# -- going on


def test_another_ratio_goes_on_from_what_was_owed():
    algorithm = build(updates_per_sample=1.0)
    train(algorithm, 4)
    state = copy.deepcopy(algorithm.state_dict())
    slower = build(updates_per_sample=0.25)
    slower.load_state_dict(state)
    train(slower, 2)
    assert slower.counters["algorithm/updates"] == algorithm.counters["algorithm/updates"] + 8


def test_rows_keep_their_returns_where_a_resume_changes_what_returns_are(tmp_path):
    first = Trainer(build(gamma=0.5), tracker=NullTracker(), checkpoints=tmp_path, eval_env=False)
    first.run(max_steps=2, progress="none")
    stored = first.algorithm.replay.as_tensordict()
    says = "the 32 rows of the replay keep the returns of n_step=1 and gamma=0.5; rows from here on have n_step=3 and "
    with pytest.warns(RuntimeWarning, match=f"{says}gamma=0.9, and replace the others within 100 transitions"):
        second = Trainer.resume(tmp_path, overrides={"gamma": 0.9, "n_step": 3})
    second.run(max_steps=4, progress="none")
    rows_now = second.algorithm.replay.as_tensordict()
    assert torch.equal(rows_now["discounts"][:32], stored["discounts"])
    assert {0.5} == {*stored["discounts"][stored["discounts"] > 0].tolist()}
    assert rows_now["discounts"][32:].max() == pytest.approx(0.9**3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trainer.resume(tmp_path, overrides={"lr": 1e-4})  # nothing of returns changes now


# -- what went wrong in other libraries


def test_no_return_reaches_across_the_reset_of_a_resumed_simulator(tmp_path):
    def made():
        return build(functools.partial(GymnasiumEnv, Steps, time_limit=1000), n_step=3, gamma=0.5)

    first = Trainer(made(), tracker=NullTracker(), eval_env=False, checkpoints=tmp_path)
    for _ in range(3):
        first.step()
    first.save()
    assert first.algorithm.replay.total == 8 * 4  # rows of steps 4 and 5 wait
    with pytest.warns(RuntimeWarning, match="state cannot be saved"):
        second = Trainer.resume(tmp_path, algorithm=made(), tracker=NullTracker(), eval_env=False)
    for _ in range(2):
        second.step()
    stored = second.algorithm.replay.as_tensordict()
    rows = zip(*(stored[name].flatten().tolist() for name in ("obs", "next_obs", "returns", "discounts")), strict=True)
    wanted = [*[(i, i + 3, 1.75, 0.125) for i in (0, 1, 2, 3, 0, 1)], (4, 6, 1.5, 0.25), (5, 6, 1.0, 0.5)]
    assert sorted(rows) == sorted(8 * wanted)


class Touched(TorchDispatchMode):
    """Counts the bytes that operations read and write; what views and selects rows reads no more than it gives."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        selects = function in (torch.ops.aten.index_select.default, torch.ops.aten.index.Tensor)
        if not function.is_view:
            tensors = tree_leaves((result, () if selects else (args, kwargs)))
            self.bytes += sum(each.numel() * each.itemsize for each in tensors if isinstance(each, torch.Tensor))
        return result


@pytest.mark.parametrize("mode", ["stop", "skip", "rollback"])
def test_a_step_touches_no_more_of_a_large_replay_than_of_a_small_one(mode, tmp_path):
    def touched(rows):
        algorithm = build(buffer_size=rows, updates_per_sample=0.5)
        trainer = Trainer(
            algorithm, tracker=NullTracker(), eval_env=False, on_non_finite=mode, checkpoints=tmp_path / f"{rows}"
        )
        trainer.step()
        filled = algorithm.replay.gather(torch.zeros(rows, dtype=torch.int64))
        algorithm.replay.append(filled)
        assert algorithm.replay.size == rows
        trainer.step()
        with Touched() as count:
            trainer.step()
        return count.bytes

    small, large = touched(1000), touched(1_000_000)
    assert 0 < small == large


@pytest.mark.parametrize(("updates", "batch_bytes", "expected"), [(42.7, 1000, 42), (0.3, 1000, 1), (64, 2**30, 1)])
def test_blocks_are_as_large_as_a_step_has_updates_and_memory_allows(updates, batch_bytes, expected):
    algorithm = build(updates_per_sample=updates / 16)
    algorithm.__class__ = type("Rows", (DQN,), {"_row_bytes": batch_bytes / algorithm.batch_size})
    assert algorithm.block_size == expected


# -- networks


def perceptron(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def test_weights_of_other_networks_are_refused_and_nothing_is_changed():
    nets = Nets(nn.Linear(1, 1))
    nets.trained["q"] = FlatOptimizer(perceptron(), make_rule("adam", {}), lr=0.01)
    nets.add_target("target", of="q")
    before = [tensor.clone() for tensor in nets.state]
    saved = nets.state_dict()["modules"]["q"]
    (first, tensor), *rest = saved.items()
    for modules, message in (
        ({}, "the run trained no network 'q'. Hyperparameters"),
        (dict(rest), f"the network 'q' had nothing for `{first}` in the run, and has"),
        (saved | {first: tensor[:1]}, rf"had \[1, .*\] for `{first}` in the run, and has \["),
        (saved | {"norm": tensor}, r"had \[.*\] for `norm` in the run, and has nothing here"),
    ):
        with pytest.raises(ValueError, match=message):
            nets.load_state_dict({**nets.state_dict(), "modules": {"q": modules} if modules else {}})
    assert all(map(torch.equal, nets.state, before))


# -- flags of numbers that are not finite; trainers/test_non_finite.py acts


@pytest.mark.parametrize("where", [dict, numpy_if_small])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("key", "flag"),
    [("obs", "observations"), ("next_obs", "observations"), ("rewards", "rewards"), ("logp", "actions")],
)
def test_one_number_that_is_not_finite_is_seen_wherever_it_is(where, number, key, flag):
    for place in range(0, 3 * COPIES, 7):
        tensors = rollout()
        tensors[key].view(4 * COPIES, -1)[place, -1] = number
        row = collected_stats(where(tensors), 3)
        assert [name for name, value in row.items() if name.startswith("finite/") and value] == [f"finite/{flag}"]


@pytest.mark.parametrize("host_looks", [True, False])
@pytest.mark.parametrize("wrong", [None, "loss", "norm", "weights"])
def test_statistics_of_updates_are_means_of_those_that_have_each(wrong, host_looks):
    names, weights = ("losses/q", "q/grad_norm", "losses/policy"), torch.full((5000,), 3e38)  # their sum is not finite
    rows = [torch.tensor([[0.25, 2.0]]), torch.tensor([[0.75, 4.0, 5.0], [1.25, 6.0, 7.0]])]
    for bad, values in {"loss": rows[0][:, :1], "norm": rows[0][:, 1:], "weights": weights[-1:]}.items():
        if bad == wrong:
            values.fill_(math.inf)
            rows[1][:] = math.nan if bad != "weights" else 1.0  # all that follows is bad, and names no cause
    found = update_stats(rows, names, [weights], host_looks=host_looks)
    flags = [found[f"finite/{name}"] for name in ("losses", "gradients", "parameters")]
    assert flags == [float(bad == wrong) for bad in ("loss", "norm", "weights")]
    if wrong is None:
        assert [found[name] for name in names] == [0.75, 4.0, 6.0]
        assert dict(update_stats(rows[:1], names, [weights], host_looks=host_looks)).keys() & {*names} == {*names[:2]}
