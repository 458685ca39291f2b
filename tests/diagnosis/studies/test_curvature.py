from __future__ import annotations

import math
from collections import namedtuple
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from contracts.variants import CONFIG, build
from diagnosis.small import SOURCE, TARGET, labelled, subject_read, translating, untouched
from normlab.diagnosis.parameters import nodes_behind
from normlab.diagnosis.structure import Structure
from normlab.diagnosis.studies.curvature import (
    DOUBLINGS,
    Hessian,
    _bracket,
    critical_lr,
    curvature,
    largest_eigenvalue,
)
from normlab.diagnosis.subject import Subject, split
from normlab.errors import UserError

SGD = partial(torch.optim.SGD, lr=1e-3)
ADAM = partial(torch.optim.Adam, lr=1e-3)


class Point(nn.Module):
    """Weights and nothing else: the loss is a function of them."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w.clone())

    def forward(self) -> Tensor:
        return self.w


def at(w: list[float], loss) -> Subject:
    return Subject(Point(torch.tensor(w)), (), lambda model, _: loss(model()), Structure((), ()))


def tiny(placement: str = "post") -> Subject:
    """An encoder-decoder of ours so small that its Hessian can be written down."""
    sizes = {"dim": 4, "ffn_dim": 6, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    placements = {"encoder_placement": placement, "decoder_placement": placement}
    return subject_read(build(replace(CONFIG, **sizes, **placements)), (SOURCE, TARGET), labelled)


def full_hessian(subject: Subject) -> Tensor:
    """The matrix `[P, P]`, row by row, in float64, of the same loss in a written-out attention."""
    model = subject.model.eval().double()
    parameters = dict(model.named_parameters())
    loss = labelled(model, subject.batch)
    gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
    flat = torch.cat([g.flatten() for g in gradients])
    blocks = torch.autograd.grad(
        flat, list(parameters.values()), torch.eye(len(flat)).double(), is_grads_batched=True
    )
    return torch.cat([block.flatten(1) for block in blocks], dim=1)


# ---------------------------------------------------------------------------------------------- eigenvalues


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_the_largest_eigenvalue_and_the_sharpness_are_those_of_the_full_hessian(placement):
    subject = tiny(placement)
    subject.model.double()
    table = curvature(subject, tokens=1000, tolerance=1e-6, products=500)
    matrix = full_hessian(subject)
    torch.testing.assert_close(matrix, matrix.T)
    assert len(matrix) == sum(p.numel() for p in subject.model.parameters())
    values = {row["detail"].split(",")[0].split(" ", 1)[1]: row["value"] for row in table}
    largest = next(row for row in table if row["quantity"] == "largest_eigenvalue")
    assert largest["value"] == pytest.approx(torch.linalg.eigvalsh(matrix)[-1].item(), rel=1e-6)
    assert "24 tokens" in largest["detail"]

    loss = labelled(subject.model, subject.batch)
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(subject.model.parameters()))])
    update = -1e-3 * gradient / (gradient.abs() + 1e-8)
    for name, v in (("the gradient", gradient), ("the update", update)):
        expected = (v @ matrix @ v) / (v @ v)
        assert values[f"{name}"] == pytest.approx(expected.item(), rel=1e-6)


def test_float32_comes_near():
    subject = tiny()
    (row, *_) = curvature(subject, tokens=1000)
    assert row["value"] == pytest.approx(torch.linalg.eigvalsh(full_hessian(subject))[-1].item(), rel=1e-3)


def test_the_largest_is_not_the_largest_in_magnitude():
    scales = torch.tensor([-30.0, 2.0, 1.0, -3.0, 1.9])
    subject = at([0.1, 0.2, 0.3, 0.4, 0.5], lambda w: 0.5 * (scales * w.square()).sum())
    pair = largest_eigenvalue(Hessian(subject), products=50, tolerance=1e-5)
    assert pair.value == pytest.approx(2.0, rel=1e-4)
    assert pair.products < 20
    assert pair.residual < 1e-3


def test_the_residual_tells_when_products_were_too_few():
    scales = torch.linspace(1, 2, 50)
    subject = at([0.1] * 50, lambda w: 0.5 * (scales * w.square()).sum())
    few = largest_eigenvalue(Hessian(subject), products=3, tolerance=1e-6)
    assert few.products == 3
    assert few.value < 1.99
    assert few.residual > 0.01
    with pytest.raises(ValueError, match=r"products.* 0"):
        largest_eigenvalue(Hessian(subject), products=0, tolerance=1e-6)


def test_products_of_torchs_fused_attention_are_differences_of_gradients():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    x, goal = torch.randn(2, 5, 8).double(), torch.randn(2, 5, 8).double()
    model = nn.TransformerEncoder(layer, 1).double()
    subject = subject_read(model, x, lambda model, x: (model(x) - goal).square().mean())
    hessian = Hessian(subject)
    v = torch.randn(hessian.gradient.shape, generator=torch.Generator().manual_seed(1)).double()
    step, sides = 1e-5, []
    for sign in (1, -1):
        moved = {n: p.detach() + sign * step * hessian.split(v)[n] for n, p in model.named_parameters()}
        moved = {n: p.requires_grad_() for n, p in moved.items()}
        loss = (functional_call(model.eval(), moved, (x,)) - goal).square().mean()
        sides.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(moved.values()))]))
    torch.testing.assert_close(hessian @ v, (sides[0] - sides[1]) / (2 * step), rtol=1e-5, atol=1e-8)


def test_models_of_ours_leave_the_fast_paths_by_themselves(monkeypatch):
    """Large products are made by functions that can be differentiated once, where a processor gains by it."""
    monkeypatch.setattr("normlab.nn.kernels.linear._multiplies", lambda dtype: dtype == torch.float32)
    subject = translating("pre", dim=64, ffn_dim=1536, encoder_layers=1, decoder_layers=1)
    subject = replace(subject, batch=tuple(x.repeat(8, 1) for x in subject.batch))
    names = {node.name() for node in nodes_behind(subject.loss().grad_fn)}
    assert any(name.startswith("MkldnnLinear") for name in names), "the model is below the threshold"
    sharp = curvature(subject, tokens=1000, products=2).where(quantity="directional_sharpness")
    subject.model.double()  # which has no fast path
    plain = curvature(subject, tokens=1000, products=2).where(quantity="directional_sharpness")
    assert sharp.column("value") == pytest.approx(plain.column("value"), rel=1e-2)


def test_curvature_has_a_sentence_for_what_it_cannot_do():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w) -> Tensor:
            return w.clone()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g) -> Tensor:
            return 2 * g

    with pytest.raises(ValueError, match=r"twice: .* once_differentiable"):
        Hessian(at([1.0, 2.0], lambda w: Once.apply(w).square().sum()))
    x = torch.randn(1, 1, 4, 2)

    def fused(w: Tensor) -> Tensor:
        return torch._scaled_dot_product_flash_attention_for_cpu(w * x, x, w * x)[0].square().sum()

    with pytest.raises(ValueError, match=r"twice: .*implemented"):
        Hessian(at([1.0, 2.0], fused)) @ torch.ones(2)
    linear = Hessian(at([1.0, 2.0], lambda w: w.sum()))
    assert torch.equal(linear @ torch.ones(2), torch.zeros(2))

    subject = tiny()
    subject.model.requires_grad_(False)
    with pytest.raises(ValueError, match="requires_grad_"):
        curvature(subject)


@pytest.mark.slow
def test_the_studies_leave_no_trace():
    untouched("pre", lambda subject: curvature(subject, tokens=12, products=3))
    untouched("post", lambda subject: critical_lr(subject))


# ------------------------------------------------------------------------------------ critical learning rate


@pytest.mark.parametrize("lr", [1e-4, 0.49, 0.51, 30.0])
def test_gradient_descent_on_a_parabola_is_raised_from_two_over_its_curvature(lr):
    subject = at([1.5], lambda w: 2.0 * w.square().sum())  # curvature 4
    (row,) = critical_lr(replace(subject, optimizer=partial(torch.optim.SGD, lr=lr)), tolerance=1e-3)
    assert (row["quantity"], row["value"]) == ("critical_lr", pytest.approx(0.5, rel=1e-3))
    assert row["value"] >= 0.5 * (1 - 1e-6)


def test_adams_first_step_on_a_parabola_is_raised_from_twice_the_distance():
    subject = at([0.3], lambda w: 7.0 * w.square().sum())
    (row,) = critical_lr(subject, tolerance=1e-3)
    assert row["value"] == pytest.approx(0.6, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("make", [SGD, ADAM], ids=["sgd", "adam"])
def test_it_is_where_a_scan_of_real_steps_first_raises_the_loss(make):
    subject = translating("post")
    value = critical_lr(replace(subject, optimizer=make), tolerance=0.01).rows[0]["value"]
    start = subject.loss().item()

    def after(lr: float) -> float:
        fresh = replace(subject, model=deepcopy(subject.model))
        optimizer = make(list(fresh.model.parameters()), lr=lr)
        fresh.loss().backward()
        optimizer.step()
        return fresh.loss().item()

    assert after(0.97 * value) < start < after(1.03 * value)
    assert all(after(value * 0.5**i) < start for i in range(1, 6))


def test_groups_keep_their_proportions_and_their_rates():
    subject = at([1.0, 1.0], lambda w: (torch.tensor([0.5, 50.0]) * w.square()).sum())
    optimizer = torch.optim.SGD([{"params": list(subject.model.parameters()), "lr": 1e-3}], lr=1.0)
    (row,) = critical_lr(replace(subject, optimizer=optimizer), tolerance=1e-3)
    grid = torch.linspace(0, 0.1, 100001).double()
    losses = 0.5 * (1 - grid).square() + 50 * (1 - 100 * grid).square()
    expected = grid[1:][losses[1:] > losses[0]][0].item()
    assert row["value"] == pytest.approx(expected, rel=2e-3)
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert not optimizer.state


def test_rates_that_always_or_never_raise_the_loss_are_none():
    falling = at([1.0], lambda w: -w.sum())
    (row,) = critical_lr(replace(falling, optimizer=SGD))
    assert row["value"] is None
    assert row["detail"].startswith("no step at 0.001 to 1.1e+09 raises the loss -1")

    rising = at([1.0], lambda w: w.square().sum())
    (row,) = critical_lr(replace(rising, optimizer=partial(torch.optim.SGD, lr=1e-3, maximize=True)))
    assert row["value"] is None
    assert row["detail"] == "no step at 0.001 or less lowers the loss 1"


class Squared(torch.optim.SGD):
    """Steps by the square of its rate, as no line through one of them does."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=min(float(group["lr"]), group["momentum"] or math.inf) ** 2)


