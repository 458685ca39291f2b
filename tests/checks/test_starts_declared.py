"""Declarations of other people's models: in files, as mappings, and by recipes."""

from __future__ import annotations

import re
import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest
import torch
import transformers as tf
from torch import nn

import normlab.checks.declared
from cases import each
from checks.tiny import Decoder, loss_of, tokens
from normlab.checks.declared import GROUP, declared, resolved_init
from normlab.errors import UserError
from normlab.setups.setup import Setup
from normlab.trace.starts import Start, differences
from zoo import PostNorm

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


def unlike(model: nn.Module, given: str) -> list[str]:
    return [path for path, _ in differences(model, declared(given, Setup(model, BATCH)).declare.init)]


def test_a_model_that_is_initialised_as_its_recipe_is_as_declared():
    model = gpt2()
    starts = declared("deepnorm", Setup(model, BATCH)).declare.init
    assert len(starts) == 1 + 6 * LAYERS
    values = [s for s in starts if s.path == "transformer.h.2.attn.c_attn.weight" and s.part.start == 2 * DIM]
    assert [s.std for s in values] == [pytest.approx(xavier(BETA), rel=0.1)]
    assert unlike(model, "deepnorm") == []


def test_the_matrix_that_is_drawn_otherwise_is_named():
    model = gpt2()
    nn.init.normal_(model.transformer.h[2].attn.c_proj.weight, std=0.02)
    assert unlike(model, "deepnorm") == ["transformer.h.2.attn.c_proj.weight"]
    assert unlike(gpt2(), "post"), "a Post-LN's values have a gain of 1"


def test_an_encoder_decoder_has_the_gains_of_each_stack():
    config = tf.BartConfig(d_model=DIM, encoder_layers=2, decoder_layers=4, encoder_attention_heads=4,
                           decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96,
                           vocab_size=VOCAB, max_position_embeddings=32)  # fmt: skip
    setup = declared("deepnorm", Setup(tf.BartForConditionalGeneration(config), BATCH))
    starts = {s.path: s for s in setup.declare.init}
    encoder, decoder = 0.87 * (2**4 * 4) ** (-1 / 16), (12 * 4) ** -0.25
    for path, gain in (("encoder.layers.1", encoder), ("decoder.layers.3", decoder)):
        assert starts[f"model.{path}.fc2.weight"].std == pytest.approx(xavier(gain, 96), rel=0.1)
    assert "model.decoder.layers.3.encoder_attn.v_proj.weight" in starts


def test_the_last_entry_of_a_role_a_glob_or_both_decides():
    init = {
        "ffn_out": {"std": 0.02, "depth": "total"},
        "value in *.c_attn.weight": 0.5,
        "transformer.h.0.*.c_attn.weight": {"std": 0.25, "truncated_at": 3.0},
        "norm": {"value": 1.0},
    }
    setup = resolved_init(Setup(gpt2(), BATCH, declare={"init": init}))
    starts = {(s.path, s.part.start): s for s in setup.declare.init}
    assert starts["transformer.h.1.attn.c_attn.weight", 2 * DIM].std == 0.5
    assert ("transformer.h.1.attn.c_attn.weight", 0) not in starts
    assert starts["transformer.h.0.attn.c_attn.weight", 0].truncated_at == 3.0
    assert starts["transformer.h.3.mlp.c_proj.weight", None].std == pytest.approx(0.02 / (2 * LAYERS) ** 0.5)
    assert starts["transformer.ln_f.weight", None].value == 1.0


def test_a_model_whose_sizes_do_not_show_is_refused():
    model = nn.Sequential(*(PostNorm(DIM) for _ in range(4)))
    setup = Setup(model, torch.randn(2, 8, DIM), loss=lambda model, x: model(x).square().mean())
    with pytest.raises(UserError, match=r"\bembedding\b.*init\.toml"):
        declared("pre", setup)


@pytest.mark.parametrize(("given", "words"), [("depnorm", "'deepnorm'"), ("pre+rmsnrm", "rmsnorm")])
def test_a_name_that_is_neither_a_file_nor_a_recipe(given, words):
    with pytest.raises(UserError, match=re.escape(given)) as raised:
        declared(given, Setup(gpt2(), BATCH))
    assert words in str(raised.value)


def test_a_file_declares_words_and_starts(tmp_path):
    path = tmp_path / "init.toml"
    path.write_text('tied = true\nsteps = 100\nfrozen = "*.bias"\n[ffn_out]\nstd = 0.02\n')
    declare = declared(str(path), Setup(gpt2(), BATCH, declare={"eos_id": 2})).declare
    assert (declare.tied, declare.steps, declare.frozen, declare.eos_id) == (True, 100, ("*.bias",), 2)
    assert {s.path for s in declare.init} == {f"transformer.h.{i}.mlp.c_proj.weight" for i in range(LAYERS)}


@each(
    ("content", "words"),
    [
        (None, "there is no file"),
        ("tied = ", "is not TOML"),
        ("teid = true", "did you mean 'tied'"),
        ("tied = 3", "True or False"),
        ("[ffn_out]\nstd = -1", "give a number"),
        ("[ffn_out]\nstd = nan", "give a number"),
        ("[ffn_out]\nstd = 1.0\nvalue = 1.0", "one of std and value"),
        ("[ffn_out]\ndepth = 'total'", "one of std and value"),
        ("[ffn_out]\nstd = 1.0\ndepth = 'all'", "none, total, layer"),
        ("[ffn_out]\nsdt = 1.0", "did you mean 'std'"),
        ("[fnn_out]\nstd = 1.0", "fits no parameter"),
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path, content, words):
    path = tmp_path / "init.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as raised:
        declared(str(path), Setup(gpt2(), BATCH))
    assert words in str(raised.value)


def test_every_package_that_knows_names_is_asked(monkeypatch):
    setup = Setup(Decoder(), tokens(), loss=loss_of)
    ours = (Start("head.weight", std=0.5),)

    def refusing(name, setup):
        raise UserError(f"there is no recipe {name}")

    def knowing(name, setup):
        if name != "mine":
            raise UserError(f"{name} is not mine")
        return ours

    module = ModuleType("packages_that_know_names")
    module.refusing, module.knowing = refusing, knowing
    monkeypatch.setitem(sys.modules, module.__name__, module)
    entries = [EntryPoint(name, f"{module.__name__}:{name}", GROUP) for name in ("refusing", "knowing")]
    monkeypatch.setattr(normlab.checks.declared, "entry_points", lambda group: entries)
    assert declared("mine", setup).declare.init == ours
    with pytest.raises(UserError, match=r"no recipe other; other is not mine"):
        declared("other", setup)
    entries[:] = []
    with pytest.raises(UserError, match="no such file"):
        declared("other", setup)
