"""Recipes as declarations of other people's models."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import transformers as tf
from torch import nn

from normlab.diagnosis import diagnose
from normlab.diagnosis.plan import Start, declared_for
from normlab.errors import UserError
from normlab.examine.declaring import declared_by, declared_starts

DIM, LAYERS, VOCAB = 64, 4, 211
IDS = torch.randint(5, VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))
BATCH = {"input_ids": IDS, "labels": IDS}
BETA = (8 * LAYERS) ** -0.25
"""DeepNorm's gain in a single stack."""


def xavier(gain: float, inner: int = DIM) -> float:
    return gain * (2 / (DIM + inner)) ** 0.5


def gpt2() -> nn.Module:
    """GPT-2 whose matrices are drawn as DeepNorm says, packed queries, keys and values part by part."""
    torch.manual_seed(3)
    config = tf.GPT2Config(n_layer=LAYERS, n_embd=DIM, n_head=4, vocab_size=VOCAB, n_positions=16,
                           use_cache=False, bos_token_id=1, eos_token_id=2)  # fmt: skip
    model = tf.GPT2LMHeadModel(config)
    nn.init.normal_(model.transformer.wte.weight, std=DIM**-0.5)
    for block in model.transformer.h:
        query, key, value = block.attn.c_attn.weight.detach().chunk(3, 1)
        for part, gain in ((query, 1.0), (key, 1.0), (value, BETA), (block.attn.c_proj.weight, BETA)):
            nn.init.normal_(part, std=xavier(gain))
        for layer in (block.mlp.c_fc, block.mlp.c_proj):
            nn.init.normal_(layer.weight, std=xavier(BETA, 4 * DIM))
    return model


def found(model: nn.Module, declared: dict[str, Start]) -> list[tuple[str, str]]:
    adam = partial(torch.optim.Adam, lr=1e-3)
    made = diagnose(model, BATCH, optimiser=adam, preset="preflight", declared=declared)
    return [(f.name, f.module) for f in made.findings if f.name == "unlike_declared"]


def test_a_model_that_is_initialised_as_its_recipe_is_as_declared():
    model = gpt2()
    declared = declared_starts("deepnorm", model, BATCH)
    assert len(declared) == 1 + 6 * LAYERS
    value = declared["value in transformer.h.2.attn.c_attn.weight"].std
    assert value == pytest.approx(xavier(BETA), rel=0.1)
    assert found(model, declared) == []


def test_the_matrix_that_is_drawn_otherwise_is_named():
    model = gpt2()
    nn.init.normal_(model.transformer.h[2].attn.c_proj.weight, std=0.02)
    assert found(model, declared_starts("deepnorm", model, BATCH)) == [
        ("unlike_declared", "transformer.h.2.attn.c_proj")
    ]
    plain = {name for name, _ in found(gpt2(), declared_starts("post", gpt2(), BATCH))}
    assert plain == {"unlike_declared"}, "a Post-LN's values have a gain of 1"


def test_an_encoder_decoder_has_the_gains_of_each_stack():
    config = tf.BartConfig(d_model=DIM, encoder_layers=2, decoder_layers=4, encoder_attention_heads=4,
                           decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96,
                           vocab_size=VOCAB, max_position_embeddings=32)  # fmt: skip
    declared = declared_starts("deepnorm", tf.BartForConditionalGeneration(config), BATCH)
    encoder, decoder = 0.87 * (2**4 * 4) ** (-1 / 16), (12 * 4) ** -0.25
    for path, gain in (("encoder.layers.1", encoder), ("decoder.layers.3", decoder)):
        std = declared[f"ffn_out in model.{path}.fc2.weight"].std
        assert std == pytest.approx(xavier(gain, 96), rel=0.1)
    assert "value in model.decoder.layers.3.encoder_attn.v_proj.weight" in declared


def test_an_entry_may_name_a_role_in_paths():
    declared = {"value in h.*.packed": Start(1.0), "h.0.*": Start(2.0)}
    for path, role, std in (
        ("h.1.packed", "value", 1.0),
        ("h.1.packed", "key", None),
        ("h.0.packed", "value", 2.0),
    ):
        start = declared_for(declared, path, role, matrix=True)
        assert (start and start.std) == std


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch, self.norm = nn.Linear(DIM, DIM), nn.LayerNorm(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.branch(x))


def test_a_model_whose_sizes_do_not_show_is_refused():
    with pytest.raises(UserError, match=r"no embedding matrix.*init\.toml"):
        declared_starts("pre", nn.Sequential(*(Residual() for _ in range(4))), torch.randn(2, 8, DIM))


@pytest.mark.parametrize(
    ("given", "words"), [("depnorm", "did you mean 'deepnorm'"), ("pre+rmsnrm", "rmsnorm")]
)
def test_a_name_that_is_neither_a_file_nor_a_recipe(given, words):
    with pytest.raises(UserError, match="neither a file nor a recipe") as raised:
        declared_by(given, gpt2(), BATCH)
    assert given in str(raised.value)
    assert words in str(raised.value)


def test_a_file_is_read_as_one(tmp_path):
    path = tmp_path / "init.toml"
    path.write_text("warmup_steps = 100\n[ffn_out]\nstd = 0.02\n")
    plan = declared_by(str(path), gpt2(), BATCH)
    assert plan == {"warmup_steps": 100, "declared": {"ffn_out": Start(0.02)}}
    with pytest.raises(UserError, match="cannot be read as TOML"):
        declared_by(str(tmp_path / "missing.toml"), gpt2(), BATCH)
