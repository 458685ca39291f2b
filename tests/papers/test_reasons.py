"""What is written by hand about a finding has no number that was not measured, or printed."""

from __future__ import annotations

import math
import re

import pytest

from normlab.papers.effects import EFFECTS, METRICS
from normlab.papers.finding import FOLDER, own_findings, reviewed
from normlab.papers.regimes import read_book

FINDINGS = own_findings()
BOOK = read_book()
REVIEWED = {id_: reviewed(finding, BOOK) for id_, finding in FINDINGS.items()}
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
        yield abs(piece.estimate.value)
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
