import copy

import pytest
import torch

from rl8x import PPOConfig
from rl8x.distributed import Ranks
from rl8x.envs import CartPole
from rl8x.randomization import Adaptive, Choice, Learnable, Scheduled, Uniform

ADAPTIVE = {"length": Adaptive((0.4, 0.6), thresholds=(2, 5), step=0.1, episodes=2)}
LEARNABLE = {
    name: Learnable(Uniform(0.1, 1.0), threshold=15, levels=2, candidates=4, episodes=2)
    for name in ("length", "masspole")
}
SCHEDULED = {"length": Scheduled([(0, Uniform(0.4, 0.6)), (100, Uniform(0.2, 1.0))]), "gravity": 9.0}


def step(env, noise=None):
    before = env.carry
    env.carry, step = env.advance(env.carry, torch.zeros(env.num_envs, dtype=torch.int64), env.noise(1)[0])
    return before, step


@pytest.mark.parametrize("config", [ADAPTIVE, LEARNABLE], ids=["adaptive", "learnable"])
def test_the_source_of_an_episode_is_that_of_the_draw_it_began_with(config):
    env = CartPole(8, seed=1, time_limit=12)
    env.reset(config=config)
    (label,) = env.carry["sources"]
    began = env.carry["sources"][label].clone()
    lengths, ends = env.carry["parameters"]["length"].clone(), 0
    for _ in range(60):
        _, found = step(env)
        done = found.terminated | found.truncated
        assert found.sources[label].equal(began), "of the episode that ends, not of the one that begins"
        now, values = env.carry["sources"][label], env.carry["parameters"]["length"]
        assert now[~done].equal(began[~done])
        assert values[~done].equal(lengths[~done])
        ends += int(done.sum())
        began, lengths = now.clone(), values.clone()
        if label == "learnable:":
            (group,) = env.parameter_state.current.curricula
            assert values[now >= 0].equal(group.state["values"][now[now >= 0], list(group.members).index("length")])
    assert ends > 20


def test_a_function_s_values_hold_from_each_copy_s_next_episode():
    env = CartPole(6, seed=1, time_limit=9)
    env.steer_config({"length": 0.3, "gravity": [9.0, 9.1, 9.2, 9.3, 9.4, 9.5]})
    env.reset()
    width = env.noise_width
    for _ in range(4):
        step(env)
    assert (env.carry["parameters"]["length"] == torch.tensor(0.3)).all()
    env.steer_config({"length": 0.7})
    began = torch.zeros(6, dtype=torch.bool)
    for _ in range(9):
        _, found = step(env)
        began |= found.terminated | found.truncated
        parameters = env.carry["parameters"]
        assert parameters["length"].equal(torch.where(began, 0.7, 0.3))
        assert (parameters["gravity"][began] == torch.tensor(9.8)).all()
        assert not (parameters["gravity"][~began] == torch.tensor(9.8)).any()
    assert began.all()
    assert env.noise_width == width
    assert env.config == env.present_config() == {"length": 0.7}
    assert env.parameter_state.ranges() == {"length": pytest.approx((0.7, 0.7))}


def test_programs_know_kinds_and_not_numbers():
    env = CartPole(4, seed=0)

    def places():
        return [group.state["numbers"].data_ptr() for group in env.parameter_state.current.curricula]

    def key(config):
        env.reset(config=config)
        return env.program_key

    assert key({}) == key({"length": 0.7}) == key({"length": [0.7] * 4}) != key({"length": Uniform(0.2, 0.8)})
    env.steer_config({"length": Uniform(0.2, 0.3)})
    env.reset()
    before = env.program_key, places()
    env.steer_config({"length": Uniform(0.5, 0.9), "gravity": 3.0})
    assert (env.program_key, places()) == before
    env.steer_config({"length": Choice([0.5, 0.9])})
    assert env.program_key != before[0]
    for config in (ADAPTIVE, LEARNABLE, SCHEDULED):
        before = key(config)
        env.parameter_state.update_from_metrics({"env/steps": 70})
        walk(env, 30)
        assert env.program_key == before


