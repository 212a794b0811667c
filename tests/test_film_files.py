"""The files of films: colours of a palette against Pillow's own."""

import numpy as np
from PIL import Image

from rl8x.envs import Pendulum
from rl8x.film_files import in_few_colours


def test_flat_colours_keep_their_palette_and_photographs_get_their_own():
    random = np.random.default_rng(0)
    noise = [random.integers(0, 256, (40, 60, 3), dtype=np.uint8) for _ in range(12)]
    images = list(in_few_colours(iter(noise)))
    for frame, image in zip(noise, images, strict=True):
        own = Image.fromarray(frame).quantize(256, dither=Image.Dither.NONE).convert("RGB")
        assert (np.asarray(image.convert("RGB")) == np.asarray(own)).all()
    env = Pendulum(1)
    states = [{"theta": np.float32(0.3 * i), "theta_dot": np.float32(0)} for i in range(8)]
    drawn = [env.picture(state, dict.fromkeys(env.parameters, 1.0)) for state in states]
    images = list(in_few_colours(iter(drawn)))
    assert len({bytes(image.getpalette()) for image in images}) == 2
    for frame, image in zip(drawn, images, strict=True):
        shown = np.asarray(image.convert("RGB")).astype(int)
        assert np.abs(shown - frame).mean() < 0.2
        assert (shown[:4] == 255).all()
