"""What a report says: numbers that differ, names that a reader knows, and a model's own reasons."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.setups.setup import Setup
from normlab.trace.description import describe
from normlab.trace.step_under_test import StepUnderTest

from .tiny import DIM, LENGTH, VOCAB, Block, Decoder, loss_of, report_of, tokens


class Window(Block):
    """A token sees itself, some at set distances before it, and the first one, on which attention rests."""

    def __init__(self, *distances: int):
        super().__init__()
        self.distances = distances

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        back = sum(F.pad(y, (0, 0, d, 0))[:, : y.shape[1]] for d in self.distances)
        return x + self.down(F.gelu(self.up(y + back + y[:, :1])))


class Shallow(Decoder):
    def __init__(self, *distances: int):
        super().__init__(0.0)
        self.blocks = nn.ModuleList([Window(*distances)])


@pytest.mark.parametrize("distances", [(1,), (1, 2)])
def test_a_window_with_a_first_token_names_what_is_seen_and_what_is_not(distances: tuple[int, ...]):
    report = report_of("reach", model=Shallow(*distances))
    (note,) = report.notes
    numbers = [int(n) for n in re.findall(r"\d+", note.evidence)]
    width = LENGTH - 1  # the loss looks up all but the last token
    tried = sorted({1, 2, width // 2, width - 1})
    seen = [d for d in tried if d in (*distances, width - 1)]
    assert numbers == [*seen, *(d for d in tried if d not in seen)]


def weighted(factors: Tensor) -> Any:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        logits = model(ids[:, :-1])
        each = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        return (each * factors.to(each)).sum() / factors.sum() / len(ids)

    return loss


MADE_FOR_FLOAT32 = "the kernel of this layer is made for float32"


class Narrow(Decoder):
    """Refuses to run in float64."""

    def forward(self, ids: Tensor) -> Tensor:
        if self.embed.weight.dtype == torch.float64:
            raise TypeError(MADE_FOR_FLOAT32)
        return super().forward(ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_difference_in_weight(dtype: torch.dtype):
    even = torch.ones(LENGTH - 1)
    report = report_of("reduction", model=Narrow(0.0).to(dtype), loss=weighted(even))
    assert (report.holds, report.notes) == (("reduction",), ())


@pytest.mark.parametrize("share", [1e-4, 0.5])
def test_weights_that_differ_are_printed_with_the_digits_that_differ(share: float):
    uneven = torch.ones(LENGTH - 1)
    uneven[-1] += share
    report = report_of("reduction", loss=weighted(uneven))
    first, last = re.findall(r"0\.\d+", report.notes[0].evidence)
    assert float(last) / float(first) == pytest.approx(1 + share, rel=share / 2)


def test_a_model_without_float64_says_why():
    report = report_of("derivative", model=Narrow(0.0))
    assert MADE_FOR_FLOAT32 in report.untestable["derivative"]


class Jumps(Decoder):
    """Computes something else in float64."""

    def forward(self, ids: Tensor) -> Tensor:
        logits = super().forward(ids)
        return 3 * logits if logits.dtype == torch.float64 else logits


def test_a_model_with_another_loss_in_float64_shows_both():
    model = Jumps(0.0)
    nn.init.normal_(model.head.weight, std=1.0)
    step = StepUnderTest(Setup(model, tokens(), loss_of))
    assert not step.is_exact
    here = float(step.exact.loss)
    assert f"{here:.4g}" in step.why_inexact
    assert StepUnderTest(Setup(Decoder(0.0), tokens(), loss_of)).why_inexact == ""


class Scores(Decoder):
    def __init__(self, parts: int):
        super().__init__(0.0)
        self.parts = parts

    def forward(self, ids: Tensor) -> Tensor:
        logits, targets = super().forward(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        pairs = zip(logits.chunk(self.parts), targets.chunk(self.parts), strict=True)
        return torch.stack([F.cross_entropy(*pair) for pair in pairs]).mean()


@pytest.mark.parametrize("parts", [1, 2])
def test_logits_that_a_function_reads_are_named_by_it(parts: int):
    about = describe(StepUnderTest(Setup(Scores(parts), tokens())))
    assert "cross_entropy" in about["logits"]
    assert about["logits"].endswith(str([4, LENGTH - 1, VOCAB]))
    assert not any("=" in value or value.startswith((" ", ".")) for value in about.values())


def test_blocks_that_are_the_models_own_children_are_named_by_its_class():
    model = nn.Sequential(*Decoder(0.0).blocks)
    step = StepUnderTest(Setup(model, torch.randn(2, 5, DIM), lambda m, x: m(x).square().mean()))
    assert describe(step)["stacks"] == "Sequential × 4"


def test_an_entry_that_has_no_name_is_called_the_batch():
    assert describe(StepUnderTest(Setup(Decoder(0.0), tokens(), loss_of)))["tokens"].startswith("batch ")


# ------------------------------------------------------------------------ numbers of failures, counted again
def numbers_in(report: Any, name: str) -> list[float]:
    """Return the numbers that the first failure of a property names."""
    (evidence,) = [failure.evidence for failure in report.failures if failure.property == name][:1]
    return [float(x) for x in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e-?\d+)?(?!\w)", evidence)]


class Blind(Decoder):
    """Lets each token see itself alone."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(ids)))


