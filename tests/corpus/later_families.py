"""Sound models: a decoder with value residuals and Muon, and models of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    DebertaV2Config,
    DebertaV2ForTokenClassification,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from corpus.case import Arguments, Case, collect
from corpus.later_parts import Rotary, Rotations, seeded
from corpus.unseen_parts import EOS, PAD, draw, groups, heads_of, next_token, padded, rotate, text

CASES: dict[str, Case] = {}
case = collect(CASES)


class ResidualLayer(nn.Module):
    """Normed queries and keys, values mixed with those of the first layer, a squared ReLU; no gains."""

    def __init__(self, d: int, heads: int = 4, *, first: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.proj = nn.Linear(d, d, bias=False)
        self.up = nn.Linear(d, 4 * d, bias=False)
        self.down = nn.Linear(4 * d, d, bias=False)
        self.share = None if first else nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, rotations: Rotations, before: Tensor | None) -> tuple[Tensor, Tensor]:
        normed = F.rms_norm(x, x.shape[-1:])
        q, k, v = (heads_of(part, self.heads) for part in self.qkv(normed).chunk(3, dim=-1))
        if self.share is not None:
            v = (1 - self.share) * v + self.share * before
        q, k = (rotate(F.rms_norm(part, part.shape[-1:]), *rotations) for part in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(F.rms_norm(x, x.shape[-1:]))).square()), v


class ValueResidualGpt(nn.Module):
    """A decoder of such layers, whose logits are capped and whose last projections start at zero."""

    def __init__(self, vocabulary: int = 256, d: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.rotary = Rotary(d // 4)
        self.layers = nn.ModuleList(ResidualLayer(d, first=i == 0) for i in range(depth))
        self.head = nn.Linear(d, vocabulary, bias=False)
        self.apply(draw)
        for layer in self.layers:
            nn.init.zeros_(layer.proj.weight)
            nn.init.zeros_(layer.down.weight)

    def forward(self, ids: Tensor) -> Tensor:
        x, first = F.rms_norm(self.embed(ids), (self.embed.embedding_dim,)), None
        rotations = self.rotary(ids.shape[1])
        for layer in self.layers:
            x, values = layer(x, rotations, first)
            first = values if first is None else first
        return 15 * torch.tanh(self.head(F.rms_norm(x, x.shape[-1:])) / 15)


class Schedules:
    """The schedules of several optimizers, which step together."""

    def __init__(self, schedules: list[LambdaLR]) -> None:
        self.schedules = schedules

    def step(self) -> None:
        for one in self.schedules:
            one.step()


def warm_stable_decay(step: int) -> float:
    """Warm up for 20 of 1,000 steps and let the rate fall over the last 300."""
    return min((step + 1) / 20, 1.0, max(1000 - step, 0) / 300)


def step_of_two(model: nn.Module, batch: Tensor, optimizer: Any, scheduler: Any) -> Tensor:
    """Take one step with Muon and one with AdamW."""
    loss = next_token(model, batch)
    loss.backward()
    for one in optimizer:
        one.step()
    scheduler.step()
    model.zero_grad(set_to_none=True)
    return loss


@case()
def value_residual_with_muon() -> Arguments:
    """Muon takes the blocks' matrices, AdamW the embedding, the head and the scalars."""
    model = seeded(ValueResidualGpt, 41)
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    scalars = [p for p in model.layers.parameters() if p.dim() < 2]
    others = [
        {"params": [model.embed.weight], "lr": 3e-2},
        {"params": [model.head.weight], "lr": 4e-3},
        {"params": scalars, "lr": 1e-2},
    ]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0),
    ]
    return {
        "model": model,
        "batch": text(4, 48, 256, seed=41),
        "loss": next_token,
        "optimizer": optimizers,
        "scheduler": Schedules([LambdaLR(one, warm_stable_decay) for one in optimizers]),
        "step": step_of_two,
        "declare": {"steps": 1000},
        "make": ValueResidualGpt,
    }


def library_step(model: nn.Module, batch: Mapping[str, Tensor], optimizer: Any, scheduler: Any) -> Tensor:
    """Take a step as the Trainer does."""
    model.train()
    loss = model(**batch).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss.detach()


def gemma() -> nn.Module:
    """Draw a Gemma 3 whose windows are of 8 tokens in two of three layers."""
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=260,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=8,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            max_position_embeddings=128,
            attention_bias=True,
            final_logit_softcapping=30.0,
            pad_token_id=PAD,
            eos_token_id=EOS,
        )
    )


