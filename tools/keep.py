"""Keep what a run or a comparison measured: ``python tools/keep.py runs/multi30k results/multi30k``.

Configuration, metrics, status, scores and translations are copied; weights, tokens and logs stay behind. The
page is written anew from the copy, so that it is known to need nothing else, and without the tables of its
figures, which the metrics hold.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

from normlab.base.files import write_text_atomic
from normlab.base.io import from_json
from normlab.lab.comparison.result import Comparison
from normlab.lab.runs import RunFolder
from normlab.report.compare import compare_page

KEPT = (
    *("config.json", "metrics.jsonl", "status.json", "start.json"),
    *("scores.json", "test.hyp.txt", "test.examples.safetensors"),
    *("scores-best.json", "test-best.hyp.txt", "test-best.examples.safetensors"),
)


def keep_run(run: RunFolder, into: Path) -> None:
    """Copy the small files of a run; paths of local data sets become portable, and of the path to the run
    that it starts from, the id alone is kept.
    """
    into.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        if (run.path / name).exists():
            shutil.copy(run.path / name, into / name)
    config = into / "config.json"
    text, start = config.read_text(encoding="utf-8"), run.config().train.init_from
    if start:
        text = text.replace(json.dumps(start), json.dumps(Path(start).name))
    data = os.environ.get("NORMLAB_DATA")
    if data:
        text = text.replace(data.rstrip("/"), "$NORMLAB_DATA")
    config.write_text(text, encoding="utf-8")


def keep(source: Path, into: Path) -> None:
    """Copy a run folder, or a folder with a comparison and the runs that it names."""
    stored = source / "comparison.json"
    if not stored.exists():
        keep_run(RunFolder(source), into)
        return
    comparison = from_json(Comparison, stored.read_text(encoding="utf-8"))
    for run in {run for r in comparison.recipes for run in (*r.runs, *(t.run for t in r.trials))}:
        keep_run(RunFolder(source / run), into / run)
    shutil.copy(stored, into / stored.name)
    write_text_atomic(into / "comparison.html", compare_page(comparison, into).html())


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"two folders are needed, got {len(sys.argv) - 1}: tools/keep.py runs/NAME results/NAME")
    keep(Path(sys.argv[1]), Path(sys.argv[2]))
