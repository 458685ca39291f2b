"""The pages of the papers are what findings and kept results say today."""

import re
from functools import cache

import pytest

import papers as tool
from normlab.papers import ARTEFACTS, PAPERS, phrases
from normlab.papers.finding import own_findings

written = cache(tool.written)
STALE = f"it is not what findings and results say; type: {tool.COMMAND}"


PAGES = [*(tool.FOLDER / f"{key}{ending}" for key in PAPERS for ending in (".md", ".svg")), tool.ALL]


def drawn(svg: str) -> list[str]:
    """What a picture says of each mark: how wide its letters are depends on the fonts of a machine."""
    return re.findall(r'aria-label="([^"]*)"', svg)


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_is_what_findings_and_results_say(path):
    there, today = path.read_text(encoding="utf-8"), written()[path]
    if path.suffix == ".svg":
        assert drawn(there) == drawn(today), STALE
    else:
        assert there == today, STALE


@pytest.mark.slow
def test_every_artefact_is_of_a_paper_and_on_its_page():
    assert {id_.partition(".")[0] for id_ in ARTEFACTS} == PAPERS.keys()
    pages = {key: written()[tool.FOLDER / f"{key}.md"] for key in PAPERS}
    assert all(f"### `{id_}`\n" in pages[id_.partition(".")[0]] for id_ in ARTEFACTS)


def test_a_page_opens_with_its_findings_each_with_answer_and_regime():
    for key in PAPERS:
        rows = written()[tool.FOLDER / f"{key}.md"].partition("![")[0].splitlines()
        shown = [line.split(" | ") for line in rows if re.match(r"\| [A-Z]\d+ \| ", line)]
        wanted = [(one.finding.id, tool.answer(one)) for one in tool.of_paper(key)]
        assert [(row[0].strip("| "), row[-1].removesuffix(" |")) for row in shown] == wanted


def test_the_page_of_all_findings_has_what_each_effect_was_expected_to_be():
    rows = [
        line.split(" | ") for line in written()[tool.ALL].splitlines() if re.match(r"\| [A-Z]\d+ \| ", line)
    ]
    assert [row[0].strip("| ") for row in rows] == list(own_findings())
    for row, one in zip(rows, tool.findings().values(), strict=True):
        assert [row[2], *row[3:6]] == [tool.answer(one), *tool.first_effect(one)]


def test_what_to_rely_on_names_at_least_20_findings_and_only_those_that_there_are():
    headline = tool.HEADLINE.read_text(encoding="utf-8")
    named = set(re.findall(r"\b[XNLAD]\d+\b", headline))
    assert named <= own_findings().keys()
    assert len(named) >= 20


def test_what_stands_beside_a_printed_value_was_measured():
    for one in tool.standings().values():
        told = {name for names in one.artefact.beside.values() for name in names}
        assert one.artefact.beside.keys() <= one.artefact.published.keys(), one.artefact.id
        assert told <= {*one.measures, *phrases.cells_of(one)}, one.artefact.id


def test_no_number_of_a_page_has_eight_zeros_or_nines_in_a_row():
    """As a tiny number that is written out has, or the sum of 0.1 and 0.2."""
    for path, text in written().items():
        if path.suffix == ".md":
            assert not re.search(r"\d\.\d*(0{8}|9{8})", text), path.name
