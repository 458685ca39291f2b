"""SentencePiece models behind our special tokens."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
import sentencepiece

from cases import each
from normlab.errors import UserError
from normlab.lab.data.sentencepiece_model import SentencePieces
from normlab.lab.data.tokenizer import BOS, EOS, PAD, UNK

LINES = [
    "Ein Mann mit einem roten Hut.",
    "Zwei Männer – „größer“ als 3,5 m.",
    "Thứ Bảy ngày hai mươi mốt tháng tư",
    "naïve Café Ångström",
    "ein Mann und zwei Männer",
]


def model(**options):
    """A model as SentencePiece makes it: <unk> 0, <s> 1, </s> 2 and no padding, unless said otherwise."""
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 5),
        model_writer=made,
        minloglevel=2,
        hard_vocab_limit=False,
        **{"vocab_size": 80, "character_coverage": 1.0, **options},
    )
    return made.getvalue()


KINDS = {
    "unigram": {},
    "bpe": {"model_type": "bpe"},
    "padded": {"pad_id": 3},
    "t5": {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    "own symbols": {"user_defined_symbols": ["<2de>"], "control_symbols": ["<mask>"]},
    "bytes": {"byte_fallback": True, "vocab_size": 350, "character_coverage": 0.98},
}


@each("options", KINDS.values(), ids=list(KINDS))
def test_the_models_pieces_have_our_ids(options):
    content = model(**options)
    theirs, ours = sentencepiece.SentencePieceProcessor(model_proto=content), SentencePieces(content)
    special = [i for i in range(theirs.get_piece_size()) if theirs.is_unknown(i) or theirs.is_control(i)]
    assert ours.vocab_size == theirs.get_piece_size() - len(special) + 4
    kept = [i for i in range(theirs.get_piece_size()) if i not in special]
    for line, ids in zip(LINES, ours.encode(LINES), strict=True):
        assert min(ids) > EOS
        assert [kept[i - 4] for i in ids] == theirs.encode(line)
    assert ours.decode(ours.encode(LINES)) == [theirs.decode(theirs.encode(line)) for line in LINES]


@pytest.fixture(scope="module")
def pieces():
    return SentencePieces.train(LINES * 5, 60)


def test_a_model_of_ones_own_has_the_size_asked_for_and_gives_the_text_back(pieces):
    assert pieces.vocab_size == 60
    assert pieces.decode(pieces.encode(LINES)) == LINES


def test_special_tokens_are_dropped_and_unknown_characters_become_unk(pieces):
    [ids] = pieces.encode(["ein Mann"])
    assert pieces.decode([[BOS, *ids, EOS, PAD, PAD]]) == ["ein Mann"]
    [ids] = pieces.encode(["ein 漢 Mann"])
    assert ids.count(UNK) == 1
    assert pieces.decode([ids]) == ["ein  Mann"]
    assert pieces.encode(["", " \t "]) == [[], []]
    assert pieces.decode([[], [EOS]]) == ["", ""]


def test_text_that_spells_a_special_token_is_text(pieces):
    ids = pieces.encode(["<s> </s> <unk> <pad>"])[0]
    assert not {PAD, BOS, EOS} & set(ids)


def test_a_line_of_any_length_is_learned_from():
    long = " ".join(["Wörterbuch"] * 2000)
    assert UNK not in SentencePieces.train([long, "a"], 40).encode(["Wörterbuch"])[0]


def test_too_small_a_vocabulary_says_what_is_needed(capfd):
    with pytest.raises(ValueError, match=r"^vocab_size is 8, .* 9$"):
        SentencePieces.train(["abcd"], 8)
    assert SentencePieces.train(["abcd"] * 3, 9).vocab_size == 9
    with pytest.raises(ValueError, match="unigram"):
        SentencePieces.train([], 50)
    assert capfd.readouterr() == ("", "")


def test_training_is_the_same_in_every_process(pieces, tmp_path):
    program = (
        "import sys; from normlab.lab.data.sentencepiece_model import SentencePieces;"
        f"SentencePieces.train({LINES * 5!r}, 60).save(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "there.json")], check=True)
    pieces.save(tmp_path / "here.json")
    assert (tmp_path / "there.json").read_bytes() == (tmp_path / "here.json").read_bytes()


@pytest.mark.parametrize("damage", [b"", b"no model at all", b"\x80\x04K\x01.", b"\xff" * 9])
def test_what_is_no_model_is_refused(damage, capfd):
    with pytest.raises(ValueError, match=r"empty|SentencePiece"):
        SentencePieces(damage)
    assert "Returns default" not in capfd.readouterr().err


def test_a_model_that_was_cut_off_anywhere_is_refused():
    whole = model()
    assert SentencePieces(whole).vocab_size > 50
    for end in (*range(1, 1200, 13), len(whole) // 2, len(whole) - 1):
        with pytest.raises(UserError, match=r"SentencePiece|missing"):
            SentencePieces(whole[:end])
