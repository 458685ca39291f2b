"""Folders, patterns, Parquet and token shards, each against the same text or tokens in memory."""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from cases import each
from lab.data.libraries import DOCUMENTS, library
from lab.training.tiny import tiny_language_model
from normlab.errors import UserError
from normlab.lab.config import DataConfig
from normlab.lab.data import foreign
from normlab.lab.data.files import Folder, Parquet, ShardTokens, apart, layout_of, open_files
from normlab.lab.data.foreign import GPT2, GPT4, GPT4O, ForeignPieces
from normlab.lab.data.plain import Blocks, Stream, prepare_text
from normlab.lab.data.text import TextFile
from normlab.lab.data.tokenizer import EOS, BytePairs, bytes_of
from normlab.lab.data.vocabulary import parse, vocabulary
from normlab.lab.tasks.bert import BertPretraining
from normlab.lab.tasks.language_model import LanguageModel


@pytest.fixture(scope="module")
def theirs():
    return library()


@pytest.fixture
def place(tmp_path, monkeypatch, theirs):
    monkeypatch.chdir(tmp_path)
    theirs.save("tokenizer.json")
    return tmp_path


def config(train, dev, **more):
    return DataConfig(
        train_text=train, dev_text=dev, **{"tokenizer": "tokenizer.json", "block_len": 16, **more}
    )


# ------------------------------------------------------------------------------------- tokenizers of others


def test_its_tokens_are_those_of_the_library_moved_by_four(theirs):
    ours = parse(theirs.to_str().encode())
    assert type(ours) is ForeignPieces
    for text in DOCUMENTS:
        assert ours.encode([text]) == [[i + 4 for i in theirs.encode(text).ids]]
    again = parse(ours.to_json().encode())
    assert again.encode(DOCUMENTS) == ours.encode(DOCUMENTS)
    assert again.decode(again.encode(DOCUMENTS)) == DOCUMENTS
    names = ("added_tokens", "normalizer", "pre_tokenizer", "model")
    older = {"foreign": {name: json.loads(theirs.to_str())[name] for name in names}}
    assert parse(json.dumps(older).encode()).encode(DOCUMENTS) == ours.encode(DOCUMENTS)
    [ids] = ours.encode(["a<|endoftext|>"])
    assert min(ids) > 4, "text that spells a special token is text"
    assert ours.ours().tolist() == [EOS, *range(5, 333)]


def test_tiktokens_ranks_are_the_same_tokenizer(theirs, monkeypatch):
    ranks = {bytes_of(name): i - 1 for name, i in theirs.get_vocab().items() if i}
    content = b"".join(base64.b64encode(piece) + b" %d\n" % rank for piece, rank in ranks.items())
    with pytest.raises(UserError, match=r"328 ranks.*gpt2 \(50,256\)"):
        parse(content)
    monkeypatch.setitem(foreign.ENCODINGS, 328, foreign.Encoding("ours", GPT4, 330))
    ours = parse(content)
    for text in DOCUMENTS:
        assert ours.encode([text]) == [[i - 1 + 4 for i in theirs.encode(text).ids]]
    assert ours.ours()[-2:].tolist() == [EOS, EOS]
    assert parse(ours.to_json().encode()).encode(DOCUMENTS) == ours.encode(DOCUMENTS)
    with pytest.raises(UserError, match="line 2"):
        parse(b"IQ== 0\nno piece\n")


def test_an_encoding_of_tiktoken_is_its_ranks(monkeypatch):
    class Encoding:
        _mergeable_ranks = {bytes([i]): i for i in range(256)} | {b"ab": 256, b"abc": 257}

    stub = SimpleNamespace(list_encoding_names=lambda: ["gpt2"], get_encoding=lambda name: Encoding)
    monkeypatch.setitem(sys.modules, "tiktoken", stub)
    monkeypatch.setitem(foreign.ENCODINGS, 258, foreign.Encoding("gpt2", GPT2, 259))
    config = DataConfig(tokenizer="tiktoken:gpt2")
    ours = vocabulary(config, (), ())
    assert ours.encode(["abc cab"]) == [[4 + 257, 4 + 32, 4 + 99, 4 + 256]]
    with pytest.raises(UserError, match=r"'gpt'.* mean 'gpt2'"):
        vocabulary(replace(config, tokenizer="tiktoken:gpt"), (), ())
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(FileNotFoundError, match="install tiktoken"):
        vocabulary(config, (), ())


