"""The residual stream, attention's scale, norms, and what is nonlinear between maps."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .tiny import DIM, VOCAB, Block, Decoder, first, report_of

HEADS = 2


class Attending(nn.Module):
    """A causal attention whose scores are scaled by a constant, and normalized over an axis."""

    def __init__(self, scale: float = (DIM / HEADS) ** -0.5, axis: int = -1):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.factor, self.axis = torch.tensor(scale), axis

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) * self.factor

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)

    def branch(self, x: Tensor) -> Tensor:
        rows, width, _ = x.shape
        q, k, v = (
            t.view(rows, width, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        later = torch.ones(width, width, dtype=torch.bool).triu(1)
        weights = self.scores(q, k).masked_fill(later, -1e9).softmax(self.axis)
        return self.out((weights @ v).transpose(1, 2).reshape(rows, width, DIM))


class Wide(Attending):
    """Heads that are together twice as wide as the stream, and scaled by the root of that width."""

    def __init__(self):
        super().__init__((2 * DIM) ** -0.5)
        self.qkv, self.out = nn.Linear(DIM, 6 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=float(self.factor))
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def rotated(x: Tensor, offset: Tensor | float = 0.0) -> Tensor:
    """Turn each pair of features by an angle that grows with the place."""
    angles = torch.arange(x.shape[-2])[:, None] * torch.arange(1, x.shape[-1] // 2 + 1) + offset
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class ScaledBeforeRotation(Attending):
    """Queries are scaled, then rotated."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return rotated(q * self.factor) @ rotated(k).transpose(-1, -2)


