"""A text comes back from its tokens byte for byte, or there are no bits per byte, and the reason is given."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import each
from lab.training.tiny import tiny_language_model
from normlab.base.metric import NLL
from normlab.errors import UserError
from normlab.lab.config import DataConfig
from normlab.lab.data import readings
from normlab.lab.data.text import TextFile, document_sizes
from normlab.lab.data.tokenizer import EOS, BytePieces
from normlab.lab.data.vocabulary import LEARNED, load
from normlab.lab.tasks.language_model import LanguageModel
from normlab.lab.training.translate import prompt_of

PLAIN = "one day, one night\nand two days\n"
TEXTS = {
    "plain": PLAIN,
    "indented": "".join(f"{'':40}{line}\n" for line in PLAIN.splitlines()),
    "code": "def f(x):\n\tif x:\n        return  x\n\n\n    return None  \n",
    "emoji": "one 👩\u200d👩\u200d👧 day 🇵🇪\n",
    "composed": "cafe\u0301 and café\n",
    "crlf": "one day\r\n\r\ntwo days\r\n",
    "no final newline": "one day\ntwo",
    "one character": "d",
    "form feed": "one\x0cday\u2028two\u00a0days\n",
    "byte-order mark": "\ufeffone day\n",
    "special": "[ eos ] one [ pad ]\n",
    "metaspace": "one \u2581 day\n",
}
TRAIN = "".join(TEXTS.values()) * 3


def prepared(tmp_path, tokenizer, text, train=TRAIN):
    for name, content in (("train", train), ("dev", text), ("test", text)):
        (tmp_path / f"{name}.txt").write_bytes(content.encode())
    paths = {f"{name}_text": str(tmp_path / f"{name}.txt") for name in ("train", "dev", "test")}
    config = DataConfig(**paths, tokenizer=tokenizer, vocab_size=300, block_len=8)
    return LanguageModel.prepare(config, tmp_path / "data")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Tokenizers that were learned once; the last is a ready SentencePiece model."""
    folder = tmp_path_factory.mktemp("tokenizers")
    lines = TRAIN.split("\n")
    for name, kind in LEARNED.items():
        kind.train([TRAIN] if kind.verbatim else lines, 300).save(folder / name)
    pieces = json.loads((folder / "unigram").read_text())["sentencepiece"]
    (folder / "model").write_bytes(base64.b64decode(pieces))
    return folder


def text_of(corpus, stream):
    """The text of a stream: a verbatim tokenizer's as it is, any other's line by line, each up to its EOS."""
    assert stream.tokens[0] == EOS
    ids = stream.tokens[1:].tolist()
    if corpus.tokenizer.verbatim:
        return corpus.tokenizer.decode([ids])[0]
    rows, row = [], []
    for token in ids:
        row.append(token)
        if token == EOS:
            rows.append(row)
            row = []
    return "".join(f"{line}\n" for line in corpus.tokenizer.decode(rows))


@pytest.mark.slow
@each("tokenizer", ["bpe", "unigram", "byte_bpe", "model"])
@each("name", TEXTS)
def test_a_text_comes_back_or_its_bytes_are_not_counted(tmp_path, files, tokenizer, name):
    text = TEXTS[name]
    data, corpus = prepared(tmp_path, str(files / tokenizer), text)
    metrics = [metric.name for metric in LanguageModel.metrics_on(corpus)]
    if text_of(corpus, corpus.test) == text:
        assert corpus.lost == ""
        assert metrics[0] == "bits_per_byte"
        assert corpus.test.bytes == len(text.encode())
        assert corpus.documents[:, [0, 2]].sum(0).tolist() == [len(corpus.test), len(text.encode())]
    else:
        assert tokenizer != "byte_bpe"
        assert name != "plain"
        assert corpus.lost in corpus.facts["Bits per byte"]
        assert metrics[0] == "perplexity"
        chosen = tiny_language_model(data, best_by="bits_per_byte")
        with pytest.raises(UserError, match="--tokenizer byte_bpe"):
            LanguageModel.check_text(chosen, corpus)


@each("tokenizer", ["bpe", "byte_bpe"])
def test_scores_are_of_all_bytes_or_not_computed(tmp_path, tokenizer):
    text = TEXTS["crlf"]
    data, corpus = prepared(tmp_path, tokenizer, text)
    task = LanguageModel(tiny_language_model(data), corpus, torch.device("cpu"))
    model = task.build()
    with torch.no_grad():
        model.embedding.weight.zero_()
    evaluation, dev = task.test(model), task.dev_scores(model)
    for metric, rows in evaluation.examples.items():
        assert task.combine(metric, rows.sum(0)) == pytest.approx(evaluation.scores[metric], rel=1e-6)
    assert len(evaluation.outputs) == len(task.test_examples(task.config, corpus))
    assert not any("\n" in line for line in evaluation.outputs)
    for scores in (evaluation.scores, evaluation.examples, dev):
        assert NLL.name in scores
        assert ("bits_per_byte" in scores) == (tokenizer == "byte_bpe")
    if tokenizer == "byte_bpe":
        bits = math.log2(corpus.tokenizer.vocab_size) * len(corpus.test) / len(text.encode())
        assert evaluation.scores["bits_per_byte"] == pytest.approx(bits, rel=1e-6)
        assert dev["bits_per_byte"] == pytest.approx(bits, rel=1e-6)


