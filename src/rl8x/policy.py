"""A policy: a model, an action distribution and an observation normaliser in one module."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import gymnasium
import gymnasium.spaces as spaces
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rl8x.disk import named_path, replace_synced
from rl8x.distributed import resolve_device
from rl8x.distributions import Distribution, make_distribution
from rl8x.execution.execution import kept_generators
from rl8x.execution.private import tree_flatten, tree_unflatten
from rl8x.functional import ObsMoments, RunningMoments
from rl8x.importing import NOT_PLAIN, Trust, dotted_path, from_plain, import_class, to_plain
from rl8x.keys import ACTION_MASK
from rl8x.models import BUILTIN, Model, State, make_model
from rl8x.models.base import TrainingEffects, config_with_critic_obs
from rl8x.names import resolved_arguments
from rl8x.output import shown
from rl8x.plain import own_values, thawed
from rl8x.portable import SUFFIX, Decision, check_finite, policy_bytes, read_policy, to_elements, to_rows, zeros
from rl8x.spaces import (
    are_alike,
    check_mask,
    critic_only,
    map_spaces,
    space_from_plain,
    space_to_plain,
    tree_of,
    without_parts,
)
from rl8x.trees import Tree, as_tensor, first_tensor, flatten_tree, tree_map
from rl8x.trials import check_distribution, check_model, run_model

_KINDS: Final = (Model, Distribution, nn.Module)


class Act(NamedTuple):
    """The actions of one step, with their log-probabilities, the values, and the model's next state.

    Attributes:
        actions: Sampled or most likely actions, `[num_envs, *action]` or a dict of them, before any clipping.
        logp: Their log-probabilities in nats, `[num_envs]`; zeros when acting deterministically.
        values: Estimated values of the observations, in units of rewards, `[num_envs]`; zeros when acting
            deterministically.
        state: The model's state after the observation, each `[num_envs, *]`.
        params: The distributions' parameters, by number, `[num_envs, *]` each; None unless `shows_params`.
        labels: The teacher's targets for the observation, `[num_envs, *]` tensors by name; None without a teacher.
    """

    actions: Any
    logp: Tensor
    values: Tensor
    state: State
    params: dict[str, Tensor] | None = None
    labels: dict[str, Any] | None = None


class Evaluation(NamedTuple):
    """Log-probabilities, values and entropies of stored sequences, each `[seq_len, batch]`.

    Values are in the model's units: those of `Policy.value_moments` if there are any. `kl` is the KL divergence of the
    present distributions from those that acted; None if the latter are not known.
    """

    logp: Tensor
    values: Tensor
    entropy: Tensor
    kl: Tensor | None = None


class Prediction(NamedTuple):
    """The model's features, `[seq_len, batch, num_features]`, and values, `[seq_len, batch]`, and the action mask."""

    features: Tensor
    values: Tensor
    mask: Any


