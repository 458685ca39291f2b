"""Faults that people met in public code, each with its sound twin."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from .case import Arguments, Case
from .decoder import MLP, Attention, Decoder, RMSNorm, model_loss, next_token_loss, rotate
from .english import EOS, PAD, VOCAB, padded, sentences, stream
from .twins import twins

CASES: dict[str, Case] = {}
pair = twins(CASES)

# ------------------------------------------------------------------------------------------ tokens, labels


class Packed(Decoder):
    """A decoder of packed documents, which hides the others from each or forgets to."""

    def __init__(self, *, hides: bool):
        super().__init__()
        self.hides = hides

    def forward(self, ids: Tensor, doc: Tensor, positions: Tensor) -> Tensor:
        length = ids.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        if self.hides:
            mask = mask & (doc[:, None, :, None] == doc[:, None, None, :])
        return self.head(self.norm(self.decode(self.embed(ids), mask, positions)))


def packed_rows(rows: int, length: int) -> dict[str, Tensor]:
    """Return rows of whole sentences, of which the last is cut, with documents and positions."""
    columns: dict[str, list[Any]] = {"ids": [], "doc": [], "positions": []}
    remaining = iter(sentences())
    for _ in range(rows):
        row: list[tuple[int, int, int]] = []
        document = 0
        while len(row) < length:
            row += [(word, document, position) for position, word in enumerate(next(remaining))]
            document += 1
        for name, values in zip(columns, zip(*row[:length], strict=True), strict=True):
            columns[name].append(values)
    return {name: torch.tensor(values) for name, values in columns.items()}


def packed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss within documents: no first token of a document is predicted."""
    starts = batch["doc"][:, 1:] != batch["doc"][:, :-1]
    labels = batch["ids"].clone()
    labels[:, 1:][starts] = -100
    return next_token_loss(model(**batch), labels)


@pair("documents", "inputs", place="blocks.0|blocks.0.attn*|doc|positions")
def packed(*, faulty: bool) -> Arguments:
    """Positions begin anew at each document, but attention goes over the whole row."""
    return {"model": Packed(hides=not faulty), "batch": packed_rows(8, 96), "loss": packed_loss}


