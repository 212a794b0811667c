"""Imports point strictly down the layers of docs/architecture.md; only tracking/ imports MLflow; private is private."""

import ast
import functools
import graphlib
import json
import re
import subprocess
import sys
from pathlib import Path

from tests.pages import ROOT

from rl8x import tracking

PACKAGE = ROOT / "src" / "rl8x"

# The parts of each layer, as the page has them; all layers below are open to a part, of its own those beside it here.
_ROWS = re.findall(r"^\| L\d \| (.*?) \|", (ROOT / "docs" / "architecture.md").read_text(), flags=re.MULTILINE)
LEVEL = {part: level for level, row in enumerate(_ROWS) for part in re.findall(r"`(\w+)`", row)}
BESIDE: dict[str, set[str]] = {
    "disk": {"output"},
    "names": {"output"},
    "plain": {"output"},
    "trusted": {"disk"},
    "importing": {"names", "trusted"},
    "distributed": {"local_sockets"},
    "nn": {"models"},
    "distributions": {"models"},
    "envs": {"randomization"},
    "policy": {"portable", "trials"},
    "q_values": {"policy"},
    "export": {"policy", "portable"},
    "replay": {"policy"},
    "rollouts": {"policy"},
    "video": {"policy", "rollouts"},
    "config": {"conditions", "tracking"},
    "checkpoint": {"config", "tracking"},
    "trainers": {"checkpoint", "conditions", "config", "tracking"},
    "__main__": {"cli"},
}


def name_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
# Of the root only names are imported, which it loads when they are first used.
INNER = {name: path for name, path in MODULES.items() if name != "rl8x"}


def part_of(module):
    return module.split(".")[1]


@functools.cache
def imported(path):
    """Return what a file imports, imports for type checking and inside functions included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules_imported(path):
    """Return the modules of rl8x, but the root, that a file imports, or from which it imports names."""
    names = {name for name in imported(path) if name.startswith("rl8x.")}
    return {name if name in MODULES else name.rpartition(".")[0] for name in names} - {name_of(path), "rl8x"}


def test_imports_point_down_and_every_edge_inside_a_layer_is_used():
    assert {part_of(module) for module in INNER} == LEVEL.keys()
    used = {part: set() for part in LEVEL}
    for module, path in INNER.items():
        part = part_of(module)
        for target in modules_imported(path):
            other = part_of(target)
            used[part].add(other)
            allowed = other == part or LEVEL[other] < LEVEL[part] or other in BESIDE.get(part, ())
            assert allowed, f"{module} imports {target}"
    assert {part: beside - used[part] for part, beside in BESIDE.items() if beside - used[part]} == {}


def test_no_file_imports_itself_through_others():
    """Else the error that is raised names the circle."""
    graphlib.TopologicalSorter({module: modules_imported(path) for module, path in INNER.items()}).prepare()


def test_mlflow_is_imported_in_tracking_alone():
    named = {module for module, path in INNER.items() if any(re.match(r"mlflow\b", name) for name in imported(path))}
    assert {part_of(module) for module in named} == {"tracking"}, named


# Public names of others that begin with an underscore.
PUBLIC = ["_replace", "_exit", "_getframe", "_current_frames"]


def test_what_is_private_of_another_is_used_in_two_files_alone():
    """Each says of a name of MLflow's or torch's what happens where it is gone."""
    rules = ["--isolated", "--preview", "--select=SLF001,PLC2701", f"--config=lint.flake8-self.ignore-names={PUBLIC}"]
    command = [sys.executable, "-m", "ruff", "check", "--output-format=json", *rules, str(PACKAGE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = {Path(each["filename"]) for each in json.loads(done.stdout)}
    # What it leaves out: imports of modules, names in texts, and rl8x's own.
    more = re.compile(
        r"torch\.(\w+\.)*_[a-zA-Z]|attr\(torch[\w.]*, \"_|^ *from rl8x\S* import (.*\W)?_[a-z]", re.MULTILINE
    )
    found |= {path for path in MODULES.values() if more.search(path.read_text())}
    assert found == {PACKAGE / "execution" / "private.py", PACKAGE / "tracking" / "private.py"}


def test_what_is_loaded_when():
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


def test_each_file_of_tracking_imports_only_those_after_it_in_its_list():
    listed = re.findall(r"^    (\w+(?:, \w+)*)", tracking.__doc__ or "", re.MULTILINE)
    order = [f"rl8x.tracking.{name}" for line in listed for name in line.split(", ")]
    assert sorted(order) == [module for module in MODULES if module.startswith("rl8x.tracking.")]
    for at, module in enumerate(order):
        own = {target for target in modules_imported(MODULES[module]) if target.startswith("rl8x.tracking")}
        assert own <= {*order[at + 1 :]}, f"{module} imports {own}"
