"""What was watched in a training: the probes as curves, and the flight recorder's reports."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import polars as pl

from normlab.figures.probes import by_depth
from normlab.report.page import Block, Chart, Grid, Notes, Section, Text

SUBLAYER: Final = re.compile(r"(.+)\.sublayers\.(\d+)(\.f)?$")

CURVES: Final = (
    ("output.rms", "", "Stream", "rms", "After each sublayer."),
    ("output.rms", ".f", "Branches", "rms", "What each branch adds, before it is added."),
    ("grad_output.rms", "", "Gradient in the stream", "rms", "Of the loss, in each sublayer's output."),
    ("grad.l2", "", "Gradient norm", "L2 norm", "Of all parameters of a sublayer, before clipping."),
    ("update.ratio", "", "Update", "relative to the weights", "One step of a sublayer's parameters."),
)
"""Probe, what follows the sublayer in the module's path, title, axis and caption."""


def watched(rows: Sequence[Mapping[str, Any]]) -> list[Section]:
    """Probes by depth over the steps, a chart a stack; nothing where nothing was measured."""
    found = [row for row in map(_placed, rows) if row is not None]
    if not found:
        return []
    frame = pl.DataFrame(found)
    stacks = frame.filter(pl.col("probe") == CURVES[0][0])["stack"].unique(maintain_order=True).to_list()
    charts: list[Block] = []
    for probe, part, title, axis, caption in CURVES:
        here = frame.filter((pl.col("probe") == probe) & (pl.col("part") == part))
        for stack in stacks:
            one = here.filter(pl.col("stack") == stack).select("step", "module", "depth", "value")
            if one.is_empty():
                continue
            name = f"{probe}{part}-{stack}".replace(".", "-")
            charts.append(Chart(name, f"{title}, {stack}", caption, by_depth(one, axis), one))
    intro = "A line a sublayer: light is the first, dark the last; a line's name is under the pointer."
    return [Section("Inside the model", [Grid(charts)], "probes", intro)] if charts else []


def _placed(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """A row with the stack and the depth of its sublayer; None for another module."""
    match = SUBLAYER.fullmatch(str(row.get("module")))
    if match is None:
        return None
    placed = {"stack": match[1], "depth": int(match[2]), "part": match[3] or "", "value": float(row["value"])}
    return {"step": int(row["step"]), "module": str(row["module"]), "probe": str(row["probe"])} | placed


def flown(reports: Sequence[Mapping[str, Any]]) -> list[Section]:
    """The recorder's sentences with their evidence."""
    blocks = [block for report in reports for block in _report(report)]
    intro = "Which module went wrong first, found by doing the steps again with every module watched."
    return [Section("Flight recorder", blocks, "flight", intro)] if blocks else []


def _report(report: Mapping[str, Any]) -> list[Block]:
    trigger, verdict, replay = (dict(report.get(key) or {}) for key in ("trigger", "verdict", "replay"))
    begun = f"the checkpoint of step {replay.get('from_step')}" if replay.get("checkpoint") else "the start"
    known = replay.get("agrees") is not None
    agrees = {True: ", every known loss as before", False: ", not as before"}.get(
        bool(replay.get("agrees")), ""
    )
    why = f"written in step {report.get('step')}: {trigger.get('words', '')}"
    evidence = [why, *verdict.get("evidence", ()), f"done again from {begun}{agrees if known else ''}"]
    said = str(verdict.get("sentence", "no verdict"))
    return [
        Text(f"{said[:1].upper()}{said[1:]}.", "alarm" if verdict.get("module") else ""),
        Notes([Text(str(line)) for line in evidence]),
    ]
