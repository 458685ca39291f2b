"""The page of a training that was watched: what went wrong first, and the probes over the steps.

A run's page has the same sections.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from markupsafe import Markup

from normlab.base.chart import BySteps
from normlab.base.files import read_json, write_output
from normlab.base.io import Count, from_plain
from normlab.base.rows import FlightReport, Replay, read_lines, read_reports, require_probes
from normlab.base.units import count
from normlab.errors import UserError
from normlab.report.drawings import DrawnTables, draw
from normlab.report.page import Block, Columns, Notes, Page, Row, Section, Text, anchor, capital
from normlab.watching import NOTES

_STREAM_GRADIENT: Final = "The gradient of the loss after each sublayer."
_PARAMETERS: Final = "All parameters of a sublayer."
SUBLAYER_CHARTS: Final = (
    BySteps("after-rms", "Stream", "rms", caption="After each sublayer."),
    BySteps("branch-rms", "Branches", "rms", caption="The output of each branch, before it is added."),
    BySteps("grad_after-rms", "Gradient in the stream", "rms", caption=_STREAM_GRADIENT),
    BySteps("grad-l2", "Gradient norm", "L2 norm", caption=_PARAMETERS),
    BySteps("weight-l2", "Weight norm", "L2 norm", caption=_PARAMETERS),
    BySteps(
        "update-ratio", "Update", "relative to the weights", caption="One step of a sublayer's parameters."
    ),
    BySteps("after-max_abs", "Largest entry of the stream", "absolute value", caption="After each sublayer."),
)
"""What is drawn of sublayers, in this order; each signal and statistic has a table of its own."""

MODULES: Final = 100
"""A signal and statistic of more modules outside sublayers than this gets no chart."""


def sublayer_sections(rows: Sequence[Row]) -> list[Section]:
    """Draw ``SUBLAYER_CHARTS``, as far as there are rows for them, with a chart for each stack."""
    of_sublayers = [row for row in rows if row.get("stack") and row.get("index") is not None]
    labels = _labels(str(row["stack"]) for row in of_sublayers)
    tables: dict[str, list[Row]] = {}
    for row in of_sublayers:
        tables.setdefault(f"{row['signal']}-{row['statistic']}", []).append(row)
    drawn = DrawnTables(tables, labels)
    charts: list[Block] = []
    for drawing in SUBLAYER_CHARTS:
        if drawing.table in tables:
            charts += draw(drawing, drawn)
    marks = "A line per sublayer: light is the first, dark the last; point at a line for its name."
    return [Section("Inside the model", [Columns(charts)], "probes", marks=marks)] if charts else []


def _labels(stacks: Iterable[str]) -> dict[str, str]:
    """Return a short label for the path of each stack: the path of the module that holds it.

    ``encoder.layers`` is called ``encoder``. A stack keeps its whole path if what holds it also holds another
    stack, is the model itself, or has a number for a name (``towers.0.layers``), which would say little.
    """
    distinct = list(dict.fromkeys(stacks))
    holders = {stack: stack.rpartition(".")[0] for stack in distinct}
    stacks_of_holder = Counter(holders.values())
    labels = {}
    for stack, holder in holders.items():
        has_a_name = bool(holder) and not holder[-1].isdigit()
        labels[stack] = holder if has_a_name and stacks_of_holder[holder] == 1 else stack
    return labels


def write_probes_page(file: Path, page: Path) -> Path:
    """Write the page of a training to ``page``, and return that path.

    Args:
        file: the rows of probes that a trainer wrote, as JSON lines. The recorder's file lies beside it:
            ``watch.flight.json`` beside ``watch.jsonl``. Each may be missing: no recorder was used, or the
            training failed before its first row.
        page: where to write it.

    Raises:
        UserError: one of the files is damaged, or both together hold nothing to show.
        FileNotFoundError: neither of the two files exists.
    """
    flight_file = file.with_suffix(".flight.json")
    reports = _typed(read_reports(flight_file))
    watch = _read_watch(flight_file)
    rows = _read_rows(file, flight_file)
    sections = _flight_sections(reports)
    if watch.notes:
        notes = Notes([Text(note) for note in watch.notes])
        sections.append(Section("Not watched", [notes], "notes"))
    sections += [*sublayer_sections(rows), *module_sections(rows)]
    if not sections:
        raise UserError(f"{file} holds no rows of probes; a trainer writes them after each measured step")
    headline, facts = _what_went_wrong(reports, watch), _facts(rows, watch.steps)
    write_output(page, Page(f"Training of {file.name}", headline, facts, "", sections).html())
    return page


def _read_rows(file: Path, flight_file: Path) -> list[Row]:
    """Read the rows of probes; none if there is only the recorder's file."""
    if not file.exists() and flight_file.exists():
        return []
    rows: list[Row] = [row for _, row in read_lines(file)]  # FileNotFoundError if neither file exists
    require_probes(rows, file)
    return rows


