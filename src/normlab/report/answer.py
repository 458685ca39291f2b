"""The section of a diagnosis on its forecast: what was tried, what moves it, and the nearest runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import polars as pl

from normlab.figures.forecast import over_rates
from normlab.forecast.answer import FAILS, TRAINS
from normlab.report.page import Block, Cell, Chart, Details, Section, Table
from normlab.spec.units import rate

THRESHOLDS: Final = (FAILS, TRAINS)
"""Probabilities up to which, and from which on, there is an answer."""


def forecast_section(forecast: Mapping[str, Any], *, tried: bool = True) -> Section:
    """Return the section of a forecast, ``Answer.to_plain()``: what was tried, drawn if that was several
    learning rates, and what the forecast rests on.
    """
    steps = forecast["steps"]
    asked = (
        f"Will the first {steps} steps lower the loss as a sound training does? Forecast from "
        f"{forecast['rests_on']} that were measured as this model is, and then trained; it does not say "
        "how good the trained model becomes."
    )
    blocks = _tried(forecast["tried"]) if tried else []
    if forecast["because"]:
        rows = [[Cell(said), Cell(f"{e['by']:+.2f}")] for said, e in _effects(forecast)]
        table = Table(("measured", "moves it by"), rows)
        blocks.append(
            Details("What moves the probability of the plan, against the median of all runs", [table])
        )
    if forecast["nearest"]:
        rows = [[Cell(n["model"]), Cell(n["outcome"]), Cell(rate(n["lr"]))] for n in forecast["nearest"]]
        table = Table(("run", "outcome", "learning rate"), rows, text_columns=2)
        blocks.append(
            Details("The nearest runs: those that most trees of the forecaster take for it", [table])
        )
    return Section("Forecast", blocks, "forecast", asked)


def _tried(tried: Sequence[Mapping[str, Any]]) -> list[Block]:
    rows = [
        [Cell(rate(t["lr"])), Cell(_steps(t["warmup_steps"])), Cell(probability(t["probability"]))]
        for t in tried
    ]
    caption = "The plan, and what was tried in its place"
    table = Table(("learning rate", "warm-up", "probability"), rows, caption=caption)
    return [_picture(tried), table] if len({t["lr"] for t in tried}) > 1 else [table]


def _effects(forecast: Mapping[str, Any]) -> Sequence[tuple[str, Mapping[str, Any]]]:
    return list(zip(forecast["because"], forecast["effects"], strict=True))


def _steps(warmup_steps: int) -> str:
    return f"{warmup_steps:,} steps" if warmup_steps else "none"


def probability(p: float | None) -> str:
    """Write a probability; without one the forecaster abstains."""
    return "cannot say" if p is None else f"{p:.2f}"


def _picture(tried: Sequence[Mapping[str, Any]]) -> Chart:
    """Draw the probability over learning rates, a line for each warm-up."""
    warm = [f"warm-up of {t['warmup_steps']:,} steps" if t["warmup_steps"] else "no warm-up" for t in tried]
    rows = [
        {"recipe": name, "lr": t["lr"], "probability": t["probability"]}
        for name, t in zip(warm, tried, strict=True)
    ]
    schema = {"recipe": pl.String, "lr": pl.Float64, "probability": pl.Float64}
    frame = pl.DataFrame(rows, schema=schema).sort("lr")
    names, today = list(dict.fromkeys(warm)), tried[0]["lr"]
    return Chart(
        "forecast",
        "Probability over learning rates",
        "Above the upper dashed line the training is expected to get going, below the lower one to fail.",
        over_rates(frame, names, today, thresholds=THRESHOLDS, legend=True),
        frame,
    )
