"""`random_start`: first episodes that count as begun at a random time of their limit."""

import functools

import gymnasium
import pytest
import torch

from rl8x import PPOConfig, keys
from rl8x.envs import GymnasiumEnv, Pendulum, Spread
from rl8x.randomization import Adaptive

LIMIT = 10
GIVEN = {"num_envs": 64, "horizon": 4, "seed": 3, "device": "cpu", "model_config": {"hidden_sizes": [8]}}


def build(env=Pendulum, *, time_limit=LIMIT, **options):
    env_options = {} if time_limit is ... else {"time_limit": time_limit}
    return PPOConfig(**GIVEN | {"random_start": True} | options).build(env, **env_options)


def ended(algorithm, steps):
    """Collect; return when each copy's episodes were truncated, `[steps, num_envs]`, and the statistics."""
    flags, stats = [], []
    for _ in range(steps // algorithm.config.horizon):
        stats.append(algorithm.collect())
        valid = algorithm.rollout.tensors.get(keys.VALID, torch.ones_like(algorithm.rollout[keys.TRUNCATED]))
        flags.append((algorithm.rollout[keys.TRUNCATED] & valid)[: algorithm.config.horizon].clone())
        algorithm.step()
    return torch.cat(flags), stats


def offsets(flags):
    """The steps that each copy's first episode counted at the beginning, given a limit."""
    assert flags.any(0).all()
    return LIMIT - 1 - flags.int().argmax(0)


def test_copies_reach_the_limit_at_times_spread_over_it():
    flags, stats = ended(build(), 3 * 4 * 4)
    begun = offsets(flags)
    counts = torch.bincount(begun, minlength=LIMIT)
    # 64 draws of 10 equally likely numbers: chi squared with 9 degrees of freedom is above 27.9 once in 1,000 times
    assert float(((counts - 6.4) ** 2 / 6.4).sum()) < 27.9
    # After the first, each episode has the whole limit.
    first = LIMIT - begun
    steps = torch.arange(1, 49).unsqueeze(1)
    assert torch.equal(flags, (steps >= first) & ((steps - first) % LIMIT == 0))
    # In the statistics are the whole episodes alone.
    whole = flags & ((steps > first) | (begun == 0))
    assert [row["episodes/ended"] for row in stats] == whole.view(12, -1).sum(1).tolist()
    lengths = {row[name] for row in stats for name in ("episodes/lengths/min", "episodes/lengths/max") if name in row}
    assert lengths == {LIMIT}


class Ends(Pendulum):
    """One that terminates after the second step of each episode."""

    terminates = True

    def initial_state(self, parameters, noise):
        return super().initial_state(parameters, noise) | {"count": torch.zeros(self.num_envs)}

    def transition(self, state, actions, parameters, noise):
        moved, rewards, _ = super().transition(state, actions, parameters, noise)
        count = state["count"] + 1
        return moved | {"count": count}, rewards, count >= 2


def test_an_episode_that_terminates_before_its_shortened_limit_is_left_out_too():
    algorithm = build(Ends)
    row = algorithm.collect()
    rollout = algorithm.rollout
    begun = rollout[keys.EPISODE_LENGTHS][0] - 1
    whole = int((begun == 0).sum())
    # Those with a step left are truncated after the first and end again after the third; others after 2 and 4 steps.
    late = int((begun == LIMIT - 1).sum())
    assert 0 < whole < 64
    assert row["episodes/ended"] == 2 * whole + (64 - whole - late) + late
    assert row["episodes/lengths/max"] == 2


def test_it_is_off_by_default_and_takes_no_numbers_of_the_environments():
    flags, _ = ended(build(random_start=PPOConfig().random_start), 12)
    assert (offsets(flags) == 0).all()
    one, other = build(random_start=False), build()
    for algorithm in (one, other):
        algorithm.collect()
    assert torch.equal(one.rollout[keys.OBS][0], other.rollout[keys.OBS][0])


def test_moving_parameters_go_by_whole_episodes_alone():
    adaptive = {"l": Adaptive(1.0, thresholds=(-1e9, 1e9), step=0.1, limits=(0.2, 2.0), episodes=10_000)}
    algorithm = build()
    algorithm.collect(env_config=adaptive)
    seen = []
    state = algorithm.env.parameter_state
    update = state.update_from_episodes
    state.update_from_episodes = lambda done, *given, **more: seen.append(done) or update(done, *given, **more)
    for _ in range(3):
        algorithm.step()
        row = algorithm.collect()
        assert int(seen[-1].sum()) == row["episodes/ended"]
        assert int(algorithm.rollout[keys.TRUNCATED][:4].sum()) >= row["episodes/ended"]


def test_an_evaluation_in_the_training_environment_leaves_out_shortened_episodes_too():
    algorithm = build()
    rows = [dict(play()) for _ in range(2) for play in (algorithm.collect, algorithm.evaluate)]
    _, stats = ended(build(), 4 * 4)
    assert [row["episodes/ended"] for row in rows] == [row["episodes/ended"] for row in stats]
    assert all(row.get("episodes/lengths/min", LIMIT) == LIMIT for row in rows)


# -- simulators


def sync(num_envs, **options):
    copies = [lambda: gymnasium.make("Pendulum-v1", max_episode_steps=LIMIT)] * num_envs
    return GymnasiumEnv(gymnasium.vector.SyncVectorEnv(copies, autoreset_mode="NextStep"), **options)


OF_ID = {kind: functools.partial(GymnasiumEnv, "Pendulum-v1", vectorization=kind) for kind in ("sync", "async")}


@pytest.mark.parametrize(("env", "limit"), [*((env, LIMIT) for env in OF_ID.values()), (sync, ...)])
def test_copies_that_are_stepped_one_by_one_have_it(env, limit):
    algorithm = build(env, time_limit=limit, num_envs=4, horizon=2)
    flags, stats = ended(algorithm, 12)
    algorithm.env.close()
    begun = offsets(flags)
    assert len(begun.unique()) > 1
    assert sum(row["episodes/ended"] for row in stats) == int(flags.sum()) - int((begun > 0).sum())


@pytest.mark.parametrize(
    ("env", "options", "why"),
    [
        (Pendulum, {"time_limit": None}, "`random_start` draws times below a time limit, and Pendulum has none"),
        (Pendulum, {"horizons_per_env_reset": 1}, r"`random_start` needs .* reset once \(horizons_per_env_reset=-1\)"),
        (functools.partial(GymnasiumEnv, "CartPole-v1", vectorization="vector"), {}, "counts its own"),
    ],
)
def test_what_cannot_have_it_is_refused_in_a_line(env, options, why):
    with pytest.raises(ValueError, match=why) as error:
        build(env, **options)
    assert "\n" not in str(error.value)


def test_agents_of_a_copy_have_one_time():
    algorithm = build(Spread)
    algorithm.horizons.reset_if_due(None)
    copies = algorithm.env.carry["elapsed"].view(algorithm.env.num_agents, -1)
    assert copies[0].unique().numel() > 1
    assert torch.equal(copies, copies[:1].expand_as(copies))
