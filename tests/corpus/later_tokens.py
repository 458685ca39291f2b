"""Faults in the numbers themselves and in what a token sees."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.case import Arguments, Case
from corpus.later_parts import (
    Encoder,
    Experts,
    Llama,
    LlamaBlock,
    MixtureLm,
    Rms,
    cross_entropy_of,
    next_token_and_balance,
    pairs,
    seeded,
)
from corpus.unseen_parts import (
    EOS,
    PAD,
    Block,
    CausalAttention,
    Gpt,
    adamw,
    draw,
    next_real_token,
    next_token,
    padded,
    text,
)

CASES: dict[str, Case] = {}
planted = pairs(CASES)


class RootRms(Rms):
    """The division by the root, to which eps is added afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class NarrowEmbeddings(Llama):
    """Narrow embeddings, widened by a projection without bias; that of the padding is zero."""

    def __init__(self, norm: type[nn.Module]) -> None:
        self.norm_class = norm
        super().__init__()
        self.embed = nn.Sequential(nn.Embedding(220, 24, padding_idx=PAD), nn.Linear(24, 64, bias=False))
        self.embed.apply(draw)
        with torch.no_grad():
            self.embed[0].weight[PAD].zero_()

    def block(self, d: int) -> nn.Module:
        return LlamaBlock(d, self.norm_class)


@planted("finite", place="blocks.0*|embed*|")
def root_of_a_zero_token(*, faulty: bool) -> Arguments:
    """The gradient of the root of zero is infinite at the padding, and the projection's is not a number."""

    def make() -> nn.Module:
        return NarrowEmbeddings(RootRms if faulty else Rms)

    ids, _ = padded([24, 17, 21, 12], 24, 220, seed=1)
    return {
        "model": seeded(make, 1),
        "batch": {"ids": ids},
        "loss": next_real_token,
        "optimizer": adamw(1e-3),
        "make": make,
        "declare": {"pad_id": PAD},
    }


