"""What is meant may be declared, and what is declared is tested."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from normlab.errors import UserError
from normlab.setups.setup import Declaration

from .test_gradients import Changed
from .test_tokens import windowed
from .tiny import DIM, Decoder, first, groups, loss_of, report_of, tokens


@pytest.mark.parametrize("word", ["positions", "final_norm", "max_grad_norm"])
def test_a_word_of_the_wrong_kind_is_refused(word: str):
    with pytest.raises(UserError, match=word):
        Declaration.of({word: "none"})


# -------------------------------------------------------------------------------------------- positions
class Averaging(Decoder):
    """Every token reads the mean of all."""

    def __init__(self, *, counts: bool):
        super().__init__()
        self.counts = counts

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.counts:
            x = x + torch.outer(torch.arange(ids.shape[1]), torch.linspace(0, 1, DIM)).to(x)
        return self.head(self.norm(x + x.mean(1, keepdim=True)))


def tags(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).transpose(1, 2), ids * 7 % 23)


@pytest.mark.slow
@pytest.mark.parametrize("looks_back", [True, False])
def test_a_model_without_positions_is_declared(*, looks_back: bool):
    with_them, without = (
        {"model": windowed(falls=sees) if looks_back else Averaging(counts=sees)} for sees in (True, False)
    )
    rest: dict[str, Any] = {} if looks_back else {"loss": tags}
    assert report_of("order", **with_them, **rest).holds == ("order",)
    assert first(report_of("order", **without, **rest))[0] == "order"
    words = {"positions": False}
    assert report_of("order", **without, **rest, declare=words).holds == ("order",)
    assert first(report_of("order", **with_them, **rest, declare=words))[0] == "order"


def test_a_model_that_is_declared_to_look_both_ways_does():
    class Both(Decoder):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            return self.head(self.norm(x + x.mean(1, keepdim=True)))

    assert report_of("reach", model=Both(), loss=tags, declare={"causal": False}).holds == ("reach",)
    assert first(report_of("reach", loss=tags, declare={"causal": False})) == ("reach", "")


# ------------------------------------------------------------------------------------------------ norms
def test_a_model_without_a_final_norm_is_declared():
    bare = Decoder()
    bare.norm = nn.Identity()
    assert first(report_of("norms", model=bare)) == ("norms", "blocks.3")
    report = report_of("norms", model=bare, declare={"final_norm": False})
    assert report.ok
    assert [n.module for n in report.notes] == ["blocks.3"]
    assert first(report_of("norms", declare={"final_norm": False})) == ("norms", "blocks.3")


# ------------------------------------------------------------------------------------------ detached parts
def test_what_a_detach_cuts_off_on_purpose_is_declared():
    model = Decoder()
    model.blocks[2] = Changed(lambda block, x: block.up(x)[..., :DIM] + x.detach() / 2 + x / 2)
    assert first(report_of("derivative", model=model))[0] == "derivative"
    above = ["embed*", "blocks.0*", "blocks.1*"]
    assert report_of("derivative", model=model, declare={"frozen": above}).holds == ("derivative",)
    assert first(report_of("derivative", model=model, declare={"frozen": above[1:]}))[1] == "embed.weight"


def test_a_part_that_is_cut_off_on_purpose_needs_no_gradient():
    model = Decoder()
    model.blocks[0] = Changed(lambda _, x: x.detach())
    words = {"frozen": ["embed*", "blocks.0*"]}
    assert first(report_of("gradients", model=model))[0] == "gradients"
    assert report_of("gradients", model=model, declare=words).holds == ("gradients",)


# --------------------------------------------------------------------------------------------- clipping
def clipped(how: Any) -> Any:
    def step(model: nn.Module, batch: Any, optimizer: Optimizer, scheduler: Any) -> None:
        model.train()
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        how(model.parameters())
        optimizer.step()

    return step


def by_hand(parameters: Any) -> None:
    held = [p.grad for p in parameters]
    norm = torch.stack([g.norm() for g in held]).norm()
    for g in held:
        g.mul_((1 / norm).clamp(max=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "right"),
    [
        (lambda p: clip_grad_norm_(p, 1.0), True),
        (by_hand, True),
        (lambda p: clip_grad_norm_(p, 0.01), False),
        (lambda p: None, False),
    ],
)
def test_gradients_are_clipped_to_the_norm_that_is_declared(how: Any, *, right: bool):
    report = report_of("step", optimizer=groups, step=clipped(how), declare={"max_grad_norm": 1.0})
    assert report.ok is right
    assert report_of("step", optimizer=groups, step=clipped(how)).ok


def test_a_declared_norm_needs_a_step():
    report = report_of("step", optimizer=groups, batches=tokens(), declare={"max_grad_norm": 1.0})
    assert "step" in report.untestable
