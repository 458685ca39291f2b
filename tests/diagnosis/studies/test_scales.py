from __future__ import annotations

from dataclasses import replace
from statistics import fmean, stdev

import pytest
import torch
from torch import Tensor

from contracts.variants import build, uniform
from diagnosis.small import BATCH, PADDING_MASKS, subject_read, theory_setting, translating, untouched
from normlab.diagnosis.studies.scales import scales
from normlab.diagnosis.subject import Subject
from normlab.diagnosis.tables import Table, Tables
from normlab.diagnosis.theory import ffn_gain

SIGNALS = ("before", "branch", "total", "after")


def by_hand(subject: Subject) -> dict[tuple[str, int, str], list[Tensor]]:
    """The vectors of real tokens, sublayer by sublayer, in plain loops over ours."""
    model = subject.model.eval()
    seen: dict[tuple[str, int, str], Tensor] = {}
    handles = []
    for name in ("encoder", "decoder"):
        for i, sublayer in enumerate(getattr(model, name).sublayers):

            def see(module, args, output, key=(f"{name}.sublayers", i)):
                seen[(*key, "before")], seen[(*key, "after")] = args[0], output

            def see_branch(module, args, output, key=(f"{name}.sublayers", i)):
                seen[(*key, "branch")] = output

            handles += [sublayer.register_forward_hook(see), sublayer.f.register_forward_hook(see_branch)]
    with torch.no_grad():
        model(*subject.batch)
    for handle in handles:
        handle.remove()
    for stack, i, signal in list(seen):
        if signal == "before":
            seen[stack, i, "total"] = seen[stack, i, "before"] + seen[stack, i, "branch"]
    return {
        key: [x[b, t] for b in range(x.shape[0]) for t in range(x.shape[1]) if PADDING_MASKS[key[0]][b, t]]
        for key, x in seen.items()
    }


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_scales_are_those_of_plain_loops(placement):
    subject = translating(placement)
    expected, table = by_hand(subject), scales(subject)
    assert [(r["stack"], r["index"], r["signal"]) for r in table] == [
        (stack, i, signal)
        for stack, count in (("encoder.sublayers", 4), ("decoder.sublayers", 6))
        for i in range(count)
        for signal in SIGNALS
    ]
    for row in table:
        z = [float(v.double() @ v.double()) for v in expected[row["stack"], row["index"], row["signal"]]]
        mean = fmean(z)
        assert row["mean_square"] == pytest.approx(mean / 16, rel=1e-5)
        assert row["rms"] == pytest.approx((mean / 16) ** 0.5, rel=1e-5)
        spread = fmean([(v / mean - 1) ** 2 for v in z]) ** 0.5
        assert row["spread"] == pytest.approx(spread, rel=1e-3, abs=1e-6)
        assert row["bounded"] == pytest.approx(fmean([v / mean - 1 <= 0.1 for v in z]))


def of(subjects: list[Subject], signal: str, role: str) -> list[list[dict]]:
    """The rows of one signal, a list for each seed."""
    return [list(scales(s).where(signal=signal, role=role)) for s in subjects]


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "ffn_dim"), [(48, 48), (48, 96), (32, 128)])
def test_lemma_2_post_is_the_same_in_every_layer(dim, ffn_dim):
    subjects = theory_setting("post", layers=3, dim=dim, ffn_dim=ffn_dim, seeds=24)
    seeds, predicted = of(subjects, "total", "ffn"), 1 + 2 * dim * ffn_dim / (dim + ffn_dim) ** 2
    for rows in zip(*seeds, strict=True):
        values = [row["mean_square"] for row in rows]
        error = stdev(values) / len(values) ** 0.5
        assert error < 0.03
        assert fmean(values) == pytest.approx(predicted, abs=4 * error)
        assert all(row["theory"] == pytest.approx(predicted) for row in rows)
        assert {row["source"] for row in rows} == {"Xiong et al. 2020, Lemma 2 (arXiv 2002.04745)"}
    assert 1 + ffn_gain(dim, ffn_dim) == pytest.approx(predicted)


@pytest.mark.slow
def test_lemma_2_pre_lies_between_its_bounds():
    subjects = theory_setting("pre", layers=4, dim=48, ffn_dim=48, seeds=8)
    seeds = of(subjects, "after", "ffn")
    starts = [scales(s).where(index=0, signal="before").rows[0]["mean_square"] for s in subjects]
    for layer, rows in enumerate(zip(*seeds, strict=True), start=1):
        for row, start in zip(rows, starts, strict=True):
            assert row["theory"] is None
            assert row["theory_low"] == pytest.approx(start + layer / 2)
            assert row["theory_high"] == pytest.approx(start + 3 * layer / 2)
        mean = fmean(row["mean_square"] for row in rows)
        assert fmean(starts) + layer / 2 < mean < fmean(starts) + 3 * layer / 2
    assert fmean(starts) == pytest.approx(1.0, abs=0.02)


