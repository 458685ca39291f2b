"""The page of an artefact: what is published beside what was measured, charts, tables, and what is wrong."""

from __future__ import annotations

import re
from dataclasses import replace

from normlab.papers import ARTEFACTS
from normlab.papers.cells import PrintedTable
from normlab.papers.results import KEPT, ArtefactStatus, standing, write_reproduction
from normlab.report.reproduction import reproduction_page, write_reproduction_page
from normlab.report.studies import ROWS
from report.reproductions import ARTEFACT, found
from report.shown import alarms, of_class, rows_of, section, text_of
from reviewed_findings import REVIEWED


def test_the_page_has_what_is_published_and_every_measure(tmp_path):
    write_reproduction(found(), tmp_path)
    path = write_reproduction_page(standing(ARTEFACT, [tmp_path]), tmp_path)
    assert path == tmp_path / "example.change.html"
    html = path.read_text(encoding="utf-8")
    shown = text_of(html)
    assert "example.change: measured" in shown
    assert ["post exponent", "1.01 [0.95, 1.07]"] in rows_of(section(html, "tables"))
    assert ARTEFACT.discussion in text_of(section(html, "discussion"))
    assert ["cell 11", "11"] in rows_of(section(html, "published"))
    assert "reproduce example.change" in text_of(section(html, "how"))
    assert "two cores" in shown
    assert "<b>" not in html[html.index("<main") : html.index("<footer")]


def test_a_page_names_the_findings_that_rest_on_it():
    artefact = ARTEFACTS["xiong2020.fig4ab"]
    resting = [r for r in REVIEWED.values() if artefact.id in r.finding.artefacts]
    shown = text_of(reproduction_page(standing(artefact, [KEPT]), resting))
    assert [r.finding.id for r in resting] == ["X4", "X5", "X9"]
    assert all(r.finding.short in shown and r.finding.because in shown for r in resting)


def test_every_drawing_is_there_once_with_its_panels():
    html = reproduction_page(ArtefactStatus(ARTEFACT, "measured", found()))
    titles = re.findall(r"<figcaption><h3>(.*?)</h3>", html)
    assert titles == [
        "Output change, encoder",
        "Output change, decoder",
        "A long curve",
        "Fitted exponents",
        "Shares, post",
        "Shares, pre",
    ]
    assert re.findall(r'data-recipe="(.*?)"', html) == ["post", "pre", "admin"]
    assert len(html.encode()) < 2_000_000


def test_a_long_table_is_cut_and_says_so():
    page = reproduction_page(ArtefactStatus(ARTEFACT, "measured", found()))
    start = page.index('id="table-long"')
    table = page[start : page.index("</details>", start)]
    assert len(rows_of(table)) == 1 + ROWS
    (note,) = of_class(table, "note")
    assert re.findall(r"[\d,]+", note) == [str(ROWS), "1,500"]


def test_what_was_not_run_says_how_to():
    shown = text_of(reproduction_page(ArtefactStatus(ARTEFACT, "not run")))
    assert "example.change: not run" in shown
    assert shown.count("papers reproduce example.change") == 2, "at the top, and in how it is measured"
    bare = replace(ARTEFACT, study=None, drawings=())
    assert "example.change: answered" in text_of(reproduction_page(ArtefactStatus(bare, "answered")))
    damaged = ArtefactStatus(ARTEFACT, "damaged", trouble="x.json is torn")
    assert damaged.trouble in alarms(reproduction_page(damaged))


def test_a_drawing_that_finds_no_table_or_column_says_so_and_the_rest_is_drawn():
    line, *others = ARTEFACT.drawings
    astray = replace(ARTEFACT, drawings=(replace(line, y="nowhere"), replace(line, table="lost"), *others))
    page = reproduction_page(ArtefactStatus(astray, "measured", found()))
    column, table = alarms(page)
    assert re.search(r"'Output change' .*\bnowhere\b.* 'change'", column)
    assert re.search(r"'lost' .*\bchange, long, exponents, shares\b", table)
    assert "Fitted exponents" in text_of(section(page, "pictures"))


def test_a_printed_table_keeps_its_form_with_ours_below_or_behind(tmp_path):
    published = PrintedTable(("4k", "8k"), {"Post": ("fail", 28.5), "Pre": (28.1, "")}, updates=7)
    artefact = replace(ARTEFACT, published=published)
    cell = {"BLEU": 12.5, "low": 10.0, "high": 15.0, "seeds": "12, 13", "trained": "2 of 2"}
    rows = [{"cell": name, **cell} for name in ("8k Post", "Pre", "other")]
    write_reproduction(replace(found(artefact), tables={"cells": rows}), tmp_path)
    page = write_reproduction_page(standing(artefact, [tmp_path]), tmp_path)
    (_, *columns), post, pre, _, updates, other = rows_of(
        section(page.read_text(encoding="utf-8"), "published")
    )
    score, in_short = "12.5 [10.0, 15.0]", "12.5 [10.0, 15.0]; 2 of 2 trained"
    assert columns == ["4k", "8k", "here, BLEU [95%]"]
    assert post == ["Post", "fail", f"28.5 here {in_short}", "–"]
    assert pre == ["Pre", "28.1", "–", in_short]
    assert updates == ["updates", "7", "–", "–", "–"]
    assert other == ["other", "–", score, "12, 13", "2 of 2"]
