"""Every registered composition at toy size, with weights that stand at no special value."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from normlab.nn import Embedding, Norm, Placement, Seq2Seq
from normlab.spec.config import ModelConfig
from normlab.tasks.build import build_seq2seq

VOCAB = 13
SIZE = ModelConfig(dim=16, ffn_dim=24, heads=2, encoder_layers=2, decoder_layers=2, dropout=0.0)

UNIFORM = [
    replace(SIZE, encoder_placement=placement, decoder_placement=placement, norm=norm, embedding=embedding)
    for placement, norm, embedding in product(Placement.registry, Norm.registry, Embedding.registry)
]
_NAMES = list(Placement.registry)
MIXED = [
    replace(SIZE, encoder_placement=encoder, decoder_placement=decoder)
    for encoder, decoder in zip(_NAMES, _NAMES[1:] + _NAMES[:1], strict=True)
]
VARIANTS = UNIFORM + MIXED


def label(config: ModelConfig) -> str:
    """The test id of a variant."""
    placements = dict.fromkeys((config.encoder_placement, config.decoder_placement))
    return "-".join(("/".join(placements), config.norm, config.embedding))


def perturbed(config: ModelConfig, *, dtype: torch.dtype = torch.float64, seed: int = 5) -> Seq2Seq:
    """A model in evaluation mode whose gains, biases and alphas are all away from 0 and 1."""
    model = build_seq2seq(config, VOCAB, 1).to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return model


def tokens() -> tuple[Tensor, Tensor]:
    """Source `[3, 6]` and target input `[3, 5]` of different lengths, padded with 0."""
    generator = torch.Generator().manual_seed(7)
    source = torch.randint(4, VOCAB, (3, 6), generator=generator)
    target = torch.randint(4, VOCAB, (3, 5), generator=generator)
    target[:, 0] = 2
    for row, (s, t) in enumerate(((6, 5), (4, 3), (2, 4))):
        source[row, s:], target[row, t:] = 0, 0
    return source, target
