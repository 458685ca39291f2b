import polars as pl
import vl_convert

from hidden_scale import picture
from normlab.report.charts.theme import theme

FRAME = pl.DataFrame(
    {
        "stack": ["encoder"] * 3 + ["decoder"] * 2,
        "sublayer": [0, 1, 2, 0, 1],
        "low": [1.0, 2.0, 3.0, 1.0, 0.5],
        "mid": [1.5, 2.5, 3.5, 1.0, 0.6],
        "high": [2.0, 3.0, 9.0, 1.0, 0.7],
    }
)


def test_one_line_and_one_band_a_stack_on_the_given_axis() -> None:
    chart = picture(FRAME, (0.1, 100.0)).to_dict()
    band, line = chart["layer"]
    assert (band["mark"]["type"], line["mark"]["type"]) == ("area", "line")
    for layer, field in ((band, "low"), (line, "mid")):
        y = layer["encoding"]["y"]
        assert (y["field"], y["scale"]["type"], y["scale"]["domain"]) == (field, "log", [0.1, 100.0])
        assert y["axis"]["values"] == [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0]
    assert line["encoding"]["color"]["scale"]["domain"] == ["encoder", "decoder"]
    dashes = line["encoding"]["strokeDash"]["scale"]["range"]
    assert dashes[0] != dashes[1]


def test_it_draws_in_both_modes_and_both_stacks_are_named_once() -> None:
    chart = picture(FRAME, (0.1, 100.0)).to_dict()
    drawn = {mode: vl_convert.vegalite_to_svg(chart, config=theme(mode)) for mode in ("light", "dark")}
    assert drawn["light"] != drawn["dark"]
    for svg in drawn.values():
        assert "NaN" not in svg
        assert [svg.count(f">{stack}</text>") for stack in ("encoder", "decoder")] == [1, 1]
