"""The page of a diagnosis: from what its JSON file holds, without torch."""

import json
import math
import os
import re
import shutil

import polars as pl
import pytest

from normlab.diagnosis import registered
from normlab.report.charts.drawing import frame
from normlab.report.diagnosis import diagnosis_page, write_diagnosis
from normlab.report.page import Chart, anchor
from normlab.report.results.diagnosis import DiagnosisResult
from normlab.report.studies import ROWS, folded, study_sections
from report.shown import of_class

STACKS = {"encoder.sublayers": "encoder", "decoder.sublayers": "decoder"}
ROLES = ("self_attention", "cross_attention", "ffn")


def finding(name, severity, sentence, table="scales", reference="Somebody 2020", **numbers):
    return {"name": name, "severity": severity, "sentence": sentence, "table": table, "numbers": numbers,
            "reference": reference}  # fmt: skip


def sublayers(count, **columns):
    """Rows of both stacks."""
    return [
        {"stack": stack, "index": i, "layer": i // len(roles), "role": roles[i % len(roles)],
         "module": f"{stack}.{i}.f", "block": f"{stack}.{i}", **{name: f(i) for name, f in columns.items()}}
        for stack, roles in zip(STACKS, (ROLES[::2], ROLES), strict=True)
        for i in range(count)
    ]  # fmt: skip


def hand_made(count):
    """The tables of a small model, by name."""
    both = {"placement": lambda i: "post", "relation": lambda i: "after = norm(before + branch)"}
    fits = [
        {"stack": stack, "kind": kind, "law": law, "coefficient": 0.1, "exponent": p, "low": 0.1, "high": 0.9,
         "r2": 0.9, "aic": -3.0}
        for stack in STACKS
        for kind in ("random", "update")
        for law, p in (("power", 0.7), ("log", None), ("linear", None), ("constant", None))
    ]  # fmt: skip
    changes = [
        {"stack": stack, "kind": kind, "depth": n, "change": 0.1 * n, "seed": seed}
        for stack in STACKS
        for kind, seeds in (("random", 3), ("update", 1))
        for seed in range(seeds)
        for n in range(1, count + 1)
    ]
    return {
        "structure": sublayers(count, **both),
        "scales": [
            {**row, "signal": signal}
            for signal in ("after", "total")
            for row in sublayers(
                count,
                mean_square=lambda i: 1.0 + i,
                theory=lambda i: 1.0 + i,
                theory_low=lambda i: None,
                theory_high=lambda i: None,
                source=lambda i: "Lemma 2",
            )
        ],
        "sublayer_gradients": sublayers(count, relative=lambda i: "nan" if i == 1 else 10.0**-i),
        "parameter_gradients": sublayers(count, parameter=lambda i: f"p{i}", grad_l2=lambda i: 1.0 / (i + 1)),
        "dependency": [
            {"stack": s, "of": i, "on": j, "beta_sq": 1 / (i + 2)}
            for s in STACKS
            for i in range(count)
            for j in range(-1, i + 1)
        ],
        "output_change": changes,
        "output_change_fit": fits,
        "updates": [
            {"parameter": f"{i}.{kind}", "kind": kind, "stack": None, "layer": None, "grad_l2": 1.0,
             "grad_relative": 0.1, "update_relative": 1.0, "update_over_weight": 0.01}
            for kind in ("query", "ffn_in")
            for i in range(3)
        ],
        "attention": [
            {"stack": s, "index": i, "head": h, "entropy": 1.0, "max_logit": 2.0, "uniform": 2.0}
            for s in STACKS for i in (0, 3) for h in (0, 1)
        ],
        "similarity": [
            {"stack": s, "index": i, "cosine": 0.1 * i, "effective_rank": 5.0}
            for s in STACKS for i in range(-1, count)
        ],
        "curvature": [{"quantity": "critical_lr", "value": "inf", "detail": "no <rate> raises it"}],
    }  # fmt: skip


