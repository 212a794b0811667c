"""Products of matrices and a step of Adam, as programs have them, beside torch's own."""

import functools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.probes import described
from torch.fx.experimental.proxy_tensor import make_fx

from rl8x.algorithms.optimizer import Adam
from rl8x.execution import kernels
from rl8x.execution.lowering import fused, lower

SIZE = st.sampled_from([1, 2, 3, 4, 5, 8, 33, 64])


def random_pair(rows, terms, columns, transposed=False):
    generator = torch.Generator().manual_seed(0)
    left, right, bias = (torch.randn(size, generator=generator) for size in ((rows, terms), (terms, columns), columns))
    return left.t().contiguous().t() if transposed else left, right, bias


@settings(max_examples=150, deadline=None)
@given(SIZE, SIZE, SIZE, st.sampled_from(["", "left", "right"]), st.booleans(), st.sampled_from(["", "stack", "same"]))
def test_a_product_equals_the_usual_one(rows, terms, columns, transposed, biased, stacked):
    """As decomposed of `addmm` and `mm`, or of `baddbmm` and `bmm`, whose left one may be the same for all."""
    left, right, bias = random_pair(rows, terms, columns, transposed == "left")
    if stacked:
        left = left.expand(3, *left.shape) if stacked == "same" else torch.stack([left, -left, left * 2])
        right, bias = torch.stack([right, right + 1, right * 2]), torch.stack([bias, bias * 2, -bias]).unsqueeze(1)
    right = right.mT.contiguous().mT if transposed == "right" else right
    usual = torch.bmm if stacked else torch.mm
    function = (torch.baddbmm if stacked else torch.addmm) if biased else usual
    given = (bias, left, right) if biased else (left, right)
    record = make_fx(function, decomposition_table=kernels.MATMULS)(*given)
    names = {str(node.target) for node in record.graph.nodes if "mm" in str(node.target)}
    assert names == (set() if kernels._thin_product(left, right) is not None else {f"aten.{usual.__name__}.default"})
    result, exact = record(*given), left.double() @ right.double() + (bias.double() if biased else 0.0)
    torch.testing.assert_close(result, exact.float(), atol=2e-5, rtol=1e-5)
    assert result.is_contiguous()


def test_a_sum_with_another_batch_and_other_numbers_and_devices_keep_the_usual_product():
    left = right = torch.ones(2, 8, 8)
    for first, scales in ((left, {}), (left[:, :1], {"beta": 0.5})):
        record = make_fx(functools.partial(torch.baddbmm, **scales), decomposition_table=kernels.MATMULS)
        assert "aten.baddbmm.default" in [str(node.target) for node in record(first, left, right).graph.nodes]
    for change in (torch.Tensor.double, torch.Tensor.half, lambda each: each.to("meta")):
        assert kernels.product(change(left), change(right)) is NotImplemented


@pytest.mark.parametrize(
    ("shape", "fast", "expected"),
    [
        ((64, 4, 64), True, []),
        ((64, 64, 2), True, []),
        ((64, 64, 64), True, ["aten.mm.default"]),
        ((4096, 4, 64), True, ["aten.mm.default"]),
        ((4096, 64, 1), True, []),
        ((4096, 64, 4), True, []),
        ((4096, 64, 5), True, ["aten.mm.default"]),
        ((4096, 64, 64), False, ["aten.mm.default"]),
        ((64, 256, 256), True, ["rl8x.linear.default"]),
        ((63, 256, 256), True, ["aten.mm.default"]),
        ((3, 64, 256, 256), True, ["rl8x.linear.default"] * 3),
        ((17, 1024, 64, 64), True, ["aten.bmm.default"]),  # a batch of attention may have thousands
    ],
)
def test_each_product_is_done_in_its_way(shape, fast, expected, monkeypatch):
    monkeypatch.setattr(kernels, "has_fast_linear", lambda: fast)
    (left, right, bias), usual = random_pair(*shape[-3:]), torch.addmm
    if len(shape) == 4:
        left, right = (each.expand(shape[0], *each.shape) for each in (left, right))
        bias, usual = torch.arange(shape[0]).view(-1, 1, 1) * bias, torch.baddbmm
    record = make_fx(usual, decomposition_table=kernels.MATMULS)(bias, left, right)
    found = [str(node.target) for node in record.graph.nodes]
    assert [name for name in found if "mm" in name or "linear" in name] == expected
    torch.testing.assert_close(record(bias, left, right), usual(bias, left, right), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("has_bfloat16", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(512, 64, 1), (512, 64, 2), (64, 512, 3), (3, 4, 5), (16, 64, 64), (512, 64, 64)])
