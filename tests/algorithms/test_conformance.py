"""What holds for every algorithm: known values, masks, programs, going on, seeds, rows, explanations."""

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch
from tests.algorithms.by_hand import Masked, dataset, seen
from tests.probes import KNOWN, ActionMatches, Boxes, Discretes, Remember, Target, traced_only

from rl8x import NullTracker, Trainer, algorithms, keys
from rl8x.algorithms import (
    AlgorithmConfig,
    BCConfig,
    DistillationConfig,
    DQNConfig,
    IQLConfig,
    PPOConfig,
    PQNConfig,
    SACConfig,
    TD3Config,
)
from rl8x.envs import CartPole, Pendulum, Spread

SMALL = {"seed": 2, "device": "cpu", "execution": "eager", "model_config": {"hidden_sizes": [16]}}
ROLLOUTS = {**SMALL, "num_envs": 8, "horizon": 8, "sgd_minibatch_size": 32, "num_sgd_iters": 2}
REPLAY = {**SMALL, "num_envs": 8, "horizon": 2, "warmup_steps": 16, "batch_size": 16, "buffer_size": 60}
REPLAY |= {"updates_per_sample": 0.3}
CRITICS = {"critic_hidden_sizes": [16], "batch_size": 6}
DATA = {**SMALL, "batch_size": 16, "updates_per_step": 4}
GRU = {"model": "gru", "model_config": {"hidden_size": 8}}
LSTM = {"model": "lstm", "model_config": {"hidden_size": 8}}
ATOMS = {"num_atoms": 5, "v_min": -1.0, "v_max": 9.0}
DECAYS = {"lr_schedule": {"kind": "interp", "points": [[0, 0.01], [200, 0.0]]}}
UNITS = {"normalize_values": True, "vf_clip_param": None}
RATE = {"lr_schedule": {"kind": "adaptive", "high": 1e-2}, "lr": 2e-3}
AGAIN = {"recompute_advantages": True, "vf_clip_param": None, "lr_schedule": None}
DELAYED = {"policy_delay": 3, "updates_per_sample": 0.7}
BC_WEIGHTS = {"actor_bc_coeff": 0.1, "critic_bc_coeff": 0.1}


def ppo(env=CartPole, **options):
    return PPOConfig.rl8, env, ROLLOUTS | options


def of(config, env=CartPole, **options):
    replay = REPLAY if config is DQNConfig else REPLAY | CRITICS
    return config, env, (ROLLOUTS if config in (PQNConfig, DistillationConfig) else replay) | options


def offline(config, env=CartPole, **options):
    critics = {} if config in (BCConfig, DQNConfig) else {"critic_hidden_sizes": [8]}
    return config, env, DATA | critics | {"dataset": None} | options


