"""What a check says about a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from normlab.checks.property import PROPERTIES, Note, Violation


class Line(NamedTuple):
    """One line of a report: its kind (failure, advice, follows, holds, untestable or note) and its text."""

    kind: str
    text: str


@dataclass(frozen=True)
class Report:
    """A tested training step: what fails, causes first; what holds; what could not be tested, and why."""

    model: str
    failures: tuple[Violation, ...]
    notes: tuple[Note, ...]
    holds: tuple[str, ...]
    untestable: Mapping[str, str]
    seconds: Mapping[str, float] = field(repr=False, default_factory=dict)
    facts: Mapping[str, str] = field(repr=False, default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether no property fails."""
        return not self.failures

    def lines(self) -> Iterator[Line]:
        """Yield the report: failures with what to do and what follows from them, then the rest."""
        for one in self.failures:
            yield Line("failure", f"✗ {one.property} at {one.module or 'the model'}: {one.evidence}")
            if one.advice:
                yield Line("advice", f"    → {one.advice}")
            if one.follows:
                places = (f"{v.property} at {v.module}".removesuffix(" at ") for v in one.follows)
                yield Line("follows", f"    it explains {', '.join(dict.fromkeys(places))}")
        many = "property holds" if len(self.holds) == 1 else "properties hold"
        yield Line("holds", f"✓ {len(self.holds)} {many}: {', '.join(self.holds)}")
        if self.untestable:
            yield Line("untestable", f"– {len(self.untestable)} could not be tested:")
        width = max(map(len, self.untestable), default=0)
        for name, why in self.untestable.items():
            yield Line("untestable", f"    {name:<{width}}  {why}")
        for n in self.notes:
            yield Line("note", f"  note: {n.property} at {n.module or 'the model'}: {n.evidence}")

    def __str__(self) -> str:
        return "\n".join(line.text for line in self.lines())

    def to_dict(self) -> dict[str, Any]:
        """The same facts as plain values, with what each property states."""
        tested = [*self.holds, *self.untestable, *(v.property for v in self.failures)]
        statements = {name: PROPERTIES[name].statement for name in tested if name in PROPERTIES}
        return {"ok": self.ok, **asdict(self), "statements": statements}

    def page(self, path: str | Path) -> Path:
        """Write the report as a page, one file that needs no network; return the path."""
        from normlab.report.check import check_page

        return check_page(self.to_dict()).write(Path(path))

    def _repr_html_(self) -> str:
        """The failures and counts, for a notebook; what could not be tested is shown on request."""
        shown = [line for line in self.lines() if line.kind != "untestable"]
        bold = ("failure", "holds")
        head = "<br>".join(f"<b>{escape(x.text)}</b>" if x.kind in bold else escape(x.text) for x in shown)
        rest = "".join(f"<li><b>{escape(n)}</b>: {escape(why)}</li>" for n, why in self.untestable.items())
        count = f"{len(self.untestable)} could not be tested"
        return f"<p>{head}</p>" + f"<details><summary>{count}</summary><ul>{rest}</ul></details>" * bool(rest)
