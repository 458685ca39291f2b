"""Batches and models of unusual shapes: nested tensors, parameters without entries, deep modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normlab
from cases import few

from .decoder import VOCAB, WIDTH, Decoder, setup_of, text

ROWS = [9, 7, 8, 9]
PYTHONS_LIMIT = 1000
"""Frames above one another, unless ``sys.setrecursionlimit`` says otherwise."""


def padded(rows: Tensor) -> Tensor:
    return torch.nested.to_padded_tensor(rows.float(), 0.0).long()


def loss_of_nested(model: nn.Module, batch: Any) -> Tensor:
    ids = padded(batch["rows"])
    targets = ids[:, 1:].clone()
    for row, length in zip(targets, ROWS, strict=True):
        row[length - 1 :] = -100
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), targets.flatten())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_rows_of_different_lengths_may_be_one_nested_tensor(layout: torch.layout) -> None:
    torch.manual_seed(0)
    rows = [torch.randint(1, VOCAB, (length,)) for length in ROWS]
    batch = {"rows": torch.nested.nested_tensor(rows, layout=layout)}
    setup = setup_of(Decoder(), batches=batch, loss=loss_of_nested)
    report = normlab.check(setup, budget_s=600)
    assert report.ok
    assert {"gradients", "repeats", "overfit"} <= set(report.holds)
    assert "rows" in report.untestable
    assert normlab.trial(setup, steps=16, rates=(1e-3, 1e-2), budget_s=600).tried
    after = [row.tolist() for row in batch["rows"].unbind()]
    assert after == [row.tolist() for row in rows]


class Empty(Decoder):
    """Holds adapters of rank 0, and a head of no classes."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.empty(0, WIDTH)), nn.Parameter(torch.empty(WIDTH, 0))
        self.classes = nn.Parameter(torch.empty(0))

    def hidden(self, ids: Tensor) -> Tensor:
        x = super().hidden(ids)
        return x + x @ self.down.T @ self.up.T + self.classes.sum()


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3)


@pytest.mark.parametrize("optimizer", [decayed, lambda model: torch.optim.SGD(model.parameters(), lr=0.1)])
def test_parameters_without_entries_fail_nothing(optimizer: Any) -> None:
    torch.manual_seed(0)
    report = normlab.check(setup_of(Empty(), optimizer=optimizer), budget_s=600)
    assert report.ok
    assert {"gradients", "optimizer_coverage", "groups", "update"} <= set(report.holds)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_instrument_may_run_where_a_script_evaluates(mode: Any) -> None:
    torch.manual_seed(0)
    setup = setup_of(Decoder())
    with mode():
        report = normlab.check(setup, budget_s=600)
        assert not torch.is_grad_enabled()
    assert report.ok
    assert {"gradients", "residual", "update"} <= set(report.holds)


class Inside(nn.Module):
    def __init__(self, inner: nn.Module | None) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x if self.inner is None else self.inner(x)


class Deep(Decoder):
    def __init__(self, depth: int, *, used: bool) -> None:
        super().__init__()
        self.used, self.deep = used, None
        for _ in range(depth):
            self.deep = Inside(self.deep)

    def hidden(self, ids: Tensor) -> Tensor:
        x = super().hidden(ids)
        return self.deep(x) if self.used else x


@pytest.fixture
def deep_recursion() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)  # or torch itself could not walk such modules
    yield
    sys.setrecursionlimit(before)


DEPTH = 400
"""A call of each module takes three frames, which together are more than Python allows by default. A greater
depth costs time: torch walks through modules in a time that grows with the square of their depth."""


@pytest.mark.slow
@pytest.mark.usefixtures("deep_recursion")
@pytest.mark.parametrize("used", few([False, True], 1))
def test_modules_may_be_nested_deeper_than_python_recurses(used: bool) -> None:  # noqa: FBT001
    assert 3 * DEPTH > PYTHONS_LIMIT
    torch.manual_seed(0)
    setup = setup_of(Deep(DEPTH, used=used), batches=text())
    report = normlab.check(setup, budget_s=600)
    assert report.ok
    assert "overfit" in report.holds
    assert normlab.trial(setup, steps=16, rates=(1e-3, 1e-2), budget_s=600).tried
    assert normlab.diagnose(setup, preset="cheap").tables
