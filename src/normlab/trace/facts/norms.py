"""Which modules norm, and what their gains are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from normlab.trace.compare import distance
from normlab.trace.trace import Event, Trace

OVER_TOKENS: Final = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm)


class _Response(NamedTuple):
    """How the output of a module that may be a norm responds to its input."""

    module: str
    width: int
    has_vector: bool
    """Whether it holds a parameter for each feature."""
    mixes: bool
    """Whether one feature of its output depends on the others."""
    grows: float
    """By what share of its size it changes when its input becomes ten times as large; 0 up to rounding."""
    leaks: bool
    """Whether a token of its output depends on others."""


def responses(trace: Trace) -> list[_Response]:
    """Call again each module that keeps the shape of one tensor and holds only numbers and vectors."""
    events = [e for e in trace.events if e.call == 0 and _may_norm(trace.model, e)]
    with trace.running():
        tried = [_response(trace, e) for e in events]
    return [one for one in tried if one is not None]


def gains(trace: Trace, norms: Iterable[_Response]) -> dict[str, Tensor]:
    """Return each norm's factor on each feature, read off a token of as many ones as minus ones."""
    read: dict[str, Tensor] = {}
    with trace.running():
        for one in norms:
            module, width = trace.model.get_submodule(one.module), one.width
            signs = 1.0 - 2 * (torch.randperm(width, generator=torch.Generator().manual_seed(7)) % 2)
            x = signs.to(next(module.parameters(), signs))[None, None]
            plus, minus = _called(module, x), _called(module, -x)
            if width % 2 == 0 and width >= 16 and plus is not None and minus is not None:
                read[one.module] = ((plus - minus) / 2 * x).flatten().double()
    return read


def sets_norm_or_dropout(trace: Trace, inner: str, values: Mapping[str, Any]) -> bool:
    """Return whether a setting, by block, is a norm's or the rate of a dropout that the same module calls."""
    here = {f"{block}.{inner}".rstrip("."): value for block, value in values.items()}
    ran = trace.again(training=True).functions("dropout", "scaled_dot_product_attention")
    own = {(c.module, c.argument(1, "p") if c.name == "dropout" else c.argument(4, "dropout_p")) for c in ran}
    drops = any((path, value) in own for path, value in here.items() if value and isinstance(value, float))
    return drops or any(one.module in here and one.mixes and not one.grows for one in responses(trace))


def scatters(gain: Tensor) -> bool:
    """Return whether the signs of a gain look like a fair coin's, within three deviations, or it is zero."""
    count = gain.numel()
    return abs(int((gain < 0).sum()) - count / 2) <= 1.5 * count**0.5 or not bool(gain.any())


def _called(module: nn.Module, x: Tensor) -> Tensor | None:
    with suppress(Exception):
        y = module(x.clone())
        return y if isinstance(y, Tensor) and y.shape == x.shape else None
    return None


def _may_norm(model: nn.Module, event: Event) -> bool:
    if len(event.inputs) != 1 or len(event.outputs) != 1 or not event.module:
        return False
    x, module = event.inputs[0], model.get_submodule(event.module)
    return (
        x.is_floating_point()
        and x.ndim > 1
        and x.shape[-1] > 2
        and x.shape == event.outputs[0].shape
        and not any(isinstance(m, OVER_TOKENS) for m in module.modules())
        and all(p.numel() in (1, x.shape[-1]) for p in module.parameters())
    )


def _response(trace: Trace, event: Event) -> _Response | None:
    module, (like,) = trace.model.get_submodule(event.module), event.inputs
    shape, width = [min(n, 3) for n in like.shape[:-1]], like.shape[-1]
    h = torch.randn(*shape, width, generator=torch.Generator().manual_seed(5)).to(like)
    other, moved = h.clone(), h.clone()
    other[..., 0] = -2 * h[..., 0] + 1
    moved.view(len(h), -1, width)[:, 1:] = h.view(len(h), -1, width)[:, 1:].roll(1, -1) * 1.7 + 0.3
    ys = [y for x in (h, other, moved, 1e3 * h, 1e4 * h) if (y := _called(module, x)) is not None]
    if len(ys) < 5:
        return None
    least = 1e-6 if trace.exact else 16 * torch.finfo(h.dtype).eps
    mixes = distance(ys[0][..., 1:], ys[1][..., 1:]) > least
    first, alone = (y.reshape(len(h), -1, width)[:, 0] for y in (ys[0], ys[2]))
    leaks, grows = distance(first, alone) > least, distance(ys[3], ys[4])
    has_vector = any(p.numel() == width for p in module.parameters())
    return _Response(event.module, width, has_vector, mixes, grows if grows > least else 0.0, leaks)