class LearntAngles(Attending):
    """Keys are turned by angles that are trained, which does not scale them."""

    def __init__(self, scale: float = (DIM / HEADS) ** -0.5):
        super().__init__(scale)
        self.angle = nn.Parameter(torch.zeros(DIM // HEADS // 2))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(rotated(q), rotated(k, self.angle))


class CosinesAndSines(LearntAngles):
    """Each feature stands twice, times the cosine and the sine of an angle, as in PoPE."""

    def __init__(self):
        super().__init__()
        self.angle = nn.Parameter(torch.zeros(DIM // HEADS))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        angles = torch.arange(q.shape[-2])[:, None] * torch.ones(q.shape[-1])
        q, k = (
            torch.cat([x * turned_by.cos(), x * turned_by.sin()], -1)
            for x, turned_by in ((q, angles), (k, angles + self.angle))
        )
        return Attending.scores(self, q, k)


class NormedQueries(Attending):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:]))


class Adapted(nn.Module):
    """A map with a correction of low rank and a factor of its own."""

    def __init__(self, plain: nn.Module, width: int, factor: float = 2.0):
        super().__init__()
        self.plain, self.factor = plain, factor
        self.down, self.up = nn.Linear(DIM, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x) + self.up(self.down(x)) * self.factor


class Apart(Attending):
    """Queries and keys by maps of their own; the queries' matrix is drawn smaller in place of a factor."""

    def __init__(self, factor: float = (DIM / HEADS) ** -0.5):
        super().__init__(1.0)
        self.q, self.k = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        nn.init.normal_(self.q.weight, std=0.1 * factor)
        nn.init.normal_(self.k.weight, std=0.1)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        pair = (m(x.transpose(1, 2).flatten(2)) for m, x in ((self.q, q), (self.k, k)))
        return super().scores(*(x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in pair))


def with_adapter(block: Attending) -> Attending:
    """Adapt the maps that make queries and keys."""
    if isinstance(block, Apart):
        block.q, block.k = Adapted(block.q, DIM), Adapted(block.k, DIM)
    else:
        block.qkv = Adapted(block.qkv, 3 * DIM)
    return block


def of_low_rank(block: Attending) -> Attending:
    """Make queries, keys and values through a width of two."""
    block.qkv = nn.Sequential(nn.Linear(DIM, 2, bias=False), nn.Linear(2, 3 * DIM, bias=False))
    return block


def decoder(block: Callable[[], nn.Module], at: int | None = None) -> Decoder:
    """A tiny decoder with other blocks, or another one at one place."""
    model = Decoder()
    for i in range(4):
        if at is None or i == at:
            model.blocks[i] = block()
    return model


class Replaced(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class Halved(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - 0.5 * x


class Doubled(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Detached(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


class DropsTheStream(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


class PostNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(F.gelu(self.up(x))))


class Skips(Decoder):
    """Leaves whole blocks out in training."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x if self.training and torch.rand(()) < 0.5 else block(x)
        return self.head(self.norm(x))


class Reentrant(Decoder):
    """Blocks in checkpoints, inside of which nothing has a graph."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(self.norm(x))


class Mixed(Block):
    """A block that reads the sum of several streams, and mixes the streams, or else their features."""

    def __init__(self, equation: str, size: int):
        super().__init__()
        self.equation, self.mix = equation, nn.Parameter(torch.eye(size) + 0.01)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.down(F.gelu(self.up(self.norm(x.sum(2)))))
        return torch.einsum(self.equation, x, self.mix) + branch[:, :, None]


class Streams(Decoder):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)[:, :, None].repeat(1, 1, 2, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.sum(2)))


class Affine(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)))


class Ordered(Decoder):
    order: tuple[int, ...] = (0, 1, 2, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for i in self.order:
            x = self.blocks[i](x)
        return self.head(self.norm(x))


class EachReadsTheEmbedding(Decoder):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            y = block(x)
        return self.head(self.norm(y))


@pytest.mark.parametrize(
    "model", [Decoder, Skips, Reentrant, lambda: decoder(PostNorm), lambda: decoder(Attending)]
)
def test_a_stream_that_is_passed_on_holds(model: Callable[[], nn.Module]):
    assert report_of("residual", model=model()).holds == ("residual",)


@pytest.mark.parametrize("block", [Replaced, Halved, Detached, DropsTheStream])
def test_a_block_that_does_not_pass_its_stream_on_fails(block: type[Block]):
    assert first(report_of("residual", model=decoder(block, 2))) == ("residual", "blocks.2")


class Guided(Decoder):
    """Reads, besides its own stream, that of a slow copy of itself, which runs without gradients."""

    def __init__(self, way: str, block: type[Block] = Block):
        super().__init__(0.0)
        self.slow = nn.ModuleList(block() for _ in range(3)).requires_grad_(False)
        self.way = way

    def stream(self, x: Tensor) -> Tensor:
        for block in self.slow:
            x = block(x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.way == "no_grad":
            with torch.no_grad():
                guide = self.stream(x)
        elif self.way == "decorated":
            guide = torch.no_grad()(self.stream)(x)
        else:
            guide = self.stream(x.detach())
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + guide))


@pytest.mark.parametrize("way", ["no_grad", "decorated", "detached"])
def test_a_stack_without_gradients_is_wired_like_any_other(way: str):
    assert report_of("residual", model=Guided(way)).holds == ("residual",)
    assert first(report_of("residual", model=Guided(way, Doubled))) == ("residual", "slow.0")


def test_a_stack_of_which_one_block_alone_runs_without_gradients_is_judged():
    class Cut(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return super().forward(x)

    assert first(report_of("residual", model=decoder(Cut, 2))) == ("residual", "blocks.2")


def test_a_norm_in_the_list_of_blocks_is_no_block():
    class Listed(Decoder):
        def __init__(self, *parts: nn.Module):
            super().__init__(0.0)
            self.body = nn.Sequential(*parts)

        def forward(self, ids: Tensor) -> Tensor:
            return self.body(self.embed(ids))

    torch.manual_seed(0)
    blocks = [Block() for _ in range(3)]
    end = [nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)]
    assert report_of("residual", model=Listed(*blocks, *end)).holds == ("residual",)
    between = Listed(*blocks[:2], nn.LayerNorm(DIM), blocks[2], *end)
    assert report_of("residual", model=between).holds == ("residual",)
    halved = Listed(*blocks[:1], Halved(), *blocks[1:], *end)
    assert first(report_of("residual", model=halved))[1] == "body.1"


def test_a_mix_of_streams_keeps_them_and_one_of_features_does_not():
    model = Streams()
    for i in range(4):
        model.blocks[i] = Mixed("btnd,nm->btmd", 2)
    assert report_of("residual", model=model).ok
    model.blocks[2] = Mixed("btnd,de->btne", DIM)
    assert first(report_of("residual", model=model)) == ("residual", "blocks.2")


def test_a_stream_that_each_block_adds_twice_fails():
    assert first(report_of("residual", model=decoder(Doubled))) == ("residual", "blocks.0")


@pytest.mark.parametrize(("order", "place"), [((0, 2, 1, 3), "blocks"), ((0, 1, 2), "blocks.3")])
def test_blocks_out_of_order_or_idle_fail(order: tuple[int, ...], place: str):
    model = Ordered()
    model.order = order
    assert first(report_of("residual", model=model)) == ("residual", place)


@pytest.mark.parametrize(
    ("order", "is_frozen", "is_named"),
    [((0, 1, 2), True, False), ((0, 1, 2), False, True), ((0, 1, 3), True, True)],
)
def test_features_of_a_frozen_stack_may_be_taken_before_its_end(
    order: tuple[int, ...], is_frozen: Any, is_named: Any
):
    model = Ordered()
    model.order = order
    model.blocks.requires_grad_(not is_frozen)
    report = report_of("residual", model=model)
    assert bool(report.failures) is is_named
    assert [note.module for note in report.notes] == ([] if is_named else ["blocks.3"])


def test_blocks_that_all_read_the_embedding_fail():
    assert first(report_of("residual", model=EachReadsTheEmbedding())) == ("residual", "blocks.1")


def test_a_block_that_stands_several_times_holds():
    def looped() -> Decoder:
        model = Decoder()
        model.blocks = nn.ModuleList([model.blocks[0]] * 4)
        return model

    report = report_of("residual", "ties", "seeds", model=looped(), make=looped)
    assert set(report.holds) == {"residual", "ties", "seeds"}


def shared(*places: int, block: Callable[[], nn.Module] = Attending) -> Ordered:
    """A decoder whose blocks stand in several places, each as often as its number is given."""
    model, built = Ordered(), [block() for _ in range(max(places) + 1)]
    model.blocks = nn.ModuleList(built[i] for i in places)
    model.order = tuple(range(len(places)))
    return model


class DetachedLater(Attending):
    """Passes no gradient on from its second call in a pass on."""

    def __init__(self):
        super().__init__()
        self.reads = 0

    def forward(self, x: Tensor) -> Tensor:
        self.reads += 1
        return super().forward(x if self.reads < 2 else x.detach())


@pytest.mark.parametrize("places", [(0, 1, 0), (0, 0, 1, 1), (0, 1, 2, 1, 0), (0, 0, 0)])
@pytest.mark.parametrize("block", [Attending, PostNorm])
def test_blocks_that_stand_in_several_places_pass_their_stream_on(
    places: tuple[int, ...], block: Callable[[], nn.Module]
):
    assert report_of("residual", model=shared(*places, block=block)).holds == ("residual",)


@pytest.mark.parametrize("rounds", [2, 3])
def test_a_stack_that_runs_in_rounds_passes_its_stream_on(rounds: int):
    model = shared(0, 1, 2)
    model.order = (0, 1, 2) * rounds
    assert report_of("residual", model=model).holds == ("residual",)


def test_every_call_of_a_shared_block_must_pass_its_stream_on():
    model = shared(0, 1, 0)
    model.blocks[0] = model.blocks[2] = DetachedLater()
    assert first(report_of("residual", model=model)) == ("residual", "blocks.0")


def of_a_reference_too(model: nn.Module, ids: Tensor) -> Tensor:
    """The loss of a model that is also its own reference, in a pass without a gradient."""
    with torch.no_grad():
        reference = model(ids[:, :-1]).softmax(-1)
    logits = model(ids[:, :-1])
    apart = -(reference * logits.log_softmax(-1)).sum(-1).mean()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) + 0.1 * apart


