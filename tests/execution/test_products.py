"""Products that programs compute by themselves, to the bit: each number is the sum of its terms in their order."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.probes import described

from rl8x.execution import matmul
from rl8x.execution.compiler import load
from rl8x.execution.lowering import lower

ROWS = [
    # rows, terms, columns
    (64, 64, 64),
    (37, 300, 50),  # no whole tiles, two blocks of terms
    (200, 257, 70),  # shared between threads, with another number of rows each
    (17, 20, 530),  # a right side whose rows lie far apart
    (16, 33, 17),
]


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def layouts(rows, terms, columns):
    """Two sides of a product, each as a matrix is, transposed, and a part of a larger one."""
    yield numbers(rows, terms), numbers(terms, columns)
    yield numbers(rows, terms), numbers(columns, terms).t()
    yield numbers(terms, rows).t(), numbers(terms, columns)
    yield numbers(2 * rows, 3 * terms)[::2, 1::3], numbers(terms + 1, columns + 2)[1:, 1:-1]
    yield numbers(rows, 1).expand(rows, terms), numbers(3 * columns, 2 * terms)[::3, ::2].t()


# Fewer rows than a tile has, with a right side that need not be packed.
FEW = [(1, 300, 64), (2, 64, 32), (4, 64, 70), (5, 20, 48), (7, 40, 33), (15, 9, 16)]
PAIRS = [pair for shape in ROWS for pair in layouts(*shape)]
PAIRS += [(numbers(terms, rows).t(), numbers(terms, columns)) for rows, terms, columns in FEW]
BATCH = [(numbers(3, 33, 40), numbers(3, 40, 48)), (numbers(2, 70, 30).mT, numbers(2, 90, 70).mT)]
BESIDE = numbers(64, 5)


def multiplied(*tensors):
    """Multiply all pairs; the first product is a part of a larger matrix too."""
    pairs = list(zip(tensors[::2], tensors[1::2], strict=True))
    products = [torch.bmm(*pair) if pair[0].dim() == 3 else torch.mm(*pair) for pair in pairs]
    return [torch.cat((torch.mm(*pairs[0]), BESIDE), 1), *products]


@pytest.fixture(scope="module")
def products(tmp_path_factory):
    """All products, computed by a program with two threads."""
    tensors = [tensor for pair in [*PAIRS, *BATCH] for tensor in pair]
    description, read = described(multiplied, *tensors)
    folder = tmp_path_factory.mktemp("products")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matmul, "has_own_products", lambda: True)
        lower(dataclasses.replace(description, threads=2), folder / "products.so")
    return load(folder / "products.so")(*tensors, *read)


def in_order(left, right):
    """Sum the terms of each number of a product one after the other, rounded to float32 after each."""
    left, right = (side.numpy().astype(np.longdouble) for side in (left, right))
    total = np.zeros((*left.shape[:-1], right.shape[-1]), np.float32)
    for k in range(left.shape[-1]):
        total = (left[..., :, k : k + 1] * right[..., k : k + 1, :] + total).astype(np.float32)
    return torch.from_numpy(total)


@pytest.mark.parametrize("i", range(len(PAIRS) + len(BATCH)))
def test_a_product_is_the_sum_of_its_terms_in_order(products, i):
    left, right = [*PAIRS, *BATCH][i]
    torch.testing.assert_close(products[1 + i], (left.double() @ right.double()).float(), rtol=1e-4, atol=1e-4)
    cpu = Path("/proc/cpuinfo")
    if cpu.exists() and re.search(r"\bfma\b", cpu.read_text()):  # else products are rounded before they are summed
        assert torch.equal(products[1 + i], in_order(left, right))


@pytest.mark.parametrize(
    ("processor", "has"),
    [("AuthenticAMD\nflags : fma avx2 sse", True), ("AuthenticAMD\nflags : avx", False), ("GenuineIntel avx2", False)],
)
def test_which_processors_multiply_by_themselves_is_read_off_them(processor, has, monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda _: True)
    monkeypatch.setattr(Path, "read_text", lambda _: f"vendor_id : {processor}")
    assert matmul.has_own_products.__wrapped__() is has


def test_a_product_may_be_a_part_of_a_larger_matrix(products):
    assert torch.equal(products[0], torch.cat((products[1], BESIDE), 1))
