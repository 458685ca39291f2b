"""Models that read their source and models that cannot, from the training to the run's page."""

import re
from dataclasses import replace

import pytest
import torch

from lab.training.tiny import NAMES, tiny
from normlab.lab.config import DataConfig
from normlab.lab.tasks.translation import Translation
from normlab.lab.training.train import train
from normlab.report.run import run_page

NUMBERS = dict(
    zip(
        ("eins", "zwei", "drei", "vier", "acht", "zehn", "elf", "null"),
        ("one", "two", "three", "four", "eight", "ten", "eleven", "zero"),
        strict=True,
    )
)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """One word a source; three quarters of its translation follow without it."""
    folder = tmp_path_factory.mktemp("numbers")
    paths = {name: folder / name for name in NAMES}
    for name, path in paths.items():
        lines = NUMBERS if name.endswith("src") else [f"the number {word}" for word in NUMBERS.values()]
        path.write_text("".join(f"{line}\n" for line in lines) * (25 if "train" in name else 2))
    return DataConfig(**{name: str(path) for name, path in paths.items()}, vocab_size=80)


def trained(text, root):
    config = tiny(text, steps=120, max_tokens=256, validate_every_steps=40, dev_decode_sentences=16)
    return train(replace(config, optim=replace(config.optim, lr=1e-2)), root)


@pytest.mark.slow
def test_a_model_that_reads_its_source_is_trained(numbers, tmp_path):
    folder = trained(numbers, tmp_path)
    status = folder.status()
    assert status.outcome.state == "trained"
    assert "exchanged" in status.outcome.evidence
    assert status.best_dev["nll_exchanged"] > status.best_dev["nll"] + 0.5
    assert status.best_dev["repeated_share"] == 0
    assert "trained: BLEU" in run_page(folder.path)


@pytest.mark.slow
def test_a_model_without_its_source_ignores_it_and_is_not_stopped(numbers, tmp_path, monkeypatch):
    whole = Translation.build

    def cut(self):
        model = whole(self)
        model.encoder.register_forward_hook(lambda module, given, memory: torch.zeros_like(memory))
        return model

    monkeypatch.setattr(Translation, "build", cut)
    folder = trained(numbers, tmp_path)
    status = folder.status()
    assert (status.outcome.state, status.step) == ("ignores its source", 120)
    assert re.findall(r"[+-]?[\d.]+%?", status.outcome.evidence)[-2:] == ["+0.00", "100%"]
    best = next(row for row in folder.metrics() if row["kind"] == "dev" and row["step"] == status.best_step)
    assert best["nll_exchanged"] == pytest.approx(best["nll"], abs=1e-5)
    assert best["repeated_share"] == 1
    page = run_page(folder.path)
    assert f"{status.outcome.state}: " in page
    assert "sources exchanged" in page
