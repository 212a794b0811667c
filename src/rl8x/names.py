"""Messages on names: of built-in things, of keyword arguments, and of other libraries' equivalents.

A table maps other libraries' names to rl8x's. It is that of the pages docs/coming-from-*.md; tests compare the
two.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

from rl8x.output import shown


def did_you_mean(
    name: object, legal: Iterable[str], *, most: int = 1, cutoff: float = 0.6, show: Callable[[str], str] = repr
) -> str:
    """Return " Did you mean 'this'?" with the nearest legal names or another library's equivalent, if any."""
    legal = list(legal)
    known = called_here(name, legal, show)
    if known:
        return known
    lowered = {each.lower(): each for each in reversed(legal)}  # the first of names that differ only in case
    near = difflib.get_close_matches(str(name).lower(), lowered, n=most, cutoff=cutoff)
    return f" Did you mean {' or '.join(show(lowered[each]) for each in near)}?" if near else ""


def unknown_name(kind: str, name: object, legal: Collection[str], where: str = "") -> str:
    """Write the message that a name is unknown, with the nearest and all legal names."""
    return f"no {kind} {name!r}{where}.{did_you_mean(name, legal, most=2, cutoff=0.5)} There are {', '.join(legal)}."


def class_named(kind: str, spec: Any, builtin: Mapping[str, type[Any]], base: type[Any], others: str) -> type[Any]:
    """Return the built-in class of a name, or a subclass itself; `others` names further legal values in messages."""
    if isinstance(spec, str):
        if spec not in builtin:
            raise ValueError(unknown_name(kind, spec, builtin))
        return builtin[spec]
    if not inspect.isclass(spec) or not issubclass(spec, base):
        raise TypeError(f"`{kind}` must be a name ({', '.join(builtin)}){others}; got {shown(spec)}.")
    return spec


def resolved_arguments(cls: type, config: Mapping[str, Any], *, num_positional: int) -> dict[str, Any]:
    """Return the keyword arguments of a class, defaults included, without those that the caller passes by position."""
    parameters = list(inspect.signature(cls).parameters.values())[num_positional:]
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    return defaults | dict(config)


def check_arguments(cls: type, config: Mapping[str, Any], config_name: str, *, num_positional: int) -> None:
    """Raise a `ValueError` for keyword arguments that a class does not take."""
    parameters = list(inspect.signature(cls).parameters.values())[num_positional:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    legal = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]
    for name in config:
        if name not in legal:
            if not legal:
                raise ValueError(f"{cls.__name__} takes nothing in `{config_name}`; got {name!r}.")
            raise ValueError(unknown_name("argument", name, legal, f" of {cls.__name__} in `{config_name}`"))


# -- names in other libraries

_STEPS: Final = (
    '`HitsUpperBound("env/steps", N)` in `run(stop_conditions=[...])`, on the command line `--stop "env/steps >= N"`'
)
_SIZES: Final = '`model_config={"hidden_sizes": [64, 64]}`'
_SAVED: Final = "`Checkpoints(every_steps=...)`, in run files `checkpoints`"

