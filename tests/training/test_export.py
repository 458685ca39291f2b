"""``normlab run export``: the same logits, and the same greedy text, in Hugging Face's classes."""

from dataclasses import replace

import pytest
import torch

from normlab.config.config import Config, ModelConfig
from normlab.errors import UserError
from normlab.nn import Decoder
from normlab.tasks.task import build_model
from normlab.training.export import _hugging_face, difference, family_of
from normlab.training.recipes.grammar import resolve

pytest.importorskip("transformers")
BASE = Config(
    task="language_model",
    model=ModelConfig(dim=32, ffn_dim=48, heads=4, encoder_layers=0, decoder_layers=2, kv_heads=2),
)
FITS = [
    ("pre+learned+bias", {"activation": "gelu", "kv_heads": 0}, "gpt2"),
    ("pre+untied+sinusoidal+nobias", {"kv_heads": 0}, "gpt2"),
    ("pre+rmsnorm+nobias+swiglu+rope+untied", {}, "llama"),
    ("pre+rmsnorm+bias+swiglu+rope+fixnorm", {"kv_heads": 0}, "llama"),
    ("olmo2+rmsnorm+nobias+swiglu+rope", {}, "olmo2"),
]


def drawn(recipe, changes):
    """A recipe's configuration and its model, whose every parameter is off its start."""
    config = resolve(recipe, BASE)
    config = replace(config, model=replace(config.model, **changes))
    model = build_model(Decoder, config.model, 61, 1).eval()
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=draw))
    return config, model


@pytest.mark.parametrize(("recipe", "changes", "kind"), FITS)
def test_logits_are_the_same(recipe, changes, kind):
    config, model = drawn(recipe, changes)
    family = family_of(config)
    assert family.kind == kind
    apart, largest = difference(model, _hugging_face(family, config, model), config)
    assert apart < 1e-5 * max(largest, 1.0)