CASES = {
    "ppo": ppo(),
    "ppo, continuous": ppo(Pendulum, normalize_observations=True),
    "ppo, entropy and dual clip": ppo(entropy_coeff=0.01, dual_clip_param=2.0, max_grad_norm=0.1),
    "ppo, one batch": ppo(sgd_minibatch_size=None),
    "ppo, accumulated": ppo(accumulate_grads=True),
    "ppo, kl limit": ppo(target_kl_div=0.5),
    "ppo, adamw": ppo(optimizer="adamw"),
    "ppo, lstm": ppo(**LSTM, seq_len=4),
    "ppo, gru": ppo(Pendulum, **GRU, seq_len=2),
    "ppo, one copy, one sequence": ppo(Pendulum, **GRU, seq_len=8, num_envs=1, sgd_minibatch_size=None),
    "ppo, one transition": ppo(Pendulum, num_envs=1, sgd_minibatch_size=1, target_kl_div=0.5),
    "ppo, adaptive rate": ppo(**RATE),
    "ppo, adaptive rate, in order": ppo(**RATE, shuffle_minibatches=False),
    "ppo, adaptive rate, accumulated": ppo(**RATE, accumulate_grads=True),
    "ppo, adaptive rate, kl limit": ppo(**RATE | {"lr": 1e-2}, target_kl_div=0.02),
    "ppo, adaptive rate, lstm": ppo(**RATE | {"lr": 1e-5}, **LSTM, seq_len=4, num_sgd_iters=1),
    "ppo, units of values": ppo(Pendulum, **UNITS),
    "ppo, units of values, lstm": ppo(**UNITS, **LSTM, seq_len=4),
    "ppo, advantages again": ppo(Pendulum, **AGAIN),
    "ppo, advantages again, kl limit": ppo(**AGAIN, target_kl_div=0.02),
    "ppo, advantages again, gru": ppo(Pendulum, **AGAIN, **GRU, seq_len=4),
    "ppo, random start": ppo(random_start=True),
    "ppo, agents": ppo(functools.partial(Spread, state="shared", agent_id=True), normalize_observations=True),
    "ppo, agents apart": ppo(Spread, model_config={"hidden_sizes": [16], "separate": True}),
    "ppo, agents, gru": ppo(functools.partial(Spread, state="shared"), **GRU, seq_len=4),
    "pqn": of(PQNConfig),
    "pqn, dueling": of(PQNConfig, dueling=True, model_config={"hidden_sizes": [16], "policy_gain": 1.0}),
    "pqn, one batch, adam": of(PQNConfig, sgd_minibatch_size=None, optimizer="adam"),
    "pqn, gru": of(PQNConfig, **GRU, seq_len=4),
    "pqn, normalised": of(PQNConfig, normalize_observations=True),
    "distillation": of(DistillationConfig, teacher=None),
    "dqn": of(DQNConfig, double=False, n_step=1),
    "dqn, double dueling": of(DQNConfig, dueling=True, n_step=3),
    "dqn, soft target": of(DQNConfig, tau=0.01, target_interval=1, optimizer="adamw", max_grad_norm=0.1),
    "dqn, normalised": of(DQNConfig, normalize_observations=True, huber_delta=None, updates_per_sample=1.0),
    "dqn, prioritised": of(DQNConfig, prioritized=True, updates_per_sample=1.5, priority_beta=0.7),
    "dqn, atoms": of(DQNConfig, **ATOMS, prioritized=True, n_step=2),
    "dqn, quantiles": of(DQNConfig, num_quantiles=3, huber_delta=1.0, dueling=True),
    "dqn, schedules": of(DQNConfig, **DECAYS, epsilon=0.5),
    "dqn, warm-up": of(DQNConfig, warmup_steps=100),
    "dqn, resets": of(DQNConfig, horizons_per_env_reset=3, n_step=2),
    "dqn, on a disk": of(DQNConfig, buffer_path="replay", prioritized=True, n_step=3),
    "dqn, agents": of(DQNConfig, functools.partial(Spread, agent_id=True), n_step=2),
    "sac": of(SACConfig, Pendulum),
    "sac, agents": of(SACConfig, functools.partial(Spread, state="shared")),
    "sac, discrete": of(SACConfig, prioritized=True),
    "sac, delayed": of(SACConfig, Pendulum, policy_delay=2, n_step=3, critic_layer_norm=True, num_critics=3),
    "sac, atoms": of(SACConfig, Pendulum, num_atoms=11, return_bound=5.0),
    "sac, normalised": of(SACConfig, normalize_observations=True, alpha=0.1, max_grad_norm=1.0),
    "td3": of(TD3Config, Pendulum, normalize_observations=True, prioritized=True),
    "td3, delayed": of(TD3Config, Pendulum, **DELAYED, n_step=2, exploration_noise_min=0.01, prioritized=True),
    "bc from data": offline(BCConfig, normalize_observations=True),
    "iql from data": offline(IQLConfig),
    "iql from data, continuous": offline(IQLConfig, Pendulum, normalize_observations=True),
    "dqn from data": offline(DQNConfig, target_interval=3, cql_coeff=0.1),
    "sac from data, discrete": offline(SACConfig, cql_coeff=0.5),
    "sac from data": offline(SACConfig, Pendulum, cql_coeff=0.5, cql_samples=2, normalize_observations=True),
    "td3 from data": offline(TD3Config, Pendulum, **BC_WEIGHTS, normalize_observations=True),
}
# Beside which others have the same parts: `make test` leaves their programs and their going on out.
VARIANTS = {
    *("ppo, entropy and dual clip", "ppo, one batch", "ppo, accumulated", "ppo, adamw", "ppo, gru"),
    *("ppo, one copy, one sequence", "ppo, adaptive rate, in order", "ppo, adaptive rate, accumulated"),
    *("ppo, adaptive rate, kl limit", "ppo, adaptive rate, lstm", "ppo, units of values, lstm"),
    *("ppo, advantages again", "ppo, advantages again, kl limit", "ppo, agents, gru", "pqn", "pqn, one batch, adam"),
    *("pqn, normalised", "dqn, double dueling", "dqn, soft target", "dqn, normalised", "dqn, schedules"),
    *("dqn, agents", "sac, agents", "sac, normalised", "td3", "iql from data", "sac from data, discrete"),
    *("ppo, one transition", "ppo, random start", "dqn, warm-up", "dqn, resets", "dqn from data"),
}
EVERY = [pytest.param(case, marks=pytest.mark.long) if case in VARIANTS else case for case in CASES]
EACH = ["ppo", "pqn", "distillation", "dqn", "sac", "td3", "bc from data", "iql from data"]


