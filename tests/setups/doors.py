"""What tests of scripts share: their folder, and what a folder of files holds."""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).with_name("scripts")


def script(name: str) -> str:
    """The path of one of the scripts."""
    return str(SCRIPTS / f"{name}.py")


def imported(name: str, monkeypatch) -> ModuleType:
    """One of the scripts as a module."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for other in ("models", name):
        monkeypatch.delitem(sys.modules, other, raising=False)
    return importlib.import_module(name)


def hashes(folder: Path) -> dict[str, str]:
    """By path, the digest of each file in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def with_checkpoints(folder: Path) -> Path:
    """A folder as an earlier training has left it."""
    for name in ("latest.pt", "opened.pt", "best.pt", "log.txt", "step-7.safetensors", "step-8.safetensors"):
        (folder / name).write_text(f"the {name} of an earlier training\n")
    (folder / "older").mkdir()
    (folder / "older" / "step-1.pt").write_text("older still\n")
    return folder
