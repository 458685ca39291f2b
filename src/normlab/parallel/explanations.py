"""What there is to know about each property of ranks, as about those of a single process."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Final

from normlab.checks.explanations import Explanation
from normlab.parallel.properties import PROPERTIES

FILE: Final = "properties.toml"


@cache
def ranks_explanations() -> dict[str, Explanation]:
    """The explanations of the properties of ranks by name, causes before consequences."""
    content = tomllib.loads(files("normlab.parallel").joinpath(FILE).read_text(encoding="utf-8"))
    explanations: dict[str, Explanation] = {}
    for name, property_ in PROPERTIES.items():
        parts = {part: text.strip() for part, text in content[name].items()}
        explanations[name] = Explanation(name, property_.statement, **parts)
    return explanations
