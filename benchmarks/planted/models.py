"""Four sound architectures of 12 layers at a small width, with their usual initialisation and optimiser."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from normlab.init import initialise_
from normlab.nn import PAD, Seq2Seq
from normlab.spec.model import ModelConfig

LAYERS, DIM, HEADS, FFN, VOCAB, ROWS, LENGTH = 12, 64, 4, 256, 500, 4, 64
MASK_ID = 3
"""Token id of BERT's mask; ids from 5 on are words."""
SEED = 1
DEVIATION = 0.02
"""Deviation of GPT-2's, BERT's and Llama's initial weights."""
DEPTH_SCALED = DEVIATION / math.sqrt(2 * LAYERS)
"""GPT-2's deviation of the matrices that write to the residual stream."""


@dataclass
class Case:
    """A model with what its user knows of it before the first step."""

    architecture: str
    model: nn.Module
    batch: dict[str, Tensor]
    loss: Callable[[nn.Module, Any], Tensor]
    """``loss(model, batch)``, a mean over the predicted tokens."""
    optimiser: Callable[[list[nn.Parameter]], Optimizer]
    """A new optimiser of these parameters at ``lr``."""
    lr: float
    """The peak of the learning rate."""
    warmup_steps: int
    """Steps over which the learning rate rises from 0 to ``lr``."""
    vocab_size: int = VOCAB
    causal: str | None = None
    """The argument of which no later token may change an earlier logit, if there is one."""
    padded: str | None = None
    """The argument that says where padding is: a mask, or token ids with ``PAD``."""
    max_grad_norm: float | None = 1.0
    """Norm to which gradients are clipped before the optimiser's step."""


# ---------------------------------------------------------------------------------------------- batches


def generator(seed: int = SEED) -> torch.Generator:
    """Random numbers of this seed."""
    return torch.Generator().manual_seed(seed)


def words(rows: int = ROWS, length: int = LENGTH, seed: int = SEED) -> Tensor:
    """Random token ids `[rows, length]` without special tokens."""
    return torch.randint(5, VOCAB, (rows, length), generator=generator(seed))


def padded_words(seed: int = SEED) -> Tensor:
    """Random token ids of rows that are 64, 56, 48 and 40 long, padded on the right."""
    lengths = torch.arange(LENGTH, LENGTH - 8 * ROWS, -8)
    return words(seed=seed).masked_fill(torch.arange(LENGTH) >= lengths[:, None], PAD)


def language_batch() -> dict[str, Tensor]:
    """A batch of Hugging Face's language models, which shift the labels themselves."""
    ids = words()
    return {"input_ids": ids, "labels": ids.clone()}


def masked_batch() -> dict[str, Tensor]:
    """A padded batch in which 15% of the words are masked and predicted."""
    ids = padded_words()
    predicted = (torch.rand(ids.shape, generator=generator()) < 0.15) & (ids != PAD)
    return {
        "input_ids": ids.masked_fill(predicted, MASK_ID),
        "attention_mask": (ids != PAD).long(),
        "labels": ids.masked_fill(~predicted, -100),
    }


def own_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss in the output of a Hugging Face model."""
    return model(**batch).loss


def target_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean loss of the next target token of an encoder-decoder, without padding."""
    logits, labels = model(**batch)[:, :-1], batch["target_in"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)


# ------------------------------------------------------------------------------- GPT-2 in plain PyTorch


class Attention(nn.Module):
    """Causal self-attention with one packed matrix for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.dropout = nn.Dropout(0.1)
        self.scale = (DIM // HEADS) ** -0.5
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    def weights(self, scores: Tensor) -> Tensor:
        """Attention weights `[B, H, T, T]` of masked scores."""
        return F.softmax(scores, dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = (y.unflatten(2, (HEADS, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        scores = (q @ k.transpose(-2, -1)) * self.scale
        scores = scores.masked_fill(~self.mask[:length, :length], -math.inf)
        y = self.weights(scores) @ v
        return self.dropout(self.c_proj(y.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    """The feed-forward branch."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = nn.Linear(DIM, FFN), nn.GELU(), nn.Linear(FFN, DIM)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    """A Pre-LN layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(DIM), Attention()
        self.ln_2, self.mlp = nn.LayerNorm(DIM), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2 as in a script of one file: learned positions, a final norm and a tied head.

    Radford et al. 2019, Section 2.3 (Language Models are Unsupervised Multitask Learners).
    """

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.drop = nn.Dropout(0.1)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f, self.lm_head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight
        for path, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=DEPTH_SCALED if path.endswith("c_proj.weight") else DEVIATION)
            elif path.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the logits `[B, T, V]`, and their loss if there are targets."""
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.shape[1])))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


# --------------------------------------------------------------------------------------------- builders


def gpt2() -> Case:
    """GPT-2 in plain PyTorch, on random words."""
    ids = words(length=LENGTH + 1)
    return Case(
        architecture="gpt2",
        model=GPT(),
        batch={"idx": ids[:, :-1], "targets": ids[:, 1:]},
        loss=lambda model, batch: model(**batch)[1],
        optimiser=partial(AdamW, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1),
        lr=6e-4,
        warmup_steps=2000,
        causal="idx",
    )


def bert() -> Case:
    """BERT of Hugging Face, on padded rows with masked words."""
    config = tf.BertConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=FFN,
        max_position_embeddings=LENGTH,
    )
    return Case(
        architecture="bert",
        model=tf.BertForMaskedLM(config),
        batch=masked_batch(),
        loss=own_loss,
        optimiser=partial(AdamW, lr=1e-4, weight_decay=0.01),
        lr=1e-4,
        warmup_steps=10_000,
        padded="attention_mask",
    )


def llama() -> Case:
    """Llama of Hugging Face, on random words."""
    config = tf.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        intermediate_size=3 * DIM,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return Case(
        architecture="llama",
        model=tf.LlamaForCausalLM(config),
        batch=language_batch(),
        loss=own_loss,
        optimiser=partial(AdamW, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1),
        lr=3e-4,
        warmup_steps=2000,
        causal="input_ids",
    )


def translation() -> Case:
    """A Pre-LN encoder-decoder of normlab with 6 layers in each stack."""
    config = ModelConfig(
        dim=DIM,
        ffn_dim=FFN,
        heads=HEADS,
        encoder_layers=LAYERS // 2,
        decoder_layers=LAYERS // 2,
        encoder_placement="pre",
        decoder_placement="pre",
    )
    model = Seq2Seq(config, VOCAB)
    initialise_(model, "xavier", SEED)
    return Case(
        architecture="translation",
        model=model,
        batch={"source": padded_words(), "target_in": padded_words(seed=2)},
        loss=target_loss,
        optimiser=partial(AdamW, lr=5e-4, betas=(0.9, 0.98), weight_decay=1e-4),
        lr=5e-4,
        warmup_steps=4000,
        causal="target_in",
        padded="source",
        max_grad_norm=None,
    )


ARCHITECTURES: dict[str, Callable[[], Case]] = {f.__name__: f for f in (gpt2, bert, llama, translation)}


def build(architecture: str) -> Case:
    """Build a sound model, with the same random numbers each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return ARCHITECTURES[architecture]()
