"""A rank that dies, raises or hangs ends the others soon; torchrun starts the job again where it had saved."""

import time

import pytest
from tests.ranks.launch import ROOT, end, torchrun

JOB = ROOT / "tests" / "ranks" / "job.py"


def run(arguments, folder, *, options=(), **variables):
    """Return the exit code, what was printed, and the seconds that it took."""
    process = torchrun([JOB, *arguments], folder=folder, options=options, **variables)
    began = time.monotonic()
    try:
        output, _ = process.communicate(timeout=200)
    finally:
        end(process)
    return process.returncode, output, time.monotonic() - began


def test_a_rank_that_raises_ends_all_with_its_error(tmp_path):
    code, output, _ = run(["raise", 2, "none"], tmp_path)
    assert code != 0
    assert "ZeroDivisionError" in output
    assert "rank 0 of 2 has lost the others: one has ended (its own error says why)" in output
    assert "ended after" not in output


def test_a_rank_that_hangs_ends_the_others_at_the_time_out(tmp_path):
    code, output, seconds = run(["freeze", 2, "none"], tmp_path, RL8X_RANK_TIMEOUT_S="6")
    assert code != 0
    assert "has not answered for 6 s (RL8X_RANK_TIMEOUT_S)" in output
    assert seconds < 190


@pytest.mark.store_process
def test_a_killed_rank_is_started_again_and_its_run_goes_on(mlflow_client, mlruns):
    code, output, _ = run(["die", 3, "mlflow"], mlruns.parent, options=["--max-restarts=1"])
    assert code == 0, output[-6000:]
    for rank in range(2):
        assert f"rank {rank} ended after 6 steps: max_steps=6" in output
    (experiment,) = {run.info.experiment_id for run in mlflow_client.search_runs(["0", "1"])}
    (found,) = mlflow_client.search_runs([experiment])
    assert found.info.status == "FINISHED"
    assert found.data.params["ranks"] == "2"
    assert int(found.data.params["num_envs.total"]) == 16
    for metric in ("losses/total", "algorithm/steps"):
        points = mlflow_client.get_metric_history(found.info.run_id, metric)
        assert [point.step for point in points] == [16 * 16 * i for i in range(1, 7)], metric
