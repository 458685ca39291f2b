"""The table of the survey: a row for each run, with what was measured of it early and how it ended."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from normlab.errors import UserError

Kind: TypeAlias = Literal["search", "drawn", "wide"]
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


def read(path: Path) -> list[SurveyedRun]:
    """Read a table; an empty list where there is none yet. A last line that was cut off is left out.

    Raises UserError for a line that is no run.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    found: list[SurveyedRun] = []
    for number, line in enumerate(lines[:-1], 1):  # behind the last newline is nothing, or half a line
        try:
            found.append(SurveyedRun(**json.loads(line)))
        except (json.JSONDecodeError, TypeError) as error:
            raise UserError(f"line {number} of {path} is no run of a survey: {error}") from error
    return found


def append(path: Path, run: SurveyedRun) -> SurveyedRun:
    """Add a run at the end of a table, and return it as it is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cut = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
    if cut:
        whole = path.read_bytes()
        path.write_bytes(whole[: whole.rfind(b"\n") + 1])
    content = _rounded(asdict(run))
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(content, ensure_ascii=False) + "\n")
    return SurveyedRun(**content)


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
