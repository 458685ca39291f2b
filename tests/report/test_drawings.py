"""Charts as data are drawn: by what their specifications say of data, scales and layers."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import polars as pl
import pytest

from normlab.base.chart import Drawing
from normlab.report.drawings import DRAW, DrawnTables, draw, groups_of
from report.reproductions import ARTEFACT, PLACEMENTS, found

CHANGE, LONG, EXPONENTS, SHARES = ARTEFACT.drawings
TABLES = found().tables
LEGEND = list(PLACEMENTS)


def drawn(drawing, rows, legend=LEGEND):
    """The charts of these rows by the end of their titles, which is the panel."""
    charts = draw(drawing, DrawnTables({drawing.table: rows}, {}, legend))
    return {chart.title.removeprefix(drawing.title).removeprefix(", "): chart.drawn() for chart in charts}


def of(chart, mark: str) -> list[dict]:
    """The layers of that mark, each with its data, which the layer or the chart holds."""
    whole = chart.to_dict()
    wanted = [layer for layer in whole["layer"] if layer["mark"]["type"] == mark]
    names = [layer.get("data", whole.get("data"))["name"] for layer in wanted]
    return [{**layer, "rows": whole["datasets"][name]} for layer, name in zip(wanted, names, strict=True)]


def data(layer: dict) -> pl.DataFrame:
    return pl.read_csv(StringIO(layer["rows"]))


def test_panels_share_one_scale_and_split_the_rows():
    lifted = [
        row | {"change": row["change"] * (100 if row["stack"] == "decoder" else 1)}
        for row in TABLES["change"]
    ]
    panels = drawn(CHANGE, lifted)
    assert list(panels) == ["encoder", "decoder"]
    domains = {str(of(chart, "line")[0]["encoding"]["y"]["scale"]["domain"]) for chart in panels.values()}
    assert len(domains) == 1
    means = {name: data(of(chart, "line")[0]) for name, chart in panels.items()}
    assert means["decoder"]["mean"].sum() == pytest.approx(100 * means["encoder"]["mean"].sum(), rel=1e-4)
    assert len(means["encoder"]) == 3 * 6


def test_a_line_is_the_mean_with_a_rule_over_seeds_and_theory_dashed():
    chart = drawn(CHANGE, TABLES["change"])["encoder"]
    line, theory = of(chart, "line")
    assert theory["mark"]["strokeDash"]
    assert "strokeDash" not in line["encoding"]
    at = data(line).filter((pl.col("recipe") == "post") & (pl.col("x") == 6)).row(0, named=True)
    wanted = {"placement": "post", "depth": 6, "stack": "encoder"}
    values = [row["change"] for row in TABLES["change"] if wanted.items() <= row.items()]
    assert at["mean"] == pytest.approx(sum(values) / len(values), rel=1e-4)
    assert (at["low"], at["high"]) == pytest.approx((min(values), max(values)), rel=1e-4)
    assert line["encoding"]["x"]["scale"]["type"] == line["encoding"]["y"]["scale"]["type"] == "log"
    assert line["encoding"]["color"]["scale"]["domain"] == LEGEND
    low, high = line["encoding"]["y"]["scale"]["domain"]
    changes = [row["change"] for row in TABLES["change"]]
    assert low < min(changes) < max(changes) < high


def test_a_line_has_at_most_400_points_and_a_log_axis_leaves_out_what_has_no_place():
    (chart,) = drawn(LONG, TABLES["long"]).values()
    points = data(of(chart, "line")[0])
    assert points.group_by("recipe").len()["len"].max() == 400
    assert of(chart, "line")[0]["encoding"]["strokeDash"]["scale"]["domain"] == LEGEND
    values = {1: 1.0, 2: -1.0, 3: "nan", 4: 4.0}
    table = [{"step": step, "value": value, "placement": "post"} for step, value in values.items()]
    (chart,) = drawn(replace(LONG, log_y=True), table).values()
    assert data(of(chart, "line")[0])["x"].to_list() == [1, 4]
    (chart,) = drawn(LONG, table).values()
    assert data(of(chart, "line")[0])["x"].to_list() == [1, 2, 4]


def test_bars_lie_from_zero_with_the_interval_that_encloses_them():
    (chart,) = drawn(EXPONENTS, TABLES["exponents"]).values()
    (bar,), (rule,) = of(chart, "bar"), of(chart, "rule")
    assert bar["encoding"]["x"]["scale"]["domain"][0] == 0.0
    assert "yOffset" not in bar["encoding"]
    intervals = data(rule)
    assert intervals["low"].to_list() == pytest.approx([0.94, 0.44, 0.49])
    assert intervals["high"].to_list() == pytest.approx([1.07, 0.57, 0.62])
    elsewhere = [row | {"low": 5.0, "high": 6.0} for row in TABLES["exponents"]]
    (chart,) = drawn(EXPONENTS, elsewhere).values()
    assert of(chart, "rule") == []


def test_bars_of_several_colours_stand_beside_each_other():
    values = [("q", "post", 1), ("q", "pre", -2), ("k", "post", 3)]
    table = [{"kind": kind, "placement": name, "exponent": value} for kind, name, value in values]
    (chart,) = drawn(replace(EXPONENTS, x="kind"), table).values()
    (bar,) = of(chart, "bar")
    assert bar["encoding"]["yOffset"]["sort"] == ["post", "pre"]
    low, high = bar["encoding"]["x"]["scale"]["domain"]
    assert low < -2.0 < 0.0 < 3.0 < high


def test_cells_share_their_shades():
    panels = drawn(SHARES, TABLES["shares"])
    assert list(panels) == ["post", "pre"]
    for chart in panels.values():
        (cells,) = of(chart, "rect")
        assert cells["encoding"]["color"]["scale"]["domain"] == [2.0**-17, 1.0]
        assert len(data(cells)) == 18 * 19 // 2


def test_words_on_the_horizontal_axis_keep_the_table_s_order():
    words = [{"kind": kind, "value": value} for kind, value in (("zeta", 1.0), ("alpha", 2.0), ("mu", 3.0))]
    (chart,) = drawn(replace(LONG, x="kind", group=""), words, []).values()
    line = of(chart, "line")[0]
    assert line["encoding"]["x"]["sort"] == ["zeta", "alpha", "mu"]
    assert groups_of(replace(LONG, group=""), words) == []


def test_a_table_without_a_finite_value_says_so():
    (chart,) = drawn(LONG, [{"step": 1, "value": "nan", "placement": "post"}]).values()
    assert "finite" in str(chart.to_dict())


def test_a_missing_column_is_named():
    with pytest.raises(ValueError, match=r"'A long curve' .*\bvalue\b.* 'long'.*\bstep\b"):
        drawn(LONG, [{"step": 1, "placement": "post"}])


def test_colours_are_the_values_in_order():
    assert groups_of(CHANGE, TABLES["change"]) == LEGEND
    assert groups_of(SHARES, TABLES["shares"]) == []
    widths = [{"step": 1, "value": 1.0, "d_ff": width} for width in (512, 64, 512)]
    assert groups_of(replace(LONG, group="d_ff"), widths) == ["d_ff 512", "d_ff 64"]


def test_groups_that_the_page_does_not_explain_have_a_legend_in_the_chart():
    (on_page,) = drawn(LONG, TABLES["long"]).values()
    (alone,) = drawn(LONG, TABLES["long"], legend=["self-attention"]).values()
    colours = [of(chart, "line")[0]["encoding"]["color"] for chart in (on_page, alone)]
    assert "legend" not in colours[0]
    assert colours[1]["legend"]["orient"] == "top"
    assert colours[1]["scale"]["domain"] == LEGEND


def test_every_kind_is_drawn_and_comes_back_from_a_file():
    kinds = [kind for kind in Drawing.__subclasses__() if kind.__module__ == Drawing.__module__]
    assert set(kinds) <= set(DRAW)
    for drawing in ARTEFACT.drawings:
        assert Drawing.from_plain(drawing.to_plain()) == drawing


def test_a_chart_without_pictures_is_its_points_in_words():
    encoder, _ = draw(CHANGE, DrawnTables({"change": TABLES["change"]}, {}, LEGEND))
    assert encoder.rows[0] == {
        "placement": "post", "layers N": 6, "mean square": TABLES["change"][0]["change"],
        "theory": TABLES["change"][0]["theory"],
    }  # fmt: skip
