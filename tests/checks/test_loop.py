"""The user's own step, the schedule, repetition and learning."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
)

from .tiny import Decoder, first, groups, loss_of, report_of

Whole = Callable[[nn.Module, Any, Any, Any], Any]


def with_step(whole: Whole, *names: str, **setup: Any) -> Any:
    torch.manual_seed(0)
    model = Decoder()
    return report_of(*names, **{"model": model, "optimizer": groups(model), "step": whole, **setup})


def sound(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> Tensor:
    """Two micro-batches, clipped, and a step of the scheduler."""
    model.train()
    optimizer.zero_grad()
    for part in ids.chunk(2):
        (loss_of(model, part) / 2).backward()
    clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    return torch.zeros(())


def faulty(before: str = "", between: str = "", after: str = "", divisor: float = 2) -> Whole:
    """A step of two micro-batches with something done before, between and after its backward passes."""
    acts: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
        "zero": lambda m, o: o.zero_grad(),
        "step": lambda m, o: o.step(),
        "clip": lambda m, o: clip_grad_norm_(m.parameters(), 0.1),
        "clip blocks": lambda m, o: clip_grad_norm_(m.blocks.parameters(), 0.1),
        "unscale": lambda m, o: [p.grad.div_(8) for p in m.parameters() if p.grad is not None],
        "eval": lambda m, o: m.eval(),
    }

    def whole(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
        model.train()
        for act in filter(None, before.split(",")):
            acts[act](model, optimizer)
        for part in ids.chunk(2):
            (loss_of(model, part) / divisor).backward()
            for act in filter(None, between.split(",")):
                acts[act](model, optimizer)
        for act in filter(None, after.split(",")):
            acts[act](model, optimizer)

    return whole


def by_hand(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
    """Clipped by hand, and before that by value."""
    model.train()
    optimizer.zero_grad()
    loss_of(model, ids).backward()
    clip_grad_value_(model.parameters(), 0.01)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    for p in model.parameters():
        p.grad.mul_(min(1.0, 0.05 / float(norm)))
    optimizer.step()


def scaled(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
    """Scaled for a half precision, unscaled, then clipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model.train()
    optimizer.zero_grad()
    scaler.scale(loss_of(model, ids)).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()


def padded() -> Tensor:
    ids = torch.arange(32).reshape(4, 8) % 23
    ids[2:, 3:] = -100
    return ids


def padded_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1].clamp_min(0)).transpose(1, 2), ids[:, 1:], ignore_index=-100)


@pytest.mark.parametrize("whole", [sound, by_hand, scaled])
def test_a_sound_step_sees_the_gradient_of_the_whole_batch(whole: Whole):
    report = with_step(whole, "step", "repeats", "overfit")
    assert report.holds == ("step", "repeats", "overfit")


@pytest.mark.parametrize(
    "whole",
    [
        faulty("zero", "", ""),  # never steps
        faulty("zero", "step", ""),  # steps twice
        faulty("zero", "", "zero,step"),  # zeroed before it steps
        faulty("", "", "step"),  # never zeroed
        faulty("zero", "", "step", divisor=1),  # not divided
        faulty("zero", "", "step", divisor=4),
        faulty("zero,clip", "", "step", divisor=2),  # clipped before backward
        faulty("zero", "clip", "unscale,step", divisor=0.25),  # clipped before it is unscaled
        faulty("zero", "", "clip blocks,step"),  # a part is clipped
        faulty("eval,zero", "", "step"),  # in evaluation mode
    ],
)
def test_a_faulty_step_is_named(whole: Whole):
    assert first(with_step(whole, "step", "repeats")) == ("step", "step")


