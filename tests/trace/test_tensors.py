"""Tensors are found in nested values."""

from __future__ import annotations

import torch

from normlab.trace.tensors import tensors_in

from .nested import Out


def test_tensors_in_nested_values():
    a, b, c = torch.zeros(1), torch.ones(1), torch.ones(2)
    found = dict(tensors_in(({"a": a, "none": None}, [1, Out(b, (c,))], "text")))
    assert found.keys() == {(0, "a"), (1, 1, "hidden"), (1, 1, "more", 0)}
    assert found[1, 1, "more", 0] is c
