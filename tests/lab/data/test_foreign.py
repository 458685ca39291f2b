"""A ``tokenizer.json`` of every kind, against the library that made it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Library

from cases import each
from lab.data.libraries import KINDS
from lab.training.tiny import tiny_language_model
from normlab.errors import UserError
from normlab.lab.config import DataConfig
from normlab.lab.data.foreign import ForeignPieces, ForeignTokenizer
from normlab.lab.data.tokenizer import EOS, UNK
from normlab.lab.data.vocabulary import parse
from normlab.lab.tasks.language_model import LanguageModel

TEXT = "".join(f"    one  two{'!' * i}\n\tcafé 👩\n" for i in range(24))
UNKNOWN = {"WordPiece": 1, "Unigram": 2}
EXACT = ("Llama 2", "Gemma")


@each("kind", KINDS)
def test_its_tokens_are_those_of_the_library_moved_by_four(kind):
    theirs = KINDS[kind]()
    ours = parse(theirs.to_str().encode())
    assert type(ours) is (ForeignPieces if kind == "Gemma" else ForeignTokenizer)
    lines = [*TEXT.splitlines()[:4], "One", ""]
    expected = [theirs.encode(line, add_special_tokens=False).ids for line in lines]
    unknown = UNKNOWN.get(kind)
    assert ours.encode(lines) == [[UNK if i == unknown else i + 4 for i in line] for line in expected]
    assert (kind in UNKNOWN) == any(UNK in line for line in ours.encode(lines))
    assert (ours.decode(ours.encode(lines)) == lines) == (kind in EXACT)
    again = parse(ours.to_json().encode())
    assert (type(again), again.kind, again.vocab_size) == (type(ours), ours.kind, theirs.get_vocab_size() + 4)
    assert again.encode(lines) == ours.encode(lines)
    assert EOS not in ours.encode(["<s></s>[SEP]"])[0], "text that spells a special token is text"


def prepared(folder, kind, **more):
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    paths = {f"{name}_text": str(folder / "text") for name in ("train", "dev")}
    (folder / "text").write_bytes(TEXT.encode())
    config = DataConfig(**{**paths, "tokenizer": str(folder / "tokenizer.json"), "block_len": 16, **more})
    return LanguageModel.prepare(config, folder / "data")


@each("kind", KINDS)
def test_bits_per_byte_are_counted_where_the_text_comes_back(tmp_path, kind):
    _, corpus = prepared(tmp_path, kind)
    metrics = [metric.name for metric in LanguageModel.metrics_on(corpus)]
    assert (corpus.lost == "") == (kind in EXACT) == (metrics[0] == "bits_per_byte")
    if kind in EXACT:
        assert corpus.test.bytes == corpus.documents[:, 2].sum() == len(TEXT.encode())
        assert corpus.documents[:, 0].sum() == len(corpus.test)
    else:
        assert corpus.lost in corpus.facts["Bits per byte"]


def test_an_entry_that_is_a_byte_counts_as_one():
    ours = parse(KINDS["Gemma"]().to_str().encode())
    [ids] = ours.encode([TEXT])
    assert ours.byte_counts()[ids].sum() == len(TEXT.encode())
    assert ours.decode([ids[: ids.index(0xC3 + 3 + 4) + 1]])[0].endswith("caf\ufffd")


def test_shards_of_one_that_may_change_a_text_have_a_perplexity(tmp_path):
    rows = [[1, *KINDS["Llama 2"]().encode(f"one two{'!' * i}").ids] for i in range(24)]
    np.save(tmp_path / "a.npy", np.concatenate(rows).astype(np.uint16))
    shard = dict.fromkeys(("train_text", "dev_text"), str(tmp_path / "a.npy"))
    data, corpus = prepared(tmp_path, "Llama 2", **shard, document_mask=True)
    assert np.array_equal(corpus.documents[-1], [len(rows[-1]) - 1, 2, 7 + 23])
    assert corpus.documents[:, 0].sum() == len(corpus.test) == sum(map(len, rows))
    assert "shards" in corpus.facts["Bits per byte"]
    assert "bits_per_byte" not in [metric.name for metric in LanguageModel.metrics_on(corpus)]
    LanguageModel.check_text(tiny_language_model(data), corpus)  # each EOS ends a document


def test_an_exponential_regular_expression_ends_in_a_sentence():
    made = KINDS["Gemma"]()
    made.pre_tokenizer = pre_tokenizers.Split(Regex("(n+)+$"), "isolated")
    with pytest.raises(UserError, match="retry-limit"):
        parse(made.to_str().encode()).encode(["n" * 60 + "e"])


@each("kind", [*KINDS, "one special token"])
def test_exported_in_its_own_numbers(kind):
    theirs = KINDS.get(kind, KINDS["Gemma"])()
    if kind == "one special token":
        fields = json.loads(theirs.to_str())
        fields["added_tokens"] = fields["added_tokens"][1:2]
        theirs = Library.from_str(json.dumps(fields))
    ours = parse(theirs.to_str().encode())
    backend, rows = ours.exported()
    size = theirs.get_vocab_size()
    end = 1 if kind == "one special token" else size
    assert (len(rows), rows[end], (rows == EOS).sum()) == (max(size, end + 1), EOS, 1)
    for line in TEXT.splitlines()[:4]:
        ids = backend.encode(line, add_special_tokens=False).ids
        assert ids == theirs.encode(line, add_special_tokens=False).ids
        assert rows[ids].tolist() == ours.encode([line])[0]
        assert backend.decode(ids) == theirs.decode(ids)
