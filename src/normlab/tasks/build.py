"""From a configuration to a model with its starting weights."""

from __future__ import annotations

from normlab.init import initialise_
from normlab.nn import DECODER_LAYER, ENCODER_LAYER, Embedding, Norm, Placement, Seq2Seq, build_stack
from normlab.spec.config import ModelConfig


def build_seq2seq(config: ModelConfig, vocab_size: int, seed: int) -> Seq2Seq:
    """An initialised encoder-decoder. A start that needs data is set afterwards, by ``init.profile_``."""
    norm = Norm.registry[config.norm]
    encoder, decoder = (
        build_stack(name, roles, layers, config, Placement.registry[placement], norm)
        for name, roles, layers, placement in (
            ("encoder", ENCODER_LAYER, config.encoder_layers, config.encoder_placement),
            ("decoder", DECODER_LAYER, config.decoder_layers, config.decoder_placement),
        )
    )
    embedding = Embedding.registry[config.embedding](vocab_size, config.dim)
    model = Seq2Seq(embedding, encoder, decoder, config.dropout)
    initialise_(model, config.scheme, seed)
    return model
