from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from contracts.variants import perturbed, uniform
from diagnosis.small import SOURCE, TARGET, labelled, subject_read, translating, untouched
from normlab.diagnosis.parameters import kinds, measuring, owners
from normlab.diagnosis.studies.gradients import updates
from normlab.diagnosis.subject import Subject

BATCH = (SOURCE, TARGET)
ADAM = partial(torch.optim.Adam, lr=1e-2)


def parts_of(subject: Subject) -> dict:
    """Every parameter's parts, as the study has them."""
    model, structure = subject.model, subject.structure
    with measuring(model) as widths:
        seen = (
            subject.trace(tap for _, view in structure.sublayers for tap in view.taps).once(graph=True).taps
        )
    dims = {stack.name: seen[stack.sublayers[0].before].shape[-1] for stack in structure.stacks}
    return kinds(model, owners(model, structure, seen), widths, dims)


# ------------------------------------------------------------------------------------------------- the norms


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=0.01),
        ADAM,
        partial(torch.optim.AdamW, lr=1e-3),
        partial(torch.optim.Adafactor, lr=1e-2),
        partial(torch.optim.RMSprop, lr=1e-3),
        partial(torch.optim.Rprop, lr=1e-3),
        partial(torch.optim.NAdam, lr=1e-3),
        partial(torch.optim.LBFGS, lr=0.1, max_iter=3),
    ],
    ids=lambda make: make.func.__name__,
)
def test_norms_are_those_of_a_real_step_on_a_copy(make):
    subject = translating("pre")
    table = updates(replace(subject, optimizer=make))

    model = deepcopy(subject.model).eval()
    before = {path: p.detach().clone() for path, p in model.named_parameters()}
    optimizer = make(list(model.parameters()))

    def closure():
        optimizer.zero_grad()
        loss = labelled(model, BATCH)
        loss.backward()
        return loss

    closure()
    gradients = {path: p.grad.clone() for path, p in model.named_parameters()}
    optimizer.step(closure)

    squares = {path: [0.0, 0.0, 0.0] for path in before}
    for row in table:
        sums, weight = squares[row["parameter"]], row["update_over_weight"]
        sums[0] += row["grad_l2"] ** 2
        sums[1] += row["update_l2"] ** 2
        sums[2] += (row["update_l2"] / weight) ** 2 if weight else 0.0
    for path, p in model.named_parameters():
        expected = gradients[path], p.detach() - before[path], before[path]
        for squared, x in zip(squares[path], expected, strict=True):
            lost = squared == 0 and x is expected[2]  # a ratio of zero does not tell its denominator
            assert lost or squared**0.5 == pytest.approx(x.norm().item(), rel=1e-4, abs=1e-7), path


