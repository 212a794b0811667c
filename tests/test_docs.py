"""What the pages on algorithms and for users of Tianshou promise is complete, and names what exists."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from rl8x import NullTracker, Trainer
from rl8x.algorithms import BCConfig, DQNConfig, IQLConfig, OnlineConfig, PPOConfig, PQNConfig, SACConfig, TD3Config

DOCS = Path(__file__).parents[1] / "docs"
SECTIONS = {
    "PPO": PPOConfig,
    "PQN": PQNConfig,
    "DQN": DQNConfig,
    "SAC": SACConfig,
    "TD3": TD3Config,
    "BC": BCConfig,
    "IQL": IQLConfig,
}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_option_of_an_algorithm_is_in_its_section_and_no_other(section: str) -> None:
    text = (DOCS / "algorithms.md").read_text()
    intro, (own, *_) = text.split("\n## ")[0], text.split(f"\n## {section}\n")[1].split("\n## ")
    shared = set(re.findall(r"`(\w+)`", intro.split("Options of all algorithms:")[1]))
    named = {
        name for line in own.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1] if "|" in line else "")
    }
    fields = {field.name for field in dataclasses.fields(SECTIONS[section])}
    assert shared == {field.name for field in dataclasses.fields(OnlineConfig)}
    assert named == fields - shared


def test_the_page_for_runs_that_do_not_learn_names_what_there_is() -> None:
    text = (DOCS / "not-learning.md").read_text()
    configs = (PPOConfig, PQNConfig, SACConfig)
    trainers = [
        Trainer(config(num_envs=2, device="cpu").build(env), tracker=NullTracker())
        for config, env in ((PPOConfig, "CartPole"), (SACConfig, "Pendulum"))
    ]
    metrics = frozenset().union(*(trainer.metric_names for trainer in trainers))
    named = set(re.findall(r"`((?:env|eval|episodes|returns|algorithm|losses|monitors|replay)/[\w/]+)`", text))
    assert len(named) >= 8
    assert named <= metrics
    options = {field.name for config in configs for field in dataclasses.fields(config)}
    asked = set(re.findall(r"`(\w+_\w+)(?:=[^`]*)?`", text)) - {"on_non_finite"}
    assert len(asked) >= 8
    assert asked <= options
