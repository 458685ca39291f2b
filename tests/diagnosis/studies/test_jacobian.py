from __future__ import annotations

from dataclasses import replace
from statistics import fmean, stdev

import pytest
import torch
from torch import nn

from diagnosis.small import PADDING_MASKS, theory_setting, translating, untouched
from normlab.diagnosis import find
from normlab.diagnosis.studies.jacobian import jacobian, spectral_norm, token_jacobian
from normlab.diagnosis.subject import Subject
from normlab.nn import DyT, LayerNorm, RMSNorm, ScaleNorm


@pytest.mark.parametrize("norm", [LayerNorm(6), RMSNorm(6), ScaleNorm(6), DyT(6), nn.LayerNorm(6)])
def test_the_matrix_is_that_of_one_column_after_another(norm):
    norm = norm.double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in norm.parameters():
            p += 0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    x = torch.randn(6, generator=generator, dtype=torch.float64) + 1
    h = 1e-6
    columns = [(norm(x + h * e) - norm(x - h * e)) / (2 * h) for e in torch.eye(6, dtype=x.dtype)]
    torch.testing.assert_close(token_jacobian(norm, x), torch.stack(columns, dim=1), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dim", [3, 8, 96])
@pytest.mark.parametrize("spread", [0.0, 0.05, 0.5])
def test_the_spectral_norm_is_the_largest_singular_value(dim, spread):
    generator = torch.Generator().manual_seed(dim)
    norm = LayerNorm(dim)
    with torch.no_grad():
        norm.weight += spread * torch.randn(dim, generator=generator)
    tokens = torch.randn(5, dim, generator=generator)
    matrices = torch.stack([token_jacobian(norm, token) for token in tokens])
    expected = torch.linalg.svdvals(matrices)[:, 0]
    torch.testing.assert_close(spectral_norm(matrices), expected, rtol=1e-4, atol=0.0)


def test_the_spectral_norm_of_nothing_is_zero():
    assert spectral_norm(torch.zeros(2, 4, 4)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_rows_are_those_of_every_token_taken_alone(placement):
    subject = translating(placement)
    table = jacobian(subject, tokens=1000)
    paths = [view.norm_read or view.norm_write for s in subject.structure.stacks for view in s.sublayers]
    finals = [s.final_norm for s in subject.structure.stacks if s.final_norm]
    assert sorted(str(row["module"]) for row in table) == sorted([*paths, *finals])
    taps = [tap for s in subject.structure.stacks for v in s.sublayers for tap in (v.before, v.total)]
    seen = subject.calls(taps).once().taps
    for stack in subject.structure.stacks:
        for view in stack.sublayers:
            path = view.norm_read or view.norm_write
            x = seen[view.before if view.norm_read else view.total]
            tokens = x.detach()[PADDING_MASKS[stack.name]]
            norm = subject.model.get_submodule(str(path))
            full = [torch.func.jacrev(norm)(token) for token in tokens]
            largest = [torch.linalg.svdvals(j)[0].item() for j in full]
            (row,) = table.where(module=path)
            assert row["tokens"] == len(tokens)
            assert (row["stack"], row["index"]) == (stack.name, view.index)
            assert row["spectral"] == pytest.approx(max(largest), rel=1e-4)
            assert row["spectral_mean"] == pytest.approx(fmean(largest), rel=1e-4)
            assert row["spectral_square"] == pytest.approx(fmean([v**2 for v in largest]), rel=1e-4)
            assert row["mean_square"] == pytest.approx(
                fmean([j.square().sum().item() for j in full]) / 16, rel=1e-4
            )
            exact = [16**0.5 / (t - t.mean()).norm().item() for t in tokens]
            assert row["exact_mean"] == pytest.approx(fmean(exact), rel=1e-5)
            assert row["spectral"] == pytest.approx(row["exact"], rel=1e-4)


@pytest.mark.slow
def test_appendix_f_two_thirds_behind_the_feed_forward_sum():
    subjects = theory_setting("post", layers=2, dim=64, ffn_dim=64, seeds=12)
    tables = [jacobian(subject, tokens=6) for subject in subjects]
    for index in (1, 3):
        values = [table.where(index=index).rows[0]["spectral_square"] for table in tables]
        error = stdev(values) / len(values) ** 0.5
        assert error < 0.02
        # E[1/z] is above 1/E[z] by about the squared spread of z, a few parts in d
        assert fmean(values) == pytest.approx(2 / 3, abs=4 * error + 2 / 64)
        whole = [table.where(index=index).rows[0] for table in tables]
        assert all(r["mean_square"] == pytest.approx(r["spectral_square"] * 62 / 64, rel=1e-3) for r in whole)


def test_the_published_form_fails_where_the_mean_dominates():
    (subject,) = theory_setting("pre", layers=1, dim=64, ffn_dim=64, seeds=1)
    shifted = Subject(subject.model, subject.batch + 3, subject.loss_of, subject.structure)
    row = jacobian(shifted).rows[0]
    assert row["spectral"] == pytest.approx(row["exact"], rel=1e-3)
    assert row["spectral"] > 2 * row["published"]


def test_tokens_are_spread_over_the_real_ones():
    subject = translating("post")
    assert set(jacobian(subject).column("tokens")) == {4}
    assert jacobian(replace(subject, padding_masks=PADDING_MASKS), tokens=1000) == jacobian(
        subject, tokens=1000
    )
    with pytest.raises(ValueError, match="tokens is 0"):
        jacobian(subject, tokens=0)


@pytest.mark.parametrize("first", [0.0, 1e-6, 1e6])
def test_a_first_token_unlike_the_others_is_not_what_norms_are_judged_by(first):
    (subject,) = theory_setting("pre", layers=1, dim=64, ffn_dim=64, seeds=1)
    batch = subject.batch.clone()
    batch[:, 0] *= first
    table = jacobian(Subject(subject.model, batch, subject.loss_of, subject.structure), tokens=1)
    assert all(row["spectral"] == pytest.approx(row["exact"], rel=1e-3) for row in table)
    assert [finding.name for finding in find({"jacobian": table})] == ["jacobian"]


def test_where_every_token_is_zero_nothing_is_compared():
    (subject,) = theory_setting("pre", layers=1, dim=64, ffn_dim=64, seeds=1)
    table = jacobian(Subject(subject.model, subject.batch * 0, subject.loss_of, subject.structure))
    row = table.rows[0]
    assert (row["exact"], row["exact_mean"], row["published"]) == (None, None, None)
    assert not find({"jacobian": table})


def test_narrow_floats_are_measured_in_float32():
    subject = translating("post")
    wide = jacobian(replace(subject, padding_masks=PADDING_MASKS))
    subject.model.bfloat16()
    for narrow, row in zip(jacobian(replace(subject, padding_masks=PADDING_MASKS)), wide, strict=True):
        assert narrow["spectral"] == pytest.approx(row["spectral"], rel=0.1)


def test_jacobians_leave_no_trace():
    untouched("pre", jacobian)
