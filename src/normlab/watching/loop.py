"""Properties of a training loop, seen in the steps that it takes: gradients, clipping, accumulation, rates.

Nothing runs again and nothing changes: hooks compare what backward finds, what a clip leaves and what the
optimizer gets. Numbers are either equal or not; there is no threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from normlab.checks.property import Violation
from normlab.trace.facts.targets import Targets, read_targets, unexplained
from normlab.trace.tensors import Place, tensors_in
from normlab.watching.meter import local_parts, stored

FIRST: Final = 3
"""Steps whose gradients are followed: a step's own and what the next step finds of them, even if the first
step began with leftovers."""
READ: Final = 2
"""Passes of a step whose weights are read: if losses are averaged, two weights add up to at most 1."""


@dataclass
class _Gradient:
    """What became of one parameter's gradient, on the device."""

    name: str
    kept: Tensor | None = None
    """Its norm in the last step."""
    carried: Tensor | None = None
    """Whether backward has since added to that same gradient."""
    left: Tensor | None = None
    """Its norm after the last clip; 0 if it had no gradient."""
    clipped: bool = False
    late: bool = False
    """Whether backward has added to it since the clip."""


class Scored(NamedTuple):
    """What backward asked of an output of the model, on the arguments of a call."""

    number: int
    """The number of the backward pass."""
    batch: Any
    place: Place
    targets: Targets | None
    """The targets of a cross-entropy, if it is one."""
    gradient: Tensor
    """The gradient if it is not a cross-entropy; else empty."""


@dataclass
class _BackwardPass:
    """A backward pass: the gradients that it adds to, and the weights of what it differentiated."""

    number: int
    norms: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


