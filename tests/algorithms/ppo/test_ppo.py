import copy
import dataclasses
import functools
import math

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tests import probes
from tests.probes import Steps
from torch.nn import functional as F

from rl8x import PPOConfig, keys
from rl8x.algorithms.on_policy.update import OnPolicyUpdater, sums_of
from rl8x.algorithms.ppo import PPO, PPO_LOSS_METRICS
from rl8x.checkpoint.tree import clone
from rl8x.envs import CartPole, CartPoleInfinite, DiscreteDummy, GymnasiumEnv, Pendulum
from rl8x.functional import generalized_advantages
from rl8x.policy import Evaluation


def tiny(**options):
    defaults = {"num_envs": 8, "horizon": 16, "seed": 3, "device": "cpu", "model_config": {"hidden_sizes": [16]}}
    return PPOConfig.rl8(**(defaults | options))


def losses(evaluation, batch, config, entropy_coeff):
    """The losses of a minibatch, given what the policy says of it."""
    unread = dict.fromkeys((keys.OBS, keys.ACTIONS, keys.STARTS))
    return sums_of(PPO.losses(lambda *_: evaluation, unread | batch, {}, entropy_coeff, config), batch)


def train(algorithm, steps):
    for _ in range(steps):
        algorithm.collect()
        algorithm.step()
    return algorithm


def sum_of_past_ones(steps):
    return pytest.approx([(1 - 0.95**steps) / 0.05] * 8, rel=1e-5)


def endless(**options):
    return tiny(horizons_per_env_reset=-1, **options).build(probes.Forever, time_limit=None)


@pytest.mark.parametrize("gap", [PPO.evaluate, PPO.discard_experience])
def test_no_sum_of_rewards_reaches_across_a_gap(gap):
    """An evaluation in the training environment, or experience that was dropped: no reset by the schedule."""
    algorithm = train(endless(), 2)
    assert algorithm.running_return.tolist() == sum_of_past_ones(32)
    gap(algorithm)
    assert train(algorithm, 1).running_return.tolist() == sum_of_past_ones(16)


def test_rewards_before_an_evaluation_are_scaled_by_their_sums_after_it():
    algorithm = train(endless(), 1)
    algorithm.collect()
    algorithm.evaluate()
    algorithm.step()
    assert algorithm.running_return.tolist() == sum_of_past_ones(32)


def test_an_update_that_is_taken_back_or_of_another_rank_leaves_the_rewards_behind_an_episode():
    algorithm = train(endless(), 1)
    before = clone(algorithm.learned_state())
    train(algorithm, 1).load_learned_state(before)
    assert algorithm.running_return.tolist() == sum_of_past_ones(32)
    joined = endless(seed=2)
    joined.join(algorithm.state_dict())
    assert not joined.running_return.any()


# -- what the update sees


class Offset(probes.Probe):
    """An observation in float64, of whose offset float32 would leave nothing but multiples of 8."""

    single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    step_noise = 1

    def transition(self, state, actions, parameters, noise):
        return {"x": noise}, noise.squeeze(1), torch.zeros(self.num_envs, dtype=torch.bool)

    def observe(self, state, parameters):
        return 1e8 + state["x"].double()


def test_normalised_float64_is_recomputed_from_all_of_its_digits():
    algorithm = train(tiny(normalize_observations=True, lr=1e-2, sgd_minibatch_size=32).build(Offset), 1)
    algorithm.collect()
    algorithm.set_targets()
    batch, _ = algorithm.pack.gather(torch.arange(32))
    assert batch[keys.LOGP].std() > 1e-3, "the policy must look at the observation"
    evaluation = algorithm.policy.evaluate(batch[keys.OBS], batch[keys.ACTIONS], {}, batch[keys.STARTS])
    torch.testing.assert_close(evaluation.logp, batch[keys.LOGP], atol=1e-6, rtol=1e-5)


