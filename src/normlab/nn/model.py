"""Whole models."""

from __future__ import annotations

from torch import Tensor, nn

from normlab.nn.context import Cache, Context
from normlab.nn.embedding import Embedding, sinusoids
from normlab.nn.ops import Dropout
from normlab.nn.stack import Stack

PAD = 0
"""Token id of padding; a position that holds it is not real."""


class Seq2Seq(nn.Module):
    """Encoder-decoder with one embedding tied three ways and sinusoidal positions.

    Vaswani et al. 2017, Section 3 (arXiv 1706.03762). Token ids are `[B, S]` and `[B, T]`, padded on the
    right with 0.
    """

    def __init__(self, embedding: Embedding, encoder: Stack, decoder: Stack, dropout: float) -> None:
        super().__init__()
        self.embedding, self.encoder, self.decoder = embedding, encoder, decoder
        self.dropout = Dropout(dropout)
        self.register_buffer("positions", sinusoids(256, embedding.weight.shape[1]), persistent=False)
        self.positions: Tensor

    def embed(self, ids: Tensor, position: int | None = None) -> Tensor:
        """Tokens `[B, T]` at positions 0 to T - 1, or all of them at one ``position``, to `[B, T, D]`."""
        needed = ids.shape[1] if position is None else position + 1
        if needed > len(self.positions):
            longer = sinusoids(2 * needed, self.positions.shape[1])
            self.positions = longer.to(self.positions)
        where = slice(0, needed) if position is None else slice(position, position + 1)
        return self.dropout(self.embedding(ids) + self.positions[where])

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, S]` to the memory `[B, S, D]` and where it is real `[B, S]`."""
        real = source != PAD
        return self.encoder(self.embed(source), Context(real=real)), real

    def decode(self, target_in: Tensor, memory: Tensor, memory_real: Tensor) -> Tensor:
        """Hidden states `[B, T, D]` for every prefix of ``target_in`` `[B, T]`."""
        context = Context(real=target_in != PAD, memory=memory, memory_real=memory_real)
        return self.decoder(self.embed(target_in), context)

    def decode_step(self, tokens: Tensor, memory: Tensor, memory_real: Tensor, cache: Cache) -> Tensor:
        """Hidden states `[B, K, D]` of the next position for K beams whose last tokens are `[B, K]`."""
        cache.begin_position()
        context = Context(memory=memory, memory_real=memory_real, cache=cache)
        return self.decoder(self.embed(tokens, cache.length - 1), context)

    def hidden(self, source: Tensor, target_in: Tensor) -> Tensor:
        """The decoder's output `[B, T, D]`, before the logits."""
        return self.decode(target_in, *self.encode(source))

    def forward(self, source: Tensor, target_in: Tensor) -> Tensor:
        """Logits `[B, T, V]`."""
        return self.embedding.logits(self.hidden(source, target_in))
