"""What a wheel and an sdist have, and that a version stands in one place; `make package` builds and tries both."""

import ast
import fnmatch
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.test_layers import MODULES
from tests.test_layers import imported as modules_of

import rl8x
from rl8x import __version__, algorithms, conditions, tracking

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "rl8x"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
# What rl8x needs, by itself and for each feature.
NEEDED = [*PYPROJECT["project"]["dependencies"], *(text for texts in EXTRAS.values() for text in texts)]
NAMES = {canonicalize_name(Requirement(text).name) for text in NEEDED}
# Brax brings JAX, and `imageio[ffmpeg]` its program; NVIDIA's readings are taken where there are any.
BROUGHT = {"jax", "imageio_ffmpeg", "pynvml"}


def test_every_file_of_the_package_is_in_its_wheel():
    """Python files of folders that are packages, and those that the settings name."""
    named = PYPROJECT["tool"]["setuptools"]["package-data"]["rl8x"]
    assert {"py.typed", "execution/*.h", "config/settings/*"} <= set(named)
    for path in PACKAGE.rglob("*"):
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        relative = path.relative_to(PACKAGE)
        if path.suffix == ".py":
            assert all((PACKAGE / folder / "__init__.py").exists() for folder in relative.parents), relative
        else:
            assert any(fnmatch.fnmatch(str(relative), pattern) for pattern in named), f"{relative} is in no wheel"
    assert all([*PACKAGE.glob(pattern)] for pattern in named)


def unpickling(source):
    """List the calls in a source text by which Python objects would be unpickled."""
    found = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        safe = any(each.arg == "weights_only" and ast.unparse(each.value) == "True" for each in call.keywords)
        unsafe = name == "torch.load" and not safe
        unsafe |= any(each.arg == "allow_pickle" and ast.unparse(each.value) != "False" for each in call.keywords)
        # torch's calls between ranks that take any object pickle it.
        if unsafe or re.search(r"pickle\.loads?$|Unpickler$|_pickle$|^joblib\.load$|_object(_list)?$", name):
            found.append(name)
    return found


def test_nothing_is_unpickled():
    seen = "pickle.loads(x); pd.read_pickle(x); torch.load(x, weights_only=False); torch.load(x); "
    seen += "np.load(x, allow_pickle=True); dist.broadcast_object_list(x); dist.all_gather_object(x, y)"
    assert len(unpickling(seen)) == 7
    assert {str(path): found for path in PACKAGE.rglob("*.py") if (found := unpickling(path.read_text()))} == {}


def test_the_version_stands_in_one_place_and_the_changelog_is_of_it():
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    assert PYPROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "rl8x.__version__"}
    with_it = [path for path in PACKAGE.rglob("*.py") if f'"{__version__}"' in path.read_text()]
    assert with_it == [PACKAGE / "__init__.py"]
    headings = re.findall(r"^## \[(.+?)\](?: - (\S+))?$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    assert [name for name, _ in headings[1:2]] in ([], [__version__])
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for _, date in headings[1:])


def test_every_extra_is_installed_for_all_tests_in_a_version_that_is_pinned():
    assert Requirement(EXTRAS["test-all"][0]).extras == EXTRAS.keys() - {"test-all"}
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert NAMES - {canonicalize_name(pin.partition("==")[0]) for pin in pins} <= {"torch", "rl8x"}


def test_what_is_imported_is_installed_with_rl8x():
    """Not by chance, with something else that is installed: of that, any version may come."""
    names = {name.partition(".")[0] for path in MODULES.values() for name in modules_of(path)}
    imported = names - {*sys.stdlib_module_names, "rl8x", "__future__"}
    installed = metadata.packages_distributions()
    unknown = {name for name in imported if not NAMES & {canonicalize_name(of) for of in installed.get(name, [name])}}
    assert unknown == BROUGHT & imported


def test_the_sdist_has_what_the_demo_and_a_contributor_need():
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines()]
    included = {word for command, *words in lines if command in ("include", "graft") for word in words}
    assert included >= {"CHANGELOG.md", "CONTRIBUTING.md", "constraints.txt", "examples"}
    assert (ROOT / "examples" / "demo.yaml").exists()


@pytest.mark.parametrize(("target", "installed"), [("demo", ["torch", "."]), ("check", ["torch", ".", ".[dev]"])])
def test_make_installs_what_a_target_needs_and_says_so_before(target, installed):
    """`-B`: as if nothing was there. The last word of each pip command is what it installs."""
    command = ["make", "-nB", target]
    steps = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    slow = [number for number, step in enumerate(steps) if " install " in step or " train " in step]
    assert all(steps[number - 1].startswith("echo ") for number in slow)
    installs = [step for step in steps if " pip install " in step]
    assert [step.split()[-1].strip("'").partition("==")[0] for step in installs] == installed
    assert not any("--quiet" in step or " -q" in step for step in installs)


def test_the_root_exports_every_config_condition_and_tracker():
    configs = {name for name in dir(algorithms) if name.endswith("Config")}
    kinds = {name for name, kind in vars(conditions).items() if isinstance(kind, type)}
    trackers = {name for name in vars(tracking) if name.endswith("Tracker")}
    others = ["Trainer", "Checkpoints", "Study", "compare", "load_algorithm", "distill", "Env", "Parameter", "Policy"]
    assert configs | kinds | trackers | {*others, "Model", "Distribution"} <= {*rl8x.__all__}
    for package, names in ((algorithms, configs), (conditions, kinds), (tracking, trackers)):
        assert all(getattr(rl8x, name) is getattr(package, name) for name in names)
    assert {*rl8x.__all__} == {*dir(rl8x)}
    typed = re.findall(r"^    from \S+ import (\w+) as \1$", Path(rl8x.__file__).read_text(), re.MULTILINE)
    assert {*typed, "__version__"} == {*rl8x.__all__, "load_policy"}  # what type checkers see
    for name in rl8x.__all__:
        getattr(rl8x, name)


def test_nothing_lies_at_the_top_level_but_what_belongs_there():
    if not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = {"CHANGELOG.md", "CONTRIBUTING.md", "MANIFEST.in", "Makefile", "README.md", ".gitignore"}
    files |= {"constraints.txt", "mkdocs.yml", "pyproject.toml"}
    folders = {".ci", "benchmarks", "docs", "examples", "mlruns", "src", "tests"}
    assert {line.partition("/")[0] for line in listed.splitlines()} == files | folders