def test_words_of_gpt2_are_those_of_the_library():
    theirs = library(GPT2)
    named = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in DOCUMENTS:
        assert theirs.pre_tokenizer.pre_tokenize_str(text) == named.pre_tokenize_str(text)


def bpe(**vocab):
    return {"type": "BPE", "vocab": vocab, "merges": []}


@each(
    ("name", "value", "sentence"),
    [
        (
            "pre_tokenizer",
            {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"},
            "cannot read",
        ),
        ("model", {}, "cannot read it"),
        ("model", None, "cannot read it"),
        ("model", bpe(), "no entries"),
        ("model", bpe(a=-1), "cannot read it"),
        ("model", bpe(a=0, b=0), "two with the same number"),
        ("model", bpe(a=4_000_000_000), "up to 4,000,000,000"),
        ("model", {"type": "Unigram", "unk_id": 9, "vocab": [["a", 0.0]]}, "UnkIdNotInVocabulary"),
        ("model.dropout", 0.5, "dropout"),
        ("model.merges", [["no", "pieces"]], "`no` out of vocabulary"),
        ("added_tokens", [3], "AddedToken"),
        ("decoder", {"type": "Custom"}, "cannot read it"),
    ],
)
def test_what_is_no_tokenizer_is_refused(theirs, name, value, sentence):
    fields = json.loads(theirs.to_str())
    if name == "model":
        fields["added_tokens"] = []
    inside = fields
    *ways, last = name.split(".")
    for way in ways:
        inside = inside[way]
    inside[last] = value
    with pytest.raises(UserError, match=sentence):
        parse(json.dumps(fields).encode())


def test_a_tokenizer_that_normalises_has_no_bits_per_byte(place, theirs):
    fields = json.loads(theirs.to_str())
    fields["normalizer"] = {"type": "NFC"}
    (place / "tokenizer.json").write_text(json.dumps(fields))
    (place / "text").write_text("cafe\u0301\n")
    assert LanguageModel.prepare(config("text", "text"), place / "data")[1].lost


# ------------------------------------------------------------------------------------------ folders, tables


def test_a_folder_is_its_files_and_a_pattern_some_of_them(place):
    (place / "text" / "b").mkdir(parents=True)
    for i, text in enumerate(DOCUMENTS):
        (place / "text" / ("b" if i % 2 else ".") / f"{i:02}.txt").write_bytes(text.encode())
    (place / "text" / ".hidden").write_bytes(b"\xff")
    folder = open_files("text")
    assert type(folder) is Folder
    order = [*range(0, 24, 2), *range(1, 24, 2)]
    assert [text for text, begins in folder.units() if begins] == [
        DOCUMENTS[i][: DOCUMENTS[i].index("\n") + 1] for i in order
    ]
    _, corpus = prepare_text(
        config("text", "text/b/*1.txt", tokenizer="byte_bpe", vocab_size=300), place / "data"
    )
    left = [DOCUMENTS[i] for i in order if i not in (1, 11, 21)]
    rows = np.split(corpus.train.tokens, np.flatnonzero(corpus.train.tokens == EOS))[1:]
    assert corpus.tokenizer.decode([row[1:].tolist() for row in rows]) == left
    assert corpus.train.bytes == sum(len(text.encode()) for text in left)
    alone = apart({"train": folder, "dev": open_files("text/00.txt"), "test": open_files("text")})
    assert type(alone["dev"]) is TextFile
    assert [len(alone[name].files) for name in ("train", "test")] == [23, 23]
    for one in (open_files("text/0*.txt"), open_files("text/b/*.txt")):
        assert apart({"train": one, "dev": one}) == {"train": one, "dev": one}
    for spec, sentence in (("text/*.md", "no file"), ("*", "several kinds|no file")):
        (place / "a.bin").write_bytes(b"")
        with pytest.raises(UserError, match=sentence):
            open_files(spec)


@each("tokenizer", ["byte_bpe", "bpe"])
def test_rows_of_parquet_are_documents(place, tokenizer):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (place / "shards").mkdir(exist_ok=True)
    for i in range(3):
        table = pyarrow.table({"other": [1] * 8, "text": DOCUMENTS[8 * i : 8 * i + 8]})
        parquet.write_table(table, f"shards/shard_0000{i}.parquet", row_group_size=3)
    assert type(open_files("shards")) is Parquet
    dev = "shards/shard_00002.parquet"
    corpus = prepare_text(config("shards", dev, tokenizer=tokenizer, vocab_size=300), place / "data")[1]
    if tokenizer == "bpe":
        assert corpus.lost
        return
    assert corpus.dev.bytes == corpus.documents[:, 2].sum() == sum(len(t.encode()) for t in DOCUMENTS[16:])
    rows = np.split(corpus.train.tokens, np.flatnonzero(corpus.train.tokens == EOS))[1:]
    assert corpus.tokenizer.decode([row[1:].tolist() for row in rows]) == DOCUMENTS[:16]
    parquet.write_table(pyarrow.table({"content": ["a"], "id": [1]}), "bad.parquet")
    with pytest.raises(UserError, match=r"bad\.parquet .*'text'.* content, id"):
        list(open_files("bad.parquet").units())
    (place / "bad.parquet").write_bytes(b"text")
    with pytest.raises(UserError, match=r"bad\.parquet .*Parquet"):
        list(open_files("bad.parquet").units())


# -------------------------------------------------------------------------------------------------- shards


def header(magic, version, count):
    numbers = np.zeros(256, "<i4")
    numbers[:3] = magic, version, count
    return numbers.tobytes()


LAYOUTS = {
    "nanogpt.bin": lambda ids: np.array(ids, "<u2").tobytes(),
    "gpt2.bin": lambda ids: header(20240520, 1, len(ids)) + np.array(ids, "<u2").tobytes(),
    "llama.bin": lambda ids: header(20240801, 7, len(ids)) + np.array(ids, "<u4").tobytes(),
}


@each("name", LAYOUTS)
def test_shards_are_the_tokens_of_their_text(place, theirs, name):
    ids = [token for text in DOCUMENTS for token in [0, *theirs.encode(text).ids]]
    cut = len(ids) // 2 + 3
    for part, tokens in (("train_0", ids[:cut]), ("train_1", ids[cut:]), ("val_0", ids)):
        (place / f"{part}_{name}").write_bytes(LAYOUTS[name](tokens))
    data, corpus = LanguageModel.prepare(config(f"train_?_{name}", f"val_0_{name}"), place / "data")
    expected = np.array([EOS, *(EOS if i == 0 else i + 4 for i in ids)])
    for stream in (corpus.train, corpus.dev, corpus.test):
        assert len(stream) == len(ids)
        assert np.array_equal(stream.tokens[0 : len(ids) + 1], expected)
        assert stream.bytes == sum(len(text.encode()) for text in DOCUMENTS)
    for start, stop in ((0, 1), (cut - 2, cut + 5), (cut + 1, cut + 2), (len(ids), len(ids) + 9), (5, 5)):
        assert np.array_equal(corpus.train.tokens[start:stop], expected[start:stop])
    assert corpus.lost == ""
    assert corpus.documents.sum(0)[[0, 2]].tolist() == [len(ids), corpus.test.bytes]
    assert len(corpus.documents) == len(DOCUMENTS)
    blocks = Blocks(corpus.train.tokens, block_len=16, rows=4, seed=0)
    same = Blocks(expected, block_len=16, rows=4, seed=0)
    assert all((blocks.at(i).ids == same.at(i).ids).all() for i in range(blocks.steps_per_epoch))
    assert {path.name for path in corpus.folder.iterdir()} == {
        "manifest.json",
        "test.documents.npy",
        "tokenizer.json",
    }, "tokens are not copied"
    assert prepare_text(data, place / "data")[1].folder == corpus.folder


def test_a_document_mask_hides_the_documents_before(place):
    for name in ("train", "dev"):
        np.save(f"{name}.npy", np.array([5, 6, 0, 7, 8, 9, 5, 6, 0, 4], np.uint16))
    found = {}
    for mask in (False, True):
        data, corpus = LanguageModel.prepare(
            config("train.npy", "dev.npy", document_mask=mask), place / "data"
        )
        task = LanguageModel(tiny_language_model(data), corpus, torch.device("cpu"))
        model, batch = task.build().eval(), task.batch(0)
        found[mask] = task.loss(model, batch).nll.item(), task.dev_scores(model)["nll"]
    row = torch.from_numpy(corpus.train.tokens[0:10].astype(np.int64))
    parts = torch.tensor_split(row, torch.tensor([3, 9]))
    logits = torch.cat([model(part[None])[0] for part in parts])
    target = torch.from_numpy(corpus.train.tokens[1:11].astype(np.int64))
    expected = torch.nn.functional.cross_entropy(logits, target, reduction="sum").item()
    assert found[True] == pytest.approx((expected, expected / 10), rel=1e-5)
    assert abs(found[False][0] - expected) > 1e-3
    lines = prepare_text(config("train.npy", "dev.npy"), place / "data")[1]
    with pytest.raises(UserError, match="--document-mask"):
        LanguageModel.check_text(
            tiny_language_model(data),
            replace(lines, tokenizer=BytePairs.train(["a b"], 20), train=Stream(np.zeros(1), 0, 0)),
        )


def test_an_array_of_numpy_is_a_shard_too(place):
    np.save("a.npy", np.arange(9, dtype=np.uint16))
    assert layout_of(place / "a.npy").count == 9
    tokens = ShardTokens([place / "a.npy"], np.arange(9))
    assert tokens[0:4].tolist() == [EOS, 0, 1, 2]


@each(
    ("content", "sentence"),
    [
        (b"abc", "odd number"),
        (header(20240520, 1, 9), "says that it has 9 tokens"),
        (header(20240520, 7, 0), "is not a token shard"),
        (header(20240522, 1, 0), "is not a token shard"),
        (np.array([400], "<u2").tobytes(), "has the token 400, and the tokenizer has 329 entries"),
    ],
)
def test_what_is_no_shard_is_refused(place, content, sentence):
    (place / "a.bin").write_bytes(content)
    (place / "b.bin").write_bytes(np.zeros(4, "<u2").tobytes())
    with pytest.raises(UserError, match=sentence):
        prepare_text(config("a.bin", "b.bin"), place / "data")


def test_shards_need_their_tokenizer_and_no_text_beside_them(place):
    (place / "a.bin").write_bytes(np.zeros(4, "<u2").tobytes())
    (place / "text").write_text("text\n")
    for name in ("bpe", "byte_bpe"):
        with pytest.raises(UserError, match=f"--tokenizer .*{name}"):
            prepare_text(config("a.bin", "a.bin", tokenizer=name), place / "data")
    with pytest.raises(UserError, match="token shards"):
        prepare_text(config("a.bin", "text"), place / "data")
    with pytest.raises(UserError, match="reads text"):
        BertPretraining.prepare(config("a.bin", "a.bin"), place / "data")


def test_a_changed_shard_is_another_text(place):
    (place / "a.bin").write_bytes(np.array([5, 6, 7, 0], "<u2").tobytes())
    data, _ = prepare_text(config("a.bin", "a.bin"), place / "data")
    (place / "a.bin").write_bytes(np.array([5, 6, 8, 0], "<u2").tobytes())
    with pytest.raises(UserError, match="digest"):
        prepare_text(data, place / "data")
    assert prepare_text(replace(data, digest=""), place / "data")[0].digest != data.digest


@given(text=st.text(st.sampled_from("aBé1中 \n\r\t.'s/\u0301"), max_size=40))
def test_words_of_all_tokenizers_end_where_pieces_are_cut(text):
    places = [i for i in range(1, len(text)) if text[i] in " \n\r\t" and text[i - 1].isalnum()]
    for words in (GPT2, GPT4, GPT4O):
        split = pre_tokenizers.Split(Regex(words), "isolated")
        whole = [word for word, _ in split.pre_tokenize_str(text)]
        for place in places:
            parts = [
                word for part in (text[:place], text[place:]) for word, _ in split.pre_tokenize_str(part)
            ]
            assert parts == whole
