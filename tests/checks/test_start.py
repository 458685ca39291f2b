"""How parameters and buffers start, and what an untrained model predicts."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.trace.starts import Start

from .tiny import DIM, LENGTH, VOCAB, Decoder, first, loss_of, report_of, tokens


def test_a_start_as_drawn_holds():
    report = report_of("start", "seeds", "initial_loss", make=Decoder)
    assert set(report.holds) == {"start", "seeds", "initial_loss"}


@pytest.mark.parametrize("setup", [{"make": Decoder}, {}], ids=["class", "siblings"])
def test_one_matrix_that_is_drawn_wider_fails(setup: dict[str, Any]):
    model = Decoder()
    model.blocks[1].up.weight.data *= 1.5
    report = report_of("start", model=model, **setup)
    assert first(report) == ("start", "blocks.1.up.weight")


def test_one_gain_that_starts_elsewhere_fails():
    model = Decoder()
    model.blocks[2].norm.weight.data.fill_(0.5)
    assert first(report_of("start", model=model)) == ("start", "blocks.2.norm.weight")


def test_a_start_that_is_scaled_by_depth_holds():
    model = Decoder()
    for i, block in enumerate(model.blocks):
        block.down.weight.data *= (i + 1) ** -0.5
    assert report_of("start", model=model).holds == ("start",)


def test_a_start_is_compared_with_what_is_declared_of_it():
    model = Decoder()
    size = float(model.blocks[0].down.weight.detach().square().mean().sqrt())
    as_drawn, smaller = (Start("blocks.0.down.weight", std=std) for std in (size, size / 2))
    assert report_of("start", model=model, declare={"init": (as_drawn,)}).holds == ("start",)
    report = report_of("start", model=model, declare={"init": (smaller,)})
    assert first(report) == ("start", "blocks.0.down.weight")


def test_a_trained_model_has_no_start():
    model = Decoder(0.0)
    parameters = list(model.parameters())
    for _ in range(60):
        gradients = torch.autograd.grad(loss_of(model, tokens()), parameters)
        with torch.no_grad():
            for p, gradient in zip(parameters, gradients, strict=True):
                p -= 0.5 * gradient
    report = report_of("start", "initial_loss", model=model, make=Decoder)
    assert set(report.untestable) == {"start", "initial_loss"}


def test_copied_blocks_fail():
    assert first(report_of("seeds", model=copied())) == ("seeds", "blocks.1.up.weight")


def test_a_make_that_seeds_itself_is_untestable():
    def make() -> Decoder:
        torch.manual_seed(7)
        return Decoder()

    assert "seeds" in report_of("seeds", make=make).untestable
    assert not report_of("start", make=make).failures


def test_a_confident_start_fails():
    model = Decoder()
    model.head.weight.data *= 20
    assert first(report_of("initial_loss", model=model)) == ("initial_loss", "head.weight")


def as_confident(share: float) -> Decoder:
    """A decoder whose logits vary by this share of what lets one class outweigh all others."""
    torch.manual_seed(0)
    model = Decoder(0.0)
    variance = float(model(tokens()[:, :-1]).detach().var(-1).mean())
    model.head.weight.data *= (share * 2 * math.log(VOCAB) / variance) ** 0.5
    return model


@pytest.mark.parametrize(("share", "failing"), [(0.7, 0), (1.4, 1)])
def test_a_start_is_confident_from_the_variance_on_at_which_one_class_outweighs_all(
    share: float, failing: int
):
    assert len(report_of("initial_loss", model=as_confident(share)).failures) == failing


def test_targets_that_are_not_counted_hide_no_confident_start():
    def of_first(model: nn.Module, ids: Tensor) -> Tensor:
        targets = ids[:, 1:].masked_fill(torch.arange(LENGTH - 1) > 0, -100)
        return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), targets)

    report = report_of("initial_loss", model=as_confident(1.4), loss=of_first)
    assert first(report) == ("initial_loss", "head.weight")


def drawn(size: float) -> Tensor:
    """Ten thousand draws whose root mean square is the given one."""
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    return x * size / x.square().mean().sqrt()


def test_a_declared_deviation_is_compared_at_a_level_that_all_comparisons_share():
    error = (2 * 10_000) ** -0.5
    start = Start("weight", std=1.0)
    assert not start.difference(drawn(1 + 4 * error))
    assert start.difference(drawn(1 + 6 * error))
    assert not start.difference(drawn(1 + 6 * error), compared=10**6)
    assert start.difference(drawn(1 + 8 * error), compared=10**6)


class Rotating(Decoder):
    """Holds frequencies in a buffer, and counts its calls in another."""

    def __init__(self):
        super().__init__(0.0)
        self.register_buffer("frequency", torch.linspace(1, 0.1, 16))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().forward(ids) + self.frequency.sum() * 0


def test_buffers_are_those_of_a_model_that_is_built_anew():
    model = Rotating()
    model.calls += 3
    assert report_of("buffers", model=model, make=Rotating).holds == ("buffers",)
    model.frequency *= 0.5
    assert first(report_of("buffers", model=model, make=Rotating)) == ("buffers", "frequency")
    assert "buffers" in report_of("buffers").untestable


def mixing(table: Tensor) -> Decoder:
    """A decoder, each of whose blocks begins with this table."""
    model = Decoder()
    for block in model.blocks:
        block.mix = nn.Parameter(table.clone())
    return model


def test_constants_that_are_equal_are_no_copies():
    identity = functools.partial(mixing, torch.eye(4) + 0.1)
    assert report_of("seeds", model=identity(), make=identity).holds == ("seeds",)
    assert report_of("seeds", model=identity()).untestable.keys() == {"seeds"}
    waves = functools.partial(mixing, torch.linspace(0, 5, 64).sin().reshape(8, 8))
    assert report_of("seeds", model=waves(), make=waves).holds == ("seeds",)


def test_equal_draws_fail_with_make_too():
    assert first(report_of("seeds", model=copied(), make=copied)) == ("seeds", "blocks.1.up.weight")


def copied() -> Decoder:
    model = Decoder()
    model.blocks = nn.ModuleList(copy.deepcopy(model.blocks[0]) for _ in range(4))
    return model


def grouped(count: int) -> Decoder:
    """A decoder that holds several matrices in one parameter, the last of them drawn smaller."""
    model = Decoder()
    model.parts = nn.Parameter(torch.randn(count, 16, 16))
    with torch.no_grad():
        model.parts[-1] *= 0.5
    return model


def test_parts_of_one_parameter_are_siblings_where_nothing_says_how_they_are_drawn():
    made, experts = functools.partial(grouped, 3), functools.partial(grouped, 6)
    assert not report_of("start", model=made()).failures
    assert not report_of("start", model=made(), make=made).failures
    assert not report_of("start", model=experts(), make=experts).failures
    assert first(report_of("start", model=experts())) == ("start", "parts[5]")


def test_copies_that_were_added_to_a_librarys_model_fail():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=23, n_positions=8, n_embd=16, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model, part = transformers.GPT2LMHeadModel(config), nn.Linear(16, 16)
    for block in model.transformer.h:
        block.added = copy.deepcopy(part)
    report = report_of("seeds", model=model, loss=lambda model, ids: model(ids, labels=ids).loss)
    assert first(report) == ("seeds", "transformer.h.1.added.weight")


class Scaled(Decoder):
    """Multiplies its stream by a buffer that no state dict holds."""

    def __init__(self, value: float, *, persistent: bool = False):
        super().__init__(0.0)
        self.register_buffer("size", torch.full((1,), value), persistent=persistent)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.size
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def test_a_buffer_that_nothing_fills_is_noted():
    report = report_of("buffers", model=Scaled(0.0))
    assert [note.module for note in report.notes] == ["size"]
    for sound in (Scaled(2.0), Scaled(0.0, persistent=True)):
        assert not report_of("buffers", model=sound).notes


# --------------------------------------------------------------------------------------- starts that are lost
class Special(nn.Module):
    """A block with starts of its own: a bias that is computed, and a map that begins at 0."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 32), nn.Linear(32, DIM)
        with torch.no_grad():
            self.up.bias.copy_(torch.linspace(-1, 1, 32).exp())
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def draw_old(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(0, 0.02)
        if module.bias is not None:
            module.bias.data.zero_()


def draw_new(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)


class Drawn(Decoder):
    """Draws all its maps by one function, before or after blocks with starts of their own are built."""

    def __init__(self, draw: Any, *, first: bool):
        super().__init__(0.0)
        if first:
            self.apply(draw)
        self.blocks = nn.ModuleList(Special() for _ in range(3))
        if not first:
            self.apply(draw)


@pytest.mark.parametrize(("draw", "lost"), [(draw_old, "up.bias"), (draw_new, "down.weight")])
@pytest.mark.parametrize("first_of_all", [True, False])
def test_a_start_that_a_block_gives_itself_is_not_drawn_over(draw: Any, lost: str, first_of_all: Any):
    make = functools.partial(Drawn, draw, first=first_of_all)
    torch.manual_seed(0)
    report = report_of("start", model=make(), make=make)
    assert first(report) == (("", "") if first_of_all else ("start", f"blocks.0.{lost}"))


def test_plain_draws_may_follow_each_other():
    class Twice(Decoder):
        def __init__(self):
            super().__init__(0.0)
            for block in self.blocks:
                nn.init.xavier_uniform_(block.up.weight)
            self.apply(draw_new)

    torch.manual_seed(0)
    assert report_of("start", model=Twice(), make=Twice).holds == ("start",)
