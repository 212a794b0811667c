import pytest
import torch
from torch import nn

from rl8x.algorithms.optimizer import FlatOptimizer, make_rule

CASES = [
    ("adam", {}, torch.optim.Adam, {}),
    ("adam", {"betas": [0.8, 0.95], "eps": 1e-5, "weight_decay": 0.1}, torch.optim.Adam, None),
    ("adamw", {}, torch.optim.AdamW, {}),
    ("adamw", {"weight_decay": 0.3}, torch.optim.AdamW, None),
    ("sgd", {}, torch.optim.SGD, {}),
    ("sgd", {"momentum": 0.9, "weight_decay": 0.1}, torch.optim.SGD, None),
    ("sgd", {"momentum": 0.9, "nesterov": True}, torch.optim.SGD, None),
]


def nets():
    torch.manual_seed(0)
    first, second = (nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)) for _ in range(2))
    second.load_state_dict(first.state_dict())
    return first, second


@pytest.mark.parametrize(("name", "config", "reference", "options"), CASES)
@pytest.mark.parametrize("clip", [None, 0.1])
def test_steps_equal_torchs(name, config, reference, options, clip):
    ours, theirs = nets()
    flat = FlatOptimizer(ours.parameters(), make_rule(name, config), lr=0.01)
    optimizer = reference(theirs.parameters(), lr=0.01, **(config if options is None else options))
    for _ in range(5):
        x = torch.randn(7, 3)
        flat.gradient.zero_()
        optimizer.zero_grad()
        for net in (ours, theirs):
            net(x).square().mean().backward()
        norm = flat.step(clip)
        if clip is not None:
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs.parameters(), clip))
        optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)


def test_modules_hold_aligned_views_of_the_vector():
    net, _ = nets()
    flat = FlatOptimizer(net.parameters(), make_rule("adam", {}), lr=0.1)
    for weight in net.parameters():
        offset = weight.data_ptr() - flat.weights.data_ptr()
        assert offset % 64 == 0
        assert 0 <= offset < flat.weights.numel() * 4
    flat.weights.fill_(2.0)
    assert all((weight == 2.0).all() for weight in net.parameters())


def test_an_inactive_step_changes_nothing_even_with_bad_gradients():
    net, _ = nets()
    flat = FlatOptimizer(net.parameters(), make_rule("adam", {}), lr=0.1)
    flat.gradient.fill_(1.0)
    flat.step(1.0, torch.tensor(True))
    before = [tensor.clone() for tensor in (flat.weights, *flat.moments.values())]
    flat.gradient.fill_(torch.nan)
    flat.step(1.0, torch.tensor(False))
    for tensor, old in zip((flat.weights, *flat.moments.values()), before, strict=True):
        assert torch.equal(tensor, old)


def test_a_restored_optimizer_goes_on_in_place():
    net, other = nets()
    first = FlatOptimizer(net.parameters(), make_rule("adam", {}), lr=0.1)
    second = FlatOptimizer(other.parameters(), make_rule("adam", {}), lr=0.3)
    first.gradient.normal_()
    first.step(None)
    pointers = [moment.data_ptr() for moment in second.moments.values()]
    second.load_state_dict(first.state_dict())
    second.weights.copy_(first.weights)
    for optimizer in (first, second):
        optimizer.gradient.fill_(0.5)
        optimizer.step(None)
    assert torch.equal(first.weights, second.weights)
    assert pointers == [moment.data_ptr() for moment in second.moments.values()]
    with pytest.raises(ValueError, match="velocity"):
        second.load_state_dict({"lr": second.lr, "moments": {"velocity": first.weights}})


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match="betas"):
        make_rule("adam", {"beta": 1})