def test_one_transition_a_collect_is_refused_where_its_advantage_would_be_0():
    one = {"num_envs": 1, "horizon": 1, "device": "cpu", "seed": 0}
    with pytest.raises(ValueError, match=r"^`normalize_advantages` leaves the only advantage .* Raise `horizon`, or"):
        PPOConfig(**one).build(CartPole)
    algorithm = PPOConfig(**one, normalize_advantages=False).build(CartPole)
    before = clone(algorithm.policy.model.state_dict())
    algorithm.collect()
    algorithm.step()
    assert not algorithm.policy.model.state_dict()["policy_head.bias"].equal(before["policy_head.bias"])


def test_losses_by_hand():
    config = PPOConfig.rl8(clip_param=0.2, dual_clip_param=2.0, vf_clip_param=1.0, vf_coeff=0.5, device="cpu")
    # (ratio, advantage): clipped above; unclipped; clipped below with A < 0; dual clip with A < 0 and a large ratio
    ratios, advantages = torch.tensor([[1.5, 1.1, 0.5, 5.0]]), torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    batch = {keys.LOGP: torch.zeros(1, 4), keys.ADVANTAGES: advantages, keys.RETURNS: torch.zeros(1, 4)}
    evaluation = Evaluation(ratios.log(), torch.tensor([[0.5, 0.0, 3.0, -1.0]]), torch.full((1, 4), 0.7))
    sums = dict(zip(PPO_LOSS_METRICS, losses(evaluation, batch, config, torch.tensor(0.1)), strict=True))
    # surrogates: 1.2, 1.1, min(-0.5, -0.8) = -0.8, max(-5, -2) = -2
    assert sums["losses/policy"] == pytest.approx(-(1.2 + 1.1 - 0.8 - 2.0), abs=1e-5)
    # smooth L1: 0.125, 0, 2.5 -> 1, 0.5
    assert sums["losses/vf"] == pytest.approx(0.125 + 0.0 + 1.0 + 0.5)
    assert sums["losses/entropy"] == pytest.approx(2.8)
    assert sums["losses/total"] == pytest.approx(0.5 + 0.5 * 1.625 - 0.1 * 2.8, abs=1e-5)
    assert sums["monitors/clip_frac"] == 3
    assert sums["monitors/vf_clip_frac"] == 1  # 2.5 > 1
    assert sums["monitors/kl_div"] == pytest.approx(float((ratios - 1 - ratios.log()).sum()), abs=1e-5)


def test_filler_rows_do_not_count():
    config, entropy = PPOConfig.rl8(device="cpu"), torch.tensor(0.0)
    full = {keys.LOGP: torch.zeros(1, 3), keys.ADVANTAGES: torch.ones(1, 3), keys.RETURNS: torch.ones(1, 3)}
    evaluation = Evaluation(torch.zeros(1, 3), torch.zeros(1, 3), torch.ones(1, 3))
    masked = losses(evaluation, full | {keys.VALID: torch.tensor([[True, False, True]])}, config, entropy)
    torch.testing.assert_close(masked * 3, losses(evaluation, full, config, entropy) * 2)


def test_a_loss_of_ones_own_need_not_leave_filler_rows_out():
    def ones(policy, batch, state, coefficient, config):
        found = policy(batch[keys.OBS], batch[keys.ACTIONS], state, batch[keys.STARTS])
        return torch.ones(len(PPO_LOSS_METRICS), *found.logp.shape) + 0.0 * found.logp

    vector_env = SyncVectorEnv([Flagged] * 4, autoreset_mode=AutoresetMode.NEXT_STEP)
    algorithm = in_units(GymnasiumEnv(vector_env))
    algorithm.updater.objective = algorithm.updater.objective._replace(losses=ones)
    train(algorithm, 1)
    rows, applied = algorithm.updater.results
    assert algorithm.pack.masked
    assert rows[applied, :-1].unique().tolist() == pytest.approx([1.0])  # means over what is experience


