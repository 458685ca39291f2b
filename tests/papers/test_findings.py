"""normlab's own findings: an answer follows from its intervals, and each result that measures it is named."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from normlab.base.files import read_toml
from normlab.base.roles import MATRIX_KINDS
from normlab.papers import ARTEFACTS
from normlab.papers.effects import EFFECTS
from normlab.papers.finding import ANSWERS, OWN_PAPERS, faults
from normlab.papers.regimes import REGIME_FILE, RESULTS, Run
from reviewed_findings import BOOK, FINDINGS, REVIEWED

MOST_NOT_TESTED = 8


def pieces_of(id_):
    """What a finding reads, for its answer or beside it."""
    return (*REVIEWED[id_].evidence, *REVIEWED[id_].left_out)


def parts_of(id_):
    """A finding with those that have other parts of its sentence."""
    return {id_, *FINDINGS[id_].rest, *(other for other in FINDINGS if id_ in FINDINGS[other].rest)}


@pytest.mark.parametrize("id_", FINDINGS)
def test_the_answer_follows_from_the_intervals(id_):
    assert faults(REVIEWED[id_]) == []


@pytest.mark.parametrize("id_", FINDINGS)
def test_every_result_that_measures_it_is_named(id_):
    pieces = [piece for part in parts_of(id_) for piece in pieces_of(part)]
    regimes = {piece.regime.name: piece.regime for piece in pieces}
    read = {source for regime in regimes.values() for source in regime.sources}
    of_artefacts = {f"papers/{artefact}" for artefact in FINDINGS[id_].artefacts}
    measured = {source for source in of_artefacts if (RESULTS / f"{source}.json").is_file()}
    planned = {
        file.parent.name for file in RESULTS.glob(f"*/{REGIME_FILE}") if id_ in read_toml(file)["findings"]
    }
    assert measured | planned <= read
    assert {name for name, regime in BOOK.regimes.items() if id_ in regime.findings} <= regimes.keys()


def test_every_paper_has_findings_and_few_are_not_tested():
    assert {finding.paper for finding in FINDINGS.values()} == set(OWN_PAPERS)
    assert {finding.answer for finding in FINDINGS.values()} <= set(ANSWERS)
    untested = [one for one in REVIEWED.values() if one.finding.answer == "not tested here"]
    assert sum(not one.tested_and_open for one in untested) <= MOST_NOT_TESTED


def test_a_finding_fits_into_its_line_of_the_list():
    assert {id_: finding.short for id_, finding in FINDINGS.items() if len(finding.short) > 34} == {}


def test_what_the_findings_name_exists():
    for finding in FINDINGS.values():
        assert set(finding.artefacts) <= ARTEFACTS.keys()
        assert {FINDINGS[part].paper for part in finding.rest} <= {finding.paper}
    for regime in BOOK.regimes.values():
        assert set(regime.findings) <= FINDINGS.keys()
    read = {piece.regime.name for id_ in FINDINGS for piece in pieces_of(id_)}
    assert BOOK.regimes.keys() - read <= {"dates-trained"}


PLANNED = [
    pytest.param(piece, id=f"{id_}-{number}")
    for id_ in FINDINGS
    for number, piece in enumerate(pieces_of(id_))
    if piece.regime.planned
]


@pytest.mark.parametrize("piece", PLANNED)
def test_a_planned_effect_reads_the_lines_that_its_runs_will_leave(piece):
    """Made-up lines, with the fields and the matrices that an experiment writes."""
    files = [RESULTS / name / REGIME_FILE for name in piece.regime.sources]
    steps = {step for file in files if file.exists() for step in read_toml(file).get("measure_at", ())}
    matrices = {f"{role} {kind}" for role in ("self_attention", "ffn") for kind in MATRIX_KINDS}
    stacks = {stack: {matrix: [1.0, 2.0] for matrix in matrices} for stack in ("encoder", "decoder")}
    shares = {stack: {"i_beta_sq": [1.0, 2.0]} for stack in stacks}
    entry = {"gradients": {"mean_grad_l2": stacks}, "dependency": shares, "updates": stacks}
    measured = [{"step": step, "best": step == 500, **entry} for step in sorted(steps | {500})]
    runs = []
    for cell, seed in sorted(piece.regime.planned):
        score = 20.0 + seed % 3 + len(cell) % 5
        dev = [(step, score * step / 500) for step in (100, 200, 300, 400, 500)]
        scores = dict.fromkeys(("bleu", "nll", "accuracy"), score)
        curves = dict.fromkeys(("bleu", "nll"), dev)
        runs.append(Run(cell, seed, f"{cell} {seed}", "trained", scores, curves, dev, measured))
    found = EFFECTS[piece.piece.effect](replace(piece.regime, runs=runs), piece.piece.arguments)
    assert found.runs >= len({seed for cell, seed in piece.regime.planned if cell in piece.piece.cells()}) > 0
    assert not math.isnan(found.value)


@pytest.mark.parametrize(
    ("id_", "piece", "of_the_runs"),
    [
        ("N7", 3, (0.9216, 0.8633, 0.9839, 6)),
        ("N7", 0, (1.237, 1.212, 1.261, 6)),
        ("N7", 1, (0.7591, 0.7513, 0.7670, 6)),
        ("X5", 0, (0.5785, 0.4322, 0.7744, 6)),
        ("X7", 7, (0.5414, 0.5269, 0.5563, 25)),
        ("D7", 0, (0.6486, 0.5672, 0.7417, 8)),
        ("X6", 2, (0.01746, -0.01564, 0.05056, 10)),
    ],
)
def test_an_effect_of_the_kept_rows_is_what_the_runs_themselves_gave(id_, piece, of_the_runs):
    """Studies once took these numbers from the runs, whose folders are gone; findings take them from rows."""
    found = REVIEWED[id_].evidence[piece].estimate
    shown = [float(f"{end:.4g}") for end in (found.value, found.low, found.high)]
    assert (*shown, found.runs) == of_the_runs


def test_the_differences_of_a_kept_comparison_are_its_own():
    """The comparison's page has the same differences, with wider intervals that hold for all ten at once."""
    kept = json.loads((RESULTS / "multi30k-recipes/comparison.json").read_text(encoding="utf-8"))
    differences = {(d["a"], d["b"]): d for d in kept["differences"]}
    regime = BOOK.regime("multi30k")
    for (first, second), stored in differences.items():
        found = EFFECTS["difference"](regime, {"of": first, "over": second})
        assert found.value == pytest.approx(stored["delta"]["value"], rel=1e-6)
