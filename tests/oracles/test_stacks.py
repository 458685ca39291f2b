"""Every placement against its oracle: encoder, decoder with a memory, decoder alone, whole models."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from torch import Tensor

from cases import each, pairwise
from normlab.lab.config import ModelConfig
from normlab.nn import (
    DECODER_LAYER,
    EMBEDDING_SCALES,
    ENCODER_LAYER,
    GATES,
    LANGUAGE_LAYER,
    Activation,
    Context,
    Decoder,
    Embedding,
    LogitMap,
    Norm,
    Placement,
    PositionEncoding,
    Seq2Seq,
    ValueResidual,
    build_stack,
)
from oracles import adapter
from oracles.adapter import StackOracle, Weights
from oracles.comparing import compare, ours_alone, scattered
from oracles.toys import SENTENCES, VOCAB, exactly_placed, normal, padded, under

PLACEMENTS = ours_alone(Placement.registry)


def check_stack(name: str, config: ModelConfig, *, scale: float = 1.0) -> None:
    """A stack `[5, D]` to `[5, D]`, its memory of another length where it has one."""
    reads = name == "decoder" and config.encoder_layers > 0
    roles = ENCODER_LAYER if name == "encoder" else DECODER_LAYER if reads else LANGUAGE_LAYER
    stack = scattered(build_stack(name, roles, config), scale)
    inputs = {"x": normal(5, config.dim)} | ({"memory": normal(4, config.dim, seed=12)} if reads else {})

    def ours() -> Tensor:
        return stack(inputs["x"][None], Context(memory=inputs["memory"][None] if reads else None))[0]

    def oracle(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        return StackOracle(Weights(arrays), name, config, arrays.get("memory"))(arrays["x"])

    compare(stack, ours, oracle, inputs)


SHAPES = [
    ("encoder", (2, 3)),
    ("encoder", (3, 0)),
    ("decoder", (2, 3)),
    ("decoder", (0, 3)),
    ("encoder", (9, 1)),
    ("decoder", (0, 8)),
]
"""A stack, and the layers of both: in an encoder-decoder, alone, and where a quarter of the layers is two."""


ROWS = pairwise(PLACEMENTS, ours_alone(Norm.registry), SHAPES)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_stacks(placement):
    """Deep stacks have small weights. Otherwise a stream without norms grows until its attention chooses one
    position, and rounding errors decide which.
    """

    @each(("norm", "name", "layers"), [(norm, *shape) for place, norm, shape in ROWS if place == placement])
    def check(norm, name, layers):
        config = under(placement, norm=norm, encoder_layers=layers[0], decoder_layers=layers[1])
        check_stack(name, config, scale=0.5 if max(layers) > 3 else 1.0)

    check()


# --------------------------------------------------------------------------------------- whole models


def check_seq2seq(config: ModelConfig) -> None:
    """Logits at every real position of a padded batch."""
    model = exactly_placed(Seq2Seq(config, VOCAB), config)
    sources, targets = (padded(list(side)) for side in zip(*SENTENCES, strict=True))

    def oracle(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        w = Weights(arrays)
        return np.concatenate([adapter.seq2seq_logits(w, config, s, t) for s, t in SENTENCES])

    compare(model, lambda: model(sources, targets)[targets != 0], oracle)


def check_decoder(config: ModelConfig) -> None:
    model = exactly_placed(Decoder(config, VOCAB), config)
    rows = [target for _, target in SENTENCES]
    ids = padded(rows)

    def oracle(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([adapter.decoder_logits(Weights(arrays), config, row) for row in rows])

    compare(model, lambda: model(ids)[ids != 0], oracle)


@pytest.mark.parametrize(
    ("placement", "another"), list(zip(PLACEMENTS, PLACEMENTS[1:] + PLACEMENTS[:1], strict=True))
)
def test_whole_models(placement, another):
    """With one placement or two, and a language model."""
    check_seq2seq(under(placement, encoder_layers=1, decoder_layers=1))
    check_seq2seq(under(placement, another))
    check_decoder(under(placement, encoder_layers=0))


CHOICES = {
    "embedding": Embedding.registry,
    "position_encoding": PositionEncoding.registry,
    "activation": Activation.registry,
    "embedding_scale": EMBEDDING_SCALES,
    "value_residual": ValueResidual.registry,
    "logit_map": LogitMap.registry,
    "attention_gate": GATES,
}


@pytest.mark.slow
@each("chosen", pairwise(*map(ours_alone, CHOICES.values())))
def test_choices_outside_the_placement(chosen):
    choices = {**dict(zip(CHOICES, chosen, strict=True)), "kv_heads": 1, "logit_cap": 2.0}
    check_seq2seq(under("pre", "post", decoder_layers=1, encoder_layers=1, **choices))
    check_decoder(under("post", encoder_layers=0, decoder_layers=2, **choices))
