import json
import os
import shutil

import polars as pl
import pytest

from normlab.cli.run import ReportCommand
from normlab.errors import UserError
from normlab.lab.config import Config
from normlab.lab.runs.folder import RunFolder, Status
from normlab.report.charts.probes import probe_by_step
from normlab.report.page import Chart, Columns, Notes, Text
from normlab.report.run import run_page
from normlab.report.watch import flight_sections, sublayer_sections, write_probes_page

OUTSIDE = {"step": 1, "stack": None, "index": None, "module": "embedding", "value": 1.0}
OUTSIDE |= {"signal": "grad", "statistic": "l2"}


def rows(steps=3, layers=2):
    return [
        {"step": step, "stack": "encoder.sublayers", "index": i, "module": f"encoder.sublayers.{i}{part}",
         "signal": signal, "statistic": statistic, "value": 1.0 + i + step}
        for step in range(1, steps + 1)
        for i in range(layers)
        for part, signal, statistic in (
            ("", "after", "rms"), (".f", "branch", "rms"), ("", "grad", "l2"), ("", "after", "other")
        )
    ]  # fmt: skip


REPORT = {
    "step": 9,
    "trigger": {"kind": "spike", "step": 7, "words": "the loss <jumped>"},
    "verdict": {"sentence": "layer <b> left its range", "module": "b", "step": 7, "evidence": ["11 times"]},
    "replay": {"from_step": 5, "checkpoint": True, "agrees": True},
    "ring": {},
}


def test_a_chart_for_each_probe_and_stack():
    (section,) = sublayer_sections(rows())
    (grid,) = section.blocks
    assert isinstance(grid, Columns)
    charts = [block for block in grid.blocks if isinstance(block, Chart)]
    assert [c.name for c in charts] == ["after-rms-encoder", "branch-rms-encoder", "grad-l2-encoder"]
    names = "encoder.sublayers.0", "encoder.sublayers.1"
    assert charts[0].rows == [{"step": n, names[0]: n + 1, names[1]: n + 2} for n in (1, 2, 3)]
    assert [name.removesuffix(".f") for name in charts[1].rows[0]] == ["step", *names]


def test_a_table_has_the_mean_of_the_micro_batches_of_a_step():
    again = [row | {"value": row["value"] + 1} for row in rows(steps=1)]
    (section,) = sublayer_sections([*rows(), *again])
    names = "encoder.sublayers.0", "encoder.sublayers.1"
    first = section.blocks[0].blocks[0].rows[0]
    assert first == {"step": 1, names[0]: 2.5, names[1]: 3.5}


def test_nothing_measured_is_no_section():
    assert sublayer_sections([]) == []
    assert sublayer_sections([OUTSIDE]) == []
    assert flight_sections([]) == []


@pytest.mark.parametrize(("layers", "most"), [(3, 400), (100, 120)])
def test_a_line_has_few_points_and_a_chart_not_many_more(layers, most):
    long = [(step, f"s{i}", i, 1.0) for i in range(layers) for step in range(900)]
    frame = pl.DataFrame(long, schema=["step", "module", "depth", "value"], orient="row")
    (values,) = (v.splitlines() for v in probe_by_step(frame, "rms").to_dict()["datasets"].values())
    assert len(values) - 1 == layers * most


def test_values_that_a_log_axis_cannot_hold_are_left_out():
    frame = pl.DataFrame(
        {"step": [1, 2, 3], "module": "m", "depth": 0, "value": [0.0, float("nan"), float("inf")]}
    )
    assert "finite" in str(probe_by_step(frame, "rms").to_dict())


def test_a_report_is_a_sentence_with_its_evidence():
    (section,) = flight_sections([REPORT])
    sentence, notes = section.blocks
    assert sentence == Text("Layer <b> left its range.", "alarm")
    assert isinstance(notes, Notes)
    assert [note.text for note in notes.notes] == [
        "written in step 9: the loss <jumped>",
        "11 times",
        "repeated from the checkpoint of step 5; every known loss came out as before",
    ]


def test_the_page_of_a_run_shows_both_and_escapes_them(tmp_path):
    folder = RunFolder.create(tmp_path / "r", Config(recipe="pre"))
    folder.set_status(Status(state="done", step=9))
    folder.append_probes(rows())
    folder.add_flight(REPORT)
    html = run_page(folder.path)
    assert "Layer &lt;b&gt; " in html
    assert "<jumped>" not in html
    assert "Stream, encoder" in html


def test_a_page_says_how_many_steps_were_watched_and_how_many_measured(tmp_path):
    file = tmp_path / "watch.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows()))
    file.with_suffix(".flight.json").write_text(json.dumps({"reports": [], "steps": 30, "losses": 30}))
    html = write_probes_page(file, tmp_path / "watch.html").read_text()
    assert "30 steps watched" in html
    assert "3 measured steps" in html


def test_rows_of_another_trainer_are_drawn(tmp_path):
    file = tmp_path / "probes.jsonl"
    nan = OUTSIDE | {"value": "nan", "step": 2}
    content = "\n".join(json.dumps(row) for row in [*rows(), OUTSIDE, nan])
    file.write_text(content + '\n{"step": 9, "mod')
    page = ReportCommand(of=str(file)).write()
    assert page == tmp_path / "probes.html"
    html = page.read_text()
    for words in (
        "Stream, encoder",
        "Gradient norm, encoder",
        "Grad, l2",
        "steps 1 to 3",
        "3 measured steps",
    ):
        assert words in html
    assert write_probes_page(file, tmp_path / "other.html").read_text() == html


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        ("", ["no rows of probes"]),
        ('{"step": 1}\n{}', ["row 1", "lacks module"]),
        ("[1]\n{}", ["line 1"]),
        ("step\n{}", ["damaged in line 1"]),
    ],
)
def test_files_without_rows_of_probes_are_refused(tmp_path, content, facts):
    file = tmp_path / "probes.jsonl"
    file.write_text(content)
    with pytest.raises(UserError) as refused:
        write_probes_page(file, tmp_path / "page.html")
    assert all(fact in str(refused.value) for fact in [*facts, str(file)])


def test_a_training_that_failed_before_its_first_row_has_a_page(tmp_path):
    file = tmp_path / "watch.jsonl"
    file.with_suffix(".flight.json").write_text(json.dumps({"reports": [REPORT]}))
    page = write_probes_page(file, tmp_path / "watch.html")
    assert "Layer &lt;b&gt; " in page.read_text()
    with pytest.raises(FileNotFoundError):
        write_probes_page(tmp_path / "none.jsonl", tmp_path / "none.html")


CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium (apt install chromium, or set $CHROMIUM)")
def test_the_page_of_probes_is_drawn_in_a_browser(tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api")
    file = tmp_path / "probes.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in [*rows(), OUTSIDE]))
    page_file = write_probes_page(file, tmp_path / "probes.html")
    with sync_api.sync_playwright() as playwright:
        flags = ["--headless", "--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        page, trouble = browser.new_page(viewport={"width": 390, "height": 900}), []
        page.on("console", lambda message: trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.goto(page_file.as_uri())
        page.wait_for_function("document.documentElement.dataset.drawn === 'yes'")
        assert trouble == []
        assert page.locator(".chart svg").count() == 4
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        browser.close()
