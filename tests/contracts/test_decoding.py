"""Incremental decoding with the cache against decoding every prefix whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from contracts.variants import VARIANTS, VOCAB, assert_close, kind_of, label, perturbed, tokens
from normlab.nn import Cache, Decoder, Seq2Seq, TokenModel

STEPS = 6
KEPT = torch.tensor([2, 0])
"""The sentences that go on after step 3."""
Step = Callable[[Tensor, Cache], Tensor]
Whole = Callable[[Tensor], Tensor]


def of_translation(model: Seq2Seq, rows: Tensor) -> tuple[Step, Whole]:
    """A step of the search for these sentences, and their decoding of whole prefixes `[B·K, T]`."""
    memory, real = (t[rows] for t in model.encode(tokens()[0]))

    def whole(prefix: Tensor) -> Tensor:
        each = [t.repeat_interleave(len(prefix) // len(rows), 0) for t in (memory, real)]
        return model.decode(prefix, *each)

    return lambda last, cache: model.decode_step(last, memory, real, cache), whole


def of_language(model: Decoder, rows: Tensor) -> tuple[Step, Whole]:
    return model.decode_step, model.hidden


@torch.no_grad()
def drive(model: TokenModel, beams: int) -> None:
    """Random continuations and random parents; after step 3 only some sentences go on."""
    searching = of_translation if isinstance(model, Seq2Seq) else of_language
    generator = torch.Generator().manual_seed(11)
    step, whole = searching(model, torch.arange(3))
    cache = Cache(3, beams, STEPS, torch.device("cpu"))
    prefix = torch.randint(4, VOCAB, (3, beams, 1), generator=generator)
    for position in range(STEPS):
        hidden = step(prefix[:, :, -1], cache)
        expected = whole(prefix.flatten(0, 1))[:, -1].view_as(hidden)
        assert_close(hidden, expected)
        parents = torch.randint(beams, prefix.shape[:2], generator=generator)
        words = torch.randint(4, VOCAB, prefix.shape[:2], generator=generator)
        if beams > 1:
            cache.reorder(parents)
            prefix = prefix.gather(1, parents[:, :, None].expand_as(prefix))
        prefix = torch.cat((prefix, words[:, :, None]), 2)
        if position == 3:
            cache.keep(KEPT)
            prefix = prefix[KEPT]
            step, whole = searching(model, KEPT)


@pytest.mark.parametrize(
    "config", [c for c in VARIANTS if issubclass(kind_of(c), (Seq2Seq, Decoder))], ids=label
)
def test_incremental_equals_full_decoding(config):
    model = perturbed(config)
    for beams in (1, 3):
        drive(model, beams)
