"""Encoders of text, and classifiers on them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.batches import PAD, VOCAB

from .parts import MaskedLayer, causal, draw

HEADS = 4


class PostLayer(nn.Module):
    """A Post-LN layer of nn.MultiheadAttention."""

    def __init__(self, dim: int):
        super().__init__()
        self.attn, self.norm_1 = nn.MultiheadAttention(dim, HEADS, batch_first=True), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.norm_2 = nn.LayerNorm(dim)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        x = self.norm_1(x + self.attn(x, x, x, attn_mask=hidden, need_weights=False)[0])
        return self.norm_2(x + self.down(F.gelu(self.up(x))))


class Tagger(nn.Module):
    """A Post-LN encoder with learned positions and a head for each token."""

    def __init__(self, classes: int, dim: int = 64):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, dim, padding_idx=PAD)
        self.positions = nn.Embedding(64, dim)
        self.norm = nn.LayerNorm(dim)
        self.layers = nn.ModuleList(PostLayer(dim) for _ in range(2))
        self.head = nn.Linear(dim, classes)
        self.apply(draw)
        with torch.no_grad():
            self.tokens.weight[PAD].zero_()

    def hidden_pairs(self, real: Tensor) -> Tensor:
        """Return, for each row and head, which pairs must not see each other."""
        hidden = ~real.bool()[:, None].expand(-1, real.shape[1], -1)
        return hidden.repeat_interleave(HEADS, dim=0)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(self.tokens(ids) + self.positions.weight[: ids.shape[1]])
        hidden = self.hidden_pairs(mask)
        for layer in self.layers:
            x = layer(x, hidden)
        return self.head(x)


class Encoder(nn.Module):
    """Pre-LN layers over tokens with learned positions, and a norm."""

    def __init__(self, dim: int = 64, layers: int = 2, vocab: int = VOCAB):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(64, dim)
        self.layers = nn.ModuleList(MaskedLayer(dim) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.apply(draw)

    def forward(self, ids: Tensor, seen: Tensor, at: Tensor | None = None) -> Tensor:
        """Return vectors `[B, T, D]`; ``at`` are the positions, if rows do not begin at 0."""
        at = torch.arange(ids.shape[1], device=ids.device) if at is None else at
        x = self.tokens(ids) + self.positions(at)
        for layer in self.layers:
            x = layer(x, seen)
        return self.norm(x)


class SentenceClassifier(nn.Module):
    """A classifier of the mean over real tokens."""

    def __init__(self, classes: int = 2):
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(64, classes)
        draw(self.head)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.encoder(ids, mask.bool()[:, None, None, :])
        real = mask[..., None].to(x.dtype)
        logits = self.head((x * real).sum(1) / real.sum(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class LastTokenClassifier(nn.Module):
    """A causal classifier of rows that are padded on the left: it reads the state of the last token."""

    def __init__(self, classes: int = 4):
        super().__init__()
        self.encoder, self.score = Encoder(layers=3), nn.Linear(64, classes)
        draw(self.score)

    def last(self, attention_mask: Tensor) -> Tensor:
        """Return the column of each row's last token."""
        return torch.full_like(attention_mask[:, 0], attention_mask.shape[1] - 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        length = input_ids.shape[1]
        itself = torch.eye(length, dtype=torch.bool, device=input_ids.device)  # or padding would see nothing
        seen = causal(length, input_ids.device) & attention_mask.bool()[:, None, None, :] | itself
        x = self.encoder(input_ids, seen, (attention_mask.cumsum(1) - 1).clamp(min=0))
        logits = self.score(x[torch.arange(len(x)), self.last(attention_mask)])
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class TorchClassifier(nn.Module):
    """nn.TransformerEncoder whose mean over real tokens is classified."""

    def __init__(self, classes: int = 3):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, HEADS, 128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.tokens = nn.Embedding(VOCAB, 64)
        self.positions = nn.Parameter(torch.randn(1, 64, 64) * 0.02)
        self.head = nn.Linear(64, classes)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions[:, : ids.shape[1]]
        x = self.encoder(x, src_key_padding_mask=~mask)
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
