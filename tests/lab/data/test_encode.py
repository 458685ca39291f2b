"""Encoding part by part writes the bytes that encoding everything at once would write."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normlab.errors import UserError
from normlab.lab.data import text
from normlab.lab.data.parallel import _encode_train
from normlab.lab.data.ragged import Ragged
from normlab.lab.data.text import TextFile
from normlab.lab.data.tokenizer import EOS, BytePairs

TOKENIZER = BytePairs.train(["ab abab ba", "aa bb é"], 20)
TEXTS = st.lists(st.tuples(*[st.text("abé z\u3000", max_size=9)] * 2), min_size=1, max_size=25)


def written(folder, pairs, at_a_time, max_len):
    """Encode a training text; return its tally and the bytes of its files."""
    sides = [list(side) for side in zip(*pairs, strict=True)]
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "LINES_AT_A_TIME", at_a_time)
        tally = _encode_train(folder, TOKENIZER, (sides[0], sides[1]), max_len, text.Overlap([], []))
    return tally, {path.name: path.read_bytes() for path in folder.iterdir()}


@settings(max_examples=60)
@given(TEXTS, st.integers(1, 6), st.integers(2, 7))
def test_a_training_text_in_parts_is_the_text_at_once(tmp_path_factory, pairs, at_a_time, max_len):
    work = tmp_path_factory.mktemp("parts")
    tally, files = written(work, pairs, at_a_time, max_len)
    ids = list(zip(*(TOKENIZER.encode(side) for side in zip(*pairs, strict=True)), strict=True))
    kept = [both for both in ids if all(both) and max(map(len, both)) < max_len]
    empty = sum(not all(both) for both in ids)
    assert (tally.read, tally.kept) == (len(ids), len(kept))
    assert tally.left_out == {"empty side": empty, "too long": len(ids) - len(kept) - empty}
    for side, name in enumerate(("src", "tgt")):
        whole = Ragged.of([both[side] for both in kept], np.uint16)
        assert tally.tokens[side] == len(whole.tokens)
        for what in ("tokens", "offsets"):
            np.save(work / "whole.npy", getattr(whole, what), allow_pickle=False)
            assert files[f"train.{name}.{what}.npy"] == (work / "whole.npy").read_bytes()
    targets = [token for both in kept for token in (*both[1], EOS)]
    counts = np.bincount(np.array(targets, np.int64), minlength=TOKENIZER.vocab_size)
    assert tally.target_counts.tolist() == counts.tolist()


def test_parts_are_read_as_they_are_encoded(tmp_path, monkeypatch):
    read, seen, encode = [], [], TOKENIZER.encode

    def side():
        for k in range(6):
            read.append(k)
            yield "ab ba"

    def counted(part):
        seen.append(len(read))
        return encode(part)

    monkeypatch.setattr(text, "LINES_AT_A_TIME", 2)
    monkeypatch.setattr(TOKENIZER, "encode", counted)
    _encode_train(tmp_path, TOKENIZER, (side(), ["é z"] * 6), 9, text.Overlap([], []))
    assert seen == [2, 2, 4, 4, 6, 6], "both sides of each part"


def test_a_line_that_is_not_utf_8_is_told_with_file_and_line(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "LINES_AT_A_TIME", 1000)
    path = tmp_path / "bad.txt"
    path.write_bytes(b"ab ba\n" * 4000 + b"a\xff\n")
    with pytest.raises(UserError) as error:
        list(text.parts(TextFile(path)))
    assert all(fact in str(error.value) for fact in (f"{path}, line 4001", "0xff", "UTF-8", "iconv"))
