"""How much of a text stands in another is counted by sentence, part by part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from normlab.lab.config import DataConfig
from normlab.lab.data.parallel import prepare
from normlab.lab.data.plain import prepare_text
from normlab.lab.data.text import Overlap, describe_shares


def test_sentences_are_counted_as_often_as_they_are_wanted_and_empty_ones_are_not():
    overlap = Overlap(["a  b", "a b", "c", "", "  ", "d"], [])
    parts = [["x", ""], [" a b "], ["a b", "", "y"], ["c", "d"]]
    for part, share in zip(parts, (0, 0.5, 0.5, 1), strict=True):
        overlap.see(part)
        assert overlap.shares() == {"dev in training": share, "test in training": 0, "test in dev": 0}


def test_shares_have_names():
    overlap = Overlap(["a", "c"], ["a", "b", "c", "d"])
    overlap.see(["b"])
    assert overlap.shares() == {"dev in training": 0, "test in training": 0.25, "test in dev": 0.5}
    assert describe_shares({"test in dev": 0.5, "x": 0.25}) == "50.0% of test in dev, 25.0% of x"


@pytest.fixture
def texts(tmp_path):
    def written(name, lines):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), "utf-8")
        return str(tmp_path / name)

    train = [f"satz {i} {'ab' * (i % 7)}" for i in range(300)]
    return {
        "train": written("train", train),
        "dev": written("dev", [*train[:5], *(f"neu {i}" for i in range(15))]),
        "test": written("test", [train[0], "neu 3", "x", "y"]),
    }


def test_a_prepared_corpus_says_what_its_texts_share(texts, tmp_path):
    named = {f"{name}_{side}": path for name, path in texts.items() for side in ("src", "tgt")}
    _, corpus = prepare(DataConfig(**named, vocab_size=100), tmp_path / "data")
    assert corpus.overlap == {"dev in training": 0.25, "test in training": 0.25, "test in dev": 0.5}
    assert corpus.facts["Same source sentences"].startswith("25.0% of dev in training")
    same = {"test_src": texts["dev"], "test_tgt": texts["dev"]}
    _, corpus = prepare(DataConfig(**{**named, **same}, vocab_size=100), tmp_path / "data")
    assert corpus.overlap["test in dev"] == 1


def test_plain_text_says_what_its_lines_share(texts, tmp_path):
    config = DataConfig(**{f"{name}_text": path for name, path in texts.items()}, vocab_size=100)
    _, corpus = prepare_text(config, tmp_path / "data")
    assert corpus.overlap == {"dev in training": 0.25, "test in training": 0.25, "test in dev": 0.5}
    _, again = prepare_text(replace(config, test_text=""), tmp_path / "data")
    assert again.overlap["test in dev"] == 1
