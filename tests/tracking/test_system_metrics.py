"""Samples of the machine: what is measured, when, and who asks for it."""

import os
import sys
import time
import types

import psutil
import pytest
from tests.tracking.test_curves import run

from rl8x.config import RunSpec
from rl8x.tracking import MLflowTracker, pages
from rl8x.tracking.pages import SystemSampler, is_asked_for


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(pages.time, "monotonic", lambda: now[0])
    return now


def test_a_sample_is_taken_each_interval(clock):
    sampler = SystemSampler(os.getpid(), 10)
    taken = []
    for _ in range(40):
        clock[0] += 1
        if sampler.sample():
            taken.append(clock[0])
    assert taken == [110, 120, 130, 140]


def test_what_is_measured_is_what_the_system_says(clock):
    sampler = SystemSampler(os.getpid(), 1)
    kept = bytearray(200_000_000)
    kept[::4096] = bytes(len(kept[::4096]))
    begin = time.process_time()
    while time.process_time() - begin < 0.05:
        sum(range(1000))
    clock[0] += 1
    sample = {name.removeprefix("system/"): value for name, value in sampler.sample().items()}
    memory = psutil.virtual_memory()
    assert sample["process_memory_megabytes"] == pytest.approx(psutil.Process().memory_info().rss / 1e6, rel=0.2)
    assert sample["process_memory_megabytes"] > 200
    assert sample["system_memory_usage_percentage"] == pytest.approx(memory.percent, abs=10)
    assert 0 <= sample["cpu_utilization_percentage"] <= 100
    assert 0 < sample["process_cpu_percentage"] <= 100 * (os.cpu_count() or 1) + 50


def test_gpus_are_measured_where_there_are_some(clock, monkeypatch):
    def utilization(handle):
        if handle == 1:
            raise RuntimeError("not supported")
        return types.SimpleNamespace(gpu=73)

    fake = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(used=20e6, total=80e6),
        nvmlDeviceGetUtilizationRates=utilization,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    sampler = SystemSampler(os.getpid(), 1)
    clock[0] += 1
    sample = sampler.sample()
    assert {name: value for name, value in sample.items() if "gpu" in name} == {
        "system/gpu_0_memory_usage_megabytes": 20.0,
        "system/gpu_0_memory_usage_percentage": 25.0,
        "system/gpu_0_utilization_percentage": 73.0,
        "system/gpu_1_memory_usage_megabytes": 20.0,
        "system/gpu_1_memory_usage_percentage": 25.0,
    }


@pytest.mark.parametrize(("text", "seconds"), [(None, 10), ("2.5", 2.5), ("soon", 10), ("-1", 10), ("nan", 10)])
def test_the_interval_is_mlflows(monkeypatch, text, seconds):
    if text is not None:
        monkeypatch.setenv(pages.INTERVAL, text)
    assert pages.interval() == seconds


@pytest.mark.parametrize(
    ("given", "variable", "owns", "asked"),
    [
        (None, None, True, False),
        (None, "true", True, True),
        (None, "TRUE ", True, True),
        (None, "false", True, False),
        (None, "true", False, False),  # MLflow samples for its own active run
        (False, "true", True, False),
        (True, None, False, True),
    ],
)
def test_they_are_asked_for_by_argument_or_by_mlflows_variable(monkeypatch, given, variable, owns, asked):
    monkeypatch.delenv(pages.SWITCH, raising=False)
    if variable is not None:
        monkeypatch.setenv(pages.SWITCH, variable)
    assert is_asked_for(given, owns=owns) is asked


def test_a_run_has_them_on_request_alone(mlflow_client, monkeypatch):
    monkeypatch.setenv(pages.INTERVAL, "0.001")
    tracker = RunSpec.from_plain({"env": "CartPole", "system_metrics": True}).trainer.make_tracker()
    tracker.interval_s = 0.01

    def lasts(trainer, stats):
        while tracker.run_id is None:
            time.sleep(0.01)
        time.sleep(0.1)

    run_id = run(tracker, callbacks=[lasts])
    history = mlflow_client.get_metric_history(run_id, "system/process_memory_megabytes")
    assert history
    assert all(0 <= point.step < 60 and 1 < point.value < 1e5 for point in history)
    plain = mlflow_client.get_run(run(MLflowTracker())).data.metrics
    assert not [name for name in plain if name.startswith("system/")]


def test_a_system_that_does_not_say_all_gives_no_samples(mlflow_client, monkeypatch):
    monkeypatch.setattr(SystemSampler, "sample", lambda self: 1 / 0)
    run_id = run(MLflowTracker(system_metrics=True))
    assert mlflow_client.get_run(run_id).info.status == "FINISHED"
