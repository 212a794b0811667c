import torch
from torch.fx.experimental.proxy_tensor import make_fx

from rl8x.execution.hoisting import COMPUTED, hoist_scalars, keep_copies


def clipped(vector, limit, few):
    """Scale a vector to a norm, by a number that depends on all of it."""
    scale = (limit / (vector.norm() + 1e-6)).clamp(max=1.0)
    return vector * scale, few * scale, vector * limit


def hoisted(function, *tensors):
    record = make_fx(function)(*tensors)
    hoist_scalars(record)
    return record, [node for node in record.graph.nodes if node.target is COMPUTED]


def test_a_number_that_meets_many_is_computed_by_itself_and_everything_is_equal():
    given = torch.arange(100.0), torch.tensor(3.0), torch.ones(5)
    record, computed = hoisted(clipped, *given)
    # The scale, where it meets the vector: not where it meets five numbers, nor the limit, which is in memory already.
    assert [node.args[0].target for node in computed] == [torch.ops.aten.clamp.default]
    assert [user.args for user in computed[0].users] == [(record.graph.find_nodes(op="placeholder")[0], computed[0])]
    for found, expected in zip(record(*given), clipped(*given), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_views_of_memory_and_whole_numbers_are_left_alone():
    def function(vector, index):
        return vector * vector[3:4], vector * (index + 1)

    _, computed = hoisted(function, torch.arange(100.0), torch.tensor(2))
    assert computed == []


def test_the_copy_of_an_argument_that_another_becomes_is_memory_of_its_own():
    def function(now, before, flat, item):
        kept, own, seen = now.clone(), before.clone(), flat.view(2, 2).clone()
        now.copy_(item)
        flat.copy_(item.view(4).clone())
        before.copy_(kept)
        item.copy_(seen)
        before.copy_(own)
        return [kept]

    record = make_fx(function)(torch.ones(2, 2), torch.ones(2, 2), torch.ones(4), torch.ones(2, 2))
    keep_copies(record)
    kept = [node.args[0].name for node in record.graph.nodes if node.target is COMPUTED]
    # Of `before` nothing has to be kept: what it becomes is what it was.
    assert kept == ["now_1", "view", "view_1"]
    given = [torch.full((2, 2), 1.0), torch.full((2, 2), 2.0), torch.full((4,), 3.0), torch.full((2, 2), 4.0)]
    record(*given)
    assert [each.mean().item() for each in given] == [4.0, 2.0, 4.0, 3.0]
