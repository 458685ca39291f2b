from math import inf, nan

import pytest

from normlab.spec.claim import VERDICTS, Claim, Measure, together

BAND = Claim("m is between 1 and 2", "m", at_least=1.0, at_most=2.0)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (Measure(1.5, 1.0, 2.0), "agrees"),
        (Measure.exact(1.0), "agrees"),
        (Measure(1.5, 0.9, 1.9), "undecided"),
        (Measure(1.5, 0.9, 2.1), "undecided"),
        (Measure(0.5, 0.4, 0.99), "disagrees"),
        (Measure(2.5, 2.01, inf), "disagrees"),
        (Measure(2.5, 2.0, 3.0), "undecided"),
        (Measure.exact(nan), "undecided"),
        (Measure(1.5, nan, 1.6), "undecided"),
    ],
)
def test_the_whole_interval_decides(found, verdict):
    assert BAND.verdict({"m": found}) == verdict


def test_what_was_not_measured_is_not_run():
    assert BAND.verdict({"another": Measure.exact(1.5)}) == "not run"


@pytest.mark.parametrize(
    ("claim", "inside", "outside", "words"),
    [
        (Claim("c", "m", at_least=1.0), 1e9, 0.0, "at least 1"),
        (Claim("c", "m", at_most=-0.25), -1e9, 0.0, "at most -0.25"),
        (Claim("c", "m", at_least=3.0, at_most=3.0), 3.0, 3.1, "3"),
        (BAND, 1.5, 2.5, "1 to 2"),
    ],
)
def test_one_bound_or_both(claim, inside, outside, words):
    assert claim.verdict({"m": Measure.exact(inside)}) == "agrees"
    assert claim.verdict({"m": Measure.exact(outside)}) == "disagrees"
    assert claim.allowed() == words


@pytest.mark.parametrize("bounds", [{}, {"at_least": 2.0, "at_most": 1.0}, {"at_least": nan}])
def test_a_claim_that_decides_nothing_is_refused(bounds):
    with pytest.raises(ValueError, match="decides nothing; give at_least, at_most or both"):
        Claim("nothing", "m", **bounds)


@pytest.mark.parametrize(
    ("several", "one"),
    [
        ([], "not run"),
        (["agrees", "agrees"], "agrees"),
        (["agrees", "not run"], "not run"),
        (["agrees", "not run", "undecided"], "undecided"),
        ([*VERDICTS], "disagrees"),
    ],
)
def test_the_gravest_decides_of_several(several, one):
    assert together(iter(several)) == one
