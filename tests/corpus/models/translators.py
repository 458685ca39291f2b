"""Encoder-decoders."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.batches import BOS, PAD, VOCAB

from .encoders import Encoder
from .parts import MaskedLayer, causal, draw

causal_mask = nn.Transformer.generate_square_subsequent_mask


class Translator(nn.Module):
    """An encoder-decoder in which both sides and the head share one embedding."""

    def __init__(self, dim: int = 64):
        super().__init__()
        self.encoder = Encoder(dim)
        self.layers = nn.ModuleList(MaskedLayer(dim, crossing=True) for _ in range(2))
        self.norm = nn.LayerNorm(dim)
        self.layers.apply(draw)

    def read(self, target: Tensor) -> Tensor:
        """Return what the decoder reads to predict the target."""
        return F.pad(target[:, :-1], (1, 0), value=BOS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        real = (source != PAD)[:, None, None, :]
        memory = self.encoder(source, real)
        ids = self.read(target)
        x = self.encoder.tokens(ids) + self.encoder.positions(torch.arange(ids.shape[1], device=ids.device))
        past = causal(ids.shape[1], ids.device)
        for layer in self.layers:
            x = layer(x, past, memory, real)
        return F.linear(self.norm(x), self.encoder.tokens.weight)


def translation_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean loss of the target's tokens."""
    logits = model(batch["source"], batch["target"])
    return F.cross_entropy(logits.transpose(1, 2), batch["target"], ignore_index=PAD)


class TorchTranslator(nn.Module):
    """nn.Transformer with time first inside."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, 64)
        self.positions = nn.Parameter(torch.randn(64, 1, 64) * 0.02)
        self.transformer = nn.Transformer(64, 4, 3, 3, 128)
        self.head = nn.Linear(64, VOCAB)

    def embed(self, ids: Tensor) -> Tensor:
        """Return vectors `[T, B, D]` of ids `[B, T]`."""
        return self.tokens(ids.T) + self.positions[: ids.shape[1]]

    def translate(self, source: Tensor, target: Tensor) -> Tensor:
        return self.transformer(source, target, tgt_mask=causal_mask(len(target)))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.translate(self.embed(source), self.embed(target))).transpose(0, 1)


def next_target_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of the next token of the target."""
    source, target = batch
    return F.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())
