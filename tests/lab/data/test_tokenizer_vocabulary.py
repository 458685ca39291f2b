"""Which tokenizer a configuration asks for, and the one that a file holds."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from normlab.errors import UserError
from normlab.lab.config import Config, DataConfig, DecodeConfig, ModelConfig, TrainConfig, run_id
from normlab.lab.data.parallel import prepare
from normlab.lab.data.pretokenizer import PretokenizerChain
from normlab.lab.data.sentencepiece_model import SentencePieces
from normlab.lab.data.tokenizer import BytePairs
from normlab.lab.data.vocabulary import load, vocabulary
from normlab.lab.training.train import train
from normlab.lab.training.translate import translate

SOURCE = ["Ein Mann, ein Hut.", "Zwei Männer!", "Drei Hüte: rot, grün."] * 5
TARGET = ["A man, a hat.", "Two men!", "Three hats: red, green."] * 5
MOSES = DataConfig(pretokenizer="moses", source_lang="de", target_lang="en", vocab_size=70)
KINDS = {
    "bpe": DataConfig(vocab_size=70),
    "unigram": DataConfig(tokenizer="unigram", vocab_size=70),
    "moses+bpe": MOSES,
    "moses+unigram": replace(MOSES, tokenizer="unigram"),
}


@pytest.fixture
def model(tmp_path):
    """A SentencePiece model in a file."""
    pieces = SentencePieces.train([*SOURCE, *TARGET], 70)
    (tmp_path / "spm.model").write_bytes(pieces._model)
    return tmp_path / "spm.model"


@pytest.mark.parametrize("config", KINDS.values(), ids=list(KINDS))
def test_every_kind_is_saved_and_loaded_as_it_is(config, tmp_path):
    made = vocabulary(config, SOURCE, TARGET)
    made.save(tmp_path / "t.json")
    again = load(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_bytes()), "one form for all: JSON"
    assert (type(again), again.kind, again.vocab_size) == (type(made), made.kind, made.vocab_size)
    assert again.encode(SOURCE) == made.encode(SOURCE)
    assert again.decode(again.encode_target(TARGET)) == TARGET


def test_what_each_kind_is_called():
    kinds = {name: vocabulary(config, SOURCE, TARGET).kind for name, config in KINDS.items()}
    assert kinds == {
        "bpe": "byte-pair encoding",
        "unigram": "SentencePiece",
        "moses+bpe": "byte-pair encoding of moses words",
        "moses+unigram": "SentencePiece of moses words",
    }


def test_ready_models_are_told_by_their_content(model, tmp_path):
    ready = vocabulary(DataConfig(tokenizer=str(model)), [], [])
    assert isinstance(ready, SentencePieces)
    ready.save(tmp_path / "any name")
    BytePairs.train(SOURCE, 60).save(tmp_path / "b.model")
    assert isinstance(vocabulary(DataConfig(tokenizer=str(tmp_path / "any name")), [], []), SentencePieces)
    assert isinstance(vocabulary(DataConfig(tokenizer=str(tmp_path / "b.model")), [], []), BytePairs)
    assert isinstance(vocabulary(replace(MOSES, tokenizer=str(model)), [], []), PretokenizerChain)


def test_the_tokenizer_of_a_run_with_words_is_taken_with_the_same_words(tmp_path):
    learned = vocabulary(MOSES, SOURCE, TARGET)
    learned.save(tmp_path / "tokenizer.json")
    again = vocabulary(replace(MOSES, tokenizer=str(tmp_path / "tokenizer.json")), [], [])
    assert again.to_json() == learned.to_json()


class Payload:
    """Writes a file if it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return open, ("ran", "w")


