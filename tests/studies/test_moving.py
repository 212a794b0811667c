"""What moves while a policy trains is inside of its support as far as it has come when the policy is tested."""

from __future__ import annotations

import pytest

from rl8x.studies import Study, table


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_support_is_that_of_the_time_of_the_test(here):
    # From exactly 0.5 at no transition to [0.3, 0.7] at 128. A horizon has what the ones before it came to.
    moving = {"scheduled": {"points": [[0, {"uniform": [0.5, 0.5]}], [128, {"uniform": [0.3, 0.7]}]]}}
    study = Study(
        train={"moving": {"length": moving}},
        test={"length": [0.31, 0.45, 0.5, 0.55, 0.69]},
        env="CartPole",
        max_steps=3,
        evaluate_at=1,
        episodes=1,
        tracking=False,
        progress="none",
        algorithm_config={"num_envs": 8, "horizon": 8, "device": "cpu", "model_config": {"hidden_sizes": [8]}},
    )
    frame = study.run()
    within = {steps: rows[table.INSIDE].tolist() for steps, rows in frame.groupby(table.ENV_STEPS)}
    assert within[64] == [False, False, True, False, False]
    assert within[128] == [False, True, True, True, False]
    assert within[192] == [True] * 5
    assert study.supports["moving"]["length"] == pytest.approx([0.3, 0.7])
