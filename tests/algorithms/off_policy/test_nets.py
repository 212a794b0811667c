import pytest
import torch
from torch import nn

from rl8x.algorithms.off_policy.nets import Nets
from rl8x.algorithms.optimizer import make_rule


def perceptron(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def made(max_grad_norm=None):
    nets = Nets(nn.Linear(1, 1))
    nets.add("q", perceptron(), make_rule("adam", {}), lr=0.01, max_grad_norm=max_grad_norm)
    nets.add("other", perceptron(1), make_rule("sgd", {"momentum": 0.9}), lr=0.1)
    nets.add_target("target", of="q")
    return nets


def bound(nets):
    return nets.bind(nets.state, nets.rates)


def minimise(net, loss):
    found, gradient = net.gradient(loss)
    return found, net.apply(gradient)


X, Y = torch.randn(7, 3, generator=torch.Generator().manual_seed(3)), torch.linspace(-2, 2, 7).unsqueeze(1)


def squared(net):
    predicted = net(X)
    return (predicted - Y).square().mean(), {"predicted": predicted}


@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
def test_steps_are_those_of_torchs_adam(max_grad_norm):
    nets, plain = made(max_grad_norm), perceptron()
    adam = torch.optim.Adam(plain.parameters(), lr=0.01)
    for _ in range(5):
        found, norm = minimise(bound(nets)["q"], squared)
        adam.zero_grad()
        expected = plain(X)
        (expected - Y).square().mean().backward()
        limit = float("inf") if max_grad_norm is None else max_grad_norm
        total = nn.utils.clip_grad_norm_(plain.parameters(), limit)
        adam.step()
        torch.testing.assert_close(norm, total)
        torch.testing.assert_close(found["predicted"], expected.detach())
        assert not found["predicted"].requires_grad
    for mine, theirs in zip(nets.trained["q"].module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_others_are_called_but_not_trained_and_pass_gradients_to_their_inputs():
    nets = made()
    before = [tensor.clone() for tensor in nets.state]
    parts = bound(nets)

    def through(net):
        return parts["q"](torch.cat((X[:, :2], net(X)), 1)).mean(), {}

    _, norm = minimise(parts["other"], through)
    assert norm > 0
    q, other = nets.trained["q"].optimizer, nets.trained["other"].optimizer
    names = [id(tensor) for tensor in nets.state]
    changed = {i for i, (tensor, old) in enumerate(zip(nets.state, before, strict=True)) if not tensor.equal(old)}
    assert changed == {names.index(id(tensor)) for tensor in other.state}
    assert q.gradient.count_nonzero() == 0


def test_a_target_begins_as_what_it_follows_and_goes_a_share_of_the_way():
    nets = made()
    parts = bound(nets)
    assert torch.equal(parts["target"](X), parts["q"](X))
    old = nets.targets["target"][1].clone()
    minimise(parts["q"], squared)
    new = nets.trained["q"].optimizer.weights
    assert not torch.equal(parts["target"](X), parts["q"](X))
    parts["target"].polyak_update(parts["q"], torch.tensor(0.0))
    assert torch.equal(nets.targets["target"][1], old)
    parts["target"].polyak_update(parts["q"], 0.25)
    torch.testing.assert_close(nets.targets["target"][1], 0.75 * old + 0.25 * new)
    parts["target"].polyak_update(parts["q"], torch.tensor(1.0))
    assert torch.equal(nets.targets["target"][1], new)


def test_weights_of_other_networks_are_refused_and_nothing_is_changed():
    nets = made()
    before = [tensor.clone() for tensor in nets.state]
    saved = nets.state_dict()["modules"]["q"]
    (first, tensor), *rest = saved.items()
    for modules, message in (
        ({}, "the run trained no network 'q'. Hyperparameters"),
        (dict(rest), f"the network 'q' had nothing for `{first}` in the run, and has"),
        (saved | {first: tensor[:1]}, rf"had \[1, .*\] for `{first}` in the run, and has \["),
        (saved | {"norm": tensor}, r"had \[.*\] for `norm` in the run, and has nothing here"),
    ):
        with pytest.raises(ValueError, match=message):
            nets.load_state_dict({**nets.state_dict(), "modules": {"q": modules} if modules else {}})
    assert all(map(torch.equal, nets.state, before))


def test_what_is_the_policys_is_saved_with_it():
    policy, critic = perceptron(), perceptron(1)
    nets = Nets(policy)
    nets.add("actor", policy, make_rule("adam", {}), lr=0.1)
    nets.add("critic", critic, make_rule("adam", {}), lr=0.1)
    modules = nets.state_dict()["modules"]
    assert modules["actor"] == {}
    assert modules["critic"].keys() == critic.state_dict().keys()
