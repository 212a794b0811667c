"""Where runs are kept, and how they are found there."""

import re
import subprocess
import sys

import pytest
from tests.forks import ForkedPython

from rl8x.tracking import TrackingError, find_run, secrets
from rl8x.tracking.location import database_beside, locate, make_mlruns, user_tracking_uri, with_password
from rl8x.tracking.runs import find_journal, user_run_id
from tracking.fakes import BothSides, header, left_over


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def test_the_users_uri_comes_before_the_default_which_is_mlruns_here(tmp_path, monkeypatch):
    location = locate()
    assert location.uri == f"sqlite:///{tmp_path}/mlruns/mlflow.db"
    assert location.database == tmp_path / "mlruns/mlflow.db"
    assert location.artifact_root == tmp_path / "mlruns/artifacts"
    assert not location.remote
    assert not (tmp_path / "mlruns").exists()  # only looking
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    assert user_tracking_uri() == locate().uri == "http://server:5000"
    assert locate().remote
    assert locate("sqlite:///x.db").database == tmp_path / "x.db"


def test_a_folder_whose_name_is_not_utf8_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a\udcffb").mkdir()
    monkeypatch.chdir(tmp_path / "a\udcffb")
    with pytest.raises(TrackingError, match=r"MLflow cannot keep runs in .*whose name is not UTF-8: work in another"):
        locate()


