"""``liu2020.parameters``: whole models on no device, counted."""

from __future__ import annotations

import pytest
import torch

from cases import each
from normlab.lab.config import ModelConfig
from normlab.nn import Seq2Seq
from normlab.papers import find_artefact
from normlab.papers.lab import size

PARAMETERS = find_artefact("liu2020.parameters")
MODELS = PARAMETERS.settings["models"]
"""Name to size, layers of both stacks, and the number of types that the paper's "about" is read as."""
PLACEMENTS = ("post", "pre", "admin")
VOCABULARIES = {10_000: (9_700, 11_600), 37_000: (35_900, 37_200), 44_500: (43_700, 44_600)}
"""The size chosen for a corpus, and the range, to the hundred, in which all counts round as published."""


def count(model: ModelConfig, vocab_size: int) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Seq2Seq(model, vocab_size).parameters())


def by_formula(model: ModelConfig, vocab_size: int) -> int:
    """Post-LN, from the equations: W and b of every matrix, gamma and beta of every norm, one embedding."""
    d, ffn = model.dim, model.ffn_dim
    attention, feed_forward, norm = 4 * (d * d + d), 2 * d * ffn + ffn + d, 2 * d
    encoder = attention + feed_forward + 2 * norm
    decoder = 2 * attention + feed_forward + 3 * norm
    return model.encoder_layers * encoder + model.decoder_layers * decoder + vocab_size * d


def extra(model: ModelConfig, placement: str) -> int:
    """What a placement has beside Post-LN: two final norms; an omega a sublayer."""
    sublayers = 2 * model.encoder_layers + 3 * model.decoder_layers
    return {"post": 0, "pre": 2 * 2 * model.dim, "admin": sublayers * model.dim}[placement]


def test_every_published_model_is_counted():
    assert MODELS.keys() == PARAMETERS.published.keys()


@pytest.mark.slow
@each("placement", PLACEMENTS)
@each("name", MODELS)
def test_counts_round_to_the_published_millions(name, placement):
    kind, encoder, decoder, vocab_size = MODELS[name]
    model = size(kind, placement, encoder, decoder)
    counted = count(model, vocab_size)
    assert round(counted / 1e6) == PARAMETERS.published[name]
    assert counted == by_formula(model, vocab_size) + extra(model, placement)


@pytest.mark.slow
def test_one_vocabulary_serves_all_models_of_a_corpus():
    """The vocabularies with which every count of a corpus rounds as published; ours are among them."""
    fewest, most = dict.fromkeys(VOCABULARIES, 0), dict.fromkeys(VOCABULARIES, 10**6)
    for name, (kind, encoder, decoder, types) in MODELS.items():
        for placement in PLACEMENTS:
            model = size(kind, placement, encoder, decoder)
            bare = count(model, 1) - model.dim
            low, high = (
                ((PARAMETERS.published[name] + half) * 1e6 - bare) / model.dim for half in (-0.5, 0.5)
            )
            fewest[types], most[types] = max(fewest[types], low), min(most[types], high)
    assert {types: (round(fewest[types], -2), round(most[types], -2)) for types in fewest} == VOCABULARIES
    assert all(fewest[types] < types < most[types] for types in fewest)
