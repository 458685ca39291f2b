"""Run a whole step of training on copies, and see what its optimizers find when they are called.

The step is the user's own, or a plain one. What it does with gradients between the loss and the optimizer,
such as accumulating, scaling and clipping, is seen from outside: gradients are multiplied as backward passes
them on, and what stands in the place of each optimizer's ``step`` looks at them. The optimizers act only if
rates are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normlab.errors import UserError
from normlab.private_torch import forget_unscaled, is_in_backward, table_of_buffers, version_of
from normlab.setups.setup import Loss, StepFunction
from normlab.trace.autograd import Weights
from normlab.trace.budget import begin_pass
from normlab.trace.compare import distance, rounded
from normlab.trace.copies import refusal_of
from normlab.trace.facts import Unknown
from normlab.trace.facts.facts import Facts
from normlab.trace.functions import Functions
from normlab.trace.lookups import lookups_in_range
from normlab.trace.patching import (
    Clip,
    norm_of,
    replace,
    replace_clipping,
    replace_step,
    run_closure,
    same_modes,
)
from normlab.trace.restore import generators_of_copies, same, same_globals, same_random_state
from normlab.trace.tensors import Side, copied_batch, eager, forward_hooks, map_tensors, tensors_in
from normlab.trace.trace import Trace, recomputing
from normlab.trace.trail import noted_step
from normlab.trace.use import use_of

SEED: Final = 20_011
"""The seed of every run. Batches are drawn with others, or a loss would draw the same numbers again."""
BIG: Final = 2.0**20
"""Factor that makes gradients large enough for any clipping."""
SAMPLED: Final = 65_536
"""How many entries of each parameter are looked at, evenly spaced."""
LEARNT: Final = 10
"""How many steps in a row below the first loss show that a batch is learnt; the warm-up is as long."""
TRIED: Final = 40
"""How many steps on one batch are tried until it is learnt."""


class NotedClip(NamedTuple):
    """One call that clipped gradients by their norm."""

    parameters: frozenset[int]
    """By ``id``."""
    left: float
    """The norm that it left these gradients."""
    left_of_all: float
    """The norm that it left all gradients by whose norm it clipped, which may be more than these."""


@dataclass
class ObservedStep:
    """What one step showed."""

    batch: Any = None
    """What the step was given, with its own tensors."""
    calls: list[int | str] = field(default_factory=list)
    """Calls of the optimizers (by number) and of the "scheduler", in order."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """A sample of each parameter's gradient when its optimizer was first called."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """A sample of each parameter then, after what the passes did to it."""
    training: list[bool] = field(default_factory=list)
    """The model's mode in each of its passes with a gradient."""
    moved: bool = False
    """Whether the step writes to the weights before its last pass."""
    between: list[str] = field(default_factory=list)
    """Parameters to which the step writes between its first pass and its last."""
    cast: torch.dtype | None = None
    """The dtype of autocast in its last pass, if modules run under autocast there."""
    clips: list[NotedClip] = field(default_factory=list)
    fresh: set[int] = field(default_factory=set)
    """Parameters whose gradient grew since it was clipped."""
    clipped: frozenset[int] = frozenset()
    """Parameters that had been clipped when the optimizer was first called."""
    late: bool = False
    """Whether the gradient of one of them had grown since it was clipped."""
    undone: tuple[float, float] | None = None
    """The norm that the last clip left and the norm at the optimizer's call, if these differ."""

    @property
    def nonzero(self) -> set[str]:
        """Parameters whose gradient is not 0."""
        return {n for n, g in self.gradients.items() if bool(g.any())}