def test_set_tracking_uri_comes_before_the_environment():
    code = """
import os, mlflow
from rl8x.tracking.location import locate
mlflow.set_tracking_uri("http://set:1")
os.environ["MLFLOW_TRACKING_URI"] = "http://environment:2"
print(locate().uri)
"""
    process = ForkedPython([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)  # which has MLflow
    assert process.communicate()[0] == "http://set:1\n"


def test_sqlite_becomes_absolute(tmp_path):
    location = locate("sqlite:///sub/x.db?timeout=5")
    assert location.uri == f"sqlite:///{tmp_path}/sub/x.db?timeout=5"
    assert location.artifact_root is None  # MLflow's own default
    assert locate("sqlite:///mlruns/mlflow.db") == locate("SQLite:///mlruns/mlflow.db") == locate()
    decoded = locate("sqlite:///My%20Runs/x%3F.db?timeout=5")  # as MLflow does
    assert decoded.database == tmp_path / "My Runs/x?.db"
    assert decoded.uri == f"sqlite+pysqlite:///{tmp_path}/My Runs/x%3F.db?timeout=5"


def test_a_database_is_beside_a_folder_where_links_lead_to_it(tmp_path):
    (tmp_path / "real/spool/one").mkdir(parents=True)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/spool").symlink_to(tmp_path / "real/spool")
    assert database_beside(tmp_path / "theirs/spool/one", tmp_path / "real/mlflow.db") == "../../mlflow.db"
    assert database_beside(tmp_path / "theirs/spool/one", tmp_path / "theirs/mlflow.db") is None


def test_an_old_file_store_in_the_way(tmp_path):
    (tmp_path / "mlruns/0").mkdir(parents=True)
    assert locate().database is not None
    (tmp_path / "mlruns/0/meta.yaml").write_text("")
    with pytest.raises(TrackingError, match=r"0/meta\.yaml.*mlflow migrate-filestore.*MLFLOW_TRACKING_URI") as caught:
        locate()
    assert "\n" not in str(caught.value)
    assert locate("sqlite:///elsewhere.db").database is not None


def test_passwords_are_not_shown(monkeypatch):
    location = locate("postgresql://me:secret@host/db")
    assert location.shown == "postgresql://me:***@host/db"
    assert "secret" not in repr(location)
    assert with_password(location.shown) == location.uri  # this process was given it
    secrets._given.clear()
    for other in ("", "postgresql://you:secret@host/db", location.shown):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", other)
        says = r"the password of postgresql://me:\*\*\*@host/db is needed: set MLFLOW"
        with pytest.raises(TrackingError, match=says):
            locate(location.shown)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", location.uri)
    assert with_password(location.shown) == location.uri
    assert locate(location.shown) == location
    assert with_password("http://host:5000") == "http://host:5000"
    assert locate("http://host:5000/a@b").shown == "http://host:5000/a@b"


BAD_PASSWORD = "tracking_uri {} cannot be read: percent-encode its password ('/' is %2F,"
REFUSED = {
    **dict.fromkeys(("sqlite://", "sqlite:///", "sqlite:///:memory:"), "must name a file"),
    **dict.fromkeys(("./mlruns", "file:///tmp/mlruns", "/data/mlruns"), "(`mlflow migrate-filestore` moves old runs)"),
    "htp://server": "Did you mean http",
    # A password that makes another address
    "http://me:p/w@host:5000": BAD_PASSWORD.format("http://me:***@host:5000"),
    "https://me:p#w@host": BAD_PASSWORD.format("https://me:***@host"),
    "postgresql://me:p@w@host/db": BAD_PASSWORD.format("postgresql://me:***@host/db"),
    "http://me:[w@host": BAD_PASSWORD.format("http://me:***@host"),
    "http://host:port": BAD_PASSWORD.format("http://host:port"),
}


@pytest.mark.parametrize("uri", REFUSED)
def test_an_address_that_cannot_be_used_is_refused(uri):
    with pytest.raises(TrackingError, match=re.escape(REFUSED[uri])):
        locate(uri)


@pytest.mark.parametrize(
    "uri",
    [
        *("http://me:p@w@host", "postgresql://me:p/w@host/db", "mysql://me@azure:pw@host/db"),
        *("databricks", "postgresql+psycopg2://host/db", "file:///tmp/mlruns"),
    ],
)
def test_what_mlflow_reads_as_it_is_meant_is_taken(uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert locate(uri).uri == uri
    assert locate(uri).remote == uri.startswith(("http", "databricks"))


def test_a_new_mlruns_is_ignored_by_git(tmp_path):
    make_mlruns(tmp_path / "mlruns")
    (tmp_path / "mlruns/mlflow.db").touch()

    def git(*words):
        return subprocess.run(["git", "-C", str(tmp_path), *words], capture_output=True, check=True, text=True).stdout

    git("init")
    git("add", ".")
    assert git("ls-files") == "mlruns/.gitignore\n"  # it can be committed as it is, and keeps all else out
    assert git("status", "--porcelain") == "A  mlruns/.gitignore\n"
    (tmp_path / "mine").mkdir()
    make_mlruns(tmp_path / "mine")
    assert list((tmp_path / "mine").iterdir()) == []


def test_find_run(mlruns, mlflow_client):
    experiment = mlflow_client.create_experiment("e")
    run = mlflow_client.create_run(experiment, run_name="nice-fox")
    for found in (find_run(run.info.run_id), find_run("nice-fox")):
        assert (found.info.run_id, found.info.run_name) == (run.info.run_id, "nice-fox")
    with pytest.raises(TrackingError, match=r"no run 'nice-box'.*did you mean nice-fox"):
        find_run("nice-box")
    other = mlflow_client.create_run(experiment, run_name="nice-fox")
    with pytest.raises(TrackingError, match=f"2 runs are called 'nice-fox'.*{other.info.run_id}"):
        find_run("nice-fox")
    with pytest.raises(TrackingError, match="there is no run"):
        find_run("x' OR '1'='1")


def test_find_run_without_a_store(tmp_path):
    with pytest.raises(TrackingError, match=r"mlflow\.db does not exist"):
        find_run("x")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TrackingError, match="cannot read runs"):
        find_run("x", "http://127.0.0.1:9")
    with pytest.raises(TrackingError, match="cannot read runs"):  # without its driver, or without a server
        find_run("x", "postgresql://user:word@127.0.0.1:9/runs")


def test_find_journal(tmp_path):
    left_over(tmp_path, "one")
    left_over(tmp_path, "two", run_id="mine")
    journal = BothSides(tmp_path, header("three"))
    journal.acknowledge(run_id="sent")
    journal.close()
    assert find_journal(tmp_path, "journal-one") == tmp_path / "one"
    assert find_journal(tmp_path, "journal-four") is None
    assert find_journal(tmp_path, "mine") == tmp_path / "two"
    assert find_journal(tmp_path, "sent") == tmp_path / "three"
    assert find_journal(tmp_path, "other") is None
    with pytest.raises(TrackingError, match="not the handle"):
        find_journal(tmp_path, "journal-../../etc")


def test_the_users_run_by_the_environment(tmp_path, monkeypatch):
    assert user_run_id(None) is None
    monkeypatch.setenv("MLFLOW_RUN_ID", "abc")
    assert user_run_id(None) == ("abc", f"sqlite:///{tmp_path}/mlruns/mlflow.db")