def test_products_of_bfloat16_are_sums_in_float32(shape, biased, has_bfloat16, monkeypatch):
    monkeypatch.setattr(kernels, "has_bfloat16", lambda: has_bfloat16)
    left, right, bias = (part.bfloat16() for part in random_pair(*shape))
    result = kernels.product(left, right, bias if biased else None)
    usual = shape == (512, 64, 64) and has_bfloat16
    if usual and not biased:
        assert result is NotImplemented
        return
    exact = left.double() @ right.double() + (bias.double() if biased else 0.0)
    batched = kernels.product(left[None], right[None], bias[None, None] if biased else None)
    torch.testing.assert_close(batched[0], result, atol=0.0, rtol=0.0)
    assert result.dtype == torch.bfloat16
    # Rounded to 8 bits, by half of the last one: once, but where bfloat16 is multiplied, before the bias and after it.
    span, roundings = exact.abs() + (bias.double().abs() if biased else 0.0), 2 if usual else 1
    assert ((result.double() - exact).abs() <= 1.01 * roundings * span * 2**-8 + 1e-5).all()


@pytest.mark.long
@pytest.mark.parametrize("stacked", [False, True])
def test_products_by_onednn_are_true_float32_when_compiled(stacked, monkeypatch, tmp_path):
    """Forward with a bias, and the gradients by the inputs and by the weight, a view of a flat vector."""
    monkeypatch.setattr(kernels, "cpu_info", lambda: "vendor_id : AuthenticAMD\nflags : avx512f")
    kernels.has_fast_linear.cache_clear()  # probed before tracing, when tensors have values
    generator = torch.Generator().manual_seed(0)
    shapes = [(*([2] if stacked else []), *shape) for shape in ((256 * 257,), (256, 256), (256, 256))]
    flat, x, slopes = (torch.randn(shape, generator=generator) for shape in shapes)

    def both(flat, x, slopes):
        weight, bias, slopes = flat[..., : 256 * 256].view(x.shape), flat[..., 256 * 256 :], slopes * 2.0
        forward = torch.baddbmm(bias[:, None], x, weight.mT) if stacked else torch.addmm(bias, x, weight.mT)
        return [forward.relu(), slopes @ weight, slopes.mT @ x]

    description, loaded = described(both, flat, x, slopes)
    try:
        graph, _ = fused(*json.loads(description)[:2])
        assert sum(node.target is kernels.LINEAR for node in graph.graph.nodes) == (6 if stacked else 3)
    finally:
        kernels.has_fast_linear.cache_clear()
        monkeypatch.undo()
    monkeypatch.setattr(kernels, "has_fast_linear", lambda: True)
    lower(description, tmp_path / "both.so")
    program = loaded(tmp_path / "both.so")
    for mine, exact in zip(program(flat, x, slopes), both(*(part.double() for part in (flat, x, slopes))), strict=True):
        # Bfloat16 and TF32 would be off by 0.1 and 0.01.
        torch.testing.assert_close(mine, exact.float(), atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("vendor", "flags", "bfloat16", "onednn"),
    [
        ("GenuineIntel", "avx2 avx512f", False, False),
        ("GenuineIntel", "amx_bf16 amx_int8", True, False),
        ("AuthenticAMD", "avx2 avx512f", False, True),
        ("AuthenticAMD", "fma avx512f avx512_bf16", True, True),
        ("AuthenticAMD", "avx2", False, False),
        ("HygonGenuine", "avx2", False, True),
        ("any", "bf16 i8mm", True, True),
    ],
)
def test_vendor_and_flags_decide_what_a_processor_multiplies_fast(vendor, flags, bfloat16, onednn, monkeypatch):
    monkeypatch.setattr(kernels, "cpu_info", lambda: f"vendor_id : {vendor}\nflags : {flags} sse\n")
    assert kernels.has_bfloat16.__wrapped__() is bfloat16
    assert kernels.has_fast_linear.__wrapped__() is onednn


def test_the_probe_trusts_no_operator_that_is_wrong(monkeypatch):
    probe = kernels.has_fast_linear.__wrapped__
    monkeypatch.setattr(kernels, "cpu_info", lambda: "vendor_id : AuthenticAMD\nflags : avx512f")
    assert probe() is True
    for wrong in (lambda x, weight, bias: x, None):  # None: of a torch without it
        monkeypatch.setattr(kernels, "linear", wrong)
        assert probe() is False


OPTIONS = [
    {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled": False},
    {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1, "decoupled": False},
    {"betas": (0.0, 0.95), "eps": 1e-5, "weight_decay": 0.2, "decoupled": True},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_programs_adam_computes_what_the_kernel_does(options):
    """The kernel is checked by algorithms/test_optimizer.py."""

    def step(weights, gradient, first, second, count, lr):
        Adam(**options).apply(weights, gradient, [first, second, count], lr)
        return [weights, first, second, count]

    def start():
        return [torch.linspace(-1.0, 1.0, 40), gradients[0], *torch.zeros(2, 40), torch.zeros(1), torch.tensor(0.1)]

    gradients = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    traced = make_fx(step)(*start())
    lowered = make_fx(traced, decomposition_table=kernels.ADAM)(*start())
    assert ("fused_adam" in traced.code, "fused_adam" in lowered.code) == (True, False)
    mine, its = start(), start()
    for i, gradient in enumerate((*gradients, gradients[0])):
        for function, each in ((lowered, mine), (step, its)):
            each[1] = gradient.clone()
            each[-1].fill_(0.1 if i < 5 else 0.0)  # at last only the moments are moved
            function(*each)
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)
