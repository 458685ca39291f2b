"""All cases of this list: importing its modules adds them."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from corpus import public2

from .case import CASES

for module in iter_modules(public2.__path__):
    if module.name.startswith(("faults_", "sound_")):
        import_module(f"{public2.__name__}.{module.name}")

__all__ = ["CASES"]
