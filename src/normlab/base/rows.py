"""What a training leaves beside its weights, read strictly: JSON lines, probes, reports of the recorder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normlab.base.files import read_json, regular
from normlab.base.io import Count, from_plain
from normlab.errors import UserError


@dataclass(frozen=True)
class Probe:
    """A row of probes, with the sublayer that was measured if it was one."""

    step: Count
    module: str
    signal: str
    statistic: str
    value: float
    stack: str | None = None
    index: Count | None = None
    role: str | None = None
    layer: Count | None = None


@dataclass(frozen=True)
class Trigger:
    """Why the recorder wrote a report."""

    kind: str = ""
    words: str = ""


@dataclass(frozen=True)
class Verdict:
    """What went wrong first, as far as it was found."""

    sentence: str = "no verdict"
    module: str | None = None
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class Replay:
    """From where the steps were repeated, and whether with the same losses, if that is known."""

    from_step: Count | None = None
    checkpoint: bool = False
    agrees: bool | None = None


@dataclass(frozen=True)
class FlightReport:
    """A report of the flight recorder, made in a step."""

    step: Count
    trigger: Trigger
    verdict: Verdict
    replay: Replay | None


def read_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Read JSON lines, each an object, with their numbers; a last one that a crash cut off is left out.

    Raises UserError with the number of a damaged line.
    """
    with open(path, encoding="utf-8", errors="replace", opener=regular) as file:
        text = file.read()
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    rows = list[tuple[int, dict[str, Any]]]()
    for number, line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append((number, row))
        elif number < lines[-1][0]:
            raise UserError(f"{path} is damaged in line {number}; delete that line")
    return rows


def require_probes(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Raise UserError with the number of a row that is no probe."""
    for number, row in enumerate(rows, start=1):
        from_plain(Probe, row, f"{path}, row {number}", more=True)


def read_reports(path: Path) -> list[dict[str, Any]]:
    """Read the reports in a ``flight.json``, the oldest first; none if the file is not there.

    Raises UserError for anything else in their place.
    """
    if not path.exists():
        return []
    content = read_json(path)
    if not isinstance(content, dict) or "reports" not in content:
        raise UserError(f"{path} holds no flight reports; delete that file")
    from_plain(tuple[FlightReport, ...], content["reports"], f"{path}, reports", more=True)
    return content["reports"]
