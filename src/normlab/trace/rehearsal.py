"""A whole step of training, run on copies: what its optimizers see when they are called, and their rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from normlab.trace.functions import Functions
from normlab.trace.setup import Loss
from normlab.trace.setup import Step as Whole
from normlab.trace.tensors import eager, map_tensors
from normlab.trace.untouched import same_buffers, same_globals, same_modes, same_random_state

SIMULATED: Final = 8_000
"""Rates of single groups that a simulated schedule computes, about a tenth of a second."""
HORIZON: Final = 100_000
"""Steps that a schedule is followed for where its author does not declare how many there are."""


class Clip(NamedTuple):
    """One call of ``clip_grad_norm_``: the norm asked, the parameters, and the norm that it left them with."""

    asked: float
    held: frozenset[int]
    left: float


@dataclass
class Seen:
    """What one step showed."""

    loss: Any = None
    calls: list[int | str] = field(default_factory=list)
    """Calls of the optimizers, by number, and of the "scheduler", in order."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """By parameter, when its optimizer was called first."""
    training: list[bool] = field(default_factory=list)
    """The mode of the model in each of its passes that has a gradient."""
    clips: list[Clip] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    """For each clip, the norm of its parameters' gradients when the optimizer was called first."""
    fresh: set[int] = field(default_factory=set)
    """Parameters whose gradient grew since it was clipped."""
    late: set[int] = field(default_factory=set)
    """Clipped parameters among them, when the optimizer was called first."""


@dataclass
class Rehearsal:
    """A model, its optimizers and scheduler, copies that are bound to each other, and the step to run on them.

    Where ``exact``, the model is in float64 and its functions run in that. No dropout acts.
    """

    model: nn.Module
    optimizers: list[Optimizer]
    scheduler: Any
    whole: Whole
    several: bool = False
    """Whether the step takes a list of optimizers."""
    exact: bool = False

    def __post_init__(self) -> None:
        if self.exact:
            self.model.double()
        self.names = {id(p): n for n, p in self.model.named_parameters()}

    @property
    def held(self) -> list[str]:
        """Trainable parameters of the model that an optimizer holds."""
        return [
            self.names[id(p)]
            for p in parameters_of(self.optimizers)
            if id(p) in self.names and p.requires_grad
        ]

    def run(
        self,
        batch: Any,
        *,
        acts: bool = False,
        scale: float = 1.0,
        seed: int = 0,
        rates: Sequence[float] | None = None,
    ) -> Seen:
        """Run the step once. Its optimizers step only where it ``acts``, at these rates by group.

        Gradients are multiplied by ``scale`` when backward hands them to the parameters: very small ones no
        clipping touches, very large ones every one does.
        """
        seen = Seen()
        batch = map_tensors(batch, lambda _, x: x.double() if self.exact and x.is_floating_point() else x)
        with ExitStack() as stack:
            for context in (same_globals(), same_modes(self.model), same_buffers(self.model), eager()):
                stack.enter_context(context)
            stack.enter_context(same_random_state(seed))
            if self.exact:
                torch.set_default_dtype(torch.float64)
            self._watch_gradients(seen, stack, scale)
            self._watch_calls(seen, stack, acts, rates)
            optimizer = self.optimizers if self.several else self.optimizers[0]
            with Functions(exact=self.exact, dropout=False):
                seen.loss = self.whole(self.model, batch, optimizer, self.scheduler)
        return seen

    def _watch_gradients(self, seen: Seen, stack: ExitStack, scale: float) -> None:
        def entered(*_: Any) -> None:
            if torch.is_grad_enabled():
                seen.training.append(self.model.training)

        stack.callback(self.model.register_forward_pre_hook(entered).remove)
        for p in self.model.parameters():
            if not p.requires_grad:
                continue
            if scale != 1:
                stack.callback(p.register_hook(lambda g: g * scale).remove)
            grown = p.register_post_accumulate_grad_hook(lambda q: seen.fresh.add(id(q)))
            stack.callback(grown.remove)

    def _watch_calls(self, seen: Seen, stack: ExitStack, acts: bool, rates: Sequence[float] | None) -> None:
        def replace(owner: Any, name: str, new: Any) -> None:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, new)

        for i, optimizer in enumerate(self.optimizers):
            act = partial(self._act, optimizer.step, rates) if acts else None
            replace(optimizer, "step", partial(self._stepped, seen, i, act))
        if self.scheduler is not None:
            replace(self.scheduler, "step", partial(_counted, seen, self.scheduler.step))
        replace(
            clip_grad, "_clip_grads_with_norm_", partial(_clipped, seen, clip_grad._clip_grads_with_norm_)
        )
        replace(torch.amp.GradScaler, "update", lambda scaler, *_: scaler._per_optimizer_states.clear())

    def _stepped(self, seen: Seen, i: int, act: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
        closure = args[0] if args else kwargs.get("closure")
        if act is None and callable(closure):
            with torch.enable_grad():
                closure()
        if i not in seen.calls:
            self._look(seen, self.optimizers[i])
        seen.calls.append(i)
        return act(*args, **kwargs) if act is not None else None

    def _look(self, seen: Seen, optimizer: Optimizer) -> None:
        unscale = 1 / float(scale) if (scale := getattr(optimizer, "grad_scale", None)) is not None else 1.0
        for p in parameters_of([optimizer]):
            if p.grad is not None and id(p) in self.names:
                gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
                seen.gradients[self.names[id(p)]] = gradient.detach() * unscale
        if not seen.norms:
            own = {id(p): p for p in self.model.parameters()}
            seen.norms = [norm_of(own[i] for i in clip.held if i in own) for clip in seen.clips]
            seen.late = {i for clip in seen.clips for i in clip.held if i in seen.fresh}

    def _act(self, step: Callable[..., Any], rates: Sequence[float] | None, *args: Any, **kwargs: Any) -> Any:
        if rates is not None:
            for group, rate in zip(groups_of(self.optimizers), rates, strict=True):
                group["lr"] = rate
        return step(*args, **kwargs)


def plain_step(loss_of: Loss) -> Whole:
    """The step of somebody who hands over none: zero, backward, step."""

    def whole(model: nn.Module, batch: Any, optimizer: Any, scheduler: Any) -> Tensor:
        model.train()
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]

        def closure() -> Tensor:
            for o in optimizers:
                o.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            return loss

        loss = closure()
        for o in optimizers:
            o.step(closure) if isinstance(o, torch.optim.LBFGS) else o.step()
        return loss

    return whole


