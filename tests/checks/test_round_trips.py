"""State dicts, the meta device, caches, and low precision."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cases import each
from normlab.lab.recipes.build import build
from normlab.trace.starts import cast_alike

from .tiny import DIM, LENGTH, Decoder, first, groups, loss_of, report_of, tokens


class Positioned(Decoder):
    """A decoder with a table of positions, held in one way or another."""

    kind = "parameter"

    def __init__(self):
        super().__init__()
        table = torch.randn(LENGTH, DIM)
        if self.kind == "parameter":
            self.table: Any = nn.Parameter(table)
        elif self.kind == "attribute":
            self.table = table
        else:
            self.register_buffer("table", table * 0 + 1, persistent=self.kind == "buffer")

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.table[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def made(held: str) -> dict[str, Any]:
    kind = type("Made", (Positioned,), {"kind": held})
    torch.manual_seed(0)
    return {"model": kind(), "make": kind}


@pytest.mark.parametrize("held", ["parameter", "buffer", "computed"])
def test_what_is_saved_or_made_the_same_comes_back(held: str):
    assert report_of("state_dict", **made(held)).holds == ("state_dict",)


class Turned(Decoder):
    """Turns pairs of features by the position's angles, from frequencies that lose much in low precision."""

    table: Any = staticmethod(lambda: 5e5 ** -torch.linspace(0, 1, DIM // 2))

    def __init__(self):
        super().__init__(dropout=0.0)
        self.register_buffer("frequency", self.table(), persistent=False)

    def rotation(self, width: int) -> Tensor:
        angles = torch.arange(width).to(self.frequency)[:, None] * self.frequency
        return torch.polar(torch.ones_like(angles), angles)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        pairs = torch.view_as_complex(
            x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, 2))
        )
        x = torch.view_as_real(pairs * self.rotation(ids.shape[1])).flatten(-2).to(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class TurnedByComplex(Turned):
    """The same, from a table of complex numbers."""

    table: Any = staticmethod(
        lambda: torch.polar(torch.ones(LENGTH, DIM // 2), torch.outer(torch.arange(LENGTH), Turned.table()))
    )

    def rotation(self, width: int) -> Tensor:
        return self.frequency[:width]


class TurnedWithCounts(TurnedByComplex):
    """The same, with a float64 and a whole number in buffers beside the table."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(1 / 3, dtype=torch.float64), persistent=False)
        self.register_buffer("seen", torch.tensor(3))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale.to(self.head.weight)


def in_low_precision(model: nn.Module) -> nn.Module:
    """Cast the parameters alone, and no buffer."""
    for p in model.parameters():
        p.data = p.data.bfloat16()
    return model


def low_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2).float(), ids[:, 1:])


@pytest.mark.slow
@each("low", [False, True])
@each("kind", [Turned, TurnedByComplex, TurnedWithCounts], ids=lambda cls: cls.__name__)
def test_a_new_model_is_cast_as_the_model_was_and_no_further(kind, low):
    """The model was made in float32, or cast after that; ``make`` gives it as its class does, in float32."""
    model = in_low_precision(kind()) if low else kind()
    report = report_of("state_dict", model=model, make=kind, loss=low_loss)
    assert report.holds == ("state_dict",)


@each("kind", [Turned, TurnedByComplex, TurnedWithCounts], ids=lambda cls: cls.__name__)
def test_every_type_of_number_is_the_models_own(kind):
    model, made = in_low_precision(kind()), kind()
    cast_alike(made, model)
    assert {n: x.dtype for n, x in made.state_dict().items()} == {
        n: x.dtype for n, x in model.state_dict().items()
    }
    assert {n: x.dtype for n, x in made.named_buffers()} == {n: x.dtype for n, x in kind().named_buffers()}


def test_a_buffer_that_was_cast_with_its_model_is_cast_in_the_new_one():
    model, made = TurnedWithCounts().half(), TurnedWithCounts()
    cast_alike(made, model)
    for name in ("frequency", "scale", "seen"):
        assert torch.equal(made.get_buffer(name), model.get_buffer(name))
        assert made.get_buffer(name).dtype == model.get_buffer(name).dtype


@pytest.mark.slow
@each("wrap", [partial(torch.compile, backend="eager"), nn.DataParallel], ids=["compiled", "parallel"])
@each("both", [True, False])
def test_a_new_model_has_names_without_those_of_wrappers(wrap, both):
    def make() -> nn.Module:
        return wrap(Decoder())

    report = report_of("state_dict", "meta", "seeds", model=make() if both else Decoder(), make=make)
    assert report.holds == ("seeds", "state_dict", "meta")


def test_a_drawn_attribute_is_lost():
    assert first(report_of("state_dict", **made("attribute"))) == ("state_dict", "table")


def test_a_copy_is_loaded_without_make():
    report = report_of("state_dict", model=made("attribute")["model"])
    assert report.ok
    assert [n.module for n in report.notes] == ["table"]


class LeftOut(Positioned):
    """Leaves its table out of its state dict."""

    def __init__(self):
        super().__init__()
        self.table.requires_grad_(False)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **options)
        del state["table"]
        return state


def test_a_declared_frozen_part_may_be_left_out():
    report = report_of("state_dict", model=LeftOut(), make=LeftOut, declare={"frozen": "table"})
    assert report.ok
    assert [n.module for n in report.notes] == ["table"]
    assert first(report_of("state_dict", model=LeftOut(), make=LeftOut)) == ("state_dict", "table")


def test_make_must_build_the_same_model():
    assert first(report_of("state_dict", make=lambda: Positioned()))[0] == "state_dict"


@pytest.mark.parametrize(
    ("held", "place"), [("parameter", ""), ("computed", "table"), ("attribute", "table")]
)
def test_what_meta_loses_is_a_note(held: str, place: str):
    report = report_of("meta", **made(held))
    assert report.ok
    assert [n.module for n in report.notes] == ([place] if place else [])


def test_a_model_of_its_own_device_has_no_meta():
    model = Decoder()
    assert "meta" in report_of("meta", model=model, make=lambda: model).untestable


def test_a_model_that_cannot_be_made_on_meta_says_why():
    def make() -> Decoder:
        model = Decoder()
        if next(model.parameters()).is_meta:
            raise ValueError("it reads its weights")
        return model

    why = report_of("meta", model=Decoder(), make=make).untestable["meta"]
    assert why == "make() raises ValueError on the meta device: it reads its weights"


def test_a_model_can_be_built_from_a_recipe_on_meta():
    with torch.device("meta"):
        assert all(p.is_meta for p in build("admin", 20, dim=8, heads=2, decoder_layers=1).parameters())


def library_model(shift: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")

    class Shifted(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Tensor, past_key_values: Any = None, **rest: Any) -> Any:
            if past_key_values is not None:
                seen = past_key_values.get_seq_length() + shift
                rest["position_ids"] = torch.arange(seen, seen + input_ids.shape[1])[None]
            return super().forward(input_ids=input_ids, past_key_values=past_key_values, **rest)

    torch.manual_seed(0)
    sizes = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return Shifted(transformers.LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=32))


@pytest.mark.parametrize(("shift", "place"), [(0, ("", "")), (1, ("cache", ""))])
def test_a_cache_gives_the_full_pass(shift: int, place: tuple[str, str]):
    ids = torch.randint(1, 23, (2, 8), generator=torch.Generator().manual_seed(0))
    report = report_of(
        "cache", model=library_model(shift), batches={"input_ids": ids, "labels": ids}, loss=None
    )
    assert first(report) == place
    assert not report.untestable


class Angles(nn.Module):
    """Adds the cosines of large angles, which are made in the type of the stream."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1]).to(self.dtype if x.dtype == torch.bfloat16 else x.dtype) * 100.3
        return x + angles[:, None].cos().to(x.dtype)


class Turning(Decoder):
    def __init__(self, dtype: torch.dtype):
        super().__init__(0.0)
        self.angles = Angles(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.angles(self.embed(ids))
        for block in self.blocks:
            x = x + block.down(F.gelu(block.up(block.norm(x))))
        return self.head(self.norm(x))


def test_angles_in_low_precision_fail():
    sound, lossy = (Turning(dtype).to(torch.bfloat16) for dtype in (torch.float32, torch.bfloat16))
    assert report_of("precision", model=sound).holds == ("precision",)
    assert first(report_of("precision", model=lossy)) == ("precision", "angles")
    assert "precision" in report_of("precision").untestable


def divergence(model: nn.Module, batch: dict[str, Tensor], *, wide: bool) -> Tensor:
    both = model(batch["ids"]), batch["logits"]
    logits, targets = ((x.float() if wide else x).log_softmax(-1) for x in both)
    return F.kl_div(logits, targets, reduction="none", log_target=True).sum(-1).mean()


@pytest.mark.parametrize(("wide", "failing"), [(True, ("", "")), (False, ("precision", "loss"))])
def test_a_loss_that_cancels_in_low_precision_fails(*, wide: bool, failing: tuple[str, str]):
    torch.manual_seed(0)
    model, ids = Turning(torch.float32).to(torch.bfloat16), tokens()
    logits = model(ids).detach()
    batch = {"ids": ids, "logits": logits + 0.02 * torch.randn(logits.shape).to(logits)}
    loss = partial(divergence, wide=wide)
    assert first(report_of("precision", model=model, batches=batch, loss=loss)) == failing


class Multiplied(Turning):
    """Angles by a product, which autocast makes in low precision unless that is turned off."""

    def __init__(self, *, kept: bool):
        super().__init__(torch.float32)
        self.angles = Products(kept=kept)


class Products(nn.Module):
    def __init__(self, *, kept: bool):
        super().__init__()
        self.kept = kept
        self.register_buffer("rates", torch.linspace(0.1, 1, 16)[None] * 100.3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=not self.kept and torch.is_autocast_enabled("cpu")):
            return x + (torch.arange(1.0, x.shape[1] + 1)[:, None] @ self.rates).cos()


def under_autocast(model: nn.Module, batch: Tensor, optimizer: Any = None, scheduler: Any = None) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, batch)
    if optimizer is not None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss


@pytest.mark.parametrize("way", ["step", "loss"])
def test_angles_that_autocast_rounds_fail(way: str):
    rest: dict[str, Any] = {way: under_autocast, "optimizer": groups}
    assert report_of("precision", model=Multiplied(kept=True), **rest).holds == ("precision",)
    assert first(report_of("precision", model=Multiplied(kept=False), **rest)) == ("precision", "angles")


class Remembered:
    """What a recurrence keeps, from the last call on."""

    state: Tensor | None = None


class Remembering(nn.Module):
    """Begins with what it remembers."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, memory: Remembered) -> Tensor:
        begin = 0 if memory.state is None else memory.state
        memory.state = self.lift(x).cumsum(1)[:, -1:]
        return x + begin


class WithMemory(Decoder):
    """Passes an object to a block, which fills it."""

    def __init__(self):
        super().__init__()
        self.remember = Remembering()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.remember(self.embed(ids), Remembered())))


class Choosing(nn.Module):
    """Takes the expert with the largest score, of scores that differ by less than they are rounded by."""

    def __init__(self):
        super().__init__()
        self.score, self.experts = nn.Linear(DIM, 8), nn.Parameter(torch.randn(8, DIM))
        nn.init.constant_(self.score.weight, 0.1)
        with torch.no_grad():
            self.score.weight += 1e-3 * torch.randn(8, DIM)
            self.score.bias.fill_(4.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.experts[self.score(x).argmax(-1)]


class WithChoice(Decoder):
    """Scales each token by an expert."""

    def __init__(self):
        super().__init__()
        self.choose = Choosing()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.choose(self.embed(ids))))


@pytest.mark.parametrize("kind", [WithMemory, WithChoice])
def test_neither_memory_nor_another_choice_is_rounding(kind: type[nn.Module]):
    torch.manual_seed(0)
    assert report_of("precision", model=in_low_precision(kind())).holds == ("precision",)
