from __future__ import annotations

import pytest
import torch

from rl8x.algorithms import PPOConfig
from rl8x.algorithms.on_policy.minibatches import SequencePack
from rl8x.envs import CartPole


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
