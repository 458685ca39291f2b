"""Queries that are used as keys, and masks that hide an encoder from its decoder."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diagnosis.studies.test_preflight import Attention, Labelled, deep, guess, layer, preflight
from normlab.diagnosis import diagnose
from normlab.nn import Attention as OwnAttention
from normlab.nn import Context, reference


class QueriesForKeys(Attention):
    """Attention whose keys are computed and not used."""

    def forward(self, x: Tensor) -> Tensor:
        q, _, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ q.transpose(-1, -2) * self.scale).masked_fill(later, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


def test_the_rows_of_a_packed_matrix_that_nothing_uses_are_named():
    model = Labelled()
    layer(model, 2).attention.__class__ = QueriesForKeys
    cause = preflight(model).cause
    assert cause is not None
    assert (cause.name, cause.module) == ("unused_part", "gpt.layers.2.attention.qkv")
    assert (cause.numbers["role"], cause.numbers["matrices"]) == ("key", 1)


def test_keys_have_no_gradient_where_queries_start_at_zero_and_that_is_no_fault():
    model = Labelled()
    with torch.no_grad():
        for i in range(6):
            layer(model, i).attention.qkv.weight.chunk(3)[0].zero_()
    found = preflight(model)
    assert "unused_part" not in [f.name for f in found.findings]


class CausalOverMemory(OwnAttention):
    """Cross-attention whose query t sees the first t + 1 keys."""

    def _mask(self, context: Context) -> Tensor | None:
        mask = super()._mask(context)
        length = context.padding_mask.shape[1] if context.padding_mask is not None else 1
        return mask if mask is None else mask & torch.ones(length, mask.shape[-1], dtype=torch.bool).tril()


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_a_causal_mask_over_the_source_is_named(causal, plain):
    model, (source, target) = deep("pre")
    batch = {"source": source, "target_in": target}
    if causal:
        for i in (4, 7):
            model.decoder.sublayers[i].f.__class__ = CausalOverMemory

    def loss(model, batch):
        return guess(lambda source, target: model(source, target), (batch["source"], batch["target_in"]))

    if plain:
        with reference():
            found = diagnose(model, batch, loss=loss, preset="preflight")
    else:
        found = diagnose(model, batch, loss=loss, preset="preflight")
    rows = found.tables["attention_scale"]
    crossed = [row["module"] for row in rows if row["memory"]]
    assert crossed == [f"decoder.sublayers.{i}.f" for i in range(1, 18, 3)]
    assert {row["later_closed"] for row in rows if "encoder" in row["module"]} == {0.0}
    named = [f for f in found.findings if f.name == "causal_memory"]
    assert [(f.module, f.numbers["attentions"]) for f in named] == [("decoder.sublayers.4.f", 2)] * causal
