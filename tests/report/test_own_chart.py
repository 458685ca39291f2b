"""A kind of chart from outside the package: a dataclass and a function, drawn and stored like others."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from normlab.base.chart import Drawing
from normlab.diagnosis import Study
from normlab.errors import UserError
from normlab.report.diagnosis import diagnosis_page
from normlab.report.drawings import DRAW, DrawnTables, draw, draws
from normlab.report.page import Chart
from report.shown import alarms
from report.test_diagnosis import plain


@dataclass(frozen=True)
class Histogram(Drawing):
    """How often the values of a column occur."""

    column: str
    axis: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)


@pytest.fixture(autouse=True)
def own_kind():
    @draws(Histogram)
    def histogram(drawing, tables, name):
        rows = [{drawing.axis: row[drawing.column]} for row in tables.tables[drawing.table]]

        def picture(points):
            import altair as alt

            from normlab.report.charts.drawing import finish, frame, layer

            values = frame(rows).rename({drawing.axis: "value"})
            x = alt.X("value:Q", bin=alt.Bin(maxbins=30), title=drawing.axis)
            return finish(layer(values, "bar", {"style": "ink"}, x=x, y=alt.Y("count()")), 220)

        yield Chart(name, drawing.title, drawing.caption, picture, rows)

    yield
    del DRAW[Histogram]


CHART = Histogram("weights", "Weights at the start", "weight", "value")
ROWS = [{"weight": 0.1 * i} for i in range(9)]


def test_a_page_that_knows_nothing_of_the_study_draws_it_from_its_file():
    study = Study("weights", lambda subject: (), "cheap", title="Weights", charts=(CHART,))
    stored = json.loads(json.dumps(study.to_plain()))
    diagnosis = plain() | {"studies": [stored], "tables": {"weights": ROWS}}
    page = diagnosis_page(diagnosis)
    assert [chart.name for chart in page.charts()] == ["weights"]
    (chart,) = page.charts()
    assert chart.rows[1] == {"value": 0.1}
    assert chart.drawn().to_dict()["layer"][0]["encoding"]["x"]["bin"] == {"maxbins": 30}
    assert 'data-chart="weights"' in page.html()


def test_a_chart_that_does_not_fit_its_table_says_so_on_the_page():
    study = Study("weights", lambda subject: (), "cheap", title="Weights", charts=(CHART,))
    diagnosis = plain() | {"studies": [study.to_plain()], "tables": {"weights": [{"bias": 1.0}]}}
    (alarm,) = alarms(diagnosis_page(diagnosis).html())
    assert {"weight", "'weights',"} <= set(alarm.split())


def test_a_kind_that_nothing_draws_says_what_is_missing():
    function = DRAW.pop(Histogram)
    try:
        with pytest.raises(UserError, match=r"@draws\(Histogram\)"):
            draw(CHART, DrawnTables({"weights": ROWS}, {}))
    finally:
        DRAW[Histogram] = function
