"""Load a script, such as an example, as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def load_script(path: Path) -> Any:
    """Run a script's top level and return it as a module; what stands under `__main__` does not run."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there for what their annotations name
    spec.loader.exec_module(module)
    return module
