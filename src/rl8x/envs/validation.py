"""Check the shapes, types and purity of an environment's functions before training."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import gymnasium.spaces as spaces
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import HumanRendering, RecordVideo
from torch import Tensor

from rl8x.envs.base import Env
from rl8x.envs.checks import check_reset, check_step, check_takes_seeds, layers_of
from rl8x.envs.gymnasium_env import GymnasiumEnv
from rl8x.envs.vectorised import CopiedResults, copies_of
from rl8x.execution.execution import kept_generators
from rl8x.keys import ACTION_MASK
from rl8x.output import described
from rl8x.spaces import (
    check_mask,
    check_supported,
    element_of,
    named_parts,
    only_legal,
    outside,
    torch_dtype,
    tree_of,
    where_rows,
)
from rl8x.trees import as_tensor, flatten_tree, tree_map

STEPS = 32
"""Steps with random actions; the first few also check purity, the rest look for a rare termination."""
PURITY_STEPS = 3
_RAISED: Final = object()
# Attributes are watched down to this depth, and lists with fewer items than a table has.
_DEEPEST: Final = 4
_TABLE: Final = 100

Form: TypeAlias = "tuple[list[int], torch.dtype] | dict[str, Form] | None"
"""The shape of a tensor's rows and its dtype, None for any; or the forms of a dict's parts."""


def validate(env: Env) -> None:
    """Run an environment's functions on random actions and compare their results with what it declares.

    It draws from a generator of its own and works on a copy of the environment's attributes, so that the environment,
    its generator and its carry do not change. For simulators (`capturable` is false) only the spaces are checked,
    because each probe would change their state; for Gymnasium's, one more copy is made and tested.
    It warns of observations that are out of the bounds of their space.

    Args:
        env: The environment to check.

    Raises:
        TypeError: If it is not an rl8x environment, such as the class instead of an instance.
        ValueError: If something does not fit; the message names the function and both shapes or types.
    """
    if not isinstance(env, Env):
        raise TypeError(f"validate checks an instance of an Env, such as CartPole(8); got {env!r}.")
    env = env.unwrapped  # check the author's functions, without rl8x's own wrappers
    name = type(env).__name__
    check_supported(env.single_observation_space, f"{name}.single_observation_space")
    check_supported(env.single_action_space, f"{name}.single_action_space")
    if isinstance(env, GymnasiumEnv):
        try_copy(env.vector_env)
    elif env.capturable:
        with kept_generators(env.device), torch.no_grad():
            _Probe(env).run()


class _Probe:
    """Calls an environment's pure functions and checks each result."""

    def __init__(self, env: Env) -> None:
        self.env = copy.copy(env)
        self.env.parameter_state = copy.copy(env.parameter_state)
        self.env.parameter_state.adopt()
        self.generator = torch.Generator(env.device).manual_seed(0)
        self.action_space = copy.deepcopy(env.action_space)
        self.action_space.seed(0)
        self.attributes = {path: _snapshot(value) for path, value in _parts(vars(self.env))}

    def run(self) -> None:
        """Start all copies and step them with random actions."""
        env, space = self.env, self.env.single_observation_space
        noise = self.noise()
        parameters = self.call("starting_parameters", noise)
        reset_noise = noise[:, env.step_noise : env.step_noise + env.reset_noise]
        fresh = state = self.call("initial_state", parameters, reset_noise, pure=True)
        if not isinstance(state, dict):
            raise self.fault(
                "initial_state", f"must return the state as a dict of tensors; got {type(state).__name__}."
            )
        self.check("initial_state", "state", state, dict.fromkeys(state))
        obs = self.observation(state, parameters, pure=True)
        far = outside(obs, space)
        for t in range(STEPS):
            actions, before = self.actions(obs), state
            given = actions, parameters, self.noise()[:, : env.step_noise]
            state, terminated = self.moved(before, *given, pure=t < PURITY_STEPS)
            obs = self.observation(state, parameters, terminated)
            metrics = self.call("measure", state, parameters)
            self.check("measure", "metrics", metrics, dict.fromkeys(env.metric_names, ([], torch.float32)))
            if bool(terminated.any()):
                state = where_rows(terminated, fresh, state)
                obs = self.call("observe", state, parameters)
            else:
                far += outside(obs, space)
        warn_outside(type(env).__name__, far)

    def actions(self, obs: Any) -> Any:
        """Draw random actions, legal ones if the observation has an action mask."""
        space, seen = self.env.single_action_space, self.env.single_observation_space
        actions = tree_of(self.action_space.sample(), lambda part: torch.as_tensor(part, device=self.env.device))
        if not isinstance(seen, spaces.Dict) or ACTION_MASK not in seen.spaces:
            return actions
        check_mask(seen[ACTION_MASK], space, ACTION_MASK)
        return only_legal(actions, obs[ACTION_MASK], space)

    def noise(self) -> Tensor:
        """Draw the noise of one step, `[num_envs, noise_width]`, from the probe's generator."""
        shape = (self.env.num_envs, self.env.noise_width)
        return torch.rand(shape, generator=self.generator, device=self.env.device)

    def fault(self, function: str, text: str) -> ValueError:
        """Make the error that names a function of the environment."""
        return ValueError(f"{type(self.env).__name__}.{function} {text}")

    def call(self, function: str, *arguments: Any, pure: bool = False) -> Any:
        """Call a function; check that it changes neither arguments nor environment and, if `pure`, is repeatable."""
        method: Callable[..., Any] = getattr(self.env, function)
        kept = [tree_map(Tensor.clone, argument) for argument in arguments]
        try:
            result = method(*arguments)
            again = method(*(tree_map(Tensor.clone, argument) for argument in kept)) if pure else None
        except Exception as error:
            raise self.fault(function, f"raised {described(error)}") from error
        for position, (argument, original) in enumerate(zip(arguments, kept, strict=True), start=1):
            if not _equal(argument, original):
                name = [*inspect.signature(getattr(Env, function)).parameters][position]
                raise self.fault(function, f"changed `{name}` in place; return new tensors instead.")
        if pure and not _equal(result, again):
            raise self.fault(
                function, "gave two results for the same arguments; draw random numbers from `noise` only."
            )
        # A changed attribute would survive neither compilation nor a resume.
        for path, value in _parts(vars(self.env)):
            if path not in self.attributes:  # a new one may be a cache that is filled once, and must not change then
                self.attributes[path] = _snapshot(value)
            was, contents = self.attributes[path]
            if value is not was or not (contents is None or _equal(value, contents)):
                name = path[0] + "".join(f"[{key!r}]" for key in path[1:])
                raise self.fault(
                    function, f"changed self.{name}; what changes from step to step belongs into the state."
                )
        return result

    def check(self, function: str, what: str, value: Any, form: Form, source: str = "") -> None:
        """Raise unless a value is a tensor of `num_envs` rows on the device, or a dict of such, of a form."""
        env, must = self.env, f"must return {what} as"
        if isinstance(form, dict):
            if not isinstance(value, dict) or value.keys() != form.keys():
                got = sorted(value) if isinstance(value, dict) else type(value).__name__
                raise self.fault(function, f"{must} a dict with {sorted(form)}{source}; got {got}.")
            for key, part in form.items():
                self.check(function, f"{what}[{key!r}]", value[key], part, source)
            return
        if not isinstance(value, Tensor):
            raise self.fault(function, f"{must} a tensor; got {type(value).__name__}.")
        if value.ndim == 0 or value.shape[0] != env.num_envs:
            raise self.fault(function, f"{must} [{env.num_envs}, ...]; got {list(value.shape)}.")
        if value.device.type != env.device.type:
            raise self.fault(function, f"must return {what} on {env.device}; got {value.device}.")
        if form is not None and form != _form_of(value):
            need, got = f"{[env.num_envs, *form[0]]} {form[1]}{source}", f"{list(value.shape)} {value.dtype}"
            raise self.fault(function, f"{must} {need}; got {got}.")

    def moved(
        self, before: dict[str, Tensor], actions: Any, *given: Any, pure: bool
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Call `transition` and check its result; return the state and where it terminated, `[num_envs]`."""
        result = self.call("transition", before, actions, *given, pure=pure)
        if not isinstance(result, tuple) or len(result) != 3:
            got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
            raise self.fault("transition", f"must return (state, rewards, terminated); got {got}.")
        state, rewards, terminated = result
        self.check("transition", "state", state, tree_map(_form_of, before), ", as in the state before")
        self.check("transition", "rewards", rewards, ([], torch.float32))
        self.check("transition", "terminated", terminated, ([], torch.bool))
        if not bool(rewards.isfinite().all()):
            reward = rewards[~rewards.isfinite()][0].item()
            shape = list(actions.shape) if isinstance(actions, Tensor) else sorted(actions)
            raise self.fault("transition", f"returned a reward of {reward} for random actions of shape {shape}.")
        if bool(terminated.any()) and not self.env.terminates:
            raise self.fault("transition", "said terminated, but the class says `terminates = False`; set it to True.")
        return state, terminated

    def observation(self, state: Any, parameters: Any, terminated: Tensor | None = None, *, pure: bool = False) -> Any:
        """Call `observe`; raise unless the observation is of the declared space."""
        obs = self.call("observe", state, parameters, pure=pure)
        self.check("observe", "obs", obs, _form_in(self.env.single_observation_space), ", by single_observation_space")
        for path, part in flatten_tree("obs", obs).items():
            seen = part if terminated is None else part[~terminated]  # NaN harms none where an episode terminated
            if seen.dtype.is_floating_point and bool(seen.isnan().any()):
                name, *keys = path.split("/")
                raise self.fault("observe", f"returned NaN in {name}{''.join(f'[{key!r}]' for key in keys)}.")
        return obs


def _form_of(tensor: Tensor) -> Form:
    return [*tensor.shape[1:]], tensor.dtype


def _form_in(space: spaces.Space[Any]) -> Form:
    """Return the form of the observations in a space."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return {key: _form_in(part) for key, part in named_parts(space)}
    return [*(space.shape or ())], torch_dtype(space)


def _parts(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield a value and the parts of nested dicts, lists and tuples, but not those of a table, with their paths."""
    if path:
        yield path, value
    if isinstance(value, dict | list | tuple) and len(path) < _DEEPEST and (not path or len(value) < _TABLE):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _parts(part, (*path, key))


def _snapshot(value: Any) -> tuple[Any, Tensor | None]:
    """Keep a tensor's contents with the tensor itself, so that both rebinding and writing into it are seen."""
    return value, value.clone() if isinstance(value, Tensor) else None


def _equal(left: Any, right: Any) -> bool:
    """Compare nested dicts and tuples of tensors bit by bit, NaN being equal to NaN."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.shape != right.shape or left.dtype != right.dtype:
            return False
        return torch.equal(left, right) or bool(((left == right) | ((left != left) & (right != right))).all())
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(value, right[key]) for key, value in left.items())
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    return type(left) is type(right)


# -- test of one Gymnasium copy


def try_copy(vector_env: Any) -> None:
    """Make one more copy of a vector environment that steps its copies one by one, if it can, and check its results."""
    inner = vector_env.unwrapped
    if not isinstance(inner, SyncVectorEnv | AsyncVectorEnv):
        return
    far: list[str] = []
    with _kept_random(), warnings.catch_warnings(action="ignore"):
        env = _came(inner.env_fns[0])
        if env is _RAISED or any(env.unwrapped is stepped.unwrapped for stepped in copies_of(inner)):
            return
        layers = [layer for layer in layers_of(env) if not isinstance(layer, CopiedResults)]
        before = _random_states()
        try:
            for layer in layers:
                if isinstance(layer, RecordVideo | HumanRendering):  # they would show a test as an episode
                    break
                if layer is layers[-1] or not type(layer).__module__.startswith("gymnasium."):
                    far += _try_layer(layer)
            if isinstance(inner, AsyncVectorEnv) and inner.autoreset_mode == AutoresetMode.SAME_STEP:
                _check_own_memory(env)
        finally:
            used = [name for name, state in _random_states().items() if state != before[name]]
            env.close()
    name = type(env.unwrapped).__name__
    warn_outside(name, far)
    if used:
        text = f"{name} uses the global generator of {' and of '.join(used)}, which no seed of a run decides, and which"
        text += " evaluations move on too: let it draw from `self.np_random`, which its `reset` seeds."
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def warn_outside(owner: str, far: Sequence[str]) -> None:
    """Warn of the first observation outside of its space, from texts as `outside` returns, if there are any."""
    if far:
        text = f"{owner}: {far[0]}. Nothing is cut off; mend `observation_space`, or the observation."
        warnings.warn(text, RuntimeWarning, stacklevel=4)


def _check_own_memory(env: Any) -> None:
    """Raise ValueError if a reset overwrites an episode's last observation, which a worker sends after the reset."""
    last, first = _came(_step_at_random, env, _came(env.reset)), _came(env.reset)
    if last is _RAISED or first is _RAISED:
        return
    as_array: Any = np.asarray
    trees = (tree_of(obs, as_array, env.observation_space) for obs, *_ in (last, first))
    parts = zip(*(flatten_tree("obs", tree).values() for tree in trees), strict=True)
    if any(itertools.starmap(np.shares_memory, parts)):
        raise ValueError(
            f"{type(env.unwrapped).__name__} overwrites and returns one array, so that an AsyncVectorEnv that resets "
            "copies in the same step sends the first observation of an episode as the last of the one before. Give "
            "GymnasiumEnv the function that makes a copy, with vectorization='async', or take another autoreset_mode."
        )


def _try_layer(env: Any) -> list[str]:
    """Reset and step an environment or wrapper; return texts about observations that are out of bounds."""
    check_takes_seeds(env)
    space, far = env.observation_space, []
    result = _came(env.reset, seed=0)
    if result is not _RAISED:
        check_reset(env, result, space)
        far += outside(tree_of(result[0], as_tensor, space), space)
        result = _came(_step_at_random, env, result)
    if result is not _RAISED:
        check_step(env, result, space)
        far += outside(tree_of(result[0], as_tensor, space), space)
    return far


def _step_at_random(env: Any, reset: Any) -> Any:
    """Step by a random action, which is legal if the observation of the reset has an action mask."""
    obs, _ = reset
    space = copy.deepcopy(env.action_space)
    space.seed(0)
    both = spaces.Tuple((space, env.observation_space))
    actions, seen = tree_of((space.sample(), obs), lambda part: as_tensor(part)[None], both).values()
    if isinstance(seen, Mapping) and ACTION_MASK in seen:
        actions = only_legal(actions, seen[ACTION_MASK], space)
    return env.step(element_of(space, actions, lambda part, rows: rows[0].numpy().astype(part.dtype)[()]))


def _came(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return the result of a simulator's function; `_RAISED` if it raises, as it will in training, with a traceback."""
    try:
        return function(*arguments, **named)
    except Exception:
        return _RAISED


def _random_states() -> dict[str, Any]:
    """Return the states of the global random generators, in a form to compare, by their modules."""
    numbers: Any = np.random.get_state()
    arrays = {"numpy.random": (numbers[1].tolist(), numbers[2]), "torch": torch.get_rng_state().tolist()}
    return {"random": random.getstate(), **arrays}


@contextlib.contextmanager
def _kept_random() -> Iterator[None]:
    """Restore the global random generators, which old environments seed or draw from."""
    numbers, drawn = np.random.get_state(), random.getstate()
    try:
        with kept_generators(torch.device("cpu")):
            yield
    finally:
        np.random.set_state(numbers)
        random.setstate(drawn)
