"""Faults, each beside its sound twin if it has one: one module for each property that must name them."""

from __future__ import annotations
