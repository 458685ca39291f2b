"""Matrix products of linear layers, which oneDNN computes on the CPU where torch calls another library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from normlab.nn.kernels import ops
from normlab.private_torch import mkldnn_linear, mkldnn_multiplies_bf16


class Linear(nn.Linear):
    """``nn.Linear`` computed by ``linear``, with the same parameters, names and initialisation."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of nn.Linear's argument
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""Compute :math:`x W^\top + b` for x `[..., in]`, W `[out, in]` and b `[out]`, in autocast's dtype.

    On the CPU oneDNN multiplies. ``F.linear`` takes over for fp32 with AVX2 alone (docs/speed.md), if the
    operator is missing or gives another result, and for small products. The limit is higher in training,
    since a backward pass in Python costs more than one in C++.
    """
    cast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if cast else x.dtype
    trained = torch.is_grad_enabled()
    large = x.numel() * weight.shape[0] >= (_LEAST_TRAINED if trained else _LEAST_PRODUCTS)
    fitting = weight.dtype == torch.float32 and (cast or x.dtype == weight.dtype)
    if ops.plain(x) or not (large and fitting and _multiplies(dtype)):
        return F.linear(x, weight, bias)
    if trained:
        return MkldnnLinear.apply(x, weight, bias, dtype)
    kept_bias = None if bias is None else _kept(bias, dtype)
    flat = _product(x.flatten(0, -2).to(dtype), _kept(weight, dtype), kept_bias)
    return flat.view(*x.shape[:-1], -1)


_copies: dict[nn.Parameter, Tensor] | None = None


@contextmanager
def kept_copies() -> Iterator[None]:
    """Let autocast cast each weight only once within this block, if nothing is differentiated.

    The weights must not change within the block. It applies to all threads of the process.
    """
    global _copies
    before, _copies = _copies, dict[nn.Parameter, Tensor]()
    try:
        yield
    finally:
        _copies = before


def _kept(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    if parameter.dtype == dtype:
        return parameter
    if _copies is None or not isinstance(parameter, nn.Parameter):
        return parameter.to(dtype)
    if parameter not in _copies:
        _copies[parameter] = parameter.to(dtype)
    return _copies[parameter]


_LEAST_PRODUCTS, _LEAST_TRAINED = 2**20, 2**24
"""Number of multiplications below which calling the operator costs more than it saves, without and with a
backward pass.
"""


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""Compute :math:`a b^\top + bias` of `[m, k]`, `[n, k]` and `[n]`, of one dtype and any strides."""
    return mkldnn_linear(a, b, bias)


@cache
def _multiplies(dtype: torch.dtype) -> bool:
    """Return whether torch has the private operator and it multiplies this dtype correctly.

    Also False for a dtype for which the processor has no instructions, and for fp32 on processors with AVX2
    alone, where torch's own library is faster.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    if dtype == torch.float32 and torch.backends.cpu.get_cpu_capability() == "AVX2":
        return False
    try:
        if dtype == torch.bfloat16 and not mkldnn_multiplies_bf16():
            return False
        with torch.no_grad():
            a, b, bias = ((torch.arange(n) % 7 - 3.0).to(dtype) for n in (5 * 6, 6 * 4, 4))
            a, b = a.view(6, 5).t()[:, :6], b.view(6, 4).t()
            expected = F.linear(a.float(), b.float(), bias.float())
            product = _product(a, b, bias)
            return product.dtype == dtype and torch.equal(product.float(), expected)
    except (AttributeError, RuntimeError):
        return False


class MkldnnLinear(torch.autograd.Function):
    """Weights and their gradients keep their own dtype; products are computed in ``dtype``.

    It has the name that torch gives to such a node of a graph, so what reads graphs knows it for a product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:  # pyrefly: ignore[bad-override]
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        w = weight.to(dtype)
        ctx.save_for_backward(rows, w)
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        y = _product(rows, w, None if bias is None else bias.to(dtype))
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        rows, w = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = _times(grad, w).to(ctx.x_dtype).view(ctx.x_shape)
        if ctx.needs_input_grad[1]:
            dw = _times(grad.t(), rows).float()
        if ctx.needs_input_grad[2]:
            db = grad.sum(0).float()
        return dx, dw, db, None


def _times(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a `[m, k]` by b `[k, n]`; for bf16, torch itself calls oneDNN without a copy."""
    return _product(a, b.t()) if a.dtype == torch.float32 else a @ b
