import math
from typing import Any

import numpy as np
import polars as pl
import pytest
import vl_convert

from normlab.report.charts.curves import CurveAxis, mean_curves
from normlab.report.charts.theme import MANY, theme

LOSS = CurveAxis("nll", "nats")
RECIPES = ["pre", "enc:post/dec:pre", "v1.5[a]"]


def run(recipe: str, name: str, values: list[float], outcome: str = "trained") -> pl.DataFrame:
    return pl.DataFrame(
        {
            "recipe": recipe,
            "run": name,
            "seed": "1",
            "outcome": outcome,
            "step": range(10, 10 * len(values) + 10, 10),
            "nll": values,
        }
    )


def fall(rows: int, seed: int = 0) -> list[float]:
    return list(2 + 6 * np.exp(-np.arange(rows) / 20) + np.random.default_rng(seed).normal(0, 0.01, rows))


def layers(frame: pl.DataFrame, axis: CurveAxis = LOSS, **more: Any) -> dict[str, list[dict[str, Any]]]:
    """The chart's layers by mark; it must also draw, as SVG, without a browser."""
    chart = mean_curves(frame, RECIPES, axis, **more)
    svg = vl_convert.vegalite_to_svg(chart.to_dict(), config=theme())
    assert "<path" in svg or "<text" in svg
    assert "NaN" not in svg
    found: dict[str, list[dict[str, Any]]] = {}
    spec = chart.to_dict()
    for layer in spec["layer"]:
        data = spec["datasets"][(layer.get("data") or spec["data"])["name"]]
        rows = pl.read_csv(data.encode()).to_dicts() if isinstance(data, str) else data
        found.setdefault(layer["mark"]["type"], []).append(layer | {"rows": rows})
    return found


def values(layer: dict[str, Any]) -> list[dict[str, Any]]:
    return layer["rows"]


@pytest.mark.slow
def test_mean_and_band_over_seeds() -> None:
    a, b = fall(50, 1), fall(50, 2)
    found = layers(pl.concat([run("pre", "a", a), run("pre", "b", b)]))
    line = values(found["line"][0])
    assert line[7]["mean"] == pytest.approx((a[7] + b[7]) / 2, rel=1e-4)
    assert (line[7]["low"], line[7]["high"]) == pytest.approx(sorted((a[7], b[7])), rel=1e-4)
    assert line[7]["runs"] == 2
    assert len(found["area"]) == 1


def test_of_many_recipes_the_band_shows_only_in_focus() -> None:
    runs = pl.concat([run("pre", "a", fall(50, 1)), run("pre", "b", fall(50, 2))])

    def area(recipes: int) -> dict[str, Any]:
        axis = CurveAxis("nll", "loss")
        spec = mean_curves(runs, ["pre", *(f"r{i}" for i in range(1, recipes))], axis).to_dict()
        (found,) = (layer for layer in spec["layer"] if layer["mark"]["type"] == "area")
        return found["encoding"]["opacity"]

    few, many = area(MANY), area(MANY + 1)
    assert few["condition"][0]["value"] > 0
    assert many["condition"][0]["value"] == many["value"] == 0
    assert many["condition"][1]["value"] > 0


@pytest.mark.slow
def test_one_seed_has_no_band() -> None:
    assert "area" not in layers(run("pre", "a", fall(50)))


@pytest.mark.parametrize("state", ["stuck", "ignores its source"])
def test_a_run_that_did_not_train_is_drawn_alone_and_not_averaged(state: str) -> None:
    stuck = run("pre", "bad", [5.0] * 30, state)
    found = layers(pl.concat([run("pre", "good", fall(50)), stuck]))
    means, strays = found["line"]
    assert {row["runs"] for row in values(means)} == {1}
    assert {row["run"] for row in values(strays)} == {"bad"}
    (end,) = values(found["point"][0])
    assert (end["step"], end["outcome"]) == (300, state)