def test_a_pass_without_a_gradient_says_nothing_of_the_stream():
    assert report_of("residual", model=decoder(Attending), loss=of_a_reference_too).holds == ("residual",)
    broken = decoder(Detached, 2)
    assert first(report_of("residual", model=broken, loss=of_a_reference_too)) == ("residual", "blocks.2")


def test_shared_blocks_out_of_order_fail():
    model = shared(0, 1, 0, 2)
    model.order = (0, 2, 1, 3)
    assert first(report_of("residual", model=model)) == ("residual", "blocks")


def test_a_call_of_a_shared_block_whose_output_is_lost_is_seen():
    class LosesThird(Ordered):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.blocks[1](self.blocks[0](self.embed(ids)))
            self.blocks[2](x)
            return self.head(self.norm(self.blocks[3](x)))

    model = LosesThird()
    model.blocks = shared(0, 1, 0, 2).blocks
    assert first(report_of("residual", model=model)) == ("residual", "blocks.3")


class FunctionalBlock(Block):
    """A block whose norm is a function, and no module."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(functional_norm(x))))


def functional_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


class Mixing(Decoder):
    """Mixes the embedding into the stream between blocks, each by trained factors, and norms by functions."""

    last: Callable[[Tensor], Tensor] = staticmethod(functional_norm)

    def __init__(self):
        super().__init__()
        self.kept = nn.Parameter(torch.tensor([1.0, 1.1, 0.9, 1.2]))
        self.mixed = nn.Parameter(torch.full((4,), 0.1))
        self.blocks = nn.ModuleList(FunctionalBlock() for _ in range(4))
        self.norm = nn.Identity()

    def between(self, i: int, x: Tensor, first: Tensor) -> Tensor:
        return self.kept[i] * x + self.mixed[i] * first

    def forward(self, ids: Tensor) -> Tensor:
        first = x = functional_norm(self.embed(ids))
        for i, block in enumerate(self.blocks):
            x = block(self.between(i, x, first))
        return self.head(self.last(x))


class NormsBetween(Mixing):
    """Norms the stream between blocks."""

    def between(self, i: int, x: Tensor, first: Tensor) -> Tensor:
        return functional_norm(x)


class Caps(Mixing):
    """Caps the stream between blocks, and adds to it."""

    def between(self, i: int, x: Tensor, first: Tensor) -> Tensor:
        return torch.cat([(x + first).clamp(-50, 50)[..., :4], x[..., 4:] - 0.1], -1)


class WithoutLastNorm(Mixing):
    last = staticmethod(lambda x: x)


class Branches(Mixing):
    """A list of branches that are added to the stream: they are no blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Replaced() for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for branch in self.blocks:
            x = x + 0.5 * branch(functional_norm(x))
        return self.head(self.last(x))


