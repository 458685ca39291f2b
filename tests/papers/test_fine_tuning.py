"""The search of a fine-tuning: its cells, and that the best one is reported with other seeds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lab.tasks.test_classification import write_pairs
from lab.training.tiny import tiny_bert, write_plain
from normlab.cli.presets import CONFIGS
from normlab.errors import SpentError, UserError
from normlab.lab.config import Config, DataConfig, SeedConfig
from normlab.lab.runs import Runs
from normlab.lab.training.jobs import Queue
from normlab.lab.training.train import train
from normlab.papers.lab import Lab, finished
from normlab.papers.studies import glue_search
from normlab.papers.studies.glue_search import fine_tuned, search


def test_the_papers_cells_are_searched():
    base = CONFIGS["mrpc"]()
    cells = list(search(base, 3668))
    assert len(cells) == 2 * 4 * 6
    rows = {cell.train.max_tokens // cell.data.block_len for cell in cells}
    assert rows == {16, 32}
    assert {cell.optim.lr for cell in cells} >= {1e-5, 1e-4}
    for cell in cells:
        seen = cell.train.steps * (cell.train.max_tokens // cell.data.block_len)
        assert 3 <= seen / 3668 <= 8.05
        assert cell.optim.warmup_steps == cell.train.steps // 10
        assert {cell.seeds.init, cell.seeds.data, cell.seeds.dropout} == {0}


@pytest.mark.slow
def test_the_best_cell_on_dev_is_reported_with_seeds_that_chose_nothing(tmp_path):
    text = replace(write_plain(tmp_path / "text"), block_len=32)
    pretrained = train(tiny_bert(text, steps=4), tmp_path / "pretrained")
    (tmp_path / "pairs").mkdir()
    data = DataConfig(**write_pairs(tmp_path / "pairs"), tokenizer="", block_len=32)
    base = replace(tiny_bert(data), task="classification")
    cells = {"batches": (16,), "lrs": (1e-5, 1e-2), "epochs": (1,)}
    found = fine_tuned(pretrained.path, base, tmp_path / "runs", seeds=2, **cells)
    runs = [(r.config().seeds.init, r.config().optim.lr, r.status()) for r in Runs(tmp_path / "runs")]
    assert sorted(seed for seed, _, _ in runs) == [0, 0, 1, 2]
    swept = {lr: status.best_dev["accuracy"] for seed, lr, status in runs if seed == 0}
    assert swept[found.chosen.optim.lr] == max(swept.values())
    assert all(lr == found.chosen.optim.lr for seed, lr, _ in runs if seed)
    assert len(found.scores) == found.accuracy.runs == 2
    assert found.accuracy.low <= found.accuracy.value <= found.accuracy.high
    assert 50 <= found.majority <= 100
    asked = list[Path]()

    def queue(root: Path) -> Queue:
        asked.append(root)
        return Queue(root, 1)

    again = fine_tuned(pretrained.path, base, tmp_path / "runs", seeds=2, queue=queue, **cells)
    assert asked == [tmp_path / "runs"] * 2
    assert [folder.path for folder in again.runs] == [folder.path for folder in found.runs]
    assert len(list(Runs(tmp_path / "runs"))) == len(runs), "trained once"


@pytest.mark.slow
def test_every_pre_trained_run_is_fine_tuned_on_every_task(tmp_path, monkeypatch):
    text = replace(write_plain(tmp_path / "text"), block_len=32)
    runs = {c: (train(tiny_bert(text, c, steps=2), tmp_path / "runs"),) for c in ("pre", "post")}
    (tmp_path / "pairs").mkdir()
    data = DataConfig(**write_pairs(tmp_path / "pairs"), tokenizer="", block_len=32)
    monkeypatch.setattr(glue_search, "GLUE", {"MRPC": data})
    cells = {"batches": (16,), "lrs": (1e-3,), "epochs": (1,)}
    found = glue_search.fine_tuning(Lab(tmp_path / "runs", runs=runs), tasks=("MRPC",), **cells)
    assert len(found.tables["runs"]) == 12
    assert [row["cell"] for row in found.tables["cells"]] == ["MRPC pre", "MRPC post"]
    assert "batch 16, lr 0.001" in found.facts["MRPC post"]
    assert "commonest label" in found.facts["MRPC post"]


def test_a_run_of_a_study_s_own_that_fails_is_no_score(tmp_path):
    queue = Queue(tmp_path, 1)
    queue.failed["0123abcd4567"] = "no room"
    with pytest.raises(UserError, match=r"0123abcd4567 .*: no room"):
        finished({}, queue)


def test_a_spent_budget_is_no_failure_and_no_score(tmp_path):
    queue = Queue(tmp_path, 1, until=0.0)
    with pytest.raises(SpentError, match="2 of 2 "):
        finished({"": [Config(), replace(Config(), seeds=SeedConfig(2, 2, 2))]}, queue)
