"""The page of a check: what fails, with what to do, and what holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from normlab.base.units import count, duration
from normlab.report.page import Block, Cell, Code, Details, Page, PageTable, Section, Text, breakable, capital
from normlab.report.results.check import CheckResult, Failure, Finding


def check_page(report: Mapping[str, Any]) -> Page:
    """The page of ``Report.to_dict()``, to which ``title`` and ``command`` may be added."""
    result = CheckResult.of(report)
    first = next((failure for failure in result.failures if not result.is_allowed(failure)), None)
    counts = _counts(result)
    return Page(
        title=result.title or f"Check of {result.model}",
        headline=f"{_name(first)} fails at {_place(first)}" if first else _without_failure(result),
        facts=[f"{name} {value}" for name, value in result.facts.items()],
        lead=f"{capital(first.evidence)}. {counts}" if first else counts,
        blocks=list(_sections(result)),
    )


def _without_failure(result: CheckResult) -> str:
    """The headline if no failure counts."""
    if result.verdict == "undecided":
        return f"Too little could be judged: {result.judged} of {result.applicable} properties"
    return "Nothing fails"


def _counts(result: CheckResult) -> str:
    """How many properties hold and how many were not judged, in a sentence."""
    unjudged, inapplicable = _not_judged(result)
    hold = "property holds" if len(result.holds) == 1 else "properties hold"
    sentence = (
        f"{len(result.holds)} {hold}, {len(unjudged)} could not be tested, {len(inapplicable)} do not apply."
    )
    if result.failures and all(map(result.is_allowed, result.failures)):
        sentence += " Everything that fails is allowed to fail."
    return sentence


def _sections(result: CheckResult) -> Iterator[Section]:
    if result.failures:
        blocks = [block for failure in result.failures for block in _failure(result, failure)]
        yield Section("What fails", blocks, "failures")
    if result.notes:
        caption = "Unusual, but perhaps intended: nothing here fails a check."
        yield Section("Notes", [_findings(result.notes, caption)], "notes")
    unjudged, inapplicable = _not_judged(result)
    not_tested: list[Block] = [_reasons(result, unjudged)] if unjudged else []
    not_tested += [
        Text(f"Loss {loss.number} of those that are added up: {loss.reason}.")
        for loss in result.unreached_losses
    ]
    if not_tested:
        yield Section("What could not be tested", not_tested, "untestable")
    yield Section("What holds", [_holding(result)], "holds")
    if inapplicable:
        yield Section("What does not apply", [_reasons(result, inapplicable)], "inapplicable")
    if result.command:
        yield Section("How it was made", [Code(result.command)], "how")


def _not_judged(result: CheckResult) -> tuple[list[str], list[str]]:
    """The properties that were not judged: those that apply, and those that do not, as far as is known."""
    unjudged, inapplicable = list[str](), list[str]()
    for name in result.untestable:
        group = unjudged if name in result.applying else inapplicable
        group.append(name)
    return unjudged, inapplicable


def _reasons(result: CheckResult, names: Sequence[str]) -> PageTable:
    """Why properties were not judged."""
    rows = [
        [Cell(breakable(name), result.statements.get(name, "")), Cell(result.untestable[name])]
        for name in names
    ]
    return PageTable(("property", "why"), rows, text_columns=2)


def _holding(result: CheckResult) -> Block:
    """What holds, with the time that each property took."""
    if not result.holds:
        return Text("Nothing of what could be tested.")
    rows = [
        [
            Cell(breakable(name)),
            Cell(result.statements.get(name, "")),
            Cell(duration(result.seconds.get(name, 0.0))),
        ]
        for name in result.holds
    ]
    return PageTable(("property", "what it states", "time"), rows, text_columns=2)


def _failure(result: CheckResult, failure: Failure) -> Iterator[Block]:
    """A failure with its evidence, what should hold, what to do, and the failures that it explains."""
    subject = f"{_name(failure)} fails at {_place(failure)}"
    if result.is_allowed(failure):
        yield Text(f"{subject}, which is allowed: {failure.evidence}.")
    else:
        yield Text(f"{subject}: {failure.evidence}.", "alarm")
    statement = result.statements.get(failure.property)
    if statement:
        yield Text(f"What should hold: {statement}", "note")
    if failure.advice:
        yield Text(f"What to do: {failure.advice}.")
    if failure.follows:
        number = count(len(failure.follows), "further failure")
        yield Details(f"What it explains: {number}", [_findings(failure.follows)])


def _findings(findings: Sequence[Finding], caption: str = "") -> PageTable:
    rows = [
        [Cell(breakable(finding.property)), Cell(_place(finding)), Cell(finding.evidence)]
        for finding in findings
    ]
    return PageTable(("property", "place", "seen"), rows, caption, text_columns=3)


def _name(finding: Finding) -> str:
    return capital(finding.property.replace("_", " "))


def _place(finding: Finding) -> str:
    return finding.module or "the model"
