"""The page of an artefact: what is published beside what was measured, charts, tables, and what is wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape

from normlab.papers import ARTEFACTS
from normlab.papers.cells import PrintedTable
from normlab.papers.finding import own_findings, reviewed
from normlab.papers.regimes import read_book
from normlab.papers.results import KEPT, ArtefactStatus, standing, write_reproduction
from normlab.report.reproduction import reproduction_page, write_reproduction_page
from report.reproductions import ARTEFACT, found


def text_of(html: str) -> str:
    body = html[html.index("<body") : html.index("<footer")]
    body = re.sub(r"<script.*?</script>", "", body, flags=re.DOTALL)
    return unescape(" ".join(re.sub(r"<[^>]+>", " ", body).split()))


def test_the_page_has_what_is_published_and_every_measure(tmp_path):
    write_reproduction(found(), tmp_path)
    path = write_reproduction_page(standing(ARTEFACT, [tmp_path]), tmp_path)
    assert path == tmp_path / "example.change.html"
    html = path.read_text(encoding="utf-8")
    shown = text_of(html)
    assert "example.change: measured" in shown
    assert "post exponent 1.01 [0.95, 1.07]" in shown
    assert "Sections 3 & 5 exchange their numbers." in shown
    assert "cell 11 11" in shown
    assert "normlab papers reproduce example.change" in shown
    assert "two cores" in shown
    assert "<b>" not in html[html.index("<main") : html.index("<footer")]


def test_a_page_names_the_findings_that_rest_on_it():
    artefact = ARTEFACTS["xiong2020.fig4ab"]
    resting = [f for f in own_findings().values() if artefact.id in f.artefacts]
    shown = text_of(
        reproduction_page(standing(artefact, [KEPT]), [reviewed(f, read_book()) for f in resting])
    )
    assert [f.id for f in resting] == ["X4", "X5", "X9"]
    assert all(f.short in shown and f.because in shown for f in resting)


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
    shown = text_of(reproduction_page(ArtefactStatus(ARTEFACT, "measured", found())))
    assert "The first 400 of 1,500 rows; the JSON file beside this page holds all." in shown


def test_what_was_not_run_says_how_to():
    shown = text_of(reproduction_page(ArtefactStatus(ARTEFACT, "not run")))
    assert "Nothing was measured. To measure it: normlab papers reproduce example.change" in shown
    bare = replace(ARTEFACT, study=None, drawings=())
    assert "example.change: answered" in text_of(reproduction_page(ArtefactStatus(bare, "answered")))
    damaged = reproduction_page(ArtefactStatus(ARTEFACT, "damaged", trouble="x.json is torn"))
    assert "x.json is torn" in text_of(damaged)


def test_a_drawing_that_finds_no_table_or_column_says_so_and_the_rest_is_drawn():
    line, *others = ARTEFACT.drawings
    astray = replace(ARTEFACT, drawings=(replace(line, y="nowhere"), replace(line, table="lost"), *others))
    shown = text_of(reproduction_page(ArtefactStatus(astray, "measured", found())))
    assert "needs nowhere of the table 'change'" in shown
    assert "the result has no table 'lost' but change, long, exponents, shares" in shown
    assert "Fitted exponents" in shown


def test_a_printed_table_keeps_its_form_with_ours_below_or_behind(tmp_path):
    published = PrintedTable(("4k", "8k"), {"Post": ("fail", 28.5), "Pre": (28.1, "")}, updates=7)
    artefact = replace(ARTEFACT, published=published)
    cell = {"BLEU": 12.5, "low": 10.0, "high": 15.0, "seeds": "12, 13", "trained": "2 of 2"}
    rows = [{"cell": name, **cell} for name in ("8k Post", "Pre", "other")]
    write_reproduction(replace(found(artefact), tables={"cells": rows}), tmp_path)
    page = write_reproduction_page(standing(artefact, [tmp_path]), tmp_path)
    plain = text_of(page.read_text(encoding="utf-8"))
    assert "4k 8k here, BLEU [95%]" in plain
    assert "Post fail 28.5 here 12.5 [10.0, 15.0]; 2 of 2 trained –" in plain
    assert "Pre 28.1 – 12.5 [10.0, 15.0]; 2 of 2 trained" in plain
    assert "updates 7 – – –" in plain
    assert "other – 12.5 [10.0, 15.0] 12, 13 2 of 2" in plain
