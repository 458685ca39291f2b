"""Rewrite run folders and comparisons of an earlier version: ``python tools/migrate_results.py results``.

Each run folder below the given folders gets today's configuration, rows, status and scores, and the name of
its new id; the statistics of single test examples are computed where the reference text is found
(``$NORMLAB_DATA``). Comparisons then refer to the new ids, and their pages are written anew. Folders of
today's format stay as they are. Checkpoints are not rewritten.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from judge_comparisons import today, write
from normlab.config.config import SEMANTICS, Config, run_id
from normlab.config.io import from_plain, to_plain
from normlab.data.text import read_lines
from normlab.runs.files import read_json, row_line, write_examples, write_json_atomic, write_text_atomic
from normlab.runs.folder import RunFolder
from normlab.tasks import TASKS
from normlab.tasks.scores import sentence_statistics
from same_numbers import RENAMES

Json = dict[str, Any]

FIELDS: Final[dict[str, str]] = {
    **{old: new for new, olds in RENAMES["fields"].items() for old in olds},
    "model.positions": "model.position_encoding",
    "train.start_digest": "train.init_digest",
}
"""Old to new names of fields of a configuration."""
COLUMNS: Final = {"positions": "padded_tokens"}
"""Old to new names in rows of training."""
SIGNATURES: Final = {"signature": "bleu", "signature_chrf": "chrf", "signature_tokenised": "bleu_tokenised"}
"""Old names of sacreBLEU's signatures to the metrics that they are of."""


# ------------------------------------------------------------------------------------------------------ runs


def config_of(old: Json) -> Config:
    """Today's configuration from an earlier version's."""
    new: Json = {}
    for name, value in old.items():
        inner = value if isinstance(value, dict) else {"": value}
        for field, content in inner.items():
            section, _, renamed = FIELDS.get(f"{name}.{field}", f"{name}.{field}").partition(".")
            if renamed:
                new.setdefault(section, {})[renamed] = content
            else:
                new[section] = content
    task = TASKS[str(new.get("task", "translation"))]
    train = new.get("train", {})
    if train.get("best_by") == task.metrics[0].name:
        train["best_by"] = ""  # the headline, which needs no name
    config: Config = from_plain(Config, new)
    return config


def migrate_run(folder: RunFolder) -> str:
    """Rewrite a run folder in place; its new id."""
    content = read_json(folder.path / "config.json")
    if content["semantics"] != SEMANTICS:
        raise SystemExit(
            f"{folder.path} was made under semantics {content['semantics']}, today's are {SEMANTICS}: its "
            "configuration gives other numbers now; train it anew"
        )
    config = config_of(content["config"])
    metrics = TASKS[config.task].metrics
    _rewrite(folder.path / "status.json", status_of)
    for scores in (folder.scores, folder.best_scores):
        _rewrite(scores, scores_of)
    if (rows := folder.path / "metrics.jsonl").exists():
        write_text_atomic(rows, "".join(row_line(row_of(row)) for row in folder.metrics()))
    write_statistics(folder, config)
    new = run_id(config)
    write_json_atomic(
        folder.path / "config.json",
        {"id": new, "semantics": SEMANTICS, "config": config, "metrics": list(metrics)},
    )
    return new


def status_of(old: Json) -> Json:
    """``best_dev`` holds every dev score; the evidence of an outcome speaks of the NLL."""
    if outcome := old.get("outcome"):
        outcome["evidence"] = re.sub(
            r"likelihood loss ([\d.]+) nats a token", r"NLL \1 nats per token", outcome["evidence"]
        )
    best = {name: old.pop(f"best_dev_{name}", None) for name in ("bleu", "nll")}
    return {**old, "best_dev": {name: value for name, value in best.items() if value is not None}}


def scores_of(old: Json) -> Json:
    """Signatures stand together, by metric."""
    signatures = {metric: old.pop(name, "") for name, metric in SIGNATURES.items()}
    known = {metric: text for metric, text in signatures.items() if text}
    return {**old, **({"signatures": known} if known else {})}


