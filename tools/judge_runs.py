"""Judge kept runs by today's rule for outcomes: ``NORMLAB_DATA=... python tools/judge_runs.py results``.

The status of every finished run below the given folders gets the outcome that its rows give today. Where a
run has not measured the share of its commonest dev output, that of its test outputs stands for it, and the
evidence says so. Sources cannot be exchanged without weights: the evidence says that, too. The unigram
entropy is that of a comparison on the same data. Comparisons and pages are not rewritten.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from os.path import expandvars
from pathlib import Path

from normlab.base.files import read_json
from normlab.base.metric import Outcome
from normlab.lab.data.text import read_lines
from normlab.lab.runs import RunFolder
from normlab.lab.tasks import TASKS
from normlab.lab.tasks.task import repeated_share
from normlab.lab.training.outcome import outcome


def judged(folder: RunFolder, unigram_entropy_nats: float) -> Outcome | None:
    """Return the outcome of a finished run by its rows and, where it has to be, by its test outputs."""
    status, config, rows = folder.status(), folder.config(), folder.metrics()
    outputs = folder.best_outputs if folder.best_outputs.exists() else folder.outputs
    task, steps = TASKS[config.task], config.train.steps
    validations = (row for row in rows if row["kind"] == "dev" and "repeated_share" not in row)
    best = next((row for row in validations if row["step"] == status.best_step), None)
    lent = best is not None and task.has_source and outputs.exists()
    if best is not None and lent:
        references = read_lines(Path(expandvars(config.data.test_tgt)))
        best["repeated_share"] = repeated_share(list(read_lines(outputs)), list(references))
    found = outcome(
        rows,
        unigram_entropy_nats=unigram_entropy_nats,
        total_steps=status.step if status.stopped else steps,
        best_step=status.best_step,
        has_source=task.has_source,
        final=status.step >= steps or bool(status.stopped),
    )
    if found is not None and lent:
        found = replace(found, evidence=found.evidence.replace("% of the outputs", "% of the test outputs"))
    return found


def finished(root: Path) -> Iterator[RunFolder]:
    """Yield the finished runs below a folder."""
    folders = (RunFolder(path.parent) for path in sorted(root.rglob("status.json")))
    yield from (folder for folder in folders if folder.status().state == "done")


def entropies(root: Path) -> dict[str, float]:
    """Return the unigram entropy that the comparisons below a folder have recorded, by digest of the data."""
    found: dict[str, float] = {}
    for path in sorted(root.rglob("comparison.json")):
        comparison = read_json(path)  # of any version
        run = next((run for recipe in comparison["recipes"] for run in recipe["runs"]), "")
        if run and comparison.get("unigram_entropy_nats") is not None:
            digest = RunFolder(path.parent / run).config().data.digest
            found[digest] = comparison["unigram_entropy_nats"]
    return found


def judge(root: Path, known: Mapping[str, float]) -> Iterator[str]:
    """Rewrite the outcomes of the runs below a folder; yield a line for each."""
    for folder in finished(root):
        entropy, status = known.get(folder.config().data.digest), folder.status()
        if entropy is None:
            yield f"{folder.path}: no comparison says the unigram entropy of its data; left as it is"
        elif (found := judged(folder, entropy)) is not None:
            folder.set_status(replace(status, outcome=found))
            before = status.outcome.state if status.outcome else "open"
            yield f"{folder.path}: {before} -> {found.state}: {found.evidence}"


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("name the folders with what is to be judged: tools/judge_runs.py results")
    for given in map(Path, sys.argv[1:]):
        for line in judge(given, entropies(given)):
            print(line)
