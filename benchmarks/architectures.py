"""What ``normlab check hf:FOLDER --shrink`` says of every architecture that transformers can build.

    python benchmarks/architectures.py --only bert t5      # some model types, printed
    python benchmarks/architectures.py --write             # every type that is not kept: some three hours
    python benchmarks/architectures.py --page              # measure nothing, and write the page

Each model type that has a class for one of ``TASKS`` is checked with the default configuration of its class,
written as a ``config.json``. Nobody has chosen these numbers for a check. A check runs in a process of its
own, on one thread, and ends after ``LIMIT_S`` seconds and at ``LIMIT_BYTES`` of memory. Each row is kept in
``benchmarks/results/architectures.json`` as soon as it is there; after an interruption, the same command goes
on. ``--again`` measures what is kept, too. What the first such measurement said, before anything was mended
because of it, stays in ``architectures_at_first_sight.json``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, NamedTuple

import torch
import transformers
from transformers.models.auto import modeling_auto

import normlab
from documents import with_tables
from normlab.errors import UserError, in_one_line
from normlab.setups.huggingface import setup_from_configuration

RESULTS: Final = Path(__file__).parent / "results/architectures.json"
FIRST_SIGHT: Final = RESULTS.with_stem("architectures_at_first_sight")
PAGE: Final = Path(__file__).resolve().parents[1] / "docs/architectures.md"
TASKS: Final = {
    "CausalLM": "CAUSAL_LM",
    "Seq2SeqLM": "SEQ_TO_SEQ_CAUSAL_LM",
    "ImageClassification": "IMAGE_CLASSIFICATION",
    "MaskedLM": "MASKED_LM",
    "SpeechSeq2Seq": "SPEECH_SEQ_2_SEQ",
    "CTC": "CTC",
    "SequenceClassification": "SEQUENCE_CLASSIFICATION",
}
"""Tasks, as transformers' auto classes name them, and how it names the classes that it has for each."""
OUTCOMES: Final = ("holds", "fails", "undecided", "refused", "error", "out of time", "out of memory")
BUDGET_S: Final = 120.0
LIMIT_S: Final = 400.0
LIMIT_BYTES: Final = 10 * 2**30


class Architecture(NamedTuple):
    """A class of transformers, by the model type of its configuration."""

    type: str
    task: str
    name: str


@dataclass
class Row:
    """What a check says of an architecture."""

    type: str
    task: str
    name: str
    outcome: str
    """One of ``OUTCOMES``."""
    sentence: str = ""
    """The first failure, or why there is no answer."""
    property: str = ""
    """The property that fails first."""
    failures: tuple[str, ...] = ()
    """All that fail, but for those that a failure explains."""
    judged: int = 0
    unjudged: dict[str, str] = field(default_factory=dict)
    """Why properties that apply were not judged."""
    late: int = 0
    """How many of these lacked time."""
    seconds: float = 0.0
    gibibytes: float = 0.0
    """The most that the process held."""


def architectures() -> list[Architecture]:
    """Every class for one of the tasks; one for sequences only where a model type has no other."""
    classes = list[Architecture]()
    for task, name in TASKS.items():
        known = {each.type for each in classes}
        for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES").items():
            first = names if isinstance(names, str) else names[0]
            is_known = any((each.type, each.name) == (model_type, first) for each in classes)
            if not is_known and not (task == "SequenceClassification" and model_type in known):
                classes.append(Architecture(model_type, task, first))
    return classes


# ---------------------------------------------------------------------------------------------------- a check


def checked(each: Architecture) -> Row:
    """Check a small model of an architecture, in this process."""
    row = Row(*each, outcome="error")
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = transformers.AutoConfig.for_model(each.type)
            config.architectures = [each.name]
            config.save_pretrained(folder)
        except Exception as error:
            row.outcome, row.sentence = "refused", f"no default configuration: {in_one_line(error)}"
            return row
        try:
            setup = setup_from_configuration(folder, seed=1, shrink=True).setup
            report = normlab.check(setup, budget_s=BUDGET_S)
        except UserError as error:
            row.outcome, row.sentence = "refused", str(error).replace(folder, "FOLDER")
            return row
    row.outcome = report.verdict
    row.judged = len(report.judged)
    row.failures = tuple(failure.property for failure in report.failures)
    row.unjudged = {name: report.untestable[name] for name in report.unjudged}
    row.late = sum("; a budget of" in why for why in row.unjudged.values())
    if report.failures:
        first = report.failures[0]
        row.property, row.sentence = first.property, f"at {first.module or 'the model'}: {first.evidence}"
    elif report.verdict == "undecided":
        row.sentence = report.shortfall
    return row