class Captioner(Decoder):
    """A decoder with eight positions of an image before the text."""

    def __init__(self):
        super().__init__()
        self.image = nn.Parameter(torch.randn(1, 8, self.dim) * 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.cat((self.image.expand(ids.shape[0], -1, -1), self.embed(ids)), 1)
        return self.head(self.norm(self.decode(x)))


def library_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return a loss that shifts the labels itself, as the losses of transformers do."""
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(logits.reshape(-1, VOCAB).float(), shifted.reshape(-1))


def loss_of_text(model: nn.Module, ids: Tensor) -> Tensor:
    return library_loss(model(ids)[:, 8:], ids)


def loss_of_shifted_text(model: nn.Module, ids: Tensor) -> Tensor:
    text = model(ids)[:, 8:]
    return library_loss(text[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))


@pair("targets", place="loss|head|ids|labels")
def double_shift(*, faulty: bool) -> Arguments:
    """Labels are shifted and flattened by hand, then given to a loss that shifts them again."""
    loss = loss_of_shifted_text if faulty else loss_of_text
    return {"model": Captioner(), "batch": stream(8, 64), "loss": loss}


class WithLoss(Decoder):
    """A decoder that returns its logits and their loss."""

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = super().forward(ids)
        return logits, next_token_loss(logits, labels)


@pair("counted", place="loss|labels")
def pad_eos(*, faulty: bool) -> Arguments:
    """Padding is the end of a text, and the labels ignore both by their one id."""
    ids = padded(sentences()[:16])
    padding = ids == PAD
    ids = ids.masked_fill(padding, EOS)
    labels = ids.masked_fill(ids == EOS if faulty else padding, -100)
    declared = {"eos_id": EOS, "pad_id": EOS}
    return {"model": WithLoss(), "batch": {"ids": ids, "labels": labels}, "declare": declared}


# ------------------------------------------------------------------------------------------------ gradients


class LoRA(nn.Module):
    """A frozen map with an adapter of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Linear(base.in_features, rank, bias=False)
        self.B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 4.0 * self.B(self.A(x))


class Tuned(Decoder):
    """A frozen decoder with adapters and a trained head, whose blocks are checkpointed in training."""

    def __init__(self, *, inputs_with_gradient: bool):
        super().__init__()
        self.inputs_with_gradient = inputs_with_gradient
        self.requires_grad_(False)
        for block in self.blocks:
            block.attn.q, block.attn.v = LoRA(block.attn.q), LoRA(block.attn.v)
        self.head.weight.requires_grad_(True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.inputs_with_gradient:
            x.requires_grad_(True)
        cos, sin = self.angles(torch.arange(ids.shape[1])[None])
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=True) if self.training else block(x, cos, sin)
        return self.head(self.norm(x))


@pair("gradients", "derivative", place="blocks.0*")
def lora_ckpt(*, faulty: bool) -> Arguments:
    """Re-entrant checkpoints give no gradient where their input has none: adapters learn nothing."""
    model = Tuned(inputs_with_gradient=not faulty)
    return {"model": model, "batch": stream(8, 64), "loss": model_loss}


class Attach(torch.autograd.Function):
    """Return the weights as they are, and give the auxiliary loss its gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, auxiliary: Tensor) -> Tensor:
        ctx.save_for_backward(auxiliary)
        return weights

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (auxiliary,) = ctx.saved_tensors
        return gradient, torch.ones_like(auxiliary)


class Experts(nn.Module):
    """A feed-forward of experts, of which each token uses two, with a loss that balances them."""

    def __init__(self, dim: int, *, keeps: bool, experts: int = 4, used: int = 2):
        super().__init__()
        self.used, self.keeps = used, keeps
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(MLP(dim) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        n = len(self.experts)
        shares = self.gate(x).softmax(-1)
        weights, chosen = shares.topk(self.used, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        load = F.one_hot(chosen, n).float().sum(-2).mean((0, 1)) / self.used
        attached = Attach.apply(weights, 0.01 * n * (load * shares.mean((0, 1))).sum())
        if self.keeps:
            weights = attached
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            y = y + (weights * (chosen == i)).sum(-1, keepdim=True) * expert(x)
        return y


@pair("gradients", "explained", "derivative", place="blocks.0|blocks.0.mlp*")
def moe_aux(*, faulty: bool) -> Arguments:
    """The result of the function that attaches the auxiliary loss is thrown away."""
    model = Decoder(layers=3)
    for block in model.blocks:
        block.mlp = Experts(model.dim, keeps=not faulty)
    return {"model": model, "batch": stream(8, 64), "loss": model_loss}


class ScaledAttention(Attention):
    """Attention of normed queries and keys with a learned scale each, which it may forget."""

    def __init__(self, dim: int, heads: int, *, scales: bool):
        super().__init__(dim, heads)
        self.scales = scales
        self.q_scale = nn.Parameter(torch.ones(heads, 1, dim // heads))
        self.k_scale = nn.Parameter(torch.ones(heads, 1, dim // heads))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        if self.scales:
            q, k = q * self.q_scale, k * self.k_scale
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=10.0))


@pair("gradients", place="blocks.0.attn*")
def qk_scale(*, faulty: bool) -> Arguments:
    """Learned scales of queries and keys are made but never used in the forward pass."""
    model = Decoder()
    for block in model.blocks:
        block.attn = ScaledAttention(model.dim, model.heads, scales=not faulty)
    return {"model": model, "batch": stream(8, 64), "loss": model_loss}


# ---------------------------------------------------------------------------------------- structure, start


@pair("ties", place="head*|embed*")
def tie_lost(*, faulty: bool) -> Arguments:
    """The config says tied; the model is built on meta, materialised and drawn, which loses the tie."""
    with torch.device("meta"):
        model = Decoder(tied=True)
        if faulty:
            model.head = nn.Linear(model.dim, VOCAB, bias=False)
    model = model.to_empty(device="cpu")
    torch.manual_seed(0)
    for p in model.parameters():
        if p.dim() == 2:
            nn.init.normal_(p, std=0.02)
        else:
            nn.init.ones_(p)
    model.inv_freq.copy_(model.computed_frequencies())
    model.config = type("Config", (), {"tie_word_embeddings": True, "vocab_size": VOCAB})()
    if not faulty:
        model.head.weight = model.embed.weight
    return {"model": model, "batch": stream(8, 64), "loss": model_loss}


class OffsetNorm(RMSNorm):
    """A norm whose weight is the gain's offset from one, as in a trained checkpoint of Gemma's."""

    def __init__(self, dim: int, *, from_one: bool):
        super().__init__(dim)
        self.from_one = from_one
        nn.init.normal_(self.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return y * (1 + self.weight if self.from_one else self.weight)


@pair("norms", "start", place="blocks.0*|blocks.*norm*|norm*")
def offset_norm(*, faulty: bool) -> Arguments:
    """Gains are kept as an offset from one, and the forward pass reads them as plain gains."""
    model = Decoder()
    for block in model.blocks:
        block.norm1 = OffsetNorm(model.dim, from_one=not faulty)
        block.norm2 = OffsetNorm(model.dim, from_one=not faulty)
    model.norm = OffsetNorm(model.dim, from_one=not faulty)
    return {"model": model, "batch": stream(8, 64), "loss": model_loss}


# ---------------------------------------------------------------------------------------- optimizer, loop


@pair("groups", place="optimizer|*norm*")
def norm_decay(*, faulty: bool) -> Arguments:
    """Groups are made by the names "LayerNorm" and "bias", so that the gains of RMSNorm are decayed."""
    model = Decoder()
    exempt = ("LayerNorm", "bias") if faulty else ("norm", "bias")
    named = list(model.named_parameters())
    plain = [p for path, p in named if any(part in path for part in exempt)]
    decayed = [p for path, p in named if not any(part in path for part in exempt)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=3e-4)
    return {"model": model, "batch": stream(8, 64), "loss": model_loss, "optimizer": optimizer}


STEPS = 240


def rise_and_fall(step: int, warmup: int = 20) -> float:
    """Return the share of the rate at a step of a training of ``STEPS``."""
    return min(1.0, (step + 1) / warmup) * max(0.0, 1 - step / STEPS)


def training_loop(model: nn.Module, optimizer: Optimizer, step: Any) -> Arguments:
    scheduler = LambdaLR(optimizer, rise_and_fall)
    return {
        "model": model,
        "batch": stream(8, 48),
        "loss": model_loss,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "step": step,
        "declare": {"steps": STEPS},
    }


@pair("step", place="step|loss")
def accumulated(*, faulty: bool) -> Arguments:
    """The losses of four micro-batches are added, not averaged."""

    def step(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: LambdaLR) -> Tensor:
        parts = ids.chunk(4)
        total = torch.zeros(())
        optimizer.zero_grad()
        for part in parts:
            loss = model_loss(model, part)
            (loss if faulty else loss / len(parts)).backward()
            total += loss.detach() / len(parts)
        optimizer.step()
        scheduler.step()
        return total

    model = Decoder(layers=3, dim=96)
    return training_loop(model, SGD(model.parameters(), lr=0.12, momentum=0.9), step)


@pair("schedule", place="scheduler|step")
def fast_schedule(*, faulty: bool) -> Arguments:
    """The scheduler steps once for each of four processes: the rate is 0 after a quarter of the steps."""

    def step(model: nn.Module, ids: Tensor, optimizer: Optimizer, scheduler: LambdaLR) -> Tensor:
        optimizer.zero_grad()
        loss = model_loss(model, ids)
        loss.backward()
        optimizer.step()
        for _ in range(4 if faulty else 1):
            scheduler.step()
        return loss

    model = Decoder(layers=3, dim=96)
    return training_loop(model, AdamW(model.parameters(), lr=2e-3), step)
