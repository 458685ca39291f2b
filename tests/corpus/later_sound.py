"""Sound models of other kinds: a captioner, classifiers over latents, a dual encoder, decoders."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from transformers.optimization import Adafactor

from corpus.case import Arguments, Case, collect
from corpus.later_parts import Experts, Rms, Rotary, RotaryAttention, next_token_and_balance, seeded
from corpus.unseen_parts import (
    BOS,
    PAD,
    Gpt,
    MaskedLayer,
    SwiGlu,
    adamw,
    draw,
    groups,
    heads_of,
    next_token,
    padded,
    text,
)

CASES: dict[str, Case] = {}
case = collect(CASES)


class Captioner(nn.Module):
    """An encoder of patches, and a decoder of words that looks at them."""

    def __init__(self, vocabulary: int = 150, d: int = 48) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, d, 4, stride=4)
        self.place = nn.Parameter(torch.randn(16, d) * 0.02)
        self.encoder = nn.ModuleList(MaskedLayer(d) for _ in range(2))
        self.norm_image = nn.LayerNorm(d)
        self.word = nn.Embedding(vocabulary, d)
        self.position = nn.Embedding(40, d)
        self.decoder = nn.ModuleList(MaskedLayer(d, crossing=True) for _ in range(2))
        self.norm = nn.LayerNorm(d)
        self.apply(draw)

    def forward(self, pixels: Tensor, ids: Tensor) -> Tensor:
        image = self.patch(pixels).flatten(2).transpose(1, 2) + self.place
        everything = torch.ones(1, 1, 16, 16, dtype=torch.bool, device=ids.device)
        for layer in self.encoder:
            image = layer(image, everything)
        image = self.norm_image(image)
        length = ids.shape[1]
        x = self.word(ids) + self.position.weight[:length]
        past = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        for layer in self.decoder:
            x = layer(x, past, image, everything[:, :, :1])
        return F.linear(self.norm(x), self.word.weight)


def caption_sum(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the summed cross entropy of the captions' words."""
    logits = model(batch["pixels"], batch["ids"])[:, :-1]
    targets = batch["ids"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")


def caption_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross entropy of the captions' words."""
    return caption_sum(model, batch) / (batch["ids"][:, 1:] != PAD).sum()


def caption_step(model: nn.Module, batch: Mapping[str, Tensor], optimizer: Any, scheduler: Any) -> Tensor:
    """Accumulate two halves by their words, clip, and step."""
    model.train()
    optimizer.zero_grad(set_to_none=True)
    words = (batch["ids"][:, 1:] != PAD).sum()
    total = torch.zeros(())
    for half in range(2):
        part = {name: entry[half * 2 : half * 2 + 2] for name, entry in batch.items()}
        loss = caption_sum(model, part) / words
        loss.backward()
        total = total + loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    return total


@case()
def captioner() -> Arguments:
    """Halves of unequal length are weighted by their words."""
    ids, _ = padded([20, 13, 17, 9], 20, 150, seed=31)
    ids[:, 0] = BOS
    pixels = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(31))
    return {
        "model": seeded(Captioner, 31),
        "batch": {"pixels": pixels, "ids": ids},
        "loss": caption_loss,
        "optimizer": adamw(1e-3, 0.05),
        "scheduler": lambda optimizer: LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20)),
        "step": caption_step,
        "make": Captioner,
        "declare": {"pad_id": PAD, "tied": True},
    }


class BucketBias(nn.Module):
    """A learned bias for each head and bucket of distances: near ones alone, far ones together."""

    def __init__(self, heads: int, buckets: int = 12) -> None:
        super().__init__()
        self.near = buckets // 2
        self.table = nn.Embedding(buckets, heads)

    def forward(self, length: int) -> Tensor:
        at = torch.arange(length, device=self.table.weight.device)
        back = (at[:, None] - at[None]).clamp(min=0)
        wide = torch.log(back.clamp(min=1) / self.near) / math.log(48 / self.near)
        far = (self.near + wide * (self.table.num_embeddings - self.near)).long()
        bucket = torch.where(back < self.near, back, far.clamp(max=self.table.num_embeddings - 1))
        bias = self.table(bucket).permute(2, 0, 1)
        return bias.masked_fill(at[:, None] < at[None], float("-inf"))


