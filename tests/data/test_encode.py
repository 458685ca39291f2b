"""Encoding in parts, here or by other processes, writes what encoding everything at once would write."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normlab.data import encode as module
from normlab.data import lines
from normlab.data.encode import encoded
from normlab.data.prepare import _encode_train
from normlab.data.ragged import Ragged
from normlab.data.text import TextFile
from normlab.data.tokenizer import EOS, BytePairs, Tokenizer

TOKENIZER = BytePairs.train(["ab abab ba", "aa bb é"], 20)
TEXTS = st.lists(st.tuples(*[st.text("abé z\u3000", max_size=9)] * 2), min_size=1, max_size=25)


@pytest.fixture
def processes(monkeypatch):
    """Those that encoded; from the first part on, two of them do."""
    started = []

    class Noted(module._Worker):
        def __init__(self, *args):
            super().__init__(*args)
            started.append(self.process)

    monkeypatch.setattr(module, "_Worker", Noted)
    monkeypatch.setattr(module, "SECONDS_ALONE", 0.0)
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    before = threading.active_count()
    yield started
    assert all(process.returncode is not None for process in started), "a process goes on"
    assert all(process.stdin.closed and process.stdout.closed for process in started)
    assert threading.active_count() == before, "a thread goes on"


class Here(Tokenizer):
    """Cannot encode in this process; another one gets the JSON of one that can."""

    vocab_size, kind = 20, "a test's"

    def encode(self, lines):
        raise AssertionError("this process encoded")

    def decode(self, ids):
        raise NotImplementedError

    def to_json(self):
        return TOKENIZER.to_json()


def written(folder, pairs, at_a_time, max_len, tokenizer=TOKENIZER):
    """What is known of a training text, and the bytes of its files."""
    sides = [list(side) for side in zip(*pairs, strict=True)]
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "LINES_AT_A_TIME", at_a_time)
        tally = _encode_train(folder, tokenizer, (sides[0], sides[1]), max_len)
    return tally, {path.name: path.read_bytes() for path in folder.iterdir()}


@settings(max_examples=60, deadline=None)
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


def test_processes_write_the_same_bytes(tmp_path, processes):
    @settings(max_examples=3, deadline=None, database=None)
    @given(st.lists(TEXTS, min_size=2, max_size=6), st.integers(1, 6), st.integers(2, 7))
    def same(texts, at_a_time, max_len):
        pairs = list(itertools.chain(*texts))
        there = written(tmp_path / "there", pairs, at_a_time, max_len, Here())
        assert len(processes) == 2
        processes.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "usable_cores", lambda: 1)
            here = written(tmp_path / "here", pairs, at_a_time, max_len)
        assert not processes
        assert there[1] == here[1]
        assert there[0].digests == here[0].digests

    same()


def test_a_small_text_stays_in_this_process(monkeypatch, processes):
    monkeypatch.setattr(module, "SECONDS_ALONE", 60.0)
    assert len(list(encoded(TOKENIZER, [(["ab"],)] * 3, np.uint16))) == 3
    assert not processes


def test_no_more_parts_are_read_than_are_worked_on(processes):
    read = []

    def parts():
        for k in range(50):
            read.append(k)
            yield ([f"{'a' * k}"],)

    stream = encoded(Here(), parts(), np.uint16)
    (part, _) = next(stream)
    assert part == ([""],)
    assert len(read) == 5
    stream.close()
    assert len(processes) == 2


@pytest.mark.parametrize("parts_before", [0, 4])
def test_what_a_killed_process_leaves_is_done_here(processes, parts_before):
    texts = [(["ab ba"] * k, ["é z"] * k) for k in range(1, 13)]

    def parts():
        for k, part in enumerate(texts):
            if k == parts_before + 1:
                for process in processes:
                    process.kill()
                    process.wait()
            yield part

    got = list(encoded(TOKENIZER, parts(), np.uint16))
    assert [part for part, _ in got] == texts
    for part, sides in got:
        assert [list(side) for side in sides] == [TOKENIZER.encode(side) for side in part]


def test_an_error_is_the_one_without_processes(processes):
    class Fails(Here):
        def encode(self, lines):
            raise ValueError(f"cannot encode {lines}")

        def to_json(self):
            return "no tokenizer"

    with pytest.raises(ValueError, match=r"^cannot encode \['a'\]$"):
        list(encoded(Fails(), [(["a"],), (["b"],)], np.uint16))
    assert len(processes) == 2


def test_a_line_that_is_not_utf_8_is_told_with_file_and_line(tmp_path, monkeypatch, processes):
    monkeypatch.setattr(lines, "LINES_AT_A_TIME", 1000)
    path = tmp_path / "bad.txt"
    path.write_bytes(b"ab ba\n" * 400_000 + b"a\xff\n")
    said = (
        f"^{path}, line 400001: byte 0xff is not UTF-8; convert the file, for example with iconv -f latin1 "
    )
    with pytest.raises(ValueError, match=said):
        list(encoded(Here(), ((part,) for part in lines.parts(TextFile(path))), np.uint16))
    assert len(processes) == 2
