"""What explains what decides which failure is shown first."""

from __future__ import annotations

from graphlib import TopologicalSorter

from cases import each
from normlab.checks.property import PROPERTIES, Violation, folded


def failures(*names: str) -> list[Violation]:
    return [Violation(name, f"at.{name}", "") for name in names]


def shown(*names: str, allowed: tuple[str, ...] = ()) -> list[list[str]]:
    """Return the failures in their order, each with those that it explains."""
    return [[v.property, *(f.property for f in v.follows)] for v in folded(failures(*names), allowed)]


def test_nothing_explains_itself_by_way_of_others():
    TopologicalSorter({name: p.explains for name, p in PROPERTIES.items()}).prepare()


@each(
    ("names", "expected"),
    [
        (("overfit", "causality"), [["causality", "overfit"]]),
        (("reach", "order"), [["reach", "order"]]),
        (("reach", "gradients"), [["gradients", "reach"]]),
        (("reach", "padding", "padded_loss"), [["padding", "reach", "padded_loss"]]),
        (("counted", "padded_loss"), [["counted", "padded_loss"]]),
        (("inputs", "groups"), [["inputs"], ["groups"]]),
    ],
)
def test_a_cause_is_shown_with_what_it_explains(names: tuple[str, ...], expected: list[list[str]]):
    assert shown(*names) == expected


def test_what_a_consequence_explains_is_a_consequence_too():
    assert shown("order", "reach", "gradients") == [["gradients", "reach", "order"]]


def test_a_cause_has_the_first_place_among_its_own_and_its_consequences():
    assert shown("gradients", "reach", "ties") == [["gradients", "reach"], ["ties"]]


def test_what_is_allowed_explains_nothing():
    assert shown("reach", "gradients", allowed=("gradients",)) == [["reach"], ["gradients"]]


def test_no_failure_is_lost():
    every = failures(*PROPERTIES, *PROPERTIES)
    kept = [shown for failure in folded(every) for shown in (failure, *failure.follows)]
    assert len(kept) == len(every)