def test_uneven_micro_batches_weigh_their_tokens_alike():
    def whole(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
        optimizer.zero_grad()
        for part in ids.chunk(2):
            (padded_loss(model, part) / 2).backward()
        optimizer.step()

    def weighted(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
        optimizer.zero_grad()
        for part in ids.chunk(2):
            share = (part[:, 1:] >= 0).sum() / (ids[:, 1:] >= 0).sum()
            (padded_loss(model, part) * share).backward()
        optimizer.step()

    assert first(with_step(whole, "step", batches=padded(), loss=padded_loss)) == ("step", "step")
    assert with_step(weighted, "step", batches=padded(), loss=padded_loss).holds == ("step",)


@pytest.mark.parametrize(("divisor", "names"), [(1, ()), (28, ()), (14, ("step",))])
def test_a_sum_may_be_divided_by_what_it_counts(divisor: int, names: tuple[str, ...]):
    def summed(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="sum")

    def whole(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
        model.train()
        optimizer.zero_grad()
        for part in ids.chunk(2):
            (summed(model, part) / divisor).backward()
        optimizer.step()

    report = with_step(whole, "step", "reduction", loss=summed)
    assert tuple(v.property for v in report.failures) == names


def test_weights_that_move_between_passes_cannot_be_compared():
    def sharpness_aware(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
        own = [p.detach().clone() for p in model.parameters()]
        loss_of(model, ids).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05 * p.grad / p.grad.norm())
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        with torch.no_grad():
            for p, before in zip(model.parameters(), own, strict=True):
                p.copy_(before)
        optimizer.step()
        optimizer.zero_grad()

    assert "step" in with_step(sharpness_aware, "step").untestable


def test_a_loss_that_draws_cannot_be_compared():
    def noisy(model: nn.Module, ids: Tensor) -> Tensor:
        return loss_of(model, torch.where(torch.rand(ids.shape[::-1]).T < 0.3, 0, ids))

    def whole(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
        optimizer.zero_grad()
        for part in ids.chunk(2):
            (noisy(model, part) / 2).backward()
        optimizer.step()

    assert "step" in with_step(whole, "step", loss=noisy).untestable


# --------------------------------------------------------------------------------------------- schedule
def scheduled(make: Callable[[Optimizer], Any], whole: Whole | None = sound, **setup: Any) -> Any:
    torch.manual_seed(0)
    model = Decoder()
    optimizer = groups(model)
    return report_of(
        "schedule",
        **{
            "model": model,
            "optimizer": optimizer,
            "scheduler": make(optimizer),
            "step": whole,
            "lr": 1e-3,
            **setup,
        },
    )


def warm_up(optimizer: Optimizer) -> SequentialLR:
    rise, fall = LinearLR(optimizer, 0.01, total_iters=10), CosineAnnealingLR(optimizer, 90)
    return SequentialLR(optimizer, [rise, fall], [10])


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (lambda o: LambdaLR(o, lambda i: min(1, (i + 1) / 20)), None),
        (lambda o: LambdaLR(o, lambda i: min(1, (i + 1) / 20) * max(0, 1 - i / 240)), 240),
        (lambda o: LambdaLR(o, lambda i: min(1, i / 2000)), 50_000),
        (warm_up, 100),
        (lambda o: OneCycleLR(o, 1e-3, total_steps=100), 100),
        (lambda o: CosineAnnealingLR(o, 1000), 1000),
        (lambda o: CosineAnnealingWarmRestarts(o, 30), 100),
        (lambda o: CyclicLR(o, 1e-4, 1e-3, 10, cycle_momentum=False), 100),
        (lambda o: LambdaLR(o, lambda i: abs(i % 40 - 20) / 20), 200),
    ],
)
def test_a_sound_schedule_reaches_its_peak(make: Callable[[Optimizer], Any], steps: int | None):
    assert scheduled(make, declare={"steps": steps} if steps else None).holds == ("schedule",)


class Forgetful:
    """Counts in a place that no state dict holds."""

    def __init__(self, optimizer: Optimizer):
        self.optimizer, self.count = optimizer, 0

    def step(self) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, self.count / 10)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (lambda o: LambdaLR(o, lambda i: 0.0), None),
        (lambda o: LambdaLR(o, lambda i: 1e-3 * min(1, i / 100)), None),
        (lambda o: LambdaLR(o, lambda i: min(1, i / 10_000_000)), None),
        (lambda o: LambdaLR(o, lambda i: min(1, i / 500)), 400),
        (lambda o: LambdaLR(o, lambda i: 1 - i / 50), 100),
        (lambda o: LambdaLR(o, lambda i: max(0, 1 - i / 50)), 200),
        (lambda o: OneCycleLR(o, 1e-3, total_steps=100), 200),
        (lambda o: CosineAnnealingLR(o, 30), 100),
        (lambda o: LambdaLR(o, lambda i: abs(i - 60) / 60), 120),
        (warm_up, 1000),
        (lambda o: LambdaLR(groups(Decoder()), lambda i: 1.0), None),
        (Forgetful, None),
    ],
)
def test_a_faulty_schedule_is_named(make: Callable[[Optimizer], Any], steps: int | None):
    report = scheduled(make, declare={"steps": steps} if steps else None)
    assert first(report) == ("schedule", "scheduler")