@case()
def gemma_with_short_windows() -> Arguments:
    """Padded rows whose ends are counted; a cosine schedule that warms up from zero."""
    ids, mask = padded([36, 22, 30, 17], 36, 260, seed=42)
    return {
        "model": seeded(gemma, 42),
        "batch": {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)},
        "optimizer": lambda model: torch.optim.AdamW(groups(model, 0.01), lr=5e-4),
        "scheduler": lambda optimizer: get_cosine_schedule_with_warmup(optimizer, 10, 200),
        "step": library_step,
        "make": gemma,
        "declare": {"pad_id": PAD, "eos_id": EOS, "steps": 200, "peak_lr": 5e-4},
    }


def deberta() -> nn.Module:
    """Draw a DeBERTa without positions in its input, with a convolution after the first layer."""
    return DebertaV2ForTokenClassification(
        DebertaV2Config(
            vocab_size=200,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=64,
            relative_attention=True,
            position_buckets=16,
            pos_att_type=["p2c", "c2p"],
            share_att_key=True,
            norm_rel_ebd="layer_norm",
            position_biased_input=False,
            conv_kernel_size=3,
            conv_act="gelu",
            type_vocab_size=0,
            pad_token_id=PAD,
            num_labels=7,
        )
    )


def slower_below(model: nn.Module) -> torch.optim.Optimizer:
    """Give each layer nine tenths of the rate of the one above it."""
    decayed: list[dict[str, Any]] = []
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        depth = 0 if "embeddings" in parts else 4 if "classifier" in parts else 1
        if "layer" in parts:
            depth = int(parts[parts.index("layer") + 1]) + 1
        decay = 0.0 if parameter.dim() < 2 else 0.01
        decayed.append({"params": [parameter], "lr": 3e-4 * 0.9 ** (4 - depth), "weight_decay": decay})
    return torch.optim.AdamW(decayed, lr=3e-4)


@case()
def deberta_that_labels_tokens() -> Arguments:
    """Lower layers learn more slowly; only some tokens of a row have labels."""
    ids, mask = padded([28, 15, 23, 19], 28, 200, seed=43)
    labels = (ids * 5 % 7).masked_fill((mask == 0) | (ids < 3) | (ids % 4 == 0), -100)
    return {
        "model": seeded(deberta, 43),
        "batch": {"input_ids": ids, "attention_mask": mask, "labels": labels},
        "optimizer": slower_below,
        "scheduler": lambda optimizer: get_linear_schedule_with_warmup(optimizer, 0, 300),
        "step": library_step,
        "make": deberta,
        "declare": {"pad_id": PAD, "causal": False, "steps": 300},
    }


def lfm() -> nn.Module:
    """Draw an LFM2: short gated convolutions, and attention in one of four layers."""
    return Lfm2ForCausalLM(
        Lfm2Config(
            vocab_size=230,
            hidden_size=64,
            intermediate_size=128,
            block_multiple_of=16,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            conv_L_cache=3,
            conv_bias=True,
            layer_types=["conv", "conv", "full_attention", "conv"],
        )
    )


def counted_step(model: nn.Module, batch: Mapping[str, Tensor], optimizer: Any, scheduler: Any) -> Tensor:
    """Accumulate halves, each divided by the number of labels in both."""
    count = (batch["labels"][:, 1:] != -100).sum()
    losses = []
    for half in (slice(0, 2), slice(2, 4)):
        part = {name: entry[half] for name, entry in batch.items()}
        loss = model(**part, num_items_in_batch=count).loss
        loss.backward()
        losses.append(loss.detach())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).sum()


@case()
def hybrid_that_counts_its_labels() -> Arguments:
    """Prompts have no labels; the halves of a batch have different numbers of them."""
    ids = text(4, 32, 230, seed=44)
    prompts = torch.tensor([5, 12, 8, 17])[:, None]
    return {
        "model": seeded(lfm, 44),
        "batch": {"input_ids": ids, "labels": ids.masked_fill(torch.arange(32)[None] < prompts, -100)},
        "optimizer": lambda model: torch.optim.AdamW(groups(model), lr=1e-3),
        "step": counted_step,
        "make": lfm,
        "declare": {"causal": True},
    }
