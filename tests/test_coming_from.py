"""The pages for users of other libraries name all that those have, and what they say of rl8x exists and is so."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import keyword
import re
from functools import cache
from typing import Any, NamedTuple

import pytest
from tests.pages import ROOT
from tests.test_site import exported, packages

from rl8x import NullTracker, PPOConfig, Trainer
from rl8x.algorithms import PQN, Distillation, DistillationConfig, DQNConfig, PQNConfig, SACConfig, TD3Config
from rl8x.cli.main import COMMANDS
from rl8x.config import algorithm_configs
from rl8x.envs import registry
from rl8x.envs.mjlab_env import MjlabEnv
from rl8x.policy import Act, Policy
from rl8x.replay.dataset import Dataset
from rl8x.spaces import AsymmetricDict
from rl8x.video import record_video

DOCS = ROOT / "docs"
PAGES = ("coming-from-sb3.md", "coming-from-cleanrl.md", "coming-from-rsl-rl.md")
ALL_PAGES = (*PAGES, "coming-from-rl8.md", "coming-from-tianshou.md")  # what these have to name: test_docs.py
# What such spans hold beside names of rl8x: values of options, keys of a schedule, variables, Gymnasium's names.
OTHER = {
    *(
        "interp",
        "kind",
        "points",
        "adaptive",
        "low",
        "high",
        "state",
        "std",
        "eps",
        "all",
        "sync",
        "async",
        "bar",
        "adam",
    ),
    *("rl8x", "config", "env", "path", "N", "teacher", "v1", "Dict", "Box", "action_mask", "info", "final_obs"),
    *("radam", "adamw", "sgd", "kl", "nll", "mse", "bf16", "eager", "compile", "graph", "auto", "last", "torch"),
    *("trainers", "distributions", "nn", "replay", "SomeConfig", "save_best_fn", "RUN", "f", "h", "k", "zip", "mlruns"),
    *("run", "yaml", "lines", "none", "min", "max", "mean"),
}
CONFIGS = {
    "PPO": PPOConfig,
    "DQN": DQNConfig,
    "SAC": SACConfig,
    "TD3": TD3Config,
    "PQN": PQNConfig,
    "Distillation": DistillationConfig,
}
# What each page has to name in its left columns: stable_baselines3 and sb3_contrib 2.9.2, CleanRL 1.2.0 and pqn.py
# of its repository at 10334fa, rsl_rl 5.5.1 with the configs of runners of Isaac Lab and mjlab.
THEIRS = {
    "coming-from-sb3.md": """
    policy env learning_rate n_steps batch_size n_epochs gamma gae_lambda clip_range clip_range_vf normalize_advantage
    ent_coef vf_coef max_grad_norm use_sde sde_sample_freq rollout_buffer_class rollout_buffer_kwargs target_kl
    stats_window_size tensorboard_log policy_kwargs verbose seed device
    buffer_size learning_starts tau train_freq gradient_steps replay_buffer_class replay_buffer_kwargs
    optimize_memory_usage target_update_interval exploration_fraction exploration_initial_eps exploration_final_eps
    action_noise target_entropy use_sde_at_warmup policy_delay target_policy_noise target_noise_clip
    net_arch activation_fn ortho_init log_std_init full_std use_expln squash_output clip_mean features_extractor_class
    features_extractor_kwargs share_features_extractor normalize_images optimizer_class optimizer_kwargs n_critics
    n_quantiles lstm_hidden_size n_lstm_layers shared_lstm enable_critic_lstm lstm_kwargs
    total_timesteps callback log_interval tb_log_name reset_num_timesteps progress_bar
    observation state episode_start deterministic
    path exclude include custom_objects print_system_info force_reset
    save_replay_buffer load_replay_buffer get_parameters set_parameters set_env get_env evaluate_policy
    BaseCallback EventCallback CallbackList CheckpointCallback ConvertCallback EvalCallback EveryNTimesteps
    LogEveryNTimesteps StopTrainingOnRewardThreshold StopTrainingOnMaxEpisodes StopTrainingOnNoModelImprovement
    ProgressBarCallback eval_env callback_on_new_best callback_after_eval n_eval_episodes eval_freq log_path
    best_model_save_path render warn save_freq save_path name_prefix save_vecnormalize reward_threshold max_episodes
    max_no_improvement_evals min_evals
    training norm_obs norm_reward clip_obs clip_reward epsilon norm_obs_keys
    rollout/ep_rew_mean rollout/ep_len_mean rollout/success_rate rollout/exploration_rate eval/mean_reward
    eval/mean_ep_length eval/success_rate time/total_timesteps time/episodes time/iterations time/fps time/time_elapsed
    train/n_updates train/approx_kl train/clip_fraction train/clip_range train/clip_range_vf train/entropy_loss
    train/explained_variance train/learning_rate train/loss train/policy_gradient_loss train/std train/value_loss
    train/actor_loss train/critic_loss train/ent_coef train/ent_coef_loss
    """,
    "coming-from-cleanrl.md": """
    --exp-name --seed --torch-deterministic --cuda --track --wandb-project-name --wandb-entity --capture-video
    --save-model --upload-model --hf-entity --env-id --total-timesteps --learning-rate --num-envs --num-steps
    --anneal-lr --gamma --gae-lambda --num-minibatches --update-epochs --norm-adv --clip-coef --clip-vloss --ent-coef
    --vf-coef --max-grad-norm --target-kl --buffer-size --tau --target-network-frequency --batch-size --start-e --end-e
    --exploration-fraction --learning-starts --train-frequency --n-atoms --v-min --v-max --q-lambda --policy-lr --q-lr
    --policy-frequency --noise-clip --alpha --autotune --policy-noise --exploration-noise
    charts/episodic_return charts/episodic_length charts/SPS charts/learning_rate charts/epsilon eval/episodic_return
    losses/policy_loss losses/value_loss losses/entropy losses/approx_kl losses/old_approx_kl losses/clipfrac
    losses/explained_variance losses/qf1_loss losses/qf2_loss losses/qf_loss losses/qf1_values losses/qf2_values
    losses/actor_loss losses/alpha losses/alpha_loss losses/td_loss losses/loss losses/q_values
    """,
    "coming-from-rsl-rl.md": """
    class_name num_steps_per_env save_interval obs_groups logger wandb_project neptune_project run_name check_for_nan
    torch_compile_mode multi_gpu actor critic student teacher
    seed device max_iterations experiment_name resume load_run load_checkpoint clip_actions empirical_normalization
    num_learning_iterations init_at_random_ep_len path infos load_cfg strict map_location get_inference_policy
    export_policy_to_jit export_policy_to_onnx add_git_repo_to_log
    num_learning_epochs num_mini_batches clip_param gamma lam value_loss_coef entropy_coef learning_rate max_grad_norm
    optimizer use_clipped_value_loss schedule desired_kl normalize_advantage_per_mini_batch use_mixed_precision rnd_cfg
    symmetry_cfg multi_gpu_cfg grad_reduce_bucket_mb share_cnn_encoders gradient_length loss_type
    hidden_dims activation obs_normalization distribution_cfg rnn_type rnn_hidden_dim rnn_num_layers cnn_cfg cnns
    init_std std_range std_type learn_std GaussianDistribution HeteroscedasticGaussianDistribution BetaDistribution
    policy ActorCritic ActorCriticRecurrent ActorCriticCNN StudentTeacher StudentTeacherRecurrent
    actor_obs_normalization critic_obs_normalization actor_hidden_dims critic_hidden_dims init_noise_std noise_std_type
    state_dependent_std rnn_hidden_size
    get_observations num_envs num_actions max_episode_length episode_length_buf cfg time_outs log episode
    Train/mean_reward Train/mean_episode_length Loss/value Loss/surrogate Loss/entropy Loss/learning_rate Loss/rnd
    Loss/symmetry Loss/behavior Policy/mean_std Policy/mean_noise_std Perf/total_fps Perf/collection_time
    Perf/learning_time Rnd/mean_extrinsic_reward Rnd/mean_intrinsic_reward Rnd/weight
    """,
}


class Row(NamedTuple):
    """A row of a table: what they call something, what rl8x does, and by algorithms what its default is."""

    theirs: str
    ours: str
    defaults: dict[str, str]


def rows(page: str) -> list[Row]:
    """All rows of a page's tables. A column after rl8x's has defaults: one for all algorithms in its head, or each."""
    found: list[Row] = []
    header: list[str] | None = None
    for line in (DOCS / page).read_text().splitlines():
        if not line.startswith("|"):
            header = None
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if header is None:
            header = cells
        elif not set(line) <= {"|", "-"}:
            at = header.index("rl8x")
            names = header[at + 1].split(", ") if at + 1 < len(header) else []
            given = cells[at + 1].split(", ") if names and cells[at + 1] else []
            given = given * len(names) if len(given) == 1 else given
            found.append(Row(cells[0], cells[at], dict(zip(names, given, strict=True)) if given else {}))
    return found


def parameters(function: Any) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()


def words_of(name: str, value: Any) -> set[str]:
    """A name, and what it is used with: its arguments, attributes and their arguments, or its keys."""
    if isinstance(value, dict):
        return {name, *map(str, value)}
    if not inspect.isclass(value):
        return {name, *parameters(value)}
    own = [cls for cls in value.__mro__ if cls.__module__.startswith("rl8x")]
    members = {key: member for cls in own for key, member in vars(cls).items() if not key.startswith("_")}
    inner = {word for member in members.values() for word in parameters(getattr(member, "__func__", member))}
    fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    return {name, *members, *inner, *fields}.union(*(parameters(cls.__init__) for cls in own))


@cache
def known() -> set[str]:
    words = {*OTHER, *COMMANDS, *keyword.kwlist, *registry.BUILTIN}
    for package in packages():
        module = importlib.import_module(package)
        words = words.union(*(words_of(name, getattr(module, name)) for name in exported(module)))
    for value in (Policy, Act, AsymmetricDict, Dataset, MjlabEnv, record_video, *algorithm_configs().values()):
        words |= words_of(value.__name__, value)
    return words


@cache
def metrics() -> set[str]:
    """The metrics of a trainer with each kind of loss."""
    small = {"num_envs": 2, "horizon": 2, "device": "cpu"}
    built = [
        PPOConfig(**small).build("CartPole"),
        SACConfig(**small).build("Pendulum"),
        DQNConfig(**small).build("CartPole"),
    ]
    named = {name for algorithm in built for name in Trainer(algorithm, tracker=NullTracker()).metric_names}
    return {*named, *PQN.metrics, *Distillation.metrics}


@pytest.mark.parametrize("page", ALL_PAGES)
def test_each_name_of_rl8x_exists(page: str) -> None:
    spans = [span for row in rows(page) for span in re.findall(r"`([^`]+)`", row.ours)]
    assert len(spans) > 60
    for span in spans:
        text = re.sub(r"\b\d[\d_.]*(?:e-?\d+)?\b", "", span)
        for word in re.findall(r"[A-Za-z_][\w/]*\b", "" if span.startswith(("src/", "examples/")) else text):
            if word.removeprefix("eval/").startswith("episodes/info"):  # an environment's own
                continue
            if "/" in word:
                assert any(name == word or name.startswith(f"{word}/") for name in metrics()), f"{word} in `{span}`"
            else:
                assert word in known() or any(name.startswith(f"{word}/") for name in metrics()), f"{word} in `{span}`"


@pytest.mark.parametrize("page", ALL_PAGES)
def test_arguments_are_those_of_what_is_called(page: str) -> None:
    """`Config(name=...)` names an argument that it takes."""
    modules = [importlib.import_module(package) for package in packages()]
    importable = {name: getattr(module, name) for module in modules for name in exported(module)}
    for row in rows(page):
        for name, arguments in re.findall(r"(\w+)\(([^()]*)\)", row.ours):
            value = importable.get(name, getattr(Trainer, name, None))
            if value is not None:
                assert set(re.findall(r"(\w+)=", arguments)) <= parameters(value), row.ours


@pytest.mark.parametrize("page", PAGES)
def test_nothing_of_theirs_is_left_out(page: str) -> None:
    spans = [span for row in rows(page) for span in re.findall(r"`([^`]+)`", row.theirs)]
    words = {word for span in spans for word in re.findall(r"--[\w-]+|[\w/]+", span)}
    assert set(THEIRS[page].split()) - words == set()


@pytest.mark.parametrize("page", PAGES)
def test_defaults_are_those_of_the_configs(page: str) -> None:
    """The first name of the row is the hyperparameter; `-` is where an algorithm has none of that name."""
    checked = 0
    for row in rows(page):
        for algorithm, told in row.defaults.items():
            name = re.findall(r"`(\w+)", row.ours)[0]
            fields = {field.name: field for field in dataclasses.fields(CONFIGS[algorithm])}
            if told == "-":
                assert name not in fields, f"{algorithm}: {row.ours}"
            else:
                field = fields[name]
                factory = field.default_factory
                default = field.default if factory is dataclasses.MISSING else factory()
                assert ast.literal_eval(told) == default, f"{algorithm}: {row.ours}"
                checked += 1
    assert checked > 20