def test_a_diverging_run_does_not_flatten_the_others() -> None:
    up = run("pre", "up", [8.0, 5.0, 6.0, 40.0, 4000.0, math.inf], "diverged")
    found = layers(pl.concat([run("enc:post/dec:pre", "good", fall(50)), up]))
    bottom, top = found["line"][0]["encoding"]["y"]["scale"]["domain"]
    assert 0 <= bottom < 2.3
    assert 8 < top < 9
    (end,) = values(found["point"][0])
    assert end["step"] == 40  # where it leaves the picture
    assert end["mean"] == pytest.approx(top, rel=1e-3)


def test_a_spike_does_not_end_the_line_of_a_run_that_did_not_train() -> None:
    stuck = run("pre", "bad", [8.0, 7.0, 40.0, 7.0, 6.0, 7.0], "stuck")
    up = run("enc:post/dec:pre", "up", [8.0, 7.0, 40.0, 7.0, 50.0, 7.0], "diverged")
    (lines,) = layers(pl.concat([stuck, up]))["line"]
    steps = {name: [row["step"] for row in values(lines) if row["run"] == name] for name in ("bad", "up")}
    assert steps == {"bad": [10, 20, 30, 40, 50, 60], "up": [10, 20, 30, 40]}


def test_every_recipe_may_be_stuck() -> None:
    found = layers(run("pre", "bad", [5.0] * 30, "stuck"))
    assert len(found["line"]) == 1
    assert len(values(found["point"][0])) == 1


def test_nothing_finite_says_so() -> None:
    found = layers(run("pre", "bad", [math.nan, math.inf], "diverged"))
    assert found["text"][0]["mark"]["text"] == "no finite value"


def test_scores_of_zero_alone_have_an_axis_with_readable_ticks() -> None:
    (point,) = layers(run("pre", "bad", [0.0, 0.0], "stuck"))["point"]
    assert point["encoding"]["y"]["scale"]["domain"] == [0.0, 1.0]


def test_a_level_only_on_a_linear_axis() -> None:
    frame = run("pre", "a", fall(50))
    assert values(layers(frame, entropy_nats=4.1)["text"][0]) == [{"level": 4.1}]
    assert "text" not in layers(frame, CurveAxis("nll", "nats", log=True), entropy_nats=4.1)


def test_the_axis_reaches_down_to_a_level_that_no_loss_does() -> None:
    frame = run("pre", "a", [6.0, 5.9], "stuck")
    found = layers(frame, entropy_nats=4.1)
    assert found["line"][0]["encoding"]["y"]["scale"]["domain"][0] < 4.1
    assert "text" not in layers(frame, entropy_nats=7.0)


def test_a_log_axis_has_round_ticks_and_no_zeros() -> None:
    frame = run("pre", "a", [0.0, 0.3, 30.0, 1.0])
    (line,) = layers(frame, CurveAxis("nll", "norm", log=True))["line"]
    assert len(values(line)) == 3
    assert line["encoding"]["y"]["axis"]["values"] == pytest.approx([1, 10])
    near = layers(run("pre", "a", [0.6, 3.0]), CurveAxis("nll", "norm", log=True))["line"][0]
    assert near["encoding"]["y"]["axis"]["values"] == pytest.approx([1, 2])


def test_names_with_dots_and_brackets_can_be_read_in_the_tooltip() -> None:
    found = layers(pl.concat([run(name, name, fall(20)) for name in RECIPES]))
    ruler = found["rule"][0]
    told = {t.get("title"): t["field"] for t in ruler["encoding"]["tooltip"]}
    assert set(RECIPES) <= set(told)
    assert all(values(ruler)[0][told[name]] > 0 for name in RECIPES)


def test_points_are_limited() -> None:
    found = layers(run("pre", "a", fall(5000)), points=100)
    assert len(values(found["line"][0])) <= 100
    assert found["line"][0]["mark"]["point"] is False