@pytest.mark.parametrize("order", ["step,schedule,schedule", "schedule,step"])
def test_the_scheduler_is_stepped_once_after_the_optimizer(order: str):
    def whole(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
        loss_of(model, ids).backward()
        for act in order.split(","):
            (optimizer if act == "step" else scheduler).step()

    report = scheduled(lambda o: LambdaLR(o, lambda i: 1.0), whole)
    assert first(report) == ("schedule", "scheduler")


@pytest.mark.parametrize(("rate", "names"), [(1e-3, ()), (1e-2, ()), (1e-4, ("schedule",))])
def test_the_peak_of_any_group_may_be_the_rate_asked(rate: float, names: tuple[str, ...]):
    def two(model: nn.Module) -> Optimizer:
        return AdamW([{"params": model.blocks.parameters()}, {"params": model.head.parameters(), "lr": 1e-2}])

    report = report_of(
        "schedule", optimizer=two, scheduler=lambda o: LambdaLR(o, lambda i: min(1, (i + 1) / 10)), lr=rate
    )
    assert tuple(v.property for v in report.failures) == names


def test_no_copy_of_the_scheduler_is_the_users_own():
    torch.manual_seed(0)
    model = Decoder()
    optimizer = groups(model)
    scheduler = LambdaLR(optimizer, lambda i: min(1, (i + 1) / 20))
    before = [g["lr"] for g in optimizer.param_groups], scheduler.state_dict()["last_epoch"]
    report_of(
        "schedule",
        "step",
        "update",
        "overfit",
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        step=sound,
    )
    assert ([g["lr"] for g in optimizer.param_groups], scheduler.state_dict()["last_epoch"]) == before
    assert not optimizer.state


# ------------------------------------------------------------------------------------ repeats, overfit
class Stateful(Decoder):
    """Adds what it put out before."""

    past: Tensor | float = 0.0

    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids)
        self.past = (logits + self.past).detach()
        return logits + 0.5 * self.past


def test_a_model_that_remembers_does_not_repeat():
    assert first(report_of("repeats", model=Stateful(), optimizer=groups)) == ("repeats", "step")
    assert first(report_of("repeats", model=Stateful())) == ("repeats", "loss")


def test_a_step_that_counts_does_not_repeat():
    count = itertools.count(1)

    def whole(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
        optimizer.zero_grad()
        (loss_of(model, ids) / next(count)).backward()
        optimizer.step()

    assert first(with_step(whole, "repeats")) == ("repeats", "step")


def test_a_step_that_writes_into_the_batch_is_named():
    def whole(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
        ids[:, 0] = 0
        sound(model, ids, optimizer, scheduler)

    assert first(with_step(whole, "repeats")) == ("repeats", "step")


@pytest.mark.parametrize(
    "make", [lambda m: AdamW(m.parameters(), lr=3.0), lambda m: SGD(m.parameters(), lr=0.0)]
)
def test_a_rate_that_learns_nothing_is_named(make: Callable[[nn.Module], Optimizer]):
    assert first(report_of("overfit", optimizer=make)) == ("overfit", "optimizer")


def test_a_plain_step_learns():
    assert report_of("overfit", "repeats", optimizer=groups).holds == ("repeats", "overfit")
