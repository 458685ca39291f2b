"""From a configuration to an initialised model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from normlab.config.config import ModelConfig
from normlab.config.randomness import derive
from normlab.nn import Seq2Seq, TokenModel
from normlab.nn.init import initialise_

Model = TypeVar("Model", bound=TokenModel)


def build_model(
    kind: Callable[[ModelConfig, int], Model], config: ModelConfig, vocab_size: int, seed: int
) -> Model:
    """Build an initialised model. An initialisation that needs data is set afterwards, by ``init.profile_``.

    Parameters that no scheme initialises, such as those of a head of your own, depend on the seed as well.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "build"))
        model = kind(config, vocab_size)
    initialise_(model, config.scheme, seed)
    return model


def build_seq2seq(config: ModelConfig, vocab_size: int, seed: int) -> Seq2Seq:
    """Build an initialised encoder-decoder."""
    return build_model(Seq2Seq, config, vocab_size, seed)