def parameters_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Every parameter that they hold, in their order."""
    return [p for group in groups_of(optimizers) for p in group["params"]]


def groups_of(optimizers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    """Every group of theirs, in order."""
    return [group for o in optimizers for group in o.param_groups]


def norm_of(parameters: Iterable[Tensor]) -> float:
    """The norm of their gradients together."""
    return sum(float(p.grad.double().norm()) ** 2 for p in parameters if p.grad is not None) ** 0.5


def _counted(seen: Seen, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    seen.calls.append("scheduler")
    return step(*args, **kwargs)


def _clipped(seen: Seen, clip: Callable[..., Any], parameters: Any, asked: Any, *rest: Any) -> None:
    held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    clip(held, asked, *rest)
    seen.clips.append(Clip(float(asked), frozenset(id(p) for p in held), norm_of(held)))
    seen.fresh -= {id(p) for p in held}


class Rates(NamedTuple):
    """The rates of a schedule, by group, at some of its steps."""

    steps: list[int]
    rates: list[list[float]]
    ended: Exception | None
    """What the scheduler raised after the last of them."""

    @property
    def top(self) -> list[float]:
        """The largest rate of any group at each step."""
        return [max(row) for row in self.rates]

    @property
    def peaks(self) -> list[float]:
        """The largest rate of each group."""
        return [max(column) for column in zip(*self.rates, strict=True)]


def simulated(optimizers: Sequence[Optimizer], scheduler: Any, steps: int | None) -> Rates:
    """Follow a schedule without stepping an optimizer; optimizers and scheduler are copies, and change.

    Every step where they are few; else the first ones, and of the others some where the schedule has a closed
    form.
    """
    groups = groups_of(optimizers)
    limit, count = max(SIMULATED // max(len(groups), 1), 100), steps or HORIZON
    form = _closed_form(scheduler) if count > limit else None
    numbers, rates, ended = [0], [[float(g["lr"]) for g in groups]], None
    start = getattr(scheduler, "last_epoch", 0)
    spaced = range(limit // 2, count, max((count - limit // 2) // (limit // 2), 1)) if form else ()
    for i in range(1, min(count, limit // 2 if form else limit)):
        try:
            scheduler.step()
        except Exception as error:
            ended = error
            break
        numbers.append(i)
        rates.append([float(g["lr"]) for g in groups])
    for i in spaced if form and ended is None else ():
        scheduler.last_epoch = start + i
        numbers.append(i)
        rates.append([float(rate) for rate in form()])
    return Rates(numbers, rates, ended)


def _closed_form(scheduler: Any) -> Callable[[], Sequence[Any]] | None:
    """A function of a scheduler's ``last_epoch`` that gives its rates, whatever they were before."""
    if type(scheduler) in (LambdaLR, OneCycleLR):
        return scheduler.get_lr
    return getattr(scheduler, "_get_closed_form_lr", None)
