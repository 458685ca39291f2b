import polars as pl
import pytest

from normlab.figures.probes import by_depth
from normlab.report.flight import flown, watched
from normlab.report.page import Chart, Grid, Notes, Text
from normlab.report.run import run_page
from normlab.spec.config import Config
from normlab.store.folder import RunFolder, Status


def rows(steps=3, layers=2):
    return [
        {"step": step, "module": f"encoder.sublayers.{i}{part}", "probe": probe, "value": 1.0 + i + step}
        for step in range(1, steps + 1)
        for i in range(layers)
        for part, probe in (("", "output.rms"), (".f", "output.rms"), ("", "grad.l2"), ("", "other"))
    ]


REPORT = {
    "step": 9,
    "trigger": {"kind": "spike", "step": 7, "words": "the loss <jumped>"},
    "verdict": {"sentence": "layer <b> left its range", "module": "b", "step": 7, "evidence": ["11 times"]},
    "replay": {"from_step": 5, "checkpoint": True, "agrees": True},
    "ring": {},
}


def test_a_chart_for_each_probe_and_stack():
    (section,) = watched(rows())
    (grid,) = section.blocks
    assert isinstance(grid, Grid)
    charts = [block for block in grid.blocks if isinstance(block, Chart)]
    assert [c.name for c in charts] == ["output-rms-encoder", "output-rms-f-encoder", "grad-l2-encoder"]
    assert charts[0].table is not None
    assert charts[0].table["value"].to_list() == [2, 3, 3, 4, 4, 5]
    assert charts[1].table is not None
    assert set(charts[1].table["module"]) == {"encoder.sublayers.0.f", "encoder.sublayers.1.f"}


def test_nothing_measured_is_no_section():
    assert watched([]) == []
    assert watched([{"step": 1, "module": "embedding", "probe": "grad.l2", "value": 1.0}]) == []
    assert flown([]) == []


@pytest.mark.parametrize(("layers", "most"), [(3, 400), (100, 120)])
def test_a_line_has_few_points_and_a_chart_not_many_more(layers, most):
    long = [(step, f"s{i}", i, 1.0) for i in range(layers) for step in range(900)]
    frame = pl.DataFrame(long, schema=["step", "module", "depth", "value"], orient="row")
    (values,) = (v.splitlines() for v in by_depth(frame, "rms").to_dict()["datasets"].values())
    assert len(values) - 1 == layers * most


def test_values_that_a_log_axis_cannot_hold_are_left_out():
    frame = pl.DataFrame(
        {"step": [1, 2, 3], "module": "m", "depth": 0, "value": [0.0, float("nan"), float("inf")]}
    )
    assert "no finite value" in str(by_depth(frame, "rms").to_dict())


def test_a_report_is_a_sentence_with_its_evidence():
    (section,) = flown([REPORT])
    sentence, notes = section.blocks
    assert sentence == Text("Layer <b> left its range.", "alarm")
    assert isinstance(notes, Notes)
    assert [note.text for note in notes.notes] == [
        "written in step 9: the loss <jumped>",
        "11 times",
        "done again from the checkpoint of step 5, every known loss as before",
    ]


def test_the_page_of_a_run_shows_both_and_escapes_them(tmp_path):
    folder = RunFolder.create(tmp_path / "r", Config(recipe="pre"))
    folder.set_status(Status(state="done", step=9))
    folder.append_probes(rows())
    folder.add_flight(REPORT)
    html = run_page(folder.path)
    assert "Layer &lt;b&gt; left its range." in html
    assert "<jumped>" not in html
    assert "Stream, encoder" in html
