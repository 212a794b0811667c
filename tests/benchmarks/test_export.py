"""The committed comparison of every export, and the latencies that docs/export.md prints."""

import json

from benchmarks.export import ACTIONS, MODELS, RESULTS, table

from benchmarks import export
from rl8x.export import FORMATS

DOCS = RESULTS.parents[1] / "docs" / "export.md"


def test_the_matrix_has_every_combination_and_each_is_near():
    document = json.loads((RESULTS / "export-matrix.json").read_text())
    found = {tuple(row[name] for name in ("model", "actions", "format", "sampled")) for row in document["rows"]}
    ways = [
        (name, sampled) for name in FORMATS for sampled in (False, True) if (name, sampled) != ("safetensors", True)
    ]
    assert found == {(model, actions, *way) for model in MODELS for actions in ACTIONS for way in ways}
    assert document["largest_difference"] == max(row["difference"] for row in document["rows"]) <= 1e-5


def test_the_page_has_the_latencies_that_were_measured():
    document = json.loads((RESULTS / "export.json").read_text())
    assert f"<!-- export -->\n{table(document)}\n<!-- /export -->" in DOCS.read_text()
    assert document["versions"]["onnxruntime"] != "absent"


def test_each_way_to_decide_is_measured(tmp_path):
    policy = export.policy_of("gru", "box")
    ways = {way: call() for way, call in export.callers(policy, tmp_path)}
    assert set(ways) == {"decide", "pt2", "onnx"}
    assert abs(ways["pt2"]["actions"].numpy() - ways["onnx"][0]).max() < 1e-5
