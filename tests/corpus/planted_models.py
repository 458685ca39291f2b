"""Four sound architectures of 12 layers at a small width, each as its user trains it, to plant faults in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from normlab.base.model_config import ModelConfig
from normlab.nn import PAD, Seq2Seq
from normlab.nn.init import initialise_

from .case import Arguments, Case

LAYERS, DIM, HEADS, FFN, VOCAB, ROWS, LENGTH = 12, 64, 4, 256, 500, 4, 64
MASK_ID = 3
"""Token id of BERT's mask; ids from 5 on are words."""
SEED = 1
DEVIATION = 0.02
"""Deviation of GPT-2's, BERT's and Llama's initial weights."""
DEPTH_SCALED = DEVIATION / math.sqrt(2 * LAYERS)
"""GPT-2's deviation of the matrices that write to the residual stream."""


def returned_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss in the output of a model, which is a tuple or one of Hugging Face's."""
    output = model(**batch)
    return output[1] if isinstance(output, tuple) else output.loss


@dataclass
class Training:
    """A model with all that its user has before the first step; a fault changes it in place."""

    model: nn.Module
    batch: dict[str, Tensor]
    optimizer: Callable[[list[nn.Parameter]], Optimizer]
    """A new optimizer of these parameters at ``lr``."""
    lr: float
    """The peak of the learning rate."""
    warmup_steps: int
    loss: Callable[[nn.Module, Any], Tensor] = returned_loss
    max_grad_norm: float | None = 1.0
    rate: Callable[[int], float] | None = None
    """The share of the rate at each step, if it is not that of a linear warm-up."""
    make: Callable[[], nn.Module] | None = None
    declare: dict[str, Any] = field(default_factory=dict)

    def warmup(self, step: int) -> float:
        return min(1.0, (step + 1) / self.warmup_steps)

    def step(self, model: nn.Module, batch: Any, optimizer: Optimizer, scheduler: LambdaLR) -> Tensor:
        """Take one training step."""
        model.train()
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()
        if self.max_grad_norm is not None:
            clip_grad_norm_(model.parameters(), self.max_grad_norm)
        optimizer.step()
        scheduler.step()
        return loss

    def arguments(self) -> Arguments:
        """Return what ``normlab.check`` is given."""
        optimizer = self.optimizer(list(self.model.parameters()))
        arguments: Arguments = {
            "model": self.model,
            "batch": self.batch,
            "optimizer": optimizer,
            "scheduler": LambdaLR(optimizer, self.rate or self.warmup),
            "step": self.step,
            "lr": self.lr,
        }
        optional = {"loss": self.loss, "make": self.make, "declare": self.declare}
        if self.loss is returned_loss:
            del optional["loss"]
        return arguments | {name: value for name, value in optional.items() if value}


Plant = Callable[[Training], None]


def planted(build: Callable[[], Training], plant: Plant | None = None) -> Arguments:
    """Build a training with the same random numbers each time, and change it if there is a fault."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        training = build()
        torch.manual_seed(SEED)
        if plant is not None:
            plant(training)
    return training.arguments()


def planting(
    build: Callable[[], Training], cases: dict[str, Case]
) -> Callable[..., Callable[[Plant], Plant]]:
    """Return a decorator that adds a change of this architecture's training as a case."""

    def fault(*properties: str, place: str = "") -> Callable[[Plant], Plant]:
        def add(plant: Plant) -> Plant:
            name = plant.__name__
            cases[name] = Case(name, partial(planted, build, plant), properties, place)
            return plant

        return add

    return fault


def becomes(module: nn.Module, kind: type[nn.Module]) -> None:
    """Let a module behave as if it had been written as this subclass of its own class."""
    if not issubclass(kind, type(module)):
        raise TypeError(f"{kind.__name__} is no subclass of {type(module).__name__}")
    module.__class__ = kind


# ------------------------------------------------------------------------------------------------- batches


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


def target_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean loss of the next target token of an encoder-decoder, without padding."""
    logits, labels = model(**batch)[:, :-1], batch["target_in"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)


# -------------------------------------------------------------------------------- GPT-2 in plain PyTorch


class Attention(nn.Module):
    """Causal self-attention with one packed matrix for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.dropout = nn.Dropout(0.1)
        self.scale = (DIM // HEADS) ** -0.5
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the weights `[B, H, T, T]` of keys for queries `[B, H, T, w]`."""
        length = q.shape[2]
        scores = (q @ k.transpose(-2, -1)) * self.scale
        return F.softmax(scores.masked_fill(~self.mask[:length, :length], -math.inf), dim=-1)

    def merge(self, y: Tensor) -> Tensor:
        """Return the output `[B, T, D]` of heads `[B, H, T, w]`."""
        return self.c_proj(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(2, (HEADS, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        return self.dropout(self.merge(self.weights(q, k) @ v))


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

    def embed(self, idx: Tensor) -> Tensor:
        return self.drop(self.wte(idx) + self.wpe(torch.arange(idx.shape[1])))

    def logits(self, x: Tensor) -> Tensor:
        return self.lm_head(self.ln_f(x))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the logits `[B, T, V]`, and their loss if there are targets."""
        x = self.embed(idx)
        for block in self.h:
            x = block(x)
        logits = self.logits(x)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


# ------------------------------------------------------------------------------------------ architectures


def gpt2() -> Training:
    """GPT-2 in plain PyTorch, on random words."""
    ids = words(length=LENGTH + 1)
    optimizer = partial(AdamW, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    return Training(GPT(), {"idx": ids[:, :-1], "targets": ids[:, 1:]}, optimizer, 6e-4, warmup_steps=2000)


def bert() -> Training:
    """BERT of Hugging Face, on padded rows with masked words."""
    config = tf.BertConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=FFN,
        max_position_embeddings=LENGTH,
    )
    optimizer = partial(AdamW, lr=1e-4, weight_decay=0.01)
    return Training(tf.BertForMaskedLM(config), masked_batch(), optimizer, 1e-4, warmup_steps=10_000)


def llama() -> Training:
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
    optimizer = partial(AdamW, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    return Training(tf.LlamaForCausalLM(config), language_batch(), optimizer, 3e-4, warmup_steps=2000)


def translation() -> Training:
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
    batch = {"source": padded_words(), "target_in": padded_words(seed=2)}
    optimizer = partial(AdamW, lr=5e-4, betas=(0.9, 0.98), weight_decay=1e-4)
    return Training(
        model,
        batch,
        optimizer,
        5e-4,
        warmup_steps=4000,
        loss=target_loss,
        max_grad_norm=None,
        declare={"pad_id": PAD},
    )
