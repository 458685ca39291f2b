"""Small odd sizes, sentences and tensors that the comparisons share."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from normlab.lab.config import ModelConfig
from normlab.nn import TokenModel
from oracles import embeddings
from oracles.comparing import scattered

CONFIG = ModelConfig(
    dim=6, ffn_dim=7, heads=3, encoder_layers=2, decoder_layers=3, dropout=0.0, max_positions=9
)
VOCAB = 11
SENTENCES = [([4, 9, 3, 7, 5], [2, 5, 9, 4]), ([8, 3], [2, 10, 7, 7, 4])]
"""Source and target without padding."""


def under(placement: str, decoder: str = "", **others: object) -> ModelConfig:
    """The toy size with a placement, or two."""
    return replace(CONFIG, encoder_placement=placement, decoder_placement=decoder or placement, **others)


def normal(*shape: int, scale: float = 1.0, seed: int = 11) -> Tensor:
    """A leaf in float64."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).requires_grad_()


def exactly_placed(model: TokenModel, config: ModelConfig) -> TokenModel:
    """Return the model scattered, and with its sinusoids in float64 instead of float32."""
    if config.position_encoding == "sinusoidal":
        model.position_encoding.table = torch.from_numpy(embeddings.sinusoids(9, config.dim))
    return scattered(model)


def padded(rows: list[list[int]]) -> Tensor:
    """`[B, T]`, padded on the right."""
    return torch.tensor([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])
