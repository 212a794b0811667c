"""Find environments, the built-in ones by name, Gymnasium's by id, others by dotted path, and describe them."""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import gymnasium

from rl8x.envs import builtin
from rl8x.envs.base import Env
from rl8x.envs.checks import narrow_seed
from rl8x.envs.gymnasium_env import GymnasiumEnv
from rl8x.envs.observed import ObservedParameters
from rl8x.envs.pettingzoo_env import PettingZooEnv, named_maker
from rl8x.envs.vectorised import copies_of
from rl8x.importing import Trust, check_gymnasium_id, dotted_path, import_class, is_dotted, is_gymnasium_id
from rl8x.names import did_you_mean
from rl8x.output import shown, table
from rl8x.plain import frozen, thawed

BUILTIN: dict[str, type[Env]] = {name: getattr(builtin, name) for name in builtin.__all__}

OBSERVE: Final = "observe_parameters"
"""The argument of all environments that wraps them in `ObservedParameters`."""

# Arguments of a constructor that rl8x passes, or that every environment takes
_OURS: Final = ("num_envs", "device", "seed", "time_limit", "render_mode")
# Methods that step an environment; a class that overrides none of them is only a base class.
_STEPS: Final[dict[type[Any], tuple[str, ...]]] = {
    gymnasium.Env: ("step",),
    Env: ("transition", "outcome", "advance", "step"),
}


class EnvMaker(functools.partial[Env]):
    """A function or class that makes environments, with arguments; each call gets its own copies of them."""

    shown: dict[str, Any]
    """`observe_parameters`, if it was given: not passed on, but how the environment is wrapped."""

    def __new__(cls, maker: Callable[..., Any], /, *args: Any, **keywords: Any) -> EnvMaker:
        """Keep frozen copies of the arguments, so that the script cannot change them later."""
        shown = {OBSERVE: keywords.pop(OBSERVE)} if OBSERVE in keywords else {}
        made = super().__new__(cls, maker, *frozen(args), **frozen(keywords))
        made.shown = frozen(shown)
        return made

    def __repr__(self) -> str:
        """Return the call that makes an environment, as text."""
        told = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.arguments.items())]
        return f"{getattr(self.func, '__qualname__', self.func)}({', '.join(told)})"

    @property
    def arguments(self) -> dict[str, Any]:
        """All keyword arguments."""
        return {**self.keywords, **self.shown}

    def __call__(self, /, *args: Any, **options: Any) -> Env:
        """Make an environment."""
        if options.get("seed") is not None and not getattr(self.func, "__module__", "").startswith("rl8x."):
            options["seed"] = narrow_seed(options["seed"])
        env = self.func(*thawed(self.args), *args, **{**thawed(self.keywords), **options})
        if not isinstance(env, Env):
            raise TypeError(
                f"{getattr(self.func, '__qualname__', self.func)} must make an rl8x Env; it made {type(env).__name__}. "
                "Let GymnasiumEnv make the copies: functools.partial(rl8x.envs.GymnasiumEnv, make_one)."
            )
        mode = self.shown.get(OBSERVE, "none")
        if mode == "none":
            return env
        try:
            return ObservedParameters(env, mode)
        except ValueError:
            env.close()
            raise


def steps_one_by_one(maker: EnvMaker) -> bool:
    """Whether the made environment steps its copies one after the other, so that many copies are slow."""
    has_copies = isinstance(maker.func, type) and issubclass(maker.func, GymnasiumEnv | PettingZooEnv)
    return has_copies and maker.keywords.get("vectorization") != "vector"


def resolve(name: str) -> type[Env]:
    """Return the class of a built-in environment.

    Args:
        name: A key of `BUILTIN`.

    Raises:
        ValueError: If there is none of that name; the message has the nearest ones.
    """
    if name in BUILTIN:
        return BUILTIN[name]
    raise _unknown(name, BUILTIN)


def _unknown(name: str, near: Iterable[str]) -> ValueError:
    hint = did_you_mean(name, near, show=str)
    return ValueError(f"no built-in environment {name!r}.{hint} There are {', '.join(BUILTIN)}.")