@contextlib.contextmanager
def training_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into training mode within the context, and into evaluation mode after it."""
    module.train()
    try:
        yield
    finally:
        module.eval()


def check_torch_defaults() -> None:
    """Raise where torch makes tensors of another type than float32, or elsewhere than on the CPU."""
    usual = torch.empty(0)
    if (usual.dtype, usual.device.type) != (torch.float32, "cpu"):
        raise ValueError(
            f"torch makes tensors of {usual.dtype} on {usual.device}, but environments and policies are float32, "
            "on the device that they are given: call torch.set_default_dtype(torch.float32) and "
            "torch.set_default_device('cpu') first."
        )


class Policy(nn.Module):
    """Map observations to actions and values.

    It is built in evaluation mode, in which it always acts: in collecting, evaluations, films and exports. Algorithms
    put the model into training mode to compute the losses that train it (`training_mode`).

    Args:
        observation_space: Space of one copy's observation.
        action_space: Space of one copy's action.
        model: Built-in name, `Model` subclass or instance; None picks by the observation space.
        model_config: Keyword arguments of the model's class.
        distribution: Built-in name or `Distribution` subclass; None picks by the action space.
        distribution_config: Keyword arguments of the distribution's class.
        normalize_observations: Whether observations are shifted and scaled by running moments before the model sees
            them.
        normalize_values: Whether the model predicts values in units of the running moments of its targets. `act` and
            `values` return them in units of rewards.
        hidden: Parts of a `Dict` observation that the model does not see at all. Critic-only parts of the space
            (`AsymmetricDict`) become the model's `critic_obs`, unless they are hidden.

    Attributes:
        autocast: Makes the context in which the model runs; set to run it in another precision.
        masked: Whether observations carry an action mask.
        state_reset_every: Steps between resets of the state in training, if episodes never end; 0: no such resets.
        has_modes: Whether training mode may differ from evaluation mode; in built-in models it does not.
        inputs_space: Space of the observations that `model_inputs` returns, without the action mask.
        unseen: Parts of a `Dict` observation that actions do not depend on: hidden ones, and those for the critic.
        clips: Whether `env_actions` may change actions; if not, it need not be called.
        shows_params: Whether `act` returns the distributions' parameters too.
        num_separate: Number of agents with weights of their own, found by the place of their rows; 1 if all share them.
        obs_moments: The observation normaliser, by the part of an observation; None without one.
        value_moments: The moments in whose units the model predicts values; None without them.

    Raises:
        TypeError: If model or distribution is of another type, or is not for such a space.
        ValueError: If a name or an argument is unknown or out of its range, or an action mask does not fit the actions.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        *,
        model: str | type[Model] | Model | None = None,
        model_config: Mapping[str, Any] | None = None,
        distribution: str | type[Distribution] | None = None,
        distribution_config: Mapping[str, Any] | None = None,
        normalize_observations: bool = False,
        normalize_values: bool = False,
        hidden: Sequence[str] = (),
    ) -> None:
        super().__init__()
        check_torch_defaults()
        self.autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.observation_space = observation_space
        self.action_space = action_space
        self.distribution = make_distribution(distribution, action_space, distribution_config)
        self.clips = self.distribution.clips
        self.shows_params = False
        self.state_reset_every = 0
        self.inputs_space = without_parts(observation_space, [ACTION_MASK])
        self.masked = self.inputs_space is not observation_space
        self.hidden = tuple(hidden)
        self.model_is_made = not isinstance(model, Model)
        model_space = map_spaces(without_parts(self.inputs_space, self.hidden), lambda part: part)  # sorted by key
        if isinstance(observation_space, spaces.Dict) and self.masked:
            if len(observation_space.spaces) == 1:
                raise ValueError(f"A Dict observation needs a part beside {ACTION_MASK!r} for the model to see.")
            check_mask(observation_space[ACTION_MASK], action_space, ACTION_MASK)
        for_critic = [name for name in critic_only(observation_space) if name not in self.hidden]
        if for_critic:
            model_config = config_with_critic_obs(for_critic, model, model_space, model_config or {})
        self.model = make_model(model, model_space, self.distribution.num_features, model_config)
        self.num_separate: int = getattr(self.model, "separate", 0) or 1
        # Including defaults; the arguments of a model given as an instance are not known.
        model_arguments: dict[str, Any] = {}
        if self.model_is_made:
            model_arguments = resolved_arguments(type(self.model), model_config or {}, num_positional=2)
        own_arguments = resolved_arguments(type(self.distribution), distribution_config or {}, num_positional=1)
        arguments = own_values({"model": model_arguments, "distribution": own_arguments})
        self.arguments: dict[str, dict[str, Any]] = thawed(arguments)
        critic_obs = model_arguments.get("critic_obs", ())
        parts = self.inputs_space.spaces if isinstance(self.inputs_space, spaces.Dict) else ()
        self.unseen = tuple(name for name in parts if name in {*self.hidden, *critic_obs})
        self.obs_moments = ObsMoments(self.inputs_space) if normalize_observations else None
        self.value_moments = RunningMoments() if normalize_values else None
        self.has_modes = type(self.model) not in BUILTIN.values()
        self.eval()
        if any(map(is_lazy, self.model.parameters())):  # such layers get their weights at their first call
            obs, starts = self._example(1)
            with torch.no_grad():
                run_model(self.model, obs, self.model.initial_state(2), starts)

    @property
    def form(self) -> tuple[type[Policy], dict[str, Any]]:
        """The class and the constructor's arguments, without the two spaces, that rebuild this policy."""
        model = {"model": type(self.model), "model_config": self.arguments["model"]}
        return Policy, {
            **(model if self.model_is_made else {"model": self.model}),
            "distribution": type(self.distribution),
            "distribution_config": self.arguments["distribution"],
            "normalize_observations": self.obs_moments is not None,
            "normalize_values": self.value_moments is not None,
            "hidden": list(self.hidden),
        }

    @property
    def recurrent(self) -> bool:
        """Whether the model carries a state from step to step."""
        return self.model.recurrent

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.parameters()).device

    def check_model(self, seq_len: int = 1) -> TrainingEffects:
        """Try custom models and distributions on two observations; return the model's side effects in training mode.

        Args:
            seq_len: Length of training sequences in steps.

        Raises:
            ValueError: If model or distribution fail or return wrong shapes or types, or if the model draws random
                numbers or changes buffers in evaluation mode.
        """
        if not type(self.distribution).__module__.startswith("rl8x."):
            action = copy.deepcopy(self.action_space)
            action.seed(0)
            check_distribution(self.distribution, to_rows(action, action.sample(), self.device)[0], self.device)
        if self.has_modes:
            return check_model(self.model, *self._example(seq_len))
        return TrainingEffects()

    def show_params(self) -> None:
        """Let `act` return the distributions' parameters too, if there is a `kl` and they have a row for each copy."""
        rows, width = 3, self.distribution.num_features
        with torch.no_grad():
            params = self.distribution.from_features(torch.zeros(rows, width, device=self.device))
        tensors = numbered(params).values()
        have_rows = (isinstance(each, Tensor) and each.shape[:1] == (rows,) for each in tensors)
        self.shows_params = self.distribution.has_kl and all(have_rows)

    def _example(self, seq_len: int) -> tuple[Any, Tensor]:
        """Return model inputs for a sampled observation, `[seq_len, 2, *obs]`, and starts, all False."""
        space = copy.deepcopy(self.observation_space)
        space.seed(0)
        obs, _ = self.model_inputs(to_rows(space, space.sample(), self.device)[0])
        obs = tree_map(lambda part: part.expand(seq_len, 2, *part.shape[1:]), self._seen(obs))
        return obs, torch.zeros((seq_len, 2), dtype=torch.bool, device=self.device)

    def initial_state(self, num_envs: int) -> State:
        """Return the model's initial state, each `[num_envs, *]`; empty when feedforward.

        Args:
            num_envs: Copies of the environment.
        """
        return self.model.initial_state(num_envs)

    def state_at_reset(self, num_envs: int) -> State:
        """Return the part of the initial state, `[num_envs, *]`, that is reset every `state_reset_every` steps.

        Args:
            num_envs: Copies of the environment.
        """
        return self.initial_state(num_envs)

    def noise(self, horizon: int, num_envs: int, generator: torch.Generator) -> Tensor:
        """Draw the noise for sampling a horizon of actions, float32 `[horizon, num_envs, num_noise]`.

        Args:
            horizon: Steps of each copy.
            num_envs: Copies of the environment.
            generator: The random generator, on the policy's device.
        """
        size = (horizon, num_envs, self.distribution.num_noise)
        return self.distribution.draw(size, generator=generator, device=generator.device)

    def act(self, obs: Tree, state: State, starts: Tensor, noise: Tensor | None = None) -> Act:
        """Choose an action for each copy, with log-probabilities, values and the state after the observations.

        Args:
            obs: Observations, `[num_envs, *obs]` or a dict of them.
            state: The model's state before them, each `[num_envs, *]`.
            starts: Where an observation begins an episode, `[num_envs]`, bool.
            noise: One slice of `noise()`, `[num_envs, num_noise]`; None takes the distribution's mode.
        """
        if noise is None:
            params, state = self._actors_params(obs, state, starts)
            nothing = torch.zeros(len(starts), device=starts.device)
            return Act(self.distribution.mode(params), nothing, nothing, state)
        params, estimates, state = self.respond(obs, state, starts)
        actions, logp = self.distribution.sample(params, noise)
        return Act(actions, logp, estimates, state, numbered(params) if self.shows_params else None)

    def policy_features(self, obs: Tree, state: State, starts: Tensor) -> tuple[Tensor, State]:
        """Return the features of one observation per copy, float32 `[num_envs, num_features]`, and the state after it.

        Args:
            obs: Normalised observations without an action mask, `[num_envs, *obs]` or a dict of them.
            state: As in `act`.
            starts: As in `act`.
        """
        with self.autocast():
            features, state = self.model.policy_features(_one_step(self._seen(obs)), state, starts.unsqueeze(0))
        return features[0].float(), state

    def _actors_params(self, obs: Tree, state: State, starts: Tensor) -> tuple[Any, State]:
        """Return distribution parameters for one observation per copy, and the state, without running the critic."""
        obs, mask = self.model_inputs(obs)
        features, state = self.policy_features(obs, state, starts)
        return self.distribution.from_features(features, mask), state

    def respond(self, obs: Tree, state: State, starts: Tensor) -> tuple[Any, Tensor, State]:
        """Return distribution parameters for one observation per copy, values `[num_envs]`, and the state after it.

        It takes the arguments of `act`.
        """
        obs, mask = self.model_inputs(obs)
        features, values, state = self._run(_one_step(obs), state, starts.unsqueeze(0))
        params = self.distribution.from_features(features[0], mask)
        return params, self._estimates(features[0], values[0], mask), state

    def evaluate(
        self, obs: Tree, actions: Tree, state: State, starts: Tensor, acted: Mapping[str, Tensor] | None = None
    ) -> Evaluation:
        """Recompute log-probabilities, values and entropies of stored sequences under the present weights.

        Args:
            obs: Observations, `[seq_len, batch, *obs]` or a dict of them.
            actions: Stored actions, `[seq_len, batch, *action]` or a dict of them.
            state: The stored state before each sequence, each `[batch, *]`.
            starts: Where an observation begins an episode, `[seq_len, batch]`, bool.
            acted: The parameters of the distributions that acted, by number, `[seq_len, batch, *]` each; with them KL
                divergences are computed too, through which no gradients flow.
        """
        features, values, mask = self.predict(obs, state, starts)
        params, kl = self.distribution.from_features(features, mask), None
        if acted is not None:
            with torch.no_grad():
                kl = self.distribution.kl(from_numbered(acted, params), params)
        return Evaluation(self.distribution.logp(params, actions), values, self.distribution.entropy(params), kl)

    # So that `torch.func.functional_call` can evaluate under other weights.
    forward = evaluate

    def predict(self, obs: Tree, state: State | None = None, starts: Tensor | None = None, **others: Any) -> Prediction:
        """Compute features and values of stored sequences; to act, call `decide`.

        Args:
            obs: As in `evaluate`.
            state: As in `evaluate`.
            starts: As in `evaluate`.
            **others: Not legal.

        Returns:
            Features `[seq_len, batch, num_features]`, values `[seq_len, batch]`, and the action mask, if there is one.

        Raises:
            TypeError: If it is called to act.
        """
        if state is None or starts is None or others:  # arguments of `predict` in other libraries
            raise TypeError(
                "to act, call `policy.decide(obs)`, which returns actions and state, deterministic by default; "
                "`predict` is for stored sequences, with `state` and `starts`."
            )
        obs, mask = self.model_inputs(obs)
        features, values, _ = self._run(obs, state, starts)
        return Prediction(features, values, mask)

    def values(self, obs: Tree, state: State, starts: Tensor) -> Tensor:
        """Estimate values in units of rewards, `[num_envs]`; an actor that is separate from the critic is not run.

        It takes the arguments of `act`.
        """
        seen = self._seen(self.model_inputs(obs)[0])
        with self.autocast():
            values = self.model.values(_one_step(seen), state, starts.unsqueeze(0))
        return self._estimates(None, values[0].float(), None)

    def _estimates(self, features: Any, values: Tensor, mask: Any) -> Tensor:
        """Return the values of observations `[...]`, in the units of the rewards, from the model's outputs."""
        return values if self.value_moments is None else self.value_moments.denormalize(values)

    def _run(self, obs: Any, state: State, starts: Tensor) -> tuple[Tensor, Tensor, State]:
        """Run the model, under autocast; features and values are float32 after it."""
        obs = self._seen(obs)
        with self.autocast():
            features, values, state = self.model(obs, state, starts)
        return features.float(), values.float(), state

    def _seen(self, obs: Any) -> Any:
        """Return observations without the parts that are hidden from the model."""
        return {name: part for name, part in obs.items() if name not in self.hidden} if self.hidden else obs

    def env_actions(self, actions: Any) -> Any:
        """Clip actions to a bounded `Box` for the environment, `[num_envs, *action]`; stored actions stay unclipped.

        Args:
            actions: `[num_envs, *action]`, or a dict of them.
        """
        return self.distribution.env_actions(actions)

    def observe(self, obs: Tree, valid: Tensor | None = None, *, shared: bool = False) -> None:
        """Update the observation normaliser.

        Args:
            obs: Observations, `[horizon, num_envs, *obs]` or a dict of them.
            valid: False at masked autoreset steps, which are not experience, `[horizon, num_envs]`, bool; or None.
            shared: Whether all ranks have the same observations, which then count once.
        """
        if self.obs_moments is not None:
            self.obs_moments.observe(flatten_tree("", obs), valid, shared=shared)

    def model_inputs(self, obs: Any) -> tuple[Any, Any]:
        """Take the action mask out of observations, and normalise all other parts, including hidden ones.

        Args:
            obs: Observations, `[..., *obs]` or a dict of them.

        Returns:
            The observations, and True where an action is legal, `[..., num_actions]`, bool; None without a mask.
        """
        mask = None
        if self.masked:
            mask = tree_map(lambda legal: legal.bool(), obs[ACTION_MASK])
        if isinstance(obs, dict):  # its parts in one order, whichever they came in
            obs = tree_of(obs, lambda part: part, self.inputs_space)
        if self.obs_moments is not None:
            obs = self.obs_moments.normalize(obs)
        return obs, mask

    # -- decisions without a trainer

    @property
    def seen_space(self) -> gymnasium.Space[Any]:
        """Space of the parts of an observation that decisions depend on."""
        return without_parts(self.observation_space, self.unseen)

    def memory(self, num_envs: int) -> State:
        """Return the actor's initial state, each `[num_envs, *]`; `decide` begins with it.

        Args:
            num_envs: Number of observations.
        """
        return self.model.actor_state(self.model.initial_state(num_envs))

    def choose(self, obs: Tree, state: State, starts: Tensor, noise: Tensor | None = None) -> tuple[Any, State]:
        """Choose the environment's actions, `[num_envs, *action]`, as `act` does, from the parts of `seen_space` alone.

        Args:
            obs: Observations, `[num_envs, *obs]` or a dict of them.
            state: The actor's state, initially that of `memory`.
            starts: Where an observation begins an episode, `[num_envs]`, bool.
            noise: Noise for sampling, `[num_envs, num_noise]`; None takes the distribution's mode.

        Returns:
            The actions, and the state after.
        """
        if self.unseen:
            # The model expects these parts, but actions do not depend on them.
            blank = zeros(self.observation_space, starts.shape[0], starts.device)
            obs = {name: part if name in self.unseen else obs[name] for name, part in blank.items()}
        params, state = self._actors_params(obs, state, starts)
        actions = self.distribution.mode(params) if noise is None else self.distribution.sample(params, noise)[0]
        return self.distribution.env_actions(actions) if self.clips else actions, state

    @torch.no_grad()
    def decide(
        self,
        obs: Any,
        state: State | None = None,
        *,
        starts: ArrayLike | None = None,
        deterministic: bool = True,
        generator: torch.Generator | None = None,
    ) -> Decision:
        """Choose the environment's action for one observation, or for several with a leading axis.

            state = None
            while running:
                actions, state = policy.decide(obs, state)
                obs, ... = env.step(actions)

        Args:
            obs: One observation, `[*obs]`, or several, `[num, *obs]`, as the environment returns it: arrays, numbers or
                tensors, in dicts and tuples if the space has such. Parts that only a critic sees may be absent.
            state: The state that the previous decision returned; None if all observations begin an episode.
            starts: Which observations begin an episode, bool, `[num]`; None: all without a state, none with one.
            deterministic: Whether to take the distribution's mode rather than a sample.
            generator: The generator of the samples, on the policy's device; None is torch's own.

        Returns:
            The action, as an element of the action space, or several as arrays with a leading axis; and the state after
            the observations, each `[num, *]`.

        Raises:
            ValueError: If an observation is not of the space, or not finite, as in training, or if `state` or `starts`
                are of another shape.
        """
        check_torch_defaults()
        device = self.device
        rows, batched = to_rows(self.seen_space, obs, device)
        check_finite(rows)
        num = len(first_tensor(rows))
        begins = torch.full((num,), state is None, device=device)
        if starts is not None:
            flags = as_tensor(starts, device)
            if flags.numel() != num:
                raise ValueError(f"`starts` must be one flag an observation, {[num]}; got {list(flags.shape)}.")
            begins |= flags.reshape(-1).bool()
        memory = dict(self.memory(num))
        for name, part in () if state is None else memory.items():
            if not isinstance(state, Mapping) or name not in state:
                raise ValueError(f"the state has no `{name}`: give what the last decision returned, or None.")
            memory[name] = as_tensor(state[name], device, name=f"the state `{name}`").to(part.dtype)
            if memory[name].shape != part.shape:
                needed, got = list(part.shape), list(memory[name].shape)
                raise ValueError(f"the state `{name}` of {num} observations must be shaped {needed}; got {got}.")
        noise = None
        if not deterministic:
            size = (num, self.distribution.num_noise)
            noise = self.distribution.draw(size, generator=generator, device=device)
        actions, memory = self.choose(rows, memory, begins, noise)
        return Decision(to_elements(self.action_space, actions, batched=batched), memory)

    # -- in a file

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the policy to a file that `load` reads, without pickle; replace an existing file, and return the path.

        Args:
            path: The file; `.safetensors` is added if it has no suffix.

        Raises:
            TypeError: If the policy is made of something that cannot be saved to a file.
            ValueError: If the path names no file.
        """
        target = named_path(path, "Policy.save: `path`")
        target = target if target.suffix else target.with_suffix(SUFFIX)
        replace_synced(target, self.to_bytes())
        return target

    def describe(self) -> dict[str, Any]:
        """Return the class and the arguments of this policy as plain data, without its spaces.

        Raises:
            TypeError: If the policy is made of something that cannot be saved to a file.
        """
        cls, arguments = self.form
        problem = type(self).__name__ if "form" not in vars(type(self)) or dotted_path(cls) is None else None
        plain = {}
        for name, value in arguments.items():
            plain[name] = to_plain(value)
            if plain[name] is NOT_PLAIN:
                problem = f"`{name}`"
        if problem is not None:
            raise TypeError(
                f"{problem} of this policy cannot be saved to a file: give model and distribution by name or by a "
                "class of a module, with plain arguments; a Policy of your own defines `form`."
            )
        return {"class": dotted_path(cls), "arguments": plain}

    def to_bytes(self) -> bytes:
        """Return the content of the file that `save` writes; raise TypeError as it does."""
        given, chosen = map(space_to_plain, (self.observation_space, self.action_space))
        about = {**self.describe(), "observation_space": given, "action_space": chosen}
        about["state_reset_every"] = self.state_reset_every
        return policy_bytes(about, self.state_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: str | torch.device = "cpu", trust: Trust = False) -> Self:
        """Read a policy that `save` wrote.

        Args:
            path: The file.
            device: Device of the weights.
            trust: Whether modules that the file names, with a model of your own, may be imported.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If the file is damaged, is not a policy's, or is of a newer rl8x.
        """
        try:
            content = named_path(path, "Policy.load: `path`").read_bytes()
        except (FileNotFoundError, IsADirectoryError) as error:
            raise type(error)(
                f"there is no file {str(path)!r} that a policy's `save` wrote. For the policy of a run, by its name, "
                f"ID or folder of checkpoints: rl8x.load_algorithm({str(path)!r}).policy"
            ) from None
        return cls.from_bytes(content, str(path), trust=trust).to(resolve_device(device))

    @classmethod
    def from_bytes(cls, content: bytes, name: str = "the policy", *, trust: Trust = False) -> Self:
        """Rebuild a policy from the result of `to_bytes`.

        Args:
            content: The result of `to_bytes`.
            name: Name of the content in error messages.
            trust: As in `load`.

        Raises:
            ValueError: If the content is damaged, is not a policy's, or is of a newer rl8x.
        """
        description, tensors = read_policy(content, name)
        return cls.from_description(description, tensors, name, trust=trust)

    @classmethod
    def from_description(
        cls, description: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str, *, trust: Trust = False
    ) -> Self:
        """Rebuild a policy from the result of `describe`; raise a `ValueError` if that fails.

        Args:
            description: The result of `describe`, with the two spaces as plain data, and `state_reset_every`.
            tensors: The policy's weights and moments by name, its `state_dict`, of any shapes, `[...]`.
            name: Name of the source in error messages.
            trust: As in `load`.
        """
        try:
            made_of = import_class(description["class"], (cls,), trust=trust)
            both = [space_from_plain(description[key]) for key in ("observation_space", "action_space")]
            arguments = from_plain(description["arguments"], _KINDS, trust=trust)
            with kept_generators():
                policy: Self = made_of(*both, **arguments)
            policy.load_state_dict(dict(tensors))
            policy.state_reset_every = int(description["state_reset_every"])
            policy.eval()  # including modules that a user's class has added
        except (ArithmeticError, AttributeError, KeyError, RuntimeError, TypeError) as error:
            raise ValueError(f"{name} does not say how its policy is made ({error!r:.200}).") from None
        return policy


def check_fits(policy: Policy, env: Any) -> None:
    """Raise unless an environment has the policy's spaces, in which precisions of floats may differ."""
    spaces = policy.observation_space, env.single_observation_space, policy.action_space, env.single_action_space
    for name, own, given in (("observations", *spaces[:2]), ("actions", *spaces[2:])):
        if not are_alike(own, given):
            raise ValueError(f"the policy is for {name} of {shown(own)}; the environment has {shown(given)}.")


def _one_step(obs: Any) -> Any:
    """Give observations of one step a time axis of 1."""
    return obs.unsqueeze(0) if isinstance(obs, Tensor) else tree_map(lambda part: part.unsqueeze(0), obs)


def numbered(params: Any) -> dict[str, Tensor]:
    """Return the tensors of parameters, `[...]` each, by number, from "0"."""
    return {str(i): tensor for i, tensor in enumerate(tree_flatten(params)[0])}


def from_numbered(tensors: Mapping[str, Tensor], like: Any) -> Any:
    """Invert `numbered`: return parameters with these tensors, `[...]` each, in the structure of `like`."""
    structure = tree_flatten(like)[1]
    return tree_unflatten([tensors[str(i)] for i in range(len(tensors))], structure)
