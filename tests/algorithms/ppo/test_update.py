"""Minibatches, and the programs that learn from them."""

from __future__ import annotations

import pytest
import torch
from tests.algorithms.test_conformance import build, train, weights
from tests.probes import traced_only

from rl8x.algorithms import PPOConfig
from rl8x.algorithms.on_policy.minibatches import SequencePack
from rl8x.envs import CartPole


@pytest.fixture(autouse=True)
def _traced_only(monkeypatch):
    """Run the trace itself: what a compiled program computes, without the half minute that compiling takes."""
    traced_only(monkeypatch)


CHUNKED = ["ppo, continuous", "ppo, entropy and dual clip", "ppo, one batch", "ppo, accumulated", "ppo, kl limit"]
CHUNKED += ["ppo, adamw", "ppo, lstm", "ppo, gru", "ppo, advantages again, gru"]


@pytest.fixture
def small_chunks(monkeypatch):
    """Cut small minibatches into chunks for two workers, as large ones are."""
    monkeypatch.setattr("rl8x.execution.execution._SHARED_WORK", 0)
    monkeypatch.setattr("rl8x.execution.execution._SHARED_WORK_EAGER", 0)
    monkeypatch.setattr("rl8x.algorithms.on_policy.update._CHUNK_STEPS", 5)
    monkeypatch.setattr("rl8x.algorithms.on_policy.update._CHUNK_ACTIVATIONS", 64)
    torch.set_num_threads(2)  # `apart` in tests/conftest.py sets it back


@pytest.mark.parametrize("mode", ["eager", "compile"])
@pytest.mark.parametrize("case", CHUNKED)
def test_gradients_of_chunks_by_two_workers_add_up_to_the_whole_ones(case, mode, request):
    whole = build(case)
    train(whole, 1)
    request.getfixturevalue("small_chunks")
    chunked = build(case, execution=mode)
    train(chunked, 1)
    assert len(chunked.updater._gradients) == 2
    torch.testing.assert_close(weights(chunked), weights(whole), atol=1e-5, rtol=1e-5)


# -- minibatches


def rollout(horizon, num_envs):
    """A narrow and a wide key whose every number says its step and its copy."""
    t, copy = torch.arange(horizon).view(-1, 1), torch.arange(num_envs)
    number = 100 * t + copy
    wide = (number.view(horizon, num_envs, 1, 1) % 251).to(torch.uint8).expand(-1, -1, 20, 15).contiguous()
    return {"obs": wide, "actions": number, "flags": number % 2 == 0, "x": torch.randn(horizon, num_envs, 2)}


@pytest.mark.parametrize("seq_len", [1, 3])
def test_sequences_hold_what_the_rollout_held(seq_len):
    horizon, num_envs = 6, 4
    tensors = rollout(horizon, num_envs)
    states = {"h": torch.randn(horizon // seq_len, num_envs, 5)}
    pack = SequencePack(horizon, num_envs, seq_len)
    pack.fill(tensors, states)
    rows = torch.tensor([5, 0, 7, 2])
    batch, state = pack.gather(rows)
    assert batch.keys() == tensors.keys()
    for i, number in enumerate(rows.tolist()):
        sequence, copy = divmod(number, num_envs)
        steps = slice(sequence * seq_len, (sequence + 1) * seq_len)
        for name, tensor in tensors.items():
            assert batch[name].dtype == tensor.dtype
            assert torch.equal(batch[name][:, i], tensor[steps, copy]), name
        assert torch.equal(state["h"][i], states["h"][sequence, copy])
    tensors["obs"].fill_(7)  # what is wide is not copied
    assert (pack.gather(rows)[0]["obs"] == 7).all()


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("minibatch", "chunk"), [(4, 4), (4, 3), (12, 5)])
def test_an_epoch_sees_every_row_once_in_chunks(minibatch, chunk, shuffle):
    sizes = {"num_envs": 4, "horizon": 3, "sgd_minibatch_size": minibatch, "shuffle_minibatches": shuffle}
    algorithm = PPOConfig(**sizes, device="cpu", seed=1).build(CartPole)
    algorithm.collect()
    algorithm.set_targets()
    updater = algorithm.updater
    updater.chunk_rows = lambda _: chunk
    with updater.begin():
        rows = [part.tolist() for batch in updater.minibatches() for part in batch]
    assert [len(part) for part in rows] == {(4, 4): [4] * 3, (4, 3): [3, 1] * 3, (12, 5): [5, 5, 2]}[minibatch, chunk]
    seen = [row for part in rows for row in part]
    assert sorted(seen) == list(range(12))
    assert (seen == list(range(12))) == (not shuffle or minibatch == 12)


@pytest.mark.parametrize(("limit", "calls"), [(None, [6]), (1e9, [2, 2, 2]), (1e-9, [2])])
def test_the_updates_of_a_step_are_one_program_unless_a_limit_may_end_them_after_an_epoch(limit, calls):
    """Three epochs of two minibatches; the orders of those that are not begun are not drawn."""
    options = {"num_sgd_iters": 3, "target_kl_div": limit, "lr": 0.05}
    eager, traced = build("ppo", **options), build("ppo", **options, execution="compile")
    program, made = traced.updater._updates, []

    def counted(*tensors):
        made.append(len(tensors[-1]))
        return program(*tensors)

    counted.prepare = program.prepare
    traced.updater._updates = counted
    for algorithm in (eager, traced):
        algorithm.collect()
        algorithm.step()
    assert made == calls
    assert torch.equal(traced.updater.generator.get_state(), eager.updater.generator.get_state())
    assert traced.counters == eager.counters
    torch.testing.assert_close(weights(traced), weights(eager), atol=1e-4, rtol=1e-4)
