"""The preconditioned sharpness, against eigenvalues of a Hessian that is written out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from diagnosis.small import labelled
from diagnosis.studies.test_curvature import full_hessian, tiny
from normlab.diagnosis.studies.curvature import preconditioned_sharpness

LR, EPS = 0.01, 1e-6


@pytest.mark.parametrize(
    ("make", "adaptive"),
    [(partial(torch.optim.SGD, lr=LR), False), (partial(torch.optim.Adam, lr=LR, eps=EPS), True)],
    ids=["SGD", "Adam"],
)
def test_it_is_the_largest_eigenvalue_in_units_of_the_step(make, adaptive):
    subject = tiny()
    subject.model.double()
    matrix, loss = full_hessian(subject), labelled(subject.model, subject.batch)
    g = torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(subject.model.parameters()))])
    diagonal = LR / (g.abs() + EPS) if adaptive else torch.full_like(g, LR)
    root = torch.where(g == 0, 0.0, diagonal.sqrt())
    expected = torch.linalg.eigvalsh(root[:, None] * matrix * root)[-1].item()
    (row,) = preconditioned_sharpness(replace(subject, optimizer=make), tokens=1000, products=200)
    assert row["quantity"] == "preconditioned_sharpness"
    assert row["value"] == pytest.approx(expected, rel=0.05)
    doubled = replace(subject, optimizer=partial(make, lr=2 * LR))
    (twice,) = preconditioned_sharpness(doubled, tokens=1000, products=200)
    assert twice["value"] == pytest.approx(2 * expected, rel=0.05)


def test_a_weight_that_does_not_move_counts_as_0():
    """What is left is the sharpness in the weights that move."""
    subject = tiny()
    matrix, _ = full_hessian(subject), subject.model.double()
    *_, moving = subject.model.parameters()

    class Still(torch.optim.SGD):
        """Leaves all weights but those of the last parameter as they are."""

        def __init__(self, params: list[nn.Parameter]) -> None:
            super().__init__(params[-1:], lr=LR)

    number = moving.numel()
    expected = LR * torch.linalg.eigvalsh(matrix[-number:, -number:])[-1].item()
    (row,) = preconditioned_sharpness(replace(subject, optimizer=Still), tokens=1000, products=100)
    assert row["value"] == pytest.approx(expected, rel=0.05)
