"""All cases of this list: importing its modules adds them."""

from __future__ import annotations

from importlib import import_module

from corpus.public3.case import CASES

for module in ("faults_a1", "faults_a2", "sound_a", "faults_b1", "faults_b2", "sound_b"):
    import_module(f"corpus.public3.{module}")

__all__ = ["CASES"]
