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
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
)

from normlab.setups.setup import Setup
from normlab.trace.rates import rates_of
from normlab.trace.restore import same_globals

from .tiny import Decoder, StepFunction, first, groups, loss_of, report_of, sound, tokens


def scheduled(make: Callable[[Optimizer], Any], train_step: StepFunction | None = sound, **setup: Any) -> Any:
    torch.manual_seed(0)
    model = Decoder()
    optimizer = groups(model)
    return report_of(
        "schedule",
        **{
            "model": model,
            "optimizer": optimizer,
            "scheduler": make(optimizer),
            "step": train_step,
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


def of_two(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [torch.optim.SGD(matrices, lr=0.1), AdamW(vectors, lr=1e-3, weight_decay=0.0)]


def cosine_of_second(optimizers: list[Optimizer]) -> CosineAnnealingLR:
    return CosineAnnealingLR(optimizers[1], 50)


@pytest.mark.parametrize(("planned", "fails"), [(50, False), (100, True)])
def test_a_constant_rate_of_another_optimizer_hides_no_schedule(planned: int, *, fails: bool):
    torch.manual_seed(0)
    setup = {"optimizer": of_two, "scheduler": cosine_of_second, "declare": {"steps": planned}}
    assert bool(report_of("schedule", model=Decoder(), **setup).failures) == fails


@pytest.mark.parametrize("order", ["step,schedule,schedule", "schedule,step"])
def test_the_scheduler_is_stepped_once_after_the_optimizer(order: str):
    def train_step(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
        loss_of(model, ids).backward()
        for act in order.split(","):
            (optimizer if act == "step" else scheduler).step()

    report = scheduled(lambda o: LambdaLR(o, lambda i: 1.0), train_step)
    assert first(report) == ("schedule", "scheduler")


@pytest.mark.parametrize(("rate", "names"), [(1e-3, ()), (1e-2, ()), (1e-4, ("schedule",))])
def test_the_peak_of_any_group_may_be_the_rate_asked(rate: float, names: tuple[str, ...]):
    def two(model: nn.Module) -> Optimizer:
        return AdamW([{"params": model.blocks.parameters()}, {"params": model.head.parameters(), "lr": 1e-2}])

    report = report_of(
        "schedule", optimizer=two, scheduler=lambda o: LambdaLR(o, lambda i: min(1, (i + 1) / 10)), lr=rate
    )
    assert tuple(v.property for v in report.failures) == names


@pytest.mark.slow
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


# ----------------------------------------------------------------------------------- by what else rates move


class ByLayer(AdamW):
    """Multiplies each group's rate by a factor of its own: once, or in every step."""

    def __init__(self, model: nn.Module, factors: tuple[float, float], *, every_step: bool):
        super().__init__(
            [{"params": model.blocks.parameters()}, {"params": model.head.parameters()}], lr=1e-3
        )
        self.factors, self.every_step = factors, every_step
        if not every_step:
            self.multiply()

    def multiply(self) -> None:
        for group, factor in zip(self.param_groups, self.factors, strict=True):
            group["lr"] *= factor

    def step(self, closure: Any = None) -> Any:
        if self.every_step:
            self.multiply()
        return super().step(closure)


@pytest.mark.parametrize("factors", [(0.5, 1.0), (0.9, 0.8), (1.0, 1.2)])
def test_factors_that_every_step_multiplies_once_more_are_named(factors: tuple[float, float]):
    report = report_of("schedule", optimizer=lambda m: ByLayer(m, factors, every_step=True))
    assert first(report) == ("schedule", "optimizer")
    assert not report_of("schedule", optimizer=lambda m: ByLayer(m, factors, every_step=False)).failures


def test_a_schedule_that_sets_the_rates_anew_undoes_such_factors():
    report = report_of(
        "schedule",
        optimizer=lambda m: ByLayer(m, (0.5, 1.0), every_step=True),
        scheduler=lambda o: LambdaLR(o, lambda i: min(1, (i + 1) / 20)),
    )
    assert report.holds == ("schedule",)


def test_a_slow_decay_in_the_optimizer_is_a_note():
    report = report_of("schedule", optimizer=lambda m: ByLayer(m, (0.999, 0.999), every_step=True))
    assert not report.failures
    assert [note.module for note in report.notes] == ["optimizer"]


def by_hand(rate: Callable[[int, float], float]) -> StepFunction:
    """Return a step that sets the rates itself, from its number and the present rate."""
    taken = [0]

    def train_step(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        for group in optimizer.param_groups:
            group["lr"] = rate(taken[0], group["lr"])
        taken[0] += 1
        optimizer.step()

    return train_step


@pytest.mark.parametrize(
    "rate",
    [
        lambda i, _: 1e-3 * min(1, (i + 1) / 100),
        lambda i, _: 1e-3 * (1 - i / 20),
        lambda i, _: 1e-3 * min((i + 1) ** -0.5, (i + 1) * 4000**-1.5),
        lambda i, _: 1e-3,
    ],
)
def test_rates_that_a_step_sets_from_its_number_are_not_judged(rate: Callable[[int, float], float]):
    report = report_of("schedule", optimizer=groups, step=by_hand(rate))
    assert report.untestable == {"schedule": "no scheduler changes the rates"}
    assert not report.notes


def test_a_rate_that_a_step_multiplies_is_named_at_the_step():
    report = report_of("schedule", optimizer=groups, step=by_hand(lambda _, now: 0.7 * now))
    assert first(report) == ("schedule", "step")


@pytest.mark.parametrize(
    ("share", "steps", "faulty"),
    [
        (lambda i: i / 400, 400, True),
        (lambda i: 0.1 + i / 1000, 400, True),
        (lambda i: 1 - i / 400, 400, False),
        (lambda i: min(1, i / 300), 400, False),
        (lambda i: min(i, 400 - i) / 200, 400, False),
    ],
)
def test_a_rate_that_rises_to_the_end_is_named(share: Callable[[int], float], steps: int, faulty: Any):
    report = report_of(
        "schedule", optimizer=groups, scheduler=lambda o: LambdaLR(o, share), declare={"steps": steps}
    )
    assert bool(report.failures) is faulty


# ------------------------------------------------------------------------------------------------ resuming
def resumed(*, with_schedule: bool, taken: int = 7) -> dict[str, Any]:
    """Return a training that goes on from a checkpoint, with the schedule's state or without."""
    torch.manual_seed(0)
    model = Decoder()
    optimizer = groups(model)
    scheduler = LambdaLR(optimizer, lambda i: min(1, (i + 1) / 20))
    for _ in range(taken):
        sound(model, tokens(), optimizer, scheduler)
    fresh = groups(model)
    anew = LambdaLR(fresh, lambda i: min(1, (i + 1) / 20))
    fresh.load_state_dict(optimizer.state_dict())
    if with_schedule:
        anew.load_state_dict(scheduler.state_dict())
    return {"model": model, "optimizer": fresh, "scheduler": anew, "step": sound}


def test_a_setup_may_be_recorded_between_the_steps_of_optimizer_and_schedule():
    report = report_of("schedule", **resumed(with_schedule=False, taken=1))
    assert report.holds == ("schedule",)
    assert not report.notes


@pytest.mark.parametrize("with_schedule", [True, False])
def test_a_schedule_that_begins_anew_beside_an_optimizer_that_does_not_is_noted(with_schedule: Any):
    report = report_of("schedule", **resumed(with_schedule=with_schedule))
    assert report.ok
    assert [note.module for note in report.notes] == ([] if with_schedule else ["scheduler"])


FALLING = {
    "lambda": lambda o, share: LambdaLR(o, lambda i: share * max(0.0, 1 - i / 100)),
    "cycle": lambda o, share: OneCycleLR(o, share * 1e-3, total_steps=100),
    "several": lambda o, share: SequentialLR(
        o, [LinearLR(o, 0.1 * share, share, total_iters=10), ExponentialLR(o, 0.9)], [10]
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "share", "failing", "noted"),
    [
        ("lambda", 1.0, 0, 0),
        ("cycle", 1.0, 0, 0),
        ("several", 1.0, 0, 1),  # has no closed form, which would tell what its rates were
        ("lambda", 0.5, 1, 0),
        ("cycle", 0.5, 1, 0),
    ],
)
def test_the_peak_of_a_schedule_that_is_resumed_may_lie_behind(
    kind: str, share: float, failing: int, noted: int
):
    torch.manual_seed(0)
    model = Decoder()
    optimizer = groups(model)
    scheduler = FALLING[kind](optimizer, share)
    for _ in range(40):
        sound(model, tokens(), optimizer, scheduler)
    setup = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": sound}
    report = report_of("schedule", **setup, lr=1e-3, declare={"steps": 100})
    assert (len(report.failures), len(report.notes)) == (failing, noted)


@pytest.mark.slow
def test_a_schedule_that_is_resumed_must_last_for_the_steps_that_are_left():
    torch.manual_seed(0)
    model = Decoder()
    optimizer = groups(model)
    scheduler = OneCycleLR(optimizer, 1e-3, total_steps=60)
    for _ in range(40):
        sound(model, tokens(), optimizer, scheduler)
    setup = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": sound}
    assert report_of("schedule", **setup, declare={"steps": 60}).ok
    assert not report_of("schedule", **setup, declare={"steps": 100}).ok


def test_rates_far_ahead_of_a_resumed_schedule_are_counted_from_its_first_step():
    model, planned, taken = Decoder(), 50_000, 100
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = LambdaLR(optimizer, lambda i: 1 - i / planned)
    for _ in range(taken):
        optimizer.step()
        scheduler.step()
    setup = Setup(
        model, tokens(), loss_of, optimizer=optimizer, scheduler=scheduler, declare={"steps": planned}
    )
    with same_globals():
        course = rates_of(setup)
    assert course.steps[-1] > planned / 2
    assert course.top == pytest.approx([1e-3 * (1 - (taken + i) / planned) for i in course.steps])


def many_groups(count: int) -> AdamW:
    return AdamW([{"params": [nn.Parameter(torch.ones(1))], "lr": 1e-3 * (1 + i)} for i in range(count)])


def course_of(optimizer: Optimizer, scheduler: Any, steps: int) -> Any:
    model = nn.Linear(1, 1)
    setup = Setup(model, torch.ones(1, 1), optimizer=optimizer, scheduler=scheduler, declare={"steps": steps})
    with same_globals():
        return rates_of(setup)


@pytest.mark.parametrize("peak", [20_000, 30_007, 49_999])
def test_a_narrow_peak_between_samples_is_found(peak: int):
    optimizer = many_groups(40)
    scheduler = LambdaLR(optimizer, lambda i: max(0.1, 1 - abs(i - peak) / 1_000))
    course = course_of(optimizer, scheduler, 50_000)
    assert course.peaks == pytest.approx([1e-3 * (1 + i) for i in range(40)], rel=1e-12)
    assert course.first_rise.peaks == course.peaks
    assert course.first_rise.steps == 1 + peak
    assert course.steps == sorted(set(course.steps))


def test_a_peak_of_the_past_between_samples_is_found():
    optimizer, peak = many_groups(40), 333
    scheduler = LambdaLR(optimizer, lambda i: max(0.1, 1 - abs(i - peak) / 20))
    for _ in range(1_000):
        optimizer.step()
        scheduler.step()
    course = course_of(optimizer, scheduler, 2_000).from_the_first
    assert course.steps[course.top.index(max(course.top))] == peak
    assert max(course.top) == pytest.approx(0.04)


def test_a_schedule_that_the_step_leaves_alone_may_count_something_else():
    setup = resumed(with_schedule=False)

    def without_scheduler(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        optimizer.step()

    report = report_of("schedule", **setup | {"step": without_scheduler})
    assert report.holds == ("schedule",)


@pytest.mark.parametrize("first_share", [0.0, 0.1])
def test_a_first_rate_of_zero_is_noted(first_share: float):
    report = report_of(
        "schedule",
        optimizer=groups,
        scheduler=lambda o: LambdaLR(o, lambda i: min(1, first_share + i / 10)),
        declare={"steps": 50},
    )
    assert report.holds == ("schedule",)
    assert bool(report.notes) is (first_share == 0)