def plain(count=6):
    """What ``Diagnosis.to_plain`` gives of a small model, in numbers made by hand."""
    first = finding("a", "problem", "the first <b> thing; and more", factor=123.456)
    return {
        "cause": first,
        "title": "post, 3+2 layers",
        "model": "Seq2Seq",
        "preset": "standard",
        "command": "normlab diagnose --recipe post",
        "facts": {"parameters": "1,234", "batch": "4×5", "device": "cpu", "loss": "5.1"},
        "case": {"recipe": "post; layernorm", "warm-up": "40 steps"},
        "structure": "encoder.sublayers: 3 layers",
        "stacks": STACKS,
        "findings": [
            first,
            finding("follows", "warning", "a sequel", "updates"),
            finding("b", "warning", "a second thing", "", reference=""),
            finding("c", "note", "this is so", share=None),
        ],
        "studies": [study.to_plain() for study in registered()],
        "seconds": {"scales": 1.5, "output_change": 70.0},
        "peak_memory_bytes": 3 * 2**30,
        "tables": hand_made(count),
    }


def charts(diagnosis):
    return {
        c.name: c
        for s in study_sections(DiagnosisResult.of(diagnosis))
        for c in s.blocks[0].blocks
        if isinstance(c, Chart)
    }


def test_the_cause_stands_first_then_its_picture_then_the_other_findings():
    page = diagnosis_page(plain()).html()
    order = [
        "The first &lt;b&gt; thing</h1>",
        "And more.",
        'id="figure-scales-mean_square-encoder"',
        "A sequel",
        "A second thing",
        "What the first line is based on",
        "1 note on",
        "This is so",
    ]
    order += ['id="sublayer_gradients"', 'id="tables"', 'id="how"']
    places = [page.index(words) for words in order]
    assert places == sorted(places)
    assert 'href="#figure-scales-mean_square-encoder">scales</a>: factor = 123.5' in page
    assert '<a href="#figure-updates">updates</a>' in page
    assert "<summary>source</summary>Somebody 2020" in page
    assert plain()["command"] in page
    for fact in ("parameters 1,234", "warm-up 40 steps", "1 min 12 s of measuring", "3.00 GiB at most"):
        assert fact in page
    assert f"recipe {plain()['case']['recipe']}" not in page


@pytest.mark.slow
def test_without_findings_of_weight_notes_are_open():
    quiet = plain() | {"findings": [finding("c", "note", "this is so"), finding("d", "note", "and this")]}
    verdict = "nothing found in 2 studies"
    page = diagnosis_page(quiet | {"cause": None, "verdict": verdict}).html()
    assert f"{verdict.capitalize()}</h1>" in page
    assert re.search(r"<details open>\s*<summary>2 notes", page)
    assert diagnosis_page(plain() | {"findings": [], "cause": None}).html()


