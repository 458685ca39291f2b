"""Sentences end to end: in memory, in files that grow, in files that are mapped."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normlab.lab.data import ragged as module
from normlab.lab.data.ragged import ArrayWriter, Ragged, RaggedWriter, TokenPairs
from normlab.lab.data.tokenizer import PAD


def test_ragged_arrays():
    ragged = Ragged.of([[5, 6], [], [7]])
    assert len(ragged) == 3
    assert [ragged[i] for i in range(3)] == [[5, 6], [], [7]]
    assert ragged.lengths.tolist() == [2, 0, 1]
    ids, lengths = ragged.padded(np.array([2, 1, 0]), 3)
    assert ids.tolist() == [[7, PAD, PAD], [PAD] * 3, [5, 6, PAD]]
    assert lengths.tolist() == [1, 0, 2]


def test_some_sentences_of_many():
    ragged = Ragged.of([[5, 6], [], [7], [8, 9, 10]])
    chosen = ragged.only(np.array([True, True, False, True]))
    assert [chosen[i] for i in range(len(chosen))] == [[5, 6], [], [8, 9, 10]]
    assert len(ragged.only(np.zeros(4, bool))) == 0


@pytest.mark.parametrize("sentences", [[[5, 6], [], [7]], [[5]], [[], [8]]])
def test_shifted_sentences(sentences):
    shifted = Ragged.of(sentences).shifted()
    assert [shifted[i] for i in range(len(shifted))] == [sentences[-1], *sentences[:-1]]


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 60_000), max_size=5), max_size=4), max_size=5),
    st.sampled_from([np.uint16, np.int32]),
)
def test_a_file_that_grew_is_byte_for_byte_the_one_written_at_once(tmp_path_factory, parts, dtype):
    folder = tmp_path_factory.mktemp("ragged")
    with RaggedWriter.open(folder / "train.src", dtype) as file:
        for part in parts:
            file.append(Ragged.of(part, dtype))
    whole = Ragged.of([sentence for part in parts for sentence in part], dtype)
    assert file.tokens.length == len(whole.tokens)
    for name in ("tokens", "offsets"):
        np.save(folder / "whole.npy", getattr(whole, name), allow_pickle=False)
        written = (folder / f"train.src.{name}.npy").read_bytes()
        assert written == (folder / "whole.npy").read_bytes()


def test_a_growing_file_holds_its_own_type_of_number(tmp_path):
    with pytest.raises(TypeError, match="same_kind"), ArrayWriter.open(tmp_path / "a.npy", np.uint16) as file:
        file.append(np.array([-1]))


def test_lengths_in_parts_are_the_lengths(monkeypatch):
    monkeypatch.setattr(module, "_PAIRS_AT_A_TIME", 3)
    pairs = TokenPairs(Ragged.of([[1] * n for n in range(8)]), Ragged.of([[1] * (9 - n) for n in range(8)]))
    parts = list(pairs.lengths_in_parts())
    assert [len(source) for source, _ in parts] == [3, 3, 2]
    for side, whole in enumerate(pairs.lengths):
        assert np.concatenate([part[side] for part in parts]).tolist() == whole.tolist()


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(4, 60_000), max_size=6), min_size=1, max_size=20), st.data())
def test_a_large_file_is_read_past_its_mapping_and_says_the_same(tmp_path_factory, sentences, data):
    folder = tmp_path_factory.mktemp("large")
    whole = Ragged.of(sentences, np.uint16)
    with RaggedWriter.open(folder / "a", np.uint16) as file:
        file.append(whole)
    rows = np.array(data.draw(st.lists(st.integers(0, len(sentences) - 1), min_size=1, max_size=9)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LARGE_BYTES", 1)
        large = Ragged.mapped(folder / "a")
        padded_rows = large.padded(rows, 7)
        lengths = [part.tolist() for part, _ in TokenPairs(large, large).lengths_in_parts()]
    assert isinstance(large.bounds(0, 2).base, bytes), "read, not mapped"
    assert isinstance(large._read_tokens(0, 1).base, bytes) or not len(whole.tokens)
    for one, other in zip(padded_rows, whole.padded(rows, 7), strict=True):
        assert one.dtype == other.dtype
        assert one.tolist() == other.tolist()
    assert lengths == [whole.lengths.tolist()]


def large_reader(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LARGE_BYTES", 1)
        return module.reader_of(np.load(path, mmap_mode="r"))


def times_opened(path):
    return sum(file.resolve() == path.resolve() for file in Path("/proc/self/fd").iterdir())


def test_files_are_closed_with_what_reads_them(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(9))
    read = large_reader(path)
    assert read(2, 5).tolist() == [2, 3, 4]
    assert times_opened(path) == 1
    del read
    assert times_opened(path) == 0


def test_a_file_that_was_cut_off_is_named(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(9))
    read = large_reader(path)
    os.truncate(path, path.stat().st_size - 8)
    assert read(2, 8).tolist() == [2, 3, 4, 5, 6, 7]
    with pytest.raises(ValueError, match=r"a\.npy"):
        read(2, 9)


def test_small_files_and_arrays_in_memory_are_not_opened_again(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(9))
    for array in np.load(path, mmap_mode="r"), np.zeros(module.LARGE_BYTES, np.uint8):
        before = times_opened(path)
        read = module.reader_of(array)
        assert read(2, 5).tolist() == array[2:5].tolist()
        assert times_opened(path) == before
