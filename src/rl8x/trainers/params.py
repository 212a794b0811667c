"""A tracked run's params, above all the `env_config` that it trains and evaluates under: a param for each value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from rl8x.envs import Env
from rl8x.envs.parameters import inherited_config, shown_value

if TYPE_CHECKING:
    from rl8x.trainers.base import GenericTrainerBase
    from rl8x.trainers.run import Run

PlainConfig = Mapping[str, object]
_CONFIGS: Final = ("env_config.", "eval_env_config.")


def plain_configs(
    env: Env, eval_env: Env | None, env_config: Mapping[str, Any] | None, eval_env_config: Mapping[str, Any] | None
) -> tuple[dict[str, object] | None, dict[str, object] | None]:
    """Check what a run is to train and to evaluate under, before its first step.

    Args:
        env: The training environment.
        eval_env: The evaluation environment; None where that is the training's.
        env_config: As `run()` takes it.
        eval_env_config: As `run()` takes it.

    Returns:
        Both in plain JSON form; None stays None.

    Raises:
        ValueError: If a value is not legal or has not as many numbers as there are copies.
    """
    plain = None if env_config is None else env.plain_config(env_config)
    if eval_env_config is None:
        if eval_env is not None:
            config = env.next_config if plain is None else plain
            called = "eval_env_config (None: as in training)"
            eval_env.plain_config(inherited_config(config, eval_env.num_envs), called=called, copies="num_eval_envs")
        return plain, None
    if eval_env is None:
        return plain, env.plain_config(eval_env_config, called="eval_env_config")
    return plain, eval_env.plain_config(eval_env_config, called="eval_env_config", copies="num_eval_envs")


class ToldParams:
    """What the tracked run was told of the trainer's params, and tells it what is new: MLflow changes none that it has.

    Args:
        trainer: Whose params they are.
    """

    def __init__(self, trainer: GenericTrainerBase[Any]) -> None:
        self._trainer = trainer
        self._told: dict[str, Any] = {}
        # What is trained under, once that is known: a run that begins with an evaluation does not tell it yet.
        self._config: PlainConfig | None = None
        self._eval_config: PlainConfig | None = None

    def begin(self, run: Run) -> None:
        """Take over what a run trains and evaluates under."""
        algorithm, given = self._trainer.algorithm, run.plain["env_config"]
        self._eval_config = run.plain["eval_env_config"]
        if not algorithm.reset_is_due():
            self._config = algorithm.env.config
        else:
            self._config = algorithm.env.next_config if given is None else given

    def note_config(self) -> None:
        """Keep what a collect ran under, and tell the tracked run where it is new."""
        config = self._trainer.algorithm.env.config
        if config != self._config:
            self._config = config
            self.update()

    def first(self) -> dict[str, Any]:
        """Return the params to begin the tracked run with."""
        known = self._config is not None
        params = self._trainer.params
        self._told = {name: value for name, value in params.items() if known or not name.startswith(_CONFIGS)}
        return self._told

    def update(self) -> None:
        """Tell the tracked run those params that are new or others by now."""
        trainer, told = self._trainer, self._told
        new = {name: value for name, value in trainer.params.items() if str(told.get(name, ...)) != str(value)}
        if trainer._tracked and new:
            trainer.tracker.log_params(new)
            told.update(new)

    def of_configs(self) -> dict[str, Any]:
        """Name the value of each parameter of the environment, and those of evaluations where they are others."""
        env, evaluator = self._trainer.algorithm.env, self._trainer.evaluator
        config = env.next_config if self._config is None else self._config
        trained = _in_force(env, config)
        params = {f"env_config.{name}": shown_value(value) for name, value in trained.items()}
        eval_env = env if evaluator is None else evaluator.env
        given = self._eval_config
        evaluated = _in_force(eval_env, inherited_config(config, eval_env.num_envs) if given is None else given)
        for name, value in evaluated.items():
            if name in (given or {}) or value != trained.get(name):
                params[f"eval_env_config.{name}"] = shown_value(value)
        return params


def _in_force(env: Env, config: PlainConfig) -> dict[str, object]:
    return {name: config.get(name, parameter.default) for name, parameter in env.parameters.items()}
