import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from normlab.data.batches import Batches, Ragged, Shape, TokenPairs, dev_batches, plan_shapes
from normlab.data.tokenizer import BOS, EOS, PAD, UNK


def made_pairs(count=1000, seed=0, longest=40, shortest=1):
    """Random sentences; the first token of each side numbers the pair."""
    rng = np.random.default_rng(seed)
    source = rng.integers(shortest, longest, count)
    target = np.clip(np.round(source * rng.lognormal(0, 0.2, count)), shortest, longest).astype(int)
    sides = [
        [[4 + i, *rng.integers(4, 4 + count, length - 1)][:length] for i, length in enumerate(lengths)]
        for lengths in (source, target)
    ]
    return TokenPairs(*(Ragged.of(side) for side in sides))


def rows_of(batch):
    """The pairs of a batch read back one by one: what collation should have put there."""
    for source, target_in, target_out in zip(
        *(part.tolist() for part in (batch.source, batch.target_in, batch.target_out)), strict=True
    ):
        if EOS not in source:
            assert set(source) == set(target_in) == set(target_out) == {PAD}
            continue
        end, stop = source.index(EOS), target_out.index(EOS)
        assert set(source[end + 1 :]) | set(target_out[stop + 1 :]) | set(target_in[stop + 1 :]) <= {PAD}
        assert target_in[: stop + 1] == [BOS, *target_out[:stop]]
        yield source[:end], target_out[:stop]


def test_ragged_arrays():
    ragged = Ragged.of([[5, 6], [], [7]])
    assert len(ragged) == 3
    assert [ragged[i] for i in range(3)] == [[5, 6], [], [7]]
    assert ragged.lengths.tolist() == [2, 0, 1]
    ids, lengths = ragged.padded(np.array([2, 1, 0]), 3)
    assert ids.tolist() == [[7, PAD, PAD], [PAD] * 3, [5, 6, PAD]]
    assert lengths.tolist() == [1, 0, 2]


def naive_positions(corners, source, target):
    """Padded positions when every pair goes to the first corner that holds it."""
    return sum(
        next(s + t for s, t in corners if a + 1 <= s and b + 1 <= t)
        for a, b in zip(source, target, strict=True)
    )


