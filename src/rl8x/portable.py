"""The part of a policy that works without a trainer: decisions for observations, and its file, without pickle.

The file is in the format of safetensors: weights and running moments by name, and in the header's metadata, under
`rl8x`, the JSON that says what the policy is made of, with the digest of the whole file. It is read
without running code, and makes the policy again without environment, trainer or algorithm.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import gymnasium
import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from rl8x._version import __version__
from rl8x.disk import replace_synced
from rl8x.distributions import Distribution
from rl8x.execution.execution import kept_generators
from rl8x.importing import NOT_PLAIN, Trust, dotted_path, from_plain, import_class, to_plain
from rl8x.models import Model, State
from rl8x.spaces import (
    describe_space,
    element_of,
    leaves,
    named_parts,
    space_from_plain,
    space_to_plain,
    torch_dtype,
    without_parts,
)
from rl8x.trees import Tree, first_tensor, flatten_tree, unflatten_tree

SUFFIX: Final = ".safetensors"
_FORMAT: Final = "rl8x-policy"
_VERSION: Final = 1
_ZEROS: Final = b"0" * 64
# In the header, the first: JSON within JSON, whose quotes are escaped.
_DIGEST: Final = re.compile(rb'\\"sha256\\": \\"([0-9a-f]{64})\\"')
_KINDS: Final = (Model, Distribution, nn.Module)


class Decision(NamedTuple):
    """What `Policy.decide` returns.

    Attributes:
        actions: For one observation an element of the action space, for several such with a leading axis, `[num, ...]`.
        state: The policy's memory after the observations, for its next call, each `[num, *]`; empty where it has none.
    """

    actions: Any
    state: State


class Portable(nn.Module):
    """The part of a `Policy` that other programs use; `Policy` says what its attributes are.

    Attributes:
        unseen: Parts of a `Dict` observation that actions do not depend on: those that only a critic sees.
    """

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    model: Model
    distribution: Distribution
    unseen: tuple[str, ...]
    clips: bool

    @property
    @abstractmethod
    def form(self) -> tuple[type[Portable], dict[str, Any]]:
        """What acts as this does: a class, and its keyword arguments beside the two spaces."""

    @abstractmethod
    def model_inputs(self, obs: Any) -> tuple[Any, Any]:
        """Take the action mask out of observations `[..., *obs]` and normalise the rest; see `Policy.model_inputs`."""

    @abstractmethod
    def policy_features(self, obs: Tree, state: State, starts: Tensor) -> tuple[Tensor, State]:
        """Return features `[num_envs, num_features]` and the state after; see `Policy.policy_features`."""

    @property
    def seen_space(self) -> gymnasium.Space[Any]:
        """Space of what a decision needs of an observation."""
        return without_parts(self.observation_space, self.unseen)

    def memory(self, num_envs: int) -> State:
        """Return what decisions remember before the first observation; nothing of a critic's.

        Args:
            num_envs: How many observations there will be.

        Returns:
            Tensors by name, each `[num_envs, *]`.
        """
        return self.model.actor_state(self.model.initial_state(num_envs))

    def choose(self, obs: Tree, state: State, starts: Tensor, noise: Tensor | None = None) -> tuple[Any, State]:
        """Choose the environment's action for each copy: from `seen_space` and `memory`, what `act` would from all.

        Args:
            obs: Observations, `[num_envs, *obs]` or a dict of them.
            state: As `memory` gives it.
            starts: Where an observation begins an episode, `[num_envs]`, bool.
            noise: What sampling needs, `[num_envs, num_noise]`; None decides for the distribution's mode.

        Returns:
            Actions for the environment, `[num_envs, *action]` or a dict of them, and the state after.
        """
        if self.unseen:
            # The model is made for them, and looks away.
            blank = zeros(self.observation_space, starts.shape[0], starts.device)
            obs = {name: part if name in self.unseen else obs[name] for name, part in blank.items()}
        obs, mask = self.model_inputs(obs)
        features, state = self.policy_features(obs, state, starts)
        params = self.distribution.from_features(features, mask)
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
            obs: As the environment gives it: arrays, numbers or tensors, in dicts and tuples where the space has such;
                `[*obs]` of one, `[num, *obs]` of several. Parts that only a critic sees may be absent.
            state: What the decision before returned; None where all observations begin an episode.
            starts: Which observations begin an episode, bool, `[num]`; None: all without a state, none with one.
            deterministic: Whether to take the distribution's mode rather than a sample.
            generator: What samples are drawn with, on the policy's device; None is torch's own.

        Returns:
            An element of the action space for one observation, elements with a leading axis for several, as arrays;
            and the state after it, each `[num, *]`.

        Raises:
            ValueError: If an observation is not of the space or not finite, as training has none either; or `state` or
                `starts` are not for as many.
        """
        device = next(self.parameters()).device
        rows, batched = to_rows(self.seen_space, obs, device)
        _check_finite(rows)
        num = len(first_tensor(rows))
        begins = torch.full((num,), state is None, device=device)
        if starts is not None:
            flags = torch.as_tensor(starts if isinstance(starts, Tensor) else np.asarray(starts), device=device)
            if flags.numel() != num:
                raise ValueError(f"`starts` must be one flag an observation, {[num]}; got {list(flags.shape)}.")
            begins |= flags.reshape(-1).bool()
        memory = self.memory(num)
        state = memory if state is None else state
        if missing := [name for name in memory if name not in state]:
            raise ValueError(f"the state has no {', '.join(missing)}: give what the last decision returned, or None.")
        for name, part in state.items():
            if len(part) != num:
                raise ValueError(f"the state `{name}` is of {len(part)} observations; got {num}.")
        noise = None
        if not deterministic:
            size = (num, self.distribution.num_noise)
            noise = self.distribution.draw(size, generator=generator, device=device)
        actions, state = self.choose(rows, state, begins, noise)
        return Decision(to_elements(self.action_space, actions, batched=batched), state)

    # -- in a file

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the policy to a file that `load` reads, without pickle; an existing file is replaced.

        Args:
            path: The file; `.safetensors` is added where it has no suffix.

        Raises:
            TypeError: If the policy is made of something that cannot be saved to a file.

        Returns:
            The file's path.
        """
        target = Path(path)
        target = target if target.suffix else target.with_suffix(SUFFIX)
        replace_synced(target, self.to_bytes())
        return target

    def describe(self) -> dict[str, Any]:
        """Describe as plain data by what class and arguments this policy is made, beside its spaces.

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
        """Return what `save` writes.

        Raises:
            TypeError: If the policy is made of something that cannot be saved to a file.
        """
        from safetensors.torch import save

        description = {
            "format": _FORMAT,
            "version": _VERSION,
            "sha256": _ZEROS.decode(),
            **self.describe(),
            "observation_space": space_to_plain(self.observation_space),
            "action_space": space_to_plain(self.action_space),
            "versions": {"rl8x": __version__, "torch": torch.__version__},
        }
        # Copies, as weights are views of one vector while they are trained.
        tensors = {name: value.detach().cpu().clone().contiguous() for name, value in self.state_dict().items()}
        # One entry: those of safetensors' metadata are written in no order, and equal policies make equal files.
        return _sealed(save(tensors, {"rl8x": json.dumps(description)}))

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: str | torch.device = "cpu", trust: Trust = False) -> Self:
        """Read a policy that `save` wrote: to call `decide`, or `act`.

        Args:
            path: The file.
            device: Where its weights are to be.
            trust: Whether modules that the file names, with a model of your own, may be imported.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If the file is damaged, is not a policy's, or is of a newer rl8x.
        """
        try:
            content = Path(path).read_bytes()
        except (FileNotFoundError, IsADirectoryError) as error:
            raise type(error)(
                f"there is no file {str(path)!r} that a policy's `save` wrote. For the policy of a run, by its name, "
                f"ID or folder of checkpoints: rl8x.load_algorithm({str(path)!r}).policy"
            ) from None
        return cls.from_bytes(content, str(path), trust=trust).to(device)

    @classmethod
    def from_bytes(cls, content: bytes, name: str = "the policy", *, trust: Trust = False) -> Self:
        """Make the policy of which `to_bytes` returned the content.

        Args:
            content: What it returned.
            name: What error messages call it.
            trust: As `load` has it.

        Raises:
            ValueError: If the content is damaged, is not a policy's, or is of a newer rl8x.
        """
        description, tensors = _read(content, name)
        return cls.from_description(description, tensors, name, trust=trust)

    @classmethod
    def from_description(
        cls, description: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str, *, trust: Trust = False
    ) -> Self:
        """Make the policy that `describe` described.

        Args:
            description: What it returned, and the two spaces as plain data.
            tensors: The policy's weights and moments by name, its `state_dict`, of any shapes, `[...]`.
            name: What error messages call where they are from.
            trust: As `load` has it.

        Raises:
            ValueError: If they do not make a policy.
        """
        try:
            made_of = import_class(description["class"], (cls,), trust=trust)
            spaces = [space_from_plain(description[key]) for key in ("observation_space", "action_space")]
            arguments = from_plain(description["arguments"], _KINDS, trust=trust)
            with kept_generators():
                policy: Self = made_of(*spaces, **arguments)
            policy.load_state_dict(dict(tensors))
            policy.eval()  # what a class of one's own has added, too
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{name} does not say how its policy is made ({type(error).__name__}: {reason:.200})."
            ) from None
        return policy


