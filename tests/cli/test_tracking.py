from __future__ import annotations

import pytest

from rl8x import tracking
from rl8x.cli.main import main
from rl8x.tracking import SpoolReport, SyncReport


def test_ui_serves_what_it_was_asked_to(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(tracking, "serve_ui", lambda *arguments: calls.append(arguments) or 3)
    assert main(["ui", "--port", "5050", "--tracking-uri", "sqlite:///x.db"]) == 3
    assert calls == [("sqlite:///x.db", "127.0.0.1", 5050)]
    assert capsys.readouterr().out.startswith("http://127.0.0.1:5050")


def test_ui_says_in_one_line_why_it_cannot(capsys):
    assert main(["ui", "--tracking-uri", "sqlit:///x.db"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("rl8x: error: ")
    assert "sqlite" in err
    assert err.count("\n") == 1


def test_sync_of_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["sync"]) == 0
    assert capsys.readouterr().out == "nothing to send\n"


@pytest.mark.parametrize(("outcome", "code"), [("sent", 0), ("busy", 0), ("failed", 1)])
def test_sync_tells_what_became_of_every_spool(tmp_path, monkeypatch, capsys, outcome, code):
    report = SyncReport([SpoolReport(tmp_path / "s1", outcome, "r1", 7)])
    calls = []
    monkeypatch.setattr(tracking, "sync", lambda *arguments: calls.append(arguments) or report)
    assert main(["sync", str(tmp_path), "--tracking-uri", "sqlite:///x.db"]) == code
    assert calls == [(str(tmp_path), "sqlite:///x.db")]
    assert f"{outcome} s1 (run r1, 7 rows)" in capsys.readouterr().out


def test_sync_of_a_folder_that_is_not_there(tmp_path, capsys):
    assert main(["sync", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err
