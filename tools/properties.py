"""Write the sections of docs/check.md that explain the properties.

    python tools/properties.py

What stands below a property's heading comes from its docstring and from src/normlab/checks/properties.toml. A
property that has no heading yet gets one behind the property that is reported before it; the author may move
it. Everything else is the page's own.
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
    texts = explanations()
    headings = set(SECTION.findall(page))
    previous = ""
    for name in texts:
        if name not in headings:
            page = _with_heading(page, name, previous)
        previous = name

    def section(found: re.Match[str]) -> str:
        return f"### {found[1]}\n\n{texts[found[1]].markdown()}\n\n"

    return SECTION.sub(section, page).rstrip("\n") + "\n"


def _with_heading(page: str, name: str, previous: str) -> str:
    """The page with an empty section for a property behind that of another, or before all others."""
    sections = {section[1]: section for section in SECTION.finditer(page)}
    place = sections[previous].end() if previous else next(iter(sections.values())).start()
    return f"{page[:place]}### {name}\n\n{page[place:]}"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