def test_a_reach_that_is_lost_names_the_tokens_that_were_changed():
    width = LENGTH - 1
    tried = sorted({1, 2, width // 2, width - 1})
    assert numbers_in(report_of("reach", model=Blind(0.0)), "reach") == tried


def test_a_model_that_looks_back_alone_names_the_tokens_that_did_not_move():
    report = report_of("reach", declare={"causal": False})
    assert numbers_in(report, "reach") == [(LENGTH - 1) // 2]


@pytest.mark.slow
def test_parameters_that_rounding_holds_still_are_counted():
    torch.manual_seed(0)
    model = Decoder(0.0).bfloat16()
    gains = [p for p in model.parameters() if bool((p == 1).all())]
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    steps, still, live = numbers_in(report_of("update", model=model, optimizer=optimizer), "update")
    assert (still, live) == (len(gains), len(list(model.parameters())))
    before = [p.detach().clone() for p in gains]
    for _ in range(int(steps)):
        optimizer.zero_grad()
        loss_of(model, tokens()).backward()
        optimizer.step()
    assert all(map(torch.equal, gains, before))


class Halves(torch.optim.SGD):
    """Halves the rate of its first group in every step."""

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] /= 2
        return super().step(closure)


def test_a_rate_that_falls_by_itself_is_followed():
    def two(model: nn.Module) -> Halves:
        return Halves([{"params": model.head.parameters()}, {"params": model.blocks.parameters()}], lr=0.1)

    moved, groups, factor, steps, first, last = numbers_in(report_of("schedule", optimizer=two), "schedule")
    assert (moved, groups, factor) == (1, 2, 0.5)
    assert last == pytest.approx(first * factor**steps)


def test_a_schedule_at_zero_says_how_much_of_it_was_looked_at():
    report = report_of(
        "schedule",
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda i: 0.0),
        declare={"steps": 70},
    )
    rate, looked, last = numbers_in(report, "schedule")
    assert (rate, looked, last) == (0, 70, 70)


def counts_padding(model: nn.Module, ids: Tensor) -> Tensor:
    """Return a loss with a term over all places, padding included."""
    each = F.cross_entropy(model(ids).transpose(1, 2)[..., :-1], ids[:, 1:], ignore_index=0)
    return each + model(ids).square().mean()


def test_a_loss_that_padding_moves_says_by_how_much():
    ids = tokens()
    ids[1, 5:] = 0
    ids[2, 3:] = 0
    model = Decoder(0.0)
    for name, p in model.named_parameters():
        if "norm.bias" in name:  # a check fills what is zero
            nn.init.constant_(p, 0.1)
    report = report_of("padded_loss", model=model, batches=ids, loss=counts_padding, declare={"pad_id": 0})
    of_loss = numbers_in(report, "padded_loss")[0]
    padded = ids[1:3]
    longer = torch.cat((padded, padded[:, -1:]), 1)
    with torch.no_grad():
        before, after = (float(counts_padding(model.double(), x)) for x in (padded, longer))
    assert of_loss == pytest.approx(abs(after - before) / before, rel=0.05)
