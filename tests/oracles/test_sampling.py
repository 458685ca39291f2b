"""Draws against a plain Python sampler that decodes every prefix whole, and against the probabilities."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch

from contracts.variants import VOCAB
from normlab.nn.decode import FREE, Bounds, likeliest, nucleus, sample, truncated
from oracles import searches
from oracles.searches import Asked
from oracles.test_searches import Bigrams, next_log_p, searcher, sources, table


def numbers(seed: int, count: int = 40) -> list[float]:
    """The uniform numbers from which a sample with this seed is drawn."""
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 3, 1.0), (1.0, 0, 0.7), (1.3, 5, 0.8), (1.0, 99, 1.0)],
)
def test_a_batch_of_draws_equals_plain_ones(temperature, top_k, top_p):
    model, source = searcher("residual", 15), sources(6)
    prefix = torch.tensor([[FREE, FREE], [7, 9], [FREE, FREE], [5, FREE], [FREE, FREE], [FREE, FREE]])
    seeds = [[10 * row + k for k in range(3)] for row in range(6)]
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    batch = sample(model, source, seeds, Bounds(0.5, min_length=2, prefix=prefix), partial(truncated, **how))
    for row, (found, ids) in enumerate(zip(batch, source, strict=True)):
        length = int((ids != 0).sum())
        begin = tuple(v for v in prefix[row].tolist() if v != FREE)
        asked = Asked(int(0.5 * length) + 10, least=2, prefix=begin)
        for seed, h in zip(seeds[row], found, strict=True):
            score, expected = searches.draw(next_log_p(model, ids), numbers(seed), asked, **how)
            assert h.ids == expected
            assert h.score == pytest.approx(score, abs=1e-4)
    assert len({tuple(h.ids) for found in batch for h in found}) > 6, "draws that are all alike test little"


def test_a_draw_depends_on_its_seed_and_sentence_alone():
    model, source = searcher("residual", 15), sources(12)
    seeds = [[100 + row, 200 + row] for row in range(12)]
    together = sample(model, source, seeds, Bounds(1.5), truncated)
    for row, ids in enumerate(source):
        (alone,) = sample(model, ids[None], [[200 + row]], Bounds(1.5), truncated)
        assert alone[0].ids == together[row][1].ids
    assert [[h.ids for h in f] for f in sample(model, source, seeds, Bounds(1.5), truncated)] == [
        [h.ids for h in found] for found in together
    ]


def test_draws_are_as_frequent_as_they_are_likely():
    """Half of 4000 samples end at once, 0.3 x 0.25 say 5 alone; chi-squared, 3 degrees of freedom, 0.1%."""
    model = Bigrams(table(t2={3: 0.5, 5: 0.3, 6: 0.2}, t5={3: 0.25, 6: 0.75}, t6={3: 1.0}))
    (found,) = sample(model, torch.tensor([[4, 3]]), [list(range(4000))], Bounds(1.5), truncated)
    counts = Counter(tuple(h.ids) for h in found)
    expected = {(): 0.5, (5,): 0.075, (5, 6): 0.225, (6,): 0.2}
    assert counts.keys() == expected.keys()
    assert sum((counts[ids] - 4000 * p) ** 2 / (4000 * p) for ids, p in expected.items()) < 16.27
    for h in found:
        assert h.score == pytest.approx(np.log(expected[tuple(h.ids)]), abs=1e-5)


def test_a_cold_draw_is_greedy_and_so_is_one_of_the_likeliest_alone():
    model, source = searcher("residual", 15), sources(6)
    greedy = [
        searches.beam_search(next_log_p(model, ids), 1, Asked(int(1.5 * int((ids != 0).sum())) + 10))[0][1]
        for ids in source
    ]
    seeds = [[row] for row in range(6)]
    for how in ({"temperature": 1e-3}, {"top_k": 1}, {"top_p": 1e-6}):
        assert [
            f[0].ids for f in sample(model, source, seeds, Bounds(1.5), partial(truncated, **how))
        ] == greedy


def test_masked_types_are_never_drawn():
    allowed = torch.ones(VOCAB, dtype=torch.bool)
    allowed[[0, 1, 2, 4, 6, 9]] = False
    found = sample(
        searcher(), sources(6), [[row, 50 + row] for row in range(6)], Bounds(1.5, allowed=allowed), truncated
    )
    words = [word for row in found for h in row for word in h.ids]
    assert words
    assert allowed[words].all()


def test_a_diverged_model_draws_nothing():
    model = Bigrams(torch.full((8, 8), float("nan")))
    assert sample(model, torch.tensor([[4, 3]]), [[1, 2]], Bounds(1.5), truncated) == [[]]


def test_the_likeliest_and_the_nucleus_by_hand():
    p = torch.tensor([0.1, 0.4, 0.2, 0.3]).double()
    kept = {k: likeliest(p.log(), k).isfinite().tolist() for k in (0, 1, 3, 4, 9)}
    assert kept[1] == [False, True, False, False]
    assert kept[3] == [False, True, True, True]
    assert kept[0] == kept[4] == kept[9] == [True] * 4
    assert nucleus(p.log(), 0.39).isfinite().tolist() == [False, True, False, False]
    assert nucleus(p.log(), 0.41).isfinite().tolist() == [False, True, False, True]
    assert nucleus(p.log(), 0.71).isfinite().tolist() == [False, True, True, True]
    assert nucleus(p.log(), 1.0).isfinite().all()
