"""Results of an earlier version, kept in ``old_results`` as they were written, under today's names."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import migrate_results
from normlab.cli.main import main
from normlab.comparison.result import Comparison
from normlab.config.config import numbers, run_id
from normlab.config.io import from_json
from normlab.runs import RunFolder
from normlab.runs.examples import read_examples
from normlab.tasks.scores import bleu_of_sums, score

OLD = Path(__file__).with_name("old_results")
RUN = "29bf6f0b1b97"
REFERENCES = ["The first one .", "the second", "A third sentence , longer than the others ."]


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A copy of the old results, and a reference text for the three sentences that they hold."""
    texts = tmp_path / "data" / "ted.gl-en"
    texts.mkdir(parents=True)
    (texts / "test.en").write_text("\n".join(REFERENCES) + "\n")
    monkeypatch.setenv("NORMLAB_DATA", str(tmp_path / "data"))
    shutil.copytree(OLD, tmp_path / "results")
    return tmp_path / "results"


def old_id(config, semantics) -> str:
    """The hash of the same numbers under their old names."""
    olds = {new: old for old, new in migrate_results.FIELDS.items()}
    content = {"semantics": semantics}
    for section, value in numbers(config).items():
        inner = value if isinstance(value, dict) else {"": value}
        for field, v in inner.items():
            place, _, name = olds.get(f"{section}.{field}", f"{section}.{field}").partition(".")
            if name:
                content.setdefault(place, {})[name] = v
            else:
                content[place] = v
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def test_a_run_changes_its_names_and_nothing_else(results):
    ids = migrate_results.migrate(results)
    folder = RunFolder(results / "gl-en" / ids[RUN])
    config = folder.config()
    assert (folder.id(), folder.stale()) == (run_id(config), False)
    assert old_id(config, 1) == RUN, "the same numbers under other names"
    assert (config.optim.max_grad_norm, config.model.position_encoding) == (1.0, "sinusoidal")
    old = OLD / "gl-en" / RUN
    status, scores = (json.loads((old / f"{name}.json").read_text()) for name in ("status", "scores"))
    assert folder.status().best_dev == {"bleu": status["best_dev_bleu"], "nll": status["best_dev_nll"]}
    assert folder.status().train_seconds == status["train_seconds"]
    migrated = json.loads(folder.scores.read_text())
    assert migrated["bleu"] == scores["bleu"]
    assert migrated["signatures"]["bleu"] == scores["signature"]
    rows = [json.loads(line) for line in (old / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("padded_tokens") for row in folder.metrics()] == [row.get("positions") for row in rows]
    assert [row["nll"] for row in folder.metrics()] == [row["nll"] for row in rows]
    assert folder.task_metrics()[0].name == "bleu"


def test_the_statistics_of_examples_give_the_score(results):
    ids = migrate_results.migrate(results)
    folder = RunFolder(results / "gl-en" / ids[RUN])
    sums = read_examples(folder.examples)["bleu"].sum(0)
    outputs = folder.outputs.read_text().splitlines()
    assert float(bleu_of_sums(sums)) == pytest.approx(score(outputs, REFERENCES).bleu)


def test_without_the_reference_text_there_are_none(results, monkeypatch):
    monkeypatch.delenv("NORMLAB_DATA")
    ids = migrate_results.migrate(results)
    assert not RunFolder(results / "gl-en" / ids[RUN]).examples.exists()


def test_a_comparison_speaks_of_the_new_runs_and_its_page_is_written_anew(results):
    ids = migrate_results.migrate(results)
    text = (results / "gl-en" / "comparison.json").read_text()
    (recipe,) = from_json(Comparison, text).recipes
    assert recipe.runs == (ids[RUN],)
    score_kept = json.loads((OLD / "gl-en" / RUN / "scores.json").read_text())["bleu"]
    assert recipe.scores["bleu"] == (score_kept,)
    assert RUN not in text
    assert ids[RUN] in (results / "gl-en" / "comparison.html").read_text()
    again = np.array([path.stat().st_mtime_ns for path in sorted(results.rglob("*"))])
    assert migrate_results.migrate(results) == {}
    assert (again == np.array([path.stat().st_mtime_ns for path in sorted(results.rglob("*"))])).all()


def test_a_run_of_an_earlier_version_is_refused_with_the_command_that_migrates_it(results, capsys):
    assert main(["report", str(results / "gl-en" / RUN)]) == 2
    assert f"tools/migrate_results.py {results / 'gl-en' / RUN}" in capsys.readouterr().err
