"""A task of the user's own, with a corpus, a model and metrics of its own, from a module outside the package,
at the prompt: it is trained, listed, compared, reported, diagnosed and resumed without a line in ``src``.
"""

from __future__ import annotations

import html
import re
import shlex

import pytest

from cli.typed import normlab
from normlab.base.io import from_json
from normlab.base.metric import IGNORES_SOURCE
from normlab.lab.comparison.result import Comparison
from normlab.lab.runs import Runs

MODULE = r'''
"""Does a row of number words hold an even number? Accuracy and F1 of an encoder's answer."""

import json
import math
import os
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from normlab.cli.presets import CONFIGS
from normlab.lab.data.tokenizer import Tokenizer
from normlab.nn import Context, ENCODER_LAYER, PAD, TokenModel, build_stack
from normlab.lab.config import Config, DataConfig, MachineConfig, ModelConfig, OptimConfig, TrainConfig
from normlab.base.metric import NLL, Metric
from normlab.base.model_config import derive
from normlab.lab.tasks.task import build_model
from normlab.lab.tasks.task import LossSum
from normlab.lab.tasks.task import Evaluation, Task

ODD, EVEN = ["one", "three", "five", "seven"], ["two", "four", "six", "eight"]
WORDS = ODD + EVEN


def rows(split, count):
    random = np.random.default_rng([7, len(split)])
    found = []
    for _ in range(count):
        words = list(random.choice(ODD, 5))
        if label := int(random.random() < 0.5):
            words[random.integers(5)] = str(random.choice(EVEN))
        found.append((" ".join(words), label))
    return found


class Words(Tokenizer):
    kind = "words"
    vocab_size = len(WORDS) + 1

    def encode(self, lines):
        return [[WORDS.index(word) + 1 for word in line.split()] for line in lines]

    def decode(self, ids):
        return [" ".join(WORDS[i - 1] for i in row) for row in ids]

    def to_json(self):
        return json.dumps(WORDS)


@dataclass(frozen=True)
class Corpus:
    tokenizer: object
    train: tuple
    dev: tuple
    test: tuple
    target_vocab: object
    unigram_entropy_nats: float = math.log(2)

    @property
    def facts(self):
        return {"Corpus": f"{len(self.train):,} rows of number words"}


@dataclass(frozen=True)
class Rows:
    ids: torch.Tensor
    labels: torch.Tensor
    tokens: int

    @property
    def padded_tokens(self):
        return self.ids.numel()


class Classifier(TokenModel):
    def __init__(self, size, vocab_size):
        super().__init__(size, vocab_size)
        self.encoder = build_stack("encoder", ENCODER_LAYER, size)
        self.head = nn.Linear(size.dim, 2)

    def forward(self, ids):
        hidden = self.encoder(self.embed(ids), Context(padding_mask=ids != PAD))
        return self.head(hidden.mean(1))


class Parity(Task, name="parity"):
    """Whether a row of numbers has an even one."""

    texts = ()
    stacks = ("encoder",)
    metrics = (
        Metric("accuracy", "accuracy", digits=3, least=0.0, most=1.0),
        Metric("f1", "F1", digits=3, least=0.0, most=1.0),
        replace(NLL, unit="nats per row"),
    )

    @staticmethod
    def prepare(config, root):
        splits = [tuple(rows(split, n)) for split, n in (("train", 600), ("dev.", 80), ("test..", 100))]
        return replace(config, digest="parity-7"), Corpus(Words(), *splits, np.ones(len(WORDS) + 1, bool))

    def build(self):
        return build_model(
            Classifier, self.config.model, self.corpus.tokenizer.vocab_size, self.config.seeds.init
        ).to(self.device)

    def batch(self, index):
        if str(index) == os.environ.get("PARITY_STOPS_AT"):
            raise KeyboardInterrupt
        random = np.random.default_rng(derive(self.config.seeds.data, "rows", index))
        return self._rows([self.corpus.train[i] for i in random.integers(len(self.corpus.train), size=32)])

    def _rows(self, pairs):
        ids = [torch.tensor(row) for row in self.corpus.tokenizer.encode([text for text, _ in pairs])]
        padded = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PAD)
        labels = torch.tensor([label for _, label in pairs])
        return Rows(padded.to(self.device), labels.to(self.device), len(pairs))

    def loss(self, model, batch):
        loss = F.cross_entropy(model(batch.ids), batch.labels, reduction="sum")
        return LossSum(loss, loss.detach())

    @torch.inference_mode()
    def _answers(self, model, pairs):
        was_training = model.training
        model.eval()
        batch = self._rows(pairs)
        log_p = model(batch.ids).log_softmax(-1)
        model.train(was_training)
        said, right = log_p.argmax(-1).numpy(), batch.labels.numpy()
        ones = np.ones(len(right))
        counts = [said & right, said & (1 - right), (1 - said) & right]
        nll = -log_p.gather(1, batch.labels[:, None])[:, 0].double().numpy()
        return said, {
            "accuracy": np.stack([said == right, ones], 1).astype(float),
            "f1": np.stack(counts, 1).astype(float),
            "nll": np.stack([nll, ones], 1),
        }

    @classmethod
    def combine(cls, metric, sums):
        if metric == "f1":
            hits, false, missed = (sums[..., i] for i in range(3))
            return 2 * hits / np.maximum(2 * hits + false + missed, 1)
        return super().combine(metric, sums)

    def _scores(self, examples):
        return {name: float(self.combine(name, rows.sum(0))) for name, rows in examples.items()}

    def dev_scores(self, model):
        return self._scores(self._answers(model, self.corpus.dev)[1])

    def test(self, model):
        said, examples = self._answers(model, self.corpus.test)
        return Evaluation(self._scores(examples), [("odd", "even")[i] for i in said], examples)

    @classmethod
    def test_examples(cls, config, corpus):
        return [(text, ("odd", "even")[label]) for text, label in corpus.test]

    def rehearse(self, model):
        return 0.1, 0.1


@CONFIGS.register()
def parity():
    sizes = {"dim": 32, "ffn_dim": 64, "heads": 2, "encoder_layers": 2, "decoder_layers": 0}
    return Config(
        recipe="pre",
        task="parity",
        model=ModelConfig(**sizes, encoder_placement="pre", decoder_placement="pre", dropout=0.0),
        optim=OptimConfig(lr=3e-3, schedule="constant", label_smoothing=0.0),
        train=TrainConfig(steps=60, validate_every_steps=20),
        machine=MachineConfig(threads=1, checkpoint_every_steps=10),
    )


'''
OWN = ["--import", "own.parity"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.delenv("NORMLAB_IMPORT", raising=False)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "parity.py").write_text(MODULE)
    return tmp_path


