import ast
import re
from pathlib import Path

from rl8x import tracking

FOLDER = Path(tracking.__file__).parent
ORDER = [
    name for line in re.findall(r"^    (\w+(?:, \w+)*)", tracking.__doc__, re.MULTILINE) for name in line.split(", ")
]


def test_each_file_imports_only_those_after_it_in_the_list():
    assert sorted(ORDER) == sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
    for at, name in enumerate(ORDER):
        for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("rl8x.tracking"):
                home = node.module.removeprefix("rl8x.tracking").lstrip(".")
                for other in [home] if home else [alias.name for alias in node.names]:
                    assert ORDER.index(other) > at, f"{name} imports {other}"
