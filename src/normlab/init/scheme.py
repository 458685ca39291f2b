"""Initialisation schemes. A scheme fills one matrix; biases start at 0 everywhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from normlab.nn import Branch, Embedding, Sublayer
from normlab.nn.registry import Registry
from normlab.spec.randomness import derive

Scheme = Callable[[Tensor, str, float, torch.Generator], None]
"""``fill(weight [out, in], matrix name, gain, generator)``, in place."""

SCHEMES: Registry[Scheme] = Registry("scheme")


@SCHEMES.register("xavier")
def xavier(weight: Tensor, matrix: str, gain: float, generator: torch.Generator) -> None:
    r"""Xavier normal: :math:`N(0, 2 g^2/(n_{in} + n_{out}))` with the placement's gain g.

    Each projection of a packed matrix counts as a matrix of its own. Glorot and Bengio 2010, Equation 16;
    Xiong et al. 2020, Section 3.3 (arXiv 2002.04745).
    """
    weight.normal_(0.0, gain * (2 / sum(weight.shape)) ** 0.5, generator=generator)


@SCHEMES.register("smallinit")
def smallinit(weight: Tensor, matrix: str, gain: float, generator: torch.Generator) -> None:
    r"""SmallInit: attention matrices :math:`N(0, 2/(d + 4d))`, the others Xavier normal.

    Nguyen and Salazar 2019, Section 3.1 (arXiv 1910.05895).
    """
    if matrix in ("query", "key", "value", "output"):
        weight.normal_(0.0, gain * (2 / (5 * weight.shape[0])) ** 0.5, generator=generator)
    else:
        xavier(weight, matrix, gain, generator)


@torch.no_grad()
def initialise_(model: nn.Module, scheme: str, seed: int) -> None:
    """Fill every branch by the scheme and every embedding by its own rule.

    Each matrix has its own generator, derived from (seed, site, name): two models that differ only in
    placement or norm start from the same weights.
    """
    fill = SCHEMES[scheme]
    for module in model.modules():
        if isinstance(module, Sublayer) and isinstance(module.f, Branch):
            site = module.site
            for i, (name, weight) in enumerate(module.f.matrices().items()):
                generator = _generator(weight, derive(seed, f"init.{site.stack}", site.index, i))
                fill(weight, name, module.place.gain(name), generator)
            for linear in module.f.modules():
                if isinstance(linear, nn.Linear) and linear.bias is not None:
                    linear.bias.zero_()
        elif isinstance(module, Embedding):
            module.start_(_generator(module.weight, derive(seed, "init.embedding")))


def _generator(weight: Tensor, seed: int) -> torch.Generator:
    return torch.Generator(weight.device).manual_seed(seed)
