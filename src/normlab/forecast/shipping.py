"""The forecaster that comes with the package, and the runs that it was fitted on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from normlab.forecast.evaluation import forecaster_of, measured_at
from normlab.forecast.forecaster import Forecaster, load
from normlab.forecast.table import SurveyedRun, read, write
from normlab.store.files import write_bytes_atomic

HOME: Final = Path(__file__).parent / "shipped"
FORECASTER: Final = "forecaster.json"
RUNS: Final = "runs.jsonl.xz"
START: Final = measured_at(0)


def ship(
    runs: Sequence[SurveyedRun], *, feature_version: int, card: Mapping[str, Any], home: Path = HOME
) -> Forecaster:
    """Fit a forecaster to the features of runs before their first step, and write both."""
    slim = [replace(run, features={"0": dict(row)}) for run in runs if (row := START(run)) is not None]
    forecaster = forecaster_of(slim, START, feature_version=feature_version, card=card)
    home.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(home / FORECASTER, forecaster.to_json().encode())
    write(home / RUNS, slim)
    return forecaster


@cache
def shipped(feature_version: int, home: Path = HOME) -> tuple[Forecaster, list[SurveyedRun]]:
    """Read what ``ship`` wrote. Raises UserError where it is of another version of the features."""
    return load(home / FORECASTER, feature_version=feature_version), read(home / RUNS, SurveyedRun)
