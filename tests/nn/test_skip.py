from __future__ import annotations

import pytest
import torch

from rl8x.nn import Skip


def test_the_kinds():
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    residual, cat, none = (Skip(kind, 3, 3) for kind in ("residual", "cat", "none"))
    assert torch.equal(residual(x, y), x + y)
    assert torch.equal(cat(x, y), torch.cat([x, y], -1))
    assert none(x, y) is y
    assert (residual.num_outputs, cat.num_outputs, none.num_outputs) == (3, 6, 3)
    assert Skip("cat", 3, 5).num_outputs == 8


def test_what_is_wrong_is_said():
    with pytest.raises(ValueError, match="Did you mean 'residual'"):
        Skip("residul", 3, 3)
    with pytest.raises(ValueError, match="equal widths; got 3 and 4"):
        Skip("residual", 3, 4)