def env_maker(env: object, arguments: Mapping[str, Any] = MappingProxyType({}), *, trust: Trust = False) -> EnvMaker:
    """Find the class or factory that makes an environment.

    Args:
        env: A built-in name, a Gymnasium id, a dotted path, a class of ours or of Gymnasium's, or a factory.
        arguments: Its keyword arguments.
        trust: Whether a dotted path or an id may import any module, and name any factory rather than a class.

    Returns:
        A maker, which is called with the number of copies, and `device` and `seed` by name.

    Raises:
        ValueError: If nothing is known or importable by that name, or it takes no such argument.
        TypeError: If it makes no environments, lacks an argument, or cannot be called like that.
    """
    for name in ("num_envs", "device", "seed"):
        if name in arguments:
            raise ValueError(f"env_kwargs: `{name}` is a hyperparameter. Put it under `algorithm_config`.")
    if isinstance(env, str):
        env = _named(env, trust)
    if isinstance(env, type):
        _check_concrete(env)
        env = functools.partial(GymnasiumEnv, env) if issubclass(env, gymnasium.Env) else env
    if isinstance(env, gymnasium.Env):
        name = repr(type(env).__name__ if env.spec is None else env.spec.id)
        raise TypeError(
            f"{name} is one copy of a Gymnasium environment, and a policy is trained on `num_envs` of them. Pass its "
            "id, or functools.partial(rl8x.envs.GymnasiumEnv, make_one) with a function that makes a copy."
        )
    if not callable(env):
        raise TypeError(
            "An environment is a class, a factory, a built-in name, a Gymnasium id, a dotted path, an rl8x Env or a "
            f"vector environment; got {shown(env)}."
        )
    maker = _with_arguments(env, arguments)
    if maker.args and isinstance(maker.args[0], str):  # a name among the arguments
        if maker.func is GymnasiumEnv:
            check_gymnasium_id(maker.args[0], trust)
        elif maker.func is PettingZooEnv:
            named_maker(maker.args[0], trust)
    return maker


def _named(name: str, trust: Trust) -> Any:
    """Resolve a name: a built-in class, an id registered with Gymnasium, or a dotted path to import."""
    if name in BUILTIN:
        return BUILTIN[name]
    check_gymnasium_id(name, trust)
    registered = registered_id(name)
    if registered is not None or ":" in name or "/" in name or is_gymnasium_id(name):
        return functools.partial(GymnasiumEnv, registered or name)
    if is_dotted(name):
        return import_class(name, (Env, gymnasium.Env, gymnasium.vector.VectorEnv), trust=trust)
    raise _unknown(name, [*BUILTIN, *gymnasium.registry])


def registered_id(name: str) -> str | None:
    """Return the registered Gymnasium id for a name: the name itself, or its newest version; None if there is none."""
    module, colon, id_part = name.rpartition(":")
    if id_part in gymnasium.registry:
        return name
    versions = [spec for spec in gymnasium.registry.values() if spec.id == f"{id_part}-v{spec.version}"]
    newest = max(versions, key=lambda spec: spec.version or 0, default=None)
    return None if newest is None else f"{module}{colon}{newest.id}"


def _check_concrete(env_class: type) -> None:
    """Raise `TypeError`, with advice, if a class cannot make an environment by itself."""
    name, make_one = dotted_path(env_class) or env_class.__name__, "functools.partial(rl8x.envs.GymnasiumEnv, make_one)"
    if issubclass(env_class, gymnasium.Wrapper):
        raise TypeError(
            f"{name} wraps an environment that is there already. Give a function that makes a copy and wraps it, "
            f"{make_one}, or an id with `wrappers` among its arguments."
        )
    if issubclass(env_class, gymnasium.vector.VectorEnv) and not issubclass(env_class, Env):
        raise TypeError(
            f"{name} is a class of Gymnasium's vector environments. Give one that is made, or a function: "
            f"lambda num_envs, **options: rl8x.envs.GymnasiumEnv({name}(...), **options)."
        )
    missing = [*getattr(env_class, "__abstractmethods__", ())]
    for base, steps in _STEPS.items():
        if issubclass(env_class, base) and all(getattr(env_class, step) is getattr(base, step) for step in steps):
            missing.append(steps[0])
    if missing:
        lacks = ", ".join(f"{method}()" for method in sorted(missing))
        raise TypeError(f"{name} is a base class, without {lacks} of its own. Give a subclass of it.")


def _with_arguments(maker: Callable[..., Any], arguments: Mapping[str, Any]) -> EnvMaker:
    """Return a maker with keyword arguments; those before `num_envs` become positional, as the number itself is."""
    given: list[Any] = []
    keywords = dict(arguments)
    while isinstance(maker, functools.partial):
        before = maker.arguments if isinstance(maker, EnvMaker) else maker.keywords
        given, keywords = [*maker.args, *given], {**before, **keywords}
        maker = maker.func
    try:
        signature = inspect.signature(maker)
    except (TypeError, ValueError):  # some functions in C have none
        return EnvMaker(maker, *given, **keywords)
    names, called = [*signature.parameters], getattr(maker, "__name__", repr(maker))
    for name in names[len(given) : names.index("num_envs")] if "num_envs" in names else ():
        if name not in keywords:
            raise TypeError(
                f"{called} is missing an argument: give {name!r} too, as in build({called}, {name}=...) or on the "
                f"command line --env-kwargs '{{{name}: ...}}'."
            )
        given.append(keywords.pop(name))
    made = EnvMaker(maker, *given, **keywords)
    try:
        signature.bind(*made.args, 1, device=None, seed=0, **made.keywords)
    except TypeError as error:
        takes, physics = dict.fromkeys((*names, OBSERVE)), getattr(maker, "parameters", None)
        unknown = made.keywords.keys() - takes
        if unknown:
            hint = " `env_config` sets parameters." if isinstance(physics, dict) and unknown <= physics.keys() else ""
            raise ValueError(f"env_kwargs: {called} takes {', '.join(takes)}; {error}.{hint}") from None
        raise TypeError(
            f"{called} is called with the number of copies, `device=` and `seed=`, to make environments for training "
            f"and evaluations: {error}. Let it pass them on: lambda num_envs, **options: MyEnv(num_envs, **options); "
            "or functools.partial(rl8x.envs.GymnasiumEnv, make_one) for a Gymnasium environment."
        ) from None
    return made


