"""All cases of this list: importing its modules adds them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from corpus.public4.case import CASES

for module in iter_modules([str(Path(__file__).parent)]):
    if module.name.startswith(("faults_", "sound_")):
        import_module(f"corpus.public4.{module.name}")

__all__ = ["CASES"]
