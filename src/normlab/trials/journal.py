"""Trials on disk: one JSON line each, so that a stopped command can continue where it stopped."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from normlab.base.files import append_rows, regular
from normlab.base.io import Amount, Positive, Size, from_plain, parsed
from normlab.errors import UserError
from normlab.trials.course import Course
from normlab.trials.scale import Scale

FILE: Final = "trials.jsonl"
MARK_S: Final = 10.0
"""If a trial is killed, at most this many of its seconds are not counted."""


@dataclass(frozen=True, kw_only=True)
class _Row:
    """What any row may hold; a row of nothing else marks the time."""

    spent: Amount = 0.0


@dataclass(frozen=True, kw_only=True)
class _SetupRow(_Row):
    setup: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class _MeasuredRow(_Row):
    """The first steps of a variant."""

    measured: str
    course: Course
    scale: Scale
    step_s: Amount
    seconds: Amount
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _TrialRow(_Row):
    """A trial of a variant, whole unless it says why it stopped."""

    trial: str
    rate: Positive
    steps: Size
    losses: tuple[float, ...]
    seconds: Amount
    stopped: str = ""

    def __post_init__(self) -> None:
        number = len(self.losses)
        if not 1 <= number <= self.steps:
            raise UserError(
                f"losses holds {number} numbers, but a trial of {self.steps} steps has 1 to {self.steps}"
            )
        if not self.stopped and (number < self.steps or not all(map(math.isfinite, self.losses))):
            raise UserError("losses is cut short or not finite, and stopped does not say why")


@dataclass(frozen=True, kw_only=True)
class _EndedRow(_Row):
    """What a budget did not hold of a variant."""

    ended_by: str
    budget_s: Positive
    why: str


@dataclass(frozen=True, kw_only=True)
class _PlannedRow(_Row):
    planned: Size
    steps: Size


@dataclass(frozen=True, kw_only=True)
class _CheckRow(_Row):
    """The answer of a check that a budget held."""

    check: str
    answer: dict[str, Any]
    seconds: Amount


_KINDS: Final[dict[str, type[_Row]]] = {
    "setup": _SetupRow,
    "measured": _MeasuredRow,
    "trial": _TrialRow,
    "ended_by": _EndedRow,
    "planned": _PlannedRow,
    "check": _CheckRow,
}
"""Each kind of row by the key that only it has."""


class Journal:
    """Rows of trials, kept in a file of the folder, or in memory if there is none. Some describe the setup:
    digests of its parts by name, such as ``model``, or ``model at width 64`` if it has several sizes.

    Each row holds the seconds that were ``spent`` when it was written.
    """

    def __init__(self, folder: str | Path | None, setup: dict[str, str], since: float | None = None) -> None:
        """The clock runs from ``since``, by default from now. Raises UserError if the folder holds rows of
        another setup, or something else than rows; sizes that only one of the two has may differ.
        """
        self.path = None if folder is None else Path(folder) / FILE
        self.rows = [] if self.path is None else _rows(self.path)
        if self.rows and "setup" not in self.rows[0]:
            raise UserError(f"{self.path} holds no trials; name another folder")
        self.began = (time.monotonic() if since is None else since) - _seconds_spent(self.rows)
        held: dict[str, str] = {}
        for row in self.rows:
            held |= row.get("setup", {})
        self._require_same(folder, setup, held)
        if not self.rows or setup.keys() - held.keys():
            self.append({"setup": {name: mark for name, mark in setup.items() if name not in held}})

    def _require_same(self, folder: Any, setup: dict[str, str], held: dict[str, str]) -> None:
        """Raise UserError unless the digests of the sizes that both have are equal."""
        in_both = {*map(_size, setup)} & {*map(_size, held)}
        if held and not in_both:
            sizes = ", ".join(dict.fromkeys(map(_size, held))) or "a setup of one size"
            raise UserError(
                f"{folder} holds trials of {sizes}, but none of that is asked for, so nothing shows whether "
                "they are of the same setup; ask for one of them, too, or name another folder"
            )
        names = dict.fromkeys(name for name in (*setup, *held) if _size(name) in in_both)
        differing = [name for name in names if setup.get(name) != held.get(name)]
        if differing:
            raise UserError(
                f"{folder} holds trials of another setup: {', '.join(differing)} differ; to continue, draw "
                "the same from the same seed, or name another folder"
            )

    @property
    def seconds(self) -> float:
        """Seconds since the first call began, not counting the time between calls."""
        return time.monotonic() - self.began

    def row(self, **key: Any) -> dict[str, Any] | None:
        """The row with these entries, if there is one."""
        return next((row for row in self.rows if key.items() <= row.items()), None)

    def append(self, row: dict[str, Any]) -> None:
        """Add a row, to the file as well."""
        row = {**row, "spent": self.seconds}
        self.rows.append(row)
        if self.path is not None:
            append_rows(self.path, [row])

    def mark(self, every_s: float = MARK_S) -> None:
        """Write down the seconds spent so far, unless that was done less than ``every_s`` ago."""
        if self.seconds - self.rows[-1].get("spent", 0.0) > every_s:
            self.append({})


def _seconds_spent(rows: Sequence[dict[str, Any]]) -> float:
    """Return the seconds spent when the last row was written, or at least those of the trials themselves."""
    marks = [row.get("spent", 0.0) for row in rows]
    return max(sum(row.get("seconds", 0.0) for row in rows), *marks, 0.0)


def _size(name: str) -> str:
    """Return the size in the name of a digest, such as "width 64"; empty if a setup has only one."""
    return name.partition(" at ")[2]


def _rows(path: Path) -> list[dict[str, Any]]:
    """The complete rows; a last one that a killed process left incomplete is cut off.

    Raises UserError with the line of a row that no trial writes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return []
    with open(path, "rb", opener=regular) as file:
        complete, newline, torn = file.read().rpartition(b"\n")
    if torn:
        os.truncate(path, len(complete) + len(newline))
    rows = list[dict[str, Any]]()
    for number, line in enumerate(complete.split(b"\n") if complete else (), start=1):
        try:
            rows.append(_row(line))
        except (UserError, UnicodeDecodeError) as error:
            raise UserError(
                f"{path}, line {number} is not a row of trials: {error}; delete the file to start again, or "
                "name another folder"
            ) from error
    return rows


def _row(line: bytes) -> dict[str, Any]:
    """Return a row. Raises UserError if it is not of its kind."""
    row = parsed(line.decode())
    keys = [key for key in _KINDS if isinstance(row, dict) and key in row]
    from_plain(_KINDS[keys[0]] if keys else _Row, row)
    return row
