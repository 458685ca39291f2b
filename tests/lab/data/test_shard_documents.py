"""Documents of shards by offsets: Megatron's index, or an array of first tokens, beside the shard."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from cases import each
from normlab.errors import UserError
from normlab.lab.data.files import ShardTokens, layout_of, open_files
from normlab.lab.data.tokenizer import EOS

OURS = np.array([EOS, *range(5, 24)], np.int32)
"""Our id of each token of a shard, whose token 0 is special."""
TOKENS = [5, 6, 7, 8, 9, 0, 10, 11, 0, 12, 13]
STARTS = [0, 2, 6, 8]


def megatron(lengths, documents, *, code=8, size=2, mark=b"MMIDIDX\0\0", version=1, more=0):
    """An index as ``megatron/core/datasets/indexed_dataset.py`` lays it out."""
    places = np.cumsum([0, *lengths[:-1]]) * size
    return b"".join(
        [
            *(mark, np.array(version, "<u8").tobytes(), bytes([code])),
            np.array([len(lengths), len(documents)], "<u8").tobytes(),
            *(np.array(lengths, "<i4").tobytes(), np.array(places, "<i8").tobytes()),
            *(np.array(documents, "<i8").tobytes(), b"\0" * more),
        ]
    )


def write(folder, name, starts, *, index):
    tokens = np.array(TOKENS, "<u2")
    if index:
        tokens.tofile(folder / f"{name}.bin")
        edges = [*starts, len(TOKENS)]
        lengths = [b - a for a, b in pairwise(edges)]
        (folder / f"{name}.idx").write_bytes(megatron(lengths, range(len(edges))))
    else:
        np.save(folder / f"{name}.npy", tokens)
        np.save(folder / f"{name}.idx", np.array(starts, np.uint64))


@each("index", [True, False])
def test_documents_begin_behind_an_eos(tmp_path, index):
    (folder := tmp_path / str(index)).mkdir()
    write(folder, "a", STARTS, index=index)
    write(folder, "b", STARTS, index=index)
    for spec in (folder, f"{folder}/*"):
        tokens = ShardTokens(open_files(str(spec)).files, OURS)
        half = [OURS[t] for t in TOKENS]
        half.insert(2, EOS)  # the document at 6 begins behind a special token, that at 8 with one
        expected = [EOS, *half, EOS, *half]
        assert len(tokens) == len(expected)
        assert [tokens[i : i + 1][0] for i in range(len(expected))] == expected
        for start in range(len(expected)):
            for stop in (start, start + 1, start + 5, 99):
                assert tokens[start:stop].tolist() == expected[start:stop]


def test_documents_are_a_part_of_the_digest(tmp_path):
    write(tmp_path, "a", STARTS, index=False)
    with_four = ShardTokens(open_files(f"{tmp_path}/a.npy").files, OURS).digest()
    np.save(tmp_path / "a.idx", np.array([0]))
    with_one = ShardTokens(open_files(f"{tmp_path}/a.npy").files, OURS)
    (tmp_path / "a.idx.npy").unlink()
    with_none = ShardTokens(open_files(f"{tmp_path}/a.npy").files, OURS)
    assert with_four != with_one.digest() == with_none.digest()
    assert with_one[0:99].tolist() == with_none[0:99].tolist() == [EOS, *OURS[TOKENS]]


def test_sequences_of_one_document_and_wider_tokens(tmp_path):
    np.array(TOKENS, "<i4").tofile(tmp_path / "a.bin")
    (tmp_path / "a.idx").write_bytes(megatron([1, 3, 0, 7], [0, 1, 2, 4], code=4, size=4, more=4))
    layout = layout_of(tmp_path / "a.bin")
    assert (layout.dtype, layout.count, layout.starts.tolist()) == ("<i4", 11, [0, 1, 4])


GOOD = megatron([2, 9], [0, 1, 2])


@each(
    ("content", "sentence"),
    [
        (b"", "not a Megatron index"),
        (megatron([2, 9], [0, 2], mark=b"MMIDIDX\0\1"), "not a Megatron index"),
        (megatron([2, 9], [0, 2], version=2), "not a Megatron index"),
        (megatron([2, 9], [0, 2], code=7), "not a Megatron index"),
        (GOOD[:-1], "not as many as it says"),
        (GOOD[:18] + b"\xff" * 8 + GOOD[26:], "not as many as it says"),
        (megatron([2, 8], [0, 2]), "says that it has 10 tokens, but has 22 bytes"),
        (megatron([2, 9], [0, 2], size=4), "names places"),
        (megatron([2, 9], [0, 3]), "names places"),
        (megatron([-2, 13], [0, 2]), "names places"),
    ],
)
def test_a_bad_index_is_refused(tmp_path, content, sentence):
    np.array(TOKENS, "<u2").tofile(tmp_path / "a.bin")
    (tmp_path / "a.idx").write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        layout_of(tmp_path / "a.bin")


@each(
    ("starts", "sentence"),
    [
        ([0, 4, 4], "in their order"),
        ([0, 12], "below the 11 tokens"),
        ([-1, 3], "in their order"),
        ([[0, 1]], "one row of whole numbers"),
        ([0.0], "one row of whole numbers"),
        (None, "not a NumPy array"),
    ],
)
def test_a_bad_list_of_documents_is_refused(tmp_path, starts, sentence):
    np.array(TOKENS, "<u2").tofile(tmp_path / "a.bin")
    if starts is None:
        (tmp_path / "a.idx.npy").write_bytes(b"")
    else:
        np.save(tmp_path / "a.idx", np.array(starts))
    with pytest.raises(UserError, match=sentence):
        layout_of(tmp_path / "a.bin")


def test_a_list_may_end_with_the_number_of_tokens(tmp_path):
    np.array(TOKENS, "<u2").tofile(tmp_path / "a.bin")
    np.save(tmp_path / "a.idx", np.array([0, 2, 11]))
    assert layout_of(tmp_path / "a.bin").starts.tolist() == [0, 2]
