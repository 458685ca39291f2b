from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normlab.base.model_config import derive
from normlab.lab.data.batches import PairBatches, dev_batches
from normlab.lab.data.draws import permutation
from normlab.lab.data.ragged import Ragged, TokenPairs
from normlab.lab.data.shapes import Shape, plan_shapes
from normlab.lab.data.tokenizer import BOS, EOS, PAD, UNK


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


@pytest.mark.parametrize(("count", "max_tokens"), [(1000, 512), (1000, 60), (37, 4096), (1, 100)])
def test_an_epoch_is_every_pair_once(count, max_tokens):
    pairs = made_pairs(count)
    shapes = plan_shapes(pairs, max_tokens)
    batches = PairBatches(pairs, shapes, seed=3)
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
            seen += [source[0] - 4 for source, _ in rows]
            for source, target in rows:
                number = source[0] - 4
                assert (source, target) == (pairs.source[number], pairs.target[number])
        assert sorted(seen) == list(range(count))
        assert short <= 1, "only one batch has empty rows"


def test_a_pair_goes_to_the_smallest_shape_that_holds_it_or_moves_up():
    pairs = made_pairs(2000)
    shapes = plan_shapes(pairs, 256)
    batches = PairBatches(pairs, shapes, seed=0)
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
    shapes = plan_shapes(pairs, 256)
    straight, jumping, other = (PairBatches(pairs, shapes, seed) for seed in (1, 1, 2))
    steps = straight.steps_per_epoch
    first = [straight.at(i).source for i in range(3 * steps)]
    for i in (2 * steps + 1, 0, 3 * steps - 1, steps, 1):
        assert torch.equal(jumping.at(i).source, first[i])
    assert other.steps_per_epoch == steps
    assert not all(torch.equal(other.at(i).source, first[i]) for i in range(steps))
    assert not all(torch.equal(first[steps + i], first[i]) for i in range(steps))
    widths = [source.shape[1] for source in first[:steps]]
    assert widths != sorted(widths), "shapes come mixed"


def test_any_batch_of_any_epoch_is_reached_at_once():
    pairs = made_pairs(500)
    shapes = plan_shapes(pairs, 512)
    straight = PairBatches(pairs, shapes, seed=4)
    steps = straight.steps_per_epoch
    one_pass = [straight.at(i) for i in range(4 * steps)]
    for index in np.random.default_rng(0).integers(0, 4 * steps, 40).tolist():
        fresh = PairBatches(pairs, shapes, seed=4).at(index)
        assert torch.equal(fresh.source, one_pass[index].source)
        assert torch.equal(fresh.target_out, one_pass[index].target_out)


@settings(max_examples=60)
@given(st.integers(1, 400), st.integers(0, 2**64))
def test_a_permutation_sorts_the_draws_of_the_seed(count, seed):
    order, draws = permutation(count, seed), np.random.PCG64(seed).random_raw(count)
    assert order.dtype == np.uint32
    assert sorted(order.tolist()) == list(range(count))
    assert draws[order].tolist() == sorted(draws.tolist())


def plan_at_once(pairs, shapes, seed, epoch):
    """``[(shape, rows), ...]`` of an epoch, by the definition and with everything in memory."""
    source, target = (lengths + 1 for lengths in pairs.lengths)
    fits = [(source <= shape.source) & (target <= shape.target) for shape in shapes]
    bucket = np.argmax(np.stack(fits), axis=0)

    def shuffled(count, purpose):
        draws = np.random.PCG64(derive(seed, purpose, epoch)).random_raw(count)
        return np.argsort(draws, kind="stable")

    order = shuffled(len(pairs), "shuffle")
    plan, left = [], order[:0]
    for k, shape in enumerate(shapes):
        rows = np.concatenate([left, order[bucket[order] == k]])
        full = len(rows) // shape.rows * shape.rows
        plan += [(shape, rows[start : start + shape.rows]) for start in range(0, full, shape.rows)]
        left = rows[full:]
    if len(left):
        plan.append((shapes[-1], left))
    return [plan[i] for i in shuffled(len(plan), "batch_order")]


@settings(max_examples=25)
@given(st.integers(1, 300), st.integers(8, 600), st.integers(0, 99), st.integers(0, 3))
def test_the_plan_is_the_one_made_with_everything_in_memory(count, max_tokens, seed, epoch):
    pairs = made_pairs(count, seed=seed, longest=15)
    shapes = plan_shapes(pairs, max_tokens)
    batches = PairBatches(pairs, shapes, seed)
    plan = plan_at_once(pairs, shapes, seed, epoch)
    assert batches.steps_per_epoch == len(plan)
    for step, (shape, rows) in enumerate(plan):
        batch = batches.at(epoch * len(plan) + step)
        assert batch.source.shape == (shape.rows, shape.source)
        assert [source[0] - 4 for source, _ in rows_of(batch)] == rows.tolist()


def test_order_never_changes():
    # Resumed runs rest on it; NumPy promises these bits for ever.
    pairs = made_pairs(12, longest=3)
    batch = PairBatches(pairs, [Shape(4, 4, 4)], seed=1).at(5)
    assert [source[0] - 4 for source, _ in rows_of(batch)] == [1, 3, 6, 10]


def test_word_dropout():
    pairs = made_pairs(400, shortest=3)
    batches = PairBatches(pairs, plan_shapes(pairs, 4096), seed=1)
    dropped = total = 0
    for step in range(batches.steps_per_epoch):
        whole, batch = batches.at(step), batches.at(step, word_dropout=0.3, seed=7)
        assert torch.equal(batch.target_out, whole.target_out)
        assert batch.tokens == whole.tokens
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


def test_word_dropout_draws_anew_for_every_batch():
    same = Ragged.of([[5] * 9] * 32)
    batches = PairBatches(TokenPairs(same, same), [Shape(10, 10, 4)], seed=1)
    dropped = {batches.at(i, word_dropout=0.5, seed=7).source.numpy().tobytes() for i in range(16)}
    assert len(dropped) == 16


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
    assert batch.tokens == 4
    assert dev_batches(TokenPairs(Ragged.of([]), Ragged.of([])), 100) == []


def test_to_device():
    [batch] = dev_batches(made_pairs(5), 10_000)
    moved = batch.to("meta")
    assert {part.device.type for part in (moved.source, moved.target_in, moved.target_out)} == {"meta"}
    assert moved.tokens == batch.tokens


def test_pairs_that_do_not_fit_are_refused():
    pairs = made_pairs(50)
    with pytest.raises(ValueError, match=r"5 \+ 5 .*plan_shapes"):
        PairBatches(pairs, [Shape(5, 5, 3)], seed=0)
    with pytest.raises(ValueError, match="no pair"):
        PairBatches(TokenPairs(Ragged.of([]), Ragged.of([])), [Shape(5, 5, 3)], seed=0)
