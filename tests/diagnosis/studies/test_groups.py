"""Groups of an optimiser, the direction of its step, and copies among weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from diagnosis.studies.test_preflight import BATCH, Labelled, layer, loss
from normlab.diagnosis import diagnose


def cause(optimiser, model=None):
    found = diagnose(model or Labelled(), BATCH, loss=loss, optimiser=optimiser, preset="preflight")
    return None if found.cause is None else found.cause.name


def in_groups(parameters, matrices, vectors):
    lists = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]
    return torch.optim.AdamW([{"params": lists[0], "lr": matrices}, {"params": lists[1], "lr": vectors}])


@pytest.mark.parametrize(
    ("optimiser", "found"),
    [
        (partial(in_groups, matrices=1e-4, vectors=1e-2), "group_rate"),
        (partial(in_groups, matrices=1e-4, vectors=1e-3), None),
        (partial(torch.optim.Adam, lr=1e-3, betas=(0.999, 0.9)), "betas"),
        (partial(torch.optim.Adam, lr=1e-3, eps=0.5), "large_epsilon"),
        (partial(torch.optim.Adam, lr=1e-3, maximize=True), "uphill"),
        (partial(torch.optim.Adam, lr=1e-3, weight_decay=10.0), "decay"),
        (partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1), None),
        (partial(torch.optim.SGD, lr=1e-2, momentum=0.9), None),
        (partial(torch.optim.AdamW, lr=1e-5), None),
        (partial(torch.optim.AdamW, lr=1e-7), "slow_rate"),
        (partial(torch.optim.AdamW, lr=0.1), "fast_rate"),
        (partial(torch.optim.SGD, lr=1.0), None),
        (partial(torch.optim.SGD, lr=1e-4), "slow_rate"),
    ],
)
def test_settings_that_do_not_fit_together_are_named(optimiser, found):
    assert cause(optimiser) == found


def test_an_optimiser_that_is_there_already_is_read_by_the_paths_of_the_model():
    model = Labelled()
    optimiser = in_groups(list(model.parameters()), matrices=1e-2, vectors=1e-4)
    found = diagnose(model, BATCH, loss=loss, optimiser=optimiser, preset="preflight")
    assert [row["first"] for row in found.tables["groups"]] == [
        "gpt.embedding.weight",
        "gpt.layers.0.norm1.weight",
    ]
    assert [row["lr"] for row in found.tables["groups"]] == [1e-2, 1e-4]


def test_the_rate_at_which_a_schedule_begins_is_not_too_small():
    model = Labelled()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1e-4 * (step + 1))
    assert optimiser.param_groups[0]["lr"] == pytest.approx(1e-7)
    assert cause(optimiser, model) is None


def test_an_optimiser_of_another_model_changes_nothing():
    other = torch.optim.Adam(Labelled().parameters(), lr=1e-3)
    assert cause(other, Labelled()) == "not_held"
    copied = lambda parameters: torch.optim.Adam([p.detach().clone() for p in parameters])  # noqa: E731
    assert cause(copied) == "not_held"


def test_a_schedule_that_begins_at_zero_changes_nothing_and_is_no_fault():
    model = Labelled()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: step / 100)
    assert optimiser.param_groups[0]["lr"] == 0.0
    assert cause(optimiser, model) is None


def test_a_matrix_that_is_a_copy_of_another_is_named():
    model = Labelled()
    with torch.no_grad():
        layer(model, 3).up.weight.copy_(layer(model, 1).up.weight)
        for one in (layer(model, 0), layer(model, 1)):
            nn.init.zeros_(one.down.weight)  # equal, and no copies
    found = diagnose(model, BATCH, loss=loss, lr=1e-3, preset="preflight")
    copies = [f for f in found.findings if f.name == "copied_weights"]
    assert [f.module for f in copies] == ["gpt.layers.3.up"]
    assert copies[0].numbers == {"copies": 1}
