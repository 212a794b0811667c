import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from tests.algorithms.by_hand import batch_of, disturb, updated
from tests.probes import Probe

from rl8x import keys
from rl8x.algorithms import FastTD3Config, TD3Config
from rl8x.algorithms.off_policy.learner import TAU
from rl8x.algorithms.td3 import NOISE
from rl8x.envs import Pendulum
from rl8x.replay.dataset import Dataset

SMALL = {"num_envs": 8, "horizon": 2, "seed": 1, "device": "cpu", "model_config": {"hidden_sizes": [16]}}
SMALL |= {"warmup_steps": 16, "batch_size": 6, "buffer_size": 200, "critic_hidden_sizes": [16]}


class TwoJoints(Probe):
    """Two actions of other ranges; the reward is their sum."""

    terminates = True
    single_action_space = Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))

    def transition(self, state, actions, parameters, noise):
        return dict(state), actions.sum(1), torch.ones(self.num_envs, dtype=torch.bool)


def build(env=TwoJoints, **options):
    return TD3Config(**{**SMALL, "execution": "eager", **options}).build(env)


OFFLINE = {name: value for name, value in SMALL.items() if name not in ("num_envs", "horizon", "warmup_steps")}
del OFFLINE["buffer_size"]


def dataset(env=TwoJoints, size=60):
    """Uniform actions, one step each."""
    made = env(size)
    low, high = torch.tensor(made.single_action_space.low), torch.tensor(made.single_action_space.high)
    obs, _ = made.reset(seed=3)
    actions = torch.rand(size, len(low), generator=torch.Generator().manual_seed(4)) * (high - low) + low
    rewards = made.transition({"x": obs}, actions, None, None)[1]
    ends = torch.ones(size, dtype=torch.bool)
    return Dataset.from_tensors(
        {"obs": obs, "actions": actions, "rewards": rewards, "terminated": ends, "truncated": ~ends, "next_obs": obs},
        observation_space=made.single_observation_space,
        action_space=made.single_action_space,
    )


def build_offline(env=TwoJoints, **options):
    return TD3Config(**{**OFFLINE, "execution": "eager", **options}).build(dataset=dataset(env))


def noisy(algorithm):
    """A batch whose noise brings actions beyond their bounds."""
    space = algorithm.action_space
    spread = torch.randn(6, *space.shape, generator=torch.Generator().manual_seed(6))
    return batch_of(algorithm, 0.25) | {NOISE: spread * torch.tensor(space.high - space.low) / 4}


def weights_of(algorithm):
    """Return all weights by network and name, float64, so that a second formulation can differentiate them."""
    found = {}
    for name, each in algorithm.nets.trained.items():
        found[name] = dict(zip(each.optimizer.names, each.optimizer.split(each.optimizer.weights), strict=True))
    for name, (followed, vector) in algorithm.nets.targets.items():
        optimizer = algorithm.nets.trained[followed].optimizer
        found[name] = dict(zip(optimizer.names, optimizer.split(vector), strict=True))
    return {
        net: {name: w.detach().double().clone().requires_grad_() for name, w in x.items()} for net, x in found.items()
    }


