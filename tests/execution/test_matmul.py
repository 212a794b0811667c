import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.probes import described
from torch.fx.experimental.proxy_tensor import make_fx

from rl8x.execution import kernels as products
from rl8x.execution.lowering import fused, lower

SIZE = st.sampled_from([1, 2, 3, 4, 5, 8, 33, 64])


def random_pair(rows, terms, columns, transposed, seed=0):
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(*((terms, rows) if transposed else (rows, terms)), generator=generator)
    return (
        left.t() if transposed else left,
        torch.randn(terms, columns, generator=generator),
        torch.randn(columns, generator=generator),
    )


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
    record = make_fx(function, decomposition_table=products.MATMULS)(*given)
    names = {str(node.target) for node in record.graph.nodes if "mm" in str(node.target)}
    assert names == (set() if products._thin_product(left, right) is not None else {f"aten.{usual.__name__}.default"})
    result, exact = record(*given), left.double() @ right.double() + (bias.double() if biased else 0.0)
    torch.testing.assert_close(result, exact.float(), atol=2e-5, rtol=1e-5)
    assert result.is_contiguous()


def test_a_sum_with_another_batch_and_other_numbers_and_devices_keep_the_usual_product():
    whole, left, right = torch.ones(2, 8, 8), torch.ones(2, 8, 8), torch.ones(2, 8, 8)
    for scales in ({}, {"beta": 0.5}):
        record = make_fx(lambda *given, s=scales: torch.baddbmm(*given, **s), decomposition_table=products.MATMULS)
        first = whole if not scales else whole[:, :1]
        assert "aten.baddbmm.default" in [str(node.target) for node in record(first, left, right).graph.nodes]
    for change in (torch.Tensor.double, torch.Tensor.half, lambda each: each.to("meta")):
        assert products.product(change(left), change(right)) is NotImplemented


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
    monkeypatch.setattr(products, "has_fast_linear", lambda: fast)
    (left, right, bias), usual = random_pair(*shape[-3:], False), torch.addmm
    if len(shape) == 4:
        left, right = (each.expand(shape[0], *each.shape) for each in (left, right))
        bias, usual = torch.arange(shape[0]).view(-1, 1, 1) * bias, torch.baddbmm
    record = make_fx(usual, decomposition_table=products.MATMULS)(bias, left, right)
    found = [str(node.target) for node in record.graph.nodes]
    assert [name for name in found if "mm" in name or "linear" in name] == expected
    torch.testing.assert_close(record(bias, left, right), usual(bias, left, right), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("has_bfloat16", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(512, 64, 1), (512, 64, 2), (64, 512, 3), (3, 4, 5), (16, 64, 64), (512, 64, 64)])
def test_products_of_bfloat16_are_sums_in_float32(shape, biased, has_bfloat16, monkeypatch):
    monkeypatch.setattr(products, "has_bfloat16", lambda: has_bfloat16)
    left, right, bias = (part.bfloat16() for part in random_pair(*shape, False))
    result = products.product(left, right, bias if biased else None)
    usual = shape == (512, 64, 64) and has_bfloat16
    if usual and not biased:
        assert result is NotImplemented
        return
    exact = left.double() @ right.double() + (bias.double() if biased else 0.0)
    batched = products.product(left[None], right[None], bias[None, None] if biased else None)
    torch.testing.assert_close(batched[0], result, atol=0.0, rtol=0.0)
    assert result.dtype == torch.bfloat16
    # Rounded to 8 bits, by half of the last one: once, but where bfloat16 is multiplied, before the bias and after it.
    span, roundings = exact.abs() + (bias.double().abs() if biased else 0.0), 2 if usual else 1
    assert ((result.double() - exact).abs() <= 1.01 * roundings * span * 2**-8 + 1e-5).all()


@pytest.mark.long
@pytest.mark.parametrize("stacked", [False, True])
def test_products_by_onednn_are_true_float32_when_compiled(stacked, monkeypatch, tmp_path):
    """Forward with a bias, and the gradients by the inputs and by the weight, a view of a flat vector."""
    monkeypatch.setattr(products, "cpu_info", lambda: "vendor_id : AuthenticAMD\nflags : avx512f")
    products.has_fast_linear.cache_clear()  # probed before tracing, when tensors have values
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
        assert sum(node.target is products.LINEAR for node in graph.graph.nodes) == (6 if stacked else 3)
    finally:
        products.has_fast_linear.cache_clear()
        monkeypatch.undo()
    monkeypatch.setattr(products, "has_fast_linear", lambda: True)
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
    monkeypatch.setattr(products, "cpu_info", lambda: f"vendor_id : {vendor}\nflags : {flags} sse\n")
    assert products.has_bfloat16.__wrapped__() is bfloat16
    assert products.has_fast_linear.__wrapped__() is onednn


def test_the_probe_trusts_no_operator_that_is_wrong(monkeypatch):
    probe = products.has_fast_linear.__wrapped__
    monkeypatch.setattr(products, "cpu_info", lambda: "vendor_id : AuthenticAMD\nflags : avx512f")
    assert probe() is True
    for wrong in (lambda x, weight, bias: x, None):  # None: of a torch without it
        monkeypatch.setattr(products, "linear", wrong)
        assert probe() is False