def build(case, folder=None, time_limit=7, env=None, **options):
    """Build the algorithm of a case; `folder` is that of a replay on a disk, or has the data."""
    config, own_env, given = CASES[case]
    env, given = env or own_env, given | options
    if "buffer_path" in given:
        given["buffer_path"] = str(folder / "replay")
    if "teacher" in given:
        given["teacher"] = PPOConfig(**SMALL).build(env).policy
    if "dataset" not in given:
        return config(**given).build(env, time_limit=time_limit)
    if given["dataset"] is None:
        given["dataset"] = dataset(env)
        if folder is not None:
            given["dataset"].save(folder / "data")
            given["dataset"] = str(folder / "data")
    return config(**given).build()


def train(algorithm, steps=3):
    """Train; return the rows."""
    return [{**algorithm.collect(), **algorithm.step()} for _ in range(steps)]


def weights(algorithm):
    """All weights, moments and targets."""
    nets = algorithm.nets.state if hasattr(algorithm, "nets") else algorithm.optimizer.state
    return torch.cat([tensor.flatten().float() for tensor in nets])


# -- programs


@pytest.mark.parametrize("case", EVERY)
def test_traced_programs_compute_what_eager_functions_do(case, monkeypatch, tmp_path):
    """Updates from rows have equal bits; those from rollouts sum gradients in another order."""
    traced_only(monkeypatch)
    folders = tmp_path / "eager", tmp_path / "traced"
    for folder in folders:
        folder.mkdir()
    eager, traced = (
        build(case, folder, execution=mode) for folder, mode in zip(folders, ("eager", "compile"), strict=True)
    )
    begun, steps = weights(eager), 5 if hasattr(eager, "nets") else 2
    rows, others = train(eager, steps), train(traced, steps)
    assert eager.counters == traced.counters
    assert not torch.equal(weights(eager), begun) or case == "dqn, warm-up"
    if hasattr(eager, "nets"):
        assert repr(rows) == repr(others)
        assert torch.equal(weights(eager), weights(traced))
        return
    torch.testing.assert_close(weights(traced), weights(eager), atol=1e-5, rtol=1e-4)
    for row, other in zip(rows, others, strict=True):
        assert row == pytest.approx(other, abs=1e-4, rel=1e-3, nan_ok=True)


SHARED = {"num_envs": 6, "num_threads": 2, "sgd_minibatch_size": None, "time_limit": 500}
SHARED |= {"model_config": {"hidden_sizes": [8]}}