def test_an_optimizer_that_does_not_step_along_a_line_is_asked_itself():
    subject = at([1.0], lambda w: w.square().sum())
    (row,) = critical_lr(replace(subject, optimizer=partial(Squared, lr=0.25)), tolerance=1e-3)
    assert row["value"] == pytest.approx(1.0, rel=2e-3)
    (row,) = critical_lr(replace(subject, optimizer=partial(Squared, lr=0.25, momentum=0.5)), tolerance=1e-3)
    assert row["value"] is None, "its steps stop growing before they raise the loss"


def test_a_line_costs_three_steps_of_the_optimizer(monkeypatch):
    steps = []
    step = torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", lambda *given: steps.append(1) or step(*given))
    (row,) = critical_lr(at([0.3], lambda w: 7.0 * w.square().sum()), tolerance=1e-3)
    assert row["value"] == pytest.approx(0.6, rel=2e-3)
    assert len(steps) == 3


def test_a_loss_that_stops_being_a_number_is_raised():
    subject = at([1.0], lambda w: -torch.sqrt(2.0 - w).sum() - w.sum())  # no number from w = 2 on
    (row,) = critical_lr(replace(subject, optimizer=SGD), tolerance=1e-3)
    (gradient,) = torch.autograd.grad(subject.loss(), list(subject.model.parameters()))
    assert row["value"] == pytest.approx(1.0 / abs(gradient.item()), rel=2e-3)


