from dataclasses import fields, replace
from inspect import isabstract

import pytest

from cases import each
from normlab.papers.artefact import Artefact, Drawing, Reproduction, Tally
from normlab.papers.bases import LAPTOP
from normlab.papers.claim import Claim, Measure
from normlab.papers.measures import Difference, OfRuns, Score, ShareTrained
from normlab.papers.studies import OwnStudy
from normlab.papers.trainings import Trainings


def first(lab, *, dims):
    raise NotImplementedError


def second(lab, *, dims):
    raise NotImplementedError


CLAIM = Claim("slope", "slope", at_least=0.5, published="1")
ONE = Artefact(
    "p.one", "P 2001", "s.", {"a": 1.0}, "a.", study=first, settings={"dims": (1, 2)}, claims=(CLAIM,)
)


SAID = {"says", "published"}
"""Fields of a claim that are words beside it."""
SHOWN = {
    "paper",
    "shows",
    "asserts",
    "drawings",
    "discussion",
    "finding",
    "version",
    "date",
    "reason",
    "alone",
}
"""Fields of an artefact that decide no verdict."""
OTHERS = {
    "id": "p.two",
    "published": {"a": 1.1},
    "study": second,
    "settings": {"dims": (1, 3)},
    "rests_on": ("p.zero",),
    "claims": (),
}
CLAIMS = {
    "measure": "another",
    "at_least": 0.4,
    "at_most": 9.0,
    "derived": "d",
    "convention": "c",
    "check": "e",
    "needs": "n",
    "part_of": "p",
    "until": 0.3,
}
TRAINED = replace(
    ONE, trainings={"laptop": Trainings(LAPTOP, {"a": {"recipe": "post"}}, settings={"dims": (2,)})}
)
TRAININGS = {
    "base": replace(LAPTOP, recipe="pre"),
    "cells": {"a": {"recipe": "pre"}},
    "seeds": 4,
    "first_seed": 7,
    "least": 2,
    "settings": {"dims": (3,)},
}


@each("field", [f.name for f in fields(Artefact) if f.name not in {*SHOWN, "trainings"}])
def test_every_field_of_an_artefact_that_decides_changes_the_fingerprint(field):
    assert replace(ONE, **{field: OTHERS[field]}).fingerprint() != ONE.fingerprint()


@each("field", [f.name for f in fields(Claim) if f.name not in SAID])
def test_every_field_of_a_claim_that_decides_changes_the_fingerprint(field):
    other = replace(ONE, claims=(replace(CLAIM, **{field: CLAIMS[field]}),))
    assert other.fingerprint() != ONE.fingerprint()


@each("field", [f.name for f in fields(Trainings) if f.name != "differs"])
def test_every_field_of_the_trainings_changes_the_fingerprint(field):
    own = replace(TRAINED.trainings["laptop"], **{field: TRAININGS[field]})
    assert replace(TRAINED, trainings={"laptop": own}).fingerprint() != TRAINED.fingerprint()


def of_measure(measure):
    return replace(ONE, settings={"measures": {"slope": measure}}).fingerprint()


def kinds(base=OfRuns):
    """Every class of measures that is no base of others alone."""
    own = [] if isabstract(base) else [base]
    return [*own, *(kind for sub in base.__subclasses__() for kind in kinds(sub))]


@each("kind", kinds(), ids=lambda kind: kind.__name__)
def test_every_field_of_a_measure_and_its_version_change_the_fingerprint(kind, monkeypatch):
    values = {f.name: 0.5 if f.type == "float" else "x" for f in fields(kind)}
    one = of_measure(kind(**values))
    for name, value in values.items():
        assert of_measure(kind(**{**values, name: 0.25 if value == 0.5 else "y"})) != one
    assert len({of_measure(other(**{f.name: "x" for f in fields(other)})) for other in (kind, Score)}) == (
        1 if kind is Score else 2
    )
    with monkeypatch.context() as patched:  # for others that inherit, as it was
        patched.setattr(kind, "version", kind.version + 1)
        assert of_measure(kind(**values)) != one