def row_of(old: Mapping[str, Any]) -> Json:
    """A row of metrics under today's names."""
    return {COLUMNS.get(name, name) if old["kind"] == "train" else name: v for name, v in old.items()}


def write_statistics(folder: RunFolder, config: Config) -> None:
    """Write the statistics of each test example, where the outputs and the references are there."""
    home = os.environ.get("NORMLAB_DATA", "")
    references = Path(config.data.test_tgt.replace("$NORMLAB_DATA", home))
    for outputs, examples in ((folder.outputs, folder.examples), (folder.best_outputs, folder.best_examples)):
        if outputs.exists() and config.data.test_tgt and found(references):
            lines, right = read_lines(outputs), list(read_lines(references))
            rows = sentence_statistics(lines, right, target_lang=config.data.target_lang)
            write_examples(examples, {"bleu": rows.astype(np.uint16)})  # counts: a fifth of the bytes


def found(text: Path) -> bool:
    """Whether a text is there, plain or packed."""
    return any(text.with_name(text.name + end).exists() for end in ("", ".gz", ".xz"))


# ------------------------------------------------------------------------------------------------ comparisons


def migrate_comparison(path: Path, ids: Mapping[str, str]) -> None:
    """Rewrite ``comparison.json`` with new ids, judge it anew and write its page."""
    old, folder = read_json(path), path.parent
    if "margin" in old:
        return
    if "metrics" not in old:
        first = RunFolder(
            folder / ids.get(old["recipes"][0]["runs"][0], old["recipes"][0]["runs"][0])
        ).config()
        task = TASKS[first.task]
        old |= {
            "task": first.task,
            "metrics": to_plain(list(task.metrics)),
            "best_by": task.selection_metric(first).name,
            "recipes": [recipe_of(r, ids) for r in old["recipes"]],
            "signatures": {m: old[name] for name, m in SIGNATURES.items() if old.get(name)},
        }
    write(path, today({name: value for name, value in old.items() if name not in SIGNATURES}))


def recipe_of(old: Json, ids: Mapping[str, str]) -> Json:
    """A recipe with its runs by their new ids; what follows from these is judged anew."""
    trials = [
        {
            "lr": trial["lr"],
            "run": ids.get(trial["run"], trial["run"]),
            "dev": {},
            "outcome": trial["outcome"],
        }
        for trial in old["trials"]
    ]
    return {**old, "trials": trials, "runs": [ids.get(run, run) for run in old["runs"]]}


# ------------------------------------------------------------------------------------------------------ files


def migrate(root: Path) -> dict[str, str]:
    """Migrate everything below a folder; old to new ids."""
    ids: dict[str, str] = {}
    for folder in list(old_runs(root)):
        ids[folder.path.name] = new = migrate_run(folder)
        folder.path.rename(folder.path.with_name(new))
    for folder in (RunFolder(path.parent) for path in root.rglob("config.json")):
        start = folder.config().train.init_from
        if start in ids:
            content = read_json(path := folder.path / "config.json")
            content["config"]["train"]["init_from"] = ids[start]
            write_json_atomic(path, content)
    for path in sorted(root.rglob("comparison.json")):
        migrate_comparison(path, ids)
    return ids


def old_runs(root: Path) -> Iterator[RunFolder]:
    """The run folders below a folder that an earlier version wrote."""
    for path in sorted(root.rglob("config.json")):
        content = read_json(path)
        if isinstance(content, dict) and "config" in content and "metrics" not in content:
            yield RunFolder(path.parent)


def _rewrite(path: Path, change: Any) -> None:
    if path.exists():
        write_json_atomic(path, change(json.loads(path.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("name the folders with what is to be migrated: tools/migrate_results.py results")
    for given in sys.argv[1:]:
        for before, after in migrate(Path(given)).items():
            print(f"{before} -> {after}")
