"""Run ``normlab.check`` on lists of the corpus, in one process with one thread.

python tests/corpus/run.py                         # every list
python tests/corpus/run.py cases faults -v         # two lists, with each failure and what is untestable
python tests/corpus/run.py --only gpt2 no_scale --json rows.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # where this package is, not what is in it

from corpus.case import Case

Failure = tuple[str, str, str]
"""Property, module and evidence."""
BUDGET_S = 600.0
"""Holds every property also on a busy machine; a budget changes no verdict."""
VERDICTS = ("FIRST", "later", "flagged", "MISS", "ok", "BAD", "ERROR")
"""Of a fault: the first failure is right, a later one is, none is, or there is none. Of a sound step: no
failure, or some. Of either: its check raises.
"""


@dataclass(frozen=True)
class Row:
    """What a check says of one case."""

    list: str
    name: str
    faulty: bool
    verdict: str
    seconds: float
    failures: Sequence[Failure] = ()
    notes: Sequence[Failure] = ()
    untestable: dict[str, str] = field(default_factory=dict)
    error: str = ""


def verdict(case: Case, failures: Sequence[Failure]) -> str:
    """Return the word for these failures of a case."""
    if not case.faulty:
        return "BAD" if failures else "ok"
    right = [case.accepts(name, module) for name, module, _ in failures]
    if not right:
        return "MISS"
    return "FIRST" if right[0] else "later" if any(right) else "flagged"


def examine(list_name: str, case: Case) -> Row:
    """Check one case."""
    import normlab

    begun = time.perf_counter()
    try:
        arguments = case.build()
        begun = time.perf_counter()
        report = normlab.check(**arguments, budget_s=BUDGET_S)
    except Exception as error:  # the other cases are still worth their time
        seconds = time.perf_counter() - begun
        words = f"{type(error).__name__}: {error}"
        return Row(list_name, case.name, case.faulty, "ERROR", seconds, error=words)
    seconds = time.perf_counter() - begun
    failures, notes = (
        [(one.property, one.module, one.evidence) for one in every]
        for every in (report.failures, report.notes)
    )
    found = verdict(case, failures)
    untestable = dict(report.untestable)
    return Row(list_name, case.name, case.faulty, found, seconds, failures, notes, untestable)


def lines(row: Row, case: Case, *, verbose: bool) -> Iterator[str]:
    """Return what is printed of a case."""
    first = row.error or ("{} @ {}: {}".format(*row.failures[0]) if row.failures else "")
    yield f"{row.verdict:7} {row.name:28} {row.seconds:5.1f}s  {first if verbose else first[:150]}"
    if row.verdict in ("later", "flagged", "MISS"):
        yield f"        wanted {' or '.join(case.properties)} @ {case.place or 'any module'}"
    if verbose or row.verdict == "BAD":
        yield from ("        also {} @ {}: {}".format(*one) for one in row.failures[1:])
    if verbose:
        yield from ("        note {} @ {}: {}".format(*one) for one in row.notes)
        yield from (f"        cannot test {name}: {reason}" for name, reason in row.untestable.items())


def totals(name: str, rows: Sequence[Row]) -> str:
    """Return the sums of a list."""
    counts = Counter(row.verdict for row in rows)
    seconds = sum(row.seconds for row in rows)
    words = ", ".join(f"{counts[word]} {word}" for word in VERDICTS if counts[word])
    return f"== {name}: {len(rows)} cases, {words}, {seconds:.0f} s"


def write_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run(names: Sequence[str], only: Sequence[str], *, verbose: bool) -> list[Row]:
    """Check the cases of these lists, and print what is found."""
    from corpus.lists import LISTS

    rows: list[Row] = []
    for name in names or LISTS:
        chosen = [case for case in LISTS[name].values() if not only or case.name in only]
        here = []
        for case in chosen:
            here.append(examine(name, case))
            for line in lines(here[-1], case, verbose=verbose):
                write_line(line)
        if here:
            write_line(totals(name, here))
        rows += here
    if len({row.list for row in rows}) > 1:
        write_line(totals("all", rows))
    return rows


def main(given: Sequence[str] | None = None) -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description="Check the cases of the corpus.")
    parser.add_argument("lists", nargs="*", metavar="LIST", help="lists; all without one")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="cases of these names alone")
    parser.add_argument("-v", "--verbose", action="store_true", help="print all that a report holds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows")
    options = parser.parse_args(given)
    import torch

    from corpus.lists import LISTS

    if missing := set(options.lists) - set(LISTS):
        parser.error(f"no list is called {', '.join(sorted(missing))}; there are {', '.join(LISTS)}")
    here = {name for key in options.lists or LISTS for name in LISTS[key]}
    if missing := set(options.only) - here:
        parser.error(f"no case of these lists is called {', '.join(sorted(missing))}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = run(options.lists, options.only, verbose=options.verbose)
    if options.json:
        written: list[dict[str, Any]] = [asdict(row) for row in rows]
        options.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
