"""From a configuration to a model with its starting weights."""

from __future__ import annotations

from typing import TypeVar

from normlab.init import initialise_
from normlab.nn import Seq2Seq, TokenModel
from normlab.spec.config import ModelConfig

Model = TypeVar("Model", bound=TokenModel)


def build_model(kind: type[Model], config: ModelConfig, vocab_size: int, seed: int) -> Model:
    """An initialised model of one kind. A start that needs data is set afterwards, by ``init.profile_``."""
    model = kind(config, vocab_size)
    initialise_(model, config.scheme, seed)
    return model


def build_seq2seq(config: ModelConfig, vocab_size: int, seed: int) -> Seq2Seq:
    """An initialised encoder-decoder."""
    return build_model(Seq2Seq, config, vocab_size, seed)
