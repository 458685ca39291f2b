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

FILE: Final = "properties.toml"


@dataclass(frozen=True)
class Explanation:
    """One property, explained; texts are Markdown."""

    name: str
    statement: str
    formulation: str = ""
    """What holds, as an equation."""
    test: str = ""
    """How it is tested."""
    cannot_see: str = ""
    advice: str = ""
    """What to do if it fails."""
    bug: str = ""
    """A public thread about a violation, as ``owner/repository#number``."""
    paper: str = ""
    """If no thread is known: who published it, when, and arXiv's number."""

    @property
    def source(self) -> str:
        """The address of the public thread or paper; empty if neither is given."""
        if self.bug:
            repository, number = self.bug.split("#")
            return f"https://github.com/{repository}/issues/{number}"
        if not self.paper:
            return ""
        return f"https://arxiv.org/abs/{self.paper.rpartition(' ')[2]}"

    def lines(self, width: int = 100) -> list[str]:
        """The explanation as plain text."""
        cited = f"{self.bug or self.paper}: {self.source}" if self.source else ""
        parts = {
            "as an equation": self.formulation,
            "how it is tested": self.test,
            "a public bug" if self.bug else "a paper": cited,
            "what it cannot see": self.cannot_see,
            "what to do": self.advice,
        }
        lines = [self.name, *textwrap.wrap(self.statement, width)]
        for title, text in parts.items():
            if not text:  # of a property from outside the package
                continue
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
    """The explanations of properties by name, causes before consequences, and those from outside last.

    Of a property from outside the package there is its docstring: the statement, then how it is tested.
    """
    from normlab.checks.check import properties  # with torch, which the names alone do not need

    texts = _texts()
    known = {}
    for tested in properties():
        parts = texts.get(tested.name) or {"test": tested.method}
        known[tested.name] = Explanation(tested.name, tested.statement, **parts)
    return known


@cache
def _texts() -> dict[str, dict[str, str]]:
    content = tomllib.loads(files("normlab.checks").joinpath(FILE).read_text(encoding="utf-8"))
    return {name: {part: text.strip() for part, text in parts.items()} for name, parts in content.items()}


def _filled(paragraph: str, width: int) -> str:
    return textwrap.fill(paragraph, width, break_long_words=False, break_on_hyphens=False)