# Names in rl8x for names in other libraries that are not spelled alike: the first one that is legal is meant.
_NAMES: Final[dict[str, str]] = {
    "learning_rate policy_lr q_lr": "lr coefficients/lr",
    "anneal_lr schedule learning_rate_scheduler": "lr_schedule",
    "n_steps": "n_step horizon",
    "estimation_step": "n_step",
    "num_steps num_steps_per_env train_freq step_per_collect collection_step_num_env_steps rollouts": "horizon",
    "n_envs num_train_envs num_training_envs training_num make_vec_env": "num_envs",
    "num_test_envs num_test_episodes test_step_num_episodes episode_per_test n_eval_episodes": "num_eval_envs",
    "eval_freq epoch_num_steps step_per_epoch": "steps_per_eval",
    "num_learning_iterations max_iterations": "max_steps",
    "batch_size num_minibatches num_mini_batches mini_batches": "sgd_minibatch_size batch_size",
    "n_epochs update_epochs num_learning_epochs learning_epochs repeat_per_collect update_step_num_repetitions": (
        "num_sgd_iters"
    ),
    "discount_factor": "gamma",
    "lam lmbda": "gae_lambda",
    "clip_range clip_coef eps_clip ratio_clip clip_epsilon": "clip_param",
    "ent_coef entropy_coef entropy_loss_scale": "entropy_coeff alpha coefficients/alpha",
    "autotune": "alpha",
    "vf_coef value_loss_coef value_loss_scale": "vf_coeff",
    "target_kl kl_threshold": "target_kl_div",
    "critic_obs_normalization": "normalize_observations",
    "learning_starts start_timesteps random_timesteps": "warmup_steps",
    "gradient_steps train_frequency update_per_step update_step_num_gradient_steps_per_sample": "updates_per_sample",
    "target_update_interval target_network_frequency target_update_freq": "target_interval",
    "exploration_initial_eps exploration_final_eps exploration_fraction start_e end_e": "epsilon epsilon_schedule",
    "policy_noise target_policy_noise": "target_noise",
    "gradient_length": "seq_len",
    "policy_kwargs": "model_config",
    "policy actor critic rnn_type features_extractor_class": "model",
    "distribution_cfg": "distribution",
    "optimizer_kwargs": "optimizer_config",
    "share_features_extractor": "shared",
    "net_arch hidden_dims actor_hidden_dims critic_hidden_dims hiddens hidden_size": "hidden_sizes",
    "hidden_sizes": "hidden_size",  # of another model
    "cuda": "device",
    "check_for_nan": "on_non_finite",
    "torch_compile_mode": "execution",
    "exp_name": "run_name",
    "wandb_project_name wandb_project": "experiment_name",
    "track": "tracking",
    "verbose show_progress progress_bar": "progress",
    "capture_video": "evals_per_film",
    "env_id": "env",
    "learn": "train",
    "enjoy": "play",
    # the last parts of metrics' names
    "ep_rew_mean mean_reward episode_reward reward episodic_return": "episodes/returns/mean returns/mean",
    "ep_len_mean mean_ep_length mean_episode_length episodic_length": "episodes/lengths/mean",
    "total_timesteps": "env/steps",
    "iterations": "algorithm/steps",
    "fps sps total_fps": "profiling/env_steps_per_s",
    "learning_time": "profiling/step_ms",
    "approx_kl": "monitors/kl_div",
    "clipfrac": "monitors/clip_frac",
    "policy_gradient_loss policy_loss actor_loss surrogate": "losses/policy",
    "value_loss value": "losses/vf",
    "entropy_loss": "losses/entropy",
    "loss": "losses/total losses/q",
    "critic_loss td_loss": "losses/q",
    "qf1_values qf2_values q_values": "monitors/q",
    "ent_coef_loss": "losses/alpha",
    "exploration_rate": "coefficients/epsilon",
    "behavior": "losses/distillation",
}
# Answers if none of these is legal, and for names without a single equivalent.
_WORDS: Final[dict[str, str]] = {
    "total_timesteps timesteps total_frames max_epochs max_epoch": _STEPS,
    "net_arch hidden_dims actor_hidden_dims critic_hidden_dims hiddens hidden_sizes": _SIZES,
    "layer_norm": '`model_config={"layer_norm": True}`',
    "activation_fn activation": '`model_config={"activation": "tanh"}`',
    "lstm_hidden_size rnn_hidden_dim rnn_hidden_size hidden_size": '`model_config={"hidden_size": 256}`',
    "init_std init_noise_std log_std_init": '`distribution_config={"initial_std": 1.0}`',
    "state_dependent_std": '`distribution_config={"std": "state"}`',
    "squash_output": '`distribution="squashed_normal"`',
    "use_mixed_precision enable_amp": '`precision="bf16"`',
    "save_freq save_interval save_model save_checkpoint_fn": _SAVED,
    "save_best_fn": '`Checkpoints(best="eval/returns/mean")`',
    "stop_fn": "`run(stop_conditions=[...])`",
    "callback": "`Trainer(callbacks=[...])`",
    "reward_metric multi_agent_return_reduction": "`team_return` of an environment with several agents",
    "tensorboard_log logger": "`Trainer(tracker=...)`, MLflow by itself",
    "torch_deterministic": "nothing to set: the same seed on the same machine gives the same bits",
    "time_limit max_episode_steps": "an argument of the environment, such as `env_kwargs.time_limit=200`",
    "env_id env": "what `build` takes; the first word of `rl8x train CartPole-v1`",
    "a2c": "`PPOConfig(num_sgd_iters=1)` with one minibatch: PPO whose one update has A2C's gradient",
    "ddpg": "`TD3Config(num_critics=1, policy_delay=1, target_interval=1, target_noise=0.0)`",
    "qrdqn": "`DQNConfig(double=False, num_quantiles=200)`",
    "c51": "`DQNConfig(double=False, num_atoms=101, v_min=-100, v_max=100)`",
    "recurrentppo": '`PPOConfig(model="lstm")`',
    "maskableppo": "`PPOConfig`: a mask is the part `action_mask` of a `Dict` observation",
    "cql": "offline DQN or SAC with `cql_coeff`",
    "trpo": "`PPOConfig`, the nearest that there is",
    "tqc crossq": "`SACConfig`, the nearest that there is",
}
# Where options are given that no config has.
_PLACES: Final = {
    "env_config eval_env_config evals_per_film max_steps progress steps_per_eval": "run",
    "eval_env num_eval_envs on_non_finite": "Trainer",
    "experiment_name run_name": "MLflowTracker",
}