class ShortEpisodes(probes.Steps):
    """Episodes of 1 to 3 steps; every step of all copies is logged."""

    def __init__(self, log):
        self.log = log

    def reset(self, *, seed=None, options=None):
        found = super().reset(seed=seed)
        self.length = int(self.np_random.integers(1, 4))
        return found

    def step(self, action):
        self.log.append(action)
        return super().step(action)


@pytest.mark.parametrize(
    ("mode", "num_envs", "horizon"), [*((mode, 3, 7) for mode in AutoresetMode), (AutoresetMode.NEXT_STEP, 1, 1)]
)
def test_env_steps_and_schedules_count_what_the_simulator_stepped(mode, num_envs, horizon):
    """A collect that only resets counts nothing, and has no rewards."""
    log: list[int] = []
    env = GymnasiumEnv(SyncVectorEnv([lambda: ShortEpisodes(log)] * num_envs, autoreset_mode=mode), seed=1)
    schedule = {"kind": "interp", "points": [[0, 1.0], [1000, 0.0]]}
    options = {"lr_schedule": schedule, "normalize_advantages": horizon > 1}
    algorithm = tiny(num_envs=num_envs, horizon=horizon, **options).build(env)
    log.clear()  # of what was tried
    for _ in range(6):
        before = len(log)
        collected = algorithm.collect()
        assert algorithm.counters[keys.ENV_STEPS] == len(log)
        assert ("rewards/mean" in collected) == (len(log) > before)
        row = algorithm.step()
        assert row["coefficients/lr"] == pytest.approx(1.0 - len(log) / 1000)
        assert all(math.isfinite(value) for value in (*collected.values(), *row.values()))
    assert 0 < len(log) <= 6 * num_envs * horizon
    assert (len(log) < 6 * num_envs * horizon) == (mode is AutoresetMode.NEXT_STEP)


def test_accumulated_minibatches_equal_one_batch():
    whole = tiny(num_sgd_iters=1).build(CartPole)
    parts = tiny(num_sgd_iters=1, sgd_minibatch_size=32, accumulate_grads=True).build(CartPole)
    stats = []
    for algorithm in (whole, parts):
        algorithm.collect()
        stats.append(algorithm.step())
        assert algorithm.counters[keys.UPDATES] == 1
    torch.testing.assert_close(probes.weights_of(parts), probes.weights_of(whole), atol=1e-5, rtol=1e-5)
    for name in PPO_LOSS_METRICS:
        assert stats[0][name] == pytest.approx(stats[1][name], abs=1e-5)


@pytest.mark.parametrize("host_looks", [True, False])
@pytest.mark.parametrize("accumulate", [True, False])
def test_means_are_of_losses_applied_and_of_all_that_was_measured_before_an_update(host_looks, accumulate, monkeypatch):
    algorithm = tiny(target_kl_div=0.01, num_sgd_iters=3, sgd_minibatch_size=64, accumulate_grads=accumulate)
    algorithm = algorithm.build(CartPole)
    rows = torch.arange(1.0, 4.0).unsqueeze(1) * torch.ones(8)  # update i returns i everywhere
    applied = torch.tensor([True, True, False])
    if not host_looks:  # an accelerator goes through all updates, and applies none after the first refused one
        rows, applied = torch.cat((rows, rows[-1:] + 1)), torch.cat((applied, applied[-1:]))
    monkeypatch.setattr(OnPolicyUpdater, "results", (rows, applied))
    algorithm.collect()
    stats = algorithm.step()
    for name in ("losses/policy", "losses/vf", "losses/entropy", "losses/total", "monitors/grad_norm"):
        assert stats[name] == 1.5
    for name in ("monitors/kl_div", "monitors/clip_frac", "monitors/vf_clip_frac"):
        assert stats[name] == 2.0
    planned = 3 if accumulate else 6
    assert stats["monitors/refused_updates"] == planned - 2


# -- counters, schedules, rules