class Loop:
    """Follows the gradients of the first steps of a loop, from ``attach`` on.

    ``report`` gets each property that does not hold, once.
    """

    def __init__(self, report: Callable[[int, Violation], None]) -> None:
        self._report = report
        self._hooks = ExitStack()
        self._gradients: dict[int, _Gradient] = {}
        self._passes: list[_BackwardPass] = []
        """The passes of the first step since gradients were zero."""
        self.scaler: torch.amp.GradScaler | None = None
        self.scored: list[Scored] = []
        """Every output of the first pass in which everything is finite."""
        self._refused = -1
        self.left = 0
        """Steps that are still followed."""

    def attach(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Follow the gradients of these parameters for ``FIRST`` steps."""
        self.detach()
        self.left, self.scored = FIRST, list[Scored]()
        for name, p in parameters.items():
            if p.requires_grad:
                self._gradients[id(p)] = one = _Gradient(name)
                self._hooks.callback(p.register_hook(lambda _, p=p, one=one: self._add(p, one)).remove)
        _follow(self)

    def detach(self) -> None:
        self._hooks.close()
        _FOLLOWED.discard(self)
        if not _FOLLOWED:
            _CALLS.close()
        self._gradients.clear()
        self._passes.clear()
        self.left = 0

    def saw_loss(self, loss: Tensor, where: str) -> None:
        """Record the weight with which backward differentiates the loss of a micro-batch."""
        if self.left == FIRST and loss.requires_grad:
            loss.register_hook(lambda g: self._pass.weights.setdefault(where, g.detach().sum()))

    def saw_output(self, output: Any, batch: Any) -> None:
        """Record what backward asks of each output."""
        shown = ((at, x) for at, x in tensors_in(output) if x.requires_grad and not x.is_sparse)
        for at, x in shown if self.left == FIRST else ():
            x.register_hook(partial(self._ask, batch, at, x.detach()))

    def _ask(self, batch: Any, place: Place, logits: Tensor, gradient: Tensor) -> None:
        number, weights, gradient = self._pass.number, self._pass.weights, gradient.detach()
        if len(self._passes) > READ:
            return
        limit = unexplained(logits.dtype)
        targets = read_targets(logits, gradient, limit) if logits.ndim > 1 else None
        if targets is not None:
            weights.setdefault("logits", targets.weight[targets.counted].sum())
        if not torch.isfinite(gradient).all():
            self.scored, self._refused = list[Scored](), number
        elif number != self._refused and (not self.scored or self.scored[0].number == number):
            kept = gradient if targets is None else gradient.new_empty(0)
            self.scored.append(Scored(number, batch, place, targets, kept))

    @property
    def _pass(self) -> _BackwardPass:
        number = torch._C._current_graph_task_id()
        if not self._passes or self._passes[-1].number != number:
            self._passes.append(_BackwardPass(number))
        return self._passes[-1]

    @torch.no_grad()
    def _add(self, p: Tensor, one: _Gradient) -> None:
        """Record that backward is about to add to a gradient."""
        one.late, norm = one.clipped, _norm(p)
        if norm is not None and self._passes:
            self._passes[-1].norms.append(norm)
        if norm is None or one.kept is None:
            one.carried = None
        else:
            before = one.carried if one.carried is not None else torch.zeros_like(norm, dtype=torch.bool)
            one.carried = (norm != 0) & ((norm == one.kept) | before)

    @torch.no_grad()
    def before(self, step: int, parameters: Iterable[Tensor], optimizer: Any) -> None:
        """Look at the gradients that an optimizer gets."""
        if not self.left:
            return
        held = [(p, self._gradients[id(p)]) for p in parameters if id(p) in self._gradients]
        for one in (_stale(held), _clips(held, optimizer), self._sums()):
            if one is not None:
                self._report(step, one)

    @torch.no_grad()
    def after(self, parameters: Iterable[Tensor]) -> None:
        """Keep the gradients' values after an optimizer's step."""
        for p in parameters if self.left else ():
            if (one := self._gradients.get(id(p))) is not None:
                one.kept, one.carried, one.left, one.clipped, one.late = _norm(p), None, None, False, False

    def end_step(self) -> None:
        """End a step; after the last followed one, remove the hooks."""
        self._passes.clear()
        if self.left == 1:
            self.detach()
        elif self.left:
            self.left -= 1

    def clipped(self, parameters: Iterable[Tensor]) -> None:
        with torch.no_grad():
            for p in parameters:
                if (one := self._gradients.get(id(p))) is not None:
                    one.left, one.clipped, one.late = _norm(p), True, False

    def _sums(self) -> Violation | None:
        """Check that the gradient of a step of several micro-batches is that of their mean loss."""
        zeroed = [not any(_fetched(one.norms)) for one in self._passes]  # also after a skipped step
        own = self._passes[len(zeroed) - 1 - zeroed[::-1].index(True) :] if any(zeroed) else self._passes
        first = [one.weights for one in own[:READ]]
        known = ([w[at] for w in first if at in w] for at in ("logits", "output", "loop"))
        pair = next((weights for weights in known if len(weights) == READ), None)
        if pair is None:
            return None
        total = sum(_fetched(pair)) / (self.scaler.get_scale() if self.scaler is not None else 1.0)
        if not math.isfinite(total) or round(total) != len(pair):  # else each has the weight 1
            return None
        count = len(own)
        words = f"the losses of {count} micro-batches are added: the gradient is {count} times too large"
        return Violation("step", "", words, f"divide each by {count}; give watch.loss() the undivided loss")


def _stale(held: Sequence[tuple[Tensor, _Gradient]]) -> Violation | None:
    """Check that a step's gradient contains none of the last step's."""
    known = [(one.name, one.carried) for _, one in held if one.carried is not None]
    stale = [n for (n, _), there in zip(known, _fetched([c for _, c in known]), strict=True) if there]
    if not stale:
        return None
    words = f"the last step's gradient is still in that of {_several(stale, len(held))}"
    return Violation("step", "", words, "call optimizer.zero_grad() once in each step, before backward")


def _clips(held: Sequence[tuple[Tensor, _Gradient]], optimizer: Any) -> Violation | None:
    """Check that the optimizer gets what a clip has left."""
    clipped = [(p, one) for p, one in held if one.clipped]
    if late := [one.name for _, one in clipped if one.late]:
        words = f"after the clip, backward adds to the gradient of {_several(late, len(held))}"
        return Violation("step", "", words, "clip after the last backward, right before the step")
    pairs = [(one.left, _norm(p)) for p, one in clipped]
    then = math.hypot(*_fetched([a for a, b in pairs if a is not None and b is not None]))
    now = math.hypot(*_fetched([b for a, b in pairs if a is not None and b is not None]))
    scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by it in its step
    now = now / float(scale) if scale is not None else now
    if then == now or not math.isfinite(then + now):
        return None
    words = f"a clip leaves gradients of norm {then:.4g}, and the optimizer gets {now:.4g}"
    return Violation("step", "", words, "call scaler.unscale_(optimizer) before the clip; clip last")


_FOLLOWED: Final[WeakSet[Loop]] = WeakSet()
_CALLS: Final = ExitStack()
"""Restores torch's functions."""


def _follow(loop: Loop) -> None:
    """Show a loop the calls of ``clip_grad_norm_`` and of the scaler for mixed precision."""
    if not _FOLLOWED:
        _CALLS.close()
        clip, scale = clip_grad._clip_grads_with_norm_, torch.amp.GradScaler.scale

        def clipped(parameters: Any, *args: Any, **kwargs: Any) -> None:
            held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            clip(held, *args, **kwargs)
            for one in _FOLLOWED:
                one.clipped(held)

        def scaled(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            for one in _FOLLOWED:
                one.scaler = scaler
            return scale(scaler, outputs)

        for owner, name, own, new in (
            (clip_grad, "_clip_grads_with_norm_", clip, clipped),
            (torch.amp.GradScaler, "scale", scale, scaled),
        ):
            setattr(owner, name, new)
            _CALLS.callback(setattr, owner, name, own)
    _FOLLOWED.add(loop)


def _norm(p: Tensor) -> Tensor | None:
    return None if p.grad is None else torch.linalg.vector_norm(stored(local_parts([p.grad])[0]).detach())


def _fetched(values: Iterable[Tensor]) -> list[float]:
    held = [x.detach().float() for x in values]
    return torch.stack([x.to(held[0].device) for x in held]).tolist() if held else []


def _several(names: Sequence[str], count: int) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} of {count} parameters, from {names[0]} on"


class RateHistory:
    """The rates of the steps taken so far, and those from an earlier part of the training."""

    def __init__(self, earlier: Mapping[int, float]) -> None:
        self._earlier = dict(sorted(earlier.items()))
        self._own: list[float] = []
        self.steps = 0
        self.idle: list[int] = []
        """Steps at a rate of 0 in which no weight moved."""

    def add(self, step: int, lr: float, moved: float) -> Violation | None:
        self.steps += 1
        if lr == moved == 0:
            self.idle.append(step)
            if self.idle[-2:] == [step - 1, step]:
                words = f"the learning rate is 0 from step {step - 1} on, and no weight moves"
                return Violation(
                    "schedule", "", words, "step the scheduler once for each step of the optimizer"
                )
        self._own = [*self._own, lr][:2]
        return self._begins_anew() if self.steps == 2 and self._earlier else None

    def _begins_anew(self) -> Violation | None:
        """Check that a resumed training does not return to the rate of step 0 after another one."""
        earlier = list(self._earlier.items())
        (begun, first), (until, last) = earlier[0], earlier[-1]
        same = self._own[0] == first != last and (first != 0 or self._own[1] != 0)
        if begun != 0 or not same:
            return None
        words = f"the rate begins anew at {first:.4g}, that of step 0, and was {last:.4g} in step {until}"
        return Violation("schedule", "", words, "load the scheduler's state_dict with that of the optimizer")
