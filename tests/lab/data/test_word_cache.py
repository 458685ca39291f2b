"""Encoding word by word gives the ids that encoding line by line gives."""

from __future__ import annotations

import json
import sys
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from normlab.lab.data import tokenizer as module
from normlab.lab.data.tokenizer import BytePairs, LearnedPairs, WordCache

TOKENIZER = BytePairs.train(["a bb abba  ba", "é e\u0301 ab\u2581a", "中文 baba [ pad ] a", "\u0301 ab"], 40)
LINES = st.lists(st.text("ab é\u0301中x\u2581\t\xa0\u3000\u200b[]pd", max_size=12), max_size=8)


def test_ours_is_encoded_word_by_word():
    assert isinstance(TOKENIZER._by_word, WordCache)
    again = BytePairs.of_json(json.loads(TOKENIZER.to_json()))
    assert isinstance(again._by_word, WordCache)


@settings(max_examples=300)
@given(LINES)
@example(["a\u2581b \u2581a", " \u0301a", "[ pad ]", "", "   ", "a\tb", "a\u2028b"])
def test_lines_are_encoded_as_the_library_does(lines):
    assert TOKENIZER.encode(lines) == LearnedPairs.encode(TOKENIZER, lines)


@pytest.mark.slow
def test_no_character_makes_a_difference():
    # Letters of the large blocks are alike, so a few of each stand for all.
    characters = [chr(i) for i in range(sys.maxunicode + 1) if i < 0x3100 or not i % 397]
    lines = [f"a{c}b {c}a b{c} {c}" for c in characters if unicodedata.category(c) != "Cs"]
    every = "".join(lines)
    tokenizer = BytePairs.train([every, " ".join(every)], 20_000)
    assert tokenizer.encode(lines) == LearnedPairs.encode(tokenizer, lines)


def test_words_are_asked_for_once_and_forgotten_in_time(monkeypatch):
    asked = []

    def whole(lines):
        asked.append(list(lines))
        return [[len(line)] for line in lines]

    encode = WordCache(whole, "_")
    assert encode(["a bb", "bb  a", "c_c d"]) == [[1, 2], [2, 1], [5]]
    assert asked == [["c_c d"], ["a", "bb"]]
    monkeypatch.setattr(module, "MOST_WORDS", 3)
    assert encode(["a ccc"]) == [[1, 3]]
    assert encode(["a dddd"]) == [[1, 4]]
    assert asked[2:] == [["ccc"], ["a", "dddd"]]
    assert encode([]) == []


@pytest.mark.parametrize("threads", [1, 4])
def test_threads_get_the_ids_of_the_library_while_words_are_forgotten(monkeypatch, threads):
    monkeypatch.setattr(module, "MOST_WORDS", 5)
    lines = [[f"{'ab' * (i % 7)} {'a' * (k % 5)}" for k in range(40)] for i in range(60)]
    with ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(TOKENIZER.encode, lines)) == [
            LearnedPairs.encode(TOKENIZER, part) for part in lines
        ]


def test_threads_share_what_is_known():
    asked = []

    def whole(words):
        asked.extend(words)
        return [[len(word)] for word in words]

    encode, all_have_begun = WordCache(whole, "_"), Barrier(4)

    def encoded(lines):
        all_have_begun.wait(60)  # so that each thread takes one of the four texts
        return encode(lines)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(encoded, [["a bb ccc"]] * 4)) == [[[1, 2, 3]]] * 4
    assert asked == ["a", "bb", "ccc"], "each word is asked for once, by one of the threads"
