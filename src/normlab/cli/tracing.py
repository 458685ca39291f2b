"""What ``normlab check --trace`` prints: the facts, copies, passes and comparisons behind one verdict."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final

from normlab.base.units import count
from normlab.trace.trail import Change, Entry, PassMade, RunsCompared, Setting, StepMade, TensorsCompared

if TYPE_CHECKING:
    from normlab.checks.tracing import CopiesRun, PropertyTrace

WIDTH: Final = 100
NAMED: Final = 3
"""How many changed weights are named before they are counted."""
SHARED: Final = (
    "the exact step: evaluation mode, no dropout, float64 if possible, small draws where weights are zero",
    "the unchanged step: evaluation mode, the weights and the precision that were given",
    "passes that a check makes before any property are used again, and not listed",
)


def lines(trace: PropertyTrace) -> Iterator[str]:
    """Yield what led to a verdict, in order, in lines of at most 100 columns."""
    yield from _wrapped("", f"{trace.name}: {trace.statement}")
    yield from ("", "facts")
    for fact in trace.facts:
        yield from _named(fact.name, fact.value or f"unknown: {fact.why_unknown}")
    yield from ("", "copies")
    if trace.copies is None:
        yield from _named("none", "the loss cannot be computed")
    else:
        yield from _copies(trace.copies)
    yield from ("", "passes and comparisons")
    if trace.entries:
        for sentence in SHARED:
            yield from _wrapped("  ", sentence, after="  ")
    yield from _entries(trace.entries)
    yield from ("", "answer")
    yield from _answers(trace)


def _wrapped(indent: str, text: str, *, after: str = "") -> list[str]:
    """Break a text into lines; those after the first are indented further."""
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + after)


def _named(name: str, text: str) -> list[str]:
    return _wrapped("  ", f"{name:<10} {text}", after=" " * 11)


def _copies(copies: CopiesRun) -> Iterator[str]:
    if copies.stand_in:
        yield from _named("model", "copies stand in for it")
    else:
        yield from _named("model", f"it runs itself: {copies.why_not}")
    if copies.exact:
        in_part = f", in part {', '.join(copies.narrowed)}" if copies.narrowed else ""
        yield from _named("precision", f"float64{in_part}")
    else:
        yield from _named("precision", f"the model's own: {copies.why_inexact}")
    yield from _named("rounding", f"two runs may differ by {copies.rounding:.2g} of their size")
    yield from _named("batch", copies.batch or "all of it")


def _entries(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield the entries by number; equal ones in a row are one."""
    if not entries:
        yield from _wrapped("  ", "none: it reads what there is, or what a check prepares")
    number = 1
    for entry, equal in groupby(entries):
        times = len([*equal])
        again = f" ({times} times)" if times > 1 else ""
        what, outcome = _sentences(entry)
        yield from _wrapped("  ", f"{number:>3}  {what}{again}", after=" " * 7)
        yield from _wrapped(" " * 7, f"{outcome} (asked by {entry.asked_by})", after="  ")
        number += times


def _sentences(entry: Entry) -> tuple[str, str]:
    """Say what was done, and what came out."""
    match entry:
        case PassMade():
            return _pass(entry)
        case StepMade():
            return _step(entry)
        case RunsCompared():
            return _runs(entry)
        case TensorsCompared():
            return _tensors(entry)


def _pass(made: PassMade) -> tuple[str, str]:
    outcome = f"loss {made.loss:.6g}" if made.loss is not None else "no loss"
    return f"pass of {_setting(made.setting)}", f"it raised {made.raised}" if made.raised else outcome


def _step(made: StepMade) -> tuple[str, str]:
    precision = "in float64" if made.exact else "in the model's own precision"
    updates = "its optimizers act" if made.updates else "its optimizers do not act"
    scaled = f", gradients times {made.scale:.3g}" if made.scale != 1 else ""
    what = f"whole step on copies, {precision}, seed {made.seed}{scaled}"
    return what, f"it raised {made.raised}" if made.raised else updates


def _runs(compared: RunsCompared) -> tuple[str, str]:
    what = f"compare {_setting(compared.first)} with {_setting(compared.second)}"
    selected, total = compared.numbers
    if compared.size <= compared.limit:
        answer = "they agree"
    else:
        answer = f"they differ from {compared.module or 'no single module'} on,"
    sizes = f"difference {compared.size:.2g}, limit {compared.limit:.2g}"
    return what, f"{answer} in {selected:,} of {total:,} numbers: {sizes}"


def _tensors(compared: TensorsCompared) -> tuple[str, str]:
    return f"compare two tensors {list(compared.shape)}", f"difference {compared.size:.2g} of their size"


def _setting(setting: Setting) -> str:
    """Say what a pass runs on."""
    changes = ", ".join(_changes(setting.changes))
    return f"{setting.model} ({changes})" if changes else setting.model


def _changes(changes: Sequence[Change]) -> Iterator[str]:
    """Say what is changed; many weights are counted."""
    weights = [change for change in changes if change.kind == "weights"]
    for change in changes:
        if change.kind != "weights" or len(weights) <= NAMED:
            place = f" {change.place}" if change.place and change.place != change.kind else ""
            yield f"{change.kind}{place}: {change.how}"
    if len(weights) > NAMED:
        yield f"weights: {count(len(weights), 'tensor')}, such as {weights[0].place}"


def _answers(trace: PropertyTrace) -> Iterator[str]:
    for failure in trace.failures:
        yield from _wrapped("  ", f"✗ {failure}", after="  ")
        if failure.advice:
            yield from _wrapped("    ", f"→ {failure.advice}", after="  ")
    for note in trace.notes:
        yield from _wrapped("  ", f"note at {note.module or 'the model'}: {note.evidence}", after="  ")
    if trace.untestable:
        state = "could not be tested, and applies" if trace.applies else "does not apply, as far as is known"
        yield from _wrapped("  ", f"– {trace.name} {state}: {trace.untestable}", after="  ")
    elif trace.verdict == "holds":
        yield from _wrapped("  ", f"✓ {trace.name} holds")
