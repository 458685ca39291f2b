"""Write the sections of docs/check.md that explain the properties.

    python tools/properties.py

What stands below a property's heading comes from its docstring and from src/normlab/checks/properties.toml.
Headings, and everything else, are the page's own.
"""

from __future__ import annotations

import re
from pathlib import Path

from normlab.checks.explanations import explanations

PAGE = Path(__file__).resolve().parents[1] / "docs" / "check.md"
COMMAND = "python tools/properties.py"
SECTION = re.compile(r"^### (\w+)\n.*?(?=^##|\Z)", re.MULTILINE | re.DOTALL)
"""A property's section: its heading, and all up to the next one."""


def rewritten(page: str) -> str:
    """The page with the sections that the properties' texts make."""
    known = explanations()

    def section(found: re.Match[str]) -> str:
        return f"### {found[1]}\n\n{known[found[1]].markdown()}\n\n"

    return SECTION.sub(section, page).rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
