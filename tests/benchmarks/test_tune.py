import random

import pytest

from benchmarks import tune


@pytest.mark.parametrize("env", tune.SPACES)
def test_what_is_drawn_is_legal_and_half_of_it_near_the_best(env):
    rng, best = random.Random(0), tune.FIRST[env]
    assert set(best) == set(tune.SPACES[env])
    changes = []
    for _ in range(200):
        settings = tune.drawn(env, rng, best)
        assert all(settings[name] in values for name, values in tune.SPACES[env].items())
        assert settings["num_envs"] * settings["horizon"] % settings["minibatches"] == 0
        changes.append(sum(settings[name] != best[name] for name in best))
    assert 80 < sum(count <= 2 for count in changes) < 140


def test_a_search_keeps_the_settings_with_the_least_median(monkeypatch):
    tried = []

    def seconds_of(peer, env, settings, budget_s, threads):
        tried.append(budget_s)
        return {1: [3.0, 2.0, 4.0], 2: None, 3: [1.0, 2.5, 1.5]}[len(tried)]

    times = iter([0.0, 1.0, 2.0, 100.0])
    monkeypatch.setattr(tune, "seconds_of", seconds_of)
    monkeypatch.setattr(tune.time, "monotonic", lambda: next(times))
    found = tune.search("rl8x", "cartpole", 1.0, 2)
    assert found["seconds"] == [1.0, 2.5, 1.5]
    assert found["tries"] == 3
    assert tried == [20.0, 6.0, 6.0]  # half again the slowest seed of the best so far


def test_a_search_begins_with_what_an_earlier_one_found(monkeypatch):
    tried = []
    monkeypatch.setattr(tune, "seconds_of", lambda peer, env, settings, *_: tried.append(settings) or [1.0])
    monkeypatch.setattr(tune.time, "monotonic", iter([0.0, 100.0]).__next__)
    earlier = tune.FIRST["pendulum"] | {"lr": 1.0}
    assert tune.search("sb3", "pendulum", 1.0, 2, earlier)["settings"] == earlier
    assert tried == [earlier, tune.FIRST["pendulum"]]
