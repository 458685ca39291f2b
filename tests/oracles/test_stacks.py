"""Every placement against its oracle: encoder, decoder with a memory, decoder alone, whole models."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from torch import Tensor

from normlab.config.config import ModelConfig
from normlab.nn import (
    DECODER_LAYER,
    ENCODER_LAYER,
    LANGUAGE_LAYER,
    Activation,
    Context,
    Decoder,
    Embedding,
    Norm,
    Placement,
    PositionEncoding,
    Seq2Seq,
    build_stack,
)
from oracles import adapter
from oracles.adapter import StackOracle, Weights
from oracles.comparing import compare, ours_alone, scattered
from oracles.toys import SENTENCES, VOCAB, exactly_placed, normal, padded, under

PLACEMENTS = ours_alone(Placement.registry)

every_placement = pytest.mark.parametrize("placement", PLACEMENTS)


def check_stack(name: str, config: ModelConfig, *, together: bool = False, scale: float = 1.0) -> None:
    """A stack `[5, D]` to `[5, D]`, its memory of another length where it has one."""
    reads = name == "decoder" and config.encoder_layers > 0
    roles = ENCODER_LAYER if name == "encoder" else DECODER_LAYER if reads else LANGUAGE_LAYER
    stack = scattered(build_stack(name, roles, config), scale)
    inputs = {"x": normal(5, config.dim)} | ({"memory": normal(4, config.dim, seed=12)} if reads else {})

    def ours() -> Tensor:
        return stack(inputs["x"][None], Context(memory=inputs["memory"][None] if reads else None))[0]

    def oracle(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        return StackOracle(Weights(arrays), name, config, arrays.get("memory"))(arrays["x"])

    compare(stack, ours, oracle, inputs, together=together)


@every_placement
@pytest.mark.parametrize(
    ("name", "layers"), [("encoder", (2, 3)), ("encoder", (3, 0)), ("decoder", (2, 3)), ("decoder", (0, 3))]
)
def test_stacks(placement, name, layers):
    """Every parameter by itself in the stacks of an encoder-decoder."""
    encoder, decoder = layers
    config = under(placement, encoder_layers=encoder, decoder_layers=decoder)
    check_stack(name, config, together=0 in layers)


@every_placement
@pytest.mark.parametrize(("name", "layers"), [("encoder", (9, 1)), ("decoder", (0, 8))])
def test_deeper_stacks(placement, name, layers):
    """Deep enough for a quarter of the layers to be two; small weights, so that no stream without norms grows
    until its attention is the choice of one position, which no rounding error leaves alone.
    """
    encoder, decoder = layers
    config = under(placement, encoder_layers=encoder, decoder_layers=decoder)
    check_stack(name, config, together=True, scale=0.5)


@every_placement
@pytest.mark.parametrize("norm", ours_alone(Norm.registry))
def test_norms_under_placements(placement, norm):
    check_stack("encoder", under(placement, norm=norm), together=True)


# --------------------------------------------------------------------------------------- whole models


def check_seq2seq(config: ModelConfig, *, together: bool) -> None:
    """Logits at every real position of a padded batch."""
    model = exactly_placed(Seq2Seq(config, VOCAB), config)
    sources, targets = (padded(list(side)) for side in zip(*SENTENCES, strict=True))

    def oracle(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        w = Weights(arrays)
        return np.concatenate([adapter.seq2seq_logits(w, config, s, t) for s, t in SENTENCES])

    compare(model, lambda: model(sources, targets)[targets != 0], oracle, together=together)


def check_decoder(config: ModelConfig, *, together: bool) -> None:
    model = exactly_placed(Decoder(config, VOCAB), config)
    rows = [target for _, target in SENTENCES]
    ids = padded(rows)

    def oracle(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([adapter.decoder_logits(Weights(arrays), config, row) for row in rows])

    compare(model, lambda: model(ids)[ids != 0], oracle, together=together)


@every_placement
def test_seq2seq(placement):
    check_seq2seq(under(placement), together=True)
    check_seq2seq(under(placement, encoder_layers=1, decoder_layers=1), together=False)


@pytest.mark.parametrize(
    ("encoder", "decoder"), list(zip(PLACEMENTS, PLACEMENTS[1:] + PLACEMENTS[:1], strict=True))
)
def test_seq2seq_with_two_placements(encoder, decoder):
    check_seq2seq(under(encoder, decoder), together=True)


@every_placement
def test_language_models(placement):
    check_decoder(under(placement, encoder_layers=0), together=True)


EMBEDDINGS, POSITIONS, ACTIVATIONS = map(
    ours_alone, (Embedding.registry, PositionEncoding.registry, Activation.registry)
)
IN_PAIRS = [
    (embedding, position, ACTIVATIONS[(i + j) % len(ACTIVATIONS)])
    for i, embedding in enumerate(EMBEDDINGS)
    for j, position in enumerate(POSITIONS)
]
"""Every two of them together once, and not every three."""


@pytest.mark.parametrize(("embedding", "position_encoding", "activation"), IN_PAIRS)
def test_embeddings_positions_and_activations(embedding, position_encoding, activation):
    choices = {
        "embedding": embedding,
        "position_encoding": position_encoding,
        "activation": activation,
        "kv_heads": 1,
    }
    check_seq2seq(under("pre", "post", decoder_layers=1, encoder_layers=1, **choices), together=False)
    check_decoder(under("post", encoder_layers=0, decoder_layers=1, **choices), together=False)
