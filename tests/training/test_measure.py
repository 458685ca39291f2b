from dataclasses import replace

import pytest
import torch

from normlab.data.parallel import prepare
from normlab.tasks import translation
from normlab.tasks.translation import Translation
from normlab.training import trainer as module
from normlab.training.trainer import measure
from training.tiny import tiny


def test_a_run_is_its_steps_and_validations(text, tmp_path, monkeypatch):
    data, corpus = prepare(text, tmp_path / "data")
    config = tiny(data, steps=1001, validate_every_steps=500)
    clock = iter(range(1000))
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(clock)))
    seconds = measure(config, corpus, steps=3)
    assert seconds.step == 1.0
    assert seconds.validation == 1.0 + 1.0, "a likelihood and a greedy search of the ten sentences"
    assert seconds.run == pytest.approx(1001 + 3 * 2.0 + 30 * 2 * 0.1), (
        "three validations, 30 sentences, 2 beams"
    )


def test_a_long_search_is_timed_in_part_and_scaled(text, tmp_path, monkeypatch):
    data, corpus = prepare(text, tmp_path / "data")
    config = tiny(data, dev_decode_sentences=1000)
    searched = []
    monkeypatch.setattr(translation, "_SEARCHED_SENTENCES", 6)
    monkeypatch.setattr(Translation, "dev_outputs", lambda self, _, count: searched.append(count))
    clock = iter(range(1000))
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(clock)))
    seconds = measure(config, corpus, steps=1)
    assert searched == [6]
    assert seconds.validation == pytest.approx(1.0 + 30 / 6), "there are 30 dev pairs"


def test_real_steps_are_timed_and_the_first_two_are_not_counted(text, tmp_path, monkeypatch):
    data, corpus = prepare(text, tmp_path / "data")
    config = tiny(data, grad_accum_steps=2)
    asked = []
    whole = Translation.batch
    monkeypatch.setattr(Translation, "batch", lambda self, i: asked.append(i) or whole(self, i))
    seconds = measure(config, corpus, steps=4)
    assert asked == list(range(2 * (4 + 2)))
    assert 0 < seconds.step < 5
    assert 0 < seconds.validation < 5
    assert seconds.run > config.train.steps * seconds.step


def test_it_leaves_nothing_behind(text, tmp_path):
    data, corpus = prepare(text, tmp_path / "data")
    before = sorted(tmp_path.rglob("*"))
    config = tiny(data, "admin", precision="bf16")
    measure(replace(config, model=replace(config.model, dropout=0.0)), corpus, steps=1)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_device_that_is_not_there_is_told(text, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    data, corpus = prepare(text, tmp_path / "data")
    config = tiny(data)
    with pytest.raises(ValueError, match="the device cuda was asked for, and torch sees none"):
        measure(replace(config, machine=replace(config.machine, device="cuda")), corpus)
