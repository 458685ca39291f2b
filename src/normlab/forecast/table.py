"""The tables of the survey: runs, with what was measured of them early and how they ended, and models at
learning rates that they need not be trained at.

A table is a file of JSON lines, compressed by xz; each row that is added is a stream of its own.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar

from normlab.errors import UserError
from normlab.store.files import write_bytes_atomic

Kind: TypeAlias = Literal["search", "drawn", "wide"]
Row = TypeVar("Row", "SurveyedRun", "SweptRate", "Foretold")
DIGITS: Final = 5
"""Significant digits of a number in the table."""


@dataclass(frozen=True)
class SurveyedRun:
    """A run of the survey."""

    run: str
    """The id of its configuration."""
    model: str
    """The name of its model, which several runs share."""
    kind: Kind
    """``search``: found the edge of its model; ``drawn``: at a rate around it; ``wide``: of a wide model."""
    choices: Mapping[str, str | float]
    """The configuration: text, placement, norm and so on; see ``survey.design.AXES``."""
    lr: float
    seed: int
    steps: int
    """The budget."""
    outcome: str
    """``trained``, ``stuck``, ``diverged`` or ``ignores its source``, by the rule of every run."""
    nll: float | None
    """The best negative log-likelihood on dev, over the entropy of the unigrams."""
    seconds: float
    features: Mapping[str, Mapping[str, float]]
    """After 0, 10 and 50 steps; see ``diagnosis.rules.features``."""
    version: int
    """That of the features."""

    @property
    def trained(self) -> bool:
        """Whether it trained within its budget."""
        return self.outcome == "trained"


@dataclass(frozen=True)
class SweptRate:
    """What is measured of a model at a learning rate that it need not be trained at."""

    model: str
    """The name of its model."""
    lr: float
    features: Mapping[str, float]
    """Before the first step; see ``diagnosis.rules.features``."""
    version: int
    """That of the features."""


@dataclass(frozen=True)
class Foretold:
    """A run whose forecast was written down before it was trained."""

    group: str
    """``new``: of a recipe of ours at a size that no run of the table has; ``foreign``: of another library's
    model.
    """
    model: str
    choices: Mapping[str, str | float]
    """As those of a surveyed run, as far as they apply."""
    lr: float
    answer: str
    """The kind of the answer for this plan alone; see ``answer.Kind``."""
    probability: float | None
    """None where the forecaster abstained."""
    configuration: float
    """The probability by the configuration alone."""
    learning_rate: float
    """The probability by the learning rate alone."""
    seconds: float
    """Time of the forecast."""
    outcome: str = ""
    """As that of a surveyed run; empty before it is trained."""

    @property
    def trained(self) -> bool:
        """Whether it trained within its budget."""
        return self.outcome == "trained"


def read(path: Path, kind: type[Row]) -> list[Row]:
    """Read a table; an empty list where there is none yet. A last row that was cut off is left out.

    Raises UserError for a file that is no such table.
    """
    found: list[Row] = []
    for number, line in enumerate(_lines(path), 1):
        try:
            found.append(kind(**json.loads(line)))
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
            raise UserError(f"line {number} of {path} is no row of a survey: {error}") from error
    return found


def _lines(path: Path) -> list[bytes]:
    """The whole lines of a file of xz streams, of which the last may be cut off."""
    left, text = path.read_bytes() if path.exists() else b"", b""
    while left:
        stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)
        try:
            text += stream.decompress(left)
        except lzma.LZMAError as error:
            raise UserError(
                f"{path} is not in the format of xz: {error}; give a table of a survey"
            ) from error
        left = stream.unused_data
    return text.split(b"\n")[:-1]  # behind the last newline is nothing, or half a line


def append(path: Path, row: Row) -> Row:
    """Add a row at the end of a table, and return it as it is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = _rounded(asdict(row))
    line = json.dumps(content, ensure_ascii=False).encode() + b"\n"
    with path.open("ab") as file:
        file.write(lzma.compress(line))
    return type(row)(**content)


def compact(path: Path) -> None:
    """Rewrite a table as one stream, which is a quarter as long, without what was cut off at its end."""
    if path.exists():
        text = b"".join(line + b"\n" for line in _lines(path))
        write_bytes_atomic(path, lzma.compress(text, preset=9))


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write a table of these rows alone."""
    text = b"".join(json.dumps(_rounded(asdict(r)), ensure_ascii=False).encode() + b"\n" for r in rows)
    write_bytes_atomic(path, lzma.compress(text, preset=9))


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(inner) for name, inner in value.items()}
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def groups(runs: Iterable[SurveyedRun], axis: str) -> dict[str | float, list[SurveyedRun]]:
    """The runs by their value of an axis, in order."""
    found: dict[str | float, list[SurveyedRun]] = {}
    for run in runs:
        found.setdefault(run.choices[axis], []).append(run)
    return dict(sorted(found.items(), key=lambda one: str(one[0])))