def _check_and_send(each: Architecture, receiver: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    torch.set_num_threads(1)
    begun = time.perf_counter()
    try:
        row = checked(each)
    except Exception as error:
        lacks_memory = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        outcome = "out of memory" if lacks_memory else "error"
        row = Row(*each, outcome=outcome, sentence=f"{in_one_line(error)} ({where})")
    row.seconds = round(time.perf_counter() - begun, 1)
    row.gibibytes = round(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30, 2)
    receiver.send(row)


def in_a_process(each: Architecture) -> Row:
    """Check an architecture in a process of its own."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_check_and_send, args=(each, theirs))
    process.start()
    theirs.close()
    begun = time.perf_counter()
    try:
        row = ours.recv() if ours.poll(LIMIT_S) else Row(*each, outcome="out of time")
    except EOFError:
        row = Row(*each, outcome="error", sentence="the process was ended by a signal")
    process.kill()
    process.join()
    row.seconds = row.seconds or round(time.perf_counter() - begun, 1)
    return row


# ---------------------------------------------------------------------------------------------------- results


def kept(file: Path = RESULTS) -> dict[str, Row]:
    """Return the rows that were measured, by model type and task."""
    rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    return {key(row["type"], row["task"]): Row(**row) for row in rows}


def key(model_type: str, task: str) -> str:
    """Return what a row is kept under."""
    return f"{model_type} {task}"


def keep(rows: dict[str, Row]) -> None:
    """Write the rows by model type."""
    ordered = [asdict(rows[each]) for each in sorted(rows)]
    RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


def measured(wanted: Sequence[Architecture], rows: dict[str, Row], *, again: bool) -> Iterator[Row]:
    """Check what is not among these rows, or all of it."""
    for each in wanted:
        if again or key(each.type, each.task) not in rows:
            yield in_a_process(each)


# ------------------------------------------------------------------------------------------------------ page


def counts() -> str:
    """Return the table of how many architectures each outcome has, at first sight and now."""
    first, now = kept(FIRST_SIGHT).values(), kept().values()
    lines = [f"| task | {' | '.join(OUTCOMES)} |", f"| --- |{' --- |' * len(OUTCOMES)}"]
    for task in (*TASKS, ""):
        cells = [f"{_count(first, task, each)} → {_count(now, task, each)}" for each in OUTCOMES]
        if any(row.task == task for row in (*first, *now)) or not task:
            lines.append(f"| {task or 'all'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _count(rows: Iterable[Row], task: str, outcome: str) -> int:
    return sum(row.outcome == outcome and task in ("", row.task) for row in rows)


def answers() -> str:
    """Return the table of what each architecture's check says."""
    lines = [
        "| model type | class | outcome | judged | seconds | GiB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in kept().values():
        outcome = f"{row.outcome}: `{row.property}` {row.sentence}" if row.property else row.outcome
        if not row.judged:
            outcome = f"{row.outcome}: {row.sentence}"
        cells = [f"`{row.type}`", f"`{row.name}`", outcome.replace("|", "∣")]
        applicable = row.judged + len(row.unjudged)
        judged = f"{row.judged} of {applicable}" if applicable else ""
        lines.append(f"| {' | '.join(cells)} | {judged} | {row.seconds:.0f} | {row.gibibytes:.1f} |")
    return "\n".join(lines)


def write_page() -> None:
    """Write the tables into the page."""
    document = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_tables(document, tables()), encoding="utf-8")


def tables() -> dict[str, str]:
    """Return the tables of the page, by their names."""
    return {"outcomes": counts(), "architectures": answers()}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is asked for, print it, and keep it."""
    parser = argparse.ArgumentParser(description="A check of every architecture of transformers.")
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="some model types")
    parser.add_argument("--write", action="store_true", help="keep each row, and leave out what is kept")
    parser.add_argument("--again", action="store_true", help="measure what is kept, too")
    parser.add_argument("--page", action="store_true", help="write the page, without measuring")
    args = parser.parse_args(argv)
    if args.page:
        write_page()
        return
    transformers.logging.set_verbosity_error()
    wanted = architectures()
    if unknown := set(args.only or ()) - {each.type for each in wanted}:
        parser.error(f"no model type is called {', '.join(sorted(unknown))}")
    wanted = [each for each in wanted if not args.only or each.type in args.only]
    rows = kept() if args.write else {}
    for row in measured(wanted, rows, again=args.again):
        print(row.type, row.task, row.outcome, row.property, row.sentence, f"{row.seconds} s", flush=True)
        rows[key(row.type, row.task)] = row
        if args.write:
            keep(rows)


if __name__ == "__main__":
    main()
