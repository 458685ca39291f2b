"""What a check says about a step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal, NamedTuple

from normlab.checks.property import PROPERTIES, Note, Violation

Verdict = Literal["holds", "fails", "undecided"]


class Line(NamedTuple):
    """One line of a report: its text, and its kind (undecided, failure, advice, follows, holds, untestable or
    note).
    """

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
    unjudged: tuple[str, ...] = ()
    """Those of ``untestable`` that apply, but that the budget, or what this step allows, left out."""
    allowed: tuple[str, ...] = ()
    """Properties that may fail: their failures are shown, but do not count."""

    @property
    def ok(self) -> bool:
        """Whether no property fails that is not allowed to."""
        return all(one.property in self.allowed for one in self.failures)

    @property
    def judged(self) -> tuple[str, ...]:
        """The properties that hold or fail."""
        failures = (found for one in self.failures for found in (one, *one.follows))
        return (*self.holds, *dict.fromkeys(one.property for one in failures))

    @property
    def applicable(self) -> tuple[str, ...]:
        """The properties that apply to this step, whether they were judged or not."""
        return (*self.judged, *self.unjudged)

    @property
    def inapplicable(self) -> tuple[str, ...]:
        """Those of ``untestable`` by which nothing is known to be judged."""
        return tuple(name for name in self.untestable if name not in self.unjudged)

    @property
    def verdict(self) -> Verdict:
        """What the report comes to: it is undecided if nothing fails, but less than half of what applies, or
        nothing at all, could be judged.
        """
        if not self.ok:
            return "fails"
        return "holds" if self.judged and len(self.judged) >= len(self.unjudged) else "undecided"

    @property
    def shortfall(self) -> str:
        """How many of the properties that apply could be judged, in words."""
        return f"{len(self.judged)} of {len(self.applicable)} properties that apply could be judged"

    def lines(self) -> Iterator[Line]:
        """Yield the report: failures with what to do and what follows from them, then the rest."""
        if self.verdict == "undecided":
            yield Line("undecided", f"? {self.shortfall}")
            yield Line(
                "advice", "    → the reasons stand below; where the time was over, a larger budget helps"
            )
        for one in self.failures:
            mark = "✗ allowed:" if one.property in self.allowed else "✗"
            yield Line("failure", f"{mark} {one.property} at {one.module or 'the model'}: {one.evidence}")
            if one.advice:
                yield Line("advice", f"    → {one.advice}")
            if one.follows:
                places = (f"{v.property} at {v.module}".removesuffix(" at ") for v in one.follows)
                yield Line("follows", f"    it explains {', '.join(dict.fromkeys(places))}")
        many = "property holds" if len(self.holds) == 1 else "properties hold"
        yield Line("holds", f"✓ {len(self.holds)} {many}: {', '.join(self.holds)}")
        yield from self._reasons("could not be tested, and apply", self.unjudged)
        yield from self._reasons("do not apply, as far as this step shows", self.inapplicable)
        for n in self.notes:
            yield Line("note", f"  note: {n.property} at {n.module or 'the model'}: {n.evidence}")

    def _reasons(self, state: str, names: Collection[str]) -> Iterator[Line]:
        """Yield why properties were not judged, under what is said of all of them."""
        if names:
            yield Line("untestable", f"– {len(names)} {state}:")
        width = max(map(len, self.untestable), default=0)
        for name in names:
            yield Line("untestable", f"    {name:<{width}}  {self.untestable[name]}")

    def __str__(self) -> str:
        return "\n".join(line.text for line in self.lines())

    def to_dict(self) -> dict[str, Any]:
        """The same facts as plain values, with what each property states."""
        tested = [*self.judged, *self.untestable]
        statements = {name: PROPERTIES[name].statement for name in tested if name in PROPERTIES}
        counts = {"judged": len(self.judged), "applicable": len(self.applicable)}
        return {"ok": self.ok, "verdict": self.verdict, **counts, **asdict(self), "statements": statements}

    def page(self, path: str | Path) -> Path:
        """Write the report as a page, one file that needs no network; return the path."""
        from normlab.report.check import check_page

        return check_page(self.to_dict()).write(Path(path))

    def _repr_html_(self) -> str:
        """The failures and counts, for a notebook; what could not be tested is shown on request."""
        shown = [line for line in self.lines() if line.kind != "untestable"]
        bold = ("undecided", "failure", "holds")
        head = "<br>".join(f"<b>{escape(x.text)}</b>" if x.kind in bold else escape(x.text) for x in shown)
        rest = "".join(f"<li><b>{escape(n)}</b>: {escape(why)}</li>" for n, why in self.untestable.items())
        count = f"{len(self.unjudged)} could not be tested, {len(self.inapplicable)} do not apply"
        return f"<p>{head}</p>" + f"<details><summary>{count}</summary><ul>{rest}</ul></details>" * bool(rest)
