"""ApX Machine Learning 2025, course page on Pre-LN against Post-LN."""

from __future__ import annotations

from typing import Final

from normlab.papers.cells import declare

BLOCKS: Final = declare("apx.blocks", "model_parts.wrapped_blocks", settings={"shape": (32, 10, 512)})
SENTENCES: Final = declare("apx.claims")
"""Sentences, which the findings A1 to A4 answer."""
