import pytest
import torch
from tests.probes import traced_only

from rl8x.algorithms import DQNConfig
from rl8x.algorithms.off_policy.updates import block_size
from rl8x.envs import CartPole


def build(**options):
    settings = {"num_envs": 8, "horizon": 2, "seed": 2, "device": "cpu", "model_config": {"hidden_sizes": [16]}}
    settings |= {"warmup_steps": 16, "batch_size": 16, "buffer_size": 100, "updates_per_sample": 0.3}
    return DQNConfig(**{**settings, **options}).build(CartPole)


def train(algorithm, steps=6):
    rows = []
    for _ in range(steps):
        collected = algorithm.collect()
        rows.append({**collected, **algorithm.step()})
    return rows


CASES = {
    "plain": {"double": False},
    "double dueling": {"dueling": True, "n_step": 3},
    "soft target": {"tau": 0.01, "target_interval": 1, "optimizer": "adamw", "max_grad_norm": 0.1},
    "normalised": {"normalize_observations": True, "huber_delta": None},
    "prioritised": {"prioritized": True, "updates_per_sample": 1.5},
    "atoms": {"num_atoms": 5, "v_min": -1.0, "v_max": 9.0, "prioritized": True, "n_step": 2},
    "quantiles": {"num_quantiles": 3, "huber_delta": 1.0, "dueling": True},
    "schedules": {"lr_schedule": {"kind": "interp", "points": [[0, 0.01], [200, 0.0]]}, "epsilon": 0.5},
}


@pytest.mark.parametrize("case", CASES)
def test_traced_updates_have_the_bits_of_eager_ones(case, monkeypatch):
    traced_only(monkeypatch)
    eager, traced = build(**CASES[case], execution="eager"), build(**CASES[case], execution="compile")
    assert train(eager) == train(traced)
    assert eager.counters == traced.counters
    assert all(map(torch.equal, eager.nets.state, traced.nets.state))


def test_compiled_updates_equal_eager_ones(monkeypatch):
    options = {"updates_per_sample": 0.25}  # 4 updates at once
    eager, compiled = build(**options, execution="eager"), build(**options, execution="compile")
    monkeypatch.setattr(
        compiled.horizons.collector, "stepper", compiled.horizons.collector.stepper._eager
    )  # tested where it is
    rows, others = train(eager), train(compiled)
    assert eager.counters["algorithm/updates"] > 16
    for row, other in zip(rows, others, strict=True):
        assert row == pytest.approx(other, rel=1e-4, abs=1e-5)
    for one, two in zip(eager.nets.state, compiled.nets.state, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)


def test_a_run_changes_from_eager_to_compiled_updates(monkeypatch):
    traced_only(monkeypatch)
    eager, changing = build(execution="eager"), build(execution="auto")
    changing.execution.plan(0.5 / 3, 200)
    assert changing.execution.starts_at == 3
    for step in range(6):
        changing.execution.begin_step(step)
        for algorithm in (eager, changing):
            algorithm.collect()
            algorithm.step()
    assert changing.execution.mode == "compile"
    assert all(map(torch.equal, eager.nets.state, changing.nets.state))


def test_products_in_bfloat16_are_near_those_in_float32():
    half, full = build(precision="bf16", execution="eager"), build(execution="eager")
    for algorithm in (half, full):
        train(algorithm, 3)
    assert half.nets.state[0].dtype == torch.float32
    assert 0 < (half.nets.state[0] - full.nets.state[0]).abs().max() < 0.05


@pytest.mark.parametrize(
    ("updates", "batch_bytes", "masks", "most", "expected"),
    [
        (32, 1000, False, None, 32),
        (42.7, 1000, False, None, 42),
        (0.3, 1000, False, None, 1),
        (64, 2**22, False, None, 16),
        (64, 2**30, False, None, 1),
        (64, 1000, False, 16, 16),
        (64, 1000, True, None, 8),
    ],
)
def test_blocks_are_as_large_as_a_step_has_updates_and_memory_allows(updates, batch_bytes, masks, most, expected):
    assert block_size(updates, batch_bytes, masks=masks, most=most) == expected