def make(name: str, num_envs: int, **kwargs: Any) -> Env:
    """Make a built-in environment by name; raise what `resolve` and its constructor do.

    Args:
        name: Its name, a key of `BUILTIN`.
        num_envs: Number of copies.
        kwargs: Further arguments of its constructor.
    """
    return EnvMaker(resolve(name), **kwargs)(num_envs)


# -- descriptions


def describe(name: str) -> str:
    """Describe an environment in full, as `rl8x envs NAME` does: spaces, episodes, and parameters of `env_config`.

    Args:
        name: What `rl8x train` takes: a built-in name, a Gymnasium id, or a dotted path to a class. Its code runs.

    Raises:
        ValueError: If there is no such environment.
        TypeError: If it is not an rl8x environment.
    """
    env = env_maker(name, trust=True)(1, seed=0)
    copies = copies_of(env.vector_env) if isinstance(env, GymnasiumEnv) else ()
    source = type(copies[0].unwrapped) if copies else type(env)
    # The docstring, or only its first section if it has sections, as Gymnasium's do.
    text = inspect.getdoc(source) or ""
    first, *sections = text.removeprefix("## Description").strip().split("\n## ")
    lines = [name, "", first.strip() if sections else text, ""]
    lines += [f"observation  {env.single_observation_space}", f"action       {env.single_action_space}"]
    lines += [f"episodes     {_episodes(env)}", ""]
    takes = [
        str(each.replace(annotation=each.empty))
        for each in inspect.signature(source).parameters.values()
        if each.name not in _OURS and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    if issubclass(source, Env) and not any(each.startswith(OBSERVE) for each in takes):
        takes.append(f"{OBSERVE}='none'")
    lines += [f"env_kwargs   {', '.join(takes)}", ""] if takes else []
    env.close()
    if not env.parameters:
        by_name = " until env_kwargs.parameters names it (docs/simulators.md)" if isinstance(env, GymnasiumEnv) else ""
        return "\n".join([*lines, f"env_config can set nothing{by_name}."])
    rows: list[tuple[str, ...]] = [("env_config", "default", "low", "high", "unit", "")]
    for parameter_name, parameter in env.parameters.items():
        numbers = (f"{number:g}" for number in (parameter.default, parameter.low, parameter.high))
        rows.append((parameter_name, *numbers, parameter.unit, parameter.description))
    example, declared = next(iter(env.parameters.items()))
    middle = declared.default
    drawn = f"{{uniform: [{middle / 2:g}, {middle * 2:g}]}}" if middle else "{grid: [...]}"
    lines += [
        table(rows),
        "",
        "A number for all copies, a list with one for each, or a distribution drawn at each reset:",
    ]
    return "\n".join([*lines, f"  rl8x train {name} env_config.{example}='{drawn}'"])


def summarize(cls: type[Any]) -> str:
    """Summarise an environment in a line, followed by its parameters with their defaults and bounds."""
    env = cls(1, seed=0)
    seen, done = _short(env.single_observation_space), _short(env.single_action_space)
    settable = "; ".join(f"{name} {each.default:g} in {each.bounds}" for name, each in env.parameters.items())
    line = f"{cls.__name__:<22} {seen} -> {done}, episodes {_episodes(env)}"
    return line + ("\n" + textwrap.indent(textwrap.fill(settable, 110), "    ") if settable else "")


def _short(space: Any) -> str:
    kind = type(space).__name__
    if kind == "Discrete":
        return f"Discrete({space.n})"
    return f"{kind}{list(space.shape)}" if kind == "Box" else kind


def _episodes(env: Any) -> str:
    if not env.episodic:
        return "never end"
    ends = ["with the task"] if env.terminates else []
    ends += [f"after {env.time_limit} steps"] if env.time_limit is not None else []
    return f"end {' or '.join(ends)}"
