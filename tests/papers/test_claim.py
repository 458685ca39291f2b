from math import exp, inf, nan

import numpy as np
import pytest
from scipy import stats

from cases import each
from normlab.papers.claim import VERDICTS, Claim, Measure, at_least, at_most, together, within

BAND = Claim("m is between 1 and 2", "m", at_least=1.0, at_most=2.0)


@each(
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


@each(
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


def test_helpers_make_claims_of_one_bound_or_two():
    assert at_least("m", 1.0, "c", published="1") == Claim("c", "m", at_least=1.0, published="1")
    assert at_most("m", 2.0, "c", check="always") == Claim("c", "m", at_most=2.0, check="always")
    assert within("m", 1.0, 2.0, "c", convention="near") == Claim("c", "m", 1.0, 2.0, convention="near")


@pytest.mark.parametrize(
    "claim", [at_least("m", 9.0, "c"), at_most("m", 9.0, "c"), within("m", 8.0, 9.0, "c")]
)
def test_the_turning_bounds_turn_the_verdict(claim):
    """With bounds just inside the named ones a claim agrees, with others it does not."""
    found = Measure(2.0, 1.5, 2.5, 10)
    assert "1.5" in claim.turning(found)
    assert "2.5" in claim.turning(found)
    assert at_least("m", 1.5, "c").verdict({"m": found}) == "agrees"
    assert at_least("m", 1.51, "c").verdict({"m": found}) == "undecided"
    assert at_most("m", 2.5, "c").verdict({"m": found}) == "agrees"
    assert at_most("m", 1.49, "c").verdict({"m": found}) == "disagrees"
    assert within("m", 1.5, 2.5, "c").verdict({"m": found}) == "agrees"


# ------------------------------------------------------------------------------- runs that would decide


def measured(value: float, deviation: float, runs: int) -> Measure:
    half = stats.t.ppf(0.975, runs - 1) * deviation / runs**0.5
    return Measure(value, value - half, value + half, runs)


@pytest.mark.parametrize(("distance", "runs"), [(0.5, 5), (0.3, 5), (0.2, 20)])
def test_so_many_runs_decide_in_four_cases_of_five(distance, runs):
    """Simulated: of samples as large as the answer, about 80% decide the claim."""
    claim = at_least("m", 0.0, "c")
    needed = claim.runs_to_decide({"m": measured(distance, 1.0, runs)})
    assert needed is not None
    random = np.random.default_rng(0)
    drawn = random.normal(distance, 1.0, (4_000, needed))
    low = drawn.mean(1) - stats.t.ppf(0.975, needed - 1) * drawn.std(1, ddof=1) / needed**0.5
    assert (low > 0).mean() == pytest.approx(0.8, abs=0.03)


def test_a_bound_on_the_other_side_needs_as_many_runs():
    found = {"m": measured(0.3, 1.0, 8)}
    beyond = {"m": measured(-0.3, 1.0, 8)}
    assert at_least("m", 0.0, "c").runs_to_decide(found) == at_most("m", 0.0, "c").runs_to_decide(found)
    assert at_least("m", 0.0, "c").runs_to_decide(found) == at_least("m", 0.0, "c").runs_to_decide(beyond)


def test_the_runs_are_counted_on_the_scale_of_the_interval():
    """A ratio is averaged as a logarithm, an R² as ln(1 − R²)."""
    plain = measured(0.3, 1.0, 8)
    needed = at_least("m", 0.0, "c").runs_to_decide({"m": plain})
    ratio = Measure(exp(plain.value), exp(plain.low), exp(plain.high), 8)
    assert at_least("m", 1.0, "c").runs_to_decide({"m": ratio}) == needed
    r2 = Measure(1 - exp(-5 - plain.value), 1 - exp(-5 - plain.low), 1 - exp(-5 - plain.high), 8)
    assert at_least("m", 1 - exp(-5), "c").runs_to_decide({"m": r2}) == needed


def test_of_two_bounds_the_nearer_one_needs_the_most():
    found = {"m": measured(0.3, 1.0, 8)}
    assert within("m", 0.0, 0.9, "c").runs_to_decide(found) == at_least("m", 0.0, "c").runs_to_decide(found)


@pytest.mark.parametrize(
    "found",
    [Measure(2.0, 1.5, 2.5, 10), Measure(0.1, -1.0, 1.2), Measure(0.0, -1.0, 1.0, 10), Measure.exact(nan)],
    ids=["decided", "runs not known", "on the bound", "not a number"],
)
def test_no_number_of_runs_where_none_would_do(found):
    assert at_least("m", 0.0, "c").runs_to_decide({"m": found}) is None
    assert at_least("m", 0.0, "c").runs_to_decide({}) is None


def test_a_claim_that_needs_more_than_was_at_hand_is_undecided():
    claim = at_least("m", 1.0, "c", needs="a GPU")
    assert claim.verdict({"another": Measure.exact(1.0)}) == "undecided"
    assert claim.verdict({}) == "undecided"
    assert claim.verdict({"m": Measure.exact(2.0)}) == "agrees"
    assert claim.runs_to_decide({"another": Measure.exact(1.0)}) is None


@pytest.mark.parametrize(
    ("found", "bounds", "needed"),
    [((1.0, 3), (0.5, inf), 6), ((1.0, 15), (0.2, 0.85), 23), ((0.5, 6), (0.5, inf), None)],
)
def test_a_share_is_decided_by_its_exact_interval(found, bounds, needed):
    """All of five runs leave an interval down to 0.478, of six to 0.541, of 23 to 0.852."""
    share = Measure(found[0], 0.1, 1.0, found[1], share=True)
    assert within("m", *bounds, "c").runs_to_decide({"m": share}) == needed


def test_the_runs_that_a_share_needs_decide_it_four_times_in_five():
    needed = at_least("m", 0.5, "c").runs_to_decide({"m": Measure(0.8, 0.4, 0.97, 10, share=True)})
    assert needed is not None
    decided = [
        stats.binomtest(k, needed).proportion_ci(0.95, method="exact").low >= 0.5 for k in range(needed + 1)
    ]
    assert stats.binom.pmf(range(needed + 1), needed, 0.8)[decided].sum() >= 0.8


@each(
    ("claim", "verdict"),
    [
        (at_most("a", 0.1, until=0.5), "undecided"),
        (at_most("a", 0.1, until=0.3), "disagrees"),
        (at_most("a", 0.6, until=0.5), "agrees"),
        (at_least("a", 0.1, until=0.5), "undecided"),
        (at_least("a", 0.1, until=0.3), "agrees"),
        (within("a", 0.5, 2.0, until=1.25), "disagrees"),
        (within("a", 0.4, 2.5, until=1.25), "undecided"),
        (within("a", 0.25, 4.0, until=1.25), "undecided"),
        (within("a", 0.25, 4.0, until=3.0), "agrees"),
    ],
)
def test_a_word_is_decided_if_both_ends_of_its_range_say_the_same(claim, verdict):
    assert claim.verdict({"a": Measure(0.44, 0.39, 0.49, 8)}) == verdict
    assert claim.allowed().endswith(f" {claim.until:g} gives the same verdict")


def test_two_runs_decide_nothing():
    claim = at_least("a", 0.0)
    assert [claim.verdict({"a": Measure(3.0, 1.0, 5.0, n)}) for n in (2, 3, 0)] == [
        "undecided",
        "agrees",
        "agrees",
    ]
    assert claim.verdict({"a": Measure(1.0, 0.5, 1.0, 2, share=True)}) == "agrees"
    assert claim.runs_to_decide({"a": Measure(3.0, 1.0, 5.0, 2)}) == 3


@pytest.mark.parametrize(("low", "high", "until"), [(0.0, 1.0, 0.5), (0.0, 1.0, 1.5), (0.5, 2.0, 0.8)])
def test_two_bounds_have_a_range_only_around_1(low, high, until):
    assert (
        within("a", 0.5, 2.0, until=1.25).allowed()
        == "0.5 to 2; decided only if 0.8 to 1.25 gives the same verdict"
    )
    with pytest.raises(ValueError, match=rf"the bounds {low} and {high} and until {until}; until is the"):
        within("a", low, high, until=until)