@pytest.mark.parametrize("count", [1, 2, 16])
@pytest.mark.parametrize("max_tokens", [30, 4096])
def test_shapes(count, max_tokens):
    source, target = made_pairs().lengths
    shapes = plan_shapes(source, target, max_tokens, count)
    assert 1 <= len(shapes) <= count
    for small, large in itertools.pairwise(shapes):
        assert small.source <= large.source
        assert small.target <= large.target
        assert (small.source, small.target) != (large.source, large.target)
    assert (shapes[-1].source, shapes[-1].target) == (source.max() + 1, target.max() + 1)
    for shape in shapes:
        assert shape.rows == max(1, max_tokens // (shape.source + shape.target))


def test_two_shapes_are_the_best_two():
    # With two shapes there is one corner to place, and the search is exhaustive.
    source, target = made_pairs(200, longest=12).lengths
    last = (int(source.max()) + 1, int(target.max()) + 1)
    best = min(
        naive_positions([corner, last], source, target)
        for corner in itertools.product(range(1, last[0] + 1), range(1, last[1] + 1))
    )
    shapes = plan_shapes(source, target, 100, 2)
    assert naive_positions([(shape.source, shape.target) for shape in shapes], source, target) == best


def test_more_shapes_pad_less():
    source, target = made_pairs(3000, longest=80).lengths
    real = float((source + target + 2).sum())
    share = {}
    for count in (1, 4, 16):
        shapes = plan_shapes(source, target, 4096, count)
        share[count] = real / naive_positions([(s.source, s.target) for s in shapes], source, target)
    assert share[1] < share[4] < share[16]
    assert share[16] > 0.8


def test_shapes_of_odd_texts():
    one = np.array([5])
    assert plan_shapes(one, one, 100) == [Shape(6, 6, 8)]
    assert plan_shapes(np.full(50, 5), np.full(50, 7), 100) == [Shape(6, 8, 7)]
    assert plan_shapes(one, one, 4) == [Shape(6, 6, 1)]
    long = np.array([3, 5000, 20_000])
    shapes = plan_shapes(long, long, 4096)
    assert (shapes[-1].source, shapes[-1].target, shapes[-1].rows) == (20_001, 20_001, 1)
    with pytest.raises(ValueError, match="no pair"):
        plan_shapes(one[:0], one[:0], 100)


@pytest.mark.parametrize(("count", "max_tokens"), [(1000, 512), (1000, 60), (37, 4096), (1, 100)])
def test_an_epoch_is_every_pair_once(count, max_tokens):
    pairs = made_pairs(count)
    shapes = plan_shapes(*pairs.lengths, max_tokens)
    batches = Batches(pairs, shapes, seed=3)
    for epoch in range(2):
        seen, short, plain = [], 0, {(s.rows, s.source, s.target) for s in shapes}
        for step in range(batches.steps_per_epoch):
            batch = batches.at(epoch * batches.steps_per_epoch + step)
            assert (*batch.source.shape, batch.target_in.shape[1]) in plain
            assert batch.target_in.shape == batch.target_out.shape
            assert {part.dtype for part in (batch.source, batch.target_in, batch.target_out)} == {torch.int64}
            rows = list(rows_of(batch))
            short += len(rows) < len(batch.source)
            assert (
                batch.tokens == sum(len(target) + 1 for _, target in rows) == (batch.target_out != PAD).sum()
            )
            assert batch.source_tokens == (batch.source != PAD).sum()
            seen += [source[0] - 4 for source, _ in rows]
            for source, target in rows:
                number = source[0] - 4
                assert (source, target) == (pairs.source[number], pairs.target[number])
        assert sorted(seen) == list(range(count))
        assert short <= 1, "only one batch has empty rows"


def test_a_pair_goes_to_the_smallest_shape_that_holds_it_or_moves_up():
    pairs = made_pairs(2000)
    shapes = plan_shapes(*pairs.lengths, 256)
    batches = Batches(pairs, shapes, seed=0)
    moved = Counter()
    for step in range(batches.steps_per_epoch):
        batch = batches.at(step)
        at = [(s.source, s.target) for s in shapes].index((batch.source.shape[1], batch.target_in.shape[1]))
        for source, target in rows_of(batch):
            first = next(k for k, s in enumerate(shapes) if len(source) < s.source and len(target) < s.target)
            assert first <= at
            moved[at] += first < at
    assert all(moved[k] < shape.rows + max(s.rows for s in shapes[: k + 1]) for k, shape in enumerate(shapes))


def test_order_depends_on_seed_and_epoch_alone():
    pairs = made_pairs(300)
    shapes = plan_shapes(*pairs.lengths, 256)
    straight, jumping, other = (Batches(pairs, shapes, seed) for seed in (1, 1, 2))
    steps = straight.steps_per_epoch
    first = [straight.at(i).source for i in range(3 * steps)]
    for i in (2 * steps + 1, 0, 3 * steps - 1, steps, 1):
        assert torch.equal(jumping.at(i).source, first[i])
    assert other.steps_per_epoch == steps
    assert not all(torch.equal(other.at(i).source, first[i]) for i in range(steps))
    assert not all(torch.equal(first[steps + i], first[i]) for i in range(steps))
    widths = [source.shape[1] for source in first[:steps]]
    assert widths != sorted(widths), "shapes come mixed"


def test_order_never_changes():
    # Resumed runs rest on it; NumPy promises these bits for ever.
    pairs = made_pairs(12, longest=3)
    batch = Batches(pairs, [Shape(4, 4, 4)], seed=1).at(5)
    assert [source[0] - 4 for source, _ in rows_of(batch)] == [1, 3, 6, 10]


def test_word_dropout():
    pairs = made_pairs(400, shortest=3)
    batches = Batches(pairs, plan_shapes(*pairs.lengths, 4096), seed=1)
    dropped = total = 0
    for step in range(batches.steps_per_epoch):
        whole, batch = batches.at(step), batches.at(step, word_dropout=0.3, seed=7)
        assert torch.equal(batch.target_out, whole.target_out)
        assert (batch.tokens, batch.source_tokens) == (whole.tokens, whole.source_tokens)
        for before, after in ((whole.source, batch.source), (whole.target_in, batch.target_in)):
            changed = before != after
            assert (after[changed] == UNK).all()
            assert (before[changed] > EOS).all()
            dropped += int(changed.sum())
            total += int((before > EOS).sum())
        assert torch.equal(batches.at(step, word_dropout=0.3, seed=7).source, batch.source)
        assert not torch.equal(batches.at(step, word_dropout=0.3, seed=8).source, batch.source)
    assert dropped / total == pytest.approx(0.3, abs=0.02)
    everything = batches.at(0, word_dropout=1.0)
    assert set(everything.source.unique().tolist()) <= {PAD, UNK, EOS}


@pytest.mark.parametrize("max_tokens", [1, 60, 500, 10**6])
def test_dev_batches_cover_every_pair_once(max_tokens):
    pairs = made_pairs(200)
    batches = dev_batches(pairs, max_tokens)
    seen = [source[0] - 4 for batch in batches for source, _ in rows_of(batch)]
    assert sorted(seen) == list(range(200))
    totals = [len(pairs.source[i]) + len(pairs.target[i]) for i in seen]
    assert totals == sorted(totals)
    for batch in batches:
        rows, positions = len(batch.source), batch.source.numel() + batch.target_in.numel()
        assert rows == 1 or positions <= max_tokens
        assert (batch.source[:, -1] != PAD).any()
        assert (batch.target_in[:, -1] != PAD).any()


def test_dev_batches_take_empty_sides():
    [batch] = dev_batches(TokenPairs(Ragged.of([[], [5]]), Ragged.of([[6, 7], []])), 100)
    assert list(rows_of(batch)) == [([5], []), ([], [6, 7])]
    assert (batch.tokens, batch.source_tokens) == (4, 3)
    assert dev_batches(TokenPairs(Ragged.of([]), Ragged.of([])), 100) == []


def test_to_device():
    [batch] = dev_batches(made_pairs(5), 10_000)
    moved = batch.to("meta")
    assert {part.device.type for part in (moved.source, moved.target_in, moved.target_out)} == {"meta"}
    assert moved.tokens == batch.tokens


def test_pairs_that_do_not_fit_are_refused():
    pairs = made_pairs(50)
    with pytest.raises(ValueError, match=r"holds 5 \+ 5 positions, but the pairs need up to"):
        Batches(pairs, [Shape(5, 5, 3)], seed=0)
    with pytest.raises(ValueError, match="no pair"):
        Batches(TokenPairs(Ragged.of([]), Ragged.of([])), [Shape(5, 5, 3)], seed=0)
