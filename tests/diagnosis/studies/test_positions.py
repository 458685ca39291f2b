"""Whether a model sees the order of its tokens, and whether rotary embeddings are relative."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from diagnosis.studies.test_preflight import TEXT, TIME, Gpt
from normlab.diagnosis import diagnose


class Encoder(Gpt):
    """The small GPT without its mask, with or without positions."""

    def __init__(self, *, positions: bool) -> None:
        super().__init__()
        self.position = nn.Embedding(TIME + 1, len(self.embedding.weight[0])) if positions else None
        for layer in self.layers:
            layer.attention.causal = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        if self.position is not None:
            x = x + self.position(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def small_llama():
    transformers = pytest.importorskip("transformers", reason="the extra normlab[hf] is not installed")
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("positions", [True, False])
def test_a_model_that_does_not_see_the_order_of_its_tokens_is_named(positions):
    found = diagnose(
        Encoder(positions=positions),
        {"ids": TEXT},
        loss=lambda model, batch: model(**batch)[:, 0].square().mean(),
        lr=1e-3,
        preset="preflight",
    )
    assert ("no_positions" in [f.name for f in found.findings]) != positions


def test_a_rotary_embedding_that_turns_queries_alone_is_named():
    pytest.importorskip("transformers", reason="the extra normlab[hf] is not installed")
    from transformers.models.llama import modeling_llama as llama

    model = small_llama()
    batch = {"input_ids": TEXT, "labels": TEXT}
    names = []
    both = llama.apply_rotary_pos_emb

    def interleaved(q, k, *angles):
        return both(q, k, *(a.chunk(2, -1)[0].repeat_interleave(2, -1) for a in angles))

    for turned in (both, lambda q, k, *angles: (both(q, k, *angles)[0], k), interleaved):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llama, "apply_rotary_pos_emb", turned)
            found = diagnose(model, batch, lr=1e-3, preset="preflight")
        names.append([(f.name, f.module) for f in found.findings if f.name == "rotary"])
    found = ("rotary", "model.layers.0.self_attn")
    assert names == [[], [found], [found]]


def test_a_rotary_embedding_without_effect_is_named():
    pytest.importorskip("transformers", reason="the extra normlab[hf] is not installed")
    from transformers.models.llama import modeling_llama as llama

    model = small_llama()
    batch = {"input_ids": TEXT, "labels": TEXT}
    names = []
    for turned in (llama.apply_rotary_pos_emb, lambda q, k, *angles: (q, k)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llama, "apply_rotary_pos_emb", turned)
            found = diagnose(model, batch, lr=1e-3, preset="preflight")
        names.append([f.name for f in found.at_least("warning")])
    assert names == [[], ["unturned"]]


@pytest.mark.parametrize("zero", ["o_proj", "q_proj", "lm_head"])
def test_a_rotary_embedding_cannot_be_seen_where_matrices_start_at_zero(zero):
    model = small_llama()
    for path, p in model.named_parameters():
        if zero in path:
            nn.init.zeros_(p)
    found = diagnose(model, {"input_ids": TEXT, "labels": TEXT}, lr=1e-3, preset="preflight")
    assert "unturned" not in [f.name for f in found.findings]


@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
def test_a_rotary_finding_says_which_columns_its_table_pairs(pairs):
    pytest.importorskip("transformers", reason="the extra normlab[hf] is not installed")
    from transformers.models.llama import modeling_llama as llama

    class Interleaved(llama.LlamaRotaryEmbedding):
        def forward(self, x, position_ids):
            angles = super().forward(x, position_ids)
            return tuple(a.chunk(2, -1)[0].repeat_interleave(2, -1) for a in angles)

    model = small_llama()
    if pairs == "neighbours":
        model.model.rotary_emb.__class__ = Interleaved
    found = diagnose(model, {"input_ids": TEXT, "labels": TEXT}, lr=1e-3, preset="preflight")
    assert [row["pairs"] for row in found.tables["positions"].where(kind="rotary")] == [pairs]
    said = [f.do for f in found.findings if f.name == "rotary"]
    assert len(said) == (pairs == "neighbours")
    assert all("interleaved" in do for do in said)
