import json
import subprocess
import sys
import unicodedata
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import each
from normlab.errors import UserError
from normlab.lab.config import DataConfig, MachineConfig
from normlab.lab.data.tokenizer import BOS, EOS, PAD, SPECIALS, UNK, BytePairs, library_errors
from normlab.lab.data.vocabulary import load, parse

LINES = [
    "Ein Mann mit einem <unk> Hut .",
    "Zwei Männer – „größer“ als 3,5 m.",
    "Thứ Bảy ngày hai mươi mốt tháng tư",
    "a </s> <pad> [ pad ] [ eos ] b",
    "naïve cafe\u0301 Ångström",
]
CHARACTERS = sorted(set("".join(LINES)))


def plain(text):
    return " ".join(unicodedata.normalize("NFC", text).split())


@pytest.fixture(scope="module")
def tokenizer():
    return BytePairs.train(LINES * 3, 150)


def test_special_tokens_have_the_first_ids(tokenizer):
    assert (PAD, UNK, BOS, EOS) == (0, 1, 2, 3)
    assert [tokenizer._backend.token_to_id(name) for name in SPECIALS] == [0, 1, 2, 3]


def test_the_models_mean_the_same_ids():
    from normlab.nn import decode, model

    assert (model.PAD, decode.BOS, decode.EOS) == (PAD, BOS, EOS)


def test_decoding_is_the_inverse_of_encoding(tokenizer):
    ids = tokenizer.encode(LINES)
    assert all(min(line) > EOS for line in ids), "text that spells a special token is text"
    assert tokenizer.decode(ids) == [plain(line) for line in LINES]


@given(text=st.text(st.sampled_from([*CHARACTERS, "\t", "\u00a0", "\u2028"]), max_size=30))
def test_decoding_is_the_inverse_on_any_text_of_seen_characters(text):
    tokenizer = small_tokenizer()
    [ids] = tokenizer.encode([text])
    # A combining accent may form, after NFC, a letter that training never saw.
    if UNK not in ids:
        assert tokenizer.decode([ids]) == [plain(text)]


@cache
def small_tokenizer():
    return BytePairs.train(LINES, 150)


def test_special_tokens_are_dropped_and_unknown_characters_become_unk(tokenizer):
    [ids] = tokenizer.encode(["Ein Hut"])
    assert tokenizer.decode([[BOS, *ids, EOS, PAD, PAD]]) == ["Ein Hut"]
    [ids] = tokenizer.encode(["Ein 漢 Hut"])
    assert ids.count(UNK) == 1
    assert tokenizer.encode(["", " \t "]) == [[], []]
    assert tokenizer.decode([[], [EOS]]) == ["", ""]


def test_size_is_what_was_asked_for_or_an_error_says_what_is_needed(tokenizer):
    assert tokenizer.vocab_size == 150
    assert max(max(line) for line in tokenizer.encode(LINES)) < 150
    assert BytePairs.train(["ab ab"], 1000).vocab_size < 20
    with pytest.raises(ValueError, match="least 9"):
        BytePairs.train(["abcd"], 8)
    assert BytePairs.train(["abcd"], 9).vocab_size == 9


def test_saved_and_loaded_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "t.json")
    loaded = load(tmp_path / "t.json")
    assert loaded.encode(LINES) == tokenizer.encode(LINES)
    assert loaded.vocab_size == tokenizer.vocab_size
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        load(tmp_path / "none.json")


def test_training_is_deterministic_across_processes(tokenizer, tmp_path):
    program = (
        "import sys; from normlab.lab.data.tokenizer import BytePairs;"
        f"BytePairs.train({LINES * 3!r}, 150).save(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "there.json")], check=True)
    tokenizer.save(tmp_path / "here.json")
    assert (tmp_path / "there.json").read_bytes() == (tmp_path / "here.json").read_bytes()


@each(
    ("name", "value"),
    [
        ("normalizer", {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}),
        ("normalizer.normalizers", [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 64),
        ("pre_tokenizer.type", "Whitespace"),
        ("pre_tokenizer.replacement", ""),
        ("decoder", None),
        ("post_processor", {"type": "ByteLevel"}),
        ("padding", {"strategy": {"Fixed": 10**12}}),
        ("truncation", {"max_length": 1}),
        ("model.dropout", 0.5),
        ("model.type", "WordPiece"),
        ("model.continuing_subword_prefix", "#"),
        ("own", "field"),
        ("added_tokens", []),
        ("added_tokens", 3),
        ("model", None),
        ("model.vocab", {"[ pad ]": 0, "[ unk ]": 1, "[ bos ]": 2, "[ eos ]": 3, "a": 4_000_000_000}),
        ("model.vocab", {"[ pad ]": [0]}),
        ("model.vocab", {}),
        ("model.merges", [["no", "pieces"]]),
        ("model.merges", 3),
    ],
)
def test_a_file_whose_tokenizer_is_not_ours_is_refused_before_it_is_built(name, value):
    fields = json.loads(BytePairs.train(["a b ab aba"], 20).to_json())
    inside = fields
    *ways, last = name.split(".")
    for way in ways:
        inside = inside[way]
    inside[last] = value
    with pytest.raises(UserError):
        parse(json.dumps(fields).encode())


def test_a_file_without_fields_that_came_later_is_read():
    learned = BytePairs.train(["a b ab aba"], 20)
    fields = json.loads(learned.to_json())
    del fields["pre_tokenizer"]["split"], fields["model"]["ignore_merges"], fields["version"]
    fields["version"] = "1.0"
    assert parse(json.dumps(fields).encode()).encode(["aba b"]) == learned.encode(["aba b"])


def test_a_panic_of_the_library_is_a_refusal():
    class PanicException(BaseException):
        pass

    with pytest.raises(UserError, match="no capacity"), library_errors():
        raise PanicException("no capacity")
    with pytest.raises(KeyboardInterrupt), library_errors():
        raise KeyboardInterrupt


@pytest.mark.parametrize("given", [10**10, 10**7, 2**40])
def test_a_vocabulary_that_crashes_the_library_is_refused_before(given):
    with pytest.raises(UserError, match=rf"vocab_size .*10,000,000, got {given}"):
        DataConfig(vocab_size=given)


@pytest.mark.parametrize("name", ["threads", "num_workers"])
def test_more_threads_than_a_process_takes_are_refused(name):
    with pytest.raises(UserError, match=rf"{name} .*1,024, got 100000"):
        MachineConfig(**{name: 100_000})
    assert MachineConfig(threads=1024, num_workers=1024).threads == 1024
