"""Masks: how many tokens, which, and what replaces them."""

from __future__ import annotations

import numpy as np
import pytest

from normlab.lab.data.sentence_pairs import mask_tokens, predictions, word_beginnings
from normlab.lab.data.sentencepiece_model import SentencePieces
from normlab.lab.data.tokenizer import BOS, EOS, PAD, UNK, BytePairs

MASK = 50


@pytest.fixture(scope="module")
def ids():
    """Rows of two segments of different lengths, some with unknown tokens."""
    random = np.random.default_rng(2)
    rows = np.full((400, 64), PAD)
    for row in rows:
        first, second = random.integers(1, 31, 2)
        sides = [random.integers(4, MASK, n).tolist() for n in (first, second)]
        row[: first + second + 3] = [BOS, *sides[0], EOS, *sides[1], EOS]
    rows[:50, 1] = UNK
    return rows


def test_fifteen_percent_of_the_words_and_no_special_token_are_predicted(ids):
    rows = mask_tokens(ids, mask=MASK, begins=None, seed=7)
    for before, after, places, targets in zip(ids, *rows, strict=True):
        count = int((targets != PAD).sum())
        assert count == predictions(int((before > EOS).sum()))
        assert (targets[count:] == PAD).all()
        assert np.array_equal(before[places[:count]], targets[:count])
        assert (targets[:count] > EOS).all()
        assert len(set(places[:count])) == count
        others = np.setdiff1d(np.arange(64), places[:count])
        assert np.array_equal(before[others], after[others])


def test_eighty_percent_become_the_mask_ten_another_token_and_ten_stay(ids):
    shares = np.zeros(3)
    drawn = set()
    for seed in range(20):
        masked, positions, targets = mask_tokens(ids, mask=MASK, begins=None, seed=seed)
        given = targets != PAD
        now = np.take_along_axis(masked, positions, 1)[given]
        true = targets[given]
        drawn |= set(now[(now != MASK) & (now != true)])
        shares += [(now == MASK).mean(), ((now != MASK) & (now != true)).mean(), (now == true).mean()]
    by_chance = 0.1 / (MASK - 4)  # a random entry may be the true one
    assert shares / 20 == pytest.approx([0.8, 0.1 - by_chance, 0.1 + by_chance], abs=0.01)
    assert drawn == set(range(4, MASK)), "every word and no special token"


def test_masks_depend_on_the_seed_alone(ids):
    one, same, other = (mask_tokens(ids, mask=MASK, begins=None, seed=s) for s in (1, 1, 2))
    assert np.array_equal(one[0], same[0])
    assert not np.array_equal(one[1], other[1])
    chosen = np.zeros(64)
    for seed in range(300):
        chosen[mask_tokens(ids[300:301], mask=MASK, begins=None, seed=seed)[1]] += 1
    words = ids[300] > EOS
    assert chosen[words].min() > 0, "every place has its turn"


def test_words_are_masked_whole(ids):
    begins = np.arange(MASK) % 3 == 0  # a word has three tokens on average
    _, positions, every = mask_tokens(ids, mask=MASK, begins=begins, seed=3)
    counts = []
    for before, places, targets in zip(ids, positions, every, strict=True):
        chosen = set(places[targets != PAD].tolist())
        counts.append(len(chosen) / max(1, predictions(int((before > EOS).sum()))))
        for place in chosen:
            end = place + 1
            while before[end] > EOS and not begins[before[end]]:
                assert end in chosen
                end += 1
            start = place
            while not begins[before[start]] and before[start - 1] > EOS:
                start -= 1
                assert start in chosen
    assert max(counts) <= 1
    assert np.mean(counts) > 0.8


@pytest.mark.parametrize("kind", [BytePairs, SentencePieces])
def test_entries_that_begin_a_word_are_found(kind):
    lines = ["the cat sat on the mat", "a catalogue of matters", "cats and mats"] * 20
    tokenizer = kind.train(lines, 45)
    begins = word_beginnings(tokenizer)
    assert begins.shape == (tokenizer.vocab_size,)
    for line, ids in zip(lines[:3], tokenizer.encode(lines[:3]), strict=True):
        words, current = [], []
        for entry in ids:
            if begins[entry] and current:
                words.append(current)
                current = []
            current.append(entry)
        assert tokenizer.decode([*words, current]) == line.split()
