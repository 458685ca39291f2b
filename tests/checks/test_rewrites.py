"""Models and steps that write to weights: the optimizer is judged by what they leave, and they are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from normlab.setups.setup import Setup
from normlab.trace.rewrites import left_by, rewritten
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.trace import Trace

from .tiny import DIM, VOCAB, Decoder, first, groups, loss_of, report_of, tokens

Names = frozenset[str]
JUDGED = (
    "causality",
    "training_equals_evaluation",
    "derivative",
    "update",
    "repeats",
    "state_dict",
    "overfit",
)


def bounded() -> Decoder:
    """A table whose rows are brought to a norm of 1 at most when they are read."""
    model = Decoder()
    model.embed = nn.Embedding(VOCAB, DIM, max_norm=1.0)
    return model


class Normalized(Decoder):
    """Brings the rows of each map back to a norm of 1 as it runs."""

    def forward(self, ids: Tensor) -> Tensor:
        for block in self.blocks:
            block.down.weight.data = F.normalize(block.down.weight.data, dim=-1)
        return super().forward(ids)


class Shrinking(Decoder):
    """Decays its blocks by itself in each training pass."""

    def forward(self, ids: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for p in self.blocks.parameters():
                    p.mul_(0.999)
        return super().forward(ids)


class Standardized(nn.Linear):
    """A map whose module removes the mean of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.sub_(self.weight.mean(1, keepdim=True))
        return super().forward(x)


def standardized() -> Decoder:
    model = Decoder()
    model.blocks[1].up = Standardized(DIM, 32)
    return model


WRITERS: dict[str, tuple[Callable[[], Decoder], str, int]] = {
    "max_norm": (bounded, "embed", 1),
    "rows by data": (Normalized, "", 4),
    "decay in training": (Shrinking, "", 24),
    "a map of its own": (standardized, "blocks.1.up", 1),
}
"""By name: a model, the module that writes, and the number of parameters to which it writes."""


def drawn(make: Callable[[], Decoder]) -> Decoder:
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize("name", WRITERS)
def test_the_parameters_and_the_module_are_named(name: str):
    make, module, count = WRITERS[name]
    model = drawn(make)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    where = rewritten(Trace(model, tokens(), loss_of, training=True))
    assert len(where) == count
    assert set(where.values()) == {module}
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_a_sound_model_writes_to_nothing():
    assert rewritten(Trace(Decoder(), tokens(), loss_of, training=True)) == {}


def test_each_pass_begins_at_the_same_values():
    trace = Trace(drawn(Shrinking), tokens(), loss_of, training=True, dropout=False)
    guarded = trace.again(rewritten=frozenset(rewritten(trace)))
    losses = [float(guarded.again().loss) for _ in range(3)]
    assert losses[0] == losses[1] == losses[2]
    own, left = dict(guarded.model.named_parameters()), left_by(guarded)
    assert left.keys() == {n for n in guarded.rewritten if own[n].any()}
    assert all(torch.equal(x, own[n] * 0.999) for n, x in left.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_what_the_model_does_to_its_weights_is_a_note(name: str):
    make, module, _ = WRITERS[name]
    report = report_of(*JUDGED, model=drawn(make), optimizer=groups)
    assert report.failures == ()
    assert set(report.holds) == set(JUDGED)
    assert {(n.property, n.module) for n in report.notes} == {("update", module), ("derivative", module)}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_the_users_weights_stay(name: str):
    model = drawn(WRITERS[name][0])
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    report_of(*JUDGED, model=model, optimizer=groups(model))
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


class Uncorrected(Adam):
    """Adam without its bias correction."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * 0.1 * p.grad / (0.001**0.5 * p.grad.abs() + group["eps"]))


def test_an_optimizer_that_breaks_its_rule_is_still_named():
    rule = type("Adam", (Uncorrected,), {})
    report = report_of("update", model=drawn(bounded), optimizer=lambda m: rule(m.parameters(), lr=1e-3))
    assert first(report) == ("update", "embed.weight")


class Detached(Standardized):
    """The same map, which also cuts the graph of what it reads."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(0.5 * x + 0.5 * x.detach())


def test_a_gradient_that_is_wrong_elsewhere_is_still_found():
    model = drawn(standardized)
    model.blocks[1].up = Detached(DIM, 32)
    assert first(report_of("derivative", model=model)) == ("derivative", "blocks.1.norm.bias")


def after_the_step(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
    """A step that brings matrices back to the sphere once the optimizer has moved them."""
    model.train()
    optimizer.zero_grad()
    for part in ids.chunk(2):
        (loss_of(model, part) / 2).backward()
    optimizer.step()
    with torch.no_grad():
        for block in model.blocks:
            block.down.weight.copy_(F.normalize(block.down.weight, dim=-1))


def test_a_step_that_normalises_after_the_optimizer_repeats():
    model = drawn(Decoder)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    report = report_of("step", "repeats", model=model, optimizer=optimizer, step=after_the_step)
    assert report.holds == ("step", "repeats")


def test_a_step_under_test_knows_the_modes():
    step = StepUnderTest(Setup(drawn(Shrinking), tokens(), loss=loss_of))
    assert len(step.on_whole_batch.rewritten) == 24
    assert step.forward_writes[False] == {}
    assert len(step.forward_writes[True]) == 24
