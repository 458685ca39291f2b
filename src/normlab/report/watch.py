"""The page of a training that was watched: what went wrong first, and the probes over the steps.

A run's page has the same sections. What draws is imported when a chart is drawn: it needs packages that are
optional.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from markupsafe import Markup

from normlab.base.files import read_json, write_output
from normlab.base.io import Count, from_plain
from normlab.base.rows import read_lines, read_reports, require_probes
from normlab.base.units import count
from normlab.errors import UserError
from normlab.report.page import (
    Block,
    Chart,
    Columns,
    Notes,
    Page,
    Row,
    Section,
    Text,
    anchor,
    capital,
    labelled,
)
from normlab.watching import NOTES

if TYPE_CHECKING:
    from normlab.report.charts.drawing import Drawn

CURVES: Final = {
    ("after", "rms"): ("Stream", "rms", "After each sublayer."),
    ("branch", "rms"): ("Branches", "rms", "The output of each branch, before it is added."),
    ("grad_after", "rms"): ("Gradient in the stream", "rms", "The gradient of the loss after each sublayer."),
    ("grad", "l2"): ("Gradient norm", "L2 norm", "All parameters of a sublayer."),
    ("weight", "l2"): ("Weight norm", "L2 norm", "All parameters of a sublayer."),
    ("update", "ratio"): ("Update", "relative to the weights", "One step of a sublayer's parameters."),
    ("after", "max_abs"): ("Largest entry of the stream", "absolute value", "After each sublayer."),
}
"""Title, axis and caption of a signal and its statistic."""

MODULES: Final = 100
"""A chart of modules outside sublayers shows at most so many of them."""

KEY: Final = ("step", "module", "signal", "statistic", "value")


def watched(rows: Sequence[Row]) -> list[Section]:
    """Draw the probes of sublayers over the steps, one chart per stack; nothing if there are none."""
    found = [row for row in rows if row.get("stack") and row.get("index") is not None]
    labels = _labels(str(row["stack"]) for row in found)
    points: dict[tuple[str, str, str], list[Row]] = {}
    for row in found:
        key = (row["signal"], row["statistic"], labels[row["stack"]])
        points.setdefault(key, []).append(_point(row, row["index"]))
    charts: list[Block] = []
    for (signal, statistic), (title, axis, caption) in CURVES.items():
        for label in labels.values():
            if here := points.get((signal, statistic, label)):
                chart = _chart(f"{signal}-{statistic}", title, caption, axis, here)
                charts.append(labelled(chart, label))
    marks = "A line per sublayer: light is the first, dark the last; point at a line for its name."
    return [Section("Inside the model", [Columns(charts)], "probes", marks=marks)] if charts else []


def _point(row: Row, depth: int) -> Row:
    module = str(row["module"])
    if row.get("role"):
        module += f" ({row['role'].replace('_', '-')} of layer {row.get('layer')})"
    return {"step": int(row["step"]), "module": module, "depth": depth, "value": float(row["value"])}


def _chart(
    name: str, title: str, caption: str, axis: str, points: Sequence[Row], *, log: bool = True
) -> Chart:
    """The chart of points over the steps, a line per module."""

    def draw(most: int) -> Drawn:
        from normlab.report.charts.drawing import frame
        from normlab.report.charts.probes import curves_by_depth

        return curves_by_depth(frame(points), axis, log=log)

    return Chart(name, title, caption, draw, _by_step(points, axis))


def _by_step(points: Sequence[Row], axis: str) -> list[Row]:
    """The values of all modules, a row per step; what belongs to no module has the name of the axis.

    A step may have measured a module several times, once per micro-batch: the mean stands for them, as in the
    chart.
    """
    modules = list(dict.fromkeys(point["module"] for point in points))
    # a path is short enough for a heading, but a module that serves several layers has one path for all
    headings = [module.partition(" (")[0] or axis for module in modules]
    if len(set(headings)) < len(modules):
        headings = [module or axis for module in modules]
    measured: dict[int, dict[str, list[float]]] = {}
    for point in points:
        measured.setdefault(point["step"], {}).setdefault(point["module"], []).append(point["value"])
    rows: list[Row] = []
    for step, of_module in sorted(measured.items()):
        row: dict[str, Any] = {"step": step}
        for module, heading in zip(modules, headings, strict=True):
            values = of_module.get(module)
            row[heading] = sum(values) / len(values) if values else None
        rows.append(row)
    return rows


def _labels(stacks: Iterable[str]) -> dict[str, str]:
    """Name each stack by its container's path, without the last name unless that tells stacks apart."""
    distinct = list(dict.fromkeys(stacks))
    short = {stack: stack.rpartition(".")[0] for stack in distinct}
    shared = Counter(short.values())
    plain = {s for s in distinct if short[s] and shared[short[s]] == 1 and not short[s][-1].isdigit()}
    return {stack: short[stack] if stack in plain else stack for stack in distinct}


