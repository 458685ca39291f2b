import pytest

from normlab.papers.words import command, counts, in_short, measured
from normlab.spec.claim import Measure
from normlab.store.reproductions import Standing
from report.reproductions import ARTEFACT, changed, found


@pytest.mark.parametrize(
    ("measure", "words"),
    [
        (Measure(-0.452, -0.468, -0.436), "-0.452 [-0.468, -0.436]"),
        (Measure.exact(3.0), "3"),
        (Measure.exact(float("nan")), "nan"),
        (Measure(1.0, 0.5, float("inf")), "1 [0.5, inf]"),
        (None, ""),
    ],
)
def test_a_measure_in_words(measure, words):
    assert measured(measure) == words


def test_what_disagrees_comes_first():
    short = in_short(Standing(ARTEFACT, "disagrees", found()))
    assert short == "1 of 5: pre exponent 0.52 [0.45, 0.59], admin exponent 0.55 [0.48, 0.62], ..."
    assert in_short(Standing(ARTEFACT, "not run")) == ""
    assert in_short(Standing(changed(), "damaged", trouble="why")) == "why"


def test_states_are_counted_in_one_order():
    assert list(counts(["no study yet", "agrees", "disagrees", "agrees"]).items()) == [
        ("agrees", 2),
        ("disagrees", 1),
        ("no study yet", 1),
    ]
    assert command(ARTEFACT) == "normlab reproduce example.change"
