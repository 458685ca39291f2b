"""The pages of the papers are what findings and kept results say today."""

import math
import re
from collections.abc import Sequence
from functools import cache

import pytest

import papers as tool
from normlab.papers import ARTEFACTS, PAPERS, phrases
from normlab.papers.finding import Reviewed, known_findings
from reviewed_findings import REVIEWED

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


def rows_of(text: str) -> dict[str, list[str]]:
    """The rows of the tables of findings, by the finding's id, without it."""
    rows = (line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| [A-Z]\d+ \| ", line))
    return {id_: cells for id_, *cells in rows}


def numbers_in(text: str) -> list[tuple[float, float]]:
    """The numbers of a cell, each with half a unit of its last digit."""
    found = re.findall(r"[−+]?(?:∞|[\d,]+(?:\.\d+)?(?:e-?\d+)?)", text)
    pairs = []
    for number in (one.translate(str.maketrans({"−": "-", "∞": "inf", ",": ""})) for one in found):
        digits, _, power = number.partition("e")
        decimals = len(digits.partition(".")[2])
        pairs.append((float(number), 0.5 * 10.0 ** (int(power or 0) - decimals)))
    return pairs


def require_answer(cell: str, review: Reviewed) -> None:
    """Assert that a cell has a finding's answer, and how many of its effects say what."""
    word, counts = re.fullmatch(r"\*\*(.*)\*\*: (.*)", cell).groups()
    assert word == ("tested, and open" if review.tested_and_open else review.finding.answer)
    told = {
        reading: int(number) for number, reading in re.findall(r"(\d+) (agree|contradict|open|wait)", counts)
    }
    names = {"agrees": "agree", "contradicts": "contradict", "open": "open", "waits": "wait"}
    assert told == {names[reading]: number for reading, number in review.counts.items()}


def require_effect(cells: Sequence[str], review: Reviewed) -> None:
    """Assert that cells say what the first effect compares, what was measured, and what was expected."""
    compared, measured, expected = cells
    main = review.main
    if main is None:
        assert (compared, measured, expected) == ("–", f"needs {review.finding.needs}", "–")
        return
    assert main.piece.says in compared
    assert main.regime.setting.short in compared
    bounds = [end for end in main.piece.expects.bounds if math.isfinite(end)]
    assert [value for value, _ in numbers_in(expected)] == bounds
    interval = re.search(r"\[(.*), (.*)\]", measured)
    if interval is None:  # nothing was measured, or without any spread
        assert math.isnan(main.estimate.value) or not phrases.has_spread(main.estimate)
        return
    for end, shown in zip((main.estimate.low, main.estimate.high), interval.groups(), strict=True):
        ((value, rounding),) = numbers_in(shown)
        assert value == end or abs(value - end) <= rounding * (1 + 1e-6)


def test_a_page_opens_with_its_findings_each_with_effect_and_answer():
    for key in PAPERS:
        rows = rows_of(written()[tool.FOLDER / f"{key}.md"].partition("![")[0])
        reviews = {id_: review for id_, review in REVIEWED.items() if review.finding.paper == key}
        assert list(rows) == list(reviews)
        for id_, (short, _, *effect, answer) in rows.items():
            assert short == reviews[id_].finding.short
            require_effect(effect, reviews[id_])
            require_answer(answer, reviews[id_])


def test_the_page_of_all_findings_has_what_each_effect_was_expected_to_be():
    rows = rows_of(written()[tool.ALL])
    assert list(rows) == list(REVIEWED)
    for (short, answer, *effect, because), review in zip(rows.values(), REVIEWED.values(), strict=True):
        assert (short, because) == (review.finding.short, review.finding.because)
        require_answer(answer, review)
        require_effect(effect, review)


def test_what_to_rely_on_names_at_least_20_findings_and_only_those_that_there_are():
    headline = tool.HEADLINE.read_text(encoding="utf-8")
    named = set(re.findall(r"\b[XNLAD]\d+\b", headline))
    assert named <= known_findings().keys()
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
