"""Properties of a training loop, seen in the steps that it takes: gradients, clipping, accumulation, rates.

Nothing runs again and nothing changes: hooks compare what backward finds, what a clip leaves and what the
optimizer gets. Numbers are either equal or not; there is no threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from normlab.checks.property import Violation
from normlab.private_torch import backward_pass
from normlab.trace.facts.targets import Targets, read_targets, unexplained
from normlab.trace.patching import Clip, replace, replace_clipping
from normlab.trace.tensors import Place, tensors_in
from normlab.watching.meter import local_parts, stored

FIRST: Final = 3
"""How many steps' gradients are followed: enough to see a step's own and what the next step finds of them,
even if the first step began with leftovers."""
READ: Final = 2
"""How many passes of a step have their weights read: if losses are averaged, two add up to at most 1."""


@dataclass
class _Gradient:
    """What became of one parameter's gradient, on the device."""

    name: str
    in_last_step: Tensor | None = None
    """Its norm in the last step."""
    carried: Tensor | None = None
    """Whether backward has since added to that same gradient."""
    after_clip: Tensor | None = None
    """Its norm after the last clip; None if it had no gradient."""
    clipped: bool = False
    late: bool = False
    """Whether backward has added to it since the clip."""

    def end_step(self, norm: Tensor | None) -> None:
        """Keep the norm that it has after the optimizer's step, and forget the rest."""
        self.in_last_step = norm
        self.carried = self.after_clip = None
        self.clipped = self.late = False


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
                gradient = self._gradients[id(p)] = _Gradient(name)
                hook = p.register_hook(partial(self._add, p, gradient))
                self._hooks.callback(hook.remove)
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
            loss.register_hook(partial(self._weigh, where))

    def _weigh(self, where: str, gradient: Tensor) -> None:
        """Keep the weight of a loss; what a hook returns, torch takes for the gradient."""
        self._pass.weights.setdefault(where, gradient.detach().sum())

    def saw_output(self, output: Any, batch: Any) -> None:
        """Record what backward asks of each output."""
        if self.left != FIRST:
            return
        for place, x in tensors_in(output):
            if x.requires_grad and not x.is_sparse:
                x.register_hook(partial(self._score, batch, place, x.detach()))

    def _score(self, batch: Any, place: Place, logits: Tensor, gradient: Tensor) -> None:
        """Read what backward asks of an output off its gradient."""
        number, weights, gradient = self._pass.number, self._pass.weights, gradient.detach()
        if len(self._passes) > READ:
            return
        targets = None
        if logits.ndim > 1:
            targets = read_targets(logits, gradient, unexplained(logits.dtype))
        if targets is not None:
            weights.setdefault("logits", targets.weight[targets.counted].sum())
        if not torch.isfinite(gradient).all():  # a scaler begins with a factor that is too large
            self.scored, self._refused = list[Scored](), number
        elif number != self._refused and (not self.scored or self.scored[0].number == number):
            kept_gradient = gradient if targets is None else gradient.new_empty(0)
            self.scored.append(Scored(number, batch, place, targets, kept_gradient))

    def take_scored(self) -> list[Scored]:
        """Return what was scored, and let go of it: it holds a batch, and perhaps gradients of outputs."""
        scored, self.scored = self.scored, list[Scored]()
        return scored

    @property
    def _pass(self) -> _BackwardPass:
        """The backward pass in progress, which torch numbers."""
        number = backward_pass()
        if not self._passes or self._passes[-1].number != number:
            self._passes.append(_BackwardPass(number))
        return self._passes[-1]

    @torch.no_grad()
    def _add(self, p: Tensor, gradient: _Gradient, _: Tensor) -> None:
        """Record that backward is about to add to a gradient."""
        gradient.late = gradient.clipped
        norm = _norm(p)
        if norm is not None and self._passes:
            self._passes[-1].norms.append(norm)
        if norm is None or gradient.in_last_step is None:
            gradient.carried = None
            return
        carried = norm == gradient.in_last_step
        if gradient.carried is not None:  # from an earlier micro-batch of this step
            carried = carried | gradient.carried
        gradient.carried = (norm != 0) & carried

    @torch.no_grad()
    def before(self, step: int, parameters: Iterable[Tensor], optimizer: Any) -> None:
        """Look at the gradients that an optimizer gets."""
        if not self.left:
            return
        followed = [(p, self._gradients[id(p)]) for p in parameters if id(p) in self._gradients]
        for violation in (_stale(followed), _clips(followed, optimizer), self._sums()):
            if violation is not None:
                self._report(step, violation)

    @torch.no_grad()
    def after(self, parameters: Iterable[Tensor]) -> None:
        """Keep the gradients' values after an optimizer's step."""
        if not self.left:
            return
        for p in parameters:
            if id(p) in self._gradients:
                self._gradients[id(p)].end_step(_norm(p))

    def end_step(self) -> None:
        """End a step; after the last followed one, remove the hooks."""
        self._passes.clear()
        if self.left == 1:
            self.detach()
        elif self.left:
            self.left -= 1

    def clipped(self, parameters: Iterable[Tensor]) -> None:
        """Record what a clip has left of these gradients."""
        with torch.no_grad():
            for p in parameters:
                if id(p) in self._gradients:
                    gradient = self._gradients[id(p)]
                    gradient.after_clip = _norm(p)
                    gradient.clipped, gradient.late = True, False

    def _sums(self) -> Violation | None:
        """Check that the gradient of a step of several micro-batches is that of their mean loss."""
        passes = _since_zeroed(self._passes)
        weights = _weights(passes[:READ])
        scale = self.scaler.get_scale() if self.scaler is not None else 1.0
        total = sum(_fetched(weights)) / scale
        each_is_one = math.isfinite(total) and round(total) == READ
        if len(weights) < READ or not each_is_one:
            return None
        count = len(passes)
        words = f"the losses of {count} micro-batches are added: the gradient is {count} times too large"
        return Violation("step", "", words, f"divide each by {count}; give watch.loss() the undivided loss")


