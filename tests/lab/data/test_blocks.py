"""Every token of a stream is predicted once an epoch, from what stands before it in its block."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normlab.lab.data import ragged
from normlab.lab.data.plain import Blocks, block_count, blocks_in_order
from normlab.lab.data.tokenizer import EOS, PAD, UNK


def stream_of(predicted):
    """EOS and then ids that are all different, so that a token tells its place."""
    return np.array([EOS, *range(10, 10 + predicted)], np.uint16)


def pairs(batch):
    """(input, target) of every place that predicts something, row by row."""
    real = batch.target != PAD
    return list(zip(batch.ids[real].tolist(), batch.target[real].tolist(), strict=True))


def epoch(blocks, number):
    first = number * blocks.steps_per_epoch
    return [blocks.at(first + step) for step in range(blocks.steps_per_epoch)]


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 5), st.integers(0, 3))
def test_an_epoch_predicts_every_token_once_from_the_one_before_it(predicted, block_len, rows, number):
    stream = stream_of(predicted)
    blocks = Blocks(stream, block_len=block_len, rows=rows, seed=1)
    batches = epoch(blocks, number)
    seen = [pair for batch in batches for pair in pairs(batch)]
    assert sorted(seen, key=lambda pair: pair[1]) == list(
        zip(stream[:-1].tolist(), stream[1:].tolist(), strict=True)
    )
    assert sum(batch.tokens for batch in batches) == predicted
    assert all(batch.ids.shape == batch.target.shape == (rows, block_len) for batch in batches)
    assert all(batch.padded_tokens == rows * block_len for batch in batches)


def test_blocks_begin_at_multiples_of_their_length():
    stream = stream_of(11)
    batches = list(blocks_in_order(stream, block_len=4, rows=2))
    ids = [batch.ids.tolist() for batch in batches]
    target = [batch.target.tolist() for batch in batches]
    assert ids == [[[EOS, 10, 11, 12], [13, 14, 15, 16]], [[17, 18, 19, PAD]]]
    assert target == [[[10, 11, 12, 13], [14, 15, 16, 17]], [[18, 19, 20, PAD]]]
    assert [batch.tokens for batch in batches] == [8, 3]
    shuffled = {tuple(row) for batch in epoch(Blocks(stream, block_len=4, rows=2, seed=5), 2)
                for row in batch.target.tolist()}  # fmt: skip
    assert shuffled == {tuple(row) for rows in target for row in rows} | {(PAD,) * 4}


def test_a_full_last_block_is_not_followed_by_an_empty_one():
    assert [block_count(stream_of(n), 4) for n in (1, 4, 5, 8)] == [1, 1, 2, 2]


def test_the_order_depends_on_seed_and_epoch_alone():
    stream = stream_of(400)

    def order(seed, number, jump=0):
        blocks = Blocks(stream, block_len=4, rows=3, seed=seed)
        if jump:
            blocks.at(jump)
        return [pair for batch in epoch(blocks, number) for pair in pairs(batch)]

    first = order(1, 0)
    assert first == order(1, 0)
    assert order(1, 3) == order(1, 3, jump=500), "going there and coming back changes nothing"
    assert len({tuple(order(*which)) for which in ((1, 0), (1, 1), (2, 0), (2, 1))}) == 4
    assert first != sorted(first), "blocks are shuffled"


def test_word_dropout_touches_inputs_alone_and_repeats_itself():
    blocks = Blocks(stream_of(4000), block_len=50, rows=8, seed=1)
    plain, dropped = blocks.at(3), blocks.at(3, word_dropout=0.25, seed=9)
    assert torch.equal(plain.target, dropped.target)
    assert torch.equal(dropped.ids, blocks.at(3, word_dropout=0.25, seed=9).ids)
    changed = plain.ids != dropped.ids
    assert (dropped.ids[changed] == UNK).all()
    assert (plain.ids[changed] > EOS).all()
    assert 0.15 < changed.float().mean() < 0.35
    other = blocks.at(3, word_dropout=0.25, seed=10).ids
    assert not torch.equal(dropped.ids, other)


def test_word_dropout_draws_anew_for_every_batch():
    blocks = Blocks(np.array([EOS, *[10] * 320], np.uint16), block_len=10, rows=4, seed=1)
    dropped = {(blocks.at(i, word_dropout=0.5, seed=7).ids == UNK).numpy().tobytes() for i in range(16)}
    assert len(dropped) == 16


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_in_order_every_block_comes_once_whatever_the_rows(rows):
    stream = stream_of(101)
    target = torch.cat([batch.target for batch in blocks_in_order(stream, block_len=8, rows=rows)])
    assert target[target != PAD].tolist() == stream[1:].tolist()
    assert len(target) == 13, "no empty rows"


def test_a_large_stream_is_read_past_its_mapping_and_says_the_same(tmp_path, monkeypatch):
    np.save(tmp_path / "a.npy", stream_of(101))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    monkeypatch.setattr(ragged, "LARGE_BYTES", 1)
    for index in range(12):
        small, large = (Blocks(s, block_len=8, rows=3, seed=2).at(index) for s in (stream_of(101), mapped))
        assert torch.equal(small.ids, large.ids)
        assert torch.equal(small.target, large.target)