def test_indenting_a_text_costs_bits_and_never_bytes_alone(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    sizes = {}
    for folder, text in (("a", PLAIN), ("b", TEXTS["indented"])):
        corpus = prepared(tmp_path / folder, "byte_bpe", text)[1]
        sizes[folder] = len(corpus.test), corpus.test.bytes
    assert sizes["b"][0] > sizes["a"][0]
    assert sizes["b"][1] == sizes["a"][1] + 2 * 40


@given(text=st.text(max_size=60))
def test_decoding_is_the_inverse_of_encoding(text):
    ids = TOKENIZER.encode([text])
    assert min(ids[0], default=EOS + 1) > EOS, "text that spells a special token is text"
    assert TOKENIZER.decode(ids) == [text]
    assert TOKENIZER.byte_counts()[ids[0]].sum() == len(text.encode())


TOKENIZER = BytePieces.train([TRAIN], 320)


def test_a_prompt_goes_on_through_ends_of_lines():
    text = "one\n  day"
    assert prompt_of(TOKENIZER, text) == [EOS, *TOKENIZER.encode([text])[0]]


def test_saved_and_loaded_is_the_same(tmp_path):
    TOKENIZER.save(tmp_path / "t.json")
    loaded = load(tmp_path / "t.json")
    assert type(loaded) is BytePieces
    assert loaded.encode([TRAIN]) == TOKENIZER.encode([TRAIN])


def test_there_is_room_for_every_byte():
    assert BytePieces.train(["x"], 260).vocab_size == 260
    with pytest.raises(UserError, match=r"vocab_size .*259.*\b260\b"):
        BytePieces.train(["x"], 259)


def test_bytes_that_are_no_text_are_shown_as_such():
    [cut] = TOKENIZER.encode(["🇵"])
    assert TOKENIZER.decode([cut[:-1]]) == ["\ufffd"]


@given(
    text=st.text(st.sampled_from("ab1 \n\r\t.é中"), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=5),
)
def test_pieces_are_the_text_and_its_tokens_those_of_the_whole(text, cuts):
    edges = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    units = [(text[a:b], a == 0) for a, b in pairwise(edges)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readings, "PIECE_CHARACTERS", 8)
        pieces = list(readings.pieces(units))
    assert "".join(piece for piece, _ in pieces) == text
    assert [begins for _, begins in pieces] == [number == 0 for number in range(len(pieces))]
    assert all(pieces), "none is empty"
    for (before, _), (after, _) in pairwise(pieces):
        if before[-1].isalnum() and after[0] in " \n\r\t":
            whole, first, second = TOKENIZER.encode([before + after, before, after])
            assert whole == first + second


def test_documents_and_cuts_change_no_count(tmp_path, monkeypatch):
    text = "".join(f"  document {i}\n\n" + "word " * i + "\n\n" for i in range(30))
    whole = prepared(tmp_path, "byte_bpe", text, train=text)[1]
    monkeypatch.setattr(readings, "PIECE_CHARACTERS", 40)
    monkeypatch.setattr(readings, "TOKENS_AT_A_TIME", 7)
    (tmp_path / "b").mkdir()
    cut = prepared(tmp_path / "b", "byte_bpe", text, train=text)[1]
    assert np.array_equal(whole.test.tokens, cut.test.tokens)
    assert np.array_equal(whole.documents, cut.documents)
    assert (cut.test.words, cut.test.bytes) == (whole.test.words, whole.test.bytes)
    tokens, words, size = whole.documents.sum(0)
    assert (tokens, words, size) == (len(whole.test), whole.test.words, len(text.encode()))
    assert len(whole.documents) == len(
        document_sizes(readings.lines(TextFile(tmp_path / "test.txt").units()))
    )


def test_a_text_that_the_run_saw_otherwise_is_another(tmp_path):
    first = prepared(tmp_path, "byte_bpe", PLAIN)[0].digest
    assert prepared(tmp_path, "byte_bpe", PLAIN.rstrip("\n"))[0].digest != first
    assert prepared(tmp_path, "bpe", PLAIN)[0].digest != first


def test_bert_reads_lines_whatever_the_tokenizer(tmp_path):
    from normlab.lab.tasks.bert import BertPretraining

    data = replace(prepared(tmp_path, "byte_bpe", PLAIN)[0], digest="")
    corpus = BertPretraining.prepare(data, tmp_path / "bert")[1]
    assert (np.asarray(corpus.test.tokens) == EOS).sum() == 1 + PLAIN.count("\n")
