"""``liu2020.parameters``: whole models on no device, counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cases import each
from normlab.lab.config import ModelConfig
from normlab.nn import Seq2Seq
from normlab.papers import find_artefact

PARAMETERS = find_artefact("liu2020.parameters")
SMALL = ModelConfig(dim=512, ffn_dim=1024, heads=4, encoder_layers=6, decoder_layers=6)
BASE = replace(SMALL, ffn_dim=2048, heads=8)
EN_DE, EN_FR = 37_000, 44_500
MODELS = {
    "IWSLT'14 De-En small": (SMALL, 10_000),
    "WMT'14 En-De 6L-6L": (BASE, EN_DE),
    "WMT'14 En-De 12L-12L": (replace(BASE, encoder_layers=12, decoder_layers=12), EN_DE),
    "WMT'14 En-De 18L-18L": (replace(BASE, encoder_layers=18, decoder_layers=18), EN_DE),
    "WMT'14 En-Fr 6L-6L": (BASE, EN_FR),
    "WMT'14 En-Fr 60L-12L": (replace(BASE, encoder_layers=60, decoder_layers=12), EN_FR),
}
"""Size, and the number of types that the paper's "about" is read as."""
PLACEMENTS = ("post", "pre", "admin")
VOCABULARIES = {10_000: (9_700, 11_600), EN_DE: (35_900, 37_200), EN_FR: (43_700, 44_600)}
"""Chosen, and from where to where the counts round as published, to the hundred."""


def count(size: ModelConfig, vocab_size: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Seq2Seq(size, vocab_size).parameters())


def under(size: ModelConfig, placement: str) -> ModelConfig:
    return replace(size, encoder_placement=placement, decoder_placement=placement)


def by_formula(size: ModelConfig, vocab_size: int) -> int:
    """Post-LN, from the equations: W and b of every matrix, gamma and beta of every norm, one embedding."""
    d, ffn = size.dim, size.ffn_dim
    attention, feed_forward, norm = 4 * (d * d + d), 2 * d * ffn + ffn + d, 2 * d
    encoder = attention + feed_forward + 2 * norm
    decoder = 2 * attention + feed_forward + 3 * norm
    return size.encoder_layers * encoder + size.decoder_layers * decoder + vocab_size * d


def extra(size: ModelConfig, placement: str) -> int:
    """What a placement has beside Post-LN: two final norms; an omega a sublayer."""
    sublayers = 2 * size.encoder_layers + 3 * size.decoder_layers
    return {"post": 0, "pre": 2 * 2 * size.dim, "admin": sublayers * size.dim}[placement]


def test_every_published_model_is_counted():
    assert MODELS.keys() == PARAMETERS.published.keys()


@pytest.mark.slow
@each("placement", PLACEMENTS)
@each("name", MODELS)
def test_counts_round_to_the_published_millions(name, placement):
    size, vocab_size = MODELS[name]
    found = count(under(size, placement), vocab_size)
    assert round(found / 1e6) == PARAMETERS.published[name]
    assert found == by_formula(size, vocab_size) + extra(size, placement)


def test_one_vocabulary_serves_all_models_of_a_corpus():
    """The vocabularies with which every count of a corpus rounds as published; ours are among them."""
    fewest, most = dict.fromkeys(VOCABULARIES, 0), dict.fromkeys(VOCABULARIES, 10**6)
    for name, (size, types) in MODELS.items():
        for placement in PLACEMENTS:
            bare = count(under(size, placement), 1) - size.dim
            low, high = (
                ((PARAMETERS.published[name] + half) * 1e6 - bare) / size.dim for half in (-0.5, 0.5)
            )
            fewest[types], most[types] = max(fewest[types], low), min(most[types], high)
    assert {types: (round(fewest[types], -2), round(most[types], -2)) for types in fewest} == VOCABULARIES
    assert all(fewest[types] < types < most[types] for types in fewest)
