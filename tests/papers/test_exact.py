"""The papers' exact statements hold for what normlab builds, by the kept measures of their studies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from normlab.errors import UserError
from normlab.papers import ARTEFACTS
from normlab.papers.estimate import Estimate
from normlab.papers.exact import known_statements, read_statements
from normlab.papers.results import KEPT, standing

STATEMENTS = known_statements()


@pytest.mark.parametrize("one", STATEMENTS, ids=lambda one: f"{one.artefact}-{one.measures[0]}")
def test_it_holds(one):
    assert one.holds(standing(ARTEFACTS[one.artefact], [KEPT]).measures)


def test_a_measure_outside_its_bounds_or_missing_does_not_hold():
    one = STATEMENTS[0]
    inside = dict.fromkeys(one.measures, Estimate.exact(0.0))
    assert one.holds(inside)
    assert not one.holds({**inside, one.measures[0]: Estimate.exact(1.0)})
    assert not one.holds({})
    assert not replace(one, measures=(*one.measures, "another")).holds(inside)


def test_an_entry_that_is_no_statement_is_refused(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text('[[exact]]\nsays = "a"\nwhere = "b"\nartefact = "c"\nmeasure = "d"\nbelow = 1\n')
    with pytest.raises(ValueError, match="mean 'measures'"):
        read_statements(file)


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ('measures = ["d"]', "above, below and within"),
        ('measures = ["d"]\nabove = -inf', "above, below and within"),
        ("measures = []\nbelow = 1", "measures"),
    ],
)
def test_a_statement_that_nothing_could_break_is_refused(tmp_path, rest, said):
    file = tmp_path / "own.toml"
    file.write_text(f'[[exact]]\nsays = "a is b"\nwhere = "b"\nartefact = "c"\n{rest}\n')
    with pytest.raises(UserError, match=rf"a is b\b.*{said}"):
        read_statements(file)