def _read(content: bytes, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the description and the tensors of a policy; nothing that the file names is imported or called."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(content)
        # The header is JSON, after its length.
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        description = json.loads(header.get("__metadata__", {}).get("rl8x", "null"))
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no policy that rl8x saved, or damaged ({' '.join(str(error).split())}).") from None
    if not isinstance(description, dict) or description.get("format") != _FORMAT:
        raise ValueError(f"{name} holds tensors, but not those of a policy that rl8x saved.")
    version = description.get("version")
    if not isinstance(version, int) or version > _VERSION:
        raise ValueError(
            f"{name} has version {version!r} of the format, and this rl8x reads up to {_VERSION}: update it."
        )
    if _sealed(content) != content:
        raise ValueError(
            f"{name} is no policy that rl8x saved, or damaged (it does not have the digest that was written)."
        )
    return description, tensors


def _sealed(content: bytes) -> bytes:
    """Return a file with its digest in place: the SHA-256 of all its bytes, with zeros where the digest stands."""
    place = _DIGEST.search(content)
    if place is None:
        return b""
    before, after = content[: place.start(1)], content[place.end(1) :]
    return before + hashlib.sha256(before + _ZEROS + after).hexdigest().encode() + after


def _check_finite(rows: Tree) -> None:
    """Refuse observations `[num, *obs]` of which one is not finite: what is decided on NaN looks like any action."""
    for name, part in flatten_tree("obs", rows).items():
        if part.is_floating_point() and not (finite := part.isfinite()).all():
            first = int((~finite).flatten(1).any(1).nonzero()[0])
            raise ValueError(f"`{name}` must be finite; got {part[first][~finite[first]][0].item()} in row {first}.")


def zeros(space: gymnasium.Space[Any], num: int, device: torch.device | None = None) -> Any:
    """Return observations that are 0 everywhere, `[num, *obs]` or a dict of them."""
    if isinstance(space, gymnasium.spaces.Dict | gymnasium.spaces.Tuple):
        return {name: zeros(part, num, device) for name, part in named_parts(space)}
    return torch.zeros(num, *(space.shape or ()), dtype=torch_dtype(space), device=device)


def to_rows(space: gymnasium.Space[Any], obs: Any, device: torch.device | None = None) -> tuple[Any, bool]:
    """Return observations as tensors `[num, *obs]`, or a dict of them, and whether there was a leading axis."""
    rows: dict[str, Tensor] = {}
    batched = set()
    for path, leaf in leaves(space):
        name, part = "/".join(("obs", *path)), obs
        for key in path:
            known = part if isinstance(part, Mapping) else dict(enumerate(part)) if isinstance(part, tuple) else {}
            part = known.get(key, known.get(int(key) if key.isdecimal() else key))
            if part is None:
                hint = ""
                if isinstance(space, gymnasium.spaces.Dict) and not isinstance(obs, Mapping | tuple):
                    hint = f" Give its parts by name: {', '.join(map(repr, space.spaces))}."
                raise ValueError(f"the observation has no `{name}`; it must be of {describe_space(leaf)}.{hint}")
        array = part if isinstance(part, Tensor) else np.asarray(part)
        if not isinstance(array, Tensor) and array.dtype.kind not in "biuf":
            raise ValueError(f"`{name}` must be numbers; got {part!r:.60}.")
        tensor = torch.as_tensor(array)
        shape = tuple(leaf.shape or ())
        axes = tensor.dim() - len(shape)
        if axes not in (0, 1) or tuple(tensor.shape[axes:]) != shape:
            needed = f"{list(shape)}, or {['num', *shape]} for several".replace("'", "")
            raise ValueError(f"`{name}` must be shaped {needed}; got {list(tensor.shape)}.")
        batched.add(axes == 1)
        tensor = tensor.to(device, torch_dtype(leaf))
        rows[name] = tensor if axes else tensor.unsqueeze(0)
    if len(batched) > 1 or len({len(row) for row in rows.values()}) > 1:
        given = ", ".join(f"`{name}` {list(row.shape)}" for name, row in rows.items())
        raise ValueError(f"all parts must be of one observation, or of the same number; got {given}.")
    return unflatten_tree("obs", rows), batched.pop()


def to_elements(space: gymnasium.Space[Any], actions: Any, *, batched: bool) -> Any:
    """Return actions `[num, *action]` as an environment takes them: arrays in the space's dicts, tuples and types."""

    def converted(leaf: gymnasium.Space[Any], part: Tensor) -> Any:
        array = part.cpu().numpy().astype(leaf.dtype, copy=False)
        return array if batched else array[0]

    return element_of(space, actions, converted)