def test_the_first_stream_is_given_not_predicted():
    first = scales(translating("pre")).where(index=0, signal="before")
    assert [row["source"] for row in first] == [None, None]


def test_placements_that_the_lemma_does_not_cover_have_no_theory():
    table = scales(translating("rezero"))
    assert {row["theory_low"] for row in table} == {None}
    assert len(table) == 40


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_the_inner_width_is_read_from_the_branchs_own_matrices(activation):
    row = scales(translating("post", activation=activation)).where(role="ffn", signal="branch").rows[0]
    assert row["theory"] == pytest.approx(ffn_gain(16, 24))


def test_scales_leave_no_trace():
    untouched("post", scales)


# ---------------------------------------------------------------------------------------------- real tokens


@pytest.mark.parametrize("placement", ["post", "pre", "residual", "rezero", "tfixup", "layerscale"])
def test_padding_is_where_the_loss_has_no_gradient(placement):
    found = translating(placement).masks
    assert found.keys() == PADDING_MASKS.keys()
    assert all(torch.equal(found[name], PADDING_MASKS[name]) for name in PADDING_MASKS)


def test_a_mask_of_the_batch_decides_and_needs_no_loss():
    tf = pytest.importorskip("transformers", reason="the extra normlab[hf] is not installed")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    model = tf.BertModel(tf.BertConfig(vocab_size=20, **small))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]])
    subject = subject_read(model, {"input_ids": BATCH[0], "attention_mask": mask})
    (name,) = subject.masks
    assert torch.equal(subject.masks[name], mask.bool())
    shorter = Subject(
        model, {**subject.batch, "attention_mask": mask[:, :4]}, subject.loss_of, subject.structure
    )
    with pytest.raises(ValueError, match=r"\(4, 4\).*\(4, 6, 16\); .*\(4, 6\)"):
        scales(replace(subject, padding_masks=shorter.masks))


def test_masks_that_are_given_are_taken():
    subject = translating("post")
    all_tokens = {name: torch.ones_like(mask) for name, mask in PADDING_MASKS.items()}
    with_padding = scales(replace(subject, padding_masks=all_tokens))
    assert with_padding != scales(subject)
    assert scales(replace(subject, padding_masks=PADDING_MASKS)) == scales(subject)


def test_a_frozen_model_and_a_loss_apart_get_a_sentence():
    subject = translating("post")
    apart = Subject(subject.model, subject.batch, lambda m, b: m(*b).sum() * 0.0, subject.structure)
    with pytest.raises(ValueError, match=r"encoder\.sublayers.* attention_mask"):
        scales(apart)
    subject.model.requires_grad_(requires_grad=False)
    with pytest.raises(ValueError, match=r"frozen.* decoder_attention_mask"):
        scales(subject)
    frozen = scales(replace(subject, padding_masks=PADDING_MASKS))
    assert {row["theory"] for row in frozen.where(role="ffn", signal="branch")} == {None}


def test_a_branch_that_adds_nothing_has_no_spread():
    model = build(uniform("post"))
    subject = subject_read(model, BATCH[:2], loss=lambda m, b: m(*b).square().mean())
    with torch.no_grad():
        for p in model.encoder.sublayers[0].f.parameters():
            p.zero_()
    row = (
        scales(replace(subject, padding_masks=PADDING_MASKS))
        .where(stack="encoder.sublayers", index=0, signal="branch")
        .rows[0]
    )
    assert (row["mean_square"], row["spread"]) == (0.0, None)


def branches(sizes, spread=0.1):
    """Tables of a Pre-LN stack of sublayers whose branches have these sizes."""
    rows, stream = list[dict[str, object]](), 1.0
    for i, size in enumerate(sizes):
        total = (stream**2 + size**2) ** 0.5
        for signal, rms in (("before", stream), ("branch", size), ("total", total), ("after", total)):
            place = {"stack": "h", "index": i, "layer": i // 2, "role": ("self_attention", "ffn")[i % 2]}
            rows.append({**place, "signal": signal, "rms": rms, "mean_square": rms**2, "spread": spread})
        stream = total
    places = ({"stack": "h", "index": i, "layer": i // 2, "module": f"h.{i // 2}.f", "block": f"h.{i // 2}"}
              for i in range(len(sizes)))  # fmt: skip
    return Tables({"scales": Table("scales", tuple(rows)), "structure": Table("structure", tuple(places))})
