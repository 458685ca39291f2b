"""The model is what the loss runs: a module whose loss calls a part of it, or several, is tested like one
that is called as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normlab
from normlab.checks.report import Report
from normlab.setups.setup import Setup
from normlab.trace.step_under_test import StepUnderTest
from normlab.trace.trace import Trace

from .tiny import DIM, ROWS, VOCAB, Block, Decoder, first, groups, loss_of, report_of, tokens


class Training(nn.Module):
    """Holds a model and the loss of a step, and is never called itself, as in Lightning."""

    def __init__(self, model: nn.Module | None = None, dropout: float = 0.0):
        super().__init__()
        self.model = model or Decoder(dropout)

    def training_step(self, ids: Tensor) -> Tensor:
        return loss_of(self.model, ids)


class InTurn(Training):
    """Calls the parts of its model in turn, and not the model."""

    def training_step(self, ids: Tensor) -> Tensor:
        x = self.model.embed(ids[:, :-1])
        for block in self.model.blocks:
            x = block(x)
        return F.cross_entropy(self.model.head(self.model.norm(x)).transpose(1, 2), ids[:, 1:])


class ReadsMatrix(InTurn):
    """Multiplies by the matrix of the head itself."""

    def training_step(self, ids: Tensor) -> Tensor:
        x = self.model.embed(ids[:, :-1])
        for block in self.model.blocks:
            x = block(x)
        logits = F.linear(self.model.norm(x), self.model.head.weight)
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def stepped(model: nn.Module, ids: Tensor) -> Tensor:
    return model.training_step(ids)


def whole_report(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], **more: Any) -> Report:
    return normlab.check(model, tokens(), loss=loss, optimizer=groups, budget_s=1e9, **more)


@pytest.fixture(scope="module")
def called() -> Report:
    """What is said of a model that is called as a whole."""
    torch.manual_seed(0)
    return whole_report(Decoder(0.0), loss_of)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Training, InTurn, ReadsMatrix])
def test_parts_are_tested_as_the_whole_is(called: Report, kind: type[Training]):
    torch.manual_seed(0)
    report = whole_report(kind(), stepped)
    assert report.ok
    assert set(report.holds) == set(called.holds)
    assert report.untestable.keys() == called.untestable.keys()
    assert len(called.holds) > 25


class LooksAhead(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * x.mean(1, keepdim=True))


class MixesRows(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * x.mean(0, keepdim=True))


class Blind(Block):
    """A block in which no token sees another."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("kind", [Training, InTurn, ReadsMatrix])
@pytest.mark.parametrize(("name", "block"), [("causality", LooksAhead), ("rows", MixesRows)])
def test_a_fault_in_a_part_is_named_with_its_path(kind: type[Training], name: str, block: type[Block]):
    training = kind()
    training.model.blocks[2] = block()
    report = report_of(name, model=training, loss=stepped)
    assert first(report) == (name, "model.blocks.2")


@pytest.mark.parametrize("kind", [Training, InTurn, ReadsMatrix])
def test_a_part_that_reaches_no_earlier_token_fails(kind: type[Training]):
    training = kind()
    training.model.blocks = nn.ModuleList(Blind() for _ in range(3))
    assert [f.property for f in report_of("reach", model=training, loss=stepped).failures] == ["reach"]


class Denoiser(nn.Module):
    """A model of vectors, whose loss is no cross-entropy."""

    def __init__(self, mixing: float):
        super().__init__()
        self.first, self.last, self.mixing = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), mixing

    def training_step(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        return F.mse_loss(self.last(y + self.mixing * y.cumsum(0)), x)


@pytest.mark.parametrize("mixing", [0.0, 0.1])
def test_without_logits_the_output_that_the_loss_reads_last_is_compared(mixing: float):
    x = torch.randn(ROWS, 5, DIM, generator=torch.Generator().manual_seed(0))
    report = report_of("rows", model=Denoiser(mixing), batches=x, loss=stepped)
    assert (report.ok, report.holds) == (not mixing, () if mixing else ("rows",))


def test_outputs_are_those_of_the_outermost_calls():
    ids = tokens()
    of_model = Trace(Decoder(0.0), ids, loss_of)
    assert [x.shape for x in of_model.outputs] == [(ROWS, ids.shape[1] - 1, VOCAB)]
    torch.manual_seed(0)
    part = Trace(Training(), ids, stepped)
    assert [x.shape for x in part.outputs] == [x.shape for x in of_model.outputs]
    turns = Trace(InTurn(), ids, stepped)
    assert len(turns.outputs) == 7  # embedding, four blocks, norm and head
    outermost = [event.module for event in turns.events if event.outermost]
    assert outermost == ["model.embed", *(f"model.blocks.{i}" for i in range(4)), "model.norm", "model.head"]


def test_a_loss_of_another_model_is_no_failure():
    other = Decoder(0.0)
    step = StepUnderTest(Setup(Decoder(0.0), tokens(), lambda m, ids: loss_of(other, ids)))
    assert not step.copies.may_stand_in
    assert report_of("update", loss=lambda m, ids: loss_of(other, ids), optimizer=groups).untestable


# -------------------------------------------------------------------------------------------- the user's step


def in_halves(divisor: int) -> Callable[..., None]:
    """A step that calls ``training_step`` for each of two micro-batches."""

    def step(model: nn.Module, ids: Tensor, optimizer: Any, scheduler: Any) -> None:
        model.train()
        optimizer.zero_grad()
        for part in ids.chunk(2):
            (model.training_step(part) / divisor).backward()
        optimizer.step()

    return step


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Training, InTurn])
@pytest.mark.parametrize("divisor", [1, 2])
def test_passes_of_a_part_are_counted(kind: type[Training], divisor: int):
    step = StepUnderTest(Setup(kind(), tokens(), stepped, optimizer=groups, step=in_halves(divisor)))
    assert step.whole_step.two_runs.first.training == [True, True]
    report = report_of("step", model=kind(), loss=stepped, optimizer=groups, step=in_halves(divisor))
    assert report.ok == (divisor == 2)


@pytest.mark.slow
def test_a_part_in_evaluation_mode_is_seen():
    def step(model: nn.Module, ids: Tensor, optimizer: Any, scheduler: Any) -> None:
        model.eval()
        optimizer.zero_grad()
        model.training_step(ids).backward()
        optimizer.step()

    rest: dict[str, Any] = {"loss": stepped, "optimizer": groups, "step": step}
    assert first(report_of("step", model=Training(dropout=0.3), **rest)) == ("step", "step")
    assert report_of("step", model=Training(), **rest).ok


class CastsItself(Training):
    """Runs under autocast inside its own methods, as a strategy or a wrapped forward does."""

    def training_step(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().training_step(ids)


class CastsInForward(Decoder):
    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(ids)


def plain(model: nn.Module, ids: Tensor, optimizer: Any, scheduler: Any) -> None:
    optimizer.zero_grad()
    (model.training_step(ids) if isinstance(model, Training) else loss_of(model, ids)).backward()
    optimizer.step()


@pytest.mark.parametrize("model", [CastsItself, CastsInForward])
def test_autocast_inside_of_a_call_is_seen(model: type[nn.Module]):
    step = StepUnderTest(
        Setup(model(), tokens(), stepped if model is CastsItself else loss_of, optimizer=groups, step=plain)
    )
    assert step.whole_step.two_runs.first.cast is torch.bfloat16


def test_a_step_without_autocast_has_none():
    step = StepUnderTest(Setup(Training(), tokens(), stepped, optimizer=groups, step=plain))
    assert step.whole_step.two_runs.first.cast is None
