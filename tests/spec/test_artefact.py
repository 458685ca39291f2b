from dataclasses import replace

import pytest

from normlab.spec.artefact import Artefact, Drawing, Reproduction
from normlab.spec.claim import Claim, Measure

CLAIM = Claim("slope", "slope", at_least=0.5, published="1")
ONE = Artefact(
    "p.one", "P 2001", "s.", {"a": 1.0}, "a.", study="s", settings={"dims": (1, 2)}, claims=(CLAIM,)
)


@pytest.mark.parametrize(
    "other",
    [
        replace(ONE, published={"a": 1.1}),
        replace(ONE, study="t"),
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
        replace(ONE, settings={"dims": [1, 2]}),
        replace(ONE, discussion="d", shows="t.", drawings=(Drawing("t", "x", "y", "T", "x", "y"),)),
    ],
)
def test_words_and_pictures_do_not_change_the_fingerprint(same):
    assert same.fingerprint() == ONE.fingerprint()
    assert len(ONE.fingerprint()) == 16


def test_a_reproduction_agrees_where_all_claims_do():
    two = replace(ONE, claims=(CLAIM, Claim("level", "level", at_most=0.0)))
    found = Reproduction("p.one", "f", {"slope": Measure.exact(1.0)}, {}, {}, 1.0)
    assert found.verdict(ONE) == "agrees"
    assert found.verdict(two) == "not run"
    measured = replace(found, measures={**found.measures, "level": Measure(0.1, 0.05, 0.15)})
    assert measured.verdict(two) == "disagrees"
    assert found.verdict(replace(ONE, claims=())) == "not run"
