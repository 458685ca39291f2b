"""Measure the curvature of the loss, and the learning rate at which a step raises the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from normlab.base.reference import reference_arithmetic
from normlab.diagnosis.study import SMALL_BATCH, Finding, Study
from normlab.diagnosis.subject import Subject
from normlab.diagnosis.tables import Row, Table, Tables, as_float
from normlab.diagnosis.wording import format_number, start_of_warmup
from normlab.errors import UserError
from normlab.trace.autograd import FROZEN, Gradients, Weights, made, nodes_behind, trainable

CLOSE: Final = 0.2
"""The relative error within which a diagnosis finds the critical learning rate."""
FAR_ABOVE: Final = 10.0
"""Multiple of the critical learning rate: a step overshoots so far that a short warm-up does not help."""

DOUBLINGS: Final = 40
"""A learning rate is doubled at most this often before it counts as unbounded, or halved at most so often."""
PRODUCTS: Final = 10
TOLERANCE: Final = 0.2
"""Hessian-vector products for the preconditioned sharpness, and the relative residual that ends it early."""


def critical_lr(subject: Subject, *, tolerance: float = CLOSE) -> Table:
    r"""Find :math:`\min \{\eta : L(w + u(\eta)) > L(w)\}`, u being the step of the subject's optimizer at the
    learning rate :math:`\eta`.

    From the optimizer's own rate, the largest of its groups, all are doubled until a step raises the loss, or
    halved until none does, then bisected until the rate that raises it is within ``tolerance`` of one that
    does not: one backward pass, and a forward pass for each rate. Steps are first taken to be :math:`\eta`
    times the step at the optimizer's own rate, which holds for ``torch.optim`` except LBFGS. If the
    optimizer's own step at one of the two rates found says otherwise, the search is repeated with its own
    steps only. A loss that is not a number counts as raised. None if no rate that was tried raises the loss,
    or none lowers it.

    Kalra and Barkeshli 2024 (arXiv 2406.09405). Raises UserError for a frozen model, a loss that
    is not finite before any step, a step that is not, and an optimizer without a learning rate above 0.
    """
    optimizer, rate = made(subject.optimizer, subject.model)
    if not 0 < rate < math.inf:
        raise UserError(
            f"{type(optimizer).__name__} has the learning rate {rate}, which cannot be doubled; pass one "
            "above 0, as in partial(torch.optim.Adam, lr=1e-3)"
        )
    steps = _RateSteps(subject)
    start = steps.start
    low, high = _search(steps.on_the_line, tolerance)
    if not steps.confirm(low, high):
        low, high = _search(steps.take, tolerance)
    if high is None:
        detail = f"no step at {rate:.3g} to {rate * 2.0**DOUBLINGS:.3g} raises the loss {start:.4g}"
    elif low is None:
        detail = f"no step at {rate:.3g} or less lowers the loss {start:.4g}"
    else:
        detail = f"a step at {rate * high:.3g} raises the loss {start:.4g}, one at {rate * low:.3g} does not"
    critical = rate * high if low and high else None
    return Table("curvature", (_row("critical_lr", critical, detail),))


class _RateSteps:
    """The change of the loss by a step at a multiple of the optimizer's rate, in units of its rounding."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        loss = subject.trace().loss
        self.start = loss.item()
        self._noise = 4 * torch.finfo(loss.dtype).eps * (abs(self.start) or 1.0)
        if not math.isfinite(self.start):
            raise UserError(f"the loss is {self.start} before any step; check the weights and the batch")
        self._weights = {path: p.detach() for path, p in trainable(subject.model).items()}
        after = self._after(1.0)
        self._step = {path: after[path].sub_(w) for path, w in self._weights.items()}  # in place: as large
        for path, change in self._step.items():
            if not change.isfinite().all():
                raise UserError(
                    f"the step of the optimizer at its own rate leaves {path} infinite or not a number in "
                    f"{self._weights[path].dtype}; keep the parameters in float32, or give the optimizer an "
                    "eps that their dtype can hold, as in eps=1e-4"
                )

    def _after(self, factor: float) -> dict[str, Tensor]:
        """Return the weights after the optimizer's step at a multiple of its rate."""
        subject = self._subject
        return subject.trace().update(subject.optimizer, subject.backward.slope, factor=factor)

    def _change(self, weights: Weights) -> float:
        loss = self._subject.trace(weights=weights).loss
        return (loss.item() - self.start) / self._noise if loss.isfinite() else math.inf

    def on_the_line(self, factor: float) -> float:
        """Return the change by a multiple of the step at the optimizer's own rate."""
        return self._change(
            {path: w.add(self._step[path], alpha=factor) for path, w in self._weights.items()}
        )

    def take(self, factor: float) -> float:
        """Return the change by the step that the optimizer takes at a multiple of its rate."""
        return self._change(self._after(factor))

    def confirm(self, low: float | None, high: float | None) -> bool:
        """Return whether the optimizer's own steps raise the loss at one factor but not at the other."""
        if low and self.take(low) > 1:
            return False
        return not high or self.take(high) > 1


