"""Batches made ahead: the same ones with any number of workers."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from normlab.lab.data.batches import PairBatches
from normlab.lab.data.prefetch import AHEAD, Prefetch
from normlab.lab.data.ragged import Ragged, TokenPairs
from normlab.lab.data.shapes import plan_shapes

WORKERS = (0, 1, 2, 4)


def loaders() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("loader")}


@pytest.fixture(autouse=True)
def _no_thread_stays():
    before = loaders()
    yield
    assert loaders() == before


def pairs_of(count: int) -> TokenPairs:
    draw = np.random.default_rng(0)
    sides = ([draw.integers(4, 30, draw.integers(1, 12)).tolist() for _ in range(count)] for _ in range(2))
    return TokenPairs(*map(Ragged.of, sides))


@pytest.mark.parametrize("stride", [1, 2])
def test_batches_are_the_same_with_any_number_of_workers_over_several_epochs(stride):
    pairs = pairs_of(40)
    shapes = plan_shapes(pairs, 64, 4)
    seen = []
    for workers in WORKERS:
        batches = PairBatches(pairs, shapes, 5)
        stop = 4 * batches.steps_per_epoch
        ahead = Prefetch(
            lambda i, b=batches: b.at(i, word_dropout=0.2, seed=3), workers=workers, stop=stop, stride=stride
        )
        seen.append([ahead.at(i) for i in range(0, stop, stride)])
        ahead.close()
    for made in seen[1:]:
        for batch, other in zip(made, seen[0], strict=True):
            assert torch.equal(batch.source, other.source)
            assert torch.equal(batch.target_in, other.target_in)
            assert torch.equal(batch.target_out, other.target_out)
            assert batch.tokens == other.tokens


@pytest.mark.parametrize("workers", WORKERS)
def test_each_is_made_once_and_none_beyond_the_last(workers):
    made = []
    ahead = Prefetch(lambda i: made.append(i) or i, workers=workers, stop=11, stride=3)
    assert [ahead.at(i) for i in (1, 4, 7, 10)] == [1, 4, 7, 10]
    ahead.close()
    assert sorted(made) == [1, 4, 7, 10]


def test_another_index_than_the_next_is_made_too():
    """A step that is done again asks for earlier ones."""
    ahead = Prefetch(lambda i: i * i, workers=2, stop=100)
    assert [ahead.at(i) for i in (50, 51, 3, 4, 99, 50, 200)] == [2500, 2601, 9, 16, 9801, 2500, 40000]
    ahead.close()


def test_batches_are_made_before_they_are_asked_for():
    made, go = [], threading.Event()

    def make(i):
        made.append(i)
        if i == AHEAD:
            go.set()
        return i

    ahead = Prefetch(make, workers=1, stop=100)
    assert ahead.at(0) == 0
    assert go.wait(10), made
    ahead.close()
    assert made == list(range(AHEAD + 1))


@pytest.mark.parametrize("workers", WORKERS)
def test_an_error_comes_out_where_its_batch_is_asked_for(workers):
    def make(i):
        if i == 2:
            raise OSError(5, "Input/output error", "train.src.tokens.npy")
        return i

    ahead = Prefetch(make, workers=workers, stop=10)
    assert [ahead.at(0), ahead.at(1)] == [0, 1]
    with pytest.raises(OSError, match=r"train\.src\.tokens\.npy"):
        ahead.at(2)
    assert ahead.at(3) == 3
    ahead.close()


def test_closing_waits_for_no_batch_that_has_not_been_begun(tmp_path: Path):
    begun, go = [], threading.Event()

    def make(i):
        begun.append(i)
        assert i == 0 or go.wait(10)
        return i

    ahead = Prefetch(make, workers=1, stop=100)
    ahead.at(0)
    threading.Timer(0.05, go.set).start()
    ahead.close()
    assert len(begun) <= AHEAD
