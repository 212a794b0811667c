from benchmarks.learning_tasks import TASKS

from benchmarks import learning


def test_cartpole_is_learned_with_products_in_bfloat16():
    task = TASKS["cartpole"]
    row = learning.measure("cartpole", task.changed(precision="bf16"), seed=0)
    assert row["return_mean"] >= task.bound
