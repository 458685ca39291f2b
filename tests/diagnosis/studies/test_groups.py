"""Groups of an optimiser, the direction of its step, and copies among weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from diagnosis.studies.test_preflight import BATCH, Labelled, layer, loss
from normlab.diagnosis import diagnose
from normlab.diagnosis.rules.finding import Tables
from normlab.diagnosis.studies.first_step import rate
from normlab.diagnosis.table import Table


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


def test_a_rate_that_a_scheduler_multiplies_by_itself_is_named():
    model = Labelled()
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-4)
    torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 5e-4)
    assert cause(optimiser, model) == "squared_rate"


def test_an_optimiser_of_another_model_changes_nothing():
    other = torch.optim.Adam(list(Labelled().parameters())[:5], lr=1e-3)
    assert cause(other, Labelled()) == "not_held"
    copies = torch.optim.Adam(Labelled().parameters(), lr=1e-3)
    found = diagnose(Labelled(), BATCH, loss=loss, optimiser=copies, preset="preflight").cause
    assert found is not None
    assert (found.name, found.severity) == ("not_held", "warning")  # they may be master copies
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


class Late(torch.optim.Adam):
    """Takes no step the first time, as ADOPT does (Taniguchi et al. 2024, arXiv 2411.02853)."""

    def step(self, closure=None):
        first = not self.state
        before = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        super().step(closure)
        if first:
            with torch.no_grad():
                for p, old in zip((p for g in self.param_groups for p in g["params"]), before, strict=True):
                    p.copy_(old)


def test_an_optimiser_that_takes_no_first_step_is_sound():
    assert cause(partial(Late, lr=1e-3)) is None


def judged(optimiser, lr, step, size, *, matrices=6, beta2=None):
    """What is said of the rate of an optimiser, whose first step has this size for matrices of this one."""
    names = [f"layers.{i}.weight" for i in range(matrices)]
    shared = {"role": "ffn_in", "dtype": "float32"}
    group = {"optimiser": optimiser, "lr": lr, "beta2": beta2, "scheduled": 0}
    tables = {
        "groups": Table("groups", (group,)),
        "weights": Table("weights", tuple({"parameter": n, "rms": size, **shared} for n in names)),
        "first_step": Table(
            "first_step", tuple({"parameter": n, "unclipped_rms": step, **shared} for n in names)
        ),
    }
    return [f.name for f in rate(Tables(tables))]


def test_a_rate_is_judged_by_the_step_that_it_makes():
    assert judged("SGD", 1e-4, 4e-8, 0.02) == ["slow_rate"]
    assert judged("SGD", 0.1, 4e-5, 0.02) == []
    assert judged("AdamW", 1e-8, 1e-8, 0.02, beta2=0.999) == ["slow_rate"]
    assert judged("AdamW", 5e-7, 5e-7, 0.1, beta2=0.999) == []  # as in preference optimisation
    assert judged("RAdam", 1e-3, 2e-8, 0.02, beta2=0.999) == []  # whose first steps are not adaptive
    assert judged("Prodigy", 1.0, 1e-8, 0.02, beta2=0.999) == []
    assert judged("AdamW", 0.1, 0.1, 0.02, beta2=0.999) == ["fast_rate"]
    assert judged("AdamW", 0.03, 0.03, 0.02, beta2=0.999, matrices=1) == []  # a prompt that is tuned
