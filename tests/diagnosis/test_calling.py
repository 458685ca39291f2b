"""Models that are called in a way of their own, on batches of any kind."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diagnosis.small import BATCH, LABELS, SOURCE, TARGET, labelled, translating
from diagnosis.test_diagnose import X, square, tower
from normlab.diagnosis import Diagnosis, diagnose
from normlab.errors import UserError
from normlab.lab.recipes.build import build

Named = namedtuple("Named", "source target labels")


@dataclass
class Held:
    source: Tensor
    target: Tensor
    labels: Tensor


class Unpacking(nn.Module):
    """Takes a dataclass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Held) -> Tensor:
        return self.model(batch.source, batch.target)


def by_name(model: nn.Module, batch: Any) -> Tensor:
    return model(batch.source, batch.target)


def diagnosed(model: nn.Module, batch: Any, pair: Callable[[Any], Any], **options: Any) -> Diagnosis:
    """Return the diagnosis, in which no study may have failed."""
    found = diagnose(model, batch, lr=1e-3, loss=lambda _, b: labelled(inner(model), pair(b)), **options)
    assert [str(f) for f in found.findings if f.name == "not_done" and f.severity == "warning"] == []
    return found


def inner(model: nn.Module) -> nn.Module:
    return model.model if isinstance(model, Unpacking) else model


KINDS = {
    "tuple": (BATCH, lambda b: b[:2], lambda m, b: m(*b[:2])),
    "named tuple": (Named(*BATCH), lambda b: b[:2], by_name),
    "dataclass": (Held(*BATCH), lambda b: (b.source, b.target), by_name),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_study_calls_the_model_as_it_is_told(kind):
    batch, pair, call = KINDS[kind]
    found = diagnosed(translating("pre").model, batch, pair, call=call)
    named = {"source": SOURCE, "target": TARGET, "labels": LABELS}
    plain = diagnosed(
        translating("pre").model,
        named,
        lambda b: (b["source"], b["target"]),
        call=lambda m, b: m(b["source"], b["target"]),
    )
    assert {"scales", "updates", "curvature"} <= found.tables.keys()
    assert found.tables.keys() == plain.tables.keys()
    for name in ("scales", "structure"):
        assert found.tables[name] == plain.tables[name]


def test_a_batch_may_be_a_dataclass():
    model = Unpacking(translating("pre").model)
    found = diagnosed(model, Held(*BATCH), lambda b: (b.source, b.target), preset="cheap")
    assert {"scales", "sublayer_gradients"} <= found.tables.keys()


def test_a_call_that_fails_is_named():
    with pytest.raises(UserError, match="KeyError"):
        diagnose(tower(), {"y": X}, loss=lambda m, b: m(b["y"]).square().mean(), call=lambda m, b: -m(b["x"]))


def test_a_loss_in_the_output_is_that_of_the_call():
    found = diagnose(tower(), {"x": X}, call=lambda m, b: m(b["x"]).square().mean(), preset="cheap")
    assert found.facts["loss"] == diagnose(tower(), X, loss=square, preset="cheap").facts["loss"]


def test_the_model_is_called_as_its_loss_calls_it():
    """A decoder's loss hands over all tokens but the last one, so that every pass has as many."""
    torch.manual_seed(0)
    model = build("pre", 20, dim=16, heads=2, decoder_layers=2)
    ids = torch.randint(20, (3, 9))

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    diagnosis = diagnose(model, ids, loss=loss, lr=1e-3)
    assert [f.sentence for f in diagnosis.findings if f.name == "not_done"] == []
    assert {"attention", "output_change", "jacobian"} <= set(diagnosis.applied)
