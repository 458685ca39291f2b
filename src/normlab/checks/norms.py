"""The property of norms: modules that are norms by what they do, and the one before the head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from normlab.checks.fresh import exact_fresh, from_library
from normlab.checks.property import Note, Untestable, Violation, fail, note, property_of
from normlab.checks.step import Step
from normlab.checks.structure import SCALES, passed_on
from normlab.trace.compare import distance
from normlab.trace.functions import Functions
from normlab.trace.trace import Event, Trace

Answers = Iterator[Violation | Note]


@property_of("structure", explains=["siblings", "start", "initial_loss", "overfit"], passes=4)
def norms(step: Step) -> Answers:
    """A norm gives each token's features one size, whatever their scale; and one stands before the head.

    A module whose own parameters are vectors and whose output at one feature depends on the others is a norm:
    its output must not change with the scale of its input, nor with other tokens. The entries of a gain have
    one sign. Where blocks add to a stream that they norm themselves, the logits must not grow with it.
    """
    model = step.exact.model
    events = [e for e in step.exact.events if e.call == 0 and _may_norm(model, e)]
    found: list[Event] = []
    with _running(step.exact):
        for event in events:
            answer = _normed(step, model.get_submodule(event.module), event)
            if isinstance(answer, Violation):
                yield answer
                return
            found += [event] if answer else []
    with _running(step.plain):
        gains = {
            e.module: _gain(step.plain.model.get_submodule(e.module), e.inputs[0].shape[-1]) for e in found
        }
    known = {path: g for path, g in gains.items() if g is not None}
    if len(known) > 1 and all(_scatters(g) for g in known.values()):
        first, others = next(iter(known)), len(known) - 1
        mean, deviation = float(known[first].mean()), float(known[first].std())
        say = f"its gains scatter around zero ({mean:.2g} ± {deviation:.2g}), as in {others} other norms"
        yield fail(first, say, "read a gain that is kept as an offset as 1 + w, or draw it as ones")
        return
    yield from _before_the_head(step)
    if not found and "scaled streams" not in step.kept:
        raise Untestable("no module is a norm, and no stack adds to a stream")


@contextmanager
def _running(trace: Trace) -> Iterator[None]:
    """Call modules inside this block as the trace runs them."""
    with trace._surroundings(), torch.no_grad(), Functions(exact=trace.exact, dropout=False):
        yield


def _called(module: nn.Module, x: Tensor) -> Tensor | None:
    try:
        y = module(x.clone())
    except Exception:
        return None
    return y if isinstance(y, Tensor) and y.shape == x.shape else None


def _may_norm(model: nn.Module, event: Event) -> bool:
    if len(event.inputs) != 1 or len(event.outputs) != 1 or not event.module:
        return False
    x, module = event.inputs[0], model.get_submodule(event.module)
    over_tokens = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm)
    return (
        x.is_floating_point()
        and x.ndim > 1
        and x.shape[-1] > 2
        and x.shape == event.outputs[0].shape
        and not any(isinstance(m, over_tokens) for m in module.modules())
        and all(p.numel() in (1, x.shape[-1]) for p in module.parameters())
    )


def _normed(step: Step, module: nn.Module, event: Event) -> Violation | bool:
    """Whether a module norms each token; a violation where it should and does not."""
    shape, width = event.inputs[0].shape, event.inputs[0].shape[-1]
    small = [min(n, 3) for n in shape[:-1]]
    h = torch.randn(*small, width, generator=torch.Generator().manual_seed(5)).to(event.inputs[0])
    other, moved = h.clone(), h.clone()
    other[..., 0] = -2 * h[..., 0] + 1
    if h.ndim == 3:
        moved[:, 1:] = moved[:, 1:].roll(1, -1) * 1.7 + 0.3
    ys = [_called(module, x) for x in (h, other, moved, 1e3 * h, 1e4 * h)]
    if any(y is None for y in ys):
        return False
    y, y_other, y_moved, large, larger = ys
    least = 1e-6 if step.is_exact else 16 * torch.finfo(h.dtype).eps
    mixes, change = distance(y[..., 1:], y_other[..., 1:]) > least, distance(large, larger)
    if change > least:
        if not mixes or all(p.numel() != width for p in module.parameters()):
            return False
        say = f"its output changes by {change:.1g} of its size when its input is ten times as large"
        return fail(
            event.module, say, "divide by the root of the mean square, or the deviation, of the features"
        )
    if distance(y[:, :1], y_moved[:, :1]) > least:
        return fail(
            event.module, "what it makes of a token depends on others", "take its statistics over features"
        )
    return mixes


def _gain(module: nn.Module, width: int) -> Tensor | None:
    """The factor on each feature, read off a token of ones with as many of either sign."""
    if width % 2 or width < 16:
        return None
    signs = 1.0 - 2 * (torch.randperm(width, generator=torch.Generator().manual_seed(7)) % 2)
    p = next(module.parameters(), signs)
    x = signs.to(p)[None, None]
    plus, minus = _called(module, x), _called(module, -x)
    return None if plus is None or minus is None else ((plus - minus) / 2 * x).flatten().double()


def _scatters(gain: Tensor) -> bool:
    """Whether the signs of a gain are those of a fair coin, by three deviations; or it is zero."""
    count = gain.numel()
    return abs(int((gain < 0).sum()) - count / 2) <= 1.5 * count**0.5 or not bool(gain.any())


def _before_the_head(step: Step) -> Answers:
    known, runs = step.kept.get("scaled streams", ({}, []))
    last = next((path for path, _ in reversed(step.facts.order) if path in known), None)
    if last is None or known[last] != 1.0 or not _grows(step, runs):
        return
    meant = from_library(step.model.get_submodule(last)) and not from_library(step.model)
    trace = exact_fresh(step)
    if trace is not None:
        meant = _grows(step, passed_on(trace, step.facts.streams, step.facts.blocks)[1])
    say = "the logits grow in proportion to the last block's stream: no norm stands between"
    yield note(last, say) if meant else fail(last, say, "norm the stream before the head")


def _grows(step: Step, runs: list[Trace]) -> bool:
    low, high = (float(step.logits(run).double().norm()) for run in runs)
    return low > 0 and abs(high / low - SCALES[1] / SCALES[0]) < 1e-3
