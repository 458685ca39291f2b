"""The lists of public reports are judged as they were when their statements had been mended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from corpus.public2 import collected as second
from corpus.public2 import run
from corpus.public3 import collected as third
from corpus.public4 import collected as fourth

LISTS = {"public2": second.CASES, "public3": third.CASES, "public4": fourth.CASES}


def kept_verdicts() -> list[tuple[str, str, str]]:
    """The list, name and verdict of every case."""
    verdicts = []
    for name in LISTS:
        file = Path(__file__).parent / name / "after_mending.json"
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
        verdicts += [(name, row["name"], row["verdict"]) for row in rows]
    return verdicts


@pytest.mark.long
@pytest.mark.parametrize(("name", "case", "verdict"), kept_verdicts())
def test_a_case_is_judged_as_before(name: str, case: str, verdict: str) -> None:
    row = run.judged(LISTS[name][case], budget_s=60.0)
    assert (row.verdict, row.error) == (verdict, "")