class BiasedLayer(nn.Module):
    def __init__(self, d: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = Rms(d), Rms(d)
        self.q, self.k = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.v, self.o = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.mlp = SwiGlu(d, 2 * d)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        normed = self.norm_1(x)
        q, k, v = (heads_of(part(normed), self.heads) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.drop(self.o(y.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp(self.norm_2(x)))


class BucketDecoder(nn.Module):
    """A decoder as in T5: one table of biases for all layers, wide embeddings, narrowed before the head."""

    def __init__(self, vocabulary: int = 240, d: int = 64) -> None:
        super().__init__()
        self.shared = nn.Embedding(vocabulary, d)
        self.bias = BucketBias(4)
        self.layers = nn.ModuleList(BiasedLayer(d) for _ in range(3))
        self.norm = Rms(d)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        nn.init.normal_(self.bias.table.weight, std=d**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x, bias = self.shared(ids), self.bias(ids.shape[1])
        for layer in self.layers:
            x = layer(x, bias)
        return F.linear(self.norm(x) * self.shared.embedding_dim**-0.5, self.shared.weight)


@case()
def bucketed_biases_with_adafactor() -> Arguments:
    """Embeddings of unit deviation are tied to a head whose input is narrowed."""
    return {
        "model": seeded(BucketDecoder, 32),
        "batch": text(4, 40, 240, seed=32),
        "loss": next_token,
        "optimizer": lambda model: Adafactor(
            model.parameters(), lr=1e-3, scale_parameter=False, relative_step=False
        ),
        "make": BucketDecoder,
    }


class LatentClassifier(nn.Module):
    """Learned latents read the tokens, think, and are averaged."""

    def __init__(self, vocabulary: int = 200, d: int = 48, classes: int = 5) -> None:
        super().__init__()
        self.word = nn.Embedding(vocabulary, d)
        self.position = nn.Parameter(torch.randn(64, d) * 0.02)
        self.norm_in = nn.LayerNorm(d)
        self.latents = nn.Parameter(torch.randn(8, d) * 0.5)
        self.readers = nn.ModuleList(MaskedLayer(d, crossing=True) for _ in range(2))
        self.thinkers = nn.ModuleList(MaskedLayer(d) for _ in range(2))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, classes)
        self.apply(draw)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        memory = self.norm_in(self.word(ids) + self.position[: ids.shape[1]])
        x = self.latents.expand(len(ids), -1, -1)
        real = mask.bool()[:, None, None]
        everything = torch.ones(8, 8, dtype=torch.bool, device=ids.device)
        for reader, thinker in zip(self.readers, self.thinkers, strict=True):
            x = thinker(reader(x, everything, memory, real), everything)
        return self.head(self.norm(x).mean(1))


@case()
def latents_that_classify() -> Arguments:
    """Smoothed labels and a one-cycle schedule."""
    ids, mask = padded([32, 21, 26, 14, 29, 18], 32, 200, seed=33)
    labels = torch.tensor([0, 3, 1, 4, 2, 3])
    return {
        "model": seeded(LatentClassifier, 33),
        "batch": {"ids": ids, "mask": mask, "labels": labels},
        "loss": lambda model, batch: F.cross_entropy(
            model(batch["ids"], batch["mask"]), batch["labels"], label_smoothing=0.1
        ),
        "optimizer": adamw(2e-3, 0.01),
        "scheduler": lambda optimizer: OneCycleLR(optimizer, 2e-3, total_steps=400, cycle_momentum=False),
        "make": LatentClassifier,
        "declare": {"pad_id": PAD, "causal": False, "peak_lr": 2e-3, "steps": 400},
    }


class DualEncoder(nn.Module):
    """One encoder for questions and passages, pooled at the first token."""

    def __init__(self, vocabulary: int = 220, d: int = 64) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(vocabulary, d), nn.Embedding(64, d)
        self.layers = nn.ModuleList(MaskedLayer(d) for _ in range(2))
        self.norm = nn.LayerNorm(d)
        self.project = nn.Linear(d, 32, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))
        self.apply(draw)

    def encode(self, ids: Tensor) -> Tensor:
        """Return a unit vector for each row."""
        x = self.word(ids) + self.position.weight[: ids.shape[1]]
        real = (ids != PAD)[:, None, None]
        for layer in self.layers:
            x = layer(x, real)
        return F.normalize(self.project(self.norm(x)[:, 0]), dim=-1)

    def forward(self, questions: Tensor, passages: Tensor) -> Tensor:
        scale = self.log_scale.clamp(max=math.log(100.0)).exp()
        return scale * self.encode(questions) @ self.encode(passages).T


def contrast(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Let each question find its passage in the batch, and each passage its question."""
    similar = model(batch["questions"], batch["passages"])
    own = torch.arange(len(similar), device=similar.device)
    return (F.cross_entropy(similar, own) + F.cross_entropy(similar.T, own)) / 2


@case()
def retriever_with_negatives_in_the_batch() -> Arguments:
    """The other rows' passages are the wrong answers."""
    questions, _ = padded([12, 7, 10, 9, 12, 6], 12, 220, seed=34)
    passages, _ = padded([24, 19, 15, 22, 11, 20], 24, 220, seed=35)
    questions[:, 0] = passages[:, 0] = BOS
    return {
        "model": seeded(DualEncoder, 34),
        "batch": {"questions": questions, "passages": passages},
        "loss": contrast,
        "optimizer": adamw(5e-4, 0.05),
        "make": DualEncoder,
        "declare": {"pad_id": PAD, "causal": False},
    }


class Hourglass(Gpt):
    """The middle blocks see one vector for each four tokens, delayed so that none sees ahead."""

    def __init__(self) -> None:
        super().__init__(d=48, depth=4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(ids))
        late = F.pad(x, (0, 0, 3, 0))[:, : x.shape[1]]
        short = late.unflatten(1, (-1, 4)).mean(2)
        for block in self.blocks[1:3]:
            short = block(short)
        x = self.blocks[3](x + short.repeat_interleave(4, dim=1))
        return self.lm_head(self.ln_f(x))


def halves(model: nn.Module, batch: Tensor, optimizer: Any, scheduler: Any) -> Tensor:
    """Accumulate two halves of equal size, clip, and step."""
    optimizer.zero_grad(set_to_none=True)
    losses = []
    for half in batch.chunk(2):
        loss = next_token(model, half) / 2
        loss.backward()
        losses.append(loss.detach())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return torch.stack(losses).sum()


@case()
def hourglass_with_nadam() -> Arguments:
    """A decoder that is shorter in the middle."""
    return {
        "model": seeded(Hourglass, 36),
        "batch": text(4, 32, 200, seed=36),
        "loss": next_token,
        "optimizer": lambda model: torch.optim.NAdam(groups(model), lr=1e-3, decoupled_weight_decay=True),
        "step": halves,
        "make": Hourglass,
    }


class SharedAttention(nn.Module):
    """Four layers take turns with two attentions; each has a mixture of many experts of its own."""

    def __init__(self, vocabulary: int = 200, d: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.rotary = Rotary(d // 4)
        self.attentions = nn.ModuleList(RotaryAttention(d) for _ in range(2))
        self.norms_attention = nn.ModuleList(Rms(d) for _ in range(4))
        self.mixtures = nn.ModuleList(Experts(d, 12, 1, shares_sum_to_one=False) for _ in range(4))
        self.norms_mixture = nn.ModuleList(Rms(d) for _ in range(4))
        self.norm = Rms(d)
        self.head = nn.Linear(d, vocabulary, bias=False)
        self.apply(draw)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, rotations, total = self.embed(ids), self.rotary(ids.shape[1]), 0.0
        layers = zip(self.norms_attention, self.norms_mixture, self.mixtures, strict=True)
        for number, (norm_attention, norm_mixture, mixture) in enumerate(layers):
            x = x + self.attentions[number % 2](norm_attention(x), rotations)
            mixed, uneven = mixture(norm_mixture(x))
            x, total = x + mixed, total + uneven
        return self.head(self.norm(x)), total / len(self.mixtures)


def scaled_step(model: nn.Module, batch: Tensor, optimizer: Any, scheduler: Any) -> Tensor:
    """Take a step through a scaler that is switched off."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    loss = next_token_and_balance(model, batch)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return loss


@case()
def idle_experts_and_shared_attention() -> Arguments:
    """Some of the experts get no token of this batch."""
    return {
        "model": seeded(SharedAttention, 37),
        "batch": text(4, 16, 200, seed=37),
        "loss": next_token_and_balance,
        "optimizer": adamw(6e-4),
        "step": scaled_step,
        "make": SharedAttention,
        "declare": {"tied": True},
    }
