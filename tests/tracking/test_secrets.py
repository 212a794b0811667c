import json
import logging
import re
import sys
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from sqlalchemy.engine import make_url

from rl8x.tracking import secrets
from rl8x.tracking.secrets import find_hidden, hide, hide_in_data, hide_in_uris, hide_in_words, is_hidden, learn

SCHEMES = ["http", "https", "postgresql", "postgresql+psycopg2", "mysql+pymysql", "mssql+pyodbc"]
# As people type them: everything but spaces. `*` could not be told from what replaces it.
RAW = st.text(
    st.characters(min_codepoint=33, max_codepoint=0x24F, blacklist_characters="*\x7f", blacklist_categories=["Z", "C"]),
    min_size=1,
    max_size=20,
)
ANY = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="*"), min_size=1, max_size=20)
NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789._-", min_size=1, max_size=8)
AROUND = st.sampled_from(["", "cannot reach ", "'", '{"uri": "', "(", "--tracking-uri=", "see\n", "`"])
AFTER = st.sampled_from(["", " (refused)", "'", '"}', ")", "\nand", "`", ": no answer", "/path?x=1"])


@given(scheme=st.sampled_from(SCHEMES), user=NAMES, password=RAW, host=NAMES, before=AROUND, after=AFTER)
@example("http", "u", "p/w@r:d", "host", "", "")
@example("http", "u", "a@b", "host", "'", "'")
@example("postgresql", "u", "12/34", "host", "", "")
def test_a_password_is_in_no_text_as_typed_or_encoded(scheme, user, password, host, before, after):
    encoded = quote(password, safe="")
    # `12/34` would be a port and a path
    given = [encoded] if scheme.startswith("http") and password[0].isdecimal() else [encoded, password]
    for each in given:
        hidden = hide(f"{before}{scheme}://{user}:{each}@{host}:5000/db{after}")
        assert hidden == f"{before}{scheme}://{user}:***@{host}:5000/db{after}"


@given(password=ANY.filter(lambda text: len(text) >= 8), host=NAMES, before=AROUND)
def test_a_password_that_was_given_is_hidden_wherever_it_stands(password, host, before):
    assume(password not in f"http://me:***@{host}{before}")
    secrets._given.clear()
    learn(f"http://me:{quote(password, safe='')}@{host}")
    forms = [password, quote(password), quote(password, safe=""), quote_plus(password), repr(password)[1:-1]]
    for form in (*forms, json.dumps(password)[1:-1]):
        if len(form) >= 8:
            assert hide(f"{before}{form}, refused") == f"{before}***, refused"


@given(text=st.text(), number=st.integers())
def test_a_text_without_secrets_stays_as_it_is(text, number):
    secrets._given.clear()
    assume("://" not in text and "=" not in text)
    learn("https://me:p4ssw0rd@server")
    assume("p4ss" not in text)
    for harmless in (text, f"http://127.0.0.1:5000/{number}", f"sqlite:////home/{number}/mlflow.db {text}"):
        assert hide(harmless) == harmless


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:5000/#/experiments/1/runs?compareRunsMode=CHART&viewStateShareKey=rl8x",
        "http://host:5000/Users/me@company.com",
        "https://host/Users/me@company.com mail: me@company.com",
        "sqlite:////tmp/a:b@c/mlflow.db",
        "http://[::1]:5000/a@b",
        "s3://bucket/key?max_tokens=100",
        "a=1&b=2 token = 3",
        "git+ssh://git@github.com/owner/repository",
        "postgresql+psycopg2://me@host:5432/db",
        "abfss://container@account.dfs.core.windows.net/runs",
        "git@github.com:owner/repository",
    ],
)
def test_what_is_no_secret(text):
    assert hide(text) == text


@pytest.mark.parametrize(
    "text",  # with the secret in < and >
    [
        "http://:<pw>@host",
        "mysql://me@azure:<pw>@host/db",
        "postgresql://host/db?user=me&password=<p%40w>&sslmode=on",
        "Max retries exceeded with url: /api?access_token=<abc.def>",
        "mssql+pyodbc:///?odbc_connect=<DRIVER%3Dx%3BPWD%3Dabc>",
        "https://<ghp_0123456789abcdefghij>@github.com/me/it",
        "https://<x>@host",
        "https://<abc123>@host:5000/a?b=c",
        "git+https://<abc123>@github.com/me/it.git@main",
        "'HTTPS://<a%40b%2Fc>@host'",
        "https://<t@k>@host",
        "wss://<abc>@host (refused)",
        "plugin://<abc>@host",
        "https://<abc123>:@github.com/me/it",
        "https://<abc123>:<x-oauth-basic>@github.com/me/it",
        "https://oauth2:<abc123>@gitlab.com/me/it",
        "jdbc:sqlserver://host;user=me;pwd=<abc;a=b>",
    ],
)
def test_where_secrets_stand_in_uris(text):
    given, hidden = re.sub("[<>]", "", text), re.sub("<.*?>", "***", text)
    assert hide(given) == hide_in_uris(given) == hidden
    assert is_hidden(hidden)
    assert not is_hidden(given)


