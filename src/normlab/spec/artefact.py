"""Artefacts: what a paper shows, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Artefact:
    """One table, figure, statement or piece of code of a paper, and what it asserts."""

    id: str
    """``<paper's key>.<name>``, say ``liu2020.parameters``."""
    paper: str
    """Authors and year, section (arXiv id), or the publisher of a page."""
    shows: str
    """What is measured or written there, in one sentence."""
    published: Mapping[str, float | str]
    """Name to number, or to formula, as they were printed."""
    claim: str
    """What a reproduction decides."""
