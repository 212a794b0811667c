"""A rank that raises, dies or hangs ends the others soon; torchrun starts the job again where it had saved."""

import pytest
from tests.ranks.launch import ROOT, TRACKS, end, torchrun


@pytest.mark.long
@pytest.mark.store_process
@pytest.mark.parametrize(
    ("griefs", "forks"), [(["raise@1"], None), (["die@3", "freeze@4"], TRACKS)], ids=["started", "forked"]
)
def test_ranks_that_raise_die_and_hang_end_all_and_the_run_goes_on_each_time(griefs, forks, mlflow_client, mlruns):
    options = ["--max-restarts=6"]  # two, and what a busy machine takes longer for than the time-out
    # torchrun itself waits for as long as that for a rank that hangs, before it kills it.
    limits = {"RL8X_RANK_TIMEOUT_S": "15", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "4"}
    job = [ROOT / "tests" / "ranks" / "job.py", *griefs]
    process = torchrun(job, folder=mlruns.parent, options=options, forks=forks, **limits)
    try:
        output, _ = process.communicate(timeout=400)
    finally:
        end(process)
    assert process.returncode == 0, output[-6000:]
    # The error of the one that raises, and what the others say of it.
    assert ("ZeroDivisionError" in output) == ("raise@1" in griefs)
    assert "rank 0 of 2 has lost the others: one has ended (its own error says why)" in output
    assert "has not answered for 15 s (RL8X_RANK_TIMEOUT_S)" in output
    for grief in griefs:
        assert output.count(f"rank 1 comes to grief: {grief.split('@')[0]}") == 1
    for rank in range(2):
        assert output.count(f"rank {rank} ended after 6 steps: max_steps=6") == 1
    (experiment,) = {run.info.experiment_id for run in mlflow_client.search_runs(["0", "1"])}
    (found,) = mlflow_client.search_runs([experiment])
    assert found.info.status == "FINISHED"
    assert found.data.params["ranks"] == "2"
    assert int(found.data.params["num_envs.total"]) == 16
    for metric in ("losses/total", "algorithm/steps"):
        points = mlflow_client.get_metric_history(found.info.run_id, metric)
        assert [point.step for point in points] == [16 * 16 * i for i in range(1, 7)], metric
