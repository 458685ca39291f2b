"""Measure the curvature of the loss as the optimiser sees it, in units of its own step."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from normlab.diagnosis.probing.cropping import cropped
from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.studies.curvature import Hessian, largest_eigenvalue
from normlab.diagnosis.study import SMALL_BATCH, Study
from normlab.diagnosis.table import Table
from normlab.trace.step import Gradients, OptimizerFactory

PRODUCTS: Final = 10
TOLERANCE: Final = 0.2
"""Hessian-vector products of the estimate, and the relative residual that ends it before."""


def preconditioned_sharpness(
    subject: Subject,
    optimiser: Optimizer | OptimizerFactory,
    *,
    tokens: int = 256,
    products: int = PRODUCTS,
    seed: int = 0,
) -> Table:
    r"""Measure :math:`\lambda_{\max}(D^{1/2} H D^{1/2})`, D being diagonal with :math:`D_{ii} = -u_i / g_i`:
    what the optimiser's next update u makes of the gradient g, its learning rate included.

    Gradient descent is stable below 2, and Adam, whose D is :math:`\eta / (\sqrt{\hat v} + \epsilon)`, below
    :math:`2 (1 + \beta_1) / (1 - \beta_1)`, 38 for :math:`\beta_1 = 0.9`, once its moments have settled. At
    the first step :math:`\hat v = g^2`. Entries without a gradient, and those that the update moves against
    it, as momentum may, count as 0. An estimate from below, from a few products; see ``curvature``.

    Cohen et al. 2022, Section 2 (arXiv 2207.14484). Raises as ``curvature``.
    """
    small, used = cropped(subject, tokens)
    hessian = Hessian(small)
    grads = hessian.split(hessian.gradient)
    after = small.trace().update(optimiser, Gradients(hessian.loss, grads))
    step = torch.cat([(after[path] - p.detach()).reshape(-1) for path, p in hessian.parameters.items()])
    found = largest_eigenvalue(
        _Preconditioned(hessian, -step / hessian.gradient), products=products, tolerance=TOLERANCE, seed=seed
    )
    detail = f"{found.products} products, |Hx - vx| = {found.residual:.1e}, {used} tokens"
    row = {"quantity": "preconditioned_sharpness", "value": found.value, "detail": detail}
    return Table("curvature", (row,))


class _Preconditioned:
    """:math:`D^{1/2} H D^{1/2}` of a Hessian and a diagonal `[P]`, whose entries below 0 count as 0."""

    def __init__(self, hessian: Hessian, diagonal: Tensor) -> None:
        self._hessian, self._root = hessian, diagonal.nan_to_num(0.0, 0.0, 0.0).clamp(min=0.0).sqrt()

    @property
    def gradient(self) -> Tensor:
        """A vector `[P]` like those that it multiplies."""
        return self._hessian.gradient

    def __matmul__(self, vector: Tensor) -> Tensor:
        return self._root * (self._hessian @ (self._root * vector))


SHARPNESS: Final = Study(
    "preconditioned_sharpness",
    lambda c: [preconditioned_sharpness(c.small, c.optimiser)],
    "full",
    batch=SMALL_BATCH,
    order=94,
)
