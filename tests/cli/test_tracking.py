from __future__ import annotations

import io

import pytest

from rl8x import tracking
from rl8x.cli.main import main
from rl8x.tracking import SpoolReport, SyncReport
from rl8x.tracking.appending import Journal


@pytest.mark.parametrize("browser", [True, False])
def test_ui_prints_and_opens_the_link_to_the_runs(tmp_path, monkeypatch, call, browser):
    calls = []
    monkeypatch.setattr(tracking, "runs_link", lambda *arguments: calls.append(arguments) or ("http://x/#/runs", False))
    monkeypatch.setattr(tracking, "serve_ui", lambda *arguments, link: calls.append((*arguments, link)) or 3)
    words = [] if browser else ["--no-browser"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.db").touch()
    out = call("ui", "--port", "5050", "--tracking-uri", "sqlite:///x.db", *words, code=3)
    asked = ("sqlite:///x.db", "127.0.0.1", 5050)
    assert calls == [asked, (*asked, "http://x/#/runs" if browser else None)]
    assert out == "http://x/#/runs (Ctrl-C ends it)\n"


def test_ui_of_runs_on_a_server_opens_its_own_page(monkeypatch, call):
    opened = []
    monkeypatch.setattr(tracking, "runs_link", lambda *_: ("http://server/#/runs", True))
    monkeypatch.setattr(tracking, "open_browser", opened.append)
    assert call("ui", "--tracking-uri", "http://server") == "http://server/#/runs\n"
    assert opened == ["http://server/#/runs"]


@pytest.mark.parametrize(("outcome", "code"), [("sent", 0), ("busy", 0), ("failed", 1)])
def test_sync_tells_what_became_of_every_spool(tmp_path, monkeypatch, call, outcome, code):
    report = SyncReport([SpoolReport(tmp_path / "s1", outcome, "r1", 7)])
    calls = []
    monkeypatch.setattr(tracking, "sync", lambda *arguments, allow: calls.append(arguments) or report)
    about = "" if outcome == "busy" else " (run r1, 7 rows)"
    assert f"{outcome} s1{about}\n" in call("sync", tmp_path, "--to", "sqlite:///x.db", code=code)
    assert calls == [(str(tmp_path), "sqlite:///x.db")]


def test_a_store_that_only_a_spool_names_is_asked_about_on_a_terminal(tmp_path, monkeypatch, capsys):
    for spool_id in ("one", "two"):
        header = {"op": "open", "version": 1, "spool_id": spool_id, "t": 1, "uri": "http://127.0.0.1:9"}
        Journal.create(tmp_path / "spool", header).close()
    words = ["sync", str(tmp_path / "spool")]
    assert main(words) == 1
    assert "`rl8x sync --yes`" in capsys.readouterr().out
    for answer, told in (("n", "which you have not"), ("y", "Connection refused")):
        terminal = io.StringIO(f"{answer}\n")  # one answer for both spools
        terminal.isatty = lambda: True
        monkeypatch.setattr("sys.stdin", terminal)
        assert main(words) == 1
        said = capsys.readouterr()
        assert said.out.count(told) == 2
        assert said.err.count("A spool names the store http://127.0.0.1:9. Send its rows there?") == 1
