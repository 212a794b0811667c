"""Imports point down the layers of docs/architecture.md; MLflow is imported in tracking/ alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "rl8x"
LAYERS = [
    {"keys", "names", "spaces", "trees", "importing", "plain_yaml", "output", "disk", "_version"},
    {"execution"},
    {"envs", "models", "nn", "distributions", "functional", "schedules", "randomization", "normalization"},
    {"policy", "rollouts", "video"},
    {"algorithms"},
    {"trainers", "conditions", "tracking", "checkpoint"},
    {"cli", "config"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE or path.name != "__init__.py"]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    part = part_of(path)
    assert part in LEVEL, f"{part} has no layer"
    for name in imports(path):
        if name.startswith("rl8x."):
            target = name.split(".")[1]
            assert LEVEL[target] <= LEVEL[part], f"{path.name} ({part}) imports {name}"
        if name.split(".")[0] == "mlflow":
            assert part == "tracking", f"{path.name} imports {name}"


def test_importing_the_package_loads_neither_mlflow_nor_torch() -> None:
    code = "import sys, rl8x; print('mlflow' in sys.modules, 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == [
        "False",
        "False",
    ]


def test_making_a_trainer_does_not_load_mlflow() -> None:
    code = (
        "import sys, rl8x; from rl8x.envs import CartPole;"
        "rl8x.Trainer(rl8x.PPOConfig(num_envs=4, horizon=4, device='cpu').build(CartPole));"
        "print('mlflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