class Plain:
    """One update row by row, as in the papers, with SGD of rate 0.1."""

    def __init__(self, algorithm):
        self.config, self.weights = algorithm.config, weights_of(algorithm)
        self.atoms = torch.linspace(self.config.v_min, self.config.v_max, self.config.num_atoms, dtype=torch.float64)
        space = algorithm.action_space
        self.low, self.high = torch.tensor(space.low).double(), torch.tensor(space.high).double()

    def act(self, net, obs):
        w = self.weights[net]
        hidden = torch.relu(w["model.actor.0.weight"] @ obs + w["model.actor.0.bias"])
        features = w["model.policy_head.weight"] @ hidden + w["model.policy_head.bias"]
        return self.low + (self.high - self.low) * (torch.tanh(features) + 1) / 2

    def q(self, net, i, obs, action):
        outputs = self.outputs(net, i, obs, action)
        return outputs[0] if len(outputs) == 1 else (outputs.softmax(0) * self.atoms).sum()

    def outputs(self, net, i, obs, action):
        w = self.weights[net]
        x = torch.cat([obs, action])
        hidden = torch.relu(x @ w["hidden.0.weight"][i] + w["hidden.0.bias"][i, 0])
        return hidden @ w["head.weight"][i] + w["head.bias"][i, 0]

    def distance(self, action, other):
        return sum(
            ((a - o) / ((h - m) / 2)) ** 2 for a, o, m, h in zip(action, other, self.low, self.high, strict=True)
        )

    def goal_probs(self, row):
        """The atoms of the smaller critic, moved, each shared between the two atoms beside it."""
        action = self.act("target_policy", row[keys.NEXT_OBS]) + row[NOISE]
        action = torch.maximum(torch.minimum(action, self.high), self.low)
        least = min(range(2), key=lambda i: self.q("target_q", i, row[keys.NEXT_OBS], action).item())
        probs = self.outputs("target_q", least, row[keys.NEXT_OBS], action).softmax(0).tolist()
        penalty = self.config.critic_bc_coeff * self.distance(action, row[keys.NEXT_ACTIONS]).item()
        goals, last = [0.0] * len(probs), len(probs) - 1
        for prob, atom in zip(probs, self.atoms.tolist(), strict=True):
            value = row[keys.RETURNS].item() + row[keys.DISCOUNTS].item() * (atom - penalty)
            low, high = self.atoms[0].item(), self.atoms[-1].item()
            place = (min(max(value, low), high) - low) / (high - low) * last
            below = min(int(place), last - 1)
            goals[below] += prob * (below + 1 - place)
            goals[below + 1] += prob * (place - below)
        return torch.tensor(goals, dtype=torch.float64)

    def categorical_loss(self, rows):
        total = 0.0
        for row in rows:
            goals = self.goal_probs(row)
            assert goals.sum().item() == pytest.approx(1.0)
            for i in range(2):
                logs = self.outputs("q", i, row[keys.OBS], row[keys.ACTIONS]).log_softmax(0)
                total = total - (goals * logs).sum() / len(rows)
        return total

    def goal(self, row):
        if self.config.num_atoms > 1:
            return (self.goal_probs(row) * self.atoms).sum()
        action = self.act("target_policy", row[keys.NEXT_OBS]) + row[NOISE]
        action = torch.maximum(torch.minimum(action, self.high), self.low)
        after = min(self.q("target_q", i, row[keys.NEXT_OBS], action) for i in range(self.config.num_critics))
        after = after - self.config.critic_bc_coeff * self.distance(action, row[keys.NEXT_ACTIONS])
        return (row[keys.RETURNS] + row[keys.DISCOUNTS] * after).detach()

    def policy_loss(self, rows):
        actions = [self.act("policy", row[keys.OBS]) for row in rows]
        values = [self.q("q", 0, row[keys.OBS], a) for row, a in zip(rows, actions, strict=True)]
        coeff = self.config.actor_bc_coeff
        if coeff is None:
            return -sum(values) / len(rows)
        size = sum(abs(value.item()) for value in values) / len(rows)
        clones = [self.distance(a, row[keys.ACTIONS]) for row, a in zip(rows, actions, strict=True)]
        return -sum(values) / len(rows) / size + coeff * sum(clones) / len(rows)

    def descend(self, net, loss):
        parts = self.weights[net]
        gradients = torch.autograd.grad(loss, list(parts.values()), allow_unused=True)
        for part, gradient in zip(parts.values(), gradients, strict=True):
            if gradient is not None:
                part.data.sub_(0.1 * gradient)

    def update(self, batch, trains):
        rows = [{k: v[i].double() for k, v in batch.items() if k != TAU} for i in range(6)]
        goals = [self.goal(row) for row in rows]
        errors = [
            [self.q("q", i, row[keys.OBS], row[keys.ACTIONS]) - goal for i in range(self.config.num_critics)]
            for row, goal in zip(rows, goals, strict=True)
        ]
        q_loss = sum(error**2 / 2 for each in errors for error in each) / 6
        if self.config.num_atoms > 1:
            q_loss = self.categorical_loss(rows)
        self.descend("q", q_loss)
        policy_loss = self.policy_loss(rows)
        if trains:
            self.descend("policy", policy_loss)
        for name in ("q", "policy"):
            for target, part in zip(self.weights[f"target_{name}"].values(), self.weights[name].values(), strict=True):
                target.data.lerp_(part.data, batch[TAU].item())
        return q_loss.item(), policy_loss.item(), [np.mean([abs(e.item()) for e in each]) for each in errors]


