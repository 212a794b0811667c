"""Shared by `rl8x train`, `bench` and `resume`: makes options from config fields, and runs from options.

A hyperparameter is explained once, at its field; its option, range and help come from there for every algorithm.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import click

from rl8x.algorithms import AlgorithmConfig, OffPolicyConfig, OnlineConfig
from rl8x.algorithms.config import PolicyConfig, TrainedConfig
from rl8x.algorithms.hyperparameters import kind_of
from rl8x.algorithms.off_policy.config import ActorCriticConfig, LearnerConfig, ValueConfig
from rl8x.algorithms.on_policy import OnPolicyConfig
from rl8x.cli.errors import CheckedCommand, UserError, users_mistakes
from rl8x.conditions.spec import is_expression
from rl8x.config import RunSpec, apply_overrides, load_run_file, parse_value
from rl8x.config.files import ALIASES, SUFFIXES, renamed
from rl8x.config.spec import FIELDS, AlgorithmSpec, class_named_in, default_of, overridden
from rl8x.config.tuned import listed, tuned_file
from rl8x.importing import Trust, find_modules_here, texts
from rl8x.names import called_here

# Only `algorithm_config.NAME=` sets an algorithm's fields of these names; `seed` means the algorithm's.
_RUN_KEYS: Final = FIELDS.keys() - {"seed"}
_OF_THE_COMMAND: Final = ("words", "file", "tuned", "trust")
_OPTIONS: Final = "rl8x.algorithm_options"
_OWNERS: Final[dict[type, str]] = {
    AlgorithmConfig: "Every algorithm",
    TrainedConfig: "Every algorithm that trains a model",
    PolicyConfig: "Every algorithm with a choice of action distributions",
    OnlineConfig: "Every algorithm with an environment",
    OnPolicyConfig: "Every algorithm that learns from rollouts",
    LearnerConfig: "Every algorithm that learns from stored transitions",
    ValueConfig: "Every algorithm that learns values from them",
    OffPolicyConfig: "Every algorithm with a replay",
    ActorCriticConfig: "Every algorithm with a policy and critics",
}
_TRUST: Final = (
    "Import the modules that the run file or checkpoint names, those of the working directory too: their code runs. "
    "Use the store that the checkpoint names. Classes typed on the command line need no flag."
)
_TUNED: Final = "Begin with rl8x's own run file of ENV and the algorithm, which learns: `rl8x tuned` lists them."

# -- options of config fields


class FieldType(click.ParamType[Any]):
    """The type of a config field's values: read as YAML unless the field is a text; the config checks them."""

    def __init__(self, field: dataclasses.Field[Any]) -> None:
        kinds, choices = kind_of(field), field.metadata.get("choices")
        self.text = kinds in ("str", "str | None")
        self.optional = field.default is None or kinds.endswith("None")
        names = {"int": "integer", "float": "number", "dict": "mapping", "list": "list"}
        self.name = next((name for prefix, name in names.items() if kinds.startswith(prefix)), "text")
        if choices or "type[" in kinds:
            self.name = "|".join(str(choice).lower() for choice in choices) if choices else "name"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read one value."""
        if not isinstance(value, str) or not value.strip():  # the command rejects empty values
            return value
        if self.optional and value.lower() in ("none", "null"):
            return None
        if self.text:
            return value
        try:
            return parse_value(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class FieldOption(click.Option):
    """The option of a config field, passed on only if it was given; group None is that of the command's own options."""

    def __init__(self, field: dataclasses.Field[Any], group: str | None = None) -> None:
        self.group, flag, is_flag = group, field.name.replace("_", "-"), kind_of(field) == "bool"
        flags, kind = (f"--{flag}/--no-{flag}", None) if is_flag else (f"--{flag}", FieldType(field))
        super().__init__([flags, field.name], type=kind, default=None, help=_explanation(field))

    def handle_parse_result(self, ctx: click.Context, opts: Mapping[str, Any], args: list[str]) -> Any:
        """Take the value only if it was typed."""
        return super().handle_parse_result(ctx, opts, args) if self.name in opts else (None, args)


