"""What a program may do differently from its function, and what it may not."""

import dataclasses
import functools
import re

import pytest
import torch
from tests.probes import described

from rl8x.algorithms import PPOConfig
from rl8x.envs import CartPole, Pendulum
from rl8x.execution import lowering, traces
from rl8x.execution.verification import TOLERANCES, Check, verdict

STEP, UPDATE = Check("step"), Check("update", "update")
COARSE = {check.kind: dataclasses.replace(check, tolerance=TOLERANCES["bf16"]) for check in (STEP, UPDATE)}


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def judged(program, function, held, check, **options):
    """Return the verdict, and check that nothing was changed."""
    before = [each.clone() for each in held]
    found = verdict(lambda: program(*held), lambda: function(*held), held, check, **options)
    assert all(torch.equal(one, two) for one, two in zip(held, before, strict=True))
    return found


# -- steps: 400 rows; actions, flags, observations of very different size, rewards


def step(obs, frame, dones):
    frame.copy_(obs)
    actions = (obs[:, 0] > 0).long()
    rewards = 0.01 * obs.sum(1)
    dones.logical_or_(obs[:, 1] > 2)
    return [actions, obs * torch.tensor([1.0, 1e3, 0.1]), rewards]


def flip(rows, results, frame, dones):
    results[0][:rows] ^= 1
    for each in (*results[1:], frame):
        each[:rows] += 100.0  # and all that follows from an action


STEPS = {
    "rounding": (lambda results, frame, _: results[1].mul_(1 + 1e-6), ""),
    "a few sampled actions": (functools.partial(flip, 4), ""),
    "more actions": (functools.partial(flip, 5), "step: 5 of 400 rows have other actions or flags"),
    "a reward off by 1%": (lambda results, *_: results[2].mul_(1.01), r"step: result 2 is off by 0\.0\d+ of .*"),
    "one row": (lambda results, *_: results[1][7].add_(1.0), "step: result 1 is off by.*"),
    "a small column": (lambda results, *_: results[1][:, 2].mul_(1.05), "step: result 1 is off by.*"),
    "a copy that was dropped": (lambda _, frame, __: frame.mul_(0.0), "step: tensor 1 is off by.*"),
    "flags that are not written": (lambda _, __, dones: dones.zero_(), "step: .* rows have other actions or flags"),
    "what is not finite": (lambda results, *_: results[2][3:4].fill_(torch.nan), "step: result 2 is off by inf.*"),
    "swapped results": (lambda results, *_: [results[0], results[1].flip(1), results[2]], "step: result 1 is off by.*"),
}


@pytest.mark.parametrize("what", STEPS)
def test_a_step_is_compared_row_by_row(what):
    change, expected = STEPS[what]

    def program(obs, frame, dones):
        results = step(obs, frame, dones)
        changed = change(results, frame, dones)
        return changed if isinstance(changed, list) else results

    held = [normal(400, 3), torch.zeros(400, 3), torch.zeros(400, dtype=torch.bool)]
    found = judged(program, step, held, STEP)
    assert re.fullmatch(expected, found), found


def test_a_column_that_cancels_to_0_is_as_exact_as_its_neighbours_and_what_is_not_finite_is_so_in_both():
    held = [normal(8, 2)]
    finite = lambda x: [x.log(), x / 0]  # noqa: E731, which may be infinite, or not numbers, in both
    assert judged(finite, finite, held, STEP) == judged(finite, finite, held, UPDATE) == ""
    function = lambda x: [torch.stack((x[:, 0], x[:, 0] * 0), 1)]  # noqa: E731
    assert judged(lambda x: [function(x)[0] + torch.tensor([0.0, 1e-6])], function, held, STEP) == ""
    assert judged(lambda x: [function(x)[0] + torch.tensor([0.0, 1e-3])], function, held, STEP) != ""


@pytest.mark.parametrize(("rows", "flips", "agrees"), [(8, 1, True), (8, 2, False), (1, 1, False), (100, 5, True)])
def test_in_bfloat16_a_row_of_a_few_may_differ(rows, flips, agrees):
    change = lambda x: [torch.cat((1 - x[:flips], x[flips:]))]  # noqa: E731
    held = [torch.ones(rows, dtype=torch.int64)]
    assert (judged(change, lambda x: [x], held, COARSE["step"]) == "") == agrees
    assert judged(change, lambda x: [x], held, STEP) != ""


