"""What is true of a model's weights after every step of its optimiser."""

from __future__ import annotations

from abc import ABC
from typing import ClassVar

import torch
from torch import Tensor, nn

from normlab.nn.embedding import Embedding
from normlab.nn.registry import Registered, Registry
from normlab.nn.sublayer import LAST, Branch, Sublayer


class WeightConstraint(Registered, ABC):
    """Base of all constraints; a subclass registers itself under ``name``."""

    registry: ClassVar[Registry[type[WeightConstraint]]] = Registry("weight constraint")

    by_entry: ClassVar[bool] = True
    """Whether it treats each entry of a weight independently."""

    @staticmethod
    def apply_(model: nn.Module) -> None:
        """Project the weights back onto the constraint, in place."""


class FreeWeights(WeightConstraint, name="freeweights"):
    """No constraint: :math:`W` stays as the optimiser leaves it.

    Kingma and Ba 2015, Section 2 (arXiv 1412.6980).
    """


class UnitWeights(WeightConstraint, name="unitweights"):
    r""":math:`\|w\|_2 = 1` after every step for each row of the embedding, the output matrix and all matrices
    that read the stream, and for each column of those that write to it.

    Loshchilov et al. 2024, Section 2 (arXiv 2410.01131). The vector is always along the stream. Biases and
    gains are free.
    """

    plain: ClassVar[str] = "freeweights"
    by_entry: ClassVar[bool] = False

    @staticmethod
    @torch.no_grad()
    def apply_(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, Sublayer) and isinstance(module.f, Branch):
                for name, weight in module.f.matrices().items():
                    unit_(weight, along_stream(name))
            elif isinstance(module, Embedding):
                for table in module.tables().values():
                    unit_(table, 1)


def along_stream(matrix: str) -> int:
    """The dimension of a branch's matrix `[out, in]` that lies along the stream."""
    return 0 if matrix in LAST else 1


def unit_(weight: Tensor, dim: int) -> None:
    """Scale the vectors of a matrix along a dimension to length 1, in place."""
    weight.div_(torch.linalg.vector_norm(weight, dim=dim, keepdim=True).clamp(min=1e-12))
