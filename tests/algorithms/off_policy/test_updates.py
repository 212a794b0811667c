import pytest
import torch
from tests.probes import traced_only
from torch import nn

from rl8x.algorithms import DQN, DQNConfig
from rl8x.algorithms.off_policy.updates import Nets
from rl8x.algorithms.optimizer import make_rule
from rl8x.envs import CartPole


def build(**options):
    settings = {"num_envs": 8, "horizon": 2, "seed": 2, "device": "cpu", "model_config": {"hidden_sizes": [16]}}
    settings |= {"warmup_steps": 16, "batch_size": 16, "buffer_size": 100, "updates_per_sample": 0.3}
    return DQNConfig(**{**settings, **options}).build(CartPole)


def test_a_run_changes_from_eager_to_compiled_updates(monkeypatch):
    traced_only(monkeypatch)
    eager, changing = build(execution="eager"), build(execution="auto")
    changing.execution.plan(0.5 / 3, 200)
    assert changing.execution.starts_at == 3
    for step in range(6):
        changing.execution.begin_step(step)
        for algorithm in (eager, changing):
            algorithm.collect()
            algorithm.step()
    assert changing.execution.mode == "compile"
    assert all(map(torch.equal, eager.nets.state, changing.nets.state))


@pytest.mark.parametrize(("updates", "batch_bytes", "expected"), [(42.7, 1000, 42), (0.3, 1000, 1), (64, 2**30, 1)])
def test_blocks_are_as_large_as_a_step_has_updates_and_memory_allows(updates, batch_bytes, expected):
    algorithm = build(updates_per_sample=updates / 16)
    algorithm.__class__ = type("Rows", (DQN,), {"_row_bytes": batch_bytes / algorithm.batch_size})
    assert algorithm.block_size == expected


# -- networks


def perceptron(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def test_weights_of_other_networks_are_refused_and_nothing_is_changed():
    nets = Nets(nn.Linear(1, 1))
    nets.add("q", perceptron(), make_rule("adam", {}), lr=0.01)
    nets.add_target("target", of="q")
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
    for name, module in (("actor", policy), ("critic", critic)):
        nets.add(name, module, make_rule("adam", {}), lr=0.1)
    modules = nets.state_dict()["modules"]
    assert modules["actor"] == {}
    assert modules["critic"].keys() == critic.state_dict().keys()