def test_the_items_of_a_loop_are_in_the_row_of_their_copy():
    """A flip in the first step changes that copy in all later ones."""
    slots = torch.zeros(2, 200)  # of a rollout, which a loop writes in place
    flipped = slots.clone()
    flipped[1, :2] = 1.0
    first, second = ([each.clone(), each > 0] for each in (slots, flipped))
    assert judged(lambda _: second, lambda _: first, [slots], STEP, items=[0]) == ""
    writes = [lambda slots, each=each: [slots.copy_(each[0]), each[1]][1:] for each in (second, first)]
    assert judged(*writes, [slots], STEP, items=[0]) == ""
    assert judged(*writes, [slots], STEP) != ""


# -- updates: those of PPO, whose program is what was traced of another loss


@pytest.mark.parametrize("clip", [1e-3, 1e3], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("factor", [0.5, 3.0, -1.0, 1.05])
@pytest.mark.parametrize("env", [CartPole, Pendulum])
def test_an_update_with_another_factor_of_its_loss_is_refused(env, factor, clip, monkeypatch):
    sizes = {"num_envs": 8, "horizon": 8, "sgd_minibatch_size": 32, "model_config": {"hidden_sizes": [16]}}
    algorithm = PPOConfig(seed=2, device="cpu", max_grad_norm=clip, **sizes).build(env)
    algorithm.collect()
    algorithm.step()  # the moments are not 0
    updater, objective = algorithm.updater, algorithm.updater.objective
    held = updater._arguments(updater._state, torch.arange(32), updater._scale([torch.arange(32)]))

    def scaled(*given):
        """A loss with another factor; its metrics are shown as they were."""
        found = objective.losses(*given)
        return found + (factor - 1.0) * (found - found.detach())

    def program(*tensors):
        with monkeypatch.context() as patch:
            patch.setattr(updater, "objective", objective._replace(losses=scaled))
            return updater._update_tensors(*tensors)

    assert judged(updater._update_tensors, updater._update_tensors, held, UPDATE) == ""
    assert judged(program, updater._update_tensors, held, UPDATE).startswith("update: ")


METRICS = {
    "rounding": ([1e-9, 2.0, -5.0 - 1e-3], ""),
    "one that cancels to 0": ([2e-5, 2.0, -5.0], "update: a metric is off by.*"),
    "another": ([0.0, 2.01, -5.0], r"update: a metric is off by 0\.005 of its size, where 0\.001 is rounding"),
    "swapped": ([2.0, 0.0, -5.0], "update: a metric is off by.*"),
}


@pytest.mark.parametrize("what", METRICS)
def test_each_metric_is_compared_by_its_own_size(what):
    metrics, expected = METRICS[what]
    found = judged(lambda: [torch.tensor(metrics)], lambda: [torch.tensor([0.0, 2.0, -5.0])], [], UPDATE)
    assert re.fullmatch(expected, found), found


def test_of_what_an_update_writes_the_change_is_compared():
    weights, change = normal(1000), 1e-3 * normal(1000, 1).squeeze(1)
    update = lambda weights, factor=1.0: [weights.add_(factor * change)[:0]]  # noqa: E731
    for factor, agrees in ((1.001, True), (1.05, False), (-1.0, False), (0.0, False)):
        found = judged(functools.partial(update, factor=factor), update, [weights], UPDATE)
        assert (found == "") == agrees, found


# -- a program of torch's compiler


def frames(now, before, new):
    old = now.clone()
    now.copy_(new)
    before.copy_(old)
    return [before + 0.0]


@pytest.mark.long
@pytest.mark.parametrize(("kept", "expected"), [(traces.KEPT, ""), (torch.ops.aten.clone.default, "step: ")])
def test_the_copy_that_inductor_drops_is_noticed(kept, expected, monkeypatch, tmp_path):
    """The fault that `KEPT` is there for: both become the new value. torch 2.15 has mended it."""
    expected = expected if torch.__version__ < "2.15" else ""
    held = [normal(4, 3), torch.zeros(4, 3), normal(4, 3) + 1]
    monkeypatch.setattr(traces, "KEPT", kept)
    description, loaded = described(frames, *held)
    lowering.lower(description, tmp_path / "program.so")
    assert judged(loaded(tmp_path / "program.so"), frames, held, STEP)[:6] == expected
