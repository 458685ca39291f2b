from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab.training.tiny import tiny
from normlab.errors import UserError
from normlab.lab.config import DataConfig
from normlab.lab.data.parallel import prepare
from normlab.lab.tasks import translation
from normlab.lab.tasks.translation import Translation
from normlab.lab.training import timing as module
from normlab.lab.training.probing import Probing
from normlab.lab.training.run import Run
from normlab.lab.training.timing import Seconds, measure, measure_side_by_side


def ended(corpus, config) -> float:
    """The length of a reference over the largest length of an output."""
    source, target = (sum(map(len, side)) / len(side) for side in (corpus.dev.source, corpus.dev.target))
    return target / (config.decode.max_len_ratio * source + 10)


class Ticks:
    """A clock that moves by what is done: a reading, a step, a probed step."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        clock = type("Clock", (), {"perf_counter": self.read, "time": self.read})
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(translation, "time", clock)
        step, probing = Run.step, Probing.passing

        def slow_step(run):
            self.now += 10
            step(run)

        @contextmanager
        def slow_probing(probes, number, micro):
            self.now += 200 * probes.due(number)
            with probing(probes, number, micro):
                yield

        monkeypatch.setattr(Run, "step", slow_step)
        monkeypatch.setattr(Probing, "passing", slow_probing)

    def read(self):
        self.now += 1
        return self.now


def test_a_run_is_all_that_it_does(text, tmp_path, monkeypatch):
    data, corpus = prepare(text, tmp_path / "data")
    config = tiny(data, steps=1001, validate_every_steps=500)
    Ticks(monkeypatch)
    machine = replace(config.machine, probes="cheap", probe_every_steps=50, checkpoint_every_steps=400)
    seconds = measure(replace(config, machine=machine), corpus, steps=3)
    assert seconds.step == 11.0
    search = ended(corpus, config)
    assert 0.2 < search < 0.8
    assert seconds.validation == pytest.approx(1.0 + search), "a likelihood, and a search of ten sentences"
    steps = 1001 * (11 + 200 / 50 + 1 / machine.log_every_steps)
    validations, checkpoints, test = 3 * (1 + search + 1), 3, 30 * 2 * 0.1 * search
    assert seconds.run == pytest.approx(1 + steps + validations + checkpoints + test)


def test_all_processes_measure_at_the_same_time_and_the_recipes_go_round(monkeypatch):
    asked, configs = [], [tiny(DataConfig(), recipe) for recipe in ("pre", "post", "admin")]
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    taken = {"pre": 1.0, "post": 3.0, "admin": 5.0}

    def measured(config, root, setups):
        asked.append(config.recipe)
        return Seconds(taken[config.recipe], 0.0, 0.0, 2.0)

    monkeypatch.setattr(module, "_in_process", measured)
    assert measure_side_by_side(configs, Path("runs"), 8) == Seconds(2.5, 0.0, 0.0, 2.0)
    assert sorted(asked) == ["admin", "post", "pre", "pre"], "two at a time, and two rounds of them"


@pytest.mark.slow
def test_a_process_of_its_own_measures_and_refuses_as_a_run_does(text, tmp_path):
    data, _ = prepare(text, tmp_path / "data")
    config = tiny(data, steps=10)
    seconds = measure_side_by_side([config], tmp_path, 1)
    assert seconds.run > 10 * seconds.step > 0
    assert 0 < seconds.start < 60
    with pytest.raises(UserError, match="device 'xpu'"):
        measure_side_by_side([replace(config, machine=replace(config.machine, device="xpu"))], tmp_path, 1)


def test_a_long_search_is_timed_in_part_and_scaled(text, tmp_path, monkeypatch):
    data, corpus = prepare(text, tmp_path / "data")
    config = tiny(data, dev_decode_sentences=1000)
    searched = []
    monkeypatch.setattr(translation, "_SEARCHED_SENTENCES", 6)
    monkeypatch.setattr(Translation, "dev_outputs", lambda self, _, count: searched.append(count))
    Ticks(monkeypatch)
    seconds = measure(config, corpus, steps=1)
    assert searched == [6]
    assert seconds.validation == pytest.approx(1.0 + 30 / 6 * ended(corpus, config)), "there are 30 dev pairs"


def test_the_first_two_steps_are_not_counted(text, tmp_path, monkeypatch):
    data, corpus = prepare(text, tmp_path / "data")
    clock = Ticks(monkeypatch)
    step = Run.step
    warm_up = iter([1000, 1000])

    def step_that_warms_up(run):
        clock.now += next(warm_up, 0)
        step(run)

    monkeypatch.setattr(Run, "step", step_that_warms_up)
    monkeypatch.setattr(Translation, "rehearse", lambda self, model: (0.0, 0.0))
    assert measure(tiny(data), corpus, steps=1).step == 11.0
    assert next(warm_up, None) is None, "both were timed"


def test_real_steps_on_the_first_batches_are_timed(text, tmp_path, monkeypatch):
    data, corpus = prepare(text, tmp_path / "data")
    config = tiny(data, grad_accum_steps=2)
    asked = []
    whole = Translation.batch
    monkeypatch.setattr(Translation, "batch", lambda self, i: asked.append(i) or whole(self, i))
    seconds = measure(config, corpus, steps=4)
    assert asked == list(range(2 * (4 + 3)))
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
    with pytest.raises(ValueError, match="device cuda"):
        measure(replace(config, machine=replace(config.machine, device="cuda")), corpus)