def _single(table: dict[str, str]) -> dict[str, str]:
    return {name: answer for names, answer in table.items() for name in names.split()}


NAMES: Final = {name: tuple(answer.split()) for name, answer in _single(_NAMES).items()}
"""rl8x's names by another library's name, the likeliest first."""
WORDS: Final = _single(_WORDS)
"""Descriptions of rl8x's equivalents, by another library's name."""

# Packages and modules that register other environments, by patterns of their ids.
_PACKAGES: Final[dict[str, tuple[str, str]]] = {
    r"ALE/.*|.*NoFrameskip-v\d+": ("ale-py", "ale_py"),
    r"(MiniGrid|BabyAI)-.*": ("minigrid", "minigrid"),
    r"(Fetch|Hand|Adroit|Franka|PointMaze|AntMaze).*": ("gymnasium-robotics", "gymnasium_robotics"),
}


def name_here(name: object, legal: Iterable[str]) -> str | None:
    """Return the legal name for another library's name, or None; names may be options, such as `--learning-rate`."""
    plain = {_plain(each): each for each in legal}
    return next((plain[here] for here in NAMES.get(_plain(name), ()) if here in plain), None)


def called_here(name: object, legal: Iterable[str], show: Callable[[str], str] = repr) -> str:
    """Return " It is 'lr' here." for another library's name, with `show` for legal names; empty if it is unknown."""
    here = name_here(name, legal)
    if here is not None:
        return f" It is {show(here)} here."
    plain, places = _plain(name), _single(_PLACES)
    own = () if str(name).startswith("-") else (plain,)  # an option of the command line is said by click
    calls = [f"`{places[each]}({each}=...)`" for each in NAMES.get(plain, own) if each in places]
    words = WORDS.get(plain) or WORDS.get(plain.replace("_", "")) or "".join(calls)
    return f" Here that is {words}." if words else ""


def _plain(name: object) -> str:
    return str(name).lower().lstrip("-").replace("-", "_").rpartition(".")[-1]


def package_of(env_id: str) -> str:
    """Return a sentence on what to install for an environment of another package; empty if none is known."""
    for pattern, (package, module) in _PACKAGES.items():
        if re.fullmatch(pattern, env_id):
            return f" It is one of {package}: `pip install {package}`, and name it '{module}:{env_id}'."
    return ""
