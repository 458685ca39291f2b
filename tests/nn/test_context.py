"""Incremental decoding with the cache against decoding every prefix whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from contracts.variants import SIZE, VARIANTS, VOCAB, label, perturbed, tokens
from normlab.nn import Cache, Context, Seq2Seq

STEPS = 6


@torch.no_grad()
def drive(model: Seq2Seq, source: Tensor, beams: int, keep: list[int]) -> None:
    """Random continuations and random parents; after step 3 only the sentences ``keep`` go on."""
    generator = torch.Generator().manual_seed(11)
    memory, real = model.encode(source)
    cache = Cache(len(source), beams, STEPS, source.device)
    prefix = torch.full((len(source), beams, 1), 2)
    for step in range(STEPS):
        hidden = model.decode_step(prefix[:, :, -1], memory, real, cache)
        each = [t.repeat_interleave(beams, 0) for t in (memory, real)]
        whole = model.decode(prefix.flatten(0, 1), *each)[:, -1].view_as(hidden)
        torch.testing.assert_close(hidden, whole, rtol=1e-11, atol=1e-11)
        parents = torch.randint(beams, prefix.shape[:2], generator=generator)
        words = torch.randint(4, VOCAB, prefix.shape[:2], generator=generator)
        if beams > 1:
            cache.reorder(parents)
            prefix = prefix.gather(1, parents[:, :, None].expand_as(prefix))
        prefix = torch.cat((prefix, words[:, :, None]), 2)
        if step == 3:
            rows = torch.tensor(keep)
            cache.keep(rows)
            memory, real, prefix = memory[rows], real[rows], prefix[rows]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("config", VARIANTS, ids=label)
def test_incremental_equals_full_decoding(config, beams):
    drive(perturbed(config), tokens()[0], beams, keep=[2, 0])


def test_a_cache_must_be_told_of_the_position():
    model = perturbed(SIZE)
    with pytest.raises(RuntimeError, match=r"^begin_position comes before the first step$"):
        _ = Cache(1, 1, 4, torch.device("cpu")).mask
    with pytest.raises(ValueError, match=r"^attention to the memory needs context\.memory"):
        model.decoder(torch.zeros(1, 2, 16, dtype=torch.float64), Context())
