"""What is written by hand about a finding has no number that was not measured, or printed."""

from __future__ import annotations

import math
import re
from functools import cache

import pytest

from normlab.papers import ARTEFACTS
from normlab.papers.effects import EFFECTS
from normlab.papers.finding import FOLDER, Expectation
from reviewed_findings import BOOK, FINDINGS, REVIEWED

NUMBER = re.compile(
    r"(?<![\w.,−-])(\d+(?:,\d{3})*(?:\.\d+)?)(?![\w]|[.,]\d|e-\d)"  # not a rate such as 5e-4
    r"(?=(?: (?:and|to) \d+(?:\.\d+)?)? (BLEU|nats|bits)\b|(%))?"  # 62 and 43 BLEU have one unit
)
"""A number with its unit, if it has one."""
NAMED = re.compile(r"\b([XNLAD]\d+)\b")
HEADLINE = (FOLDER / "headline.md").read_text(encoding="utf-8")
CLAUSES = [line for line in re.split(r"\n(?=- |#|\n)", HEADLINE) if line.startswith("- ")]


UNITS = {"bleu": "BLEU", "nll": "nats", "bits_per_byte": "bits", "accuracy": "%"}


@cache
def scores(regime, cell):
    """The mean scores of a cell, and of its runs the least two and the largest, as in *74 to 83 in all but
    one*. Its other runs do not count: with them nearly every whole number is the score of some run.
    """
    rows = BOOK.regime(regime)
    runs = rows.cell(cell).values()
    found = []
    for metric, unit in UNITS.items():
        kept = [run for run in runs if run.scores.get(metric) is not None]
        if not kept or len(kept) < len(runs):
            continue
        found.append((EFFECTS["score"](rows, {"of": cell, "metric": metric}).value, unit))
        in_order = sorted(run.scores[metric] for run in kept)
        found += [(value, unit) for value in (*in_order[:2], in_order[-1])]
    return found


def pieces(id_):
    return (*REVIEWED[id_].evidence, *REVIEWED[id_].left_out)


def measured(id_):
    """Every number that was measured for a finding, with its unit."""
    for piece in pieces(id_):
        estimate = piece.estimate
        for value in (estimate.value, estimate.low, estimate.high):
            yield abs(value), estimate.unit
            if estimate.unit == "×":
                yield 100 * abs(value - 1), "%"
        for cell in piece.piece.cells() & set(piece.regime.cells):
            yield from scores(piece.regime.name, cell)


def numbers(text):
    """The numbers of a text with their units, and how many decimals each has."""
    for written, unit, percent in NUMBER.findall(text):
        digits = len(written.partition(".")[2])
        yield float(written.replace(",", "")), unit or percent, digits


def printed(id_):
    """The numbers that the paper, the bounds and the regimes of a finding have in words, with units."""
    words = [FINDINGS[id_].says, FINDINGS[id_].published]
    for piece in pieces(id_):
        words += [piece.piece.says, piece.piece.margin, piece.regime.says, piece.regime.setting.says]
        artefacts = [ARTEFACTS[source[7:]] for source in piece.regime.sources if source[7:] in ARTEFACTS]
        words += [row for artefact in artefacts for row in artefact.published]  # such as lr 1e-4 Post β₂ 0.99
        yield from ((abs(end), piece.estimate.unit) for end in piece.piece.expects.bounds)
        unit = UNITS[piece.piece.arguments.get("metric", "bleu")]
        given = [piece.piece.arguments.get(name) for name in ("least", "by")]
        yield from ((end, unit) for end in given if end is not None)
    yield from ((value, unit) for text in words for value, unit, _ in numbers(text))


def unmeasured(text, ids):
    """The numbers of a text that none of these findings measures or prints: those with decimals, and whole
    ones with a unit of what is measured.
    """
    known = [pair for id_ in ids for pair in measured(id_) if math.isfinite(pair[0])]
    in_words = {pair for id_ in ids for pair in printed(id_)}
    in_words |= {(value, "") for value, _ in in_words}
    missing = []
    for value, unit, digits in numbers(text):
        if not digits and not unit:
            continue
        near = any(round(size, digits) == value and unit in ("", of) for size, of in known)
        if not near and (value, unit) not in in_words:
            missing.append(f"{value:.{digits}f} {unit}".strip())
    return missing


@pytest.mark.parametrize("unit", ["BLEU", "nats", "bits"])
def test_few_numbers_would_pass_for_measured(unit):
    """What is compared here would not notice a wrong number if most numbers were near a measured one."""
    drawn = [f"{value} {unit}" for value in range(101)]
    for id_ in FINDINGS:
        assert len(unmeasured("; ".join(drawn), [id_])) > len(drawn) / 2, id_


@pytest.mark.parametrize("id_", FINDINGS)
def test_the_numbers_of_a_reason_are_measured(id_):
    because = FINDINGS[id_].because
    assert unmeasured(because, [id_, *NAMED.findall(because)]) == []


@pytest.mark.parametrize("clause", CLAUSES, ids=[clause[2:32] for clause in CLAUSES])
def test_the_numbers_of_the_summary_are_measured(clause):
    assert unmeasured(clause, NAMED.findall(clause)) == []


def validations(regime, of, over, metric):
    """What each validation of two cells says of ``of`` being the better one."""
    rows = BOOK.regime(regime)
    better = Expectation(below=0) if metric == "nll" else Expectation(above=0)
    (steps,) = {tuple(step for step, _ in run.dev[metric]) for run in rows.cell(of).values()}
    readings = {}
    for step in steps:
        given = {"of": of, "over": over, "metric": metric, "step": step}
        readings[step] = better.reading(EFFECTS["dev_difference"](rows, given))
    return readings


def test_n5_says_at_which_validations_pre_ln_is_ahead():
    loss = validations("quarter", "Pre+LN", "Post+LN", "nll")
    assert [step for step, reading in loss.items() if reading == "agrees"] == list(range(300, 1201, 150))
    assert [step for step, reading in loss.items() if reading == "contradicts"] == list(
        range(1500, 2101, 150)
    )
    bleu = validations("quarter", "Pre+LN", "Post+LN", "bleu")
    assert [step for step, reading in bleu.items() if reading == "agrees"] == [450, 750, 1050]


def test_l9_says_that_admin_closes_in_on_pre_ln():
    rows = BOOK.regime("multi30k")
    gaps = [
        EFFECTS["dev_difference"](rows, {"of": "admin", "over": "pre", "step": step}).value
        for step in range(500, 3001, 500)
    ]
    assert gaps == sorted(gaps, reverse=True)


CLAIMED = [id_ for id_, found in FINDINGS.items() if any(piece.claimed for piece in found.evidence)]


@pytest.mark.parametrize("id_", CLAIMED)
def test_a_claimed_effect_is_the_published_one_in_bits_per_byte(id_):
    """A published loss is in nats a token; a token of the usual vocabularies has four bytes or so."""
    before, after = map(float, re.findall(r"(\d\.\d+) to (\d\.\d+)", FINDINGS[id_].published)[0])
    bits = (after - before) / math.log(2) / 4
    (claimed,) = [piece.claimed for piece in FINDINGS[id_].evidence]
    assert claimed == pytest.approx(bits, rel=0.1)


def test_x3_says_that_the_better_sgd_has_the_higher_rate():
    pair = {"of": "SGD lr 5e-3, with warm-up", "over": "SGD lr 1e-3, with warm-up"}
    found = EFFECTS["difference"](BOOK.regime("dates-sgd"), pair)
    assert Expectation(above=0).reading(found) == "agrees"