def _since_zeroed(passes: list[_BackwardPass]) -> list[_BackwardPass]:
    """Return the passes from the last one that began with gradients of zero, as after a skipped step."""
    for first in reversed(range(len(passes))):
        if not any(_fetched(passes[first].norms)):
            return passes[first:]
    return passes


def _weights(passes: Sequence[_BackwardPass]) -> list[Tensor]:
    """Return the weight of each pass, read nearest to the targets where that was seen in all; else none."""
    for place in ("logits", "output", "loop"):
        weights = [backward.weights[place] for backward in passes if place in backward.weights]
        if weights and len(weights) == len(passes):
            return weights
    return []


def _stale(followed: Sequence[tuple[Tensor, _Gradient]]) -> Violation | None:
    """Check that a step's gradient contains none of the last step's."""
    known = [(gradient.name, gradient.carried) for _, gradient in followed if gradient.carried is not None]
    carried = _fetched([x for _, x in known])
    stale = [name for (name, _), is_carried in zip(known, carried, strict=True) if is_carried]
    if not stale:
        return None
    words = f"the last step's gradient is still in that of {_several(stale, len(followed))}"
    return Violation("step", "", words, "call optimizer.zero_grad() once in each step, before backward")


def _clips(followed: Sequence[tuple[Tensor, _Gradient]], optimizer: Any) -> Violation | None:
    """Check that the optimizer gets what a clip has left."""
    clipped = [(p, gradient) for p, gradient in followed if gradient.clipped]
    late = [gradient.name for _, gradient in clipped if gradient.late]
    if late:
        words = f"after the clip, backward adds to the gradient of {_several(late, len(followed))}"
        return Violation("step", "", words, "clip after the last backward, right before the step")
    after_clip, now = list[Tensor](), list[Tensor]()
    for p, gradient in clipped:
        norm = _norm(p)
        if gradient.after_clip is not None and norm is not None:
            after_clip.append(gradient.after_clip)
            now.append(norm)
    left, got = math.hypot(*_fetched(after_clip)), math.hypot(*_fetched(now))
    scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by it in its step
    if scale is not None:
        got = got / float(scale)
    if left == got or not math.isfinite(left + got):
        return None
    words = f"a clip leaves gradients of norm {left:.4g}, and the optimizer gets {got:.4g}"
    return Violation("step", "", words, "call scaler.unscale_(optimizer) before the clip; clip last")


_FOLLOWED: Final[WeakSet[Loop]] = WeakSet()
"""The loops that are followed now; one that nobody holds any more drops out by itself."""
_CALLS: Final = ExitStack()
"""Restores torch's functions, which are replaced while any loop is followed."""


def _follow(loop: Loop) -> None:
    """Show a loop the calls of ``clip_grad_norm_`` and of the scaler for mixed precision."""
    if not _FOLLOWED:
        _CALLS.close()  # the last loop may have dropped out without a call of detach
        _replace_calls()
    _FOLLOWED.add(loop)


def _replace_calls() -> None:
    scale = torch.amp.GradScaler.scale

    @contextmanager
    def shown(call: Clip) -> Iterator[None]:
        yield
        for loop in _FOLLOWED:
            loop.clipped(call.parameters)

    def scaled(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        for loop in _FOLLOWED:
            loop.scaler = scaler
        return scale(scaler, outputs)

    replace_clipping(_CALLS, shown)
    replace(_CALLS, torch.amp.GradScaler, "scale", scaled)


def _norm(p: Tensor) -> Tensor | None:
    """Return the norm of what this process holds of a gradient, if there is one."""
    if p.grad is None:
        return None
    (part,) = local_parts([p.grad])
    return torch.linalg.vector_norm(stored(part).detach())


def _fetched(values: Iterable[Tensor]) -> list[float]:
    """Return numbers from the device, in one transfer."""
    numbers = [x.detach().float() for x in values]
    if not numbers:
        return []
    return torch.stack([x.to(numbers[0].device) for x in numbers]).tolist()


def _several(names: Sequence[str], count: int) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} of {count} parameters, from {names[0]} on"
