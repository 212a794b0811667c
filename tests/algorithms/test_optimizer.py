import itertools

import pytest
import torch
from torch import nn

from rl8x.algorithms.optimizer import FlatOptimizer
from rl8x.algorithms.optimizer_rules import make_rule

CASES = [
    ("adam", {}, torch.optim.Adam, {}),
    ("adam", {"betas": [0.8, 0.95], "eps": 1e-5, "weight_decay": 0.1}, torch.optim.Adam, None),
    ("adamw", {}, torch.optim.AdamW, {}),
    ("adamw", {"weight_decay": 0.3}, torch.optim.AdamW, None),
    ("radam", {}, torch.optim.RAdam, {}),
    ("radam", {"betas": [0.8, 0.95], "eps": 1e-5, "weight_decay": 0.1}, torch.optim.RAdam, None),
    ("radam", {"betas": [0.9, 0.6]}, torch.optim.RAdam, None),
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
    flat = FlatOptimizer(ours.named_parameters(), make_rule(name, config), lr=0.01)
    optimizer = reference(theirs.parameters(), lr=0.01, **(config if options is None else options))
    for _ in range(9):  # the rectification of RAdam begins at the sixth
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
    flat = FlatOptimizer(net.named_parameters(), make_rule("adam", {}), lr=0.1)
    for weight in net.parameters():
        offset = weight.data_ptr() - flat.weights.data_ptr()
        assert offset % 64 == 0
        assert 0 <= offset < flat.weights.numel() * 4
    flat.weights.fill_(2.0)
    assert all((weight == 2.0).all() for weight in net.parameters())


def test_an_inactive_step_changes_nothing_even_with_bad_gradients():
    net, _ = nets()
    flat = FlatOptimizer(net.named_parameters(), make_rule("adam", {}), lr=0.1)
    flat.gradient.fill_(1.0)
    flat.step(1.0, torch.tensor(True))
    before = [tensor.clone() for tensor in (flat.weights, *flat.moments.values())]
    flat.gradient.fill_(torch.nan)
    flat.step(1.0, torch.tensor(False))
    for tensor, old in zip((flat.weights, *flat.moments.values()), before, strict=True):
        assert torch.equal(tensor, old)


def test_a_restored_optimizer_goes_on_in_place():
    net, other = nets()
    first = FlatOptimizer(net.named_parameters(), make_rule("adam", {}), lr=0.1)
    second = FlatOptimizer(other.named_parameters(), make_rule("adam", {}), lr=0.3)
    first.gradient.normal_()
    first.step(None)
    pointers = [moment.data_ptr() for moment in second.moments.values()]
    second.load_state_dict(first.state_dict())
    second.weights.copy_(first.weights)
    for optimizer in (first, second):
        optimizer.gradient.fill_(0.5)
        optimizer.step(None)
    assert all(torch.equal(*pair) for pair in zip(first.views, second.views, strict=True))
    assert pointers == [moment.data_ptr() for moment in second.moments.values()]


def optimize(net, optimizer, steps, seed):
    """Take steps on data of a seed; the same for ours and torch's."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(7, 3, generator=generator)
        for weight in net.parameters():
            weight.grad.zero_() if weight.grad is not None else None
        net(x).square().mean().backward()
        optimizer.step(None) if isinstance(optimizer, FlatOptimizer) else optimizer.step()


def close(ours, theirs):
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("name", "config", "reference", "options"), CASES)
@pytest.mark.parametrize("steps", [0, 3, 200])  # after 200, what is left of Adam's 0.9^t is no number of float32
def test_torchs_optimizer_goes_on_from_ours(name, config, reference, options, steps):
    ours, theirs = nets()
    flat = FlatOptimizer(ours.named_parameters(), make_rule(name, config), lr=0.01)
    optimize(ours, flat, steps, 1)
    theirs.load_state_dict(ours.state_dict())
    optimizer = reference(theirs.parameters(), lr=0.5, **(config if options is None else options))
    optimizer.load_state_dict(flat.state_dict())
    optimize(ours, flat, 5, 2)
    optimize(theirs, optimizer, 5, 2)  # both at once: they share nothing
    close(ours, theirs)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize(("name", "config", "reference", "options"), CASES)
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("steps", [0, 3, 200])
def test_ours_goes_on_from_torchs(name, config, reference, options, named, steps):
    ours, theirs = nets()
    given = theirs.named_parameters() if named else theirs.parameters()
    optimizer = reference(given, lr=0.01, **(config if options is None else options))
    optimize(theirs, optimizer, steps, 1)
    ours.load_state_dict(theirs.state_dict())
    flat = FlatOptimizer(ours.named_parameters(), make_rule(name, config), lr=0.5)
    flat.gradient.fill_(1.0)
    flat.step(None)  # what it had is replaced
    ours.load_state_dict(theirs.state_dict())
    flat.load_state_dict(optimizer.state_dict())
    optimize(ours, flat, 5, 2)
    optimize(theirs, optimizer, 5, 2)
    close(ours, theirs)


def test_moments_are_found_by_name_in_any_order():
    net, other = nets()
    first = FlatOptimizer(net.named_parameters(), make_rule("adam", {}), lr=0.1)
    second = FlatOptimizer(reversed(list(other.named_parameters())), make_rule("adam", {}), lr=0.1)
    optimize(net, first, 3, 1)
    other.load_state_dict(net.state_dict())
    second.load_state_dict(first.state_dict())
    optimize(net, first, 3, 2)
    optimize(other, second, 3, 2)
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_restored_state_has_no_number_of_the_padding():
    net, _ = nets()
    flat = FlatOptimizer(net.named_parameters(), make_rule("adam", {}), lr=0.1)
    state = flat.state_dict()
    flat.gradient.fill_(torch.nan)
    flat.step(None)
    net.load_state_dict(nets()[0].state_dict())
    flat.load_state_dict(state)
    assert all(torch.isfinite(vector).all() for vector in (flat.weights, *flat.moments.values()))


def saved_by(*sizes, optimizer="adam", steps=1, **config):
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    flat = FlatOptimizer(nn.Sequential(*layers).named_parameters(), make_rule(optimizer, config), lr=0.1)
    for _ in range(steps):
        flat.step(None)
    return flat


def torchs(*, amsgrad=False, uneven=False):
    weights = [nn.Parameter(torch.ones(shape)) for shape in ((5, 3), (5,))]
    optimizer = torch.optim.Adam(weights, amsgrad=amsgrad)
    for i in range(2):
        weights[0].grad = torch.ones(5, 3)
        weights[1].grad = torch.ones(5) if i or not uneven else None
        optimizer.step()
    return optimizer


REFUSED = {
    "equal size, other shape": (saved_by(5, 3), r"exp_avg of '0.weight' has the shape \[3, 5\], the weight \[5, 3\]"),
    "more weights": (saved_by(3, 5, 1), r"is also of '1.weight'; it has 4 weights, this one 2"),
    "another rule": (
        saved_by(3, 5, optimizer="sgd", momentum=0.9),
        r"keeps momentum_buffer of a weight, this one",
    ),
    "another of torch's": (
        torchs(amsgrad=True),
        "keeps exp_avg, exp_avg_sq, max_exp_avg_sq, step of a weight,",
    ),
    "steps of some": (torchs(uneven=True), "have taken from 1 to 2 steps; here all take each"),
    "no optimizer": ({"lr": 0.1, "moments": {}}, "has `state` and `param_groups`; got 'lr', 'moments'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_layout_is_refused_and_changes_nothing(case):
    saved, message = REFUSED[case]
    flat = saved_by(3, 5)
    flat.gradient.fill_(1.0)
    flat.step(None)
    before = [tensor.clone() for tensor in (flat.weights, *flat.moments.values())]
    with pytest.raises(ValueError, match=message):
        flat.load_state_dict(saved if isinstance(saved, dict) else saved.state_dict())
    for tensor, old in zip((flat.weights, *flat.moments.values()), before, strict=True):
        assert torch.equal(tensor, old)


def test_fewer_weights_are_refused():
    with pytest.raises(ValueError, match=r"does not know '1.weight'; it has 2 weights, this one 4"):
        saved_by(3, 5, 1).load_state_dict(saved_by(3, 5).state_dict())


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match="betas"):
        make_rule("adam", {"beta": 1})
