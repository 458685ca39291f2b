"""What ``normlab check`` costs: seconds and memory against parameters, vocabulary, sequence and modules.

    python benchmarks/check_cost.py                        # every size, on a quiet machine: half an hour
    python benchmarks/check_cost.py 1M modules_100         # some of them
    python benchmarks/check_cost.py --memory               # where the memory goes, property by property
    python benchmarks/check_cost.py --page                 # measure nothing, and write docs/check.md

Each check runs in a process of its own, on one thread, one at a time. Each row is kept in
``benchmarks/results/check_cost.json`` as soon as it is there, and what is kept is not measured again while
the source is the same: after an interruption, the same command goes on. ``--again`` measures it all the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

import budgets
import normlab
from documents import with_tables
from normlab.trace.passes import LARGE_MODEL

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "benchmarks/results/check_cost.json"
PAGE: Final = ROOT / "docs/check.md"
PLACE: Final = "cost of a check"
MEMORY: Final = ROOT / "benchmarks/results/check_memory.json"
PLACE_OF_MEMORY: Final = "memory of a check"

GIB: Final = 2**30


@dataclass(frozen=True)
class Size:
    """One size on one axis, with the budget that it gets."""

    axis: str
    build: Callable[[], normlab.Setup]
    budget_s: float = 60.0


def _decoder(dim: int, layers: int, vocabulary: int, rows: int, width: int) -> Callable[[], normlab.Setup]:
    return partial(budgets.decoder, dim, layers, vocabulary, rows, width)


SIZES: Final[dict[str, Size]] = {
    "1M": Size("parameters", _decoder(128, 4, 1000, 16, 128), 15.0),
    "10M": Size("parameters", _decoder(384, 6, 65, 64, 256), 15.0),
    "30M": Size("parameters", _decoder(512, 8, 8000, 8, 256)),
    "124M": Size("parameters", _decoder(768, 12, 50257, 4, 1024)),
    "350M": Size("parameters", _decoder(1024, 24, 32000, 2, 256), 180.0),
    "500M": Size("parameters", _decoder(1280, 24, 32000, 2, 128), 180.0),
    "vocabulary_1k": Size("vocabulary", _decoder(256, 4, 1000, 4, 128)),
    "vocabulary_8k": Size("vocabulary", _decoder(256, 4, 8000, 4, 128)),
    "vocabulary_32k": Size("vocabulary", _decoder(256, 4, 32_000, 4, 128)),
    "vocabulary_128k": Size("vocabulary", _decoder(256, 4, 128_000, 4, 128)),
    "sequence_128": Size("sequence", _decoder(256, 4, 1000, 4, 128)),
    "sequence_512": Size("sequence", _decoder(256, 4, 1000, 4, 512)),
    "sequence_2048": Size("sequence", _decoder(256, 4, 1000, 4, 2048)),
    "sequence_4096": Size("sequence", _decoder(256, 4, 1000, 4, 4096)),
    "modules_100": Size("modules", partial(budgets.many, 100)),
    "modules_1000": Size("modules", partial(budgets.many, 1000)),
    "modules_5000": Size("modules", partial(budgets.many, 5000)),
}
"""What is measured, by name."""


@dataclass(frozen=True)
class Row:
    """What one check cost."""

    name: str
    axis: str
    parameters: int
    budget_s: float
    seconds: float
    cpu_s: float
    """Of the check alone, in the process's one thread."""
    peak_bytes: int
    """The most memory that the process ever held beyond what it held before the model was built."""
    applicable: int
    judged: int
    load: float
    """Of the machine in the last minute: beside more than one process a core, seconds are too long."""
    ended: str = ""
    """Why there is no report: the refusal, or how the process ended."""
    pass_bytes: int = 0
    """The most memory that a pass of the batch, forward and backward, holds beside the model, in a process of
    its own.
    """
    source: str = ""
    """What the source was."""

    @property
    def in_parameters(self) -> float:
        """The peak without one pass, in the bytes of the parameters in float32."""
        return (self.peak_bytes - self.pass_bytes) / max(4 * self.parameters, 1)


