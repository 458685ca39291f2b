"""A language model, trained here and by a worker, and refused by the commands that need translations."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from lab.training.test_train import interrupt_at, without_seconds
from lab.training.tiny import tiny, tiny_language_model, write_plain
from normlab.base.io import to_json
from normlab.base.metric import NLL
from normlab.errors import UserError
from normlab.lab.config import run_id
from normlab.lab.runs import RunFolder
from normlab.lab.runs.examples import read_examples
from normlab.lab.tasks.language_model import LanguageModel
from normlab.lab.tasks.task import Evaluation, Task
from normlab.lab.training.timing import measure
from normlab.lab.training.train import train
from normlab.lab.training.trainer import Trainer, load_task
from normlab.lab.training.translate import translate


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    return write_plain(tmp_path_factory.mktemp("plain"))


def files(folder):
    """Contents that must not depend on where a run was interrupted."""
    names = ("last/model.safetensors", "last/optimizer.safetensors", "best/model.safetensors", "scores.json")
    return {name: (folder.path / name).read_bytes() for name in names}


@pytest.mark.slow
def test_it_learns_and_leaves_a_whole_folder(plain, tmp_path):
    rows = []
    folder = train(tiny_language_model(plain, steps=60, validate_every_steps=20), tmp_path, rows.append)
    assert rows == folder.metrics()
    learning = [row for row in rows if row["kind"] == "train"]
    dev = [row for row in rows if row["kind"] == "dev"]
    assert learning[-1]["nll"] < learning[0]["nll"] - 1.5
    assert [row["step"] for row in dev] == [20, 40, 60]
    assert dev[2]["nll"] < dev[0]["nll"]
    assert all(row["perplexity"] == pytest.approx(math.exp(row["nll"])) for row in dev)
    assert "bleu" not in dev[0]
    status = folder.status()
    best = min(dev, key=lambda row: row["nll"])
    assert (status.best_step, status.best_dev["nll"]) == (best["step"], best["nll"])
    assert list(status.best_dev) == ["nll", "perplexity", "word_perplexity", "bits_per_byte"]
    assert (status.state, status.outcome.state) == ("done", "trained")
    scores = json.loads(folder.scores.read_text())
    assert scores["perplexity"] == pytest.approx(dev[-1]["perplexity"], rel=0.3)
    assert len(folder.outputs.read_text("utf-8").splitlines()) == 6
    examples = read_examples(folder.examples)
    for metric, rows in examples.items():
        assert float(LanguageModel.combine(metric, rows.sum(axis=0))) == pytest.approx(
            scores[metric], rel=1e-6
        )
    assert folder.tokenizer.exists()


@pytest.mark.slow
@pytest.mark.parametrize(("step", "recipe", "precision"), [(5, "admin+warmup", "fp32"), (8, "pre", "bf16")])
def test_an_interrupted_run_goes_on_as_if_nothing_had_been(
    plain, tmp_path, monkeypatch, step, recipe, precision
):
    data = replace(plain, word_dropout=0.1)
    config = tiny_language_model(data, recipe, grad_accum_steps=2, precision=precision, max_tokens=100)
    whole = train(config, tmp_path / "whole")
    interrupt_at(monkeypatch, step)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "parts")
    parts = RunFolder(tmp_path / "parts" / whole.path.name)
    assert (parts.status().state, parts.status().step) == ("interrupted", step)
    train(config, tmp_path / "parts")
    assert without_seconds(parts) == without_seconds(whole)
    assert files(parts) == files(whole)


def test_blocks_and_text_change_the_id_and_paths_do_not(plain, tmp_path):
    data, _ = LanguageModel.prepare(plain, tmp_path)
    config = tiny_language_model(data)
    moved = replace(config, data=replace(data, train_text="elsewhere.xz"))
    longer = replace(config, data=replace(data, block_len=48))
    assert run_id(moved) == run_id(config) != run_id(longer)


@pytest.mark.slow
def test_the_built_in_corpus_serves_where_no_text_is_given(plain, tmp_path):
    data = replace(plain, train_text="", dev_text="", test_text="", builtin="dates-de-en", builtin_pairs=50)
    folder = train(tiny_language_model(data, steps=4), tmp_path)
    assert folder.status().state == "done"


@pytest.mark.slow
def test_the_worker_trains_it(plain, tmp_path):
    data, _ = LanguageModel.prepare(plain, tmp_path / "data")
    good = tiny_language_model(data, steps=4)
    refused = replace(good, model=replace(good.model, encoder_layers=1))
    lines = "".join(to_json(config) + "\n" for config in (good, refused))
    command = [sys.executable, "-m", "normlab.lab.training.worker", str(tmp_path)]
    ended = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    first, second = ended.stdout.splitlines()
    assert first == "done"
    assert second.startswith("encoder_layers is 1")
    assert RunFolder(tmp_path / run_id(good)).status().state == "done"


def test_its_time_is_measured(plain, tmp_path):
    data, corpus = LanguageModel.prepare(plain, tmp_path)
    seconds = measure(tiny_language_model(data), corpus, steps=1)
    assert seconds.step > 0
    assert seconds.run > 12 * seconds.step + 2 * seconds.validation


@pytest.mark.slow
def test_what_needs_translations_refuses_it(plain, tmp_path):
    folder = train(tiny_language_model(plain, steps=2), tmp_path / "runs")
    with pytest.raises(ValueError, match=r"\blanguage_model, .*run sample"):
        translate(folder.path, ["one"])


def test_a_run_is_refused_before_there_is_a_folder(plain, tmp_path):
    config = tiny_language_model(plain, best_by="bits_per")
    with pytest.raises(UserError, match=r"best_by .*'bits_per'.*'bits_per_byte'"):
        train(config, tmp_path)
    with pytest.raises(ValueError, match="unknown task"):
        train(replace(config, task="language"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_task_from_outside_is_trained(text, tmp_path, monkeypatch):
    """The trainer knows no task by name: one that is registered here has scores of its own."""
    monkeypatch.setattr(Task, "registry", type(Task.registry)("task"))
    from normlab.lab.tasks.translation import Translation

    class Silent(Translation, name="silent"):
        metrics = (NLL,)

        def dev_scores(self, model):
            return {"nll": self.dev_nlls(model)[0]}

        def test(self, model):
            return Evaluation({"nll": self.dev_nlls(model)[0]})

    for module in ("train", "trainer", "log"):
        monkeypatch.setattr(f"normlab.lab.training.{module}.TASKS", {"silent": Silent})
    config = replace(tiny(text, steps=4, best_by="nll"), task="silent")
    folder = train(config, tmp_path)
    assert list(folder.status().best_dev) == ["nll"]
    assert list(json.loads(folder.scores.read_text())) == ["nll"]


def test_unit_weights_have_length_1_after_every_step(plain, tmp_path):
    trainer = Trainer(load_task(tiny_language_model(plain, "like:ngpt", steps=3), tmp_path))
    first = trainer.model.embedding.weight.detach().clone()
    for _ in range(2):
        trainer.step()
    model = trainer.model
    assert not torch.equal(model.embedding.weight, first)
    lengths = [table.norm(dim=1) for table in model.embedding.tables().values()]
    for sublayer in model.decoder:
        reads = sublayer.f.matrices()
        writes = [reads.pop(name) for name in ("output", "ffn_out") if name in reads]
        lengths += [w.norm(dim=1) for w in reads.values()] + [w.norm(dim=0) for w in writes]
    assert len(lengths) == 2 + 2 * (4 + 3)
    torch.testing.assert_close(torch.cat(lengths), torch.ones(sum(map(len, lengths))))