def rows(folder):
    """Metrics without what the clock says."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in folder.metrics()]


@pytest.mark.slow
def test_a_task_of_ones_own_is_trained_resumed_listed_reported_and_diagnosed(here, monkeypatch):
    train = ["train", "--config", "parity", *OWN]
    trained = normlab(*train, cwd=here)
    assert trained.returncode == 0, trained.stderr
    assert "test accuracy " in trained.stdout
    assert ", F1 " in trained.stdout
    (folder,) = Runs(here / "runs")
    assert folder.config().own_code, "the task's file enters the run id"
    assert [metric.name for metric in folder.task_metrics()] == ["accuracy", "f1", "nll"]
    assert set(folder.status().best_dev) == {"accuracy", "f1", "nll"}
    assert len(folder.outputs.read_text().splitlines()) == 100

    monkeypatch.setenv("PARITY_STOPS_AT", "34")
    stopped = normlab(*train, "--out", "resumed", cwd=here)
    assert stopped.returncode == 130, stopped.stderr
    (again,) = Runs(here / "resumed")
    assert again.status().state == "interrupted"
    monkeypatch.delenv("PARITY_STOPS_AT")
    assert normlab(*train, "--out", "resumed", cwd=here).returncode == 0
    assert again.scores.read_bytes() == folder.scores.read_bytes()
    assert rows(again) == rows(folder)

    run = folder.path.name
    listed = normlab("run", "list", cwd=here).stdout
    assert run in listed
    assert "accuracy" in listed
    assert normlab("run", "report", run, cwd=here).returncode == 0, "showing a run needs no code of its own"
    page = (folder.path / "run.html").read_text()
    assert "Dev accuracy" in page
    assert "per row" in page
    diagnosed = normlab("diagnose", run, *OWN, cwd=here)
    assert diagnosed.returncode in (0, 3), diagnosed.stderr
    assert re.search(r"\b2 layers .*\b32\b", diagnosed.stdout)

    unknown = normlab("train", "--config", f"runs/{run}/config.json", "--out", "again", cwd=here)
    assert unknown.returncode == 2
    assert "'parity'" in unknown.stderr


@pytest.mark.slow
def test_a_task_of_ones_own_is_compared_in_worker_processes(here):
    asked = ["--recipes", "pre", "post+warmup", "--lrs", "3e-3", "--seeds", "2", "--warmup-steps", "10"]
    command = ["compare", "--config", "parity", *asked, "--jobs", "2", "--exchanges", "200", *OWN]
    done = normlab(*command, cwd=here)
    assert done.returncode == 0, done.stderr
    assert "cannot tell" in done.stdout
    text = (here / "runs" / "comparison.json").read_text()
    comparison = from_json(Comparison, text)
    assert (comparison.failed, comparison.open_recipes) == ((), ())
    assert comparison.headline.name == comparison.best_by == "accuracy"
    assert len(comparison.differences) == 1
    assert {metric.name for metric in comparison.tested} == {"accuracy", "f1", "nll"}
    for recipe in comparison.recipes:
        assert set(recipe.means) == set(recipe.scores) == {"accuracy", "f1", "nll"}
        mean = recipe.means["f1"]
        assert 0 <= mean.low <= mean.value <= mean.high <= 1, "one score at every seed has no width"
        half = 0.0005  # half of the last digit shown: a perfect score counts as this far below 1
        assert min(recipe.scores["f1"]) - half <= mean.value <= max(recipe.scores["f1"]) + half
        assert IGNORES_SOURCE not in recipe.outcomes, "one answer for most rows is no failure here"
    assert {sample.reference for sample in comparison.samples} <= {"odd", "even"}
    page = (here / "runs" / "comparison.html").read_text()
    assert '<section id="differences">' in page
    assert "Test accuracy" in page
    assert normlab("run", "report", cwd=here).returncode == 0

    run = comparison.recipes[0].runs[0]
    (line,) = {line for line in shown(page) if run in line}
    typed = shlex.split(line)
    assert typed[0] == "normlab"
    repeated = normlab(*typed[1:], cwd=here)
    assert repeated.returncode == 0, repeated.stderr
    (again,) = Runs(here / "again")
    assert again.path.name == run
    assert rows(again) == rows(next(f for f in Runs(here / "runs") if f.path.name == run))


def shown(page):
    """The commands that a page shows for its runs, as its reader sees them."""
    return {html.unescape(c) for c in re.findall(r">(normlab train --config [^<]*)<", page)}


@pytest.mark.slow
def test_the_configuration_of_a_task_needs_its_module(here):
    refused = normlab("train", "--config", "parity", cwd=here)
    assert refused.returncode == 2
    assert "'parity'" in refused.stderr
    assert not (here / "runs").exists()


@pytest.mark.slow
def test_other_metrics_than_the_tasks_cannot_decide(here):
    module = here / "own" / "parity.py"
    module.write_text(
        MODULE.replace("validate_every_steps=20)", 'validate_every_steps=20, best_by="accuracyy")')
    )
    refused = normlab("train", "--config", "parity", *OWN, cwd=here)
    assert refused.returncode == 2
    assert "mean 'accuracy'" in refused.stderr