@pytest.mark.long
@pytest.mark.parametrize("case", ["ppo", "ppo, agents apart", "sac, delayed"])
def test_compiled_updates_compute_what_eager_ones_do(case, monkeypatch):
    """Of `ppo` the steps too."""
    options = SHARED if case == "ppo" else {"updates_per_sample": 0.25} if "sac" in case else {}  # 4 updates at once
    eager, compiled = build(case, **options), build(case, **options, execution="compile")
    collector, steps = compiled.horizons.collector, 6 if "sac" in case else 2
    if case == "ppo":
        monkeypatch.setattr("rl8x.execution.execution._SHARED_WORK", 0)
        monkeypatch.setattr("rl8x.algorithms.on_policy.update._CHUNK_ACTIVATIONS", 64)
    else:
        monkeypatch.setattr(collector, "stepper", getattr(collector.stepper, "_eager", None))
    rows, others = train(eager, steps), train(compiled, steps)
    for row, other in zip(rows, others, strict=True):
        assert row == pytest.approx(other, rel=1e-3, abs=1e-4)
    torch.testing.assert_close(weights(eager), weights(compiled), atol=1e-4, rtol=1e-3)
    assert not compiled.execution.fell_back


@pytest.mark.parametrize("case", ["ppo", "dqn", "sac"])
def test_products_in_bfloat16_are_near_those_in_float32(case):
    half, full = build(case, precision="bf16"), build(case)
    for algorithm in (half, full):
        train(algorithm)
    assert weights(half).dtype == torch.float32
    assert 0 < (weights(half) - weights(full)).abs().max() < 0.05


# -- going on, and seeds


def trained(trainer, upto):
    """Train up to a step; return the rows without what is measured of the machine."""
    rows = []
    while trainer.state[keys.STEPS] < upto:
        row = trainer.step().items()
        rows.append({name: value for name, value in row if name.split("/")[0] not in ("profiling", "memory")})
    return rows


@pytest.mark.parametrize("case", EVERY)
def test_a_run_goes_on_to_the_bit(case, tmp_path):
    for name in ("whole", "first"):
        (tmp_path / name).mkdir()
    whole = Trainer(build(case, tmp_path / "whole"), tracker=NullTracker(), eval_env=False)
    middle, end = (5, 7) if hasattr(whole.algorithm, "nets") else (2, 3)
    trained(whole, middle)
    expected = trained(whole, end)
    first = Trainer(
        build(case, tmp_path / "first"), tracker=NullTracker(), eval_env=False, checkpoints=tmp_path / "saved"
    )
    trained(first, middle)
    first.save()
    source = getattr(first.algorithm, "source", None)
    if source is not None and first.algorithm.env is not None and case != "dqn, warm-up":
        assert source.rows.total > 60  # full
        assert 0 <= source.updates_owed < 1
    given = {} if first.algorithm.env is None else {"algorithm": build(case, tmp_path / "first")}
    second = Trainer.resume(tmp_path / "saved", tracker=NullTracker(), eval_env=False, **given)
    assert repr(trained(second, end)) == repr(expected)
    assert torch.equal(weights(second.algorithm), weights(whole.algorithm))
    assert second.algorithm.counters == whole.algorithm.counters
    for name, value in whole.algorithm.policy.state_dict().items():
        assert torch.equal(second.algorithm.policy.state_dict()[name], value), name
    if source is not None and first.algorithm.env is not None:
        kept, wanted = (each.algorithm.replay.as_tensordict() for each in (second, whole))
        assert (kept == wanted).all()


@pytest.mark.parametrize("case", [*EACH, "ppo, gru", "ppo, random start"])
def test_the_seed_decides_all_bits_and_other_generators_are_left_alone(case):
    found = []
    for seed, other in ((2, 0), (2, 9), (3, 0)):
        torch.manual_seed(other)
        np.random.seed(other)
        before = torch.get_rng_state()
        algorithm = build(case, seed=seed)
        train(algorithm)
        assert torch.equal(torch.get_rng_state(), before)
        found.append(weights(algorithm))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


