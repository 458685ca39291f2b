"""Plain text becomes one stream of tokens that loses nothing of it."""

from __future__ import annotations

import gzip
import json
import lzma
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from normlab.lab.config import DataConfig
from normlab.lab.data import text
from normlab.lab.data.builtin import generate
from normlab.lab.data.plain import TextCorpus, prepare_text
from normlab.lab.data.tokenizer import EOS, UNK

LINES = {
    "train": ["One day, one night.", "", "Two days and two nights.", "one two  three", "fünf days"] * 40,
    "dev": ["Two nights, one day.", "", "", "three"],
    "test": ["one żay", "two"],
}


def files_config(folder, **changes):
    """Three small files, plain, .gz and .xz, and the configuration that names them."""
    text = {name: "".join(f"{line}\n" for line in lines).encode() for name, lines in LINES.items()}
    paths = {"train": folder / "a.txt", "dev": folder / "b.txt.gz", "test": folder / "c.txt.xz"}
    paths["train"].write_bytes(text["train"])
    paths["dev"].write_bytes(gzip.compress(text["dev"]))
    paths["test"].write_bytes(lzma.compress(text["test"]))
    data = {f"{name}_text": str(path) for name, path in paths.items()}
    return DataConfig(**{**data, "vocab_size": 60, **changes})


def lines_of(corpus, stream):
    """The text of a stream, line by line, as the tokenizer spells it."""
    lines, line = [], []
    assert stream.tokens[0] == EOS
    for token in stream.tokens[1:].tolist():
        if token == EOS:
            lines.append(line)
            line = []
        else:
            line.append(token)
    assert line == [], "the last line has its end"
    return corpus.tokenizer.decode(lines)


def test_a_stream_is_every_line_with_its_end(tmp_path):
    filled, corpus = prepare_text(files_config(tmp_path), tmp_path / "data")
    assert len(filled.digest) == 64
    assert lines_of(corpus, corpus.train) == [" ".join(line.split()) for line in LINES["train"]]
    assert lines_of(corpus, corpus.dev) == LINES["dev"]
    assert lines_of(corpus, corpus.test)[1] == "two"
    assert (corpus.test.tokens == UNK).sum() == 1, "one letter that training never had"
    assert corpus.facts["Test size"].endswith("1 unknown characters")
    assert isinstance(corpus.train.tokens, np.memmap)
    assert corpus.train.tokens.dtype == np.uint16
    assert len(corpus.train) == len(corpus.train.tokens) - 1


def test_words_and_bytes_are_those_of_the_raw_text(tmp_path):
    _, corpus = prepare_text(files_config(tmp_path), tmp_path / "data")
    raw = {name: "".join(f"{line}\n" for line in lines) for name, lines in LINES.items()}
    for name, stream in (("train", corpus.train), ("dev", corpus.dev), ("test", corpus.test)):
        assert stream.bytes == len(raw[name].encode())
        assert stream.words == len(raw[name].split()) + raw[name].count("\n")


def test_a_long_text_is_encoded_in_parts_that_change_nothing(tmp_path, monkeypatch):
    config = files_config(tmp_path)
    whole = prepare_text(config, tmp_path / "a")[1]
    monkeypatch.setattr(text, "LINES_AT_A_TIME", 7)
    parts = prepare_text(config, tmp_path / "b")[1]
    assert np.array_equal(whole.train.tokens, parts.train.tokens)


def test_entropy_and_types_are_those_of_training(tmp_path):
    _, corpus = prepare_text(files_config(tmp_path), tmp_path / "data")
    counts = Counter(corpus.train.tokens[1:].tolist())
    total = sum(counts.values())
    entropy = -sum(n / total * math.log(n / total) for n in counts.values())
    assert corpus.unigram_entropy_nats == pytest.approx(entropy, abs=1e-12)
    assert set(np.flatnonzero(corpus.target_vocab)) == set(counts)


def test_without_files_it_is_the_target_side_of_the_built_in_corpus(tmp_path):
    config = DataConfig(builtin="times-en-fr", builtin_pairs=500, builtin_seed=4, vocab_size=120)
    _, corpus = prepare_text(config, tmp_path)
    splits = generate("times-en-fr", pairs=500, seed=4)
    assert lines_of(corpus, corpus.train) == splits.train.target
    assert lines_of(corpus, corpus.test) == splits.test.target
    assert corpus.facts["Corpus"] == "target side of built-in times-en-fr, seed 4"


def test_prepared_once_and_found_again(tmp_path):
    config = files_config(tmp_path)
    filled, corpus = prepare_text(config, tmp_path / "data")
    stamp = (corpus.folder / "tokenizer.json").stat().st_mtime_ns
    again, prepared = prepare_text(replace(filled, block_len=7, max_len=9), tmp_path / "data")
    assert (again.digest, prepared.folder) == (filled.digest, corpus.folder), "blocks are cut in training"
    assert (corpus.folder / "tokenizer.json").stat().st_mtime_ns == stamp
    other = prepare_text(replace(config, vocab_size=50), tmp_path / "data")[1]
    assert other.folder != corpus.folder
    assert str(tmp_path) not in json.dumps(corpus.facts)
    (corpus.folder / "dev.tokens.npy").unlink()
    with pytest.raises(FileNotFoundError, match=corpus.folder.name):
        TextCorpus.load(corpus.folder, {})


def test_a_changed_text_is_not_taken_for_the_old_one(tmp_path):
    filled, _ = prepare_text(files_config(tmp_path), tmp_path / "data")
    Path(filled.train_text).write_text("another text\n")
    with pytest.raises(ValueError, match="digest"):
        prepare_text(filled, tmp_path / "data")


def test_without_test_text_dev_serves(tmp_path):
    _, corpus = prepare_text(files_config(tmp_path, test_text=""), tmp_path / "data")
    assert np.array_equal(corpus.test.tokens, corpus.dev.tokens)
    assert corpus.facts["Test text"] == "none given, so the dev text"


def test_missing_and_empty_texts_are_told(tmp_path):
    config = files_config(tmp_path)
    with pytest.raises(ValueError, match=r"--train-text, --test-text .*--dev-text"):
        prepare_text(replace(config, dev_text=""), tmp_path / "data")
    Path(config.train_text).write_text("\n \n")
    with pytest.raises(ValueError, match=r"a\.txt"):
        prepare_text(config, tmp_path / "data")