@pytest.mark.parametrize(
    ("env", "every", "resets"),
    [
        (DiscreteDummy, 2, [1, 3, 5]),
        (DiscreteDummy, 1, [1, 2, 3, 4, 5]),
        (DiscreteDummy, -1, [1]),
        (CartPoleInfinite, None, [1, 2, 3, 4, 5]),
        (CartPole, None, [1]),
    ],
)
def test_resets_follow_horizons_per_env_reset_or_whether_the_task_ends(env, every, resets):
    algorithm = tiny(horizons_per_env_reset=every).build(env)
    seen = []
    for collect in range(1, 6):
        algorithm.collect()
        if algorithm.rollout[keys.STARTS][0].all():
            seen.append(collect)
    assert seen == resets


@pytest.mark.parametrize(
    ("horizon", "seq_len", "every"), [(64, None, 32), (8, None, 8), (12, 1, 6), (36, 4, 36), (40, 4, 40)]
)
def test_a_state_is_forgotten_after_about_8_sequences_whatever_the_horizon(horizon, seq_len, every):
    gru = {"model": "gru", "model_config": {"hidden_size": 4}, "seq_len": seq_len}
    algorithm = PPOConfig(num_envs=2, horizon=horizon, device="cpu", **gru).build(DiscreteDummy)
    assert algorithm.state_reset_every == every


def test_the_buffer_is_a_tensordict_over_the_same_memory():
    algorithm = tiny().build(CartPole)
    algorithm.collect()
    pointers = {name: value.data_ptr() for name, value in algorithm.rollout.tensors.items()}
    assert algorithm.buffer.batch_size == torch.Size([8, 17])
    assert algorithm.buffer[keys.OBS].data_ptr() == pointers[keys.OBS]
    algorithm.step()
    algorithm.collect()
    assert pointers == {name: value.data_ptr() for name, value in algorithm.rollout.tensors.items()}


# -- building


def test_params_name_every_hyperparameter_and_the_arguments_of_model_and_distribution():
    options = {"lr_schedule": [[0, 1e-3], [100, 1e-4]], "model_config": {"activation": "tanh"}}
    params = tiny(**options).build(Pendulum).params
    told = {name.split(".")[0] for name in params}
    for field in dataclasses.fields(PPOConfig):
        assert field.name in told or getattr(PPOConfig(), field.name) == {}, field.name
    assert params["lr_schedule"] == {"kind": "step", "points": [[0, 1e-3], [100, 1e-4]]}
    assert (params["model_config.activation"], params["seed"]) == ("tanh", 3)
    assert (params["model.hidden_sizes"], params["model.activation"]) == ([64, 64], "tanh")
    assert params["distribution.std"] == "free"


class Windy(CartPole):
    def __init__(self, num_envs, wind=1.0, **options):
        super().__init__(num_envs, **options)


UNSEEN = {"env.observe_parameters": "none"}
CARTPOLE = {"env.id": "CartPole-v1", "env.kwargs.sutton_barto_reward": True, "env.time_limit": 500}
CARTPOLE |= {"env": "GymnasiumEnv", "env.vectorization": "sync"}
SUTTON = {"sutton_barto_reward": True}


@pytest.mark.parametrize(
    ("env", "kwargs", "told"),
    [
        ("CartPole", {"time_limit": 7}, {"env": "CartPole", "env.time_limit": 7} | UNSEEN),
        (Windy, {"wind": 2.0, "time_limit": 7}, {"env": "Windy", "env.time_limit": 7, "env.kwargs.wind": 2.0} | UNSEEN),
        (
            functools.partial(Windy, wind=3.0),
            {"observe_parameters": "critic"},
            {"env": "Windy", "env.time_limit": 500, "env.kwargs.wind": 3.0, "env.observe_parameters": "critic"},
        ),
        ("CartPole-v1", SUTTON | {"time_limit": 9}, CARTPOLE | {"env.time_limit": 9}),
        (functools.partial(GymnasiumEnv, lambda: gymnasium.make("CartPole-v1", **SUTTON)), {}, CARTPOLE),
        (
            lambda: gymnasium.make_vec("CartPole-v1", 8, **SUTTON),
            None,
            CARTPOLE | {"env.vectorization": "CartPoleVectorEnv"},
        ),
    ],
)
def test_params_tell_the_task(env, kwargs, told):
    algorithm = tiny().build(env()) if kwargs is None else tiny().build(env, **kwargs)
    assert {name: value for name, value in algorithm.params.items() if name.split(".")[0] == "env"} == told