@pytest.mark.parametrize("model", [Mixing, NormsBetween, Caps])
def test_a_stream_that_is_mixed_between_blocks_is_followed(model: Callable[[], nn.Module]):
    names = ("residual", "norms")
    assert report_of(*names, model=model()).holds == names
    broken = model()
    broken.blocks[2] = Replaced()
    assert first(report_of("residual", model=broken)) == ("residual", "blocks.2")


def test_a_head_that_reads_a_mixed_stream_without_a_norm_fails():
    assert first(report_of("norms", model=WithoutLastNorm())) == ("norms", "blocks.3")


def test_branches_in_a_list_are_no_blocks():
    assert "residual" in report_of("residual", model=Branches()).untestable


@pytest.mark.parametrize(
    "block", [Attending, ScaledBeforeRotation, LearntAngles, CosinesAndSines, lambda: NormedQueries(0.3)]
)
def test_scores_that_are_scaled_hold(block: Callable[[], nn.Module]):
    report = report_of("attention_scale", model=decoder(block))
    assert report.holds == ("attention_scale",)
    assert not report.notes


@pytest.mark.parametrize(
    "block",
    [
        lambda: Attending(1.0),
        lambda: Attending(DIM**-0.5),
        lambda: Attending(axis=-2),
        lambda: LearntAngles(1.0),
        Wide,
    ],
)
def test_scores_that_are_scaled_wrongly_fail(block: Callable[[], nn.Module]):
    assert first(report_of("attention_scale", model=decoder(block))) == ("attention_scale", "blocks.0")


@pytest.mark.parametrize(
    ("sound", "wrong"),
    [
        (lambda: with_adapter(Attending()), lambda: with_adapter(Attending(1.0))),
        (lambda: with_adapter(ScaledBeforeRotation()), lambda: with_adapter(ScaledBeforeRotation(1.0))),
        (lambda: with_adapter(Apart()), lambda: with_adapter(Apart(1.0))),
        (lambda: of_low_rank(Attending()), lambda: of_low_rank(Attending(1.0))),
    ],
)
def test_scores_are_read_beside_a_correction_of_low_rank(
    sound: Callable[[], nn.Module], wrong: Callable[[], nn.Module]
):
    torch.manual_seed(0)
    assert report_of("attention_scale", model=decoder(sound)).holds == ("attention_scale",)
    assert first(report_of("attention_scale", model=decoder(wrong))) == ("attention_scale", "blocks.0")


def test_one_layer_with_another_scale_fails():
    model = decoder(Attending)
    model.blocks[2] = Attending(0.5)
    assert first(report_of("attention_scale", model=model)) == ("attention_scale", "blocks.2")


