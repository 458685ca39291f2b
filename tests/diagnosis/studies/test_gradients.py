from __future__ import annotations

import copy
from dataclasses import replace
from statistics import fmean, stdev
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from contracts.variants import build, uniform
from diagnosis.small import BATCH, PADDING_MASKS, labelled, subject_read, translating, untouched
from normlab.diagnosis.parameters import Owner, owners
from normlab.diagnosis.studies.gradients import (
    branch_jacobians,
    parameter_gradients,
    split,
    sublayer_gradients,
)
from normlab.diagnosis.subject import Subject
from normlab.nn import Context

ROLES = {"encoder": ("self_attention", "ffn"), "decoder": ("self_attention", "cross_attention", "ffn")}
IDS = torch.randint(5, 90, (3, 7), generator=torch.Generator().manual_seed(1))


# ----------------------------------------------------------------------------------------- sublayer outputs


@pytest.mark.parametrize("placement", ["post", "pre", "deepnorm", "rezero"])
def test_gradients_of_sublayer_outputs_are_those_of_plain_backward(placement):
    subject = translating(placement)
    model, outputs = copy.deepcopy(subject.model).eval(), dict[tuple[str, int], Tensor]()
    for stack in ("encoder", "decoder"):
        for i, sublayer in enumerate(getattr(model, stack).sublayers):

            def keep(module, args, output, key=(f"{stack}.sublayers", i)):
                output.retain_grad()
                outputs[key] = output

            sublayer.register_forward_hook(keep)
    labelled(model, subject.batch).backward()
    expected = {key: x.grad[PADDING_MASKS[key[0]]] for key, x in outputs.items()}
    largest = max(g.norm().item() for g in expected.values())
    table = sublayer_gradients(subject)
    assert [(r["stack"], r["index"]) for r in table] == list(expected)
    for row in table:
        g = expected[row["stack"], row["index"]]
        assert row["grad_l2"] == pytest.approx(g.norm().item(), rel=1e-5)
        assert row["relative"] == pytest.approx(g.norm().item() / largest, rel=1e-5)
        assert row["variance"] == pytest.approx(g.var(correction=0).item(), rel=1e-4)
        stack = str(row["stack"]).split(".")[0]
        assert row["role"] == ROLES[stack][row["index"] % len(ROLES[stack])]
        assert row["layer"] == row["index"] // len(ROLES[stack])
    assert max(table.column("relative")) == 1.0


def test_a_token_loss_at_rezeros_start_reaches_no_encoder_output():
    assert set(
        sublayer_gradients(translating("rezero")).where(stack="encoder.sublayers").column("grad_l2")
    ) == {0.0}


def hugging_face(name: str, config: str, **choices) -> nn.Module:
    tf = pytest.importorskip("transformers", reason="the extra normlab[hf] is not installed")
    torch.manual_seed(0)
    return getattr(tf, name)(getattr(tf, config)(vocab_size=100, **choices))


def bert() -> tuple[nn.Module, str]:
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return hugging_face("BertForMaskedLM", "BertConfig", **small), "bert.encoder.layer"


def gpt2() -> tuple[nn.Module, str]:
    special = {"bos_token_id": 1, "eos_token_id": 2}
    small = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return hugging_face("GPT2LMHeadModel", "GPT2Config", **small, **special), "transformer.h"


@pytest.mark.parametrize("make", [bert, gpt2])
def test_gradients_at_the_end_of_each_block_of_other_peoples_models(make):
    model, name = make()
    batch = {"input_ids": IDS, "labels": IDS}
    table = sublayer_gradients(subject_read(model, batch)).where(role="ffn")
    outputs: list[Tensor] = []

    def keep(module, args, output):
        outputs.append(output if isinstance(output, Tensor) else output[0])
        outputs[-1].retain_grad()

    for block in model.get_submodule(name):
        block.register_forward_hook(keep)
    model.eval()(**batch).loss.backward()
    assert table.column("grad_l2") == pytest.approx([x.grad.norm().item() for x in outputs], rel=1e-5)
    assert table.column("stack") == [name] * 2


def test_time_may_lead():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(7, 3, 16)
    table = sublayer_gradients(subject_read(model, x, loss=lambda m, b: (m(b)[:5] * x[:5]).mean()))
    h, kept = x, []
    for one in copy.deepcopy(model).eval().layers:
        h = one(h)
        h.retain_grad()
        kept.append(h)
    (h[:5] * x[:5]).mean().backward()
    # the last two tokens have no label in the last layer, and are read by others before
    assert table.where(role="ffn").column("grad_l2") == pytest.approx([k.grad.norm().item() for k in kept])


