"""How a model is called, and what is inside its wrappers."""

from __future__ import annotations

import torch
from torch import nn

from normlab.trace.modules import call_model, unwrap

from .nested import Whole, X


def test_batches_are_passed_by_their_kind():
    y = torch.ones(2, 3, 4)
    results = [call_model(Whole(), batch)["out"] for batch in (X, (X, y), [X, y], {"x": X, "y": y})]
    assert [torch.equal(out, 4 * X + (i > 0)) for i, out in enumerate(results)] == [True] * 4


def test_wrappers_are_taken_off():
    model = Whole()
    assert unwrap(nn.DataParallel(torch.compile(model, backend="eager"))) is model
    holder = nn.Sequential()
    holder.module = model
    assert unwrap(holder) is holder, "a module called module is no wrapper"