@pytest.mark.parametrize(
    ("name", "content", "kind", "facts"),
    [
        ("bpee", None, FileNotFoundError, ["bpee", "--tokenizer bpe, unigram"]),
        (".", None, UserError, ["folder", "--tokenizer bpe, unigram"]),
        ("a.model", b"", UserError, ["a.model", "empty", "--tokenizer bpe"]),
        ("a.model", pickle.dumps(Payload()), UserError, ["a.model", "neither JSON nor a SentencePiece"]),
        ("a.model", b'{"pretokenizer": 3}', UserError, ["a.model", "pretokenizer", "an object", "got 3"]),
        ("a.model", b'{"sentencepiece": "?"}', UserError, ["a.model", "sentencepiece", "base 64"]),
        ("a.model", b'{"\xff": 3}', UserError, ["a.model", "byte 2", "UTF-8"]),
        (
            "a.model",
            vocabulary(MOSES, SOURCE, TARGET).to_json().encode(),
            UserError,
            ["a.model", "moses", "--pretokenizer moses --source-lang de --target-lang en"],
        ),
    ],
)
def test_what_is_no_model_is_refused_by_name(tmp_path, monkeypatch, name, content, kind, facts):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(kind) as error:
        vocabulary(DataConfig(tokenizer=name), [], [])
    assert all(fact in str(error.value) for fact in facts), error.value
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b'{"model": {}}',
        b'{"sentencepiece": "AAAA"}',
        b'{"sentencepiece": 3}',
        b'{"sentencepiece": "not base 64"}',
        b'{"words": {"name": "x", "languages": ["a", "b"]}, "tokenizer": {}}',
        b"{" * 100_000,
        b'{"a": "\xff"}',
        pickle.dumps(Payload()),
    ],
)
def test_a_damaged_tokenizer_of_a_run_is_refused_by_name(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    Path("tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"^tokenizer\.json "):
        load("tokenizer.json")
    assert not Path("ran").exists()


def test_a_tokenizer_with_other_special_tokens_is_refused(tmp_path):
    other = json.loads(BytePairs.train(SOURCE, 60).to_json())
    other["added_tokens"], other["model"]["unk_token"] = [], None
    other["model"]["vocab"] = {"a": 0, "b": 1, "c": 2, "[ pad ]": 3}
    other["model"]["merges"] = []
    (tmp_path / "t.json").write_text(json.dumps(other), "utf-8")
    with pytest.raises(ValueError, match=r"\[ pad \]"):
        load(tmp_path / "t.json")


def files(folder):
    for name, lines in (("a.de", SOURCE), ("a.en", TARGET)):
        (folder / name).write_text("".join(f"{line}\n" for line in lines), "utf-8")
    side = {"src": str(folder / "a.de"), "tgt": str(folder / "a.en")}
    return DataConfig(
        **{f"{role}_{s}": path for role in ("train", "dev") for s, path in side.items()}, vocab_size=70
    )


def test_each_kind_has_a_corpus_and_an_id_of_its_own(tmp_path, model):
    plain = files(tmp_path)
    moses = {"pretokenizer": "moses", "source_lang": "de", "target_lang": "en"}
    kinds = [
        plain,
        replace(plain, tokenizer="unigram"),
        replace(plain, tokenizer=str(model)),
        replace(plain, **moses),
        replace(plain, **{**moses, "source_lang": "fr"}),
        replace(plain, **{**moses, "target_lang": "fr"}),
        replace(plain, **moses, tokenizer="unigram"),
    ]
    made = [prepare(config, tmp_path / "data") for config in kinds]
    assert len({corpus.folder for _, corpus in made}) == len(kinds)
    assert len({run_id(Config(data=config)) for config, _ in made}) == len(kinds)
    assert "SentencePiece" in made[2][1].facts["Vocabulary"]
    assert made[3][1].dev_text.target == TARGET, "references stay raw"
    moved = tmp_path / "moved.model"
    moved.write_bytes(model.read_bytes())
    again, corpus = prepare(replace(plain, tokenizer=str(moved)), tmp_path / "data")
    assert (again.digest, corpus.folder) == (made[2][0].digest, made[2][1].folder), "the content counts"


def test_a_run_keeps_its_model_and_scores_raw_text(tmp_path, model):
    data = replace(
        files(tmp_path), tokenizer=str(model), pretokenizer="moses", source_lang="de", target_lang="en"
    )
    config = Config(
        model=ModelConfig(dim=16, ffn_dim=32, heads=2, encoder_layers=1, decoder_layers=1, dropout=0.0),
        data=data,
        train=TrainConfig(steps=3, validate_every_steps=3, max_tokens=512),
        decode=DecodeConfig(beam=2),
    )
    run = train(config, tmp_path / "runs")
    model.unlink()
    written = run.outputs.read_text("utf-8").splitlines()
    assert translate(run.path, SOURCE) == written
    assert isinstance(load(run.tokenizer), PretokenizerChain)
