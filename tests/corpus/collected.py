"""Every case of the corpus: importing its modules adds them."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from . import faults, sound
from .case import CASES

for package in (faults, sound):
    for module in iter_modules(package.__path__):
        import_module(f"{package.__name__}.{module.name}")

__all__ = ["CASES"]