class Gained(nn.Module):
    """An RMSNorm whose power or axis may be wrong."""

    def __init__(self, power: float = 0.5, axis: int = -1):
        super().__init__()
        self.weight, self.power, self.axis = nn.Parameter(torch.ones(DIM)), power, axis

    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().mean(self.axis, keepdim=True).pow(self.power) * self.weight


@pytest.mark.parametrize("norm", [lambda: Gained(1.0), lambda: Gained(0.25), lambda: Gained(axis=1)])
def test_what_does_not_norm_fails(norm: Callable[[], nn.Module]):
    model = Decoder()
    model.blocks[1].norm = norm()
    assert first(report_of("norms", model=model)) == ("norms", "blocks.1.norm")


class Contrasted(nn.Module):
    """Scales each feature by its size over all tokens, relative to the mean size (GRN)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        size = x.norm(dim=1, keepdim=True)
        return x + self.weight * x * size / size.mean(-1, keepdim=True)


def test_what_compares_features_over_tokens_is_no_norm_of_a_token():
    model = Decoder()
    model.blocks[1].down = nn.Sequential(nn.Linear(32, DIM), Contrasted())
    assert report_of("norms", model=model).holds == ("norms",)


def test_gains_around_zero_fail():
    model = Decoder()
    norms = [*(block.norm for block in model.blocks), model.norm]
    for i, norm in enumerate(norms):
        nn.init.normal_(norm.weight, std=0.1, generator=torch.Generator().manual_seed(i))
    assert first(report_of("norms", model=model)) == ("norms", "blocks.0.norm")


def test_a_stream_that_reaches_the_head_without_a_norm_fails():
    model = Decoder()
    assert report_of("residual", "norms", model=model).holds == ("residual", "norms")
    model.norm = nn.Identity()
    assert first(report_of("residual", "norms", model=model)) == ("norms", "blocks.3")


def regressed(model: nn.Module, ids: Tensor) -> Tensor:
    return (model(ids) - 1).square().mean()


def test_outputs_that_no_class_is_scored_by_may_grow_with_the_stream():
    model = Decoder()
    model.norm = nn.Identity()
    report = report_of("norms", model=model, loss=regressed)
    assert report.holds == ("norms",)
    assert [note.module for note in report.notes] == ["blocks.3"]


class Branching(Decoder):
    """Has a short stack of its own on top of the normed stream, without a norm behind it."""

    def __init__(self):
        super().__init__(0.0)
        self.top = nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU()) for _ in range(2)))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.top(self.norm(x)))


def test_a_norm_is_looked_for_behind_the_last_stack_alone():
    model = Branching()
    assert report_of("norms", model=model).holds == ("norms",)
    model.norm = nn.Identity()
    assert first(report_of("norms", model=model)) == ("norms", "blocks.3")


class Chosen(nn.Module):
    """Looks entries up by a product with one-hot rows, or with shares, and maps them to features."""

    def __init__(self, *, hard: bool, choose: bool = True):
        super().__init__()
        self.ask, self.out = nn.Linear(DIM, 6), nn.Linear(24, DIM)
        self.entries, self.hard, self.choose = nn.Parameter(torch.randn(6, 24)), hard, choose

    def forward(self, x: Tensor) -> Tensor:
        asked = self.ask(x)
        if self.choose:
            asked = F.gumbel_softmax(asked, hard=self.hard)
        return x + self.out(asked @ self.entries)


@pytest.mark.parametrize("hard", [True, False])
def test_a_lookup_by_shares_is_no_linear_map(hard: Any):
    model = Decoder()
    model.blocks[1] = Chosen(hard=hard)
    assert report_of("nonlinear", model=model).holds == ("nonlinear",)
    model.blocks[1] = Chosen(hard=hard, choose=False)
    assert first(report_of("nonlinear", model=model))[0] == "nonlinear"


def test_two_wide_maps_in_a_row_fail():
    assert report_of("nonlinear").holds == ("nonlinear",)
    assert first(report_of("nonlinear", model=decoder(Affine)))[0] == "nonlinear"


def test_a_narrow_pair_of_maps_holds():
    model = Decoder()
    model.head = nn.Sequential(nn.Linear(DIM, 4, bias=False), nn.Linear(4, VOCAB))
    assert report_of("nonlinear", model=model).holds == ("nonlinear",)


class KeepsItsScale(Attending):
    """Holds the scale of its scores in a buffer that no state dict holds."""

    def __init__(self, scale: float):
        super().__init__()
        del self.factor
        self.register_buffer("factor", torch.tensor(scale), persistent=False)


def test_a_buffer_that_holds_a_wrong_scale_is_named():
    def with_scale(scale: float) -> Decoder:
        model = Decoder(0.0)
        model.blocks = nn.ModuleList(KeepsItsScale(scale) for _ in range(3))
        return model

    report = report_of("attention_scale", model=with_scale(DIM**-0.5))
    assert first(report) == ("attention_scale", "blocks.0")
    assert re.search(rf"\bfactor .*{DIM**-0.5:.4g}", report.failures[0].evidence)
    assert report_of("attention_scale", model=with_scale((DIM / HEADS) ** -0.5)).holds == ("attention_scale",)


# ------------------------------------------------------------------------------------ layers that are lists
class Reading(Attending):
    """An attention alone: what it makes of the stream is added by whoever calls it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.branch(x)


