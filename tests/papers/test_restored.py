"""Measures of trained models: their plain form, their loss on the training text, Theorem 2's constant."""

import math
from dataclasses import replace

import pytest
import torch

from normlab.lab.config import DataConfig
from normlab.lab.recipes.grammar import resolve
from normlab.lab.setups import setup_from_run
from normlab.lab.tasks.translation import Translation
from normlab.lab.training.train import train
from normlab.papers.bases import LAPTOP
from normlab.papers.measures import ConstantRatio, FoldDifference, TrainPerplexityRatio
from normlab.papers.studies.trained import Trained
from normlab.papers.studies.trained_models import TRAINING_BATCHES

BASE = replace(
    LAPTOP,
    data=DataConfig(builtin="dates-de-en", builtin_pairs=300, vocab_size=200),
    model=replace(LAPTOP.model, dim=16, ffn_dim=16, heads=2, encoder_layers=2, decoder_layers=2),
    train=replace(LAPTOP.train, steps=4, max_tokens=256, validate_every_steps=4, dev_decode_sentences=4),
    machine=replace(LAPTOP.machine, threads=1),
)


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    data, _ = Translation.prepare(BASE.data, root / "data")
    cells = {
        name: [train(resolve("admin", replace(BASE, data=data, optim=replace(BASE.optim, lr=lr))), root)]
        for name, lr in (("still", 1e-12), ("moved", 1e-2))
    }
    return Trained(cells)


@pytest.mark.slow
def test_a_plain_form_has_the_same_logits(some):
    found = FoldDifference("moved").measure(some)
    assert 0 < found.value < 1e-5


def training_loss(folder):
    setup = setup_from_run(folder, "best", tokens=256).setup
    task, model = setup.batches.task, setup.model.eval()
    batches = [task.batch(i) for i in range(TRAINING_BATCHES)]
    with torch.no_grad():
        return sum(float(task.loss(model, b).loss) for b in batches) / sum(int(b.tokens) for b in batches)


@pytest.mark.slow
def test_the_perplexity_of_the_training_text_is_that_of_its_first_batches(some):
    (still,), (moved,) = some.cells.values()
    expected = math.exp(training_loss(moved) - training_loss(still))
    assert TrainPerplexityRatio("moved", "still").measure(some).value == pytest.approx(expected)
    assert expected < 0.99


@pytest.mark.slow
def test_the_constant_of_weights_that_did_not_move_is_that_of_initialisation(some):
    assert ConstantRatio("still").measure(some).value == pytest.approx(1.0, abs=1e-4)
    assert ConstantRatio("moved").measure(some).value != pytest.approx(1.0, abs=1e-3)
