from typing import NamedTuple

import pytest
import torch

from rl8x.trees import flat_of


class Pair(NamedTuple):
    first: torch.Tensor
    rest: object


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 0), (1, 4), (4, 1), (2, 1, 3)])
def test_a_tree_is_its_tensors_row_by_row_and_what_rebuilds_it(shape):
    made = torch.ones(shape)
    odd = made.as_strided(shape, [7 if size == 1 else step for size, step in zip(shape, made.stride(), strict=True)])
    tree = ({"a": made, "b": (None, odd)}, Pair(torch.arange(6.0).view(2, 3).t(), {}))
    tensors, rebuilt = flat_of(tree)
    assert tensors[0] is made
    assert (tensors[1].stride(), tensors[2].stride()) == (made.stride(), (2, 1))
    again = rebuilt([each + 1 for each in tensors])
    assert (again[0]["b"][0], again[1].rest, type(again[1])) == (None, {}, Pair)
    assert torch.equal(again[0]["b"][1], odd + 1)
    assert torch.equal(again[1].first, tree[1].first + 1)


def test_parts_are_found_by_name_in_whatever_order_a_dict_has_them():
    """A model may return its state in another order than its `initial_state`, and programs know parts by place."""
    tensors, rebuilt = flat_of({"h": torch.zeros(2), "c": {"z": torch.ones(2), "a": torch.full((2,), 2.0)}})
    others, back = flat_of({"c": {"a": torch.full((2,), 2.0), "z": torch.ones(2)}, "h": torch.zeros(2)})
    assert all(one.equal(other) for one, other in zip(tensors, others, strict=True))
    again, same = rebuilt(tensors), back(tensors)
    assert ([*again], [*again["c"]], [*same], [*same["c"]]) == (["h", "c"], ["z", "a"], ["c", "h"], ["a", "z"])
    assert [each.tolist() for each in (again["h"], again["c"]["z"], same["c"]["a"])] == [[0, 0], [1, 1], [2, 2]]
