"""The site: its reference has every public name, and the whole is built without a warning."""

from __future__ import annotations

import ast
import importlib
import logging
import pkgutil
import re
import zlib
from pathlib import Path
from types import ModuleType

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


def exported(module: ModuleType) -> set[str]:
    """The names of a package's `__all__`, or, where it has none, those that it imports under their own name."""
    if hasattr(module, "__all__"):
        return set(module.__all__) - {"__version__"}
    assert module.__file__ is not None
    imports = [
        node for node in ast.walk(ast.parse(Path(module.__file__).read_text())) if isinstance(node, ast.ImportFrom)
    ]
    return {alias.name for node in imports for alias in node.names if alias.asname == alias.name}


def packages() -> list[str]:
    names = [f"rl8x.{found.name}" for found in pkgutil.iter_modules(rl8x.__path__) if found.ispkg]
    return ["rl8x", *(name for name in names if exported(importlib.import_module(name)))]


@pytest.mark.parametrize("package", packages())
def test_every_exported_name_is_in_the_reference(package: str) -> None:
    module = importlib.import_module(package)
    told = documented()
    for name in sorted(exported(module)):
        value = getattr(module, name)
        # Under the package's own name, or, for a class or function, where another package exports the same one.
        same = [path for path in told if path.endswith(f".{name}") and resolve(path) is value]
        assert f"{package}.{name}" in told or (same and callable(value)), f"docs/reference lacks {package}.{name}"


def test_the_root_packages_names_are_on_the_first_page_of_the_reference() -> None:
    rows = re.findall(r"^\| (?:\[)?`(\w+)`", (REFERENCE / "index.md").read_text(), flags=re.MULTILINE)
    assert {*rows} == {*rl8x.__all__}


def test_each_name_of_the_reference_exists_once() -> None:
    told = documented()
    assert len(told) == len(set(told))
    for path in told:
        resolve(path)
    for module, names in ALSO.items():
        assert {f"{module}.{name}" for name in names} <= set(told)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The site, and the warnings of its making."""
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: pip install 'rl8x[docs]'")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    site = tmp_path_factory.mktemp("docs") / "site"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(site))
        assert config.strict
        logging.getLogger("mkdocs").addHandler(handler)
        try:
            build(config)
        finally:
            logging.getLogger("mkdocs").removeHandler(handler)
    return site, warnings


@pytest.mark.long
def test_the_site_is_built_without_a_warning_and_lists_every_name(built: tuple[Path, list[str]]) -> None:
    site, warnings = built
    assert not warnings
    inventory = (site / "objects.inv").read_bytes()
    listed = zlib.decompress(inventory.split(b"compressed using zlib.\n")[1]).decode()
    names = {line.split()[0] for line in listed.splitlines()}
    assert names >= set(documented())
    # What users call most is inherited from classes that are no public names themselves.
    inherited = ["trainers.Trainer.resume", "trainers.Trainer.eval", "policy.Policy.decide", "policy.Policy.load"]
    assert names >= {f"rl8x.{name}" for name in [*inherited, "envs.Env.draw", "trainers.Trainer.run"]}

    # A config's options stand in its table, an example with its code, and nothing is fetched from elsewhere.
    options = (site / "reference" / "algorithms.html").read_text()
    assert all(f"<code>{name}</code>" in options for name in ("sgd_minibatch_size", "target_entropy_frac", "q_lambda"))
    assert "<code>[0.1, 100] m/s^2</code>" in (site / "reference" / "envs.html").read_text()
    assert not [
        path.name
        for path in site.rglob("*.html")
        if "\\|" in re.sub(r"<pre.*?</pre>", "", path.read_text(), flags=re.DOTALL)
    ]
    assert "SetModel" in (site / "examples.html").read_text()
    assert "probability of improvement" not in (site / "glossary.html").read_text()
    assert "bootstrap" in (site / "glossary.html").read_text()
    for page in site.rglob("*.html"):
        assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(?:https?:)?//', page.read_text()), page.name