# -- rows, and what is written about them


@pytest.mark.parametrize("case", [*EACH, "ppo, kl limit"])
def test_rows_have_the_metrics_that_are_announced(case):
    algorithm = build(case)
    *_, row = train(algorithm, 6)
    collected = set(keys.COLLECT_METRICS) if algorithm.env else set()
    assert set(row) - collected == {name for name in row if name.startswith("finite/")} | set(algorithm.metrics)
    assert all(math.isfinite(value) for name, value in row.items() if name in algorithm.metrics)


CONFIGS = [each for each in vars(algorithms).values() if isinstance(each, type) and issubclass(each, AlgorithmConfig)]


@pytest.mark.parametrize("config", CONFIGS)
def test_every_hyperparameter_is_explained(config):
    for field in dataclasses.fields(config):
        assert field.metadata["help"].endswith("."), field.name


# -- known values, and masks

LEARNS = {"model_config": {"hidden_sizes": [32]}, "lr": 0.01, "gamma": 0.75}
BY_ROLLOUTS = LEARNS | {"num_envs": 66, "sgd_minibatch_size": 132}
BY_ROLLOUTS["model_config"] = {"hidden_sizes": [32], "activation": "tanh"}
BY_REPLAY = LEARNS | {"num_envs": 12, "warmup_steps": 64, "updates_per_sample": 1.0, "batch_size": 64}
BY_REPLAY |= {"buffer_size": 1000}
OF_DQN = {"target_interval": 10, "epsilon": 0.5, "epsilon_decay_steps": 0, "n_step": 1}
OF_DQN["model_config"] = {"hidden_sizes": [32], "layer_norm": False}
OF_PQN = {"num_sgd_iters": 4, "epsilon": 0.5}
OF_SAC = {"alpha": 0.02, "tau": 0.1, "critic_hidden_sizes": [64]}
# Steps until all values of `Discretes` are known, how near, and how; other forms of losses are in test_dqn.py.
LEARNED = {
    "pqn, dueling": (20, 0.06, BY_ROLLOUTS | OF_PQN),
    "dqn, double dueling": (12, 0.05, BY_REPLAY | OF_DQN | {"n_step": 3}),
    # 0.03 is its temperature's
    "sac, discrete": (12, 0.12, BY_REPLAY | OF_SAC | {"prioritized": False, "horizon": 2}),
}


def learned(case, env, steps, **options):
    config, _, given = CASES[case]
    algorithm = config(**given | options).build(env)
    train(algorithm, steps)
    return algorithm


def values_of(algorithm, obs):
    """Values of actions, `[num_actions]`, at one observation, a tensor `[1, *obs]` or a dict of such."""
    if isinstance(algorithm.config, SACConfig):
        return algorithm.critics(obs).detach()[:, 0].mean(0)
    sequence = {name: part[None] for name, part in obs.items()} if isinstance(obs, dict) else obs[None]
    return algorithm.policy(sequence, {}, torch.ones(1, 1, dtype=torch.bool))[0, 0].detach()


@pytest.mark.parametrize("case", LEARNED)
def test_known_values_are_learned(case):
    """Were a truncation taken for an end, the value of `Forever` would be 1.69 in the mean of its steps, not 4."""
    steps, near, options = LEARNED[case]
    algorithm = learned(case, Discretes, steps, **options)
    for (probe, x), expected in KNOWN.items():
        obs = Discretes.seen(probe, x)
        assert values_of(algorithm, obs).tolist() == pytest.approx(expected, abs=near), probe
        if expected[0] != expected[1]:
            assert algorithm.policy.act(obs, {}, torch.ones(1, dtype=torch.bool)).actions == np.argmax(expected)


