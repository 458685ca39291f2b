from __future__ import annotations

from dataclasses import replace
from math import exp, log, nan

import pytest
import torch
from torch import nn

from contracts.variants import perturbed, uniform
from diagnosis.small import PADDING_MASKS, SOURCE, TARGET, labelled, subject_read, translating, untouched
from normlab.diagnosis.studies.attention import effective_rank, similarity
from normlab.diagnosis.studies.jacobian import norm_parameters

BATCH = (SOURCE, TARGET)


# ------------------------------------------------------------------------------------------------ similarity


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_similarity_and_rank_are_those_of_plain_loops(placement):
    subject = translating(placement)
    model = subject.model.eval()
    streams = {}
    for name in ("encoder", "decoder"):
        for i, sublayer in enumerate(getattr(model, name).sublayers):

            def see(module, args, output, key=(f"{name}.sublayers", i)):
                streams[key] = output
                streams.setdefault((key[0], -1), args[0])

            sublayer.register_forward_hook(see)
    with torch.no_grad():
        model(*BATCH)
    for sublayer in (*model.encoder.sublayers, *model.decoder.sublayers):
        sublayer._forward_hooks.clear()

    table = similarity(subject)
    assert [(row["stack"], row["index"]) for row in table] == [
        (f"{name}.sublayers", i) for name, count in (("encoder", 4), ("decoder", 6)) for i in range(-1, count)
    ]
    for row in table:
        x, real = streams[row["stack"], row["index"]], PADDING_MASKS[row["stack"]]
        cosines, ranks = [], []
        for b in range(len(x)):
            tokens = [x[b, t].double() for t in range(x.shape[1]) if real[b, t]]
            pairs = [(u, v) for i, u in enumerate(tokens) for j, v in enumerate(tokens) if i != j]
            cosines.append(sum(float(u @ v / u.norm() / v.norm()) for u, v in pairs) / len(pairs))
            values = torch.linalg.svdvals(torch.stack(tokens)).tolist()
            shares = [value / sum(values) for value in values if value > 0]
            ranks.append(exp(-sum(p * log(p) for p in shares)))
        assert row["cosine"] == pytest.approx(sum(cosines) / 4, rel=1e-4, abs=1e-6)
        assert row["effective_rank"] == pytest.approx(sum(ranks) / 4, rel=1e-4)


def test_the_rank_of_known_matrices():
    torch.manual_seed(0)
    orthogonal = torch.linalg.qr(torch.randn(9, 5))[0]
    assert effective_rank(orthogonal).item() == pytest.approx(5, rel=1e-5)
    assert effective_rank(orthogonal.T).item() == pytest.approx(5, rel=1e-5)
    outer = torch.randn(6, 1) * torch.randn(1, 8)
    assert effective_rank(outer).item() == pytest.approx(1, abs=1e-3)
    assert effective_rank(torch.zeros(3, 4)).item() == 1
    two = torch.diag(torch.tensor([3.0, 1.0, 0.0]))
    assert effective_rank(two).item() == pytest.approx(exp(-0.75 * log(0.75) - 0.25 * log(0.25)))
    assert effective_rank(torch.stack([two, torch.eye(3)])).tolist() == pytest.approx([1.7547653, 3.0])
    burst = torch.full((3, 3), torch.inf)
    assert effective_rank(torch.stack([burst, torch.eye(3)])).tolist() == pytest.approx(
        [nan, 3.0], nan_ok=True
    )


def test_padding_and_sequences_of_one_token_do_not_count():
    subject = translating("pre")
    whole = similarity(
        replace(subject, padding_masks={name: torch.ones_like(mask) for name, mask in PADDING_MASKS.items()})
    )
    assert whole != similarity(subject)
    single = {name: torch.zeros_like(mask) for name, mask in PADDING_MASKS.items()}
    for mask in single.values():
        mask[:, 0] = True
    assert similarity(replace(subject, padding_masks=single)).column("cosine") == [None] * 12
    for mask in single.values():
        mask[0, 1] = True
    pair = similarity(replace(subject, padding_masks=single)).rows[0]
    assert 1 < pair["effective_rank"] <= 2