# ----------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_gradients_of_parameters_are_those_of_one_batch_after_another(placement):
    subject = translating(placement)
    batches = [tuple(x[a:b] for x in subject.batch) for a, b in ((0, 1), (1, 3), (3, 4))]
    collected = dict[str, list[Tensor]]()
    for batch in batches:
        model = copy.deepcopy(subject.model).eval()
        labelled(model, batch).backward()
        for path, p in model.named_parameters():
            collected.setdefault(path, []).append(p.grad)
    table = parameter_gradients(replace(subject, batches=batches))
    assert list(dict.fromkeys(table.column("parameter"))) == list(collected)
    packed = {"qkv": ("query", "key", "value"), "kv": ("key", "value")}
    for row in table:
        found, holder = collected[row["parameter"]], str(row["parameter"]).split(".")[-2]
        if holder in packed:
            part = packed[holder].index(row["kind"])
            found = [g.chunk(len(packed[holder]))[part] for g in found]
        assert row["mean_grad_l2"] == pytest.approx(
            torch.stack(found).mean(0).norm().item(), rel=1e-4, abs=1e-7
        )
        assert row["grad_l2"] == pytest.approx(fmean(g.norm().item() for g in found), rel=1e-4, abs=1e-7)
        assert row["mean_grad_l2"] <= row["grad_l2"] * (1 + 1e-5)
    assert table.where(parameter="encoder.sublayers.1.f.inner.weight").column("shape") == ["24x16"]
    own = table.where(parameter="encoder.sublayers.0.f.qkv.weight")
    assert [(row["kind"], row["shape"]) for row in own] == [(kind, "16x16") for kind in packed["qkv"]]


def test_one_batch_is_split_by_rows():
    subject = translating()
    alone = [tuple(x[i : i + 1] for x in subject.batch) for i in range(4)]
    assert parameter_gradients(subject) == parameter_gradients(replace(subject, batches=alone))


class Pair(NamedTuple):
    ids: Tensor
    scale: float


def test_split_keeps_the_form_of_a_batch():
    x, mask = torch.arange(10).reshape(5, 2), torch.zeros(2, 2)
    parts = split({"pair": Pair(x, 0.5), "more": [x, mask], "step": torch.tensor(3)}, 4)
    assert [part["pair"].ids.tolist() for part in parts] == [
        rows.tolist() for rows in (x[:1], x[1:2], x[2:4], x[4:])
    ]
    assert all(isinstance(p["pair"], Pair) and p["pair"].scale == 0.5 and p["more"][1] is mask for p in parts)
    assert [len(part) for part in split(x, 9)] == [1] * 5
    with pytest.raises(ValueError, match="batches="):
        split({"text": "words"}, 4)


@pytest.mark.parametrize(
    "placement", ["post", "pre", "deepnorm", "rezero", "admin", "residual", "b2t", "mixln"]
)
def test_parameters_of_ours_belong_to_the_sublayer_that_holds_them(placement):
    table = parameter_gradients(translating(placement))
    inside = 0
    for row in table:
        stack, *_, path = parts = str(row["parameter"]).split(".")
        if len(parts) > 2 and parts[1] == "sublayers":
            index, roles = int(parts[2]), ROLES[stack]
            place = (f"{stack}.sublayers", index, index // len(roles), roles[index % len(roles)])
            inside += 1
        else:
            place = (None, None, None, "other")
        if path == "alpha" and placement == "rezero":  # one a layer
            place = (place[0], None, place[2], "shared")
        if parts[:2] == ["encoder", "end"] and placement == "residual":  # on the way to every cross-attention
            place = ("decoder.sublayers", None, None, "shared")
        assert (row["stack"], row["index"], row["layer"], row["role"]) == place, path
    assert inside >= 10 * 4


def test_parameters_of_bart_belong_to_their_layer():
    small = {
        f"{stack}_{name}": n
        for stack in ("encoder", "decoder")
        for name, n in (("layers", 2), ("ffn_dim", 32))
    }
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 16, "pad_token_id": 0}
    model = hugging_face("BartForConditionalGeneration", "BartConfig", **small, **heads)
    table = parameter_gradients(subject_read(model, {"input_ids": IDS, "labels": IDS[:, :4].contiguous()}))
    roles = {"self_attn": "self_attention", "encoder_attn": "cross_attention", "fc1": "ffn", "fc2": "ffn"}
    roles |= {f"{name}_layer_norm": role for name, role in roles.items() if "attn" in name} | {
        "final_layer_norm": "ffn"
    }
    layers = 0
    for row in table:
        parts = str(row["parameter"]).split(".")
        if "layers" in parts:
            at = parts.index("layers")
            assert row["stack"] == ".".join(parts[: at + 1])
            assert (row["layer"], row["role"]) == (int(parts[at + 1]), roles[parts[at + 2]])
            layers += 1
        else:
            assert row["role"] == "other"
    assert layers == 2 * 16 + 2 * 26


