"""Losses as sums over tokens; the trainer divides by the number of tokens in the global batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class LossSum:
    """Sums over the target tokens of a micro-batch, padding left out, in nats (scalars on the device)."""

    loss: Tensor
    """The label-smoothed loss, to be differentiated."""
    nll: Tensor
    """The negative log-likelihood, detached."""


def label_smoothed(
    logits: Tensor, target: Tensor, smoothing: float, allowed: Tensor | None, pad: int
) -> LossSum:
    r""":math:`(1 - \epsilon)(-\log p_y) + \epsilon \cdot \mathrm{mean}_v(-\log p_v)`, summed over tokens.

    Szegedy et al. 2016, Section 7 (arXiv 1512.00567). ``logits`` `[B, T, V]`, ``target`` `[B, T]` with
    ``pad`` where nothing is predicted. ``allowed`` `[V]`: vocabulary entries that are False get the logit
    minus infinity and no share of the smoothing.
    """
    if allowed is not None:
        logits = logits.masked_fill(~allowed, float("-inf"))
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_p = F.log_softmax(wide, dim=-1).flatten(0, 1)
    nll = F.nll_loss(log_p, target.flatten(), ignore_index=pad, reduction="sum")
    if not smoothing:
        return LossSum(nll, nll.detach())
    if allowed is None:
        spread = log_p.mean(-1)
    else:
        spread = log_p.masked_fill(~allowed, 0.0).sum(-1) / allowed.sum()
    uniform = -(spread * (target.flatten() != pad)).sum()
    return LossSum(torch.lerp(nll, uniform, smoothing), nll.detach())
