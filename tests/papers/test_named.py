"""What words of the command line stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from normlab import papers
from normlab.errors import UserError
from normlab.papers.artefact import Paper
from normlab.papers.named import artefacts_of, named, of_paper
from reviewed_findings import FINDINGS

FINDING = FINDINGS["X2"]
ARTEFACT = papers.ARTEFACTS["liu2020.fig4"]


def test_words_name_findings_artefacts_and_papers_in_their_order():
    assert named(["X2", "liu2020.fig4", "apx"], FINDINGS) == [FINDING, ARTEFACT, "apx"]
    assert named(["all"], FINDINGS) == list(papers.PAPERS)


@pytest.mark.parametrize(
    ("word", "thing"), [("x2", FINDING), ("LIU2020.Fig4", ARTEFACT), ("APX", "apx"), ("doe2026", "Doe2026")]
)
def test_case_does_not_count(monkeypatch, word, thing):
    monkeypatch.setitem(papers.PAPERS, "Doe2026", Paper("Doe2026", "", "Doe 2026", "", ""))
    assert named([word], FINDINGS) == [thing]


def test_case_counts_where_names_differ_in_nothing_else():
    lower = replace(FINDING, id="x2")
    both = {**FINDINGS, "x2": lower}
    assert named(["X2", "x2"], both) == [FINDING, lower]


@pytest.mark.parametrize(
    ("word", "near"), [("liu202", "liu2020"), ("L33", "L3"), ("xiong2020.fig22", "xiong2020.fig2a")]
)
def test_an_unknown_word_names_a_few_that_are_near(word, near):
    with pytest.raises(UserError) as refused:
        named([word], FINDINGS)
    said = str(refused.value)
    assert f"'{word}'" in said
    assert near in said
    assert sum(id_ in said.replace(word, "") for id_ in papers.ARTEFACTS) <= 5


def test_the_artefacts_of_things_are_each_named_once():
    assert artefacts_of([ARTEFACT, "liu2020"])[0] is ARTEFACT
    assert len(artefacts_of([ARTEFACT, "liu2020"])) == len(of_paper("liu2020"))
    assert [artefact.id for artefact in artefacts_of([FINDING])] == list(FINDING.artefacts)
    assert artefacts_of(papers.keys()) == list(papers.ARTEFACTS.values())


def test_an_artefact_that_a_finding_names_and_is_not_there_is_refused():
    with pytest.raises(UserError, match=r"'doe2026\.fig1'"):
        artefacts_of([replace(FINDING, artefacts=("doe2026.fig1",))])
