"""The public part of the corpus as data: which cases there are, and what must be named.

python benchmarks/faults/corpora.py       # write cases.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
CASES = FOLDER / "cases.json"
COMMAND = "python benchmarks/faults/corpora.py"
sys.path.append(str(FOLDER.parents[1] / "tests"))  # where the corpus is

from corpus.public2.case import PublicCase  # noqa: E402


def every_list() -> dict[str, dict[str, PublicCase]]:
    """Return the cases of each list of public reports by their names."""
    from corpus.public2.collected import CASES as SECOND
    from corpus.public3.collected import CASES as THIRD
    from corpus.public4.collected import CASES as FOURTH

    return {"public2": dict(SECOND), "public3": dict(THIRD), "public4": dict(FOURTH)}


def every_case() -> dict[str, PublicCase]:
    """Return all cases by their names."""
    return {name: case for cases in every_list().values() for name, case in cases.items()}


def row(case: PublicCase, of_list: str) -> dict[str, Any]:
    """Return one case as data; a sound twin has the name of its fault, and what is wrong with that."""
    return {
        "name": case.name,
        "list": of_list,
        "role": case.role,
        "twin_of": case.name.removesuffix("_twin") if case.role == "twin" else "",
        "kind": case.kind,
        "thread": case.thread,
        "what": case.what,
        "named_by": [*case.named_by, *case.since],
        "place": case.place,
    }


def data() -> str:
    """Return what cases.json must hold."""
    rows = [row(case, of_list) for of_list, cases in every_list().items() for case in cases.values()]
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    CASES.write_text(data(), encoding="utf-8")
    sys.stdout.write(f"{CASES}\n")