class NoisyExperts(Experts):
    """Noise of a learned size spreads the tokens over the experts."""

    def __init__(self, d: int, *, always: bool) -> None:
        super().__init__(d)
        self.always = always
        self.noise = nn.Linear(d, 4, bias=False)

    def scores(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        if self.training or self.always:
            scores = scores + torch.randn_like(scores) * F.softplus(self.noise(x))
        return scores


@planted("evaluation_repeats", place="blocks.0*|blocks.?.moe*")
def router_noise_in_evaluation(*, faulty: bool) -> Arguments:
    """The router draws its noise in evaluation, too."""

    def make() -> nn.Module:
        return MixtureLm(lambda d: NoisyExperts(d, always=faulty))

    return {
        "model": seeded(make, 2),
        "batch": text(4, 32, 220, seed=2),
        "loss": next_token_and_balance,
        "optimizer": adamw(6e-4),
    }


class ShiftedMlp(nn.Module):
    """A squared-ReLU feed-forward that mixes each token with the one before it, as RWKV does."""

    def __init__(self, d: int, *, rolled: bool) -> None:
        super().__init__()
        self.rolled = rolled
        self.share = nn.Parameter(torch.linspace(0.1, 0.9, d))
        self.up = nn.Linear(d, 3 * d, bias=False)
        self.proj = nn.Linear(3 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        before = torch.roll(x, 1, dims=1) if self.rolled else F.pad(x, (0, 0, 1, -1))
        mixed = self.share * x + (1 - self.share) * before
        return self.proj(F.relu(self.up(mixed)).square())


class ShiftedBlock(Block):
    def __init__(self, d: int, heads: int, dropout: float = 0.0, *, rolled: bool = False) -> None:
        super().__init__(d, heads, dropout)
        self.mlp = ShiftedMlp(d, rolled=rolled)


class RolledBlock(ShiftedBlock):
    def __init__(self, d: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__(d, heads, dropout, rolled=True)


class ShiftedGpt(Gpt):
    block = ShiftedBlock


class RolledGpt(Gpt):
    block = RolledBlock


@planted("causality", place="blocks.0|blocks.0.mlp*")
def token_shift_rolls_round(*, faulty: bool) -> Arguments:
    """The token before the first one is the last one: the shift is a roll."""
    make = RolledGpt if faulty else ShiftedGpt
    return {
        "model": seeded(make, 3),
        "batch": text(4, 24, 200, seed=3),
        "loss": next_token,
        "optimizer": adamw(1e-3),
        "make": make,
    }


class MasksInWrongOrder(Encoder):
    def hidden_pairs(self, real: Tensor) -> Tensor:
        hidden = ~real.bool()[:, None].expand(-1, real.shape[1], -1)
        return hidden.repeat(4, 1, 1)


@planted("padding", "rows", place="layers.0*|")
def masks_repeated_by_head(*, faulty: bool) -> Arguments:
    """nn.MultiheadAttention wants a row's heads side by side: each row gets the masks of other rows."""
    kind = MasksInWrongOrder if faulty else Encoder

    def make() -> nn.Module:
        return kind(180, 9)

    ids, mask = padded([20, 9, 14, 17], 20, 180, seed=4)
    labels = (ids * 7 % 9).masked_fill(mask == 0, -100)
    return {
        "model": seeded(make, 4),
        "batch": {"ids": ids, "mask": mask, "labels": labels},
        "loss": lambda model, batch: cross_entropy_of(model(batch["ids"], batch["mask"]), batch),
        "optimizer": adamw(5e-4, 0.01),
        "declare": {"pad_id": PAD, "causal": False},
    }


class PackedLlama(Llama):
    """Documents in a row end with EOS and do not see each other."""

    eos_opens = False

    def seen(self, ids: Tensor) -> Tensor:
        ends = (ids == EOS).long()
        document = ends.cumsum(1) if self.eos_opens else ends.cumsum(1) - ends
        same = document[:, None, :, None] == document[:, None, None, :]
        return same & torch.ones_like(same).tril()


class EosOpensLlama(PackedLlama):
    eos_opens = True


def within_documents(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the mean cross entropy of the next token, except for the first one of a document."""
    targets = ids[:, 1:].masked_fill(ids[:, :-1] == EOS, -100)
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100)


@planted("documents", place="blocks.0*|")
def eos_opens_the_next_document(*, faulty: bool) -> Arguments:
    """An inclusive sum counts each EOS to the document after it."""
    make = EosOpensLlama if faulty else PackedLlama
    ids = text(4, 40, 220, seed=5)
    for row, ends in enumerate(((11, 25), (7, 19, 33), (22,), (15, 30))):
        ids[row, list(ends)] = EOS
    ends = (ids == EOS).long()
    return {
        "model": seeded(make, 5),
        "batch": ids,
        "loss": within_documents,
        "optimizer": adamw(1e-3),
        "make": make,
        "declare": {"eos_id": EOS, "documents": ends.cumsum(1) - ends},
    }


class LatentAttention(CausalAttention):
    """Latent attention: keys and values from a narrow latent, positions in features of their own."""

    nope, rope = 8, 8

    def __init__(self, d: int, heads: int, dropout: float = 0.0, *, whole: bool = True) -> None:
        super().__init__(d, heads, dropout)
        del self.qkv
        width = self.nope + self.rope
        self.scale = (width if whole else self.nope) ** -0.5
        self.q = nn.Linear(d, heads * width, bias=False)
        self.down = nn.Linear(d, 24, bias=False)
        self.norm = Rms(24)
        self.up = nn.Linear(24, heads * (self.nope + d // heads), bias=False)
        self.k_rope = nn.Linear(d, self.rope, bias=False)

    def turned(self, x: Tensor) -> Tensor:
        """Turn pairs of features by their positions."""
        rates = 100.0 ** (-torch.arange(0, self.rope, 2, device=x.device).to(x.dtype) / self.rope)
        angles = torch.arange(x.shape[-2], device=x.device).to(x.dtype)[:, None] * rates
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        kv = self.up(self.norm(self.down(x))).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = kv[..., : self.nope], kv[..., self.nope :]
        k_rope = self.turned(self.k_rope(x))[:, None].expand(-1, self.heads, -1, -1)
        q = torch.cat((q[..., : self.nope], self.turned(q[..., self.nope :])), dim=-1)
        scores = q @ torch.cat((k, k_rope), dim=-1).transpose(-1, -2) * self.scale
        ahead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        y = scores.masked_fill(ahead, float("-inf")).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).flatten(2))


class LatentBlock(Block):
    whole = True

    def __init__(self, d: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__(d, heads, dropout)
        self.attn = LatentAttention(d, heads, dropout, whole=self.whole)


class NarrowScaleBlock(LatentBlock):
    whole = False


class LatentGpt(Gpt):
    block = LatentBlock

    def embed(self, ids: Tensor) -> Tensor:
        return self.drop(self.wte(ids))

    def __init__(self) -> None:
        super().__init__()
        del self.wpe


class NarrowScaleGpt(LatentGpt):
    block = NarrowScaleBlock


@planted("attention_scale", place="blocks.?|blocks.?.attn*")
def latent_scale_of_half_the_features(*, faulty: bool) -> Arguments:
    """Scores over 16 features are scaled for the 8 that hold no position."""
    make = NarrowScaleGpt if faulty else LatentGpt
    return {
        "model": seeded(make, 6),
        "batch": text(4, 32, 200, seed=6),
        "loss": next_token,
        "optimizer": adamw(1e-3),
        "make": make,
    }