def test_what_several_sublayers_use_is_shared():
    model = build(uniform("pre"))
    model.encoder.sublayers[2].f.out.weight = model.encoder.sublayers[0].f.out.weight
    model.decoder.sublayers[5].f.outer.weight = model.encoder.sublayers[1].f.outer.weight
    subject = subject_read(model, BATCH[:2], loss=labelled)
    taps = [tap for _, view in subject.structure.sublayers for tap in view.taps]
    passed = subject.trace(taps).once(graph=True)
    found = owners(model, subject.structure, passed.taps)
    assert found["encoder.sublayers.0.f.out.weight"] == Owner("encoder.sublayers", None, None, "shared")
    assert found["encoder.sublayers.1.f.outer.weight"] == Owner(None, None, None, "shared")
    assert found["encoder.sublayers.0.place.norm.weight"] == Owner(
        "encoder.sublayers", 0, 0, "self_attention"
    )


# -------------------------------------------------------------------------------------- gradients of branches


@pytest.mark.slow
def test_branch_jacobians_are_those_of_the_full_matrix():
    subject = translating("pre")
    short = Subject(subject.model, tuple(x[2:3, :3] for x in subject.batch), labelled, subject.structure)
    real = {name: mask[2:3, :3] for name, mask in PADDING_MASKS.items()}
    (stack, _), layer = subject.structure.stacks, subject.model.encoder.sublayers[0]
    views = {v.index: v for v in stack.sublayers}
    x = short.calls([views[0].before])[views[0].before]
    context = Context(padding_mask=real["encoder.sublayers"])
    matrix = torch.autograd.functional.jacobian(lambda v: layer.f(layer.place.read(v), context), x)
    exact = matrix.square().sum().item() / x.numel()
    tables = [branch_jacobians(replace(short, padding_masks=real), seed=seed) for seed in range(150)]
    values = [table.rows[0]["jacobian_variance"] for table in tables]
    error = stdev(values) / len(values) ** 0.5
    assert error < 0.05 * exact
    assert fmean(values) == pytest.approx(exact, abs=4 * error)
    total = (x + layer.f(layer.place.read(x), context)).var(correction=0).item()
    assert tables[0].rows[0]["total_variance"] == pytest.approx(total, rel=1e-5)


def test_appendix_a3_holds_in_the_cross_attention_of_a_post_decoder():
    rows = branch_jacobians(translating("post")).where(role="cross_attention").rows
    assert len(rows) == 2
    assert all(row["jacobian_variance"] + 1 <= row["total_variance"] for row in rows)


# --------------------------------------------------------------------------------------------------- manners


@pytest.mark.parametrize("study", [sublayer_gradients, parameter_gradients, branch_jacobians])
def test_gradients_leave_no_trace(study):
    untouched("post", study)


def test_what_is_frozen_has_no_gradient():
    subject = translating("post")
    subject.model.embedding.requires_grad_(requires_grad=False)
    for sublayer in subject.model.encoder.sublayers[:2]:
        sublayer.requires_grad_(requires_grad=False)
    rows = sublayer_gradients(subject).where(stack="encoder.sublayers").rows
    assert [row["relative"] is None for row in rows] == [True, True, False, False]
    assert branch_jacobians(subject).rows[0]["jacobian_variance"] is None
    table = parameter_gradients(subject)
    assert not any(str(path).startswith("encoder.sublayers.1.") for path in table.column("parameter"))
    subject.model.requires_grad_(requires_grad=False)
    for study in (sublayer_gradients, parameter_gradients):
        with pytest.raises(ValueError, match="frozen"):
            study(subject.on(subject.batch))