BY_BOXES = SMALL | LEARNS | {"num_envs": 15, "warmup_steps": 240, "batch_size": 64, "buffer_size": 1000, "tau": 0.1}
BY_BOXES |= {"horizon": 2, "updates_per_sample": 1.0, "critic_hidden_sizes": [64]}
CONTINUOUS = {
    "sac": (SACConfig, {"alpha": 0.02}),
    "td3, three steps": (TD3Config, {"exploration_noise": 0.3, "n_step": 3, "critic_layer_norm": True}),
}


def best_action(algorithm, obs):
    return algorithm.policy.act(obs, {}, torch.zeros(1, dtype=torch.bool)).actions.item()


@pytest.mark.parametrize("case", CONTINUOUS)
def test_known_values_of_continuous_actions_are_learned(case):
    config, options = CONTINUOUS[case]
    algorithm = config(**BY_BOXES | options).build(Boxes)
    train(algorithm, 26)

    def q_of(probe, x, action):
        outputs = algorithm.critics(Boxes.seen(probe, x), torch.full((1, 1), float(action)))
        return algorithm.critics.means(outputs.detach())[:, 0].tolist()

    one, decides, delay, forever, _ = Boxes.probes
    known = [(one, 0, 1), (decides, 1, 1), (decides, -1, -1), (delay, 0, 0.75), (delay, 1, 1), (forever, 0, 4)]
    for probe, x, value in known:
        assert q_of(probe, x, 0.3) == pytest.approx([value] * 2, abs=0.15), probe
    for x in (1, -1):
        assert q_of(Target, x, x / 2) == pytest.approx([1, 1], abs=0.15)
        assert q_of(Target, x, 0.0) == pytest.approx([0.75, 0.75], abs=0.15)
        assert best_action(algorithm, Boxes.seen(Target, x)) == pytest.approx(x / 2, abs=0.15)


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        *(pytest.param(each, 10, marks=pytest.mark.long) for each in (SACConfig, TD3Config)),
        (PPOConfig, 4),
        (PQNConfig, 4),
    ],
)
def test_the_bare_defaults_learn(config, steps):
    """Towards x / 2, the best action of `Target`, from an action that does not depend on x; or to its sign."""
    continuous = config in (SACConfig, TD3Config)
    algorithm = config(seed=0, device="cpu", execution="eager").build(Target if continuous else ActionMatches)
    train(algorithm, steps)
    for x in (-1.0, 1.0):
        action = best_action(algorithm, torch.tensor([[x]]))
        assert 0.25 < action / x < 0.75 if continuous else action == (x > 0)


REMEMBERING = LEARNS | {"num_envs": 64, "horizon": 12, "seq_len": 3, "sgd_minibatch_size": None, "num_sgd_iters": 8}
REMEMBERING |= {"gamma": 0.9}


@pytest.mark.parametrize(
    ("case", "steps", "options"),
    [
        ("ppo, lstm", 20, {"model_config": {"hidden_size": 16}, "normalize_rewards": False}),
        ("pqn, gru", 25, {"model_config": {"hidden_size": 16}, "q_lambda": 0.5, "epsilon": 0.3}),
    ],
)
def test_a_memory_learns_what_nothing_else_can(case, steps, options):
    algorithm = learned(case, Remember, steps, **REMEMBERING | options)
    assert algorithm.evaluate(deterministic=True)["episodes/returns/mean"] > 0.9


@pytest.mark.parametrize("case", ["ppo", "pqn", "dqn", "sac, discrete"])
def test_no_illegal_action_is_taken_nor_is_anything_learned_of_it(case):
    algorithm = build(case, env=Masked, time_limit=3)
    for _ in range(4):  # the first two at random, where there is a warm-up
        train(algorithm, 1)
        horizon = algorithm.rollout.horizon
        _, legal = seen({name: part[:horizon] for name, part in algorithm.rollout.tensors.items()}, keys.OBS)
        taken = algorithm.rollout[keys.ACTIONS][:horizon].unsqueeze(-1) - 5
        assert legal.gather(-1, taken).all()
        assert not legal.all()
    assert torch.isfinite(weights(algorithm)).all()
