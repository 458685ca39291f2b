"""Scripts of ``benchmarks/`` as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def script(name: str) -> ModuleType:
    """``benchmarks/<name>.py``, or the package ``benchmarks/<name>/``."""
    folder = Path(__file__).resolve().parents[1] / "benchmarks"
    package = folder / name / "__init__.py"
    path = package if package.exists() else folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    before = list(sys.path)
    sys.path.insert(0, str(path.parent))  # as Python has it for a script that is run
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before  # what scripts add as well: their neighbours have names of packages of the tests
    return module