def test_sqlalchemy_and_rl8x_mean_the_same_password():
    for uri in ("postgresql://u:12/34@h/db", "mysql+pymysql://u:a?b#c@h:1/db", "postgresql://h:1/db?x=a@b"):
        password = make_url(uri).password
        assert hide(uri) == uri.replace(quote(str(password), safe="/?#="), "***")


@pytest.mark.parametrize(
    "name", ["MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "DATABRICKS_TOKEN", "MY_API_KEY", "PGPASSWORD"]
)
def test_the_environments_secrets(monkeypatch, name):
    monkeypatch.setenv(name, "hunter2")
    assert hide("login as me with hunter2 (hunter22)") == "login as me with *** (hunter22)"
    assert hide_in_data({"env": "hunter2"}) == {"env": "hunter2"}  # too short to be told from other data
    monkeypatch.setenv(name, "h/u@nter2")
    assert hide_in_data({"env": ["h/u@nter2", "x-h%2Fu%40nter2", ("h%2fu%40nter2", 1)]}) == {
        "env": ["***", "x-***", ("***", 1)]
    }
    monkeypatch.setenv("DATABASE_URL", "postgresql://me:p%2Fw%401234@host/db")
    assert hide("FATAL: p/w@1234") == "FATAL: ***"


@pytest.mark.parametrize(("user", "hidden"), [("abc123de", True), ("abcdefghijklmnopqrst", True), ("alexander", False)])
def test_a_token_is_hidden_in_other_texts_and_a_users_name_is_not(user, hidden):
    learn(f"https://{user}@host")
    assert hide(f"/home/{user}/runs") == ("/home/***/runs" if hidden else f"/home/{user}/runs")


def test_everyday_words_are_hidden_in_uris_only(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path.parent.name
    for password in ("pw", "mlflow", folder):
        learn(f"postgresql://mlflow:{password}@host/mlflow")
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "true")
    text = f"pw true mlflow {folder}"
    assert hide(text) == text
    assert hide(f"postgresql://mlflow:mlflow@host/{folder}") == f"postgresql://mlflow:***@host/{folder}"


def test_words_of_a_command(monkeypatch):
    words = ["--password", "abc", "--api-key=d", "-f", "x.yaml", "token=e", "--tracking-uri", "http://u:p@h"]
    hidden = ["--password", "***", "--api-key=***", "-f", "x.yaml", "token=***", "--tracking-uri", "http://u:***@h"]
    assert hide_in_words(words) == hidden
    for words in (["--use-token", "--lr", "1", "--token"], ["the", "token", "abc"]):
        assert hide_in_words(words) == words
    monkeypatch.setattr(sys, "argv", ["train.py", "--store", "http://me:hunter2!@host"])
    assert hide("no hunter2!") == "no ***"


def test_where_something_is_hidden():
    assert find_hidden({"a": [1, {"b": "http://u:***@h"}]}, "env_kwargs") == "env_kwargs.a[1].b"
    assert find_hidden({"a": "***"}, "x") == "x.a"
    assert find_hidden({"a": ["Bearer ***"]}, "x") == "x.a[0]"
    assert find_hidden({"a": "**** best", "b": None, "c": "2 ** 3"}, "x") is None


def test_records_of_a_logger(caplog):
    log = secrets.logger("rl8x.test_secrets")
    try:
        raise OSError("http://u:p4ss@h is away")
    except OSError as error:
        log.warning("cannot: %s", error, exc_info=True)
    assert caplog.messages == ["cannot: http://u:***@h is away"]
    assert "OSError: http://u:***@h is away" in caplog.text
    assert "p4ss" not in caplog.text
    assert secrets.logger("rl8x.test_secrets").filters == log.filters
    assert len(log.filters) == 1
    assert not logging.getLogger("rl8x.other").filters


def test_the_cause_of_an_error():
    plain, telling = OSError("refused"), OSError("no http://u:p@h")
    assert secrets.showable(plain) is plain
    assert secrets.showable(telling) is None
    plain.__cause__ = telling
    assert secrets.showable(plain) is None
