"""The page of advice: the probability over learning rates for a plan and for changes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import polars as pl

from normlab.errors import UserError
from normlab.figures.forecast import over_rates
from normlab.report.answer import THRESHOLDS, forecast_section, probability
from normlab.report.page import Block, Cell, Chart, Code, Page, Section, Table, Text
from normlab.spec.arguments import validate_arguments
from normlab.spec.units import rate
from normlab.store.folder import write_text_atomic

PARTS: Final = ("title", "verdict", "changes", "lr", "alternatives")
"""Parts without which advice cannot be drawn."""


@validate_arguments
def write_advice(advice: Mapping[str, Any], folder: Path, name: str = "advice") -> Path:
    """Write ``name.json`` and ``name.html`` into the folder, and return the path of the page.

    ``advice`` is ``Advice.to_plain()``, to which ``command`` may be added. Raises UserError if a part of it
    is missing.
    """
    page = advice_page(advice)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(advice, ensure_ascii=False, allow_nan=False)
    write_text_atomic(folder / f"{name}.json", f"{text}\n")
    write_text_atomic(folder / f"{name}.html", page)
    return folder / f"{name}.html"


def advice_page(advice: Mapping[str, Any]) -> str:
    """Draw the advice that ``write_advice`` receives as one self-contained HTML page.

    Raises UserError if a part of it is missing.
    """
    if missing := [part for part in PARTS if part not in advice]:
        raise UserError(f"the advice has no {', '.join(missing)}; give that of Advice.to_plain()")
    alternatives: Sequence[Mapping[str, Any]] = advice["alternatives"]
    names = [a["name"] for a in alternatives]
    answered = [a for a in alternatives if a["answer"]]
    verdict, changes = (str(advice[part]) for part in ("verdict", "changes"))
    blocks: list[Block] = []
    if answered:
        blocks += [_picture(answered, names, advice["lr"]), _table(alternatives)]
    plan = alternatives[0]["answer"] if alternatives else None
    return Page(
        title=f"Advice for {advice['title']}",
        headline=f"{verdict[:1].upper()}{verdict[1:]}",
        facts=[f"planned learning rate {rate(advice['lr'])}"],
        lead=f"{changes[:1].upper()}{changes[1:]}.",
        blocks=[
            Section("", blocks, "alternatives", listed=False),
            *([forecast_section(plan, tried=False)] if plan else []),
            _how(advice),
        ],
        recipes=names,
    ).html()


def _picture(answered: Sequence[Mapping[str, Any]], names: Sequence[str], lr: float) -> Chart:
    frame = pl.DataFrame(
        [
            {"recipe": a["name"], "lr": t["lr"], "probability": t["probability"]}
            for a in answered
            for t in sorted(a["answer"]["tried"], key=lambda t: t["lr"])
        ],
        schema={"recipe": pl.String, "lr": pl.Float64, "probability": pl.Float64},
    )
    return Chart(
        "forecasts",
        "Probability over learning rates",
        "Above the upper dashed line a training is expected to get going, below the lower one to fail. The "
        "bar is the planned learning rate. Where the forecaster abstains there is no point.",
        over_rates(frame, names, lr, thresholds=THRESHOLDS),
        frame,
    )


def _table(alternatives: Sequence[Mapping[str, Any]]) -> Table:
    rates = sorted({t["lr"] for a in alternatives if a["answer"] for t in a["answer"]["tried"]})
    body = []
    for a in alternatives:
        at = {t["lr"]: t for t in (a["answer"] or {"tried": ()})["tried"]}
        cells = [Cell(probability(at[lr]["probability"])) if lr in at else Cell("–") for lr in rates]
        stopped = a["answer"]["reason"] if a["answer"] and a["answer"]["stopped"] else ""
        body.append([Cell(a["name"], stopped or a["do"] or a["why"]), *cells])
    return Table(("plan", *map(rate, rates)), body, caption="Probability by learning rate")


def _how(advice: Mapping[str, Any]) -> Section:
    blocks: list[Block] = [
        Text(
            "Each plan was measured before its first step on the same batch, and its first steps were "
            "rehearsed on copies of its weights. Nothing was trained. docs/forecast.md says how often such "
            "forecasts are right, and where they fail."
        )
    ]
    if advice.get("command"):
        blocks.append(Code(advice["command"]))
    return Section("How it was made", blocks, "how")
