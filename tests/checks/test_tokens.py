"""Every input matters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .tiny import Decoder, report_of, tokens


class Deaf(Decoder):
    """Reads the ids alone of what it is given."""

    def forward(self, ids: Tensor, high: Tensor, low: Tensor) -> Tensor:
        return super().forward(ids)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(**batch)[:, :-1].transpose(1, 2), batch["ids"][:, 1:])


def test_every_input_that_moves_nothing_is_named():
    batch = {"ids": tokens(), "high": torch.rand(4, 3), "low": torch.rand(4, 3)}
    report = report_of("inputs", model=Deaf(), batches=batch, loss=loss_of)
    assert [v.module for v in report.failures] == ["high", "low"]
