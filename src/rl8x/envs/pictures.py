"""Pictures of an environment: its author draws one copy, and `render` returns a picture of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from numpy.typing import NDArray

from rl8x.envs.canvas import SIZE, Canvas, Picture
from rl8x.envs.steps import Carry

CopyState = Mapping[str, NDArray[Any]]
"""The state of one copy, each `[...]` on the host."""


Past = Sequence[CopyState]
"""States of one copy, the oldest first."""
CopyParameters = Mapping[str, float]
"""The values of one copy's parameters, by name."""


class DrawsItself:
    """The part of an environment that draws it."""

    render_fps: ClassVar[float] = 30.0
    """Steps a second at which a film of it looks natural."""

    carry: Carry | None
    render_mode: str | None
    metadata: dict[str, Any]

    def draw(self, canvas: Canvas, state: CopyState, parameters: CopyParameters, past: Past) -> None:
        """Draw a copy, for films; an environment without it has no pictures.

        Args:
            canvas: The picture to draw on; `canvas.view` sets the visible ranges first.
            state: The copy's state: each of `initial_state` without its first dimension, as NumPy's.
            parameters: The values of its parameters.
            past: Its states before this one in the same episode, the last ones, the oldest first; empty where they are
                not known.

        Raises:
            NotImplementedError: If the subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no draw()")

    @property
    def draws(self) -> bool:
        """Whether it draws itself."""
        return type(self).draw is not DrawsItself.draw

    def offer_pictures(self) -> None:
        """Say in Gymnasium's terms that there are pictures, where there are."""
        if self.draws:
            self.render_mode = "rgb_array"
            self.metadata = {**self.metadata, "render_modes": ["rgb_array"], "render_fps": self.render_fps}

    def picture(
        self, state: CopyState, parameters: CopyParameters, past: Past = (), size: tuple[int, int] = SIZE
    ) -> Picture:
        """Draw a copy on a canvas.

        Args:
            state: The copy's state, see `draw`.
            parameters: The values of its parameters.
            past: Its states before this one in the same episode, the oldest first.
            size: Width and height in pixels.

        Returns:
            `[height, width, 3]`, uint8.
        """
        canvas = Canvas(*size)
        self.draw(canvas, state, parameters, past)
        return canvas.picture()

    def render(self) -> Any:
        """Return a picture of each copy as it is now, `[height, width, 3]`, uint8.

        Raises:
            ValueError: If the class does not draw itself.
            RuntimeError: If there was no `reset` yet.
        """
        if not self.draws:
            raise ValueError(f"{type(self).__name__} cannot be rendered: give it a `draw`; see docs/playing.md.")
        if self.carry is None:
            raise RuntimeError(f"{type(self).__name__}: call reset() before render().")
        states, parameters = on_host(self.carry["state"]), on_host(self.carry["parameters"])
        copies = range(len(self.carry["elapsed"]))
        return tuple(self.picture(copy_of(states, i), numbers_of(parameters, i)) for i in copies)


def on_host(tensors: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Copy tensors `[num_envs, ...]` to the host."""
    return {name: value.detach().cpu().numpy().copy() for name, value in tensors.items()}


def copy_of(arrays: Mapping[str, NDArray[Any]], copy: int) -> CopyState:
    """Return the rows of one copy."""
    return {name: value[copy] for name, value in arrays.items()}


def numbers_of(arrays: Mapping[str, NDArray[Any]], copy: int) -> dict[str, float]:
    """Return the numbers of one copy, of arrays `[num_envs]`."""
    return {name: float(value[copy]) for name, value in arrays.items()}