@dataclass(frozen=True)
class _Watch:
    """What a watch writes into the recorder's file, beside the reports."""

    notes: tuple[str, ...] = ()
    """What could not be watched."""
    steps: Count | None = None
    """The number of steps that were watched; None if it is not known."""
    losses: Count | None = None
    """The number of losses that were recorded; None if it is not known."""


def _read_watch(flight_file: Path) -> _Watch:
    """Read what a watch wrote beside the reports of a file; nothing is known if there is no such file.

    The reports in the same file are read by ``read_reports``, as those of a run are.
    """
    if not flight_file.exists():
        return _Watch()
    return from_plain(_Watch, read_json(flight_file), str(flight_file), more=True)


def _typed(reports: Sequence[Mapping[str, Any]]) -> list[FlightReport]:
    return [from_plain(FlightReport, report, more=True) for report in reports]


def _facts(rows: Sequence[Row], watched_steps: int | None) -> list[str]:
    """What was measured, and how many steps were watched, if that is known."""
    facts = [] if watched_steps is None else [f"{count(watched_steps, 'step')} watched"]
    steps = sorted({int(row["step"]) for row in rows})
    if not steps:
        return facts
    return [
        *facts,
        f"steps {steps[0]:,} to {steps[-1]:,}",
        count(len(steps), "measured step"),
        count(len({row["module"] for row in rows}), "module"),
        count(len(rows), "row"),
    ]


def _what_went_wrong(reports: Sequence[FlightReport], watch: _Watch) -> Markup:
    """State what went wrong first, else the first thing to note, else that nothing went wrong."""
    triggers = [report.trigger for report in reports]
    if not triggers and watch.losses == 0:
        return Markup("No loss was recorded; no gradient or update went wrong in the steps watched")
    if not triggers:
        return Markup("Nothing went wrong in the steps watched")
    wrong = [trigger for trigger in triggers if trigger.kind not in NOTES]
    first = wrong[0] if wrong else triggers[0]
    return Markup.escape(capital(first.words or "the training went wrong"))


def module_sections(rows: Sequence[Row]) -> list[Section]:
    """Draw the probes of modules outside sublayers, one chart per signal and statistic."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.get("index") is None:
            groups.setdefault((str(row["signal"]), str(row["statistic"])), []).append(row)
    charts: list[Block] = []
    without_chart: list[str] = []
    for (signal, statistic), group in groups.items():
        modules = list(dict.fromkeys(str(row["module"]) for row in group))
        title = f"{signal}, {statistic}".replace("_", " ")
        if len(modules) > MODULES:
            without_chart.append(title)
            continue
        place = {module: i for i, module in enumerate(modules)}
        placed = [{**row, "stack": "", "index": place[str(row["module"])]} for row in group]
        name = f"modules-{anchor(signal)}-{statistic}"
        if signal == "loss":
            drawing = BySteps(name, "Loss", "loss", log=False)
        else:
            drawing = BySteps(name, capital(title), statistic)
        charts += draw(drawing, DrawnTables({name: placed}, {"": ""}))
    marks = "A line per module, from light to dark in the order of measurement."
    blocks: list[Block] = [Columns(charts)] if charts else []
    if without_chart:
        left_out = "; ".join(without_chart)
        blocks.append(Text(f"Not drawn, since more than {MODULES} modules have them: {left_out}.", "note"))
    return [Section("Modules", blocks, "modules", marks=marks if charts else "")] if blocks else []


def flight_sections(reports: Sequence[Mapping[str, Any]]) -> list[Section]:
    """The reports of the recorder, as its file holds them: each verdict with its evidence."""
    return _flight_sections(_typed(reports))


def _flight_sections(reports: Sequence[FlightReport]) -> list[Section]:
    if not reports:
        return []
    blocks: list[Block] = []
    for report in reports:
        verdict = report.verdict
        blocks.append(Text(f"{capital(verdict.sentence)}.", "alarm" if verdict.module else ""))
        blocks.append(Notes([Text(line) for line in _evidence(report)]))
    how = "in the loop, and in the norms of every parameter's gradient and update over the last steps"
    if any(report.replay for report in reports):
        how = "by repeating the steps with every module watched"
    return [Section("Flight recorder", blocks, "flight", f"What went wrong first, found {how}.")]


def _evidence(report: FlightReport) -> Iterator[str]:
    """Yield why a report was written, what was seen, and whether the steps were repeated alike."""
    yield f"written in step {report.step}: {report.trigger.words}"
    yield from report.verdict.evidence
    if report.replay is not None:
        yield _repetition(report.replay)


def _repetition(replay: Replay) -> str:
    begin = f"the checkpoint of step {replay.from_step}" if replay.checkpoint else "the start"
    if replay.agrees is None:
        return f"repeated from {begin}"
    losses = "every known loss" if replay.agrees else "not every known loss"
    return f"repeated from {begin}; {losses} came out as before"