def test_a_step_that_float16_cannot_hold_is_named_and_ends_the_search():
    subject = at([0.0, 1.0], lambda w: w[1:].square().sum())
    subject.model.half()  # in which Adam's eps is 0, so that the step of a gradient of 0 is 0/0
    with pytest.raises(UserError, match=r" w .*float16; .*eps="):
        critical_lr(subject)
    (row,) = critical_lr(replace(subject, optimizer=partial(ADAM, eps=1e-4)), tolerance=0.5)
    assert row["value"] is not None


def test_a_search_ends_where_every_step_raises_the_loss():
    asked = []
    assert _bracket(lambda factor: asked.append(factor) or math.inf) == (None, 2.0**-DOUBLINGS)
    assert len(asked) == DOUBLINGS + 1


def test_critical_lr_refuses_what_it_cannot_start_from():
    subject = at([1.0], lambda w: (w * torch.inf).sum())
    with pytest.raises(ValueError, match=r"\binf\b"):
        critical_lr(replace(subject, optimizer=SGD))
    with pytest.raises(ValueError, match=r"rate 0\.0"):
        critical_lr(replace(at([1.0], torch.sum), optimizer=partial(torch.optim.SGD, lr=0.0)))
    frozen = at([1.0], torch.sum)
    frozen.model.requires_grad_(False)
    with pytest.raises(ValueError, match="requires_grad_"):
        critical_lr(replace(frozen, optimizer=SGD))


