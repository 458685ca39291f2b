"""From a recipe's name to a model in one call."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from normlab.config.config import Config
from normlab.config.model import ModelConfig, derive
from normlab.nn import Decoder, TokenModel
from normlab.nn.init import profile_
from normlab.tasks.task import build_model
from normlab.training.recipes.grammar import MODELS, resolve

DECODER: Final[dict[str, Any]] = {"encoder_layers": 0, "decoder_layers": 4, "dropout": 0.0}
"""Sizes of a model for which nothing else is said."""
ROWS, POSITIONS = 8, 32
"""Shape of the random tokens from which a placement takes its initialisation, where that needs data."""


def build(recipe: str, vocab_size: int, *, seed: int = 1, force: bool = False, **sizes: Any) -> TokenModel:
    """Build an initialised model from a recipe: a decoder of 4 layers of width 256, unless ``sizes`` differ.

    ``sizes`` are fields of ``ModelConfig``: dim, ffn_dim, heads, encoder_layers, decoder_layers, dropout and
    so on. A model with an encoder alone is a BERT, one with both translates. A decoder maps ids `[B, T]` to
    logits `[B, T, V]`. Placements whose initialisation reads data (Admin) read random tokens; call
    ``normlab.nn.init.profile_`` to let them read yours.

    Raises UserError for a recipe or a size that does not exist, and, without ``force``, for a combination
    that its source does not define.

    >>> model = normlab.build("pre+rmsnorm+rope", 1000, dim=64, heads=4, decoder_layers=2)
    >>> model(torch.randint(1000, (8, 16))).shape
    torch.Size([8, 16, 1000])
    """
    config = resolve(recipe, Config(model=ModelConfig(**{**DECODER, **sizes})), force=force).model
    kind: Any = MODELS.get((bool(config.encoder_layers), bool(config.decoder_layers)), Decoder)
    model = build_model(kind, config, vocab_size, seed)
    if next(model.parameters()).is_meta:
        return model
    generator = torch.Generator("cpu").manual_seed(derive(seed, "profile"))

    def tokens() -> Tensor:
        return torch.randint(vocab_size, (ROWS, min(POSITIONS, config.max_positions)), generator=generator)

    both = config.encoder_layers and config.decoder_layers
    profile_(model, lambda: model.hidden(tokens(), tokens()) if both else model.hidden(tokens()))
    return model
