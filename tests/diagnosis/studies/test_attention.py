from __future__ import annotations

from dataclasses import replace
from math import exp, log, sqrt

import pytest
import torch
from torch import Tensor, nn

from contracts.variants import perturbed, uniform
from diagnosis.small import PADDING_MASKS, SOURCE, TARGET, labelled, subject_read, translating, untouched
from normlab.diagnosis.studies.attention import attention
from normlab.diagnosis.subject import Subject

WIDTH = 8


def by_hand(model: nn.Module) -> dict[tuple[str, int, int], tuple[float, float, float]]:
    """Entropy, largest logit and uniform entropy of every head, number by number, from the projections."""
    seen: dict[nn.Module, Tensor] = {}
    handles = [m.register_forward_hook(lambda m, _, y: seen.update({m: y})) for m in model.modules()]
    with torch.no_grad():
        model(SOURCE, TARGET)
    for handle in handles:
        handle.remove()
    found = {}
    for name in ("encoder", "decoder"):
        for i, sublayer in enumerate(getattr(model, name).sublayers):
            f = sublayer.f
            if sublayer.site.role == "ffn":
                continue
            if f.from_memory:
                q, (k, _) = seen[f.q], seen[f.kv].split(WIDTH * f.kv_heads, dim=-1)
            else:
                q, k, _ = seen[f.qkv].split([16, WIDTH * f.kv_heads, WIDTH * f.kv_heads], dim=-1)
            queries = PADDING_MASKS[f"{name}.sublayers"]
            keys = PADDING_MASKS["encoder.sublayers"] if f.from_memory else queries
            for head in range(2):
                key = f"{name}.sublayers", i, head
                found[key] = one_head(q, k, head, queries, keys, group=2 // f.kv_heads, causal=f.causal)
    return found


def one_head(q, k, head, queries, keys, *, group, causal) -> tuple[float, float, float]:
    entropies, largest, uniform = [], [], []
    mine, theirs = (slice(h * WIDTH, (h + 1) * WIDTH) for h in (head, head // group))
    for b in range(len(queries)):
        for t in range(queries.shape[1]):
            if not queries[b, t]:
                continue
            allowed = [s for s in range(keys.shape[1]) if keys[b, s] and (not causal or s <= t)]
            logits = [float(q[b, t, mine] @ k[b, s, theirs]) / sqrt(WIDTH) for s in allowed]
            total = sum(exp(z) for z in logits)
            entropies.append(-sum(exp(z) / total * log(exp(z) / total) for z in logits))
            largest.append(max(logits))
            uniform.append(log(len(allowed)))
    n = len(entropies)
    return sum(entropies) / n, max(largest), sum(uniform) / n


@pytest.mark.parametrize("choices", [{}, {"kv_heads": 1}], ids=str)
def test_heads_of_ours_are_those_of_plain_loops(choices):
    model = perturbed(uniform("pre", **choices), dtype=torch.float32)
    table = attention(subject_read(model, (SOURCE, TARGET), labelled))
    expected = by_hand(model)
    assert [(row["stack"], row["index"], row["head"]) for row in table] == list(expected)
    assert len(expected) == 2 * (2 + 4)
    for row in table:
        got = row["entropy"], row["max_logit"], row["uniform"]
        assert got == pytest.approx(expected[row["stack"], row["index"], row["head"]], rel=1e-4, abs=1e-5)
        assert row["entropy"] < row["uniform"]


def test_the_study_leaves_no_trace():
    fast, math = torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda.math_sdp_enabled()
    flash = torch.backends.cuda.flash_sdp_enabled()
    untouched("post", attention)
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert (torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()) == (math, flash)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_hugging_faces_own_weights_have_this_entropy(implementation):
    tf = pytest.importorskip("transformers", reason="the extra normlab[hf] is not installed")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = tf.BertConfig(**sizes, intermediate_size=32, initializer_range=0.5)
    model = tf.BertModel(config, add_pooling_layer=False).eval()
    model.set_attn_implementation(implementation)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    batch = {"input_ids": torch.arange(5, 15).view(2, 5), "attention_mask": mask}
    subject = subject_read(model, batch, lambda model, batch: model(**batch).last_hidden_state[:, 0].sum())
    table = attention(subject)

    model.set_attn_implementation("eager")
    with torch.no_grad():
        layers = model(**batch, output_attentions=True).attentions
    for layer, weights in enumerate(layers):
        for head in range(2):
            (row,) = table.where(index=2 * layer, head=head)
            p = weights[:, head][mask.bool()]
            entropy = -(p * p.clamp(min=1e-30).log()).sum(-1).mean()
            assert row["entropy"] == pytest.approx(entropy.item(), rel=1e-4)
            assert row["uniform"] == pytest.approx((5 * log(5) + 3 * log(3)) / 8)
    assert len(table) == 4


def encoder_decoder(**choices) -> nn.Transformer:
    """One layer each; not built by itself, because torch then warns that some choices are slow."""
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, **choices), 1, enable_nested_tensor=False
    )
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, **choices), 1)
    first = choices["batch_first"]
    return nn.Transformer(16, 2, custom_encoder=encoder, custom_decoder=decoder, batch_first=first)


