import re
import subprocess
import sys

import pytest
from tests.forks import ForkedPython

from rl8x.tracking import TrackingError, secrets
from rl8x.tracking.location import locate, make_mlruns, user_tracking_uri, with_password


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


@pytest.mark.parametrize("name", ["feature%2Fx", "My%20Runs", "what?", "a=1&b #5 50% ü", "100%25"])
def test_mlflow_opens_the_database_that_is_meant_whatever_the_folder_is_called(name, tmp_path, monkeypatch):
    from sqlalchemy import make_url

    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    database = tmp_path / name / "mlruns/mlflow.db"
    for location in (locate(), locate(locate().uri), locate("sqlite:///mlruns/mlflow.db")):
        assert location.database == database
        assert location.uri == locate().uri
        assert make_url(location.uri).database == str(database)


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
    "htp://server": "did you mean http",
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
