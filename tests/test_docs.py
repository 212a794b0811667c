"""What the pages on algorithms and for users of Tianshou promise is complete, and names what exists."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from rl8x import NullTracker, Trainer, keys
from rl8x.algorithms import BCConfig, DQNConfig, IQLConfig, OnlineConfig, PPOConfig, PQNConfig, SACConfig, TD3Config
from rl8x.checkpoint import Checkpoints

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

PARAMS = """
max_epochs epoch_num_steps test_collector test_step_num_episodes training_fn test_fn stop_fn compute_score_fn
save_best_fn save_checkpoint_fn resume_from_log multi_agent_return_reduction logger verbose show_progress
training_collector
collection_step_num_env_steps collection_step_num_episodes test_in_training batch_size update_step_num_repetitions
update_step_num_gradient_steps_per_sample buffer algorithm
"""
PARAMS_1 = """
policy max_epoch step_per_epoch episode_per_test step_per_collect episode_per_collect repeat_per_collect update_per_step
train_fn test_in_train reward_metric save_fn train_collector reset_prior_to_run reset_buffer
"""
SAMPLING = """
num_epochs num_train_envs num_training_envs num_test_envs num_test_episodes buffer_size start_timesteps
start_timesteps_random replay_buffer_ignore_obs_next replay_buffer_save_only_last_obs replay_buffer_stack_num
"""
STATISTICS = {
    "EpochStats": "epoch train_collect_stat test_collect_stat training_stat info_stat",
    "InfoStats": (
        "update_step best_score best_reward best_reward_std train_step train_episode test_step test_episode timing"
    ),
    "TimingStats": "total_time train_time train_time_collect train_time_update test_time update_speed",
    "CollectStats": (
        "n_collected_episodes n_collected_steps collect_time collect_speed returns returns_stat lens lens_stat "
        "pred_dist_std_array pred_dist_std_array_stat"
    ),
    "SequenceSummaryStats": "mean std max min",
    "TrainingStats": "train_time smoothed_loss",
}
CALLBACKS = """
EpochTrainCallback EpochTestCallback EpochStopCallback EpochStopCallbackRewardThreshold EpochTrainCallbackDQNSetEps
EpochTrainCallbackDQNEpsLinearDecay EpochTestCallbackDQNSetEps
"""


def cells(page: str) -> list[list[str]]:
    """The cells of all rows of a page's tables."""
    lines = (DOCS / page).read_text().splitlines()
    rows = [line.strip("|").split(" | ") for line in lines if line.startswith("|") and not line.startswith("|--")]
    return [[cell.strip() for cell in row] for row in rows]


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


@pytest.mark.parametrize("section", SECTIONS)
def test_an_algorithms_section_begins_with_who_can_use_it_and_a_command(section: str) -> None:
    own = (DOCS / "algorithms.md").read_text().split(f"\n## {section}\n\n")[1].split("\n## ")[0]
    begin = own.split("\n| option |")[0]
    assert begin.startswith("| can I use it? | |\n")
    assert re.search(r"^rl8x train .*(?:--tuned|--dataset)", begin, flags=re.MULTILINE)
    assert "![Training returns" in begin or "--dataset" in begin


@pytest.mark.parametrize(
    "names", [PARAMS, PARAMS_1, SAMPLING, CALLBACKS], ids=["params", "version 1", "sampling", "callbacks"]
)
def test_nothing_of_tianshous_parameters_is_left_out(names: str) -> None:
    theirs = " ".join(row[0] for row in cells("coming-from-tianshou.md"))
    named = set(re.findall(r"\w+", theirs))
    assert set(names.split()) - named == set()


@pytest.mark.parametrize("group", STATISTICS)
def test_nothing_of_tianshous_statistics_is_left_out(group: str) -> None:
    rows = [row[0] for row in cells("coming-from-tianshou.md") if group in row[0]]
    named = set(re.findall(r"\w+", " ".join(rows)))
    assert set(STATISTICS[group].split()) - named == set()


def test_what_is_promised_to_users_of_tianshou_is_there() -> None:
    ours = " ".join(row[1] for row in cells("coming-from-tianshou.md"))
    options = {field.name for config in SECTIONS.values() for field in dataclasses.fields(config)}
    for name in ("updates_per_sample", "warmup_steps", "num_sgd_iters", "sgd_minibatch_size", "buffer_path", "epsilon"):
        assert f"`{name}`" in ours or f"`{name}=" in ours
        assert name in options
    metrics = {*keys.TRAINER_METRICS, *(keys.EVAL_PREFIX + name for name in keys.COLLECT_METRICS), "profiling/eval_ms"}
    for name in re.findall(r"`((?:env|eval|episodes|profiling|algorithm)/[\w/]+)`", ours):
        assert name in metrics, name
    saved = {field.name for field in dataclasses.fields(Checkpoints)}
    assert set(re.findall(r"(\w+)=", " ".join(re.findall(r"`Checkpoints\((.*?)\)`", ours)))) <= saved


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