def test_the_tokens_of_a_sequence_are_found_whichever_dimension_leads():
    x = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(0))
    tables = []
    for first in (True, False):
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=first)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        subject = subject_read(model, x if first else x.transpose(0, 1), lambda m, x: m(x)[..., 0].sum())
        tables.append(similarity(subject))
    one, other = tables
    for column in ("cosine", "effective_rank"):
        assert one.column(column) == pytest.approx(other.column(column), rel=1e-4)


# ------------------------------------------------------------------------------------------- norm parameters


@pytest.mark.parametrize(
    ("placement", "norm", "suffixes"),
    [
        ("pre", "scalenorm", {"place.norm.g"}),
        ("pre", "layernorm", {"place.norm.weight", "place.norm.bias"}),
        ("admin", "rmsnorm", {"place.norm.weight", "place.omega"}),
        ("keel", "rmsnorm", {"place.norm_in.weight", "place.norm_out.weight"}),
        ("pre", "dyt", {"place.norm.weight", "place.norm.bias", "place.norm.alpha"}),
    ],
)
def test_gains_are_listed_by_depth(placement, norm, suffixes):
    model = perturbed(uniform(placement, norm=norm), dtype=torch.float32)
    table = norm_parameters(subject_read(model, BATCH, labelled))
    for name, count in (("encoder", 4), ("decoder", 6)):
        for i in range(count):
            rows = table.where(stack=f"{name}.sublayers", index=i).rows
            path = f"{name}.sublayers.{i}."
            assert {row["parameter"].removeprefix(path) for row in rows} == suffixes
    for row in table:
        w = model.get_parameter(row["parameter"]).detach()
        assert row["parameter"].startswith(f"{row['module']}.")
        expected = float(w.mean()), float(w.min()), float(w.max())
        assert (row["mean"], row["low"], row["high"]) == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_final_norms_belong_to_their_stack_and_to_no_sublayer():
    table = norm_parameters(translating("pre"))
    rows = [row for row in table if row["index"] is None]
    assert {(row["stack"], row["module"]) for row in rows} == {
        ("encoder.sublayers", "encoder.end"),
        ("decoder.sublayers", "decoder.end"),
    }


def test_scalars_of_branches_that_start_at_zero_are_listed():
    table = norm_parameters(translating("rezero"))
    assert [(row["parameter"], row["index"]) for row in table] == [
        *((f"encoder.sublayers.{i}.place.alpha", i) for i in (0, 2)),  # one a layer
        *((f"decoder.sublayers.{i}.place.alpha", i) for i in (0, 3)),
    ]
    assert {(row["low"], row["high"]) for row in table} == {(0.0, 0.0)}


def test_frozen_norms_are_found_where_they_are():
    subject = translating("post")
    whole = norm_parameters(subject)
    subject.model.requires_grad_(False)
    assert norm_parameters(subject) == whole
    assert len(whole) == 2 * (4 + 6)


def test_biases_of_matrices_are_no_gains():
    tf = pytest.importorskip("transformers", reason="the extra normlab[hf] is not installed")
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = tf.BertForMaskedLM(tf.BertConfig(**sizes, intermediate_size=32))
    ids = torch.arange(10).view(2, 5)
    table = norm_parameters(subject_read(model, ids, lambda model, ids: model(ids).logits.square().mean()))
    layer = "bert.encoder.layer.0"
    assert [(row["parameter"], row["index"]) for row in table] == [
        ("bert.embeddings.LayerNorm.weight", None),
        ("bert.embeddings.LayerNorm.bias", None),
        (f"{layer}.attention.output.LayerNorm.weight", 0),
        (f"{layer}.attention.output.LayerNorm.bias", 0),
        (f"{layer}.output.LayerNorm.weight", 1),
        (f"{layer}.output.LayerNorm.bias", 1),
        ("cls.predictions.transform.LayerNorm.weight", None),
        ("cls.predictions.transform.LayerNorm.bias", None),
    ]


def test_the_studies_leave_no_trace():
    untouched("post", similarity)
    untouched("admin", norm_parameters)
