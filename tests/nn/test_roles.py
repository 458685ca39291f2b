"""Roles of parameters, as the classes of a model's modules state them."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
from torch import nn

from normlab.base.model_config import ModelConfig
from normlab.errors import UserError
from normlab.nn import Decoder, Encoder, PairClassifier, parameter_roles

CONFIG = ModelConfig(
    dim=8,
    ffn_dim=12,
    heads=2,
    kv_heads=1,
    encoder_layers=0,
    decoder_layers=1,
    encoder_placement="pre",
    decoder_placement="pre",
    embedding="untied",
    position_encoding="learned",
    activation="swiglu",
)


def roles_of(kind=Decoder, **choices):
    model = kind(replace(CONFIG, **choices), 11)
    roles = parameter_roles(model)
    assert list(roles) == [name for name, _ in model.named_parameters()]
    return {name: own.role for name, own in roles.items()}


def test_a_decoder_has_every_role_but_scalars():
    attention, ffn = "decoder.sublayers.0.", "decoder.sublayers.1."
    assert roles_of() == {
        "embedding.weight": "embedding",
        "embedding.output": "head",
        "position_encoding.weight": "embedding",
        **{f"{attention}f.{name}.weight": "hidden" for name in ("qkv", "out")},
        **{f"{attention}f.{name}.bias": "bias" for name in ("qkv", "out")},
        **{f"{ffn}f.{name}.weight": "hidden" for name in ("inner", "outer")},
        **{f"{ffn}f.{name}.bias": "bias" for name in ("inner", "outer")},
        **{f"{block}place.norm.{name}": "norm" for block in (attention, ffn) for name in ("weight", "bias")},
        "decoder.end.weight": "norm",
        "decoder.end.bias": "norm",
    }


def test_gains_of_branches_and_heads_are_scalars_and_biases_of_any_kind_are_biases():
    found = roles_of(decoder_placement="layerscale", head_gain="headgain", bias="scalarbias")
    sublayer = "decoder.sublayers.0."
    assert {found[sublayer + name] for name in ("place.lam", "f.head_gain.gain")} == {"scalar"}
    assert {found[f"{sublayer}f.qkv.{name}"] for name in ("before", "after")} == {"bias"}
    assert roles_of(norm="dyt")["decoder.end.alpha"] == "norm"
    assert roles_of(qk_norm="qknorm")[sublayer + "f.qk_norm.g"] == "norm"


def test_a_tied_table_is_an_embedding_and_classifiers_are_heads():
    bert = {"encoder_layers": 1, "decoder_layers": 0, "embedding": "plain"}
    found = roles_of(Encoder, **bert)
    assert found["embedding.weight"] == found["segments"] == "embedding"
    assert (found["token_bias"], found["pooler.weight"]) == ("bias", "hidden")
    assert found["next_sentence.weight"] == roles_of(PairClassifier, **bert)["classifier.weight"] == "head"


def test_packed_matrices_are_known_by_their_rows_and_blocks_by_their_sublayers():
    roles = parameter_roles(Decoder(CONFIG, 11))
    rows = {name.removeprefix("decoder.sublayers."): own.rows for name, own in roles.items()}
    assert (rows["0.f.qkv.weight"], rows["0.f.out.weight"]) == ((8, 4, 4), (8,))
    assert (rows["1.f.inner.weight"], rows["1.f.outer.weight"]) == ((12, 12), (8,))
    assert {name for name, own in roles.items() if own.in_block} == {n for n in roles if "sublayers" in n}


class Mixture(nn.Module):
    """A module of somebody else's, with matrices that nothing is said of."""

    parameter_roles: ClassVar[dict[str, str]] = {"inner.weight": "head"}

    def __init__(self):
        super().__init__()
        self.inner, self.other = nn.Linear(2, 2), nn.Linear(2, 2)
        self.table, self.scale = nn.Embedding(3, 2), nn.Parameter(nn.LayerNorm(2).weight.detach())
        self.tied = self.table


def test_an_outer_class_speaks_for_an_inner_one_and_torchs_own_classes_are_known():
    found = {name: own.role for name, own in parameter_roles(Mixture()).items()}
    assert found == {
        "scale": "scalar",
        "inner.weight": "head",
        "inner.bias": "bias",
        "other.weight": "hidden",
        "other.bias": "bias",
        "table.weight": "embedding",
    }


def test_an_unknown_role_is_refused(monkeypatch):
    monkeypatch.setattr(Mixture, "parameter_roles", {"scale": "gain"})
    with pytest.raises(UserError, match=r"^Mixture\.parameter_roles .*'gain'.*scalar"):
        parameter_roles(Mixture())
