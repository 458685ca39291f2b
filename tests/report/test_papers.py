"""The page of all findings: answers, effects, pictures, and links to the pages of tables and figures."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from normlab.lab.config import Config
from normlab.papers import ARTEFACTS, PAPERS, phrases
from normlab.papers.artefact import Artefact
from normlab.papers.results import ArtefactStatus, at_other_scales, standing, write_reproduction
from normlab.papers.trainings import Trainings
from normlab.report.page import Chart
from normlab.report.papers import forest_rows, forests, papers_page, write_papers_page
from normlab.report.reproduction import write_reproduction_page
from report.reproductions import ARTEFACT, found
from report.shown import alarms, rows_of, text_of
from reviewed_findings import REVIEWED


@pytest.fixture(scope="module")
def findings():
    return list(REVIEWED.values())


@pytest.mark.slow
def test_every_finding_has_its_answer_its_effects_and_its_regimes(findings):
    html = papers_page(findings, [], set()).replace("<wbr>", "")
    for reviewed in findings:
        details = html.split(f'<details id="{reviewed.finding.id}">')[1].split("</details>")[0]
        words = text_of(details)
        assert f"{phrases.answer(reviewed)} ({phrases.tally(reviewed)})" in words
        assert reviewed.finding.because in words
        rows = [row for row in rows_of(details) if row[0] != "effect"]  # without the headings
        for row, evidence in zip(rows, (*reviewed.evidence, *reviewed.left_out), strict=True):
            effect, measured, _, reading, regime = row
            assert effect.startswith(evidence.piece.says)
            assert measured == phrases.of_evidence(evidence)
            assert reading == phrases.reading(evidence)
            assert regime == f"{evidence.regime.name} {evidence.regime.setting.says} {evidence.regime.says}"
    plain = text_of(html)
    assert f"{len(findings)} findings: " in plain
    assert all(paper.authors in plain for paper in PAPERS.values())
    assert html.count("<figure") == sum(
        len(forests([one for one in findings if one.finding.paper == key])) for key in PAPERS
    )


def test_a_forest_has_the_effects_of_one_unit_with_their_intervals(findings):
    xiong = [one for one in findings if one.finding.paper == "xiong2020"]
    charts = forests(xiong)
    assert [chart.title for chart in charts] == [
        "Differences of BLEU",
        "Ratios",
        "Differences in nats per token",
        "Differences in bits per byte",
    ]
    assert all(isinstance(chart, Chart) and chart.drawn().to_dict()["layer"] for chart in charts)
    rows = {row["effect"]: row for row in charts[0].rows}
    first = xiong[0].evidence[0]
    row = rows[f"X1 {first.piece.says} · {first.regime.setting.short}"]
    assert (row["value"], row["low"], row["reading"]) == (first.estimate.value, first.estimate.low, "agrees")


def test_a_name_in_a_forest_fits_the_width_of_its_picture(findings):
    letters = 95  # of the size of a name, in the 500 pixels of docs/papers/*.svg
    names = [row["effect"] for unit in phrases.DRAWN for row in forest_rows(findings, unit)]
    assert len(names) > 100
    assert [name for name in names if len(name) > letters] == []


def test_the_overview_links_to_the_pages_that_lie_beside_it(tmp_path):
    write_reproduction(found(), tmp_path / "kept")
    where = [tmp_path / "papers", tmp_path / "kept"]
    artefacts = [ARTEFACT, Artefact("other.one", "P", "Shows.", {})]
    write_reproduction_page(standing(ARTEFACT, where), where[0])
    page = write_papers_page([], [standing(a, where) for a in artefacts], where[0])
    assert page == where[0] / "papers.html"
    html = page.read_text(encoding="utf-8")
    assert re.findall(r'<a href="(example[^"]*)"', html) == ["example.change.html"]
    assert "answered" in html


def test_all_tables_and_figures_are_listed():
    html = papers_page([], [ArtefactStatus(a, "not run") for a in ARTEFACTS.values()], set())
    assert html.count('<th scope="row"') == len(ARTEFACTS)
    plain = html.replace("<wbr>", "")
    assert all(id_ in plain for id_ in ARTEFACTS)


def test_an_artefact_that_no_laptop_trains_is_shown_at_its_smallest_scale(tmp_path):
    trainings = Trainings(Config(), {"post": {"recipe": "post"}}, 1, "It is large.")
    artefact = replace(ARTEFACT, trainings={"gpu": trainings, "paper": trainings})
    path = write_reproduction(replace(found(artefact), scale="gpu"), tmp_path)
    shown = standing(artefact, [tmp_path])
    assert (shown.path, shown.scale, shown.state) == (path, "gpu", "not all runs")
    assert at_other_scales([artefact], [tmp_path]) == []


def test_results_that_disagree_about_a_run_are_named_above_the_tables(tmp_path):
    both = [replace(ARTEFACT, id=id_) for id_ in ("example.one", "example.two")]
    for artefact, bleu in zip(both, (20.25, 21.5), strict=True):
        rows = [{"cell": "post", "seed": 1, "run": "0123abcd4567", "bleu": bleu}]
        write_reproduction(replace(found(artefact), tables={"runs": rows}), tmp_path)
    html = papers_page([], [standing(artefact, [tmp_path]) for artefact in both], set())
    (alarm,) = alarms(html)
    assert "example.one and example.two " in alarm
    for named in ("0123abcd4567", "bleu", "20.25", "21.5", "example.one example.two --again"):
        assert named in alarm


def test_results_at_other_scales_have_a_table_of_their_own(tmp_path):
    differs = "It is large."
    trainings = Trainings(Config(), {"post": {"recipe": "post"}}, 1, differs)
    artefact = replace(ARTEFACT, trainings={"laptop": trainings, "gpu": trainings})
    path = write_reproduction(replace(found(artefact), scale="gpu"), tmp_path)
    (one,) = at_other_scales([artefact], [tmp_path])
    assert (one.path, one.scale) == (path, "gpu")
    page = write_reproduction_page(one, tmp_path)
    assert page.name == "example.change@gpu.html"
    assert differs in (html := page.read_text(encoding="utf-8"))
    assert "reproduce example.change --scale gpu" in html
    overview = write_papers_page([], [standing(artefact, [tmp_path])], tmp_path, [one])
    shown = overview.read_text(encoding="utf-8")
    assert re.findall(r'<a href="(example[^"]*)"', shown) == ["example.change@gpu.html"]
    assert "gpu scale" in shown
