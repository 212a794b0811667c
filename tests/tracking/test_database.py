import sqlite3

from rl8x.tracking.database import ensure_database
from rl8x.tracking.location import locate


def test_a_new_database_is_in_wal_mode_and_whole(mlflow_template):
    connection = sqlite3.connect(mlflow_template)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("SELECT name FROM experiments").fetchall() == [("Default",)]
    connection.close()
    assert not mlflow_template.with_name(".mlflow.db.new").exists()


def test_one_that_is_there_is_left_alone(mlruns):
    before = (mlruns / "mlflow.db").read_bytes()
    ensure_database(locate())
    assert (mlruns / "mlflow.db").read_bytes() == before
