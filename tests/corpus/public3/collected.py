"""All cases of this list, those of its first half first: importing their modules adds them."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import Final

from corpus.public3 import case_a, case_b

for module in ("faults_a1", "faults_a2", "faults_b1", "faults_b2", "sound_a", "sound_b"):
    import_module(f"corpus.public3.{module}")

CASES: Final = MappingProxyType({**case_a.CASES, **case_b.CASES})
"""Every case by its name."""
