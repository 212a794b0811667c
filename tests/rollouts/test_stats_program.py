"""Statistics that a program computes are those of the function, also of numbers that are not finite."""

import functools
import math

import pytest
import torch

from rl8x.algorithms.off_policy.off_policy import collected_stats
from rl8x.execution import Execution
from rl8x.rollouts.statistics import StatsProgram

HORIZON, COPIES = 3, 20
CPU = torch.device("cpu")


def rollout(seed=0):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(HORIZON + 1, COPIES, 2, generator=generator)
    ended = torch.rand(2, HORIZON + 1, COPIES, generator=generator) < 0.2
    return {
        "obs": drawn,
        "actions": torch.zeros(HORIZON + 1, COPIES, dtype=torch.int64),
        "rewards": drawn[..., 0] * 3.0,
        "terminated": ended[0],
        "truncated": ended[1],
        "episode_returns": drawn[..., 1].clone(),
        "episode_lengths": torch.arange(HORIZON * COPIES + COPIES).view(HORIZON + 1, COPIES),
        "metrics/height": torch.where(drawn[..., 1] > 0, drawn[..., 0], torch.nan),
        "next_obs": drawn + 1.0,
    }


@pytest.fixture(scope="module")
def compiled():
    program = StatsProgram(functools.partial(collected_stats, horizon=HORIZON), Execution("compile", "fp32", CPU))
    program.prepare(rollout())
    return program


def alike(compiled, tensors):
    found, expected = compiled(tensors), compiled.summarise(tensors)
    counted, gates = found.counted()
    assert all(type(value) is float for value in found.unread()[0].values())
    assert gates == expected.counted()[1]
    assert counted.keys() == expected.counted()[0].keys()
    assert dict(found) == pytest.approx(dict(expected), rel=1e-5, abs=1e-6, nan_ok=True)
    return dict(found)


def test_numbers_are_the_functions(compiled):
    for seed in (1, 2):
        alike(compiled, rollout(seed))


def test_a_program_of_an_earlier_run_is_found_and_names_its_numbers(compiled, monkeypatch):
    compiled(rollout())
    again = StatsProgram(compiled.summarise, Execution("compile", "fp32", CPU))
    monkeypatch.setattr("rl8x.execution.compiled.verdict", lambda *_: pytest.fail("verified again"))
    again.prepare(rollout())
    alike(again, rollout(3))


def test_figures_of_episodes_are_left_out_where_none_ended(compiled):
    tensors = rollout() | {
        name: torch.zeros(HORIZON + 1, COPIES, dtype=torch.bool) for name in ("terminated", "truncated")
    }
    row = alike(compiled, tensors)
    assert row["episodes/ended"] == 0.0
    assert "episodes/returns/mean" not in row


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("key", "flag"), [("obs", "observations"), ("next_obs", "observations"), ("rewards", "rewards")]
)
def test_one_number_that_is_not_finite_is_seen_wherever_it_is(compiled, number, key, flag):
    for place in range(0, HORIZON * COPIES, 7):
        tensors = rollout()
        tensors[key].view((HORIZON + 1) * COPIES, -1)[place, -1] = number
        row = compiled(tensors)
        assert [name for name, value in row.items() if name.startswith("finite/") and value] == [f"finite/{flag}"]


def test_other_names_and_shapes_are_summarised_without_a_program(compiled):
    more = rollout() | {"metrics/speed": torch.ones(HORIZON + 1, COPIES)}
    assert dict(compiled(more)) == pytest.approx(dict(compiled.summarise(more)), nan_ok=True)
    fewer = {name: tensor[:, :5] for name, tensor in rollout().items()}
    assert compiled(fewer)["rewards/mean"] == pytest.approx(float(fewer["rewards"][:HORIZON].mean()))


def test_what_was_not_asked_for_or_is_eager_has_no_program():
    for mode, prepares in (("compile", False), ("eager", True)):
        program = StatsProgram(functools.partial(collected_stats, horizon=HORIZON), Execution(mode, "fp32", CPU))
        if prepares:
            program.prepare(rollout())
        assert any(isinstance(value, torch.Tensor) for value in program(rollout()).unread()[0].values())
