"""Imports point strictly down the layers of docs/architecture.md; only tracking/ imports MLflow; private is private."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from rl8x import tracking

PACKAGE = Path(__file__).parent.parent / "src" / "rl8x"

# Each part with the others of its layer that it may import; all layers below are open to it.
LAYERS: list[dict[str, set[str]]] = [
    {
        "keys": set(),
        "names": set(),
        "trees": set(),
        "output": set(),
        "disk": set(),
        "drawing": set(),
        "plain": set(),
        "spaces": set(),
        "trusted": {"disk"},
        "importing": {"trusted"},
        "local_sockets": set(),
        "processes": set(),
        "distributed": {"local_sockets"},
    },
    {"execution": set()},
    {
        "functional": set(),
        "schedules": set(),
        "randomization": set(),
        "models": set(),
        "nn": {"models"},
        "distributions": {"models"},
        "envs": {"randomization"},
    },
    {
        "portable": set(),
        "trials": set(),
        "policy": {"portable", "trials"},
        "q_values": {"policy"},
        "export": {"policy", "portable"},
        "replay": {"policy"},
        "rollouts": {"policy"},
        "video": {"policy", "rollouts"},
    },
    {"algorithms": set()},
    {
        "tracking": set(),
        "conditions": set(),
        "config": {"conditions", "tracking"},
        "checkpoint": {"config", "tracking"},
        "trainers": {"checkpoint", "conditions", "config", "tracking"},
    },
    {"studies": set()},
    {"cli": set(), "__main__": {"cli"}},
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
BESIDE = {part: beside for parts in LAYERS for part, beside in parts.items()}


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
# Of the root only names are imported, which it loads when they are first used.
INNER = {name: path for name, path in MODULES.items() if name != "rl8x"}


def part_of(module: str) -> str:
    return module.split(".")[1]


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """Return what a file imports, imports for type checking and inside functions included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def modules_imported(path: Path) -> set[str]:
    """Return the modules of rl8x that a file imports, or from which it imports names."""
    found = set()
    for name in imported(path):
        if name.startswith("rl8x."):
            found.add(name if name in MODULES else name.rpartition(".")[0])
    return found - {name_of(path)}


def test_imports_point_down() -> None:
    assert {part_of(module) for module in INNER} <= LEVEL.keys(), "a part has no layer"
    for module, path in INNER.items():
        part = part_of(module)
        for target in modules_imported(path) - {"rl8x"}:
            other = part_of(target)
            allowed = other == part or LEVEL[other] < LEVEL[part] or other in BESIDE[part]
            assert allowed, f"{module} imports {target}"


def test_every_edge_inside_a_layer_is_used() -> None:
    used: dict[str, set[str]] = {part: set() for part in LEVEL}
    for module, path in INNER.items():
        used[part_of(module)] |= {part_of(target) for target in modules_imported(path) - {"rl8x"}}
    for part, beside in BESIDE.items():
        assert beside <= used[part], f"{part} does not import {beside - used[part]}"


def test_no_file_imports_itself_through_others() -> None:
    """Else the error that is raised names the circle."""
    graphlib.TopologicalSorter({module: modules_imported(path) for module, path in INNER.items()}).prepare()


def test_each_file_of_tracking_imports_only_those_after_it_in_its_list() -> None:
    listed = re.findall(r"^    (\w+(?:, \w+)*)", tracking.__doc__ or "", re.MULTILINE)
    order = [f"rl8x.tracking.{name}" for line in listed for name in line.split(", ")]
    assert sorted(order) == [module for module in MODULES if module.startswith("rl8x.tracking.")]
    for at, module in enumerate(order):
        own = {target for target in modules_imported(MODULES[module]) if target.startswith("rl8x.tracking")}
        assert own <= {*order[at + 1 :]}, f"{module} imports {own}"


def test_mlflow_is_imported_in_tracking_alone() -> None:
    named = {module for module, path in INNER.items() if any(re.match(r"mlflow\b", name) for name in imported(path))}
    assert {part_of(module) for module in named} == {"tracking"}, named


# Public names of others that begin with an underscore.
PUBLIC = re.compile(r"^(_replace|_exit|_getframe|_current_frames)$")
# Private ones of others, without which a thing could not be done, each with its file.
TAKEN = {
    "_artifact_repos_cache": "tracking/private.py",
    "_engine_map": "tracking/private.py",
    "_initialize_tables": "tracking/private.py",  # where it is gone, MLflow makes the tables on the disk
}


# The one file that uses private names of torch, and says of each what happens where it is gone.
OF_TORCH = "execution/private.py"


def private_accesses(tree: ast.AST) -> Iterable[tuple[int, str]]:
    """Yield where a private name of something other than `self`, `cls` or `super()` is used."""
    for node in ast.walk(tree):
        yield from private_to_torch(node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rl8x"):
            yield from ((node.lineno, alias.name) for alias in node.names if re.match(r"_[^_]", alias.name))
        if not isinstance(node, ast.Attribute) or not re.match(r"_[^_]", node.attr):
            continue
        owner = ast.unparse(node.value)
        if owner not in ("self", "cls", "super()") and not PUBLIC.match(node.attr):
            yield node.lineno, node.attr


def private_to_torch(node: ast.AST) -> Iterable[tuple[int, str]]:
    """Yield private parts and names of torch that are imported, named in a text, or asked for or given by name."""
    paths = list[str]()
    if isinstance(node, ast.Import):
        paths = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        paths = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
        paths = [node.value]
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
        paths = [f"{ast.unparse(node.args[0])}.{getattr(node.args[1], 'value', '')}"]
    yield from ((node.lineno, path) for path in paths if re.match(r"torch\.(.*\.)?_[^_]", path))


def test_nothing_private_of_another_is_used() -> None:
    for path in MODULES.values():
        for line, name in private_accesses(ast.parse(path.read_text())):
            home = OF_TORCH if path.match(OF_TORCH) else TAKEN.get(name)
            assert home is not None and path.match(home), f"{path}:{line} uses {name}"  # noqa: PT018


def test_what_is_loaded_when() -> None:
    """Neither mlflow nor torch by the package, no mlflow by a trainer, no compiler by an eager training or a trace."""
    code = (
        "import sys, rl8x\n"
        "def loaded(*names): print([name for name in names if name in sys.modules])\n"
        "loaded('mlflow', 'torch')\n"
        "from rl8x.envs import CartPole\n"
        "config = rl8x.PPOConfig(num_envs=4, horizon=4, device='cpu')\n"
        "rl8x.Trainer(config.build(CartPole))\n"
        "loaded('mlflow')\n"
        "trainer = rl8x.Trainer(config.build(CartPole), tracker=rl8x.NullTracker(), checkpoints=False)\n"
        "trainer.step(); trainer.eval()\n"
        "import torch; from rl8x.nn import MLP; from rl8x.execution.traces import trace\n"
        "MLP([3, 256, 256])(torch.randn(4096, 3)).sum().backward()\n"
        "trace(lambda x: [x + 1], [torch.ones(1)])\n"
        "loaded('torch._dynamo', 'torch._inductor', 'sympy')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n[]\n[]\n"