def source_of_normlab() -> str:
    """Return a fingerprint of the code that a check runs, and of the models that are measured."""
    digest = hashlib.sha256()
    for path in [*sorted((ROOT / "src/normlab").rglob("*.py")), Path(budgets.__file__)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def measured(name: str) -> Row:
    """Build a model and check it, in this process."""
    before = _resident_bytes()
    torch.manual_seed(0)
    size = SIZES[name]
    setup = size.build()
    parameters = sum(p.numel() for p in setup.model.parameters())
    begun, cpu = time.perf_counter(), time.process_time()
    ended, judged, applicable = "", 0, 0
    try:
        report = normlab.check(setup, budget_s=size.budget_s)
        judged, applicable = len(report.judged), len(report.applicable)
    except normlab.UserError as error:
        ended = str(error)
    took, cpu_s = time.perf_counter() - begun, time.process_time() - cpu
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    numbers = round(took, 2), round(cpu_s, 2), peak, applicable, judged, round(os.getloadavg()[0], 1)
    return Row(name, size.axis, parameters, size.budget_s, *numbers, ended)


def one_pass(name: str) -> int:
    """Return how many bytes one pass, forward and backward, takes beside the model, in this process."""
    torch.manual_seed(0)
    setup = SIZES[name].build()
    before = _resident_bytes()
    model, batch = setup.model, setup.batch
    loss = model(batch) if setup.loss is None else setup.loss(model, batch)
    loss.backward()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


# ---------------------------------------------------------------------------------------------------- memory

PROFILED: Final = partial(budgets.decoder, 768, 12, 50257, 2, 64)
"""A model of 124M parameters with a small batch: what is held is that of the parameters, not of the pass."""
LEAST: Final = 0.1
"""The table lists what takes at least this share of the parameters' bytes more than was held before it."""


@dataclass(frozen=True)
class Held:
    """The memory of one part of a check, in the bytes of the parameters in float32."""

    what: str
    before: float
    """Held when it began."""
    peak: float
    """The most that was held while it ran."""


class MemoryWatch:
    """Notes the most memory that the process holds, as one part of a check follows the other."""

    def __init__(self, unit: int, ground: int) -> None:
        self.parts: list[Held] = []
        self._unit, self._ground = unit, ground
        self._what, self._before, self._peak = "copies, and first passes", self._now(), 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def turn_to(self, what: str) -> None:
        """Close a part, and begin the next."""
        self.parts.append(Held(self._what, round(self._before, 2), round(self._peak, 2)))
        self._what, self._before, self._peak = what, self._now(), self._now()

    def end(self) -> None:
        """Close the last part."""
        self._ended.set()
        self._thread.join()
        self.turn_to("")

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self._peak = max(self._peak, self._now())

    def _now(self) -> float:
        return (_resident_bytes() - self._ground) / self._unit


def memory_profile() -> list[Held]:
    """Check a large model in this process; return what each part held, the model among it."""
    ground = _resident_bytes()
    torch.manual_seed(0)
    setup = PROFILED()
    parameters = sum(p.numel() for p in setup.model.parameters())
    watch = MemoryWatch(4 * parameters, ground)
    normlab.check(setup, budget_s=3600.0, progress=lambda name, *_: watch.turn_to(name))
    watch.end()
    return watch.parts


def memory_table(parts: Sequence[Held]) -> str:
    """Return the table of what holds memory, the most first."""
    lines = ["| part of the check | held before it | at most while it runs |", "| --- | --- | --- |"]
    for part in sorted(parts, key=lambda part: -part.peak):
        if part.peak - part.before >= LEAST:
            lines.append(f"| {part.what} | {part.before:.1f} | {part.peak:.1f} |")
    return "\n".join(lines)


def kept_memory() -> list[Held]:
    """Return the profile that was measured last; nothing if there is none."""
    return [Held(**row) for row in json.loads(MEMORY.read_text(encoding="utf-8"))] if MEMORY.exists() else []


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def in_a_process(name: str) -> Row:
    """The same in a process of its own, with one thread; one that is killed is told by its signal."""
    done = _run(name, "--here")
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"the process ended with {done.returncode}"]
        size = SIZES[name]
        return Row(name, size.axis, 0, size.budget_s, 0.0, 0.0, 0, 0, 0, os.getloadavg()[0], *last)
    row = Row(**json.loads(done.stdout.splitlines()[-1]))
    return replace(row, pass_bytes=int(_run(name, "--one-pass").stdout))


def _run(name: str, what: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, name, what]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def kept() -> dict[str, Row]:
    """Return the rows that were measured, by name."""
    if not RESULTS.exists():
        return {}
    return {row["name"]: Row(**row) for row in json.loads(RESULTS.read_text(encoding="utf-8"))}


def keep(rows: dict[str, Row]) -> None:
    """Write the rows, in the order of ``SIZES``."""
    ordered = [asdict(rows[name]) for name in SIZES if name in rows]
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def table(rows: Sequence[Row]) -> str:
    """Return the table of the document."""
    lines = [
        "| grows | size | parameters | budget | seconds | CPU seconds | peak memory | judged | load |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        size = row.name.removeprefix(f"{row.axis}_")
        memory = f"{row.peak_bytes / GIB:.1f} GiB"
        if row.parameters > LARGE_MODEL:  # of smaller ones, the parameters are a small part of it
            memory += f", a pass and {row.in_parameters:.1f} times"
        answers = row.ended or f"{row.judged} of {row.applicable}"
        cells: list[Any] = [row.axis, size, f"{row.parameters / 1e6:.1f}M", f"{row.budget_s:.0f} s"]
        cells += [f"{row.seconds:.0f}", f"{row.cpu_s:.0f}", memory, answers, row.load]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is asked for and not kept, and write the table."""
    parser = argparse.ArgumentParser(description="What a check costs.")
    parser.add_argument("sizes", nargs="*", help=f"some of: {', '.join(SIZES)}")
    parser.add_argument("--again", action="store_true", help="measure what is kept, too")
    parser.add_argument("--page", action="store_true", help="write the table, without measuring")
    parser.add_argument("--here", action="store_true", help="measure in this process, and print JSON")
    parser.add_argument("--memory", action="store_true", help="profile the memory of a large model's check")
    parser.add_argument("--one-pass", action="store_true", help="print what one pass takes in this process")
    args = parser.parse_args(argv)
    if unknown := set(args.sizes) - set(SIZES):
        parser.error(f"no size is called {', '.join(sorted(unknown))}")
    if args.here:
        for name in args.sizes:
            print(json.dumps(asdict(measured(name))))
        return
    if args.one_pass:
        for name in args.sizes:
            print(one_pass(name))
        return
    if args.memory:
        profile = [asdict(part) for part in memory_profile()]
        MEMORY.write_text(json.dumps(profile, indent=1) + "\n", encoding="utf-8")
    rows, source = kept(), source_of_normlab()
    for name in [] if args.page or args.memory else args.sizes or SIZES:
        if args.again or name not in rows or rows[name].source != source:
            rows[name] = Row(**{**asdict(in_a_process(name)), "source": source})
            keep(rows)
            print(table([rows[name]]).splitlines()[-1], flush=True)
    document = PAGE.read_text(encoding="utf-8")
    tables = {PLACE: table(list(rows.values())), PLACE_OF_MEMORY: memory_table(kept_memory())}
    written = with_tables(document, tables)
    PAGE.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
