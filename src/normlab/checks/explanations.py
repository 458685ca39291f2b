"""Explain each property: its equation, how it is tested, a public bug, what it misses, and what to do.

The texts are in properties.toml. ``normlab explain`` prints them, and docs/check.md is written from them.
"""

from __future__ import annotations

import textwrap
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

from normlab.checks.property import ORDER

FILE: Final = "properties.toml"


@dataclass(frozen=True)
class Explanation:
    """One property, explained; texts are Markdown."""

    name: str
    statement: str
    formulation: str
    """What holds, as an equation."""
    test: str
    """How it is tested."""
    cannot_see: str
    advice: str
    """What to do if it fails."""
    bug: str = ""
    """A public thread about a violation, as ``owner/repository#number``."""
    paper: str = ""
    """If no thread is known: who published it, when, and arXiv's number."""

    @property
    def source(self) -> str:
        """The address of the public thread or paper."""
        if self.bug:
            repository, number = self.bug.split("#")
            return f"https://github.com/{repository}/issues/{number}"
        return f"https://arxiv.org/abs/{self.paper.rpartition(' ')[2]}"

    def lines(self, width: int = 100) -> list[str]:
        """The explanation as plain text."""
        cited = f"{self.bug or self.paper}: {self.source}"
        parts = {
            "as an equation": self.formulation,
            "how it is tested": self.test,
            "a public bug" if self.bug else "a paper": cited,
            "what it cannot see": self.cannot_see,
            "what to do": self.advice,
        }
        lines = [self.name, *textwrap.wrap(self.statement, width)]
        for title, text in parts.items():
            lines += ["", title]
            for paragraph in text.split("\n\n"):
                lines += textwrap.indent(_filled(paragraph, width), "  ").splitlines()
        return lines

    def markdown(self, width: int = 132) -> str:
        """The section of this property in docs/check.md, without its heading."""
        source = f"{'Public bug' if self.bug else 'Paper'}: [{self.bug or self.paper}]({self.source})."
        paragraphs = [
            self.statement.replace("``", "`"),
            f"```text\n{self.formulation}\n```",
            *self.test.split("\n\n"),
            source,
            f"Cannot see: {self.cannot_see}",
            f"What to do: {self.advice}",
        ]
        # code stays as it is
        filled = (text if text.startswith("```") else _filled(text, width) for text in paragraphs)
        return "\n\n".join(filled)


def explanations() -> dict[str, Explanation]:
    """The explanations of normlab's properties by name, causes before consequences."""
    from normlab.checks.check import properties  # with torch, which the names alone do not need

    texts = _texts()
    statements = {tested.name: tested.statement for tested in properties()}
    return {name: Explanation(name, statements[name], **texts[name]) for name in ORDER}


@cache
def _texts() -> dict[str, dict[str, str]]:
    content = tomllib.loads(files("normlab.checks").joinpath(FILE).read_text(encoding="utf-8"))
    return {name: {part: text.strip() for part, text in parts.items()} for name, parts in content.items()}


def _filled(paragraph: str, width: int) -> str:
    return textwrap.fill(paragraph, width, break_long_words=False, break_on_hyphens=False)
