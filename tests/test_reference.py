"""The site and its reference: every public name is there, and its docstring explains arguments and shapes."""

import ast
import dataclasses
import functools
import importlib
import inspect
import logging
import pkgutil
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
from tests.pages import REFERENCE, ROOT, documented, resolve

import rl8x
from rl8x.tracking import MemoryTracker, MLflowTracker, NullTracker, Tracker

FULFILS = {MLflowTracker: Tracker, MemoryTracker: Tracker, NullTracker: Tracker}
UNNAMED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
SAME_ARGUMENTS = re.compile(r"\bthe\s+arguments\s+of\s+`(?:\w+\.)?(\w+)`")
SHAPE = re.compile(r"`(?:int64 |float32 )?\[[^`]*\]`|\bscalars?\b|\b0-d\b")


@dataclasses.dataclass
class Documented:
    """A public function, method or property, or the constructor of a public class.

    `texts` are its docstring and those that it takes over; `options` fields of a config, which explain themselves.
    """

    name: str
    function: Any
    texts: list[str]
    is_property: bool = False
    options: frozenset[str] = frozenset()

    def names_of(self, title, texts=None):
        """The names that a section explains, each at the beginning of a line."""
        found = [re.search(rf"^{title}:\n((?:[ ]+.*\n|\n)*)", text + "\n", re.MULTILINE) for text in self.texts[:texts]]
        section = "\n".join(match[1] for match in found if match)
        return {name.strip("* ") for name in re.findall(r"^    ([\w.*]+)(?:, [\w.]+)*:", section, re.MULTILINE)}


def text_of(value):
    """The docstring of a class or function itself, not that which it inherits."""
    own = value.__dict__.get("__doc__") if isinstance(value, type) else getattr(value, "__doc__", None)
    return inspect.cleandoc(own or "")


def function_in(member):
    """The function behind an attribute of a class, if there is one."""
    member = getattr(member, "fget", None) or getattr(member, "func", None) or getattr(member, "__func__", member)
    return inspect.unwrap(member) if inspect.isfunction(member) else None


def members(path, cls):
    """What a class has that readers see: of itself, and of bases that are no public names."""
    shown = {resolve(name) for name in documented() if inspect.isclass(resolve(name))} - {cls}
    bases = [base for base in cls.__mro__ if base.__module__.startswith("rl8x")]
    bases += [FULFILS[base] for base in bases if base in FULFILS]
    own, seen = [base for base in bases if base not in shown], set()
    for name, member in (item for base in own for item in vars(base).items()):
        function = function_in(member)
        is_ours = function is not None and function.__module__.startswith("rl8x")
        if not is_ours or name.startswith("_") or name in seen:
            continue
        seen.add(name)
        overridden = [vars(other)[name] for other in bases if name in vars(other)]
        texts = [text_of(function_in(each) or each) for each in overridden]
        others = [other for text in texts for other in SAME_ARGUMENTS.findall(text)]
        texts += [text_of(vars(base)[other]) for other in others for base in bases if other in vars(base)]
        is_property = isinstance(member, property | functools.cached_property)
        yield Documented(f"{path}.{name}", function, texts, is_property)
    made = [text_of(base) for base in bases] + [text_of(vars(b)["__init__"]) for b in bases if "__init__" in vars(b)]
    fields = getattr(cls, "__dataclass_fields__", {})
    options = frozenset(name for name, field in fields.items() if field.metadata.get("help"))
    for name in ("__init__", "__post_init__"):
        function = next((vars(base)[name] for base in own if name in vars(base)), None)
        if function is not None and function.__module__.startswith("rl8x"):
            yield Documented(f"{path}.{name}", function, [*made, text_of(function)], options=options)


def everything():
    found = []
    for path in documented():
        value = resolve(path)
        if inspect.isclass(value):
            found += members(path, value)
        elif inspect.isfunction(value):
            found.append(Documented(path, inspect.unwrap(value), [text_of(value)]))
    return found


def complaints(each):
    """What is wrong with a docstring: silence, an argument untold or invented, or tensors without shapes."""
    taken = inspect.signature(each.function).parameters
    if not any(each.texts):
        yield "says nothing"
    if not each.is_property and not each.name.endswith("__post_init__"):
        named = {name for name, parameter in taken.items() if parameter.kind not in UNNAMED} - {"self", "cls"}
        explained = each.options | each.names_of("Args") | each.names_of("Attributes")
        yield from (f"does not explain {name}" for name in sorted(named - explained))
    if not each.name.endswith("__"):  # a class explains its subclasses' arguments
        yield from (f"explains {name}, which it does not take" for name in each.names_of("Args", 1) - {*taken})
    annotations = inspect.get_annotations(each.function).values()
    if any(re.search(r"\bTensor\b", str(value)) for value in annotations) and not any(map(SHAPE.search, each.texts)):
        yield "tells no shape of its tensors"


def test_every_public_function_explains_its_arguments_and_shapes_and_no_others():
    found = everything()
    assert len(found) > 300
    assert [f"{each.name} {wrong}" for each in found for wrong in complaints(each)] == []


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
