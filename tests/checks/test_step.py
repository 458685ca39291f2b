"""The user's own step: its gradient, that it repeats, and that it learns."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import SGD, AdamW, Optimizer

from normlab.setups.setup import Setup
from normlab.trace.step_under_test import StepUnderTest

from .tiny import Decoder, StepFunction, first, groups, loss_of, report_of, sound, tokens


def with_step(train_step: StepFunction, *names: str, **setup: Any) -> Any:
    torch.manual_seed(0)
    model = Decoder()
    return report_of(*names, **{"model": model, "optimizer": groups(model), "step": train_step, **setup})


def clip_by_norm_of_all(model: nn.Module, parts: Iterable[nn.Module]) -> None:
    norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    for part in parts:
        clip_grads_with_norm_(part.parameters(), 0.1, norm)


def faulty(before: str = "", between: str = "", after: str = "", divisor: float = 2) -> StepFunction:
    """A step of two micro-batches with something done before, between and after its backward passes."""
    acts: dict[str, Callable[[nn.Module, Optimizer], Any]] = {
        "zero": lambda m, o: o.zero_grad(),
        "step": lambda m, o: o.step(),
        "clip": lambda m, o: clip_grad_norm_(m.parameters(), 0.1),
        "clip by known norm": lambda m, o: clip_by_norm_of_all(m, m.children()),
        "clip at once by known norm": lambda m, o: clip_by_norm_of_all(m, [m]),
        "clip blocks by known norm": lambda m, o: clip_by_norm_of_all(m, [m.blocks]),
        "clip blocks": lambda m, o: clip_grad_norm_(m.blocks.parameters(), 0.1),
        "clip nothing": lambda m, o: clip_grad_norm_([], 0.1),
        "unscale": lambda m, o: [p.grad.div_(8) for p in m.parameters() if p.grad is not None],
        "eval": lambda m, o: m.eval(),
    }

    def train_step(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
        model.train()
        for act in filter(None, before.split(",")):
            acts[act](model, optimizer)
        for part in ids.chunk(2):
            (loss_of(model, part) / divisor).backward()
            for act in filter(None, between.split(",")):
                acts[act](model, optimizer)
        for act in filter(None, after.split(",")):
            acts[act](model, optimizer)

    return train_step


class KeepsWhatItSaw:
    """A sound step of one backward pass, an object whose attributes are named as those of a recorded step."""

    def __init__(self) -> None:
        self.loss, self.batch, self.shorter = 0.0, None, True

    def __call__(self, model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
        model.train()
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        self.loss = float(loss)


def test_what_a_step_of_the_users_holds_is_the_users():
    report = with_step(KeepsWhatItSaw(), "step", "overfit")
    assert (report.failures, report.untestable) == ((), {})
    assert {"step", "overfit"} <= set(report.holds)


class KeepsLosses(list[float]):
    """A list of losses that takes steps: it is empty, and false in a condition, before the first."""

    def __call__(self, model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
        model.train()
        loss = loss_of(model, ids)
        loss.backward()  # on top of the gradients of the last step
        optimizer.step()
        self.append(float(loss))


def test_a_step_that_is_an_empty_list_is_run():
    assert first(with_step(KeepsLosses(), "step"))[0] == "step"


def by_hand(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
    """Clip gradients by value, and then by their norm, by hand."""
    model.train()
    optimizer.zero_grad()
    loss_of(model, ids).backward()
    clip_grad_value_(model.parameters(), 0.01)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    for p in model.parameters():
        p.grad.mul_(min(1.0, 0.05 / float(norm)))
    optimizer.step()


def scaled(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
    """Scale the loss as for half precision, then unscale the gradients and clip them."""
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


@pytest.mark.slow
@pytest.mark.parametrize("train_step", [sound, by_hand, scaled])
def test_a_sound_step_sees_the_gradient_of_the_whole_batch(train_step: StepFunction):
    report = with_step(train_step, "step", "repeats", "overfit")
    assert report.holds == ("step", "repeats", "overfit")


@pytest.mark.parametrize(
    "train_step",
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
        faulty("zero", "", "clip nothing,step"),  # such as parameters that were an iterator
        faulty("zero,clip by known norm", "", "step"),
        faulty("zero", "", "clip blocks by known norm,step"),
        faulty("eval,zero", "", "step"),  # in evaluation mode
    ],
)
def test_a_faulty_step_is_named(train_step: StepFunction):
    assert first(with_step(train_step, "step", "repeats")) == ("step", "step")


@pytest.mark.slow
@pytest.mark.parametrize("clip", ["clip at once by known norm", "clip by known norm"])
def test_gradients_may_be_clipped_by_a_norm_that_is_known(clip: str):
    train_step = faulty("zero", "", f"{clip},step")
    assert with_step(train_step, "step", declare={"max_grad_norm": 0.1}).holds == ("step",)
    assert first(with_step(train_step, "step", declare={"max_grad_norm": 0.2})) == ("step", "step")


@pytest.mark.slow
def test_uneven_micro_batches_weigh_their_tokens_alike():
    def train_step(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
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

    assert first(with_step(train_step, "step", batches=padded(), loss=padded_loss)) == ("step", "step")
    assert with_step(weighted, "step", batches=padded(), loss=padded_loss).holds == ("step",)


@pytest.mark.parametrize(("divisor", "names"), [(1, ("reduction",)), (28, ()), (14, ("step",))])
def test_a_sum_may_be_divided_by_what_it_counts(divisor: int, names: tuple[str, ...]):
    def summed(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="sum")

    def train_step(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
        model.train()
        optimizer.zero_grad()
        for part in ids.chunk(2):
            (summed(model, part) / divisor).backward()
        optimizer.step()

    report = with_step(train_step, "step", "reduction", loss=summed)
    assert tuple(v.property for v in report.failures) == names


def test_weights_that_move_between_passes_cannot_be_compared():
    def sharpness_aware(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
        before = [p.detach().clone() for p in model.parameters()]
        loss_of(model, ids).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05 * p.grad / p.grad.norm())
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        with torch.no_grad():
            for p, value in zip(model.parameters(), before, strict=True):
                p.copy_(value)
        optimizer.step()
        optimizer.zero_grad()

    assert "step" in with_step(sharpness_aware, "step").untestable


class Averaged(Decoder):
    """Has a slow copy of its head, which follows the head a little."""

    def __init__(self):
        super().__init__(0.0)
        self.slow = copy.deepcopy(self.head).requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids)
        self.apart = (self.head.weight - self.slow.weight).square().mean()
        return logits

    def follow(self) -> None:
        with torch.no_grad():
            self.slow.weight.mul_(0.9).add_(self.head.weight, alpha=0.1)


def followed(when: str) -> StepFunction:
    """Return a step of two micro-batches in which the slow copy follows before, between or after them."""

    def train_step(model: Any, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
        optimizer.zero_grad()
        if when == "before":
            model.follow()
        for part in ids.chunk(2):
            (loss_of(model, part) / 2).backward()
            if when == "between":
                model.follow()
        optimizer.step()
        if when == "after":
            model.follow()

    return train_step


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_an_average_follows_once_a_step(when: str):
    model = Averaged()
    trained = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    report = report_of("step", model=model, optimizer=trained, step=followed(when))
    assert first(report) == (("step", "step") if when == "between" else ("", ""))


def test_a_loss_that_draws_cannot_be_compared():
    def noisy(model: nn.Module, ids: Tensor) -> Tensor:
        return loss_of(model, torch.where(torch.rand(ids.shape[::-1]).T < 0.3, 0, ids))

    def train_step(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
        optimizer.zero_grad()
        for part in ids.chunk(2):
            (noisy(model, part) / 2).backward()
        optimizer.step()

    assert "step" in with_step(train_step, "step", loss=noisy).untestable


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

    def train_step(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
        optimizer.zero_grad()
        (loss_of(model, ids) / next(count)).backward()
        optimizer.step()

    assert first(with_step(train_step, "repeats")) == ("repeats", "step")


def test_a_step_that_writes_into_the_batch_is_named():
    def train_step(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
        ids[:, 0] = 0
        sound(model, ids, optimizer, scheduler)

    assert first(with_step(train_step, "repeats")) == ("repeats", "step")


def test_a_step_that_insists_on_its_precision_is_compared_up_to_its_rounding():
    def narrow(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: Any) -> None:
        if next(model.parameters()).dtype != torch.float32:
            raise TypeError("weights must be in float32")
        sound(model, ids, optimizer, scheduler)

    assert with_step(narrow, "step", "repeats").holds == ("step", "repeats")


class Noting(SGD):
    """Notes the rate of each of its steps."""

    rates: ClassVar[list[float]] = []

    def step(self, closure: Any = None) -> Any:
        self.rates.append(self.param_groups[0]["lr"])
        return super().step(closure)


def test_a_small_batch_is_learnt_at_rates_that_rise_over_ten_steps():
    Noting.rates.clear()
    setup = Setup(Decoder(0.0), tokens(), loss_of, optimizer=lambda m: Noting(m.parameters(), lr=0.1))
    StepUnderTest(setup).whole_step.dry_run().losses(tokens(), [0.5])
    assert Noting.rates[:10] == pytest.approx([0.05 * number for number in range(1, 11)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [lambda m: AdamW(m.parameters(), lr=3.0), lambda m: SGD(m.parameters(), lr=0.0)]
)
def test_a_rate_that_learns_nothing_is_named(make: Callable[[nn.Module], Optimizer]):
    assert first(report_of("overfit", optimizer=make)) == ("overfit", "optimizer")


def test_a_plain_step_learns():
    assert report_of("overfit", "repeats", optimizer=groups).holds == ("repeats", "overfit")


def surrogate(model: nn.Module, ids: Tensor) -> Tensor:
    """A policy gradient with advantages whose mean is 0: its value is 0 with any weights."""
    logp = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    advantage = torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None]
    return -(torch.exp(logp - logp.detach()) * advantage).mean()


@pytest.mark.slow
def test_a_loss_that_does_not_move_along_its_gradient_need_not_fall():
    model = Decoder(dropout=0.0)
    report = report_of("overfit", model=model, loss=surrogate, optimizer=groups(model))
    assert report.failures == ()
    assert "overfit" not in report.holds


@pytest.mark.slow
def test_a_rate_that_lets_the_loss_grow_is_still_named():
    model = Decoder(dropout=0.0)
    assert first(report_of("overfit", model=model, optimizer=groups(model, rate=30.0)))[0] == "overfit"
