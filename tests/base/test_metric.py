import math

import pytest

from cases import each
from normlab.base.metric import NLL, Metric, amount, in_words, metric_named, ratio, selection_metric
from normlab.errors import UserError

SCORE = Metric("score", "score", least=0.0, most=100.0)


@each(
    ("metric", "a", "b", "better"),
    [
        (SCORE, 2.0, 1.0, True),
        (SCORE, 1.0, 1.0, False),
        (NLL, 1.0, 2.0, True),
        (NLL, 2.0, 1.0, False),
        (NLL, 1.0, math.inf, True),
        (NLL, 1.0, math.nan, True),
        (NLL, math.nan, 1.0, False),
        (SCORE, 0.0, None, True),
        (SCORE, None, 0.0, False),
        (SCORE, math.nan, None, False),
    ],
)
def test_the_better_of_two_values(metric, a, b, better):
    assert metric.better(a, b) is better


def test_values_in_words():
    assert SCORE.with_label(31.24) == "score 31.2"
    assert SCORE.with_label(None) == SCORE.shown(None) == ""
    assert (SCORE.signed(1.26), SCORE.signed(-0.04), SCORE.signed(-1200.0)) == ("+1.3", "0.0", "-1,200.0")
    assert NLL.title == "NLL, nats per token"
    assert in_words((SCORE, NLL), {"nll": 1.5, "score": 3, "tokens": 7}) == "score 3.0, NLL 1.500"


@each(
    ("number", "words"),
    [
        (153, "153"),
        (999.6, "1k"),
        (104_960, "105k"),
        (999_600, "1M"),
        (12_600_000, "12.6M"),
        (1.04e15, "1.04e+15"),
    ],
)
def test_large_numbers(number, words):
    assert amount(number) == words


@each(
    ("a", "b", "words"),
    [
        (153, 81, "+89%"),
        (432, 216, "+100%"),
        (3100, 100, "+3,000%"),
        (1.031, 1, "+3.1%"),
        (1, 3, "-67%"),
        (2, 2, "equal"),
        (2, 0, "more than none"),
    ],
)
def test_ratios(a, b, words):
    assert ratio(a, b) == words


def test_a_value_stays_on_its_scale():
    assert [SCORE.bounded(v) for v in (-1.0, 50.0, 101.0)] == [0.0, 50.0, 100.0]
    assert NLL.bounded(1e9) == 1e9


def test_a_metric_is_found_by_its_name():
    assert metric_named("nll", (SCORE, NLL), "it") == NLL
    assert selection_metric((SCORE, NLL), "") == SCORE
    assert selection_metric((SCORE, NLL), "nll") == NLL
    with pytest.raises(UserError, match="mean 'score'"):
        metric_named("scores", (SCORE, NLL), "the task it")