class Lists(Decoder):
    """Layers that are lists of an attention and a feed-forward, and are never called themselves."""

    def __init__(self, norms: type[nn.Module] = nn.Identity):
        super().__init__(0.0)
        branches = [nn.Sequential(nn.Linear(DIM, 32), nn.GELU(), nn.Linear(32, DIM)) for _ in range(3)]
        self.blocks = nn.ModuleList(nn.ModuleList([Reading(), branch]) for branch in branches)
        self.before = norms(DIM)

    def after(self, x: Tensor, branch: Tensor, layer: int) -> Tensor:
        return x + branch

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for i, (attention, feed_forward) in enumerate(self.blocks):
            x = x + attention(self.before(x))
            x = self.after(x, feed_forward(self.before(x)), i)
        return self.head(self.norm(x))


class ListsWithoutStream(Lists):
    def after(self, x: Tensor, branch: Tensor, layer: int) -> Tensor:
        return branch


class ListsThatLoseItOnce(Lists):
    def after(self, x: Tensor, branch: Tensor, layer: int) -> Tensor:
        return branch if layer == 1 else x + branch


class ListsWithSquareMaps(Lists):
    """The maps of each feed-forward are as wide as the stream, and only add to it together."""

    def __init__(self):
        super().__init__()
        for layer in self.blocks:
            layer[1] = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), Caught(), nn.Linear(DIM, DIM))


class Caught(nn.Module):
    """A gate of parameters that are no matrices."""

    def __init__(self):
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.ones(DIM)), nn.Parameter(torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.gain * x + self.bias)


class ListsOfTwoStreams(Lists):
    """Two streams, which are mixed before each layer reads one and adds to both."""

    def forward(self, ids: Tensor) -> Tensor:
        streams = self.embed(ids)[..., None].repeat(1, 1, 1, 2)
        mix = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=streams.dtype)
        for attention, feed_forward in self.blocks:
            for branch in (attention, feed_forward):
                streams = streams @ mix
                streams = streams + branch(streams[..., 0])[..., None]
        return self.head(self.norm(streams.sum(-1)))


class ListsSideBySide(Lists):
    """Each list reads the embedding, and the sum goes on."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        branches = [attention(x) + feed_forward(x) for attention, feed_forward in self.blocks]
        return self.head(self.norm(torch.stack(branches).sum(0)))


@pytest.mark.parametrize(
    "model", [Lists, lambda: Lists(nn.LayerNorm), ListsWithSquareMaps, ListsOfTwoStreams]
)
def test_layers_that_are_lists_pass_their_stream_on(model: Callable[[], nn.Module]):
    assert report_of("residual", model=model()).holds == ("residual",)


@pytest.mark.parametrize("norms", [nn.Identity, nn.LayerNorm])
@pytest.mark.parametrize(
    ("kind", "place"), [(ListsWithoutStream, "blocks.0"), (ListsThatLoseItOnce, "blocks.1")]
)
def test_layers_that_are_lists_and_lose_their_stream_fail(
    kind: type[Lists], place: str, norms: type[nn.Module]
):
    assert first(report_of("residual", model=kind(norms))) == ("residual", place)


def test_lists_and_parts_that_do_not_follow_each_other_are_no_layers():
    assert "residual" in report_of("residual", model=ListsSideBySide()).untestable