def _search(change: Callable[[float], float], tolerance: float) -> tuple[float | None, float | None]:
    """Narrow the two ends of ``_bracket`` until they are within ``tolerance`` of each other."""
    low, high = _bracket(change)
    while low and high and high > low * (1 + tolerance):
        middle = math.sqrt(low * high)
        if change(middle) > 1:
            high = middle
        else:
            low = middle
    return low, high


def _bracket(change: Callable[[float], float]) -> tuple[float | None, float | None]:
    """Return a factor that does not raise the loss and its double, which does; None if not found.

    A smaller factor must lower the loss: one that no longer changes it shows nothing.
    """
    if change(1.0) <= 1:
        for high in (2.0**i for i in range(1, DOUBLINGS + 1)):
            if change(high) > 1:
                return high / 2, high
        return 1.0, None
    for high in (2.0**-i for i in range(DOUBLINGS)):
        low = high / 2
        changed = change(low)
        if changed <= 1:
            return (low if changed < -1 else None), high
    return None, 2.0**-DOUBLINGS


def curvature(subject: Subject, *, tokens: int = 256, products: int = 50, tolerance: float = 1e-2) -> Table:
    r"""Measure :math:`\lambda_{\max}(H)` and :math:`v^\top H v / \|v\|^2`, H being the Hessian of the loss in
    the trainable parameters, along v = the gradient and v = the optimizer's first update.

    It uses the first rows of the batch with at most ``tokens`` tokens (``Subject.cropped``). The eigenvalue
    comes from Hessian-vector products, at most ``products`` of them, until :math:`\|Hx - \lambda x\|` is
    below ``tolerance`` times :math:`|\lambda|`, which bounds the error of an eigenvalue that is far from the
    others by about its square; the detail says how many it took and what was left. Attention runs in a kernel
    that can be differentiated twice, as do normlab's own layers, within ``normlab.nn.reference()``.

    Pan and Li 2023, Section 3 (arXiv 2306.00204). Raises UserError for a frozen model and for a loss that
    cannot be differentiated twice.
    """
    small, used = subject.cropped(tokens)
    hessian = Hessian(small)
    pair = largest_eigenvalue(hessian, products=products, tolerance=tolerance)
    rows = (
        _row("largest_eigenvalue", pair.value, pair.detail(used)),
        _row("directional_sharpness", hessian.along(hessian.gradient), "along the gradient"),
        _row("directional_sharpness", hessian.along(hessian.update()), "along the update"),
    )
    return Table("curvature", rows)


def preconditioned_sharpness(subject: Subject, *, tokens: int = 256, products: int = PRODUCTS) -> Table:
    r"""Measure :math:`\lambda_{\max}(D^{1/2} H D^{1/2})`, D being diagonal with :math:`D_{ii} = -u_i / g_i`:
    what the optimizer's next update u makes of the gradient g, including its learning rate.

    Gradient descent is stable below 2, and Adam, whose D is :math:`\eta / (\sqrt{\hat v} + \epsilon)`, below
    :math:`2 (1 + \beta_1) / (1 - \beta_1)`, 38 for :math:`\beta_1 = 0.9`, once its moments have settled. At
    the first step :math:`\hat v = g^2`. Entries without a gradient, and those that the update moves against
    it, as momentum may, count as 0. This is an estimate from below, from a few products; see ``curvature``.

    Cohen et al. 2022, Section 2 (arXiv 2207.14484). Raises as ``curvature``.
    """
    small, used = subject.cropped(tokens)
    hessian = Hessian(small)
    diagonal = -hessian.update() / hessian.gradient
    root = diagonal.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(min=0.0).sqrt()
    pair = largest_eigenvalue(hessian, scale=root, products=products, tolerance=TOLERANCE)
    return Table("curvature", (_row("preconditioned_sharpness", pair.value, pair.detail(used)),))


