"""Models at their start, taken apart by the oracles' names, and what the published rules say of each part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from scipy.stats import chi2
from scipy.stats import norm as gaussian

from normlab.lab.config import ModelConfig
from normlab.nn import Decoder, Encoder, Placement, Seq2Seq, TokenModel
from normlab.nn.init import SCHEMES, initialise_
from oracles import adapter, initial, names
from oracles.adapter import Array, Bundle, Choices, Weights
from oracles.comparing import ours_alone

CONFIG = ModelConfig(dim=64, ffn_dim=192, heads=4, dropout=0.0, embedding="untied")
VOCAB = 501
PLACEMENTS = ours_alone(Placement.registry)
MATRICES = {
    "W_q": "query",
    "W_k": "key",
    "W_v": "value",
    "W_o": "output",
    "W_in": "ffn_in",
    "W_gate": "ffn_gate",
    "W_out": "ffn_out",
}
FALSE_ALARM = 1e-9
"""Probability with which a right start is called wrong, of one comparison; there are some 10,000."""


def sized(placement: str, encoder_layers: int, decoder_layers: int, **others: object) -> ModelConfig:
    """The small model at a depth; a very deep one, which has more matrices to pool, is half as wide."""
    half = {"dim": 32, "ffn_dim": 96} if encoder_layers + decoder_layers > 50 else {}
    return replace(
        CONFIG,
        encoder_placement=placement,
        decoder_placement=placement,
        encoder_layers=encoder_layers,
        decoder_layers=decoder_layers,
        **{**half, **others},
    )


def model_of(config: ModelConfig) -> TokenModel:
    """The model that has the stacks of this config; ``started`` draws its initial weights."""
    kind = Decoder if not config.encoder_layers else Encoder if not config.decoder_layers else Seq2Seq
    return kind(config, VOCAB)


def started(model: TokenModel, scheme: str = "xavier", seed: int = 1) -> dict[str, Array]:
    """Every parameter of the model at its start, by name."""
    initialise_(model, scheme, seed)
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


def schemes_of(config: ModelConfig) -> list[str]:
    """Those that the model's placements may be combined with."""
    placements = {config.encoder_placement, config.decoder_placement}
    found = []
    for scheme in ours_alone(SCHEMES):
        chosen = replace(config, scheme=scheme)
        reasons = [SCHEMES[scheme].conflict(chosen)]
        reasons += [Placement.registry[name].conflict(chosen) for name in placements]
        if reasons == [None] * len(reasons):
            found.append(scheme)
    return found


def sublayers(arrays: dict[str, Array], config: ModelConfig) -> Iterator[tuple[str, str, Weights, Bundle]]:
    """Stack, role, the sublayer's arrays and its branch's parameters by the oracles' names."""
    for stack, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
        placement = config.encoder_placement if stack == "encoder" else config.decoder_placement
        roles = adapter.roles_of(stack, config)
        for index in range(layers * len(roles)):
            w = Weights(arrays).at(f"{stack}.sublayers.{index}")
            role = roles[index % len(roles)]
            yield stack, role, w, adapter.bundle(w.at("f"), Choices(config, placement), role)


def matrices(arrays: dict[str, Array], config: ModelConfig) -> dict[tuple[str, str, str], list[Array]]:
    """The weights of each (stack, role, matrix)."""
    found: dict[tuple[str, str, str], list[Array]] = {}
    for stack, role, _, p in sublayers(arrays, config):
        for key, weight in p.items():
            if key in MATRICES:
                found.setdefault((stack, role, MATRICES[key]), []).append(weight)
    return found


def expected_std(
    config: ModelConfig, scheme: str, stack: str, role: str, matrix: str, shape: tuple[int, int]
) -> float:
    """The placement's gain on the scheme's deviation, by the oracles."""
    placement = config.encoder_placement if stack == "encoder" else config.decoder_placement
    gain = initial.gain(placement, stack, matrix, config.encoder_layers, config.decoder_layers, role)
    layers = config.encoder_layers if stack == "encoder" else config.decoder_layers
    sublayers = layers * len(adapter.roles_of(stack, config))
    return gain * names.SCHEMES[scheme](matrix, *shape, sublayers=sublayers)


@lru_cache
def interval(draws: int) -> tuple[float, float]:
    """The interval that holds the sum of so many squared normal draws."""
    return chi2.interval(1 - FALSE_ALARM, draws)


FARTHEST_MEAN = float(gaussian.isf(FALSE_ALARM / 2))
"""In standard errors."""


def assert_drawn(weights: list[Array], std: float, *, copies: int = 1, what: str = "") -> None:
    """Each weight and all together have mean 0 and this deviation, within the error of a normal sample.

    The squares of n normal draws sum to a chi-square variable; a uniform sample's vary less. ``copies`` says
    how often each draw stands in the weights.
    """
    if std == 0.0:
        assert not any(w.any() for w in weights), what
        return
    sizes = np.array([w.size for w in weights])
    sums = np.array([w.sum(dtype=np.float64) for w in weights])
    squares = np.array([np.square(w).sum(dtype=np.float64) for w in weights]) / copies / std**2
    for n, total, square in zip(
        [*sizes, sizes.sum()], [*sums, sums.sum()], [*squares, squares.sum()], strict=True
    ):
        draws = int(n) // copies
        low, high = interval(draws)
        assert low < square < high, f"{what}: std {std * (square / draws) ** 0.5:.5g}, published {std:.5g}"
        assert abs(total) < FARTHEST_MEAN * std * n**0.5, f"{what}: the mean is {total / n:.3g}"


def all_of(values: Array, start: float) -> bool:
    """Whether every element is this number, in float32."""
    return bool((values == torch.tensor(start, dtype=torch.float32).item()).all())
