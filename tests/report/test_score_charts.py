from typing import Any

import polars as pl
import pytest
import vl_convert

from normlab.base.metric import Metric
from normlab.report.charts.comparison import score_dots, sensitivity, time_bars
from normlab.report.charts.drawing import Drawn
from normlab.report.charts.theme import theme

RECIPES = ["post", "pre", "admin"]
SCORE = Metric("score", "score", least=0.0, most=100.0)
BITS = Metric("bits", "bits per byte", higher_is_better=False, digits=3, least=0.0)


def spec(chart: Drawn) -> dict[str, Any]:
    found = chart.to_dict()
    assert "<svg" in vl_convert.vegalite_to_svg(found, config=theme())
    return found


def layer(found: dict[str, Any], mark: str, place: int = 0) -> dict[str, Any]:
    one = [one for one in found["layer"] if one["mark"]["type"] == mark][place]
    csv = found["datasets"][(one.get("data") or found["data"])["name"]]
    return one | {"rows": pl.read_csv(csv.encode(), schema_overrides={"score": pl.String}).to_dicts()}


def results(**bleu: float | None) -> pl.DataFrame:
    rows = [
        (r, v, None if v is None else v - 1, None if v is None else v + 1, "" if v and v > 5 else "stuck")
        for r, v in bleu.items()
    ]
    schema = {
        "recipe": pl.String,
        "value": pl.Float64,
        "low": pl.Float64,
        "high": pl.Float64,
        "note": pl.String,
    }
    return pl.DataFrame(rows, schema=schema, orient="row")


SEEDS = pl.DataFrame(
    {
        "recipe": ["pre", "pre", "post"],
        "seed": ["1", "2", "1"],
        "outcome": ["trained", "stuck", "trained"],
        "value": [36.2, 34.0, 0.4],
    }
)


def test_the_axis_is_for_those_that_learned() -> None:
    found = spec(score_dots(results(post=0.3, pre=36.0, admin=None), SEEDS, RECIPES, SCORE))
    low, high = layer(found, "circle")["encoding"]["x"]["scale"]["domain"]
    assert 30 < low < 35
    assert high < 40
    off = {row["recipe"]: row["words"] for row in layer(found, "text", 1)["rows"]}
    assert off == {"post": "◂ 0.3, stuck", "admin": "no seed trained, stuck"}
    assert [row["value"] for row in layer(found, "tick")["rows"]] == [36.2]
    assert [row["value"] for row in layer(found, "point")["rows"]] == [34.0], "a cross: it did not train"


def test_best_first_and_colours_in_the_given_order() -> None:
    found = spec(score_dots(results(post=33.0, pre=36.0, admin=35.0), SEEDS.clear(), RECIPES, SCORE))
    dots = layer(found, "circle")["encoding"]
    assert dots["y"]["sort"] == ["pre", "admin", "post"]
    assert dots["color"]["scale"]["domain"] == RECIPES


def test_nobody_has_a_score() -> None:
    found = spec(score_dots(results(post=None, pre=None), SEEDS.clear(), RECIPES, SCORE))
    assert len(found["layer"]) == 1


def trials() -> pl.DataFrame:
    rows = [
        ("post", 5e-4, 31.0, "trained", True),
        ("post", 1e-3, 0.2, "stuck", False),
        ("post", 2e-3, None, "diverged", False),
        ("pre", 5e-4, 33.0, "trained", False),
        ("pre", 1e-3, 36.0, "trained", True),
        ("pre", 2e-3, 35.0, "trained", False),
    ]
    return pl.DataFrame(rows, schema=["recipe", "lr", "dev", "outcome", "chosen"], orient="row")


def test_a_run_without_a_score_is_seen() -> None:
    found = spec(sensitivity(trials(), ["post", "pre"], [5e-4, 1e-3, 2e-3], SCORE))
    hollow = layer(found, "point", 1)
    assert hollow["mark"]["filled"] is False
    assert {row["outcome"]: row["score"] for row in hollow["rows"]} == {
        "stuck": "0.2",
        "diverged": "none to scale",
    }
    assert len(layer(found, "point", 2)["rows"]) == 2  # rings


def test_lower_scores_come_first_where_less_is_better() -> None:
    found = spec(score_dots(results(post=1.5, pre=1.2, admin=3.0), SEEDS.clear(), RECIPES, BITS))
    assert layer(found, "circle")["encoding"]["y"]["sort"] == ["pre", "post", "admin"]
    assert [row["recipe"] for row in layer(found, "text", 1)["rows"]] == ["admin"], "twice as bad as the best"


def test_a_diverged_run_does_not_flatten_the_others() -> None:
    wild = trials().with_columns(dev=pl.Series([1.5, 1e9, None, 1.4, 1.2, 1.3]))
    found = spec(sensitivity(wild, ["post", "pre"], [5e-4, 1e-3, 2e-3], BITS))
    low, high = layer(found, "point")["encoding"]["y"]["scale"]["domain"]
    assert 1.0 < low < 1.2 < 1.5 < high < 2.0
    assert {row["drawn"] for row in layer(found, "point", 1)["rows"]} == {high}


def test_points_stand_near_their_learning_rate() -> None:
    found = spec(sensitivity(trials(), ["post", "pre"], [5e-4, 1e-3, 2e-3], SCORE))
    for row in layer(found, "line")["rows"]:
        assert row["at"] == pytest.approx(row["lr"], rel=0.12)
        assert row["at"] != row["lr"]


def test_one_recipe_and_one_learning_rate() -> None:
    only = trials().filter((pl.col("recipe") == "pre") & (pl.col("lr") == 1e-3))
    found = spec(sensitivity(only, ["pre"], [1e-3], SCORE))
    low, high = layer(found, "line")["encoding"]["x"]["scale"]["domain"]
    assert low < 1e-3 < high


def test_time() -> None:
    table = pl.DataFrame(
        {"recipe": RECIPES, "minutes": [1.0, 10.0, 9.5], "words": ["1", "10", "9"], "note": [""] * 3}
    )
    found = spec(time_bars(table, RECIPES))
    assert layer(found, "bar")["encoding"]["x"]["scale"]["domain"][1] > 10