def _row(quantity: str, value: float | None, detail: str) -> Row:
    return {"quantity": quantity, "value": value, "detail": detail}


TWICE: Final = (
    "the loss cannot be differentiated twice: {}. Put plain code in the place of the operation that says "
    "so, or leave the curvature out"
)


class Hessian:
    """The Hessian of a subject's loss in its trainable parameters, laid end to end `[P]`; never built.

    It holds the graph of the gradient, in which every product is a backward pass.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject, self.parameters = subject, trainable(subject.model)
        weights = list(self.parameters.values())
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), reference_arithmetic():
            loss = subject.loss()
            if not loss.requires_grad:
                raise UserError(FROZEN)
            gradients = torch.autograd.grad(loss, weights, create_graph=True, materialize_grads=True)
            self._gradient = torch.cat([g.reshape(-1) for g in gradients])
        # past such a node a second derivative would silently stop and count as zero
        if any("Error" in node.name() for node in nodes_behind(self._gradient.grad_fn)):
            raise UserError(TWICE.format("a torch.autograd.Function in it is marked once_differentiable"))
        self.loss = loss.item()

    @property
    def gradient(self) -> Tensor:
        return self._gradient.detach()

    def split(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the pieces of a vector `[P]` by parameter."""
        pieces = vector.split([p.numel() for p in self.parameters.values()])
        return {path: x.view_as(p) for (path, p), x in zip(self.parameters.items(), pieces, strict=True)}

    def update(self) -> Tensor:
        """Return what the next step of the subject's optimizer adds to the parameters, `[P]`."""
        slope = Gradients(self.loss, self.split(self.gradient))
        after = self._subject.trace().update(self._subject.optimizer, slope)
        return torch.cat([(after[path] - p.detach()).reshape(-1) for path, p in self.parameters.items()])

    def __matmul__(self, vector: Tensor) -> Tensor:
        """Return :math:`Hv`, `[P]` to `[P]`."""
        if not self._gradient.requires_grad:  # the loss is linear in the weights
            return torch.zeros_like(vector)
        weights = list(self.parameters.values())
        try:
            hv = torch.autograd.grad(
                self._gradient, weights, vector, retain_graph=True, materialize_grads=True
            )
        except RuntimeError as error:
            raise UserError(TWICE.format(error)) from error
        return torch.cat([x.reshape(-1) for x in hv])

    def along(self, vector: Tensor) -> float | None:
        r"""Return :math:`v^\top H v / \|v\|^2`, None for a vector of zeros."""
        length = torch.linalg.vector_norm(vector)
        if not length:
            return None
        unit = vector / length
        return torch.dot(unit, self @ unit).item()


class _Eigenvalue(NamedTuple):
    r"""An estimate, its residual :math:`\|Hx - \lambda x\|`, and the number of products that it took."""

    value: float
    residual: float
    products: int

    def detail(self, tokens: int) -> str:
        return f"{self.products} products, |Hx - vx| = {self.residual:.1e}, {tokens} tokens"


@torch.no_grad()
def largest_eigenvalue(
    hessian: Hessian, *, scale: Tensor | float = 1.0, products: int, tolerance: float
) -> _Eigenvalue:
    r"""Find :math:`\max_x x^\top A x / x^\top x` of :math:`A = SHS`, S being diagonal with ``scale``.

    This is LOBPCG (the locally optimal block preconditioned conjugate gradient method) with a block of one
    vector and no preconditioner. The next x is the best in the span of x, its residual :math:`r = A x -
    \lambda x` and the previous step p. Each iteration takes one product, that with r. Power iteration finds
    the largest eigenvalue in magnitude, and two of opposite sign stall it; this finds the largest, in fewer
    products.

    Knyazev 2001, Section 4 (SIAM Journal on Scientific Computing 23).
    """
    like = hessian.gradient
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(like.numel(), generator=generator, dtype=like.dtype).to(like.device)
    basis = [x / torch.linalg.vector_norm(x)]  # x, then x and p
    images = [scale * (hessian @ (scale * basis[0]))]  # A times each of them
    for products_so_far in range(1, products + 1):
        x, image = basis[0], images[0]
        value = torch.dot(x, image)
        remainder = image - value * x
        residual = torch.linalg.vector_norm(remainder)
        if products_so_far == products or not residual > tolerance * value.abs():
            return _Eigenvalue(value.item(), residual.item(), products_so_far)
        direction = remainder / residual
        basis.insert(1, direction)
        images.insert(1, scale * (hessian @ (scale * direction)))
        basis, images = _rayleigh_ritz(basis, images)
    raise UserError(f"products is at least 1, got {products}")