def test_an_optimizer_amid_its_training_goes_on_from_its_state():
    subject = translating("post")
    optimizer = ADAM(list(subject.model.parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        labelled(subject.model, BATCH).backward()
        optimizer.step()
    table, fresh = (updates(replace(subject, optimizer=one)) for one in (optimizer, ADAM))
    before = {path: p.detach().clone() for path, p in subject.model.named_parameters()}
    optimizer.zero_grad()
    subject.loss().backward()
    optimizer.step()
    rows = [row for row in table if row["kind"] == "ffn_out" and row["parameter"].endswith("weight")]
    assert len(rows) == 4
    for row in rows:
        path = row["parameter"]
        moved = subject.model.get_parameter(path) - before[path]
        assert row["update_l2"] == pytest.approx(moved.norm().item(), rel=1e-4)
    assert max(row["update_l2"] for row in rows) < fresh.rows[0]["update_l2"]


def test_relative_norms_are_relative_to_the_largest():
    table = updates(replace(translating("pre"), optimizer=ADAM))
    for name in ("grad", "update"):
        norms, relative = table.column(f"{name}_l2"), table.column(f"{name}_relative")
        assert max(relative) == 1.0
        assert relative == pytest.approx([norm / max(norms) for norm in norms])


def test_adam_balances_what_gradients_do_not():
    rows = updates(replace(translating("pre"), optimizer=ADAM)).where(stack="encoder.sublayers", layer=1).rows
    matrices = [
        row for row in rows if row["kind"] in ("query", "key", "value") and "weight" in row["parameter"]
    ]
    assert [row["kind"] for row in matrices] == ["query", "key", "value"]
    (query, key, value), steps = ([row[c] for row in matrices] for c in ("grad_l2", "update_l2"))
    assert max(query, key) < value  # Liu et al. 2020, Appendix A.4
    assert steps == pytest.approx([1e-2 * 16] * 3, rel=0.05)  # lr for each of 16 x 16 elements


def test_the_study_leaves_no_trace():
    untouched(
        "admin", lambda subject: updates(replace(subject, optimizer=partial(torch.optim.AdamW, lr=0.1)))
    )


def test_no_gradients_and_zero_weights_and_frozen_models():
    subject = translating("pre")
    frozen = [p for path, p in subject.model.named_parameters() if path.startswith("encoder")]
    for p in frozen:
        p.requires_grad_(False)
    table = updates(replace(subject, optimizer=ADAM))
    assert not any(row["parameter"].startswith("encoder") for row in table)
    biases = [row for row in table if row["parameter"].endswith("f.out.bias")]
    assert len(biases) == 4
    assert all(row["update_over_weight"] is None and row["update_l2"] > 0 for row in biases)

    subject.model.requires_grad_(False)
    with pytest.raises(ValueError, match="requires_grad_"):
        updates(replace(subject, optimizer=ADAM))


# ------------------------------------------------------------------------------------------------- the kinds


@pytest.mark.parametrize(
    "choices",
    [{}, {"kv_heads": 1}, {"activation": "swiglu"}, {"ffn_dim": 16}, {"embedding": "untied"}],
    ids=str,
)
def test_parts_are_the_matrices_that_our_branches_name(choices):
    model = perturbed(uniform("pre", **choices), dtype=torch.float32)
    parts = parts_of(subject_read(model, BATCH, labelled))
    assert list(parts) == [path for path, _ in model.named_parameters()]
    named = {"ffn_gate": "ffn_in"}
    claimed: set[str] = set()
    for stack in (model.encoder, model.decoder):
        for sublayer in stack.sublayers:
            matrices = {}
            for name, matrix in sublayer.f.matrices().items():
                matrices.setdefault(named.get(name, name), []).append(matrix)
            mine = {
                path for path, p in model.named_parameters() if any(p is q for q in sublayer.f.parameters())
            }
            for path in mine:
                for part in parts[path]:
                    if path.endswith("weight"):
                        expected = torch.cat(matrices[part.kind])
                        got = part.of(model.get_parameter(path))
                        assert sorted(got.flatten().tolist()) == sorted(expected.flatten().tolist())
            claimed |= mine
    for path in set(parts) - claimed:
        (part,) = parts[path]
        assert part.kind == ("embedding" if path.startswith("embedding") else "norm"), path


def test_gains_on_the_shortcut_are_no_norms():
    parts = parts_of(translating("admin"))
    assert {parts[p][0].kind for p in parts if p.endswith("omega")} == {"other"}
    assert {parts[p][0].kind for p in parts if p.endswith("place.norm.weight")} == {"norm"}


def kinds_by_name(model: nn.Module, batch, loss) -> dict[str, tuple[str, ...]]:
    parts = parts_of(subject_read(model, batch, loss))
    return {path: tuple(part.kind for part in those) for path, those in parts.items()}


def squares(model, batch):
    output = model(*batch) if isinstance(batch, tuple) else model(batch)
    return getattr(output, "logits", output).square().mean()


def test_torchs_own_layers():
    model, pair = (
        nn.Transformer(16, 2, 1, 1, 32, batch_first=True),
        (torch.randn(3, 7, 16), torch.randn(3, 5, 16)),
    )
    found = kinds_by_name(model, pair, squares)
    assert {path.split("layers.0.")[-1]: kinds for path, kinds in found.items()} == {
        **{
            f"{attention}.{path}": kinds
            for attention in ("self_attn", "multihead_attn")
            for path, kinds in {
                "in_proj_weight": ("query", "key", "value"),
                "in_proj_bias": ("query", "key", "value"),
                "out_proj.weight": ("output",),
                "out_proj.bias": ("output",),
            }.items()
        },
        **{f"linear1.{name}": ("ffn_in",) for name in ("weight", "bias")},
        **{f"linear2.{name}": ("ffn_out",) for name in ("weight", "bias")},
        **{f"norm{i}.{name}": ("norm",) for i in (1, 2, 3) for name in ("weight", "bias")},
        **{
            f"{stack}.norm.{name}": ("norm",)
            for stack in ("encoder", "decoder")
            for name in ("weight", "bias")
        },
    }


def test_gpt2_keeps_its_matrices_the_other_way_round():
    tf = pytest.importorskip("transformers", reason="the extra normlab[hf] is not installed")
    torch.manual_seed(0)
    config = tf.GPT2Config(
        vocab_size=50,
        n_embd=16,
        n_layer=1,
        n_head=2,
        add_cross_attention=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = tf.GPT2LMHeadModel(config)
    batch = {"input_ids": torch.arange(12).view(2, 6), "encoder_hidden_states": torch.randn(2, 4, 16)}
    parts = parts_of(subject_read(model, batch, lambda model, batch: model(**batch).logits.square().mean()))
    block = model.transformer.h[0]
    packed = parts["transformer.h.0.attn.c_attn.weight"]
    thirds = block.attn.c_attn.weight.split(16, dim=1)
    assert [part.kind for part in packed] == ["query", "key", "value"]
    assert all(part.of(block.attn.c_attn.weight).equal(x) for part, x in zip(packed, thirds, strict=True))
    bias = parts["transformer.h.0.attn.c_attn.bias"]
    assert [part.of(block.attn.c_attn.bias).shape for part in bias] == [(16,)] * 3

    crossed = parts["transformer.h.0.crossattention.c_attn.weight"]
    halves = block.crossattention.c_attn.weight.split(16, dim=1)
    assert [part.kind for part in crossed] == ["key", "value"]
    assert all(
        part.of(block.crossattention.c_attn.weight).equal(x) for part, x in zip(crossed, halves, strict=True)
    )
    single = {
        "crossattention.q_attn": "query",
        "attn.c_proj": "output",
        "mlp.c_fc": "ffn_in",
        "mlp.c_proj": "ffn_out",
        "ln_1": "norm",
    }
    for name, kind in single.items():
        assert [part.kind for part in parts[f"transformer.h.0.{name}.weight"]] == [kind]
    assert {parts[f"transformer.{name}.weight"][0].kind for name in ("wte", "wpe")} == {"embedding"}


def test_what_cannot_be_told_apart_is_other():
    tf = pytest.importorskip("transformers", reason="the extra normlab[hf] is not installed")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    batch = torch.arange(12).view(2, 6)
    found = kinds_by_name(tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**sizes)), batch, squares)
    layer = "gpt_neox.layers.0"
    assert found[f"{layer}.attention.query_key_value.weight"] == ("other",)  # packed head by head
    assert found[f"{layer}.attention.dense.weight"] == ("output",)

    config = tf.MixtralConfig(**sizes, num_key_value_heads=1, num_local_experts=2)
    found = kinds_by_name(tf.MixtralForCausalLM(config), batch, squares)
    layer = "model.layers.0"
    assert found[f"{layer}.mlp.gate.weight"] == ("other",)  # the router
    assert found[f"{layer}.mlp.experts.gate_up_proj"] == ("ffn_in",)
    assert found[f"{layer}.mlp.experts.down_proj"] == ("ffn_out",)
    assert found["lm_head.weight"] == found["model.embed_tokens.weight"] == ("embedding",)


def test_a_part_of_a_sparse_gradient_has_its_norm():
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 16, sparse=True)
            self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)

        def forward(self, ids):
            return self.layers(self.words(ids))

    torch.manual_seed(0)
    model, ids, goal = Sparse(), torch.arange(6).view(2, 3), torch.randn(2, 3, 16)
    subject = subject_read(model, ids, lambda model, ids: F.mse_loss(model(ids), goal))
    (row,) = updates(replace(subject, optimizer=partial(torch.optim.SGD, lr=0.1))).where(kind="embedding")
    (gradient,) = torch.autograd.grad(subject.loss(), [model.words.weight])
    assert row["grad_l2"] == pytest.approx(gradient.to_dense().norm().item())
    assert row["update_l2"] == pytest.approx(0.1 * row["grad_l2"], rel=1e-4)
