"""Weights that are held on the unit sphere after every step."""

from __future__ import annotations

from dataclasses import replace

import torch

from normlab.base.model_config import ModelConfig
from normlab.lab.tasks.task import build_model
from normlab.nn import Decoder, parameter_roles
from normlab.nn.model import UnitWeights

CONFIG = ModelConfig(
    dim=8,
    ffn_dim=12,
    heads=2,
    head_dim=3,
    encoder_layers=0,
    decoder_layers=2,
    embedding="untied",
    dropout=0.0,
)
"""Only the stream is 8 wide: attention 6, feed-forward 12, vocabulary 11. So 8 tells its side of a matrix."""


def test_the_vectors_along_the_stream_have_length_one_and_the_rest_is_free():
    """Loshchilov et al. 2024, Section 2 (arXiv 2410.01131); a matrix's shape tells the stream's side."""
    for activation in ("relu", "swiglu"):
        model = build_model(Decoder, replace(CONFIG, activation=activation), 11, 1)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        UnitWeights.apply_(model)
        roles = parameter_roles(model)
        for name, p in model.named_parameters():
            if p.dim() < 2:
                assert torch.equal(p, before[name]), name
                continue
            (along,) = [i for i, size in enumerate(p.shape) if size == 8]
            torch.testing.assert_close(p.norm(dim=along), torch.ones(p.shape[1 - along]), msg=name)
            turned = torch.nn.functional.cosine_similarity(p, before[name], dim=along)
            torch.testing.assert_close(turned, torch.ones_like(turned), msg=f"{name}, {roles[name].role}")