def _rayleigh_ritz(basis: list[Tensor], images: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    r"""Return the unit vector in span{x, r, p} with the largest Rayleigh quotient, and the step p to it, each
    with its image under A.

    For the combination :math:`\sum_i w_i b_i` of basis vectors the quotient is :math:`w^\top Q w / w^\top G
    w`, with :math:`Q_{ij} = b_i \cdot A b_j` and the Gram matrix :math:`G_{ij} = b_i \cdot b_j`. This
    generalised eigenproblem becomes an ordinary one by whitening: with :math:`G = U \Lambda U^\top` and
    :math:`w = U \Lambda^{-1/2} v` the denominator is :math:`v^\top v`.
    """
    gram, quotients = _products(basis, basis), _products(basis, images)
    gram_values, gram_vectors = torch.linalg.eigh(gram)
    # nearly dependent vectors add directions that are rounding noise in float32
    is_independent = gram_values > 1e-5 * gram_values[-1]
    whitening = gram_vectors[:, is_independent] / gram_values[is_independent].sqrt()
    # Q is symmetric but for rounding, and eigh wants it exactly so; twice Q has the same best vector
    symmetric = quotients + quotients.T
    best = torch.linalg.eigh(whitening.T @ symmetric @ whitening).eigenvectors[:, -1]
    weights = (whitening @ best).to(basis[0].dtype)
    # p is the part of the new vector along r and the old p; with x in it, p would nearly repeat the new x
    step, image_of_step = _combined(weights[1:], basis[1:]), _combined(weights[1:], images[1:])
    vector, image = weights[0] * basis[0] + step, weights[0] * images[0] + image_of_step
    length, step_length = torch.linalg.vector_norm(vector), torch.linalg.vector_norm(step).clamp(min=1e-30)
    return [vector / length, step / step_length], [image / length, image_of_step / step_length]


def _products(vectors: list[Tensor], others: list[Tensor]) -> Tensor:
    """Return the inner product of each vector with each of the others; so few of them can be in float64."""
    return torch.stack([torch.stack([torch.dot(a, b) for b in others]) for a in vectors]).double()


def _combined(weights: Tensor, vectors: list[Tensor]) -> Tensor:
    """Return the weighted sum."""
    total = weights[0] * vectors[0]
    for weight, vector in zip(weights[1:], vectors[1:], strict=True):
        total = total + weight * vector
    return total


def _critical_rate(tables: Tables) -> Iterator[Finding]:
    """Say that the learning rate is above the smallest one at which a step raises the loss. Being below it
    proves nothing: many trainings fail there.
    """
    rows = tables.table("curvature").where(quantity="critical_lr").rows
    critical = as_float(rows[0]["value"]) if rows else None
    if not critical or tables.lr is None or tables.lr <= critical:
        return
    ratio, steps = tables.lr / critical, tables.warmup_steps
    first = ratio * tables.first_share
    sentence = (
        f"the learning rate {format_number(tables.lr)} is {format_number(ratio)} times above "
        f"{format_number(critical)}, the rate from which a single step from here raises the loss of its own "
        "mini-batch, or of a few hundred tokens where there is none"
    )
    if steps:
        sentence += f"; judged {start_of_warmup(steps, tables.first_share)}"
    if first > 1:
        sentence += f"; begin with a {'longer ' if steps else ''}warm-up from below it, or lower the rate"
    severity = "note"
    if first > 1:
        severity = "problem" if first > FAR_ABOVE else "warning"
    yield Finding(
        "learning_rate",
        severity,
        sentence,
        "curvature",
        {"lr": tables.lr, "critical_lr": critical, "ratio": ratio},
    )


CRITICAL_LR = Study(
    "critical_lr",
    lambda subject: critical_lr(subject.small),
    "standard",
    rules=(_critical_rate,),
    batch=SMALL_BATCH,
    order=5,
)
CURVATURE = Study("curvature", lambda subject: curvature(subject.small), "full", batch=SMALL_BATCH, order=95)
SHARPNESS = Study(
    "preconditioned_sharpness",
    lambda subject: preconditioned_sharpness(subject.small),
    "full",
    batch=SMALL_BATCH,
    order=94,
)