def _explanation(field: dataclasses.Field[Any]) -> str:
    """Return the help of a field: its meaning, default and range."""
    value = default_of(field)
    words = {"None": "none", "": "none", "True": "yes", "False": "no", str(dataclasses.MISSING): "must be given"}
    notes = [f"default: {words.get(str(value), value)}"]
    for bound, sign in (("above", ">"), ("low", ">="), ("high", "<=")):
        limit = field.metadata.get(bound)
        notes += [f"{sign} {limit:g}"] if limit is not None and math.isfinite(limit) else []
    return f"{field.metadata.get('help', '')}  [{'; '.join(notes)}]"


class AlgorithmCommand(CheckedCommand):
    """A command with an option for each hyperparameter of the algorithm that it runs; help lists them in groups.

    `find` takes the command's own parameters as typed, and whether help is asked for; it returns the algorithm's config
    class, or None for no options. `title` is the group of the command's own options, `left_out` names hyperparameters
    without an option.
    """

    def __init__(
        self,
        *,
        find: Callable[[Mapping[str, Any], bool], type[AlgorithmConfig] | None],
        title: str = "The run",
        left_out: Sequence[str] = (),
        group_of: Callable[[dataclasses.Field[Any], type[AlgorithmConfig]], str] | None = None,
        **attributes: Any,
    ) -> None:
        super().__init__(**attributes)
        self._find, self._title, self._left_out, self._group_of = find, title, left_out, group_of or _owner
        self.params.append(click.Option(["--trust"], is_flag=True, help=_TRUST))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Find the algorithm of the command, then parse with the options of its config class."""
        parser = self.make_parser(ctx)
        parser.ignore_unknown_options = True
        values, _, _ = parser.parse_args(list(args))
        # Only typed values, without click's sentinel for missing parameters.
        typed = {name: value for name, value in values.items() if isinstance(value, str | bool | tuple | list)}
        help_option = self.get_help_option(ctx)
        with users_mistakes():
            config_class = self._find(typed, help_option is not None and help_option.name in typed)
        if config_class is not None:
            ctx.meta[_OPTIONS] = self._make_options(config_class)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = called_here(error.option_name, [name for each in self.get_params(ctx) for name in each.opts])
            if not known:
                raise
            raise click.UsageError(f"No such option {error.option_name!r}.{known}", ctx) from error

    def _make_options(self, config_class: type[AlgorithmConfig]) -> list[click.Option]:
        """Make options of hyperparameters, except those whose names the command already has."""

        def names(parameter: click.Parameter) -> set[str]:
            return {parameter.name or "", *parameter.opts, *parameter.secondary_opts}

        taken = {*_RUN_KEYS, *self._left_out, "help", "--help"}.union(*map(names, self.params))
        fields = dataclasses.fields(config_class)
        options = [FieldOption(field, self._group_of(field, config_class)) for field in fields]
        return [option for option in options if not taken & names(option)]

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the command's parameters and the algorithm's."""
        return [*super().get_params(ctx), *ctx.meta.get(_OPTIONS, ())]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section of help for each group, `--help` last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        help_option = self.get_help_option(ctx)
        for parameter in sorted(self.get_params(ctx), key=lambda parameter: parameter is help_option):
            record = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Option) and record is not None:
                group = parameter.group if isinstance(parameter, FieldOption) else None
                sections.setdefault("Other" if parameter is help_option else group or self._title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _owner(field: dataclasses.Field[Any], config_class: type[AlgorithmConfig]) -> str:
    """Return the group of a hyperparameter's option, by the first base class that has it."""
    bases = reversed(config_class.__mro__)
    owner = next(cls for cls in bases if field.name in getattr(cls, "__dataclass_fields__", ()))
    return _OWNERS.get(owner) or owner.__name__.removesuffix("Config")


class RunCommand(AlgorithmCommand):
    """A command that takes a run from a run file, KEY=VALUE and options; help groups those in `display` separately."""

    def __init__(self, *, run_fields: Sequence[str], display: Sequence[str] = (), **attributes: Any) -> None:
        super().__init__(find=_config_class_of, **attributes)
        words = click.Argument(["words"], nargs=-1, metavar="[ENV] [KEY=VALUE]...")
        self.params[:0] = [words, run_file("Run file"), click.Option(["--tuned"], is_flag=True, help=_TUNED)]
        for name in run_fields:
            self.params.append(FieldOption(FIELDS[name], "Tracking and display" if name in display else None))


def run_file(what: str) -> click.Option:
    """Make the option `-f` for a file to read."""
    text = f"{what}: YAML, TOML or JSON. Later arguments override it."
    return click.Option(["-f", "--file"], metavar="FILE", help=text, multiple=True, callback=_one_file)


def _one_file(ctx: click.Context | None, param: click.Parameter | None, files: Sequence[str] | None) -> str | None:
    """Return the file of the option `-f`, if any; raise for several, as the last would silently replace the others."""
    if files is not None and len(files) > 1:
        raise UserError(f"one file at most; got -f {' and -f '.join(files)}. Write them as one, or keys as KEY=VALUE.")
    return files[0] if files else None


# -- a run from the command line


def _config_class_of(parameters: Mapping[str, Any], asks_help: bool) -> type[AlgorithmConfig]:
    """Return the config class of the algorithm named by an option, else by KEY=VALUE, else by the run file."""
    parameters = {**parameters, "file": _one_file(None, None, parameters.get("file"))}
    data, typed = {} if parameters.get("tuned") else _file_data(parameters), _typed(parameters)
    trusted = parameters.get("trust") or frozenset(texts(typed))
    find_modules_here(trusted)
    return class_named_in({**data, **typed}, trusted)


def _file_data(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of the given run file or of the tuned setting; empty without either."""
    file = parameters.get("file")
    if not parameters.get("tuned"):
        return {} if file is None else renamed(load_run_file(file))
    if file is not None:
        raise UserError(f"--tuned is a run file itself, so that -f {file} has no place beside it: give one of the two.")
    typed = _typed(parameters)
    env = next((word for word in parameters.get("words") or () if "=" not in word), typed.get("env"))
    if not isinstance(env, str):
        raise UserError(f"--tuned needs the environment's name, as in `rl8x train CartPole --tuned`. {listed()}")
    return load_run_file(tuned_file(env, str(typed.get("algorithm", AlgorithmSpec.algorithm))))


def _typed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a run that KEY=VALUE and `--algorithm` set."""
    typed = apply_overrides({}, [word for word in parameters.get("words") or () if "=" in word], ALIASES)
    return typed if parameters.get("algorithm") is None else typed | {"algorithm": parameters["algorithm"]}


def stop_specs(stop: Sequence[str]) -> list[Any]:
    """Return the values of `--stop` as plain data: comparisons stay texts, anything else is read as YAML."""
    return [text if is_expression(text) else parse_value(text) for text in stop]


def read_run(parameters: Mapping[str, Any], stop: Sequence[str] = ()) -> RunSpec:
    """Make a run from the parameters of a `RunCommand`, and stop conditions, which replace the file's."""
    options = {name: value for name, value in parameters.items() if name not in _OF_THE_COMMAND}
    words, typed = [word for word in parameters["words"] if "=" in word], _typed(parameters)
    envs = [word for word in parameters["words"] if "=" not in word]
    envs += [f"env={typed['env']}"] if envs and "env" in typed else []
    if len(envs) > 1:
        raise UserError(f"one environment at most; got {' and '.join(envs)}.")
    if envs and envs[0].lower().endswith(SUFFIXES):
        raise UserError(f"{envs[0]!r} is no environment. To read a run file: rl8x train -f {envs[0]}")
    data, conditions = _file_data(parameters), stop_specs(stop)
    # Names on the command line may import their modules; names in a file may only with `--trust`.
    trusted: Trust = parameters["trust"] or frozenset(texts([envs, typed, conditions, options]))
    find_modules_here(trusted)
    hyperparameters = {name: value for name, value in options.items() if name not in _RUN_KEYS}
    data = overridden(data, words, class_named_in({**data, **typed}, trusted), hyperparameters)
    if envs:
        data["env"] = envs[0]
    if conditions:
        data["stop_conditions"] = conditions
    data |= {name: value for name, value in options.items() if name in _RUN_KEYS}
    return RunSpec.from_plain(data, trust=trusted)
