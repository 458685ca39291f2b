"""Logits that are no tensor of the step are found as the product that a function scores at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from normlab.setups.setup import Declaration, output_loss
from normlab.trace.facts import Unknown
from normlab.trace.facts.facts import Facts
from normlab.trace.facts.fused import Product
from normlab.trace.facts.targets import read_targets
from normlab.trace.trace import Trace

VOCAB, WIDTH, ROWS, LENGTH, IGNORED = 23, 12, 4, 9, -100


class AtOnce(torch.autograd.Function):
    """Multiplies, scores, and computes the gradients, all in the forward pass, as fused kernels do."""

    @staticmethod
    def forward(ctx, features, weight, bias, targets, smoothing) -> Tensor:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (features, weight, bias)]
            logits = F.linear(*leaves)
            loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, label_smoothing=smoothing)
            ctx.save_for_backward(*torch.autograd.grad(loss, leaves))
        return loss.detach()

    @staticmethod
    def backward(ctx, gradient) -> tuple[Any, ...]:
        return (*(gradient * g for g in ctx.saved_tensors), None, None)


class EachPosition(torch.autograd.Function):
    """The log-probability of each target, whose product is made a second time in the backward pass."""

    @staticmethod
    def forward(ctx, features, weight, targets) -> Tensor:
        ctx.save_for_backward(features, weight, targets)
        return (features @ weight.T).log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    @staticmethod
    def backward(ctx, gradient) -> tuple[Any, ...]:
        features, weight, targets = ctx.saved_tensors
        slope = F.one_hot(targets, len(weight)).to(features) - (features @ weight.T).softmax(-1)
        slope = slope * gradient[:, None]
        return slope @ weight, slope.T @ features, None


class Model(nn.Module):
    """Looks tokens up, adds the one before, and hands features, head and targets to a loss."""

    def __init__(self, score: Callable[..., Tensor], *, tied: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.inner = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        if tied:
            self.head.weight = self.embed.weight
        self.score = score

    def features(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return x + self.inner(x + F.pad(x, (0, 0, 1, 0))[:, :-1]).tanh()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of all but the last position, whose labels follow."""
        features, targets = self.features(ids)[:, :-1].reshape(-1, WIDTH), labels[:, 1:].reshape(-1)
        return self.score(features, self.head, targets)


