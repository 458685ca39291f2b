"""Operations with a fast path; ``reference()`` switches them all to plain, twice differentiable code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normlab.base.reference import register_reference
from normlab.errors import UserError

# A plain global: torch.compile guards on it, but refuses a ContextVar and reads a threading.local only once.
_reference = False


@contextmanager
def reference() -> Iterator[None]:
    """Let every operation take its plain path within this block: exportable, twice differentiable, vmap-able.

    It applies to all threads of the process.
    """
    global _reference
    before, _reference = _reference, True
    try:
        yield
    finally:
        _reference = before


register_reference(reference)


def plain(x: Tensor) -> bool:
    """Return whether x takes the plain path: in ``reference()``, for a compiler, or not on the CPU."""
    return _reference or torch.compiler.is_compiling() or x.device.type != "cpu"


def dropout(x: Tensor, p: float) -> Tensor:
    """Zero each element with probability p and scale the others by 1 / (1 - p), any shape.

    Srivastava et al. 2014. On the CPU the mask is cut from 64-bit random integers, four 16-bit draws each,
    so p is rounded to a multiple of 2**-16; a compiler makes its own mask.
    """
    if plain(x):
        return F.dropout(x, p)
    wide = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    draws = wide.view(torch.int16)[: x.numel()].view(x.shape)
    least, scale = round(p * 2**16) - 2**15, 1 / (1 - p)
    if x.dtype.itemsize == draws.dtype.itemsize:
        # The draws become the bits of 0 and of the scale in place, which moves only a third of the memory.
        bits = torch.tensor(scale, dtype=x.dtype).view(torch.int16)
        return x * draws.ge_(least).mul_(bits).view(x.dtype)
    return x * (draws >= least).to(x.dtype).mul_(scale)


_REGISTER = 16
"""How many fp32 numbers an AVX-512 register holds."""
_MANY_SCORES = 2**13
"""Number of scores from which filling up rows saves more than it costs."""


def softmax(scores: Tensor) -> Tensor:
    """Compute the softmax of each row `[..., S]`. On the CPU torch goes number by number through rows shorter
    than a vector register; filled up with -inf, they take a quarter of the time (docs/speed.md).
    """
    missing = _REGISTER - scores.shape[-1]
    if missing <= 0 or scores.numel() < _MANY_SCORES or plain(scores):
        return torch.softmax(scores, dim=-1)
    return torch.softmax(F.pad(scores, (0, missing), value=float("-inf")), dim=-1)[..., :-missing]


_PLAIN_ATTENTION_SCORES = 2**18
"""Largest number of queries times keys for which attention on the CPU trains without the fused kernel."""
_FEW_QUERIES = 32
"""Largest number of queries, one per beam, for which a search does without the fused kernel."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    p: float,
    scale: float | None = None,
) -> Tensor:
    r"""Compute :math:`\mathrm{softmax}(s \, qk^\top)v` for q `[B, H, T, w]`, k and v `[B, G, S, w]`, with
    dropout p on the weights; s is :math:`1/\sqrt{w}` unless ``scale`` is given, and G divides H.

    ``mask`` is True where a query may attend, and broadcasts to `[B, H, T, S]`. On the CPU the fused kernel's
    bf16 backward is several times slower than plain matrix products at the lengths of sentences
    (docs/lab-book/speed.md), so training uses these. So does a step of a search, whose few queries go on the
    right of the product: on the left they make it up to three times slower (docs/speed.md).
    """
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    trained = torch.is_grad_enabled() and q.shape[-2] * k.shape[-2] <= _PLAIN_ATTENTION_SCORES
    searched = not torch.is_grad_enabled() and q.shape[-2] <= _FEW_QUERIES and not plain(q)
    faster_without_kernel = q.device.type == "cpu" and (trained or searched)
    if not _reference and not faster_without_kernel:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=p, is_causal=causal, scale=scale
        )
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = (k @ q.transpose(-1, -2)).transpose(-1, -2) if searched else q @ k.transpose(-1, -2)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        # Adding -inf costs a fifth of filling it in, and nothing in the backward pass.
        scores = scores + torch.where(mask, scores.new_zeros(()), scores.new_full((), float("-inf")))
    weights = softmax(scores)
    return (dropout(weights, p) if p else weights) @ v


class Dropout(nn.Module):
    """Applies ``dropout`` in training and nothing in evaluation."""

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise UserError(f"a dropout probability is at least 0 and below 1, got {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p) if self.training and self.p else x

    def extra_repr(self) -> str:
        return f"p={self.p}"
