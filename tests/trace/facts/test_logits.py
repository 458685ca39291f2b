"""Which tensor is scored, and which matrix it is a product of."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cases import each
from normlab.nn.kernels import linear as kernels_linear

from .reader import VOCAB, WIDTH, Reader, facts, ids


@pytest.mark.parametrize("columns", [False, True])
def test_a_cross_entropy_in_parts_has_the_logits_of_all(columns):
    class InParts(Reader):
        def forward(self, ids):
            logits, targets = super().forward(ids[:, :-1]), ids[:, 1:]
            if not columns:
                logits, targets = logits.flatten(0, 1), targets.flatten()
            parts = zip(logits.split(5, int(columns)), targets.split(5, int(columns)), strict=True)
            losses = [F.cross_entropy(z.flatten(0, -2), y.flatten(), reduction="sum") for z, y in parts]
            return sum(losses) / targets.numel()

    model = InParts()
    read = facts(ids(), model=model, loss=lambda model, batch: model(batch))
    assert (read.shift, read.causal) == (1, True)
    assert torch.equal(read.logits.value, Reader.forward(model, ids()[:, :-1]))
    assert read.unexplained == pytest.approx(0, abs=1e-5)


def test_the_head_is_the_matrix_whose_product_the_logits_are():
    class Tied(Reader):
        def __init__(self):
            super().__init__()
            self.head = nn.Sequential(nn.Linear(WIDTH, VOCAB), nn.Tanh(), nn.Linear(VOCAB, WIDTH))

        def forward(self, ids):
            return super().forward(ids) @ self.embed.weight.T

    read = facts(ids(), model=Tied())
    assert "head" not in read.roles.values()
    assert read.head == "embed.weight"


class Hidden(torch.autograd.Function):
    """A product that a graph shows as nothing known."""

    @staticmethod
    def forward(ctx, x, weight) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)


class Wide(nn.Module):
    """A block whose hidden layer is as wide as there are classes."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, VOCAB), nn.Linear(VOCAB, WIDTH)

    def forward(self, x):
        return x + self.outer(self.inner(x).relu())


@each("product", [Hidden.apply, kernels_linear.MkldnnLinear.apply], ids=["unknown", "our own"])
def test_no_matrix_of_a_block_is_taken_for_the_head(product):
    class Tied(Reader):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Wide() for _ in range(3))
            self.head = nn.Identity()

        def forward(self, ids):
            more = (None, torch.float32) if product == kernels_linear.MkldnnLinear.apply else ()
            return product(super().forward(ids), self.embed.weight, *more)

    read = facts(ids(), model=Tied())
    assert "head" not in read.roles.values()
    assert read.head == "embed.weight"
    assert bool(read.logits.matrices) == (product != Hidden.apply)
