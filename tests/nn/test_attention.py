from __future__ import annotations

import pytest
import torch
from torch import nn

from rl8x.nn import (
    Attention,
    CrossAttention,
    Perceiver,
    PointerNetwork,
    PositionalEmbedding,
    SelfAttention,
    SelfAttentionStack,
)

BATCH, QUERIES, KEYS, WIDTH, HEADS = 3, 4, 5, 8, 2


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, QUERIES, WIDTH, generator=generator)
    context = torch.randn(BATCH, KEYS, 6, generator=generator)
    mask = torch.rand(BATCH, QUERIES, KEYS, generator=generator) < 0.6
    mask[..., 0] = True
    return x, context, mask


CAUSAL = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril()


@pytest.mark.parametrize("masked", ["", "each query", "all alike"])
def test_attention_agrees_with_torchs_module(masked):
    x, context, mask = inputs()
    mask = {"": None, "each query": mask, "all alike": CAUSAL}[masked]
    attention = Attention(WIDTH, HEADS, context_width=6)
    reference = nn.MultiheadAttention(WIDTH, HEADS, kdim=6, vdim=6, batch_first=True)
    layers = (attention.query, attention.key, attention.value)
    with torch.no_grad():
        for layer, weight in zip(layers, ("q_proj_weight", "k_proj_weight", "v_proj_weight"), strict=True):
            layer.bias.normal_()
            getattr(reference, weight).copy_(layer.weight)
        reference.in_proj_bias.copy_(torch.cat([layer.bias for layer in layers]))
        reference.out_proj.load_state_dict(attention.out.state_dict())
    # In torch's module, True is where a query may not look, for each head.
    theirs = None if mask is None else ~(mask if mask.dim() == 2 else mask.repeat_interleave(HEADS, 0))
    expected, _ = reference(x, context, context, attn_mask=theirs, need_weights=False)
    assert torch.allclose(attention(x, context, mask), expected, atol=1e-6)


def test_a_mask_of_the_context_serves_every_query_and_who_may_look_nowhere_gathers_zeros():
    x, context, mask = inputs()
    attention = Attention(WIDTH, HEADS, context_width=6)
    padding = torch.tensor([[True] * 5, [True, True, False, False, False], [False, True, True, True, True]])
    out = attention(x, context, padding.unsqueeze(1))
    assert torch.allclose(out[1:2], attention(x[1:2], context[1:2, :2]), atol=1e-6)
    assert torch.allclose(out[2:3], attention(x[2:3], context[2:3, 1:]), atol=1e-6)
    mask[1, 2] = False
    out = attention(x, context.requires_grad_(), mask)
    assert torch.allclose(out[1, 2], attention.out.bias)
    for loss, reached in ((out.square().sum(), True), (out[1, 2].sum(), False)):
        (gradient,) = torch.autograd.grad(loss, context, retain_graph=True)
        assert (bool(gradient.isfinite().all()), bool(gradient.any())) == (True, reached)


def joined(skip: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if skip == "residual":
        return x + y
    return torch.cat([x, y], -1) if skip == "cat" else y


@pytest.mark.parametrize(("skip", "width"), [("residual", 8), ("none", 8), ("cat", 24)])
def test_a_block_is_attention_and_a_perceptron_with_skip_connections(skip, width):
    x, context, mask = inputs()
    block = CrossAttention(WIDTH, HEADS, context_width=6, hidden_size=10, skip=skip)
    gathered = block.attention(block.query_norm(x), block.context_norm(context), mask)
    between = joined(skip, x, gathered)
    outputs = block.mlp(block.mlp_norm(between))
    expected = joined(skip, between, outputs)
    assert torch.equal(block(x, context, mask), expected)
    assert block.num_outputs == expected.shape[-1] == width


def test_self_attention_is_attention_to_itself():
    x, _, _ = inputs()
    block = SelfAttention(WIDTH, HEADS)
    cross = CrossAttention(WIDTH, HEADS)
    cross.load_state_dict(block.state_dict(), strict=False)
    cross.context_norm.load_state_dict(block.query_norm.state_dict())
    mask = torch.ones(QUERIES, QUERIES, dtype=torch.bool).tril()
    assert torch.equal(block(x, mask), cross(x, x, mask))
    changed = x.clone()
    changed[:, -1] += 1.0
    assert torch.equal(block(changed, mask)[:, :-1], block(x, mask)[:, :-1])
    assert not torch.equal(block(changed)[:, :-1], block(x)[:, :-1])


def test_a_stack_applies_its_blocks_in_order():
    x, _, _ = inputs()
    stack = SelfAttentionStack(WIDTH, HEADS, 3)
    expected = x
    for block in stack.blocks:
        expected = block(expected)
    assert len(stack.blocks) == 3
    assert torch.equal(stack(x), expected)
    assert SelfAttentionStack(WIDTH, HEADS, 2, skip="cat")(x).shape == (BATCH, QUERIES, 72)


def test_each_position_has_its_vector():
    positions = PositionalEmbedding(5, 3)
    x = torch.randn(2, 4, 3)
    for i in range(4):
        assert torch.equal(positions(x)[:, i], x[:, i] + positions.weight[i])
    positions(x).sum().backward()
    assert positions.weight.grad[:, 0].tolist() == [2.0, 2.0, 2.0, 2.0, 0.0]


# -- perceivers and pointer networks


def test_latents_read_the_inputs_and_then_each_other():
    perceiver = Perceiver(6, 4, 8, num_heads=2, num_layers=2, num_blocks=2)
    x = torch.randn(3, 5, 6)
    latents = perceiver.latents.expand(3, 4, 8)
    assert len(perceiver.reads) == len(perceiver.stacks) == 2
    for layer in range(2):
        latents = perceiver.stacks[layer](perceiver.reads[layer](latents, x))
    assert torch.equal(perceiver(x), latents)
    assert perceiver(x).shape == (3, 4, perceiver.num_outputs)


def test_masked_inputs_are_as_if_they_were_not_there():
    # In float32 the order of a sum shows in the seventh digit.
    perceiver, x = Perceiver(6, 4, 8, num_layers=2).double(), torch.randn(3, 5, 6).double()
    mask = torch.tensor([True, True, False, True, False]).expand(3, 5)
    assert torch.allclose(perceiver(x, mask), perceiver(x[:, [0, 1, 3]]), atol=1e-6)


def test_a_pointers_scores_by_hand_and_masked_elements_are_never_chosen():
    pointer = PointerNetwork(3, 4, 5)
    query, elements = torch.randn(7, 2, 4), torch.randn(7, 2, 6, 3, requires_grad=True)
    logits = pointer(query, elements)
    hidden = elements[3, 1, 2] @ pointer.key.weight.T + query[3, 1] @ pointer.query.weight.T + pointer.query.bias
    assert torch.allclose(logits[3, 1, 2], torch.tanh(hidden) @ pointer.score.weight[0], atol=1e-6)
    assert torch.allclose(logits[3], pointer(query[3], elements[3]), atol=1e-6)
    mask = torch.tensor([True, False, True, True, False, True]).expand(7, 2, 6)
    probs = pointer(query, elements, mask).softmax(-1)
    assert not probs[~mask].any()
    assert torch.allclose(probs.sum(-1), torch.ones(7, 2))
    (gradient,) = torch.autograd.grad(probs.square().sum(), elements)
    assert not gradient[~mask].any()
