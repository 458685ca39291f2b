"""What a check does with little time, and how much it holds of a large model."""

from __future__ import annotations

import gc
import math
import re
import sys
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import normlab
import normlab.checks.check
from normlab.checks.property import PROPERTIES
from normlab.errors import UserError
from normlab.setups.setup import Setup
from normlab.trace import autograd, gradients, optimizers, passes, preparation
from normlab.trace.budget import Deadline, OutOfTimeError, passes_until
from normlab.trace.copies import copied_model
from normlab.trace.estimates import Estimates
from normlab.trace.preparation import prepare
from normlab.trace.restore import restored
from normlab.trace.starts import Fresh
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.weights import weights_apart
from zoo import Bigrams

check_module = sys.modules["normlab.checks.check"]
VOCAB, WIDTH = 13, 1237
"""The width is a prime, by which tensors of the model are told from all others."""


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@pytest.fixture
def setup() -> Setup:
    return Setup(
        Bigrams(VOCAB, WIDTH),
        torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(0)),
        loss_of,
    )


def bytes_in_weights() -> int:
    """How many bytes of tensors with the model's width are in memory, but for what autograd alone holds."""
    gc.collect()
    alive = [x for x in gc.get_objects() if issubclass(type(x), Tensor) and WIDTH in x.shape]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in alive}
    return sum(storages.values())


def every_model_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (passes, preparation):
        monkeypatch.setattr(module, "LARGE_MODEL", 0)


def test_a_large_model_is_in_memory_once_more_in_float64_and_once_as_it_was(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bytes_in_weights()
    every_model_is_large(monkeypatch)
    with restored(setup):
        step = StepUnderTest(setup)
        prepare(step)
        # the model as it was lies in a storage of no tensor: ``restored`` holds one copy of its bits
        assert bytes_in_weights() <= 3 * model


def test_a_large_model_runs_itself_and_stays_as_it_was(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: p.detach().clone() for name, p in setup.model.named_parameters()}
    small = StepUnderTest(setup)
    losses = [float(small.unchanged.loss), float(small.exact.loss)]
    every_model_is_large(monkeypatch)
    large = StepUnderTest(setup)
    assert large.unchanged.model is setup.model
    assert large.is_exact
    assert [float(large.unchanged.loss), float(large.exact.loss)] == losses
    assert all(torch.equal(p, before[name]) for name, p in setup.model.named_parameters())


def test_no_copy_begins_after_the_budget(setup: Setup) -> None:
    with passes_until(Deadline(at=0.0)), pytest.raises(OutOfTimeError):
        copied_model(setup.model)


def test_weights_are_kept_apart_from_the_model_and_from_copies_with_others(setup: Setup) -> None:
    twin = copied_model(setup.model)
    nn.init.normal_(twin.head.weight)
    twin.head.bias = setup.model.head.bias
    kept = weights_apart(setup.model, twin)
    assert kept["embed.weight"].data_ptr() == twin.embed.weight.data_ptr()
    for name in ("head.weight", "head.bias"):
        p = setup.model.get_parameter(name)
        assert torch.equal(kept[name], p)
        assert kept[name].data_ptr() not in (p.data_ptr(), twin.get_parameter(name).data_ptr())


def test_a_model_that_does_not_fit_in_memory_is_refused(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_model_is_large(monkeypatch)
    monkeypatch.setattr(preparation, "available_bytes", lambda: 11 * count_of(setup))
    with pytest.raises(UserError, match="check a smaller one"):
        normlab.check(setup)
    monkeypatch.setattr(preparation, "available_bytes", lambda: 13 * count_of(setup))
    assert normlab.check(setup).holds


def count_of(setup: Setup) -> int:
    return sum(p.numel() for p in setup.model.parameters())


def test_what_does_not_fit_in_memory_is_left_out(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    every_model_is_large(monkeypatch)
    monkeypatch.setattr(check_module, "available_bytes", lambda: 23 * count_of(setup))
    report = normlab.check(setup)
    dear = {name for name, test in PROPERTIES.items() if "gradient" in test.uses or test.steps}
    assert set(report.unjudged) <= dear
    assert {"derivative", "gradients"} <= set(report.unjudged)
    assert "causality" in report.holds


def test_what_applies_does_not_depend_on_the_budget(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = normlab.check(setup)
    asking = {test.asking for test in PROPERTIES.values()}
    monkeypatch.setattr(Estimates, "seconds_of", lambda _, cost: 0.0 if cost in asking else math.inf)
    report = normlab.check(setup)
    assert len(report.judged) < len(reached.judged)
    told_by_passes = {"norms", "order"}
    assert set(report.applicable) - told_by_passes == set(reached.applicable)


def test_the_budget_begins_before_anything_is_copied(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10_000))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))
    kept = restored

    def slowly(setup: Setup) -> Any:
        for _ in range(9):
            next(now)
        return kept(setup)

    monkeypatch.setattr(check_module, "restored", slowly)
    with pytest.raises(UserError, match="1 pass,"):
        normlab.check(setup, budget_s=9.0)


def test_no_model_is_drawn_after_the_budget(setup: Setup) -> None:
    fresh = Fresh(replace(setup, make=lambda: Bigrams(VOCAB, WIDTH)))
    with passes_until(Deadline(at=0.0)), pytest.raises(OutOfTimeError):
        _ = fresh.one


class Differences(TorchFunctionMode):
    """Counts, whenever two tensors are subtracted, how many of some tensors are in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.watched, self.counts = list[weakref.ref[Tensor]](), list[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.sub:
            self.counts.append(sum(reference() is not None for reference in self.watched))
        return func(*args, **(kwargs or {}))


def test_gradients_of_a_term_are_let_go_as_they_are_used(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, differences = StepUnderTest(setup), Differences()

    def gradients_in(*args: Any, **kwargs: Any) -> list[Tensor | None]:
        results = autograd.gradients_in(*args, **kwargs)
        if len(results) > 1:  # not those of the logits
            differences.watched += [weakref.ref(x) for x in results if x is not None]
        return results

    places = step.facts.scored_places
    monkeypatch.setattr(gradients, "gradients_in", gradients_in)
    with differences:
        through = gradients.through_logits(step.training, places)
    assert list(through) == [name for name, _ in setup.model.named_parameters()]
    assert differences.counts[-3:] == [6, 4, 2]


def test_copies_that_nothing_steps_are_made_once(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = list[str]()
    monkeypatch.setattr(optimizers, "copied_model", lambda *given: copies.append("") or copied_model(*given))
    step = StepUnderTest(replace(setup, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1)))
    prepare(step)
    before = len(copies)
    asked = [one for one in check_module.properties() if one.name in ("optimizer_coverage", "groups")]
    assert check_module.examine(step, asked).failures == ()
    assert len(copies) == before + 1


def test_a_refusal_asks_for_the_passes_and_once_for_what_comes_before(setup: Setup) -> None:
    step = StepUnderTest(setup, budget_s=50.0, started=time.monotonic() - 100)
    with pytest.raises(UserError) as refused:
        prepare(step)
    given, enough = map(int, re.findall(r"budget_s=(\d+)", str(refused.value)))
    assert given == 50
    assert 100 < enough < 1000


def test_a_model_without_numbers_is_refused_for_that_and_not_for_memory(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_model_is_large(monkeypatch)
    monkeypatch.setattr(preparation, "available_bytes", lambda: 0)
    with pytest.raises(UserError, match="numbers"):
        normlab.check(replace(setup, model=setup.model.to("meta")))
