"""Thinned rows, learning curves and samples of the machine: what of a run a store's pages show."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import re
import sys
import time
import types
from pathlib import Path

import matplotlib.image
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl8x import PPOConfig, Trainer
from rl8x.config import RunSpec
from rl8x.drawing import LIGHT
from rl8x.envs import CartPole
from rl8x.tracking import MLflowTracker, Thinning, TrackingError, pages
from rl8x.tracking.pages import CURVES_FILE, SystemSampler, draw_curves, sampling_interval


def begun(folder, *, repeats=False, name="rows.jsonl", **limits):
    thinning = Thinning(folder / name, **limits)
    thinning.begin(new=False, repeats=repeats)
    return thinning


def sent_of(thinning, steps, every=None):
    """Send rows of one metric, and of `every` so many steps another; return the steps sent at once and those added."""
    at_once = []
    for step in steps:
        at_once += [step] * bool(thinning.take(step, step * 10, {"x": float(step)}))
        if every is not None and step % every == 1:  # an evaluation
            thinning.take(step, step * 10 + 1, {"eval/y": 2.0})
    added = [step for step, time, points in thinning.rest() if points == {"x": float(step)} and time == step * 10]
    return at_once, added


@pytest.mark.parametrize("count", [1, 128, 129, 2_000, 2_001, 9_999])
def test_points_are_evenly_spread_and_the_last_is_there(tmp_path, count):
    thinning = begun(tmp_path)
    at_once, added = sent_of(thinning, range(count))
    together = sorted({*at_once, *added})
    assert len(together) == len(at_once) + len(added) <= 2_000
    assert together[-1] == count - 1
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == count
    every = max((after - before for before, after in itertools.pairwise(together)), default=1)
    assert set(range(0, count, every)) <= {*together}
    # with half of that there would be too many
    assert every == 1 or len({*range(0, count, every // 2), *at_once, count - 1}) > 2_000
    thinning.close()


def test_what_is_sent_at_once_stays_far_below_the_limit():
    sent = [place for place in range(1_000_000) if pages.is_sent_at_once(place)]
    assert sent[:128] == list(range(128))
    assert 128 + 64 * 12 < len(sent) < 128 + 64 * 13  # 64 in each doubling after that: 12.93 of them


@settings(max_examples=20)
@given(count=st.integers(1, 700), kill=st.integers(0, 699), back=st.integers(0, 200), tear=st.booleans())
def test_a_resumed_run_sends_the_same(tmp_path_factory, count, kill, back, tear):
    folder = tmp_path_factory.mktemp("thin")
    expected, added = sent_of(begun(folder, name="whole.jsonl"), range(count), 3)
    kill = min(kill, count - 1)
    killed = begun(folder)
    before, _ = sent_of(killed, range(kill), 3)
    killed.close()
    if tear:
        with open(killed.path, "ab") as file:
            file.write(b'{"step": 3, "ti')
    again, last = sent_of(begun(folder, repeats=True), range(max(0, kill - back), count), 3)
    assert sorted({*before, *again}) == expected
    assert last == added
    assert killed.path.read_bytes() == (folder / "whole.jsonl").read_bytes()


@pytest.mark.parametrize("had_end", [False, True])
def test_the_rows_of_the_last_step_stay_where_only_the_end_of_a_run_comes_again(tmp_path, had_end):
    thinning = begun(tmp_path)
    for step in range(150):
        thinning.take(step, step, {"x": float(step)})
    thinning.take(149, 149, {"eval/y": 2.0})
    if had_end:
        thinning.take(149, 150, {"final/x": 149.0})
    thinning.close()
    again = begun(tmp_path, repeats=True)
    assert again.take(149, 160, {"final/x": 149.0}) == {"final/x": 149.0}
    assert [step for step, _, points in again.rest() if "x" in points][-1] == 149
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 152
    assert [row["metrics"] for row in rows[-3:]] == [{"x": 149.0}, {"eval/y": 2.0}, {"final/x": 149.0}]


def test_important_metrics_have_room_though_they_come_late(tmp_path, caplog):
    thinning = begun(tmp_path, max_keys=30)
    with caplog.at_level(logging.WARNING, "rl8x"):
        times = thinning.take(0, 0, {f"profiling/{i}": 0.0 for i in range(10)})
        losses = thinning.take(0, 0, {f"losses/{i}": 0.0 for i in range(20)})
        returns = thinning.take(0, 0, {f"eval/{i}": 0.0 for i in range(20)})
    assert [len(times), len(losses), len(returns)] == [6, 12, 12]
    assert [record.getMessage() for record in caplog.records] == [
        "tracking: the run has more than 30 metrics; 'profiling/6' and others are in its artifact rows.jsonl only"
    ]
    assert len(thinning.take(1, 1, {f"profiling/{i}": 0.0 for i in range(10)})) == 6
    again = begun(tmp_path, repeats=True, max_keys=30)
    assert again.take(2, 2, {f"eval/{i}": 0.0 for i in range(20)}) == returns


def test_a_full_disk_ends_nothing(tmp_path, caplog):
    """Rows are sent all the same; what the disk did not take is in the file once there is room, at the end too."""
    thinning = begun(tmp_path)
    whole = thinning._file
    thinning._file = open("/dev/full", "rb+")  # noqa: SIM115
    for at in (0, 1):
        assert thinning.take(at, at, {"x": float(at)}) == {"x": float(at)}
    assert list(thinning.rest()) == []
    thinning.sync()
    thinning.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"tracking: cannot write to {tmp_path / 'rows.jsonl'} ([Errno 28] No space left on device): rows may be "
        "missing there"
    ]
    whole.close()


@pytest.mark.parametrize("given", [24, "x", math.nan, 2000.5, None])
@pytest.mark.parametrize(("limit", "least"), [("max_points", 1280), ("max_keys", 25)])
def test_limits_that_are_too_small_are_refused(tmp_path, limit, least, given):
    told = re.escape(f"Thinning: `{limit}` must be a whole number, at least {least}; got {given!r}.")
    with pytest.raises(ValueError, match=told):
        Thinning(tmp_path / "rows.jsonl", **{limit: given})


def test_a_file_that_has_the_rows_of_another_run_or_cannot_be_made_is_refused_before_the_run(mlruns, tmp_path):
    begun(tmp_path).take(0, 0, {"x": 0.0})
    for path, told in ((tmp_path / "rows.jsonl", "has the rows of another run"), (tmp_path, "rows cannot be kept in")):
        tracker = MLflowTracker(thinning=Thinning(path))
        with pytest.raises(TrackingError, match=told):
            tracker.start(params={}, tags={})
        assert tracker.resume_handle is None


def test_a_tracker_sends_what_was_thinned_and_the_file(mlruns, mlflow_client, tmp_path):
    thinning = Thinning(tmp_path / "kept" / "rows.jsonl", max_points=1_280)
    tracker = MLflowTracker(params={"study.seed": 3}, thinning=thinning, interval_s=0.05)
    tracker.start(params={"lr": 1}, tags={})
    for step in range(3_000):
        tracker.log_metrics({"x": float(step)}, step)
    tracker.finish("FINISHED")
    run = mlflow_client.get_run(tracker.run_id)
    assert run.data.params == {"lr": "1", "study.seed": "3"}
    steps = [point.step for point in mlflow_client.get_metric_history(tracker.run_id, "x")]
    assert len(steps) <= 1_280
    assert {*range(0, 3_000, 4), 2_999} <= set(steps)
    assert run.data.metrics["x"] == 2_999
    assert [each.path for each in mlflow_client.list_artifacts(tracker.run_id)] == ["rows.jsonl"]


def colours(picture, tmp_path):
    """Those of the theme's line colours that a picture has at least 100 pixels of."""
    path = tmp_path / "picture.png"
    path.write_bytes(picture)
    pixels = np.round(matplotlib.image.imread(path)[..., :3] * 255).astype(int).reshape(-1, 3)
    wanted = [[int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in LIGHT.colours[:4]]
    return {number for number, colour in enumerate(wanted) if (pixels == colour).all(axis=1).sum() > 100}


@pytest.mark.draws_figures
def test_each_metric_is_a_line_of_its_own(tmp_path):
    lines = {"eval/returns/mean": [[0, 1.0], [100, 5.0], [200, 4.0]], "episodes/returns/mean": [[0, 0.0], [200, 3.0]]}
    assert colours(draw_curves(lines, "PPO on CartPole", "transitions"), tmp_path) == {0, 1}


@pytest.mark.parametrize("series", [{}, {"a": [[0, 1.0]]}, {"a": [[0], [1]]}, {"a": ["x", "y"]}])
def test_what_is_no_line_has_no_picture(series):
    assert draw_curves(series, "", "") is None


def run(tracker, **options):
    config = {"num_envs": 4, "horizon": 16, "device": "cpu", "model_config": {"hidden_sizes": [8]}}
    Trainer(PPOConfig(**config).build(CartPole), tracker=tracker, **options).run(max_steps=3, progress="none")
    return tracker.run_id


@pytest.mark.draws_figures
def test_a_run_has_its_learning_curves_and_none_where_they_are_not_wanted(mlflow_client, tmp_path):
    run_id = run(MLflowTracker())
    picture = mlflow_client.download_artifacts(run_id, CURVES_FILE, str(tmp_path))
    assert colours(Path(picture).read_bytes(), tmp_path) == {0}
    other = run(MLflowTracker(curves=False))
    assert CURVES_FILE not in [entry.path for entry in mlflow_client.list_artifacts(other)]


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(pages.time, "monotonic", lambda: now[0])
    return now


def test_each_interval_has_a_sample_of_what_the_system_says(clock):
    sampler, taken = SystemSampler(os.getpid(), 10), {}
    kept = bytearray(200_000_000)
    kept[::4096] = bytes(len(kept[::4096]))
    begin = time.process_time()
    while time.process_time() - begin < 0.05:
        sum(range(1000))
    for _ in range(40):
        clock[0] += 1
        if measured := sampler.sample():
            taken[clock[0]] = measured
    assert [*taken] == [110, 120, 130, 140]
    sample = {name.removeprefix("system/"): value for name, value in taken[110].items()}
    memory = psutil.virtual_memory()
    assert sample["process_memory_megabytes"] == pytest.approx(psutil.Process().memory_info().rss / 1e6, rel=0.2)
    assert sample["process_memory_megabytes"] > 200
    assert sample["system_memory_usage_percentage"] == pytest.approx(memory.percent, abs=10)
    assert 0 <= sample["cpu_utilization_percentage"] <= 100
    assert 0 < sample["process_cpu_percentage"] <= 100 * (os.cpu_count() or 1) + 50


def test_gpus_are_measured_where_there_are_some(clock, monkeypatch):
    fake = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(used=20e6, total=80e6),
        nvmlDeviceGetUtilizationRates=lambda handle: [types.SimpleNamespace(gpu=73)][handle],  # the second has none
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    sampler = SystemSampler(os.getpid(), 1)
    clock[0] += 1
    of_both = {"memory_usage_megabytes": 20.0, "memory_usage_percentage": 25.0}
    expected = {f"system/gpu_{index}_{name}": value for index in (0, 1) for name, value in of_both.items()}
    assert {name: value for name, value in sampler.sample().items() if "gpu" in name} == {
        **expected,
        "system/gpu_0_utilization_percentage": 73.0,
    }


@pytest.mark.parametrize(("text", "seconds"), [("2.5", 2.5), ("soon", 10), ("-1", 10), ("nan", 10)])
def test_the_interval_is_mlflows(monkeypatch, text, seconds):
    assert sampling_interval(True, owns=True) == 10
    monkeypatch.setenv(pages.INTERVAL, text)
    assert sampling_interval(True, owns=True) == seconds


@pytest.mark.parametrize(("variable", "asked"), [("", False), ("true", True), ("TRUE ", True), ("false", False)])
def test_they_are_asked_for_by_argument_or_by_mlflows_variable(monkeypatch, variable, asked):
    monkeypatch.setenv(pages.SWITCH, variable)
    assert sampling_interval(None, owns=True) == (10 if asked else None)
    assert sampling_interval(None, owns=False) is None  # MLflow samples for its own active run
    assert sampling_interval(False, owns=True) is None
    assert sampling_interval(True, owns=False) == 10


def test_a_run_has_them_on_request_alone(mlflow_client, monkeypatch):
    monkeypatch.setenv(pages.INTERVAL, "0.001")
    tracker = RunSpec.from_plain({"env": "CartPole", "system_metrics": True}).trainer.make_tracker()
    tracker.interval_s = 0.01

    def samples():
        return mlflow_client.get_metric_history(tracker.run_id, "system/process_memory_megabytes")

    def lasts(trainer, stats):
        deadline = time.monotonic() + 60
        while (tracker.run_id is None or not samples()) and time.monotonic() < deadline:
            time.sleep(0.01)

    begin = mlflow_client.get_run(run(tracker, callbacks=[lasts])).info.start_time
    assert samples()
    for point in samples():
        assert point.step == (point.timestamp - begin) // 1000
        assert 1 < point.value < 1e5
    plain = mlflow_client.get_run(run(MLflowTracker())).data.metrics
    assert not [name for name in plain if name.startswith("system/")]


def test_a_system_that_does_not_say_all_gives_no_samples(mlflow_client, monkeypatch):
    monkeypatch.setattr(SystemSampler, "sample", lambda self: 1 / 0)
    run_id = run(MLflowTracker(system_metrics=True))
    assert mlflow_client.get_run(run_id).info.status == "FINISHED"
