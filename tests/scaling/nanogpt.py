"""A nanoGPT whose start, rates and multipliers follow a table of exponents, and setups of it by size.

The tables are those of EleutherAI's nanoGPT-mup, branches ``master`` (µP) and ``completep``, after Yang et
al. 2022, Table 8 (2203.03466), and Dey et al. 2025, Table 1 (2505.01618), written here in plain torch. Width
and depth are measured from ``BASE_WIDTH`` and ``BASE_DEPTH``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.base.model_config import ModelConfig
from normlab.lab.config import OptimConfig
from normlab.lab.tasks.task import build_model
from normlab.nn import Decoder
from normlab.optim import build_optimizer, set_rate
from normlab.setups.setup import Setup

BASE_WIDTH, BASE_DEPTH, HEADS, VOCAB, ROWS, LENGTH = 32, 2, 4, 64, 8, 24
STD, RATE, DECAY, EPS = 0.05, 5e-3, 0.1, 1e-12
Powers = tuple[float, float]
"""Exponents of width and depth."""
NONE: Powers = (0.0, 0.0)


@dataclass(frozen=True)
class Table:
    """How a model changes with its size: exponents of width and depth, by kind of parameter."""

    start: Mapping[str, float] = field(default_factory=dict)
    """Of the width in the deviations of embedding, hidden and head."""
    outputs_by_depth: bool = False
    """Whether the outputs of branches start smaller by the root of 2L."""
    rate: Mapping[str, Powers] = field(default_factory=dict)
    decay: Powers = NONE
    """Of hidden matrices."""
    eps: Powers = NONE
    head: float = 0.0
    """Of the width, on what the head reads."""
    attention: float = -0.5
    """Of the width of a head, on the products of queries and keys."""
    branch: float = 0.0
    """Of the depth, on both branches of a block."""
    embedding: float = 0.0
    """Of the width, on the sum of both embeddings."""
    tied: bool = True
    head_width: int = 0
    """Fixed, so that a wider model has more heads; 0: their number is fixed."""

    def but(self, **changes: Any) -> Table:
        """The same table with something changed; of mappings, the entries that are given."""
        own = {n: {**getattr(self, n), **v} if isinstance(v, dict) else v for n, v in changes.items()}
        return replace(self, **own)


MUP = Table(
    start={"hidden": -0.5}, outputs_by_depth=True, rate={"hidden": (-1.0, 0.0)}, head=-1.0, attention=-1.0
)
COMPLETEP = MUP.but(outputs_by_depth=False, decay=(1.0, 0.0), eps=(-1.0, -1.0), branch=-1.0)
DEPTH_MUP = COMPLETEP.but(
    rate={"hidden": (-1.0, -0.5), "inner vector": (0.0, -0.5)}, eps=(-1.0, -0.5), branch=-0.5
)
STANDARD = Table(start={"hidden": -0.5}, outputs_by_depth=True)


class Attention(nn.Module):
    def __init__(self, width: int, table: Table) -> None:
        super().__init__()
        self.heads = width // table.head_width if table.head_width else HEADS
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        w, base = width // self.heads, table.head_width or BASE_WIDTH // HEADS
        self.scale = base**-0.5 * (w / base) ** table.attention

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, width: int, factor: float, table: Table) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width, table)
        self.ln_2, self.mlp = nn.LayerNorm(width), MLP(width)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.factor * self.attn(self.ln_1(x))
        return x + self.factor * self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, width: int, depth: int, table: Table) -> None:
        super().__init__()
        m_n, m_l = width / BASE_WIDTH, depth / BASE_DEPTH
        self.wte, self.wpe = nn.Embedding(VOCAB, width), nn.Embedding(LENGTH, width)
        self.h = nn.ModuleList(Block(width, m_l**table.branch, table) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCAB, bias=False)
        self.into, self.out_of = m_n**table.embedding, m_n**table.head
        if table.tied:
            self.lm_head.weight = self.wte.weight
        for name, p in self.named_parameters():
            std = STD * m_n ** table.start.get(kind(name, p), 0.0)
            if table.outputs_by_depth and name.endswith("c_proj.weight"):
                std /= math.sqrt(2 * depth)
            if p.ndim > 1:
                nn.init.normal_(p, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.into * (self.wte(ids) + self.wpe.weight[: ids.shape[1]])
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x) * self.out_of)


def kind(name: str, p: Tensor) -> str:
    if p.ndim > 1:
        return "hidden" if name.startswith("h.") else "head" if name.startswith("lm_head") else "embedding"
    return "inner vector" if name.startswith("h.") else "vector"


def optimizer_of(model: GPT, width: int, depth: int, table: Table) -> torch.optim.AdamW:
    m_n, m_l = width / BASE_WIDTH, depth / BASE_DEPTH

    def by(powers: Powers) -> float:
        return m_n ** powers[0] * m_l ** powers[1]

    groups: dict[str, list[Tensor]] = {}
    for name, p in model.named_parameters():
        groups.setdefault(kind(name, p), []).append(p)
    return torch.optim.AdamW(
        [
            {
                "params": own,
                "lr": RATE * by(table.rate.get(name, NONE)),
                "weight_decay": DECAY * by(table.decay if name == "hidden" else NONE) * (own[0].ndim > 1),
                "eps": EPS * by(table.eps),
            }
            for name, own in groups.items()
        ],
        betas=(0.9, 0.95),
    )


@lru_cache
def text() -> list[tuple[Tensor]]:
    """Batches of a Markov chain whose tokens are not equally frequent."""
    draw = torch.Generator().manual_seed(0)
    p = torch.softmax(2 * torch.randn(VOCAB, VOCAB, generator=draw) + torch.randn(VOCAB, generator=draw), -1)
    batches = []
    for _ in range(10):
        ids = torch.randint(0, VOCAB, (ROWS, 1), generator=draw)
        for _ in range(LENGTH):
            ids = torch.cat([ids, torch.multinomial(p[ids[:, -1]], 1, generator=draw)], 1)
        batches.append((ids,))
    return batches


def loss_of(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    (ids,) = batch
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def setup(width: int = BASE_WIDTH, depth: int = BASE_DEPTH, seed: int = 1, table: Table = MUP) -> Setup:
    torch.manual_seed(seed)
    model = GPT(width, depth, table)
    return Setup(model, text(), loss=loss_of, optimizer=optimizer_of(model, width, depth, table))


def own_setup(parametrisation: str, width: int = BASE_WIDTH, depth: int = BASE_DEPTH, seed: int = 1) -> Setup:
    """A decoder of normlab's own, with its own optimizer; batches hold no padding, which is 0."""
    config = ModelConfig(
        dim=width,
        ffn_dim=4 * width,
        heads=HEADS,
        encoder_layers=0,
        decoder_layers=depth,
        encoder_placement="pre",
        decoder_placement="pre",
        position_encoding="learned",
        max_positions=LENGTH,
        dropout=0.0,
        parametrisation=parametrisation,
        base_dim=BASE_WIDTH,
        base_layers=BASE_DEPTH,
    )
    model = build_model(Decoder, config, VOCAB + 1, seed)
    optim = OptimConfig(
        optimiser="adamw", lr=RATE, betas=(0.9, 0.95), eps=EPS, weight_decay=DECAY, weight_decay_on="matrices"
    )
    batches = [(ids + 1,) for (ids,) in text()]
    return Setup(model, batches, loss=loss_of, optimizer=set_rate(build_optimizer(model, optim), RATE))
