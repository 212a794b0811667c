"""`recompute_advantages` against advantages of values that are computed one step of one copy at a time."""

import copy

import gymnasium
import pytest
import torch

from rl8x import PPOConfig, keys
from rl8x.envs import CartPole, GymnasiumEnv, Pendulum
from rl8x.functional import generalized_advantages

GAMMA, LAMBDA = 0.9, 0.8


def build(env=Pendulum, *, time_limit=5, **options):
    given = {"num_envs": 3, "horizon": 8, "seed": 2, "device": "cpu", "model_config": {"hidden_sizes": [16]}}
    given |= {"sgd_minibatch_size": 12, "num_sgd_iters": 3, "gamma": GAMMA, "gae_lambda": LAMBDA, "lr": 1e-2}
    given |= {"vf_clip_param": None, "recompute_advantages": True}
    return PPOConfig.rl8(**given | options).build(env, time_limit=time_limit)


def observed_ends(algorithm):
    """Collect, and note what the environment gave as the observation before each reset, `[horizon][num_envs, *obs]`."""
    env, found = algorithm.env, []
    advance = env.advance

    def noted(carry, actions, noise):
        carry, step = advance(carry, actions, noise)
        found.append(copy.deepcopy(step.final_obs))
        return carry, step

    env.advance = noted
    algorithm.collect()
    del env.advance
    return found


def part(tree, *where):
    return {key: part(each, *where) for key, each in tree.items()} if isinstance(tree, dict) else tree[where]


@torch.no_grad()
def by_hand(algorithm, ends):
    """Advantages and returns by the present weights, `[horizon, num_envs]` each."""
    config, rollout, policy = algorithm.config, algorithm.rollout, algorithm.policy
    horizon, num_envs, length = config.horizon, config.num_envs, algorithm.seq_len
    never = torch.zeros(1, dtype=torch.bool)
    rewards, terminated, truncated = (rollout[key][:horizon] for key in (keys.REWARDS, keys.TERMINATED, keys.TRUNCATED))
    if config.normalize_rewards:
        rewards = rewards / (algorithm.return_moments.var.sqrt().float() + 1e-8)
    values, finals = torch.zeros(horizon + 1, num_envs), torch.full((horizon, num_envs), torch.nan)
    for n in range(num_envs):
        copy = slice(n, n + 1)
        for t in range(horizon + 1):
            if t % length == 0 and t < horizon:
                state = {name: each[t // length, copy] for name, each in rollout.states.items()}
            _, values[t, n], state = policy.respond(
                part(rollout.tree(keys.OBS), t, copy), state, rollout[keys.STARTS][t, copy]
            )
            if t < horizon and truncated[t, n]:
                finals[t, n] = policy.respond(part(ends[t], copy), state, never)[1]
    advantages, returns = generalized_advantages(
        rewards, values, finals, terminated, truncated, gamma=GAMMA, gae_lambda=LAMBDA
    )
    valid = rollout.tensors.get(keys.VALID)
    counted = advantages.flatten() if valid is None else advantages[valid[:horizon]]
    if config.normalize_advantages:
        advantages = (advantages - counted.mean()) / (counted.std(correction=0) + 1e-8)
    if policy.value_moments is not None:
        returns = policy.value_moments.normalize(returns)
    return advantages, returns


def in_pack(algorithm, name):
    """What updates read of a target, `[horizon, num_envs]`."""
    pack = algorithm.pack
    batch, _ = pack.gather(torch.arange(pack.num_sequences))
    sequences = batch[name].reshape(pack.seq_len, -1, pack.num_envs)  # [seq_len, sequences of a copy, copies]
    return sequences.transpose(0, 1).reshape(pack.horizon, pack.num_envs)


class Endless(Pendulum):
    """One that only forced resets truncate."""

    default_time_limit = None


class Parts(CartPole):
    """The state in two parts of an observation."""

    single_observation_space = gymnasium.spaces.Dict(
        {name: gymnasium.spaces.Box(-10.0, 10.0, (2,)) for name in ("cart", "pole")}
    )

    def observe(self, state, parameters):
        obs = super().observe(state, parameters)
        return {"cart": obs[:, :2], "pole": obs[:, 2:]}


def of_gymnasium(mode):
    def make(num_envs, **options):
        copies = [lambda: gymnasium.make("CartPole-v1", max_episode_steps=4)] * num_envs
        options.pop("time_limit", None)
        return GymnasiumEnv(gymnasium.vector.SyncVectorEnv(copies, autoreset_mode=mode), **options)

    return make


GRU = {"model": "gru", "model_config": {"hidden_size": 8}}
CASES = {
    "feedforward": (Pendulum, {}),
    "terminations": (CartPole, {"time_limit": 20, "horizon": 32}),
    "sequences": (Pendulum, {"seq_len": 4}),
    "gru": (Pendulum, GRU | {"seq_len": 4}),
    "lstm, terminations": (
        CartPole,
        {"time_limit": 20, "horizon": 32, "model": "lstm", "model_config": {"hidden_size": 8}, "seq_len": 2},
    ),
    "gru, state reset": (Pendulum, GRU | {"seq_len": 2, "seqs_per_state_reset": 2}),
    "attention": (Pendulum, {"model": "attention", "model_config": {}, "seq_len": 4}),
    "units": (Pendulum, {"normalize_values": True, "normalize_rewards": True, "normalize_observations": True}),
    "raw": (Pendulum, {"normalize_rewards": False, "normalize_advantages": False}),
    "parts": (Parts, {}),
    "one batch": (Pendulum, {"sgd_minibatch_size": None}),
    "accumulated": (Pendulum, {"accumulate_grads": True}),
    "forced resets": (Endless, {"time_limit": None}),
    "a simulator": (of_gymnasium("SameStep"), {}),
    "a simulator that masks steps": (of_gymnasium("NextStep"), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_each_epoch_learns_from_advantages_by_its_first_weights(name):
    env, options = CASES[name]
    algorithm, terminates = build(env, **options), False
    for _ in range(2):
        ends = observed_ends(algorithm)
        if name == "forced resets":
            ends[-1] = algorithm.rollout[keys.OBS][-1]
        rollout, horizon = algorithm.rollout, algorithm.config.horizon
        assert rollout[keys.TRUNCATED][:horizon].any()
        terminates |= bool(rollout[keys.TERMINATED][:horizon].any())
        renew, rows, seen = algorithm.recompute_targets, algorithm.updater.chunk_rows, []

        def renewed(ends=ends, renew=renew, rows=rows, seen=seen, horizon=horizon):
            seen.append(in_pack(algorithm, keys.ADVANTAGES))
            algorithm.updater.chunk_rows = lambda _: 5  # several chunks
            renew()
            algorithm.updater.chunk_rows = rows
            advantages, returns = by_hand(algorithm, ends)
            valid = algorithm.rollout.tensors.get(keys.VALID, torch.ones(horizon + 1, 3, dtype=torch.bool))[:horizon]
            given = in_pack(algorithm, keys.ADVANTAGES), in_pack(algorithm, keys.RETURNS)
            for one, other in zip(given, (advantages, returns), strict=True):
                torch.testing.assert_close(one[valid], other[valid], rtol=1e-4, atol=1e-4)

        algorithm.recompute_targets = renewed
        algorithm.step()
        algorithm.recompute_targets = renew
        assert len(seen) == 2
        assert (seen[0] - in_pack(algorithm, keys.ADVANTAGES)).abs().max() > 1e-3
    assert terminates == ("terminations" in name)
