"""The section of a diagnosis on its forecast: what was tried, what moves it, and the nearest runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from normlab.report.page import Block, Cell, Details, Section, Table
from normlab.spec.units import rate


def forecast_section(forecast: Mapping[str, Any]) -> Section:
    """Return the section of a forecast, ``Answer.to_plain()``."""
    steps = forecast["steps"]
    asked = (
        f"Will the first {steps} steps lower the loss as a sound training does? Forecast from "
        f"{forecast['rests_on']} that were measured as this model is, and then trained; it does not say "
        "how good the trained model becomes."
    )
    tried = Table(
        ("learning rate", "warm-up", "probability"),
        [[Cell(rate(t["lr"])), Cell(_steps(t["warmup_steps"])), _probability(t)] for t in forecast["tried"]],
        caption="The plan, and what was tried in its place",
    )
    blocks: list[Block] = [tried]
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


def _effects(forecast: Mapping[str, Any]) -> Sequence[tuple[str, Mapping[str, Any]]]:
    return list(zip(forecast["because"], forecast["effects"], strict=True))


def _steps(warmup_steps: int) -> str:
    return f"{warmup_steps:,} steps" if warmup_steps else "none"


def _probability(tried: Mapping[str, Any]) -> Cell:
    return Cell("cannot say" if tried["probability"] is None else f"{tried['probability']:.2f}")
