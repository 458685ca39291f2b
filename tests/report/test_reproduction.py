"""The page of an artefact: verdicts, charts, tables, and what is wrong with a result."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape

from normlab.papers.artefact import Superseded
from normlab.papers.cells import PrintedTable
from normlab.papers.claim import Measure
from normlab.papers.results import ArtefactStatus, standing, write_reproduction
from normlab.report.papers import reproduction_page, write_reproduction_page
from report.reproductions import ARTEFACT, changed, found


def text_of(html: str) -> str:
    body = html[html.index("<body") : html.index("<footer")]
    body = re.sub(r"<script.*?</script>", "", body, flags=re.DOTALL)
    return unescape(" ".join(re.sub(r"<[^>]+>", " ", body).split()))


def test_the_page_puts_published_allowed_measured_and_verdict_side_by_side(tmp_path):
    write_reproduction(found(), tmp_path)
    path = write_reproduction_page(standing(ARTEFACT, [tmp_path]), tmp_path)
    assert path == tmp_path / "example.change.html"
    html = path.read_text(encoding="utf-8")
    shown = text_of(html)
    assert "example.change: 1 of 5 hold, 2 undecided" in shown
    assert "the exponent of Post-LN post exponent agrees 1.01 [0.95, 1.07] 0.9 to 1.1 1" in shown
    assert "the exponent of Pre-LN pre exponent disagrees 0.52 [0.45, 0.59] at most 0.3 0, as log N" in shown
    assert "the exponent of Admin admin exponent undecided 0.55 [0.48, 0.62] 0 to 0.6 –" in shown
    assert "R² of a line r squared not run – at least 0.99 0.99" in shown
    assert "Sections 3 & 5 exchange their numbers." in shown
    assert "cell 11 11" in shown
    assert "normlab papers reproduce example.change" in shown
    assert ARTEFACT.fingerprint() in shown
    assert "two cores" in shown
    assert "<b>" not in html[html.index("<main") : html.index("<footer")]


def test_conventions_checks_and_the_runs_that_would_decide_are_named():
    first, second, third, *others = ARTEFACT.claims
    claims = (
        replace(first, check="by construction"),
        replace(second, convention="slow: at most 0.3", derived="from Lemma 0"),
        replace(third, at_least=0.5),
        *others,
    )
    admin = replace(found().measures["admin_exponent"], runs=10)
    seen = replace(found(), measures={**found().measures, "admin_exponent": admin})
    shown = text_of(reproduction_page(ArtefactStatus(replace(ARTEFACT, claims=claims), "disagrees", seen)))
    assert "0 of 4 hold, 2 undecided; 1 of 1 check passes" in shown
    assert shown.index("the exponent of Pre-LN") < shown.index("the exponent of Post-LN")
    assert "check: by construction" in shown
    assert (
        "derived: from Lemma 0; convention: slow: at most 0.3; "
        + claims[1].turning(seen.measures["pre_exponent"])
        in shown
    )
    assert f"about {claims[2].runs_to_decide(seen.measures)} would decide it" in shown


def test_a_second_version_stands_above_the_first_with_both_verdicts():
    second = replace(changed(), version=2, date="2002-02-02", reason="The bound was ours.")
    before = (Superseded(1, "2001-01-01", "", "It grows.", ARTEFACT.claims, found()),)
    measures = {**found().measures, "pre_exponent": Measure(0.1, 0.0, 0.2)}
    now = replace(found(second), measures=measures)
    shown = text_of(reproduction_page(ArtefactStatus(second, "undecided", now, before=before)))
    assert "example.change: 2 of 5 hold" in shown
    assert "Version 2, 2002-02-02. The bound was ours." in shown
    earlier = f"1 of 5 hold, 2 undecided. Fingerprint {ARTEFACT.fingerprint()}. It grows."
    assert f"Version 1, 2001-01-01: {earlier}" in shown
    assert "pre exponent agrees 0.1 [0, 0.2]" in shown
    assert "pre exponent disagrees 0.52 [0.45, 0.59]" in shown
    assert shown.index("pre exponent agrees") < shown.index("pre exponent disagrees")


def test_every_drawing_is_there_once_with_its_panels():
    html = reproduction_page(ArtefactStatus(ARTEFACT, "disagrees", found()))
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
    shown = text_of(reproduction_page(ArtefactStatus(ARTEFACT, "disagrees", found())))
    assert "The first 400 of 1,500 rows; the JSON file beside this page holds all." in shown


def test_a_stale_result_says_so():
    shown = text_of(reproduction_page(ArtefactStatus(changed(), "stale", found())))
    assert "example.change: stale" in shown
    assert f"measured for another claim, {found().fingerprint}; today's is {changed().fingerprint()}" in shown


def test_what_was_not_run_says_how_to():
    shown = text_of(reproduction_page(ArtefactStatus(ARTEFACT, "not run")))
    assert "Nothing was measured. To measure it: normlab papers reproduce example.change" in shown
    bare = replace(ARTEFACT, study=None, claims=(), drawings=())
    assert "No study decides it yet." in text_of(reproduction_page(ArtefactStatus(bare, "no study yet")))
    damaged = reproduction_page(ArtefactStatus(ARTEFACT, "damaged", trouble="x.json is torn"))
    assert "x.json is torn" in text_of(damaged)


def test_a_drawing_that_finds_no_table_or_column_says_so_and_the_rest_is_drawn():
    line, *others = ARTEFACT.drawings
    astray = replace(ARTEFACT, drawings=(replace(line, y="nowhere"), replace(line, table="lost"), *others))
    shown = text_of(reproduction_page(ArtefactStatus(astray, "disagrees", found())))
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
    assert "Post fail 28.5 here 12.5 [10, 15]; 2 of 2 trained –" in plain
    assert "Pre 28.1 – 12.5 [10, 15]; 2 of 2 trained" in plain
    assert "updates 7 – – –" in plain
    assert "other – 12.5 [10, 15] 12, 13 2 of 2" in plain
