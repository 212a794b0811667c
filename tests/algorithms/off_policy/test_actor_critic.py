import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from torch import nn

from rl8x import TD3Config
from rl8x.algorithms.off_policy.actor_critic import Critics
from rl8x.envs import Pendulum
from rl8x.nn import ACTIVATIONS

OBS, ACTION = Box(-1.0, 1.0, (3,), dtype=np.float32), Box(-2.0, 2.0, (2,), dtype=np.float32)


def plain(critics, i, layer_norm, activation):
    """The i-th critic as a stack of plain layers, with its weights."""
    modules, stacks = [], [*critics.hidden, critics.head]
    for stack in stacks:
        if hasattr(stack, "weight") and stack.weight.shape[1] == 1 and layer_norm and stack is not critics.head:
            norm = nn.LayerNorm(stack.weight.shape[-1])
            norm.weight.data, norm.bias.data = stack.weight[i, 0].detach(), stack.bias[i, 0].detach()
            modules.append(norm)
        elif hasattr(stack, "weight"):
            layer = nn.Linear(*stack.weight.shape[1:])
            layer.weight.data, layer.bias.data = stack.weight[i].detach().T.contiguous(), stack.bias[i, 0].detach()
            modules.append(layer)
        else:
            modules.append(ACTIVATIONS[activation]())
    return nn.Sequential(*modules)


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize(("num_critics", "activation", "outputs"), [(1, "tanh", 1), (2, "relu", 1), (5, "elu", 7)])
def test_they_are_separate_stacks_of_linear_layers_gradients_too(num_critics, activation, outputs, layer_norm):
    torch.manual_seed(0)
    options = {"activation": activation, "layer_norm": layer_norm, "num_atoms": outputs}
    critics = Critics(OBS, ACTION, num_critics=num_critics, hidden_sizes=[8, 4], **options)
    for parameter in critics.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    stacks = [plain(critics, i, layer_norm, activation) for i in range(num_critics)]
    obs, actions = torch.randn(6, 3), torch.randn(6, 2)
    here, there = actions.clone().requires_grad_(), actions.clone().requires_grad_()
    values = critics(obs, here)
    expected = torch.stack([stack(torch.cat([obs, there], -1)) for stack in stacks])
    torch.testing.assert_close(values, expected if outputs > 1 else expected.squeeze(-1))
    assert values.shape == ((num_critics, 6, 7) if outputs > 1 else (num_critics, 6))
    values.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(here.grad, there.grad)
    torch.testing.assert_close(critics.head.weight.grad[-1], stacks[-1][-1].weight.grad.T)
    torch.testing.assert_close(critics.hidden[0].weight.grad[0], stacks[0][0].weight.grad.T)
    torch.testing.assert_close(critics.hidden[0].bias.grad[0, 0], stacks[0][0].bias.grad)


def test_weights_begin_orthogonal_and_differ():
    critics = Critics(OBS, ACTION, hidden_sizes=[5, 16])
    first, second = critics.hidden[0].weight.detach()
    torch.testing.assert_close(first @ first.T, 2 * torch.eye(5))
    assert not torch.allclose(first, second)
    head = critics.head.weight.detach()
    torch.testing.assert_close(head.norm(dim=1), torch.ones(2, 1))
    assert critics.head.bias.abs().sum() == 0


def test_weights_of_critics_and_policy_begin_uniform_where_that_is_asked_for():
    algorithm = TD3Config(num_envs=2, critic_init="uniform", model_config={"init": "uniform"}).build(Pendulum)
    for weight, num_inputs in ((algorithm.critics.hidden[2].weight, 256), (algorithm.critics.head.weight, 256)):
        assert weight.abs().max() <= num_inputs**-0.5
        torch.testing.assert_close(weight.std(), torch.tensor((3 * num_inputs) ** -0.5), rtol=0.1, atol=0.0)
    assert algorithm.policy.model.policy_head.weight.abs().max() > 0.01


def test_observations_are_laid_out_flat_and_discrete_actions_have_a_value_each():
    space = Dict({"a": Box(-1, 1, (2, 2), dtype=np.float32), "b": Discrete(3)})
    critics = Critics(space, Discrete(4, start=1), num_critics=3, hidden_sizes=[8])
    obs = {"a": torch.randn(5, 2, 2), "b": torch.tensor([0, 1, 2, 0, 1])}
    values = critics(obs)
    assert values.shape == (3, 5, 4)
    flat = torch.cat([obs["a"].flatten(1), torch.eye(3)[obs["b"]]], -1)
    torch.testing.assert_close(values[1], plain(critics, 1, False, "relu")(flat))
    assert Critics(space, Discrete(4), num_atoms=11)(obs).shape == (2, 5, 4, 11)
    assert Critics(OBS, Box(-1, 1, (2, 3), dtype=np.float32))(torch.zeros(5, 3), torch.zeros(5, 2, 3)).shape == (2, 5)


def test_heads_compute_in_float32_under_bfloat16():
    critics = Critics(OBS, ACTION, hidden_sizes=[8])
    obs, actions = torch.randn(6, 3), torch.randn(6, 2)
    exact = critics(obs, actions)
    critics.autocast = lambda: torch.autocast("cpu", torch.bfloat16)
    values = critics(obs, actions)
    assert values.dtype == torch.float32
    assert not torch.equal(values, exact)
    torch.testing.assert_close(values, exact, atol=0.05, rtol=0.05)
