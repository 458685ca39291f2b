import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from lab.training.tiny import tiny
from normlab.errors import UserError
from normlab.lab.config import DecodeConfig
from normlab.lab.data.text import read_lines
from normlab.lab.runs import RunFolder
from normlab.lab.runs.folder import read_json
from normlab.lab.tasks.scores import score
from normlab.lab.training import translate as module
from normlab.lab.training.train import train
from normlab.lab.training.translate import n_best, translate


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """A model that has learnt a little, under the mask and in bf16."""
    data = replace(text, target_vocab_mask=True)
    return train(
        tiny(data, steps=60, validate_every_steps=60, precision="bf16"), tmp_path_factory.mktemp("runs")
    )


@pytest.fixture(scope="module")
def test_text(text):
    return read_lines(text.test_src), read_lines(text.test_tgt)


@pytest.mark.slow
def test_a_run_folder_gives_the_translations_that_were_scored(run, test_text):
    source, references = test_text
    translations = translate(run.path, source)
    assert translations == run.outputs.read_text(encoding="utf-8").split("\n")[:-1]
    assert len(set(translations)) > 3, "it has learnt to tell sentences apart"
    scores = read_json(run.scores)
    expected = score(translations, references)
    assert (scores["bleu"], scores["chrf"]) == (expected.bleu, expected.chrf)
    assert scores["perplexity"] == pytest.approx(math.exp(scores["nll"]))
    assert 1 < scores["perplexity"] != scores["perplexity_smoothed"]


@pytest.mark.slow
def test_threads_are_those_of_the_run_unless_others_are_asked_for(run, monkeypatch):
    asked = []

    def prepared(machine):
        asked.append(machine.threads)
        return torch.device("cpu")

    monkeypatch.setattr(module, "prepare_process", prepared)
    translate(run.path, ["x"])
    translate(run.path, ["x"], threads=3)
    n_best(run.path, ["x"], 1, threads=2)
    translate(run.path, ["x"], threads=0)
    assert asked == [1, 3, 2, 0]


@pytest.mark.slow
def test_order_and_empty_lines_stay(run, test_text):
    source = test_text[0][:6]
    once = translate(run.path, source)
    assert translate(run.path, [source[3], "", *reversed(source), " \t "]) == [
        once[3],
        "",
        *reversed(once),
        "",
    ]
    assert translate(run.path, []) == []


@pytest.mark.slow
def test_another_search_can_be_asked_for(run, test_text):
    source = test_text[0]
    greedy = translate(run.path, source, DecodeConfig(beam=1))
    wide = translate(run.path, source, DecodeConfig(beam=8))
    assert greedy != wide
    short = translate(run.path, source, DecodeConfig(beam=8, length_penalty=0.0))
    assert sum(map(len, short)) < sum(map(len, translate(run.path, source, DecodeConfig(8, 3.0))))


def test_the_n_best_and_draws_of_a_run(run, test_text):
    source = test_text[0][:8]
    found = n_best(run.path, source, 2)
    assert [candidates[0].text for candidates in found] == translate(run.path, source)
    assert all(a.score >= b.score and a.text != b.text for a, b in found)
    begun = n_best(run.path, source, 3, DecodeConfig(sample=True, top_k=3), prefixes=["one"] * 8)
    assert [[c.text for c in row[:1]] for row in begun] == [
        [text]
        for text in translate(run.path, source, DecodeConfig(sample=True, top_k=3), prefixes=["one"] * 8)
    ]
    assert all(c.text.startswith("one") for row in begun for c in row)


def test_it_needs_nothing_but_the_run_folder(run, text, tmp_path, test_text):
    """The corpus, the other runs and the place where it was trained may be gone."""
    copy = tmp_path / "elsewhere"
    shutil.copytree(run.path, copy)
    shutil.rmtree(copy / "last")
    assert translate(copy, test_text[0][:3]) == translate(run.path, test_text[0][:3])


def test_the_mask_comes_from_the_run_folder(run, tmp_path, test_text):
    copy = RunFolder(tmp_path / "masked")
    shutil.copytree(run.path, copy.path)
    types = np.load(copy.target_vocab, allow_pickle=False)
    assert types.dtype == bool
    assert 3 < types.sum() < len(types), "English types are ruled out"
    only_end = np.zeros_like(types)
    only_end[3] = True
    np.save(copy.target_vocab, only_end)
    assert translate(copy.path, test_text[0][:3]) == ["", "", ""]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path, types: np.save(path, np.zeros_like(types)), "every entry"),
        (lambda path, types: path.unlink(), "is missing"),
    ],
)
def test_a_mask_that_no_output_can_have_is_refused(run, tmp_path, spoil, why):
    copy = RunFolder(tmp_path / "masked")
    shutil.copytree(run.path, copy.path)
    spoil(copy.target_vocab, np.load(copy.target_vocab, allow_pickle=False))
    with pytest.raises(UserError, match=rf"target_vocab\.npy .*{why}"):
        translate(copy.path, ["x"])


def test_other_names_of_weights_are_refused(run):
    with pytest.raises(UserError, match=r"'bset', .*'best'.*average"):
        translate(run.path, ["x"], weights="bset")


def test_text_that_utf8_cannot_hold_is_refused(run):
    with pytest.raises(UserError, match=r"lines\[1\] .*'\\ud800'"):
        translate(run.path, ["x", "\ud800"])
    with pytest.raises(UserError, match=r"prefixes\[0\] .* UTF-8"):
        translate(run.path, ["x"], prefixes=["\udce4"])


def test_the_least_temperature_draws_the_likeliest_output(run, test_text):
    drawn = translate(run.path, test_text[0][:6], DecodeConfig(sample=True, temperature=1e-100))
    assert all(drawn)
    assert drawn == translate(run.path, test_text[0][:6], DecodeConfig(sample=True, top_k=1))


def test_a_run_without_weights_is_told(run, tmp_path):
    folder = RunFolder.create(tmp_path / "new", run.config())
    folder.tokenizer.write_bytes(run.tokenizer.read_bytes())
    with pytest.raises(FileNotFoundError, match=r"\bnew .*'best' .*--config .*new/config\.json"):
        translate(folder.path, ["one"])
    with pytest.raises(FileNotFoundError, match=r"nowhere/config\.json"):
        translate(tmp_path / "nowhere", ["one"])
