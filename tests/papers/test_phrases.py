"""Numbers, answers and counts in words."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from normlab.papers.estimate import Estimate
from normlab.papers.finding import Evidence, Expectation, Finding, Piece, Reviewed
from normlab.papers.phrases import (
    answer,
    answer_in_short,
    beside_expected,
    counted,
    estimated,
    number,
    plain,
    rates,
    reading,
    scored,
    tally,
)
from normlab.papers.regimes import ChosenRate


@pytest.mark.parametrize(
    ("value", "digits", "signed", "written"),
    [
        (-2.25, 1, False, "−2.2"),
        (2.0, 1, True, "+2.0"),
        (-0.04, 1, False, "0.0"),
        (-0.04, 1, True, "+0.0"),
        (8.88e-16, 18, False, "8.9e-16"),
        (-6.6e-7, 9, False, "−6.6e-7"),
        (1.0000003, 9, False, "1.000000"),
        (math.inf, 3, False, "∞"),
    ],
)
def test_a_number_has_a_true_minus_sign_and_as_few_zeros_as_it_can(value, digits, signed, written):
    assert number(value, digits, signed=signed) == written


@pytest.mark.parametrize(
    ("found", "equal", "written"),
    [
        (Estimate(10.84, 9.72, 11.91, 6, unit="BLEU"), 0, "+10.8 BLEU [9.7, 11.9]"),
        (Estimate(0.05000000000000007, 0.0499999999999999, 0.0500000000000002, 6, unit="BLEU"), None,
         "at most 0.05 BLEU"),
        (Estimate(-2.0, -3.0, -1.0, 6, unit="BLEU"), 0, "−2.0 BLEU [−3.0, −1.0]"),
        (Estimate(0.82, 0.48, math.inf, 3, unit="×"), 1, "at least ×0.820 [0.480, ∞]"),
        (Estimate(-1.0, -1.0 - 1e-16, -1.0 + 1e-16, 9), None, "−1.00"),
        (Estimate(math.nan, -math.inf, math.inf), 0, "–"),
        (Estimate(0.5, 0.118, 0.882, 6, share=True, unit="of the runs"), None, "3 of 6 [0.12, 0.88]"),
        (Estimate(3 / 1020, 0, 8.6e-3, 6, unit="of the logged steps"), None,
         "0.0029 of the logged steps [0.0000, 0.0086]"),
        (Estimate.of_too_few(0.309, 1).of_unit("BLEU"), 0, "+0.309 BLEU"),
        (Estimate.of_too_few(0.5, 1).of_unit("×"), 1, "×0.500"),
    ],
)  # fmt: skip
def test_an_estimate_says_what_was_measured_and_no_more(found, equal, written):
    assert estimated(found, equal=equal) == written


def test_a_score_of_nothing_is_at_most_what_its_metric_shows():
    nothing = Estimate(0.05, 0.05, 0.05)
    assert scored(nothing, "BLEU") == "at most 0.05"
    assert scored(nothing, "bits per byte") == "0.0500"
    assert scored(Estimate(0.12, 0.05, 0.25), "BLEU") == "0.12 [0.05, 0.25]"


def claimed(answered, *readings):
    piece = Piece("a over b", "pair", "difference", {}, Expectation(above=0))
    finding = Finding("Z1", "", "", "", "", answered, "", (piece,))
    evidence = tuple(Evidence(piece, None, Estimate(0, 0, 0), reading, 0) for reading in readings)
    return Reviewed(finding, evidence, ())


def test_what_was_tested_is_not_called_untested():
    tested, untested = claimed("not tested here", "open"), claimed("not tested here", "waits")
    assert (answer(tested), answer(untested)) == ("tested, and open", "not tested here")
    assert answer(claimed("partly", "agrees", "contradicts", "open")) == "partly"
    assert counted([tested, untested]) == "2 findings: 1 tested, and open; 1 not tested here"


def test_what_is_open_for_its_rates_says_so():
    (piece,) = claimed("partly", "open").evidence
    tried = (5e-4, 2e-3)
    regime = SimpleNamespace(rates={"post": ChosenRate(5e-4, tried), "pre": ChosenRate(2e-3, tried)})
    assert reading(piece) == "open"
    untuned = replace(piece, regime=regime, untuned="post")
    assert reading(untuned) == "open"  # for its interval, whatever its rates
    assert reading(replace(untuned, held_open_by="untuned")) == "open: post has the lowest rate tried"
    words = replace(piece.piece, weak="it is small", edge="it is last", claimed=0.5)
    said = {
        why: reading(replace(piece, piece=words, held_open_by=why)) for why in ("weak", "edge", "claimed")
    }
    assert said["weak"] == "open: it is small"
    assert said["edge"] == "open: it is last"
    assert "0.5" in said["claimed"]
    both = "post 0.0005 (lowest rate tried), pre 0.002 (highest rate tried)"
    assert rates(regime) == f"Rates, chosen among 0.0005, 0.002: {both}."
    assert rates(SimpleNamespace(rates={})) == ""


def test_an_interval_without_ends_is_finite_json():
    (piece,) = claimed("not tested here", "open").evidence
    regime = SimpleNamespace(name="pair", sources=())
    few = replace(piece, regime=regime, estimate=Estimate.of_too_few(0.309, 1))
    (found,) = plain(Reviewed(claimed("not tested here").finding, (few,), ()))["evidence"]
    assert (found["value"], found["interval"], found["n"]) == (0.309, [None, None], 1)


def test_every_reading_is_counted():
    several = claimed("partly", "open", "agrees", "contradicts", "agrees", "waits", "waits")
    assert tally(several) == "2 agree, 1 contradicts, 1 open, 2 wait"
    assert tally(claimed("not tested here")) == "no effect counts"


def test_a_narrow_line_has_what_was_measured_beside_what_was_expected():
    (piece,) = claimed("supported", "agrees").evidence
    measured = replace(piece, estimate=Estimate(10.84, 9.72, 11.91, 6, unit="BLEU"))
    finding = claimed("supported").finding
    assert beside_expected(Reviewed(finding, (measured,), ())) == "+10.8 BLEU [9.7, 11.9] (> 0)"
    missing = replace(measured, reading="waits", missing=2)
    assert beside_expected(Reviewed(finding, (missing,), ())) == "2 runs missing"
    assert answer_in_short(claimed("not tested here", "open")) == "open"
    assert answer_in_short(claimed("not tested here", "waits")) == "not tested"
