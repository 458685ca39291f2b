from dataclasses import replace

import pytest

from normlab.spec.artefact import Artefact, Drawing, Reproduction, Tally
from normlab.spec.claim import Claim, Measure


def first(lab, *, dims):
    raise NotImplementedError


def second(lab, *, dims):
    raise NotImplementedError


CLAIM = Claim("slope", "slope", at_least=0.5, published="1")
ONE = Artefact(
    "p.one", "P 2001", "s.", {"a": 1.0}, "a.", study=first, settings={"dims": (1, 2)}, claims=(CLAIM,)
)


@pytest.mark.parametrize(
    "other",
    [
        replace(ONE, published={"a": 1.1}),
        replace(ONE, study=second),
        replace(ONE, settings={"dims": (1, 3)}),
        replace(ONE, settings={"dims": (1, 2), "seeds": 3}),
        replace(ONE, claims=()),
        replace(ONE, claims=(replace(CLAIM, at_least=0.4),)),
        replace(ONE, claims=(replace(CLAIM, at_most=9.0),)),
        replace(ONE, claims=(replace(CLAIM, measure="another"),)),
        replace(ONE, id="p.two"),
    ],
)
def test_another_claim_or_way_of_measuring_has_another_fingerprint(other):
    assert other.fingerprint() != ONE.fingerprint()


@pytest.mark.parametrize(
    "same",
    [
        replace(ONE, claims=(replace(CLAIM, says="in other words", published="1.0"),)),
        replace(ONE, claims=(replace(CLAIM, convention="c", derived="d", check="e"),)),
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
