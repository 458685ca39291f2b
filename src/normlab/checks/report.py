"""What a check says about a step, as an object: for the terminal, as data, as a page, and in a notebook."""

from __future__ import annotations

from collections import defaultdict
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
class UnreachedLoss:
    """One of the losses that are added up, which could not be judged by itself."""

    number: int
    """Its place among them, from 1."""
    reason: str


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
    unreached_losses: tuple[UnreachedLoss, ...] = ()
    """Those of the losses that a step adds up of which only the sum was checked."""

    @property
    def ok(self) -> bool:
        """Whether no property fails that is not allowed to."""
        return all(failure.property in self.allowed for failure in self.failures)

    @property
    def judged(self) -> tuple[str, ...]:
        """The properties that hold or fail."""
        failed: list[str] = []
        for failure in self.failures:
            failed += [failure.property, *(consequence.property for consequence in failure.follows)]
        return (*self.holds, *dict.fromkeys(failed))

    @property
    def applicable(self) -> tuple[str, ...]:
        """The properties that apply to this step, whether they were judged or not."""
        return (*self.judged, *self.unjudged)

    @property
    def inapplicable(self) -> tuple[str, ...]:
        """Those of ``untestable`` that do not apply, as far as this step shows."""
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
        for failure in self.failures:
            yield from self._failure(failure)
        many = "property holds" if len(self.holds) == 1 else "properties hold"
        yield Line("holds", f"✓ {len(self.holds)} {many}: {', '.join(self.holds)}")
        yield from self._reasons("could not be tested, and apply", self.unjudged)
        yield from self._reasons("do not apply, as far as this step shows", self.inapplicable)
        for loss in self.unreached_losses:
            yield Line("untestable", f"– loss {loss.number} of those that are added up: {loss.reason}")
        for note in self.notes:
            yield Line("note", f"  note: {note.property} at {note.module or 'the model'}: {note.evidence}")

    def _failure(self, failure: Violation) -> Iterator[Line]:
        """Yield a failure, with what to do and what follows from it."""
        mark = "✗ allowed:" if failure.property in self.allowed else "✗"
        place = failure.module or "the model"
        yield Line("failure", f"{mark} {failure.property} at {place}: {failure.evidence}")
        if failure.advice:
            yield Line("advice", f"    → {failure.advice}")
        if failure.follows:
            places = (f"{v.property} at {v.module}".removesuffix(" at ") for v in failure.follows)
            yield Line("follows", f"    it explains {', '.join(dict.fromkeys(places))}")

    def _reasons(self, state: str, names: Collection[str]) -> Iterator[Line]:
        """Yield why properties were not judged, each reason once, under what is said of all of them."""
        if names:
            yield Line("untestable", f"– {len(names)} {state}:")
        names_by_reason = defaultdict[str, list[str]](list)
        for name in names:
            names_by_reason[self.untestable[name]].append(name)
        width = max(map(len, self.untestable), default=0)
        for reason, sharing_it in names_by_reason.items():
            label = ", ".join(sharing_it)
            if len(label) > width:
                yield Line("untestable", f"    {label}")
                label = ""
            yield Line("untestable", f"    {label:<{width}}  {reason}")

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
        shown: list[str] = []
        for line in self.lines():
            text = escape(line.text)
            if line.kind in ("undecided", "failure", "holds"):
                shown.append(f"<b>{text}</b>")
            elif line.kind != "untestable":
                shown.append(text)
        html = f"<p>{'<br>'.join(shown)}</p>"
        if not self.untestable:
            return html
        count = f"{len(self.unjudged)} could not be tested, {len(self.inapplicable)} do not apply"
        reasons = (f"<li><b>{escape(n)}</b>: {escape(why)}</li>" for n, why in self.untestable.items())
        return f"{html}<details><summary>{count}</summary><ul>{''.join(reasons)}</ul></details>"
