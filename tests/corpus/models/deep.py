"""Four sound architectures of 12 layers at a small width, each as its user trains it, to plant faults in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers as tf
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from corpus.batches import generator
from corpus.case import Arguments
from normlab.base.model_config import ModelConfig
from normlab.nn import PAD, Seq2Seq
from normlab.nn.init import initialise_

from .gpt import Gpt

DECLARED = Path(__file__).with_name("declared")
"""Starts that setups declare."""
LAYERS, DIM, HEADS, FFN, DEEP_VOCAB, ROWS, LENGTH = 12, 64, 4, 256, 500, 4, 64
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


def arguments_of(build: Callable[[], Training], plant: Plant | None = None) -> Arguments:
    """Build a training with the same random numbers each time, and change it if there is a fault."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        training = build()
        torch.manual_seed(SEED)
        if plant is not None:
            plant(training)
    return training.arguments()


def planted(build: Callable[[], Training]) -> Callable[[Plant], Callable[[], Arguments]]:
    """Return a decorator that makes a change of this architecture's training a builder of a case."""

    def decorate(plant: Plant) -> Callable[[], Arguments]:
        @wraps(plant)
        def arguments() -> Arguments:
            return arguments_of(build, plant)

        return arguments

    return decorate


# ---------------------------------------------------------------------------------------------------- batches


def words(rows: int = ROWS, length: int = LENGTH, seed: int = SEED) -> Tensor:
    """Random token ids `[rows, length]` without special tokens."""
    return torch.randint(5, DEEP_VOCAB, (rows, length), generator=generator(seed))


def padded_words(seed: int = SEED) -> Tensor:
    """Random token ids of rows that are 64, 56, 48 and 40 long, padded on the right."""
    lengths = torch.arange(LENGTH, LENGTH - 8 * ROWS, -8)
    return words(seed=seed).masked_fill(torch.arange(LENGTH) >= lengths[:, None], PAD)


def words_batch() -> dict[str, Tensor]:
    """A batch of Hugging Face's language models, which shift the labels themselves."""
    ids = words()
    return {"input_ids": ids, "labels": ids.clone()}


def masked_words_batch() -> dict[str, Tensor]:
    """A padded batch in which 15% of the words are masked and predicted."""
    ids = padded_words()
    predicted = (torch.rand(ids.shape, generator=generator(SEED)) < 0.15) & (ids != PAD)
    return {
        "input_ids": ids.masked_fill(predicted, MASK_ID),
        "attention_mask": (ids != PAD).long(),
        "labels": ids.masked_fill(~predicted, -100),
    }


def target_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean loss of the next target token of an encoder-decoder, without padding."""
    logits, labels = model(**batch)[:, :-1], batch["target_in"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)


# ---------------------------------------------------------------------------------------------- architectures


twelve_layers = partial(Gpt, layers=LAYERS, vocab=DEEP_VOCAB)


def deep_gpt2() -> Training:
    """GPT-2 in plain PyTorch, on random words."""
    ids = words(length=LENGTH + 1)
    batch = {"ids": ids[:, :-1], "targets": ids[:, 1:]}
    optimizer = partial(AdamW, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
    return Training(twelve_layers(), batch, optimizer, 6e-4, warmup_steps=2000)


def deep_bert() -> Training:
    """BERT of Hugging Face, on padded rows with masked words."""
    config = tf.BertConfig(
        vocab_size=DEEP_VOCAB,
        hidden_size=DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=FFN,
        max_position_embeddings=LENGTH,
    )
    optimizer = partial(AdamW, lr=1e-4, weight_decay=0.01)
    return Training(tf.BertForMaskedLM(config), masked_words_batch(), optimizer, 1e-4, warmup_steps=10_000)


def deep_llama() -> Training:
    """Llama of Hugging Face, on random words."""
    config = tf.LlamaConfig(
        vocab_size=DEEP_VOCAB,
        hidden_size=DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        intermediate_size=3 * DIM,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    optimizer = partial(AdamW, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    return Training(tf.LlamaForCausalLM(config), words_batch(), optimizer, 3e-4, warmup_steps=2000)


def seq2seq(dim: int, layers: int, heads: int, placement: str) -> Seq2Seq:
    """Draw normlab's encoder-decoder with this many layers in each stack."""
    config = ModelConfig(
        dim=dim,
        ffn_dim=4 * dim,
        heads=heads,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_placement=placement,
        decoder_placement=placement,
    )
    model = Seq2Seq(config, DEEP_VOCAB)
    initialise_(model, "xavier", SEED)
    return model


def deep_translation() -> Training:
    """A Pre-LN encoder-decoder of normlab with 6 layers in each stack."""
    return Training(
        seq2seq(DIM, LAYERS // 2, HEADS, "pre"),
        {"source": padded_words(), "target_in": padded_words(seed=2)},
        partial(AdamW, lr=5e-4, betas=(0.9, 0.98), weight_decay=1e-4),
        5e-4,
        warmup_steps=4000,
        loss=target_loss,
        max_grad_norm=None,
        declare={"pad_id": PAD},
    )