VARIANTS = {
    "td3": {},
    "policy waits": {"trains": False},
    "three critics": {"num_critics": 3},
    "one critic": {"num_critics": 1},
    "categorical": {"num_atoms": 11},
    "categorical rebrac": {"num_atoms": 7, "v_max": 3.0, "actor_bc_coeff": 0.01, "critic_bc_coeff": 0.05},
    "td3+bc": {"actor_bc_coeff": 0.4},
    "rebrac": {"actor_bc_coeff": 0.01, "critic_bc_coeff": 0.05},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_update_is_that_of_the_papers_row_by_row(variant):
    options = dict(VARIANTS[variant])
    trains = options.pop("trains", True)
    made = build_offline if "actor_bc_coeff" in options else build
    algorithm = made(optimizer="sgd", lr=0.1, **options)
    disturb(algorithm)
    batch, plain = noisy(algorithm), Plain(algorithm)
    q_loss, policy_loss, errors = plain.update(batch, trains)
    numbers, found = updated(algorithm, batch, -1 if trains else 0)
    assert numbers["losses/q"].item() == pytest.approx(q_loss, rel=1e-4)
    assert ("losses/policy" in numbers) == trains
    if trains:
        assert numbers["losses/policy"].item() == pytest.approx(policy_loss, rel=1e-4)
    assert numbers["monitors/td_error"].item() == pytest.approx(np.mean(errors), rel=1e-4)
    np.testing.assert_allclose(found.numpy(), errors, rtol=1e-4)
    for net, parts in weights_of(algorithm).items():
        for name, part in parts.items():
            torch.testing.assert_close(part, plain.weights[net][name], rtol=1e-4, atol=1e-5)


# -- what is drawn


def test_the_noise_of_targets_is_normal_in_half_ranges_and_clipped():
    algorithm = build(batch_size=5000, target_noise=0.4, target_noise_clip=0.5)
    noise = algorithm.draw(0, 4)[NOISE]
    assert noise.shape == (4, 5000, 2)
    scaled = noise / torch.tensor([2.0, 5.0])
    assert scaled.abs().max().item() == pytest.approx(0.5)
    # Of a normal distribution 21.1% lies beyond 1.25 standard deviations.
    assert (scaled.abs() > 0.4999).float().mean().item() == pytest.approx(0.2113, abs=0.01)
    assert (scaled.abs() < 0.4).float().mean().item() == pytest.approx(0.6827, abs=0.01)
    assert not torch.equal(noise, algorithm.draw(0, 4)[NOISE])
    assert not build(target_noise=0.0).draw(0, 2)[NOISE].any()


def test_policy_and_targets_move_in_their_turns_whatever_the_blocks():
    algorithm = build(policy_delay=3, target_interval=2, tau=0.1)
    critics, both = algorithm.cycle[0], algorithm.cycle[2]
    assert list(algorithm._runs(4, 7)) == [(critics, 1), (both, 1), (critics, 2), (both, 1), (critics, 2)]  # 5 to 11
    shares = torch.cat([algorithm.draw(first, 4)[TAU] for first in (0, 4, 8)])
    assert shares.tolist() == pytest.approx([0.0, 0.1] * 6)


def test_the_policys_numbers_are_means_over_the_updates_that_trained_it(monkeypatch):
    algorithm = build(policy_delay=3, updates_per_sample=4 / 16, warmup_steps=0)
    measured = []
    for updater in set(algorithm.cycle):

        def note(items, run=updater.run):
            rows, errors = run(items)
            measured.extend(rows.tolist())
            return rows, errors

        monkeypatch.setattr(updater, "run", note)
    rows = [{**algorithm.collect(), **algorithm.step()} for _ in range(2)]
    assert [len(row) for row in measured] == [4, 4, 6, 4, 4, 6, 4, 4]
    assert rows[0]["losses/policy"] == pytest.approx(measured[2][4])
    assert rows[1]["losses/policy"] == pytest.approx(measured[5][4])
    for row, part in zip(rows, (measured[:4], measured[4:]), strict=True):
        assert row["losses/q"] == pytest.approx(np.mean([each[0] for each in part]))
        assert row["finite/losses"] == row["finite/gradients"] == 0.0
    alone = build(policy_delay=3, updates_per_sample=2 / 16, warmup_steps=0)
    first, second = [{**alone.collect(), **alone.step()} for _ in range(2)]
    assert "losses/policy" not in first
    assert "losses/policy" in second


def test_actions_are_uniform_in_the_warm_up_and_then_near_the_policys():
    algorithm = build(
        warmup_steps=4000, num_envs=1000, buffer_size=20_000, exploration_noise=0.05, updates_per_sample=1e-3
    )
    scaled = []
    for _ in range(3):
        algorithm.collect()
        actions = algorithm.rollout[keys.ACTIONS][:2]
        scaled.append((actions / torch.tensor([2.0, 5.0]) - torch.tensor([0.0, 1.0])).flatten(0, 1))
    for each in scaled[:2]:
        counts = torch.histc(each, 10, -1, 1)
        # 9 degrees of freedom: mean 9, variance 18; 5 standard deviations.
        assert ((counts - 400).square() / 400).sum().item() < 9 + 5 * 18**0.5
    assert scaled[2].std(0).tolist() == pytest.approx([0.05, 0.05], rel=0.1)


# -- probes


def test_distances_of_actions_without_axes_are_those_of_one_dimension():
    """A `Box` of shape () has actions `[batch_size]`."""
    found = []
    for shape in ((), (1,)):
        generator, ends = torch.Generator().manual_seed(4), torch.ones(24, dtype=torch.bool)
        rows = {"obs": torch.randn(24, 2, generator=generator), "rewards": torch.randn(24, generator=generator)}
        rows |= {"actions": torch.rand(24, generator=generator).view(24, *shape), "next_obs": rows["obs"]}
        data = Dataset.from_tensors(
            {**rows, "terminated": ends, "truncated": ~ends},
            observation_space=Box(-np.inf, np.inf, (2,)),
            action_space=Box(-1.0, 2.0, shape),
        )
        options = {**OFFLINE, "actor_bc_coeff": 0.5, "critic_bc_coeff": 0.5, "execution": "eager"}
        found.append(dict(TD3Config(**options).build(dataset=data).step()))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


# -- the preset


def test_the_preset_builds_td3_with_what_is_given_beside_it():
    algorithm = FastTD3Config(num_envs=4, batch_size=8, buffer_size=100, seed=0, device="cpu").build(Pendulum)
    assert algorithm.params["algorithm"] == "TD3"
    assert (algorithm.config.tau, algorithm.config.batch_size) == (0.1, 8)
    stds = algorithm.policy.distribution.from_features(torch.zeros(4, 1)).log_std.exp() / 2
    assert stds.flatten().tolist() == pytest.approx([0.050875, 0.150625, 0.250375, 0.350125])
