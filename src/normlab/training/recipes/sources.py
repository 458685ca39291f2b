"""Read the docstring of a part: its equation and its source."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normlab.training.recipes.grammar import RecipePart

CITATION = re.compile(
    r"[A-Z][\w'-]+(?: and [A-Z][\w'-]+| et al\.| Team)? \d{4}[^()]*\((?:arXiv [\d.]+|[A-Z]{3,} \d{4})\)"
)
"""``Wang et al. 2022, Figure 2 (arXiv 2203.00555)``, or a conference with its year in the brackets; an older
source may come before one on arXiv.
"""


def summary(part: RecipePart) -> tuple[str, str]:
    """Return equation and source of a part: the first paragraph of its docstring, and the citation after it.

    A citation reads ``Author YEAR, Section (arXiv id)``; without one, the source is empty.
    """
    equation, rest = paragraphs(part.source)
    citation = CITATION.search(rest)
    return equation.rstrip("."), citation.group() if citation else ""


def paragraphs(source: object) -> tuple[str, str]:
    """Return the first paragraph of a docstring and everything after it, without line breaks."""
    first, _, rest = inspect.cleandoc(source.__doc__ or "").partition("\n\n")
    return " ".join(first.split()), " ".join(rest.split())
