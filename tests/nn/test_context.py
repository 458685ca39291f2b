"""Contexts: what a cache and a cross-attention refuse to do without, and the position of a step."""

from __future__ import annotations

import pytest
import torch

from contracts.variants import CONFIG, perturbed
from normlab.nn import Cache, Context


def test_a_cache_must_be_told_of_the_position():
    with pytest.raises(RuntimeError, match=r"begin_step"):
        _ = Cache(1, 1, 4, torch.device("cpu")).mask


def test_cross_attention_refuses_a_context_without_a_memory():
    model = perturbed(CONFIG)
    with pytest.raises(ValueError, match=r"context\.memory"):
        model.decoder(torch.zeros(1, 2, 16, dtype=torch.float64), Context())


def test_the_position_is_that_of_the_last_step():
    cache = Cache(1, 1, 4, torch.device("cpu"))
    assert Context().decode_index is None
    for position in range(3):
        cache.begin_step()
        assert Context(cache=cache).decode_index == position
