"""Modes that see torch's functions see them inside multi-head attention, and are gone after a pass."""

from __future__ import annotations

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from normlab.trace.functions import FunctionCall, Functions, Numbered, Which

WIDTH = 8


def attend() -> torch.Tensor:
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(WIDTH, 2, batch_first=True), torch.randn(2, 5, WIDTH)
    return attention(x, x, x, need_weights=False)[0]


def test_calls_inside_of_multi_head_attention_are_numbered_once():
    seen: list[Which] = []
    with Numbered(see=lambda which, _: seen.append(which)):
        attend()
    assert ("scaled_dot_product_attention", 0) in seen
    assert len(set(seen)) == len(seen)


def test_a_result_that_is_held_stands_in_inside_of_multi_head_attention():
    calls: dict[Which, FunctionCall] = {}
    with Numbered(see=calls.__setitem__):
        without = attend()
    (where,) = [which for which in calls if which[0] == "scaled_dot_product_attention"]
    with Numbered(held={where: torch.zeros_like(calls[where].result)}):
        changed = attend()
    assert not torch.equal(without, changed)


def test_no_mode_is_left_and_autograd_functions_are_as_before():
    apply = vars(torch.autograd.Function)["apply"]
    for mode in (Numbered(), Functions(exact=True)):
        with mode:
            attend()
        assert _get_current_function_mode_stack() == []
        assert vars(torch.autograd.Function)["apply"] is apply
