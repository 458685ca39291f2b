"""The schedule's peak, its course over the planned steps, and who steps it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
)

from .tiny import Decoder, Whole, first, groups, loss_of, report_of, sound


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