# -------------------------------------------------------------------------------------------------- cropping


@dataclass(frozen=True)
class Cased:
    ids: Tensor
    scale: float


Pair = namedtuple("Pair", "a b")


def test_rows_are_cropped_wherever_they_are():
    ids, mask, table = torch.arange(12).view(6, 2), torch.ones(6, dtype=torch.bool), torch.ones(2, 2)
    batch = {"ids": ids, "more": [mask, (table, 3)], "pair": Pair(ids, None), "cased": Cased(ids, 0.5)}
    small = split(batch, 3)[0]
    assert small["ids"].equal(ids[:2])
    assert small["more"][0].shape == (2,)
    assert small["more"][1] == (table, 3)
    assert isinstance(small["pair"], Pair)
    assert small["pair"].a.equal(ids[:2])
    assert small["cased"].ids.equal(ids[:2])
    assert small["cased"].scale == 0.5
    assert split(ids, 1)[0].equal(ids)
    assert [len(split(ids, parts)[0]) for parts in (6, 3, 2)] == [1, 2, 3]


@pytest.mark.parametrize(("tokens", "kept"), [(6, 1), (12, 2), (23, 2), (24, 4), (1, 1)])
def test_a_subject_has_at_most_so_many_tokens_but_one_row(tokens, kept):
    small, used = translating().cropped(tokens)
    assert [len(x) for x in small.batch] == [kept, kept]
    assert used == 6 * kept
    assert small.loss().isfinite()


def test_a_loss_with_targets_of_its_own_is_told_what_to_do():
    subject = translating()
    words = TARGET.flatten()
    subject = replace(
        subject, loss_of=lambda model, batch: nn.functional.cross_entropy(model(*batch).flatten(0, 1), words)
    )
    assert subject.cropped(24)[0] is subject
    with pytest.raises(ValueError, match=r"\b2 of the 4\b"):
        subject.cropped(12)