def write_probes_page(file: Path, page: Path) -> Path:
    """Draw the rows that a trainer wrote to ``file`` as JSON lines, with the recorder's reports beside it;
    return the path of the page.

    Raises UserError for a file that does not hold such rows, and FileNotFoundError if there is none.
    """
    flight = file.with_suffix(".flight.json")
    reports = read_reports(flight)
    beside = from_plain(_Beside, read_json(flight), str(flight), more=True) if flight.exists() else _Beside()
    rows = [row for _, row in read_lines(file)] if file.exists() or not flight.exists() else []
    require_probes(rows, file)
    notes = [Text(note) for note in beside.notes]
    sections = [
        *flown(reports),
        *([Section("Not watched", [Notes(notes)], "notes")] if notes else []),
        *watched(rows),
        *others(rows),
    ]
    if not sections:
        raise UserError(f"{file} holds no rows of probes; a trainer writes them after each measured step")
    title = f"Training of {file.name}"
    facts = _facts(rows, beside.steps)
    write_output(page, Page(title, _what_went_wrong(reports, beside), facts, "", sections).html())
    return page


def _facts(rows: Sequence[Row], seen: int | None) -> list[str]:
    """What was measured, and in how many of the steps that were ``seen``, if that is known; a training that
    failed at once has reports and no rows.
    """
    every = [] if seen is None else [f"{count(seen, 'step')} watched"]
    steps = sorted({int(row["step"]) for row in rows})
    if not steps:
        return every
    return [
        *every,
        f"steps {steps[0]:,} to {steps[-1]:,}",
        count(len(steps), "measured step"),
        count(len({row["module"] for row in rows}), "module"),
        count(len(rows), "row"),
    ]


@dataclass(frozen=True)
class _Beside:
    """What a watch writes beside its reports."""

    notes: tuple[str, ...] = ()
    steps: Count | None = None
    losses: Count | None = None


def _what_went_wrong(reports: Sequence[Mapping[str, Any]], beside: _Beside) -> Markup:
    """State what went wrong first, else the first thing to note, else that nothing went wrong."""
    triggers = [report["trigger"] for report in reports]
    ended = [trigger for trigger in triggers if trigger.get("kind") not in NOTES]
    if not triggers and beside.losses == 0:
        return Markup("No loss was recorded; no gradient or update went wrong in the steps watched")
    if not triggers:
        return Markup("Nothing went wrong in the steps watched")
    words = str((ended or triggers)[0].get("words", "")) or "the training went wrong"
    return Markup.escape(capital(words))


def others(rows: Sequence[Row]) -> list[Section]:
    """Draw the probes of modules outside sublayers, one chart per signal and statistic."""
    found = [row for row in rows if row.get("index") is None]
    charts: list[Block] = []
    for signal, statistic in Counter((str(row["signal"]), str(row["statistic"])) for row in found):
        here = [r for r in found if (r["signal"], r["statistic"]) == (signal, statistic)]
        order = {module: i for i, module in enumerate(dict.fromkeys(str(r["module"]) for r in here))}
        if len(order) > MODULES:
            continue
        points = [_point(r, order[str(r["module"])]) for r in here]
        loss = signal == "loss"
        title, axis = ("loss", "loss") if loss else (f"{signal}, {statistic}".replace("_", " "), statistic)
        name = f"modules-{anchor(signal)}-{statistic}"
        charts.append(_chart(name, capital(title), "", axis, points, log=not loss))
    marks = "A line per module, from light to dark in the order of measurement."
    return [Section("Modules", [Columns(charts)], "modules", marks=marks)] if charts else []


def flown(reports: Sequence[Mapping[str, Any]]) -> list[Section]:
    """The reports of the recorder: each verdict with its evidence."""
    blocks = [block for report in reports for block in _report(report)]
    how = (
        "by repeating the steps with every module watched"
        if any(r.get("replay") for r in reports)
        else "in the loop, and in the norms of every parameter's gradient and update over the last steps"
    )
    intro = f"What went wrong first, found {how}."
    return [Section("Flight recorder", blocks, "flight", intro)] if blocks else []


def _report(report: Mapping[str, Any]) -> list[Block]:
    trigger, verdict, replay = (dict(report.get(key) or {}) for key in ("trigger", "verdict", "replay"))
    begun = f"the checkpoint of step {replay.get('from_step')}" if replay.get("checkpoint") else "the start"
    words = {True: ", every known loss as before", False: ", not as before", None: ""}
    why = f"written in step {report.get('step')}: {trigger.get('words', '')}"
    repeated = [f"repeated from {begun}{words[replay.get('agrees')]}"] if replay else []
    evidence = [why, *verdict.get("evidence", ()), *repeated]
    said = str(verdict.get("sentence", "no verdict"))
    return [
        Text(f"{capital(said)}.", "alarm" if verdict.get("module") else ""),
        Notes([Text(str(line)) for line in evidence]),
    ]