def test_rows_that_differ_in_their_layer_alone_are_one():
    rows = [
        {"index": i, "layer": i // 2, "role": ("attention", "ffn")[i % 2], "module": f"h.{i}.f", "of": 3}
        for i in range(8)
    ]
    assert folded(rows) == [
        {"index": f"{i} to {i + 6}", "layer": "0 to 3", "role": role, "module": "h.*.f", "of": 3}
        for i, role in enumerate(("attention", "ffn"))
    ]
    assert folded(rows[:1]) == rows[:1]


@pytest.mark.slow
def test_every_stack_has_its_charts():
    found = charts(plain())
    by_stack = (
        "scales-mean_square",
        "sublayer_gradients-relative",
        "parameter_gradients-grad_l2",
        "dependency",
        "output_change",
        "attention-entropy",
        "similarity-cosine",
        "similarity-effective_rank",
    )
    assert set(found) == {f"{name}-{label}" for name in by_stack for label in STACKS.values()} | {"updates"}
    scales = found["scales-mean_square-encoder"]
    drawn = scales.drawn().to_dict()
    points = pl.read_csv(max(drawn["datasets"].values(), key=len).encode())
    assert points["depth"].to_list() == [0, 0.5, 1, 1.5, 2, 2.5]
    assert [row["role"] for row in scales.rows] == ["self-attention", "feed-forward"] * 3
    assert [row["module"] for row in scales.rows] == [f"encoder.sublayers.{i}.f" for i in range(6)]
    assert [row["mean square"] for row in scales.rows] == points["mean_square"].to_list()
    for chart in found.values():
        chart.drawn().to_dict()  # which validates it; a page does not


def test_stacks_share_an_axis():
    data = plain()
    for row in data["tables"]["scales"]:
        row["mean_square"] *= 100.0 if row["stack"].startswith("decoder") else 1.0
    specs = [charts(data)[f"scales-mean_square-{label}"].drawn().to_dict() for label in STACKS.values()]
    domains = [json.dumps(spec["layer"][-1]["encoding"]["y"]["scale"]["domain"]) for spec in specs]
    assert domains[0] == domains[1]


def test_fitted_lines_go_through_the_means():
    chart = charts(plain())["output_change-encoder"].drawn().to_dict()
    text = max((d for d in chart["datasets"].values() if "value" in d), key=len)
    lines = pl.read_csv(text.encode())
    linear = lines.filter((pl.col("law") == "N") & pl.col("recipe").str.starts_with("a random"))
    assert linear["value"].to_list() == pytest.approx([0.1 * n for n in range(1, 7)], rel=1e-3)
    power = lines.filter((pl.col("law") == "a power of N") & pl.col("recipe").str.starts_with("a random"))
    assert power["value"].to_list() == pytest.approx([0.1 * n**0.7 for n in range(1, 7)], rel=1e-3)
    logarithm = lines.filter((pl.col("law") == "log N") & pl.col("recipe").str.starts_with("one step"))
    start = sum(0.1 * n - 0.1 * math.log(n) for n in range(1, 7)) / 6
    assert logarithm["value"].to_list() == pytest.approx(
        [start + 0.1 * math.log(n) for n in range(1, 7)], rel=1e-3
    )


def test_deep_stacks_are_drawn_in_groups():
    chart = charts(plain(150))["dependency-decoder"].drawn().to_dict()
    cells = pl.read_csv(max(chart["datasets"].values(), key=len).encode())
    assert len(cells) <= 60 * 61
    rows = cells.group_by("y").agg(pl.col("value").sum())
    assert rows["value"].to_list() == pytest.approx([1.0] * len(rows), rel=1e-3)


def test_what_was_not_measured_is_not_drawn():
    data = plain()
    data["tables"] = {"structure": data["tables"]["structure"]}
    assert charts(data) == {}
    assert 'id="scales"' not in diagnosis_page(data).html()


def test_long_tables_are_cut_and_say_so():
    data = plain()
    data["tables"]["updates"] = [
        {**row, "grad_l2": float(i)} for i, row in enumerate(data["tables"]["updates"] * 100)
    ]
    page = diagnosis_page(data).html()
    (cut,) = [note for note in of_class(page, "note") if f"{ROWS} of " in note]
    assert "600 rows" in cut
    assert page.count("0.query") < ROWS
    assert "&lt;rate&gt;" in page


def test_numbers_that_are_not_finite_come_back():
    read = frame([{"a": 1, "b": "nan", "c": "x"}, {"a": None, "b": 2.0, "c": None}])
    assert read.schema == {"a": pl.Int64, "b": pl.Float64, "c": pl.String}
    assert math.isnan(read["b"][0])


def test_anchors_differ_where_texts_do():
    assert len({anchor(text) for text in ("a.b", "a-b", "a b")}) == 3


def test_page_and_json_lie_side_by_side(tmp_path):
    page = write_diagnosis(plain(), tmp_path / "new", "diagnosis-best")
    assert page == tmp_path / "new" / "diagnosis-best.html"
    assert json.loads((tmp_path / "new" / "diagnosis-best.json").read_text()) == json.loads(
        json.dumps(plain())
    )
    assert page.stat().st_size < 5_000_000


CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium (apt install chromium, or set $CHROMIUM)")
def test_every_chart_is_drawn_in_a_browser(tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api")
    page_file = write_diagnosis(plain(), tmp_path)
    with sync_api.sync_playwright() as playwright:
        flags = ["--headless", "--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        for width in (390, 1200):
            page, trouble = browser.new_page(viewport={"width": width, "height": 900}), []
            page.on("console", lambda message, trouble=trouble: trouble.append(message.text))
            page.on("pageerror", lambda error, trouble=trouble: trouble.append(str(error)))
            page.goto(page_file.as_uri())
            page.wait_for_function("document.documentElement.dataset.drawn === 'yes'")
            assert trouble == []
            assert page.locator(".chart svg").count() == len(charts(plain()))
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        browser.close()
