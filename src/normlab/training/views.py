"""The matrices of a model's branches as views of its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from normlab.nn.sublayer import Branch, Sublayer


class MatrixView(NamedTuple):
    """A matrix of a branch, which may be a part of a packed parameter."""

    module: str
    """The path of the sublayer."""
    kind: str
    index: int
    """The index of the parameter."""
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, whole: Tensor) -> Tensor:
        """The matrix in a tensor of the shape of the parameter."""
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)


def matrix_views(model: nn.Module) -> Iterator[MatrixView]:
    """The matrices of all branches of a model whose parameters are whole."""
    parameters = list(model.parameters())
    homes = {p.untyped_storage().data_ptr(): i for i, p in enumerate(parameters)}
    for path, sublayer in model.named_modules():
        if isinstance(sublayer, Sublayer) and isinstance(sublayer.f, Branch):
            for kind, matrix in sublayer.f.matrices().items():
                index = homes[matrix.untyped_storage().data_ptr()]
                offset = int(matrix.storage_offset() - parameters[index].storage_offset())
                yield MatrixView(path, kind, index, matrix.shape, matrix.stride(), offset)