def at_once(features: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    return AtOnce.apply(features, head.weight, head.bias, targets, 0.0)


def smoothed(features: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    return AtOnce.apply(features, head.weight, head.bias, targets, 0.1)


def each_position(features: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    counted = targets != IGNORED
    scored = EachPosition.apply(features, head.weight, targets.clamp(min=0))
    return -scored.masked_fill(~counted, 0).sum() / counted.sum()


def of_torch(features: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    return F.linear_cross_entropy(features, head.weight, targets, linear_bias=head.bias)


def in_chunks(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a score that adds up this function's sums over chunks, and divides by the counted targets."""

    def score(features: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
        parts = zip(features.split(7), targets.split(7), strict=True)
        return sum(function(x, head, y) for x, y in parts) / (targets != IGNORED).sum()

    return score


def scored_sum(features: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(features), targets, ignore_index=IGNORED, reduction="sum")


def recomputed(*, reentrant: bool) -> Callable[..., Tensor]:
    def score(features: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
        return checkpoint(scored_sum, features, head, targets, use_reentrant=reentrant)

    return score


def sum_at_once(features: Tensor, head: nn.Linear, targets: Tensor) -> Tensor:
    return -EachPosition.apply(features, head.weight, targets.clamp(min=0))[targets != IGNORED].sum()


SCORES = {
    "in one function": at_once,
    "of each position": each_position,
    "by torch": of_torch,
    "in chunks of functions": in_chunks(sum_at_once),
    "in recomputed chunks": in_chunks(recomputed(reentrant=False)),
    "in re-entrant chunks": in_chunks(recomputed(reentrant=True)),
}


def ids() -> Tensor:
    return torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


def facts(model: nn.Module, labels: Tensor, **changes: Any) -> Facts:
    batch = {"ids": ids(), "labels": labels}
    trace = Trace(model.double(), batch, output_loss, exact=True, **changes)
    return Facts(trace, Declaration())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_targets_and_logits_are_those_of_the_product(score: str, tied: bool):  # noqa: FBT001
    model, labels = Model(SCORES[score], tied=tied), ids()
    labels[1, 5:] = IGNORED
    read = facts(model, labels)
    assert read.shift == 1
    assert torch.equal(read.targets.counted, labels[:, 1:] != IGNORED)
    assert torch.equal(read.targets.ids[read.targets.counted], labels[:, 1:][labels[:, 1:] != IGNORED])
    bias = 0 if score in ("of each position", "in chunks of functions") else model.head.bias
    wanted = model.features(ids())[:, :-1] @ model.head.weight.T + bias
    assert torch.allclose(read.logits.value, wanted, atol=1e-9)
    assert read.unexplained == pytest.approx(0, abs=1e-9)
    assert float(read.targets.weight.sum()) == pytest.approx(1)


@pytest.mark.parametrize("score", SCORES)
def test_logits_of_another_step_are_those_of_its_weights_and_its_batch(score: str):
    model = Model(SCORES[score])
    read = facts(model, ids())
    other = {n: p.detach() * 1.1 for n, p in model.named_parameters()}
    wider = torch.cat([ids(), ids()[:, :4]], 1)[:3]
    shown = read.logits.of(read.trace.again(weights=other, batch={"ids": wider, "labels": wider}))
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(other[n])
    bias = 0 if score in ("of each position", "in chunks of functions") else model.head.bias
    assert torch.allclose(shown, model.features(wider)[:, :-1] @ model.head.weight.T + bias, atol=1e-9)


def test_label_smoothing_is_read_too():
    read = facts(Model(smoothed), ids())
    assert read.targets.smoothing == pytest.approx(0.1, abs=1e-6)
    assert read.shift == 1


def test_the_head_is_the_matrix_that_the_function_reads():
    assert facts(Model(at_once), ids()).head == "head.weight"
    assert facts(Model(at_once, tied=True), ids()).head == "embed.weight"


class OfAnother(torch.autograd.Function):
    """Multiplies and scores at once, but by no cross-entropy of the product."""

    @staticmethod
    def forward(ctx, features, weight, targets, kind) -> Tensor:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (features, weight)]
            logits = F.linear(*leaves)
            if kind == "capped":
                loss = F.cross_entropy(3 * torch.tanh(logits / 3), targets)
            elif kind == "halved":
                loss = F.cross_entropy(logits / 2, targets)
            else:
                loss = (logits - F.one_hot(targets, VOCAB)).square().mean()
            ctx.save_for_backward(*torch.autograd.grad(loss, leaves))
        return loss.detach()

    @staticmethod
    def backward(ctx, gradient) -> tuple[Any, ...]:
        return (*(gradient * g for g in ctx.saved_tensors), None, None)


@pytest.mark.parametrize("kind", ["capped", "halved", "squares"])
def test_what_is_no_cross_entropy_of_the_product_has_no_targets(kind: str):
    read = facts(Model(lambda x, head, y: OfAnother.apply(x, head.weight, y, kind)), ids())
    with pytest.raises(Unknown):
        _ = read.targets


@pytest.mark.parametrize("penalty", [0.0, 1e-2])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_gradient_behind_a_matrix_is_that_at_the_logits(smoothing: float, penalty: float):
    draw = torch.Generator().manual_seed(2)
    features = torch.randn(30, WIDTH, generator=draw, dtype=torch.float64).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=draw, dtype=torch.float64)
    asked = torch.randint(VOCAB, (30,), generator=draw)
    logits = features @ weight.T
    loss = F.cross_entropy(logits, asked, label_smoothing=smoothing)
    loss = loss + penalty * logits.logsumexp(-1).square().mean()
    at_features, at_logits = torch.autograd.grad(loss, [features, logits])
    explained = Product(features, weight).slope(at_features, 1e-7)
    assert explained is not None
    slope, error = explained
    assert error < 1e-10
    assert torch.allclose(slope, at_logits, atol=1e-10)
    read = read_targets(logits, slope)
    assert read is not None
    assert torch.equal(read.ids, asked)
    assert read.smoothing == pytest.approx(smoothing, abs=1e-6)
    assert (read.excess > 1e-4) == bool(penalty)
