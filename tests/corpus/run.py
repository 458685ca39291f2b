"""Judge the cases of the corpus.

python tests/corpus/run.py                                   # all
python tests/corpus/run.py causality padding -j 2            # those of two properties, in two processes
python tests/corpus/run.py unseen later -v                   # those of two lists, in full
python tests/corpus/run.py --only no_scale nanogpt --json rows.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from queue import Queue

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MKL_NUM_THREADS", "1")
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # where this package is, not what is in it

from corpus.case import Case
from corpus.judge import VERDICTS, Judge, Row


def words_of(case: Case) -> set[str]:
    """Return the words by which a case is chosen: its properties, its origin's kind and its list."""
    return {*case.properties, case.origin.kind, case.origin.list, "fault" if case.faulty else "sound"}


def judged(cases: Sequence[Case], jobs: int) -> Iterator[Row]:
    """Judge cases in this many processes, and return what is said of each in their order."""
    idle: Queue[Judge] = Queue()

    def row(case: Case) -> Row:
        judge = idle.get()
        try:
            return judge(case.name)
        finally:
            idle.put(judge)

    with ExitStack() as stack:
        for _ in range(jobs):
            idle.put(stack.enter_context(Judge()))
        yield from stack.enter_context(ThreadPoolExecutor(jobs)).map(row, cases)


def lines(row: Row, case: Case, *, verbose: bool) -> Iterator[str]:
    """Return what is printed of a case."""
    first = row.error or ("{} @ {}: {}".format(*row.failures[0]) if row.failures else "")
    yield f"{row.verdict:7} {row.name:28} {row.seconds:5.1f}s  {first if verbose else first[:150]}"
    if row.verdict in ("later", "flagged", "MISS"):
        yield f"        wanted {' or '.join(case.properties)} @ {case.place or 'any module'}"
    if row.verdict != case.right and case.not_right:
        yield f"        known: {case.not_right}"
    if verbose or row.verdict == "BAD":
        yield from ("        also {} @ {}: {}".format(*failure) for failure in row.failures[1:])
    if verbose:
        yield f"        {case.what}"
        yield from ("        note {} @ {}: {}".format(*note) for note in row.notes)
        yield from (f"        cannot test {name}: {reason}" for name, reason in row.untestable.items())


def totals(name: str, rows: Sequence[Row]) -> str:
    """Return the sums of some rows."""
    counts = Counter(row.verdict for row in rows)
    seconds = sum(row.seconds for row in rows)
    words = ", ".join(f"{counts[word]} {word}" for word in VERDICTS if counts[word])
    return f"== {name}: {len(rows)} cases, {words}, {seconds:.0f} s"


def sums(rows: Iterable[Row], cases: dict[str, Case]) -> Iterator[str]:
    """Return the sums by origin, of what was judged at first sight, and of all."""
    parts: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        origin = cases[row.name].origin
        parts[f"{origin.kind}, {origin.list}"].append(row)
    for name, part in parts.items():
        yield totals(name, part)
    everything = [row for part in parts.values() for row in part]
    if at_first_sight := [row for row in everything if cases[row.name].first_sight]:
        yield totals("written before any check was run on them", at_first_sight)
    yield totals("all", everything)


def write_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(given: Sequence[str] | None = None) -> None:
    """Judge what the command line names."""
    parser = argparse.ArgumentParser(description="Judge the cases of the corpus.")
    words = "properties, kinds of origin or lists, fault or sound; every case without one"
    parser.add_argument("words", nargs="*", metavar="WORD", help=words)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="cases of these names alone")
    parser.add_argument("-j", "--jobs", type=int, default=1, metavar="N", help="processes, one core each")
    parser.add_argument("-v", "--verbose", action="store_true", help="print all that a report holds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows")
    options = parser.parse_args(given)
    from corpus.collected import CASES

    known = {word for case in CASES.values() for word in words_of(case)}
    if missing := set(options.words) - known:
        parser.error(f"nothing is called {', '.join(sorted(missing))}; there are {', '.join(sorted(known))}")
    if missing := set(options.only) - set(CASES):
        parser.error(f"no case is called {', '.join(sorted(missing))}")
    chosen = [
        case
        for case in CASES.values()
        if (not options.words or words_of(case) & set(options.words))
        and (not options.only or case.name in options.only)
    ]
    rows = []
    for case, row in zip(chosen, judged(chosen, options.jobs), strict=True):
        rows.append(row)
        for line in lines(row, case, verbose=options.verbose):
            write_line(line)
    for line in sums(rows, CASES):
        write_line(line)
    if options.json:
        written = [asdict(row) | {"origin": asdict(CASES[row.name].origin)} for row in rows]
        options.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
