import math

import pytest

from cases import each
from normlab.base.units import duration, p_value, perplexity, rate, short_rate, steps_named, told_apart


@each(
    ("seconds", "words"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (48.2, "48 s"),
        (59.6, "1 min 00 s"),
        (245, "4 min 05 s"),
        (7800, "2 h 10 min"),
    ],
)
def test_duration(seconds, words):
    assert duration(seconds) == words


@each(
    ("pair", "words"),
    [
        ((0.5, 0.25), ("0.5", "0.25")),
        ((0.0078125, 0.0078126), ("0.0078125", "0.0078126")),
        ((1e9, 1e9 + 1), ("1000000000", "1000000001")),
        ((0.1, 0.1), ("0.1", "0.1")),
        ((0.1, 0.1 + 2e-17), ("0.10000000000000001", "0.10000000000000002")),
        ((1.0, 1.0 + 2**-52), ("1", "1.0000000000000002")),
    ],
)
def test_numbers_are_told_apart(pair, words):
    assert told_apart(*pair) == words


@each(
    ("lr", "typed"),
    [
        (5e-4, "5e-4"),
        (1.5e-3, "1.5e-3"),
        (1e-3, "1e-3"),
        (0.1, "0.1"),
        (1, "1"),
        (3.1623e-4, "3.1623e-4"),
        (0, "0"),
    ],
)
def test_rate(lr, typed):
    assert rate(lr) == typed
    assert float(typed) == pytest.approx(lr, rel=1e-6)


def test_a_rate_next_to_one_that_was_typed_is_short():
    assert (short_rate(4.99875e-4, 3), short_rate(3.75e-4, 3), short_rate(1.414e-2)) == (
        "5e-4",
        "3.75e-4",
        "1.4e-2",
    )


@pytest.mark.parametrize(
    ("p", "words"), [(0.0, "p < 0.001"), (0.0004, "p < 0.001"), (0.034, "p = 0.034"), (1.0, "p = 1.000")]
)
def test_p_value(p, words):
    assert p_value(p) == words


def test_perplexity_of_what_is_no_number():
    assert perplexity(0.0) == 1.0
    assert perplexity(math.inf) == math.inf
    assert math.isnan(perplexity(math.nan))


def test_steps():
    assert (steps_named([400]), steps_named([400, 12_000])) == ("step 400", "steps 400, 12,000")