def test_who_is_pooled_changes_the_fingerprint():
    assert of_measure(ShareTrained(("a", "b"))) != of_measure(ShareTrained(("a",)))
    assert of_measure(Difference("bleu", ("a", "b"), "c")) != of_measure(Difference("bleu", "a", "c"))


def test_the_version_of_a_study_changes_the_fingerprint():
    study = OwnStudy("m", "s")
    one, other = (replace(ONE, study=s).fingerprint() for s in (study, replace(study, version=2)))
    assert one != other


@pytest.mark.parametrize(
    "same",
    [
        replace(ONE, claims=(replace(CLAIM, says="in other words", published="1.0"),)),
        replace(ONE, version=2, date="2001-01-01", reason="r"),
        replace(ONE, settings={"dims": [1, 2]}),
        replace(ONE, discussion="d", shows="t.", drawings=(Drawing("t", "x", "y", "T", "x", "y"),)),
    ],
)
def test_words_and_pictures_do_not_change_the_fingerprint(same):
    assert same.fingerprint() == ONE.fingerprint()
    assert len(ONE.fingerprint()) == 16


def test_a_new_version_says_when_and_why():
    for missing in ({"date": "2001-01-01"}, {"reason": "r"}):
        with pytest.raises(ValueError, match=r"version 2 of p.one needs a date and a reason"):
            replace(ONE, version=2, **missing)


CHECK = Claim("always", "always", at_least=0.0, check="by construction")


def test_a_reproduction_agrees_where_all_claims_do():
    two = (CLAIM, Claim("level", "level", at_most=0.0))
    found = Reproduction("p.one", "f", {"slope": Measure.exact(1.0)}, {}, {}, 1.0)
    assert found.verdict((CLAIM,)) == "agrees"
    assert found.verdict(two) == "not run"
    measured = replace(found, measures={**found.measures, "level": Measure(0.1, 0.05, 0.15)})
    assert measured.verdict(two) == "disagrees"
    assert found.verdict(()) == "not run"
    assert replace(found, stand_in="a text").verdict((CLAIM,)) == "undecided"


@pytest.mark.parametrize(("always", "verdict", "passed"), [(1.0, "agrees", 1), (-1.0, "disagrees", 0)])
def test_a_check_is_not_counted_among_verdicts_and_spoils_them_where_it_fails(always, verdict, passed):
    measures = {"slope": Measure.exact(1.0), "always": Measure.exact(always)}
    found = Reproduction("p.one", "f", measures, {}, {}, 1.0)
    assert found.verdict((CLAIM, CHECK)) == verdict
    assert found.tally((CLAIM, CHECK)) == Tally({"agrees": 1}, passed, 1)


def test_tallies_add_up():
    total = Tally({"agrees": 2, "undecided": 1}, 1, 2) + Tally({"agrees": 1, "disagrees": 4})
    assert total == Tally({"agrees": 3, "undecided": 1, "disagrees": 4}, 1, 2)
    assert total.claims == 8


@pytest.mark.parametrize(
    ("second", "verdict"),
    [
        (Measure.exact(1.0), "agrees"),
        (Measure.exact(0.0), "disagrees"),
        (Measure(0.5, 0.0, 1.0), "undecided"),
    ],
)
def test_parts_of_a_claim_count_once_when_all_are_decided(second, verdict):
    parts = [Claim(f"part {i}", f"m{i}", at_least=0.5, part_of="p") for i in range(2)]
    measures = {"m0": Measure.exact(0.0 if verdict == "undecided" else 1.0), "m1": second}
    found = Reproduction("p.one", "f", {**measures, "slope": Measure.exact(1.0)}, {}, {}, 1.0)
    assert found.tally(parts).verdicts == {verdict: 1}
    assert found.tally([*parts, CLAIM]).claims == 2