@pytest.mark.parametrize("norm_first", [False, True])
def test_torchs_layers_are_seen_whichever_dimension_leads(norm_first):
    source, target = torch.randn(2, 3, 7, 16, generator=torch.Generator().manual_seed(0)).unbind()
    target = target[:, :5]
    padded = torch.zeros(3, 7, dtype=torch.bool)
    padded[1, 4:] = True
    tables = []
    for first in (True, False):
        torch.manual_seed(1)
        model = encoder_decoder(dim_feedforward=32, dropout=0.2, batch_first=first, norm_first=norm_first)
        pair = (source, target) if first else (source.transpose(0, 1), target.transpose(0, 1))
        causal = nn.Transformer.generate_square_subsequent_mask(5)
        batch = {"src": pair[0], "tgt": pair[1], "tgt_mask": causal}
        batch |= {"src_key_padding_mask": padded, "memory_key_padding_mask": padded}
        subject = subject_read(model, batch, lambda model, batch: model(**batch).square().sum())
        real = {"encoder.layers": ~padded, "decoder.layers": torch.ones(3, 5, dtype=torch.bool)}
        real = real if first else {name: mask.T for name, mask in real.items()}
        tables.append(attention(replace(subject, padding_masks=real)))
    assert [len(table) for table in tables] == [6, 6]
    one, other = tables
    for column in ("entropy", "max_logit", "uniform"):
        assert one.column(column) == pytest.approx(other.column(column), rel=1e-4)
    (row, _) = tables[0].where(stack="encoder.layers")
    assert row["uniform"] == pytest.approx((14 * log(7) + 4 * log(4)) / 18)
    (row, _) = tables[0].where(stack="decoder.layers", index=0)
    assert row["uniform"] == pytest.approx(sum(log(i) for i in range(1, 6)) / 5)


class Written(nn.Module):
    """Attention written out with one head, a softmax in the feed-forward branch, and one at the end."""

    def __init__(self, weigh) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WrittenLayer(weigh) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.softmax(-1)


class WrittenAttention(nn.Module):
    def __init__(self, weigh) -> None:
        super().__init__()
        self.q, self.k, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.weigh = weigh

    def forward(self, x):
        return self.out(self.weigh(self.q(x) @ self.k(x).mT) @ x)


class Softened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.down(self.up(x).softmax(-1))


class WrittenLayer(nn.Module):
    def __init__(self, weigh) -> None:
        super().__init__()
        self.attn, self.mlp = WrittenAttention(weigh), Softened()
        self.norm1, self.norm2 = nn.LayerNorm(4), nn.LayerNorm(4)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def written(weigh) -> Subject:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 4)
    return subject_read(Written(weigh), x, lambda model, x: model(x)[..., 0].sum())


def test_other_softmaxes_are_none_of_its_business():
    subject = written(lambda scores: scores.softmax(-1))
    table = attention(subject)
    assert [(row["index"], row["head"]) for row in table] == [(0, 0), (2, 0)]
    layer = subject.model.layers[0]
    x = layer.norm1(subject.batch)
    scores = layer.attn.q(x) @ layer.attn.k(x).mT
    p = scores.softmax(-1)
    assert table.rows[0]["entropy"] == pytest.approx(-(p * p.log()).sum(-1).mean().item(), rel=1e-5)
    assert table.rows[0]["max_logit"] == pytest.approx(scores.max().item(), rel=1e-5)


def test_attention_without_a_softmax_gets_a_sentence():
    with pytest.raises(ValueError, match=r"Written: .*eager"):
        attention(written(torch.sigmoid))


def test_heads_in_half_precision_are_measured_in_float32():
    subject = translating("post")
    whole = attention(subject)
    subject.model.bfloat16()
    half = attention(subject)
    for one, other in zip(whole, half, strict=True):
        assert other["entropy"] == pytest.approx(one["entropy"], rel=0.02)