# -- values in units of the running moments of their targets, and what normalisers learn from


def in_units(env=Pendulum, **options):
    given = {"num_envs": 4, "horizon": 6, "seed": 2, "num_sgd_iters": 1, "model_config": {"hidden_sizes": [8]}}
    return tiny(**given | {"normalize_values": True, "vf_clip_param": None} | options).build(env)


def test_values_are_given_in_the_units_of_the_rewards():
    policy = in_units().policy
    obs, starts = torch.randn(5, 3), torch.zeros(5, dtype=torch.bool)
    with torch.no_grad():
        raw = policy.model.values(obs.unsqueeze(0), {}, starts.unsqueeze(0))[0]
        assert torch.equal(policy.values(obs, {}, starts), policy.value_moments.denormalize(raw))
        torch.testing.assert_close(policy.values(obs, {}, starts), raw)  # moments of nothing are 0 and 1
        policy.value_moments.update(torch.tensor([1.0, 5.0]))  # mean 3, variance 4
        torch.testing.assert_close(policy.values(obs, {}, starts), 2.0 * raw + 3.0)
        noise = policy.noise(1, 5, torch.Generator())[0]
        torch.testing.assert_close(policy.act(obs, {}, starts, noise).values, 2.0 * raw + 3.0)
        evaluated = policy.evaluate(obs.unsqueeze(0), torch.zeros(1, 5, 1), {}, starts.unsqueeze(0))
        torch.testing.assert_close(evaluated.values[0], raw)


def test_moments_learn_from_the_targets_before_the_update_and_the_loss_is_in_their_units():
    algorithm = in_units(normalize_rewards=False, gamma=0.9, gae_lambda=0.8)
    for _ in range(2):
        algorithm.collect()
        rollout, moments = algorithm.rollout, copy.deepcopy(algorithm.policy.value_moments)
        names = (keys.REWARDS, keys.FINAL_VALUES, keys.TERMINATED, keys.TRUNCATED)
        rewards, *ends = (rollout[name][:6] for name in names)
        _, targets = generalized_advantages(rewards, rollout[keys.VALUES], *ends, gamma=0.9, gae_lambda=0.8)
        moments.update(targets)
        with torch.no_grad():
            raw = algorithm.policy.model.values(rollout[keys.OBS][:6], {}, rollout[keys.STARTS][:6])
        stats = algorithm.step()
        for found, expected in zip(algorithm.policy.value_moments.buffers(), moments.buffers(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=0.0)
        expected = F.smooth_l1_loss(raw, (targets - moments.mean) / moments.var.sqrt())
        assert stats["losses/vf"] == pytest.approx(expected.item(), rel=1e-4)


class Flagged(Steps):
    """Shows 0 while an episode goes on and 1000 at its end, after two steps."""

    length = 2

    def observation(self):
        return np.full(1, 1000.0 * (self.time == self.length), np.float32)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_normalisers_do_not_learn_from_filler_rows(mode):
    env = GymnasiumEnv(SyncVectorEnv([Flagged] * 4, autoreset_mode=mode))
    algorithm = train(in_units(env, normalize_observations=True, normalize_rewards=True), 2)
    moments = algorithm.policy.obs_moments["observation"]
    # Of six steps in NEXT_STEP mode two are fillers, whose observation is the one at the episode's end.
    rows = 2 * 4 * (4 if mode == AutoresetMode.NEXT_STEP else 6)
    assert (moments.count, moments.mean.item(), moments.var.item()) == (rows, 0.0, 0.0)
    assert algorithm.return_moments.count == algorithm.policy.value_moments.count == rows
