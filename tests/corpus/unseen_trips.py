"""Planted faults, and their sound twins, in round trips: state, precision and generation caches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from corpus.case import Arguments, Case, collect
from corpus.unseen_parts import EOS, Block, SwiGlu, adamw, draw, groups, heads_of, next_token, rotate, text

CASES: dict[str, Case] = {}
case = collect(CASES)


class FourierPositions(nn.Module):
    """Positions as a projection of waves with random frequencies."""

    def __init__(self, d: int, *, kept: bool) -> None:
        super().__init__()
        if kept:
            self.register_buffer("frequencies", torch.rand(d // 2))
        else:
            self.frequencies = torch.rand(d // 2)
        self.proj = nn.Linear(d, d)

    def forward(self, length: int) -> Tensor:
        at = torch.arange(length, device=self.proj.weight.device).float()
        phase = at[:, None] * self.frequencies.to(at.device)
        return self.proj(torch.cat((phase.sin(), phase.cos()), dim=-1))


class FourierDecoder(nn.Module):
    """A decoder with such positions."""

    def __init__(self, vocabulary: int = 180, d: int = 64, *, kept: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, d)
        self.positions = FourierPositions(d, kept=kept)
        self.blocks = nn.ModuleList(Block(d, 4) for _ in range(2))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocabulary, bias=False)
        self.apply(draw)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(ids.shape[1])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _fourier(*, kept: bool) -> Arguments:
    torch.manual_seed(118)
    return {
        "model": FourierDecoder(kept=kept),
        "batch": text(4, 24, 180, seed=19),
        "loss": next_token,
        "optimizer": adamw(1e-3),
        "make": lambda: FourierDecoder(kept=kept),
    }


@case("state_dict", "buffers", "meta")
def random_frequencies_not_saved() -> Arguments:
    """Random frequencies are a plain attribute: a checkpoint misses them, and a loaded model has others."""
    return _fourier(kept=False)


@case()
def random_frequencies_not_saved_sound() -> Arguments:
    return _fourier(kept=True)


class PositionedGpt(GPT2LMHeadModel):
    """A GPT-2 that counts its positions from the tokens in its cache on."""

    def past(self, cache: Any) -> int:
        """Return the number of tokens that came before."""
        return cache.get_seq_length() if cache is not None else 0

    def forward(self, input_ids: Tensor, past_key_values: Any = None, **options: Any) -> Any:
        start = self.past(past_key_values)
        at = torch.arange(start, start + input_ids.shape[1], device=input_ids.device)
        options["position_ids"] = at.expand_as(input_ids)
        return super().forward(input_ids, past_key_values=past_key_values, **options)


class RestartingGpt(PositionedGpt):
    """The same, but positions are counted from zero in each call."""

    def past(self, cache: Any) -> int:
        return 0


def _positioned(kind: type[PositionedGpt]) -> Arguments:
    torch.manual_seed(119)

    def make() -> PositionedGpt:
        return kind(
            GPT2Config(
                vocab_size=200,
                n_positions=64,
                n_embd=64,
                n_layer=2,
                n_head=4,
                bos_token_id=1,
                eos_token_id=EOS,
            )
        )

    model = make()
    ids = text(4, 24, 200, seed=20)
    return {
        "model": model,
        "batch": {"input_ids": ids, "labels": ids.clone()},
        "optimizer": torch.optim.AdamW(groups(model, 0.1), lr=5e-4),
        "make": make,
        "declare": {"tied": True},
    }


@case("cache")
def cached_positions_restart() -> Arguments:
    """Positions are counted from zero in each call, so that a token after a cache stands at the start."""
    return _positioned(RestartingGpt)


@case()
def cached_positions_restart_sound() -> Arguments:
    return _positioned(PositionedGpt)


class RotaryTable(nn.Module):
    """Angles of rotary positions as a matrix product, which autocast would round."""

    def __init__(self, width: int, *, exact: bool) -> None:
        super().__init__()
        self.exact = exact
        self.register_buffer("rates", 10000.0 ** (-torch.arange(0, width, 2).float() / width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        at = torch.arange(x.shape[1], device=x.device).float()
        with torch.autocast(x.device.type, enabled=False) if self.exact else nullcontext():
            turn = at[:, None] @ self.rates[None].to(at.dtype)
            return turn.cos().to(x.dtype), turn.sin().to(x.dtype)


class TableAttention(nn.Module):
    """Causal attention that gets its rotary table from outside."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.out = nn.Linear(d, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (heads_of(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class TableBlock(nn.Module):
    """A Pre-norm block of such attention."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(d, eps=1e-6)
        self.attn = TableAttention(d, heads)
        self.mlp_norm = nn.RMSNorm(d, eps=1e-6)
        self.mlp = SwiGlu(d, 2 * d)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class TableDecoder(nn.Module):
    """A Llama-like decoder that computes one rotary table for all layers."""

    def __init__(self, vocabulary: int = 256, d: int = 64, heads: int = 2, *, exact: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.rotary = RotaryTable(d // heads, exact=exact)
        self.layers = nn.ModuleList(TableBlock(d, heads) for _ in range(3))
        self.norm = nn.RMSNorm(d, eps=1e-6)
        self.head = nn.Linear(d, vocabulary, bias=False)
        self.apply(draw)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        cos, sin = self.rotary(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def _autocast_loss(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        logits = model(ids[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def _autocast(*, exact: bool) -> Arguments:
    torch.manual_seed(120)
    return {
        "model": TableDecoder(exact=exact),
        "batch": text(4, 48, 256, seed=21),
        "loss": _autocast_loss,
        "optimizer": adamw(1e-3),
        "make": lambda: TableDecoder(exact=exact),
    }


@case("precision", place="rotary*|layers.*.attn*|layers.?")
def rotary_angles_under_autocast() -> Arguments:
    """Autocast takes the product of positions and rates in bfloat16, and angles lose their digits."""
    return _autocast(exact=False)


@case()
def rotary_angles_under_autocast_sound() -> Arguments:
    return _autocast(exact=True)
