"""The picture of a run's learning curves: what is drawn, that it waits in an outage, and that it is no data."""

import builtins
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from rl8x.algorithms import PPOConfig
from rl8x.drawing import LIGHT
from rl8x.envs import CartPole
from rl8x.tracking import MLflowTracker
from rl8x.tracking.pages import CURVES_FILE, draw_curves
from rl8x.trainers import Trainer

LINES = {"eval/returns/mean": [[0, 1.0], [100, 5.0], [200, 4.0]], "episodes/returns/mean": [[0, 0.0], [200, 3.0]]}


def colours(picture, tmp_path):
    """Those of the theme's line colours that a picture has at least 100 pixels of."""
    path = tmp_path / "picture.png"
    path.write_bytes(picture)
    pixels = np.round(matplotlib.image.imread(path)[..., :3] * 255).astype(int).reshape(-1, 3)
    found = set()
    for number, colour in enumerate(LIGHT.colours[:4]):
        wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
        if (pixels == wanted).all(axis=1).sum() > 100:
            found.add(number)
    return found


@pytest.mark.parametrize(("names", "found"), [(LINES, {0, 1}), (["eval/returns/mean"], {0})])
def test_each_metric_is_a_line_of_its_own(tmp_path, names, found):
    assert (
        colours(draw_curves({name: LINES[name] for name in names}, "PPO on CartPole", "transitions"), tmp_path) == found
    )


@pytest.mark.parametrize("series", [{}, {"a": [[0, 1.0]]}, {"a": []}, {"a": [[0], [1]]}, {"a": ["x", "y"]}])
def test_what_is_no_line_has_no_picture(series):
    assert draw_curves(series, "", "") is None


def test_without_matplotlib_there_is_no_picture(monkeypatch):
    plain = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert draw_curves(LINES, "", "") is None


def run(tracker, **options):
    config = {"num_envs": 4, "horizon": 16, "device": "cpu", "model_config": {"hidden_sizes": [8]}}
    Trainer(PPOConfig(**config).build(CartPole), tracker=tracker, **options).run(max_steps=3, progress="none")
    return tracker.run_id


@pytest.mark.draws_curves
def test_a_run_has_its_learning_curves_and_none_where_they_are_not_wanted(mlflow_client, tmp_path):
    run_id = run(MLflowTracker())
    picture = mlflow_client.download_artifacts(run_id, CURVES_FILE, str(tmp_path))
    assert colours(Path(picture).read_bytes(), tmp_path) == {0}
    other = run(MLflowTracker(curves=False))
    assert CURVES_FILE not in [entry.path for entry in mlflow_client.list_artifacts(other)]
