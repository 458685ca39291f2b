"""Products of bf16 matrices on processors without instructions for them."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from normlab.private_torch import TorchDispatchMode

PRODUCTS: Final = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        # inference mode does not take these two apart
        torch.ops.aten.linear.default,
        torch.ops.aten.matmul.default,
    }
)


class WideProducts(TorchDispatchMode):
    """Within this context, products of bf16 matrices on a CPU are computed in fp32 and rounded to bf16.

    Instructions for bf16 do the same: they multiply exactly, add in fp32 and round the result once, so both
    differ only in the order of the sums. Where oneDNN has no kernels for bf16, torch's own products were
    measured to be 14 to 37 times slower (docs/lab-book/speed.md).
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func in PRODUCTS and _is_bf16_on_cpu(args[0]):
            wide = [_in_fp32(argument) for argument in args]
            return func(*wide, **options).bfloat16()
        return func(*args, **options)


def _is_bf16_on_cpu(matrix: Tensor) -> bool:
    return matrix.is_cpu and matrix.dtype == torch.bfloat16


def _in_fp32(argument: Tensor | None) -> Tensor | None:
    """Widen an argument of a product; a linear map may have no bias."""
    return None if argument is None else argument.float()