@dataclass
class DryRun:
    """Copies of a model, its optimizers and scheduler, bound to each other, and the step to run on them.

    If ``exact``, the model is in float64 and its functions run in float64. There is no dropout.
    """

    model: nn.Module
    optimizers: list[Optimizer]
    scheduler: Any
    loss_of: Loss
    step: StepFunction
    """The user's own, or a plain one."""
    several: bool = False
    """Whether the step takes a list of optimizers."""
    exact: bool = False
    rewritten: frozenset[str] = frozenset()
    """The parameters to which the model writes as it runs, see ``Trace``."""
    original: nn.Module | None = None
    """What the model was copied from, and the step must not use; None once a step has shown that."""

    def __post_init__(self) -> None:
        if self.exact:
            self.model.double()
        self.names = {id(p): n for n, p in self.model.named_parameters()}

    def run(
        self, batch: Any, *, scale: float = 1.0, seed: int = SEED, rates: Sequence[float] | None = None
    ) -> ObservedStep:
        """Run the step once. Its optimizers act only if ``rates`` are given, by group; () keeps their own.

        Gradients are multiplied by ``scale`` when backward passes them to the parameters: no clipping touches
        very small ones, and every clipping touches very large ones. Modes and buffers are restored. So are
        parameters if no optimizer acts, since the step or the model may write to them. Anything else that
        the step leaves behind, such as gradients and attributes, stays.

        Raises Unknown if the step uses the model that was copied.
        """
        begin_pass()
        seen = ObservedStep(self.own(batch))
        with ExitStack() as stack:
            stack.enter_context(same_modes(self.model))
            mode = Functions(exact=self.exact, dropout=False)
            buffers = [table_of_buffers(module) for module in self.model.modules()]
            drawn_from = generators_of_copies(self.model, *self.optimizers, self.scheduler)
            chance = same_random_state(seed, drawn_from)
            guards = (same_globals(), same(buffers, parameters=False), eager(), chance)
            for guard in guards:
                stack.enter_context(guard)
            if rates is None:
                stack.enter_context(_same_parameters(self.model))
            if self.exact:
                torch.set_default_dtype(torch.float64)
            self._watch_gradients(seen, stack, scale)
            self._watch_calls(seen, stack, rates)
            optimizer = self.optimizers if self.several else self.optimizers[0]
            noted = noted_step(exact=self.exact, updates=rates is not None, scale=scale, seed=seed)
            in_range = lookups_in_range(self.model)
            with noted, recomputing(self.model, mode), mode, self._apart_from_original(), in_range:
                try:
                    self.step(self.model, map_tensors(seen.batch, lambda _, x: x), optimizer, self.scheduler)
                except TypeError as error:
                    was_called = error.__traceback__ is not None and error.__traceback__.tb_next is not None
                    if was_called:
                        raise
                    # it takes other arguments
                    raise UserError(f"step(model, batch, optimizer, scheduler) raised {error}") from error
        return seen

    @contextmanager
    def _apart_from_original(self) -> Iterator[None]:
        if self.original is None:
            yield
            return
        # a step may log numbers of the original, so a tensor counts as used only if it may get a gradient
        with use_of(self.original, in_graph=True) as strayed, use_of(self.model) as used:
            yield
        if strayed.paths:
            raise Unknown(refusal_of(self.original, strayed, used))
        self.original = None

    def _trace(self, batch: Any, **changes: Any) -> Trace:
        fixed = {"dropout": False, "exact": self.exact, "seed": SEED, "rewritten": self.rewritten}
        return Trace(self.model, self.own(batch), self.loss_of, **fixed, **changes)

    def gradients(self, batch: Any, *, training: bool, **changes: Any) -> Weights:
        """Return samples of the gradients of the loss in the parameters that the optimizers hold."""
        for p in self.model.parameters():
            p.grad = None
        trained = {self.names.get(id(p)) for p in parameters_of(self.optimizers)}
        gradients = self._trace(batch, training=training, **changes).gradients
        return {n: sample(g) for n, g in gradients.items() if n in trained and g is not None}

    def losses(self, batch: Any, rates: Sequence[float]) -> list[float]:
        """Return the losses of a batch before each step and after the last, until it is learnt.

        The rates are reached in ten steps; without any, the loop's own apply.
        """
        trace = self._trace(batch, training=True)
        losses = [float(trace.loss)]
        while len(losses) <= TRIED and isfinite(losses[-1]) and not learnt(losses):
            ramp = min(1.0, len(losses) / LEARNT)
            self.run(batch, rates=[ramp * rate for rate in rates])
            losses.append(float(trace.again().loss))
        return losses

    def rounding(self, batch: Any) -> float:
        """Return the share of the gradient that changes when each parameter changes by one rounding."""
        gradients = self.gradients(batch, training=True)
        moved, eps = rounded(dict(self.model.named_parameters()), torch.Generator().manual_seed(0))
        gradients_there = self.gradients(batch, training=True, weights=moved)
        return 4 * fit(gradients_there, gradients).rest + eps

    def own(self, batch: Any) -> Any:
        """Return the batch with its own tensors, in the precision of the model."""
        return copied_batch(batch, torch.float64 if self.exact else None)

    def _watch_gradients(self, seen: ObservedStep, stack: ExitStack, scale: float) -> None:
        hooks = forward_hooks(
            dict(self.model.named_modules()), _PassWatch(self.model, seen).see, even_if_stopped=True
        )
        stack.enter_context(hooks)
        for p in self.model.parameters():
            if not p.requires_grad:
                continue
            if scale != 1:
                stack.callback(p.register_hook(lambda g: g * scale).remove)
            grown = p.register_post_accumulate_grad_hook(lambda q: seen.fresh.add(id(q)))
            stack.callback(grown.remove)

    def _watch_calls(self, seen: ObservedStep, stack: ExitStack, rates: Sequence[float] | None) -> None:
        """Note in which order the step calls its optimizers, its scheduler and what clips gradients."""
        for number, optimizer in enumerate(self.optimizers):
            replace_step(stack, optimizer, self._noted_step(seen, number, optimizer.step, rates))
        if self.scheduler is not None:
            replace(stack, self.scheduler, "step", _noted_schedule(seen, self.scheduler.step))
        replace_clipping(stack, partial(_noted_clip, seen))
        # the scaler is the user's own, and this step is not to change its scale
        replace(stack, torch.amp.GradScaler, "update", lambda scaler, *_: forget_unscaled(scaler))

    def _noted_step(
        self, seen: ObservedStep, number: int, real: Callable[..., Any], rates: Sequence[float] | None
    ) -> Callable[..., Any]:
        """Return what an optimizer calls in place of its step: without ``rates`` it only looks."""

        def stepped(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if rates is None:
                run_closure(args[0] if args else kwargs.get("closure"))
            if number not in seen.calls:
                self._look(seen, optimizer)
            seen.calls.append(number)
            if rates is None:
                return None
            if rates:  # by group, of all optimizers
                for group, rate in zip(groups_of(self.optimizers), rates, strict=True):
                    group["lr"] = rate
            return real(*args, **kwargs)

        return stepped

    def _look(self, seen: ObservedStep, optimizer: Optimizer) -> None:
        """Note the gradients and weights that an optimizer finds, and what became of clipped gradients."""
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by it in its step
        unscale = 1.0 if scale is None else 1 / float(scale)
        for p in parameters_of([optimizer]):
            if p.grad is not None and id(p) in self.names:
                seen.gradients[self.names[id(p)]] = sample(p.grad) * unscale
                seen.weights[self.names[id(p)]] = sample(p)
        if seen.clipped:
            return
        parameters = {id(p): p for p in self.model.parameters()}
        for held, left, _ in reversed(seen.clips):
            norm = norm_of(parameters[number] for number in held if number in parameters)
            is_last_of_these = not seen.clipped & held
            if not seen.undone and is_last_of_these and abs(norm - left) > 1e-3 * left:
                seen.undone = left, norm
            seen.clipped |= held
            seen.late |= bool(held & seen.fresh)


def _noted_schedule(seen: ObservedStep, real: Callable[..., Any]) -> Callable[..., Any]:
    def scheduled(*args: Any, **kwargs: Any) -> Any:
        seen.calls.append("scheduler")
        return real(*args, **kwargs)

    return scheduled


@contextmanager
def _noted_clip(seen: ObservedStep, call: Clip) -> Iterator[None]:
    share = call.share
    yield
    held, left = frozenset(map(id, call.parameters)), norm_of(call.parameters)
    # also if it is called without parameters: then it clips nothing, which is what a check must tell
    seen.clips.append(NotedClip(held, left, left / share))
    seen.fresh -= held


@contextmanager
def _same_parameters(model: nn.Module) -> Iterator[None]:
    """Put back the values of a model's parameters after this block."""
    before = [(p, p.detach().clone()) for p in model.parameters()]
    try:
        yield
    finally:
        for p, values in before:
            if not torch.equal(p, values):
                p.data.copy_(values)


class _PassWatch:
    """Notes the passes with a gradient in a step: a pass begins where the step calls the module again that it
    called first, which is the model or, as in a ``training_step``, a part of it.
    """

    def __init__(self, model: nn.Module, seen: ObservedStep) -> None:
        self._names = [name for name, _ in model.named_parameters()]
        self._parameters = list(model.parameters())
        self._versions = [version_of(p) for p in self._parameters]
        self._at_first: list[int] = []
        """The versions when the first pass began."""
        self._kind = self._parameters[0].device.type
        self._model, self._seen = model, seen
        self._inside: list[str] = []
        self._first: str | None = None

    def see(self, path: str, side: Side, _: Any) -> None:
        """Take note of a module that is entered or left."""
        if is_in_backward():  # a backward pass runs it again, as checkpoints do
            return
        if side == "output":
            self._inside.pop()
            return
        outermost = not self._inside
        self._inside.append(path)
        if not torch.is_grad_enabled():
            return
        if outermost:
            self._first = path if self._first is None else self._first
            versions = [version_of(p) for p in self._parameters]
            self._seen.moved = versions != self._versions
            self._at_first = self._at_first or versions
            pairs = zip(self._names, versions, self._at_first, strict=True)
            self._seen.between = [name for name, now, then in pairs if now != then]
            if path == self._first:
                self._seen.training.append(self._model.training)
                self._seen.cast = None
        if torch.is_autocast_enabled(self._kind):  # begun by the step, or by the forward of the model itself
            self._seen.cast = torch.get_autocast_dtype(self._kind)


def learnt(losses: Sequence[float]) -> bool:
    """Return whether the last losses stay below the first."""
    floor = losses[0] - 1e-6 * abs(losses[0])
    return len(losses) > LEARNT and all(x < floor for x in losses[-LEARNT:])


def written(before: Any, after: Any) -> str | None:
    """Return the entry of a batch that a step wrote to, by more than rounding, or None."""
    earlier = dict(tensors_in(before))
    for place, x in tensors_in(after):
        allowed = torch.finfo(torch.float32).eps if x.is_floating_point() else 0.0
        if distance(x, earlier[place]) > allowed:
            return ".".join(map(str, place)) or "step"
    return None


def sample(x: Tensor) -> Tensor:
    """Return evenly spaced entries of a tensor, in float64; all of them if they are few."""
    flat = (x.to_dense() if x.is_sparse else x).detach().reshape(-1)
    apart = flat.numel() // SAMPLED | 1  # odd, so that not all of them are in a few columns of a matrix
    return flat[::apart].to(torch.float64, copy=True)


def parameters_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return every parameter that the optimizers hold, in order."""
    return [p for group in groups_of(optimizers) for p in group["params"]]


def groups_of(optimizers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    """Return every group of the optimizers, in order."""
    return [group for o in optimizers for group in o.param_groups]


class Fit(NamedTuple):
    """Gradients as a factor times others, and the share that this leaves unexplained."""

    factor: float
    rest: float

    @property
    def apart(self) -> float:
        """How far these gradients are from the others: the unexplained share, or the factor's distance from 1
        if that is larger.
        """
        return max(self.rest, abs(self.factor - 1))


def fit(gradients: Weights, want: Weights, scale: float = 1.0) -> Fit:
    """Return the factor k in gradients / scale = k · want and what it leaves; 1 and 0 if both are zero. Those
    of single parameters that are 0 may be missing.
    """
    if not any(bool(g.any()) for g in (*gradients.values(), *want.values())):
        return Fit(1.0, 0.0)
    zeros = {n: torch.zeros_like(g) for n, g in {**gradients, **want}.items()}
    g, w = (_as_one_vector({**zeros, **some}) for some in (gradients, want))
    k = float(g @ w) / scale / max(float(w @ w), 1e-300)
    return Fit(k, float((g - k * scale * w).norm()) / max(float(g.norm()), 1e-300))


def _as_one_vector(gradients: Weights) -> Tensor:
    return torch.cat([g.to("cpu", torch.float64) for g in gradients.values()])


def splits(trace: Trace, facts: Facts, rounding: float) -> bool:
    """Return whether the loss of the whole batch is the mean or the sum of its rows' losses; each row counts
    as often as it has targets, or once if these are unknown.
    """
    try:
        counts = facts.targets.counted.reshape(facts.rows, -1).sum(1).tolist()
    except (Unknown, RuntimeError):
        counts = [1] * facts.rows
    losses = list[float]()
    for row, count in enumerate(counts):  # a row without targets has no mean over them
        batch = facts.with_rows(torch.tensor([row]))
        losses.append(float(trace.again(batch=batch).loss) if count else 0.0)
    mean = sum(count * loss for count, loss in zip(counts, losses, strict=True)) / sum(counts)
    return any(abs(float(trace.loss) - x) <= rounding * abs(x) for x in (mean, sum(losses)))