def walk(env, steps):
    seen = []
    for _ in range(steps):
        _, found = step(env)
        ended = (found.terminated | found.truncated)[None]
        if env.parameter_state.current.moves_by_returns:
            sources = {label: source[None] for label, source in found.sources.items()}
            pending = env.carry["sources"]
            env.parameter_state.update_from_episodes(ended, found.episode_returns[None], {}, sources, pending)
        seen.append(found.obs)
    return torch.stack(seen)


@pytest.mark.parametrize(
    "config", [ADAPTIVE, LEARNABLE, SCHEDULED, None], ids=["adaptive", "learnable", "at", "steered"]
)
def test_snapshots_and_copies_go_on_alike_and_share_nothing(config):
    env = CartPole(5, seed=3, time_limit=11)
    if config is None:
        env.steer_config({"length": Uniform(0.3, 0.6)})
    env.reset(config=config)
    env.parameter_state.update_from_metrics({"env/steps": 50})
    walk(env, 60)
    twin, again = copy.deepcopy(env), CartPole(5, seed=9, time_limit=11)
    twin.generator.set_state(env.generator.get_state())
    again.load_state_dict(env.state_dict())
    assert again.present_config() == twin.present_config() == env.present_config() != CartPole(5).present_config()
    expected = walk(env, 60)  # the first goes on before the others, which share nothing with it
    assert walk(again, 60).equal(expected)
    assert walk(twin, 60).equal(expected)


def test_an_evaluation_moves_nothing_and_a_configuration_that_comes_back_goes_on():
    env = CartPole(8, seed=1, time_limit=12)
    env.reset(config=ADAPTIVE)
    walk(env, 200)
    (group,) = env.parameter_state.current.curricula
    low, high = env.parameter_support()["length"]
    assert (low, high) != (0.4, 0.6)
    with env.parameter_state.evaluating():
        env.reset(config=ADAPTIVE)
        assert (env.carry["sources"]["adaptive:"] == -1).all()
        env.reset(config={"length": 0.5})
        assert (env.carry["parameters"]["length"] == 0.5).all()
    assert env.parameter_state.next.config == ADAPTIVE
    env.reset()
    assert env.parameter_state.current.curricula == (group,)
    assert float(group.state["share"]) == 0.5
    assert env.parameter_support()["length"] == (low, high)
    assert env.parameter_support()["gravity"] == pytest.approx((9.8, 9.8))

    other = CartPole(64, seed=2)
    other.parameter_state.configure_for_evaluation(ADAPTIVE, env.parameter_state)
    other.reset()
    values = other.carry["parameters"]["length"]
    assert low - 1e-6 <= values.min() < low + 0.3 * (high - low)
    assert high - 0.3 * (high - low) < values.max() <= high + 1e-6
    assert ((values - low).abs() < 1e-6).sum() <= 1
    assert (other.carry["sources"]["adaptive:"] == -1).all()


def test_ranks_begin_with_the_same_levels_and_seeds_with_others(monkeypatch):
    def levels(rank, seed):
        present = Ranks(rank, 2, rank)
        monkeypatch.setattr("rl8x.envs.parameter_state.ranks", lambda: present)
        monkeypatch.setattr("rl8x.algorithms.hyperparameters.ranks", lambda: present)
        env = PPOConfig(num_envs=4, horizon=4, sgd_minibatch_size=4, seed=seed, device="cpu").build(CartPole).env
        env.reset(config={"length": Learnable(Uniform(0.1, 3.0), threshold=100, levels=8, candidates=8)})
        [group] = env.parameter_state.current.curricula
        return group.state["values"].tolist()

    assert levels(0, seed=3) == levels(1, seed=3)
    assert levels(0, seed=3) != levels(0, seed=4)


def test_the_range_of_a_choice_that_moves_is_what_can_be_drawn():
    env = CartPole(4, seed=0)
    ends = (Choice([3.0, 9.8, 20.0], [1, 1, 0]), Choice([3.0, 9.8, 20.0], [0, 1, 1]))
    env.reset(config={"gravity": Scheduled([(0, ends[0]), (100, ends[1])])})
    for at, expected in ((0, (3.0, 9.8)), (50, (3.0, 20.0)), (100, (9.8, 20.0))):
        env.parameter_state.update_from_metrics({"env/steps": at})
        assert env.parameter_state.ranges()["gravity"] == env.parameter_support()["gravity"] == expected
