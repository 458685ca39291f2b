"""Drawings of a reproduction, by what their specifications say: data, scales, layers."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import polars as pl
import pytest

from normlab.report.charts.artefact import colours, panels
from normlab.report.charts.drawing import frame
from report.reproductions import ARTEFACT, PLACEMENTS, found

CHANGE, LONG, EXPONENTS, SHARES = ARTEFACT.drawings
TABLES = {name: frame(rows) for name, rows in found().tables.items()}
LEGEND = list(PLACEMENTS)


def of(chart, mark: str) -> list[dict]:
    """The layers of that mark, each with its data, which a chart of one layer holds for it."""
    whole = chart.to_dict()
    wanted = [layer for layer in whole["layer"] if layer["mark"]["type"] == mark]
    names = [layer.get("data", whole.get("data"))["name"] for layer in wanted]
    return [{**layer, "rows": whole["datasets"][name]} for layer, name in zip(wanted, names, strict=True)]


def data(layer: dict) -> pl.DataFrame:
    return pl.read_csv(StringIO(layer["rows"]))


def test_panels_share_one_scale_and_split_the_rows():
    lifted = TABLES["change"].with_columns(
        change=pl.when(pl.col("stack") == "decoder").then(100 * pl.col("change")).otherwise("change")
    )
    drawn = panels(CHANGE, lifted, LEGEND)
    assert list(drawn) == ["encoder", "decoder"]
    domains = {str(of(chart, "line")[0]["encoding"]["y"]["scale"]["domain"]) for chart in drawn.values()}
    assert len(domains) == 1
    means = {name: data(of(chart, "line")[0]) for name, chart in drawn.items()}
    assert means["decoder"]["mean"].sum() == pytest.approx(100 * means["encoder"]["mean"].sum(), rel=1e-4)
    assert len(means["encoder"]) == 3 * 6


def test_a_line_is_the_mean_with_a_rule_over_seeds_and_theory_dashed():
    chart = panels(CHANGE, TABLES["change"], LEGEND)["encoder"]
    line, theory = of(chart, "line")
    assert theory["mark"]["strokeDash"]
    assert "strokeDash" not in line["encoding"]
    at = data(line).filter((pl.col("recipe") == "post") & (pl.col("x") == 6)).row(0, named=True)
    values = TABLES["change"].filter(
        (pl.col("placement") == "post") & (pl.col("depth") == 6) & (pl.col("stack") == "encoder")
    )["change"]
    assert at["mean"] == pytest.approx(values.mean(), rel=1e-4)
    assert (at["low"], at["high"]) == pytest.approx((values.min(), values.max()), rel=1e-4)
    assert line["encoding"]["x"]["scale"]["type"] == line["encoding"]["y"]["scale"]["type"] == "log"
    assert line["encoding"]["color"]["scale"]["domain"] == LEGEND
    low, high = line["encoding"]["y"]["scale"]["domain"]
    assert low < TABLES["change"]["change"].min() < TABLES["change"]["change"].max() < high


def test_a_line_has_at_most_400_points_and_a_log_axis_leaves_out_what_has_no_place():
    (chart,) = panels(LONG, TABLES["long"], LEGEND).values()
    drawn = data(of(chart, "line")[0])
    assert drawn.group_by("recipe").len()["len"].max() == 400
    assert of(chart, "line")[0]["encoding"]["strokeDash"]["scale"]["domain"] == LEGEND
    table = pl.DataFrame({"step": [1, 2, 3, 4], "value": [1.0, -1.0, float("nan"), 4.0], "placement": "post"})
    (chart,) = panels(replace(LONG, log_y=True), table, LEGEND).values()
    assert data(of(chart, "line")[0])["x"].to_list() == [1, 4]
    (chart,) = panels(LONG, table, LEGEND).values()
    assert data(of(chart, "line")[0])["x"].to_list() == [1, 2, 4]


def test_bars_lie_from_zero_with_the_interval_that_encloses_them():
    (chart,) = panels(EXPONENTS, TABLES["exponents"], LEGEND).values()
    (bar,), (rule,) = of(chart, "bar"), of(chart, "rule")
    assert bar["encoding"]["x"]["scale"]["domain"][0] == 0.0
    assert "yOffset" not in bar["encoding"]
    drawn = data(rule)
    assert drawn["low"].to_list() == pytest.approx([0.94, 0.44, 0.49])
    assert drawn["high"].to_list() == pytest.approx([1.07, 0.57, 0.62])
    elsewhere = TABLES["exponents"].with_columns(low=pl.lit(5.0), high=pl.lit(6.0))
    (chart,) = panels(EXPONENTS, elsewhere, LEGEND).values()
    assert of(chart, "rule") == []


def test_bars_of_several_colours_stand_beside_each_other():
    table = pl.DataFrame(
        {"kind": ["q", "q", "k"], "placement": ["post", "pre", "post"], "exponent": [1, -2, 3]}
    )
    (chart,) = panels(replace(EXPONENTS, x="kind"), table, LEGEND).values()
    (bar,) = of(chart, "bar")
    assert bar["encoding"]["yOffset"]["sort"] == ["post", "pre"]
    low, high = bar["encoding"]["x"]["scale"]["domain"]
    assert low < -2.0 < 0.0 < 3.0 < high


def test_cells_share_their_shades():
    drawn = panels(SHARES, TABLES["shares"], LEGEND)
    assert list(drawn) == ["post", "pre"]
    for chart in drawn.values():
        (cells,) = of(chart, "rect")
        assert cells["encoding"]["color"]["scale"]["domain"] == [2.0**-17, 1.0]
        assert len(data(cells)) == 18 * 19 // 2


def test_words_on_the_horizontal_axis_keep_the_table_s_order():
    words = pl.DataFrame({"kind": ["zeta", "alpha", "mu"], "value": [1.0, 2.0, 3.0]})
    (chart,) = panels(replace(LONG, x="kind", colour=""), words, []).values()
    line = of(chart, "line")[0]
    assert line["encoding"]["x"]["sort"] == ["zeta", "alpha", "mu"]
    assert colours(replace(LONG, colour=""), words) == []


def test_a_table_without_a_finite_value_says_so():
    table = pl.DataFrame({"step": [1], "value": [float("nan")], "placement": ["post"]})
    (chart,) = panels(LONG, table, LEGEND).values()
    assert "no finite value" in str(chart.to_dict())


def test_a_missing_column_is_named():
    with pytest.raises(ValueError, match="'A long curve' needs value of the table 'long', which has step"):
        panels(LONG, TABLES["long"].drop("value").select("step", "placement"), LEGEND)


def test_colours_are_the_values_in_order():
    assert colours(CHANGE, TABLES["change"]) == LEGEND
    assert colours(SHARES, TABLES["shares"]) == []
