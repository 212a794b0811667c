import copy

import pytest
import torch
from tests.algorithms.test_conformance import build, train
from tests.probes import weights_of
from torch import nn

from rl8x import NullTracker, Trainer
from rl8x.algorithms.optimizer import FlatOptimizer, make_rule

CASES = [
    ("adam", {}, torch.optim.Adam),
    ("adam", {"betas": [0.8, 0.95], "eps": 1e-5, "weight_decay": 0.1}, torch.optim.Adam),
    ("adamw", {}, torch.optim.AdamW),
    ("adamw", {"weight_decay": 0.3}, torch.optim.AdamW),
    ("radam", {}, torch.optim.RAdam),
    ("radam", {"betas": [0.8, 0.95], "eps": 1e-5, "weight_decay": 0.1}, torch.optim.RAdam),
    ("radam", {"betas": [0.9, 0.6]}, torch.optim.RAdam),
    ("sgd", {}, torch.optim.SGD),
    ("sgd", {"momentum": 0.9, "weight_decay": 0.1}, torch.optim.SGD),
    ("sgd", {"momentum": 0.9, "nesterov": True}, torch.optim.SGD),
]


def step(flat, clip=None, active=None):
    flat.max_grad_norm = clip
    return flat.apply(flat.state, flat.gradient, flat.lr, active=active)


def nets():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    return net, copy.deepcopy(net)


def flattened(net, name="adam", lr=0.1, **config):
    return FlatOptimizer(net, make_rule(name, config), lr=lr)


@pytest.mark.parametrize(("name", "config", "reference"), CASES)
@pytest.mark.parametrize("clip", [None, 0.1])
def test_steps_equal_torchs(name, config, reference, clip):
    ours, theirs = nets()
    flat = flattened(ours, name, 0.01, **config)
    optimizer = reference(theirs.parameters(), lr=0.01, **config)
    for _ in range(9):  # the rectification of RAdam begins at the sixth
        x = torch.randn(7, 3)
        flat.gradient.zero_()
        optimizer.zero_grad()
        for net in (ours, theirs):
            net(x).square().mean().backward()
        norm = step(flat, clip)
        if clip is not None:
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs.parameters(), clip))
        optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)


class Reversed(nn.Sequential):
    def named_parameters(self, *args, **kwargs):
        return reversed(list(super().named_parameters(*args, **kwargs)))


@pytest.mark.parametrize("name", ["adam", "radam", "sgd"])
def test_a_restored_optimizer_goes_on_in_place_by_names_in_any_order(name):
    net, other = nets()
    config = {"momentum": 0.9} if name == "sgd" else {}
    first, second = flattened(net, name, **config), flattened(Reversed(*other), name, 0.3, **config)
    first.gradient.normal_()
    step(first)
    pointers = [moment.data_ptr() for moment in second.moments.values()]
    other.load_state_dict(net.state_dict())
    second.load_state_dict(first.state_dict())
    for _ in range(3):
        for each in (net, other):
            each.zero_grad(set_to_none=False)
            each(torch.ones(1, 3)).sum().backward()
        step(first)
        step(second)
    assert all(map(torch.equal, net.parameters(), other.parameters()))
    assert pointers == [moment.data_ptr() for moment in second.moments.values()]


def test_a_restored_state_has_no_number_of_the_padding():
    net, before = nets()
    flat = flattened(net)
    state = copy.deepcopy(flat.state_dict())
    flat.gradient.fill_(torch.nan)
    step(flat)
    net.load_state_dict(before.state_dict())
    flat.load_state_dict(state)
    assert all(torch.isfinite(vector).all() for vector in flat.state)


def went_on(algorithm, steps=2):
    train(algorithm, steps)
    return algorithm


def trained(case, steps=2):
    return went_on(build(case), steps)


def assigned(algorithm):
    state = {name: value.clone() for name, value in algorithm.policy.state_dict().items()}
    algorithm.policy.load_state_dict(state, assign=True)
    return algorithm


def moved_and_back(algorithm):
    algorithm.policy.double().float()
    return algorithm


@pytest.mark.parametrize("name", ["ppo, continuous", "dqn", "sac"])
@pytest.mark.parametrize("put", [assigned, moved_and_back, copy.deepcopy])
def test_weights_that_take_the_place_of_trained_ones_are_trained(name, put):
    straight, put_in = went_on(trained(name)), went_on(put(trained(name)))
    assert torch.equal(weights_of(straight), weights_of(put_in))
    assert not torch.equal(weights_of(trained(name)), weights_of(put_in))


USES = {
    "collect": lambda algorithm: algorithm.collect(),
    "evaluate": lambda algorithm: algorithm.evaluate(),
    "episodes": lambda algorithm: Trainer(algorithm, tracker=NullTracker(), eval_env=True).eval(),
}


@pytest.mark.parametrize("use", USES)
def test_programs_go_on_with_the_tensors_that_they_hold(use):
    algorithm = trained("ppo, continuous")
    pointers = {name: tensor.data_ptr() for name, tensor in algorithm.policy.state_dict().items()}
    state = {name: tensor + 1 for name, tensor in algorithm.policy.state_dict().items()}
    algorithm.policy.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, assign=True)
    USES[use](algorithm)
    after = algorithm.policy.state_dict()
    assert {name: tensor.data_ptr() for name, tensor in after.items()} == pointers
    assert any("moments" in name for name in pointers)
    assert all(torch.equal(after[name], tensor) for name, tensor in state.items())


def test_shared_weights_stay_shared():
    layer = nn.Linear(3, 3)
    net = nn.Sequential(layer, nn.Tanh(), nn.Sequential(layer))
    flat = flattened(net)
    net.load_state_dict({name: torch.full_like(value, 2.0) for name, value in net.state_dict().items()}, assign=True)
    flat.rejoin()
    flat.weights.add_(1.0)
    assert net[0].weight is net[2][0].weight
    assert all((weight == 3.0).all() for weight in net.parameters())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda policy: policy.double(), "are float64 .* and are trained as float32"),
        (lambda policy: policy.to(torch.device("meta")), r"on meta, and are trained as float32 \[16, 4\] on cpu"),
        (lambda policy: policy.requires_grad_(False), r"frozen, and are trained .* freeze in the model's constructor"),
    ],
)
def test_weights_that_cannot_be_trained_are_named(change, words):
    algorithm = trained("ppo")
    change(algorithm.policy)
    with pytest.raises(RuntimeError, match=words):
        algorithm.collect()


def test_frozen_weights_are_evaluated():
    algorithm = assigned(trained("ppo"))
    algorithm.policy.requires_grad_(False)
    assert algorithm.evaluate()["rewards/mean"] == 1.0


def test_what_others_hold_is_not_replaced():
    algorithm = trained("ppo")
    for name, advice in {"policy": "load_state_dict", "env": "build another", "config": "overrides"}.items():
        with pytest.raises(AttributeError, match=f"`{name}` of an algorithm cannot be replaced: .*{advice}"):
            setattr(algorithm, name, copy.copy(getattr(algorithm, name)))


@pytest.mark.parametrize("case", ["dqn", "ppo"])
def test_moments_of_weights_without_gradient_end_at_0(case):
    algorithm = trained(case, 1)
    (mean,) = (each.moments["exp_avg"] for each in algorithm.optimizers)
    mean.fill_(1e-39)  # between the weights, and of dead units, no gradient ever comes
    went_on(algorithm, 4)
    assert not ((mean != 0) & (mean.abs() < 1e-38)).any()
    assert (mean != 0).any()
    assert torch.tensor(1e-39).mul(1.0).item() > 0.0  # outside of a step nothing is flushed
