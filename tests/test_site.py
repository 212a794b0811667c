"""The site: its reference has every public name, and the whole is built without a warning."""

import ast
import importlib
import logging
import pkgutil
import re
import zlib
from pathlib import Path

import pytest
from tests.pages import REFERENCE, ROOT, documented, resolve

import rl8x

# Modules whose public names the reference has one by one, beside what packages export.
ALSO = {
    "rl8x.export": {"export_policy", "Export"},
    "rl8x.functional": {"generalized_advantages", "running_returns", "explained_variance", "moments", "expectation"},
    "rl8x.policy": {"Policy", "Act"},
    "rl8x.portable": {"Decision"},
    "rl8x.replay.dataset": {"Dataset", "normalized_score"},
    "rl8x.schedules": {"Schedule"},
    "rl8x.spaces": {"AsymmetricDict"},
    "rl8x.video": {"record_video", "film", "Film"},
}


def exported(module):
    """The names of a package's `__all__`, or, where it has none, those that it imports under their own name."""
    if hasattr(module, "__all__"):
        return set(module.__all__) - {"__version__"}
    nodes = ast.walk(ast.parse(Path(module.__file__).read_text()))
    aliases = [alias for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    return {alias.name for alias in aliases if alias.asname == alias.name}


def packages():
    names = [f"rl8x.{found.name}" for found in pkgutil.iter_modules(rl8x.__path__) if found.ispkg]
    return ["rl8x", *(name for name in names if exported(importlib.import_module(name)))]


@pytest.mark.parametrize("package", packages())
def test_every_exported_name_is_in_the_reference(package):
    module, told = importlib.import_module(package), documented()
    for name in sorted(exported(module)):
        value = getattr(module, name)
        # Under the package's own name, or, for a class or function, where another package exports the same one.
        same = [path for path in told if path.endswith(f".{name}") and resolve(path) is value]
        assert f"{package}.{name}" in told or (same and callable(value)), f"docs/reference lacks {package}.{name}"


def test_each_name_of_the_reference_exists_once_and_those_of_the_root_are_on_its_first_page():
    told = documented()
    assert len(told) == len(set(told))
    for path in told:
        resolve(path)
    assert {f"{module}.{name}" for module, names in ALSO.items() for name in names} <= set(told)
    rows = re.findall(r"^\| (?:\[)?`(\w+)`", (REFERENCE / "index.md").read_text(), flags=re.MULTILINE)
    assert {*rows} == {*rl8x.__all__}


@pytest.mark.long
def test_the_site_is_built_without_a_warning_and_lists_every_name(tmp_path, monkeypatch):
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: pip install 'rl8x[docs]'")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    handler, warnings = logging.Handler(logging.WARNING), []
    handler.emit = lambda record: warnings.append(record.getMessage())
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path))
    assert config.strict
    logging.getLogger("mkdocs").addHandler(handler)
    try:
        build(config)
    finally:
        logging.getLogger("mkdocs").removeHandler(handler)
    assert not warnings
    listed = zlib.decompress((tmp_path / "objects.inv").read_bytes().split(b"compressed using zlib.\n")[1]).decode()
    names = {line.split()[0] for line in listed.splitlines()}
    # What users call most is inherited from classes that are no public names themselves.
    inherited = ["trainers.Trainer.resume", "trainers.Trainer.eval", "policy.Policy.decide", "policy.Policy.load"]
    assert names >= {*documented(), *(f"rl8x.{name}" for name in [*inherited, "envs.Env.draw", "trainers.Trainer.run"])}
    # A config's options stand in its table, an example with its code, and nothing is fetched from elsewhere.
    pages = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*.html")}
    options = pages["reference/algorithms.html"]
    assert all(f"<code>{name}</code>" in options for name in ("sgd_minibatch_size", "target_entropy_frac", "q_lambda"))
    assert "<code>[0.1, 100] m/s^2</code>" in pages["reference/envs.html"]
    assert "SetModel" in pages["examples.html"]
    assert "bootstrap" in pages["glossary.html"]
    for name, text in pages.items():
        assert "\\|" not in re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL), name
        assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(?:https?:)?//', text), name
