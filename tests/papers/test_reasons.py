"""What is written by hand about a finding has no number that was not measured, or printed."""

from __future__ import annotations

import math
import re

import pytest

from normlab.papers.effects import EFFECTS, METRICS
from normlab.papers.finding import FOLDER, Expectation
from reviewed_findings import BOOK, FINDINGS, REVIEWED

MEASURED = re.compile(r"(?<![\w.−-])(\d+\.\d+|\d+(?= (?:to \d+ )?(?:BLEU|nats|bits)|%))(?![\w.]*e-)")
"""A number with decimals, or with a unit of what is measured; not a rate such as 5e-4."""
NAMED = re.compile(r"\b([XNLAD]\d+)\b")
HEADLINE = (FOLDER / "headline.md").read_text(encoding="utf-8")
CLAUSES = [line for line in re.split(r"\n(?=- |#|\n)", HEADLINE) if line.startswith("- ")]


def scores(piece):
    """The mean scores of the cells that a piece reads, and those of their runs."""
    for cell in piece.piece.cells() & set(piece.regime.cells):
        for run in piece.regime.cell(cell).values():
            yield from (score for score in run.scores.values() if score is not None)
            for metric in METRICS.keys() & run.scores.keys():
                yield EFFECTS["score"](piece.regime, {"of": cell, "metric": metric}).value


def measured(id_):
    """Every number that was measured for a finding."""
    for piece in (*REVIEWED[id_].evidence, *REVIEWED[id_].left_out):
        yield from map(abs, (piece.estimate.value, piece.estimate.low, piece.estimate.high))
        yield from scores(piece)


def printed(id_):
    """What the paper, the bounds and the regimes of a finding have in words."""
    words = [FINDINGS[id_].says, FINDINGS[id_].published]
    for piece in (*REVIEWED[id_].evidence, *REVIEWED[id_].left_out):
        words += [piece.piece.says, piece.piece.margin, piece.regime.says, piece.regime.setting.says]
        words += [f"{end:g}" for end in piece.piece.expects.bounds]
    return " ".join(words)


def unmeasured(text, ids):
    """The numbers of a text that none of these findings measures or prints."""
    values = [value for id_ in ids for value in measured(id_) if math.isfinite(value)]
    words = " ".join(map(printed, ids))
    missing = []
    for number in MEASURED.findall(text):
        digits = len(number.partition(".")[2])
        near = any(round(value, digits) == float(number) for value in values)
        if not near and number not in words:
            missing.append(number)
    return missing


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
