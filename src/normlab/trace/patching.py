"""Put something else in the place of a function while a step is looked at, and the function back afterwards.

Every instrument has to see when an optimizer steps, when gradients are clipped and in which mode a model is,
and for each there is one way to do it here. What the instruments do then is their own, and so is how long it
lasts:

- ``setups.patches`` records the whole script, and ``setups.held_back`` leaves the steps of its optimizers
  out.
- ``trace.dry_run`` notes in which order copies of optimizers, the scheduler and clipping are called in one
  step.
- ``trials.training`` gives copies of optimizers other rates, and never puts back what belongs to a copy
  alone.
- ``watching.loop`` shows clipping to several watches at once, until the last of them ends, and
  ``watching.training`` finds the first call in training.
- ``parallel.plans`` and ``parallel.devices`` replace functions of torch in every module that has imported
  them, for as long as their process lives: they put nothing back.
- ``checks``, ``setups.huggingface`` and ``trace.restore`` put a model in another mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from types import MethodType
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normlab.private_torch import clip_by_norm, replace_clip_by_norm

_NOTHING: Final = object()


def replace(stack: ExitStack, owner: Any, name: str, new: Any) -> None:
    """Set an attribute of a module, a class or an object; the stack puts the old one back when it is closed.

    The old one is read as it is defined, so that a class method is not bound here. An object that had no
    attribute of its own under this name, and shows that of its class, has none afterwards.
    """
    stack.callback(_put_back, owner, name, vars(owner).get(name, _NOTHING))
    setattr(owner, name, new)


def _put_back(owner: Any, name: str, earlier: Any) -> None:
    if earlier is _NOTHING:
        delattr(owner, name)
    else:
        setattr(owner, name, earlier)


# --------------------------------------------------------------------------------------- the optimizer's step


def replace_step(stack: ExitStack, optimizer: Optimizer, step: Callable[..., Any]) -> None:
    """Let one optimizer call ``step(optimizer, …)`` in place of its own ``step``.

    It is bound as a method: torch's schedules take ``step.__func__`` to count the steps.
    """
    replace(stack, optimizer, "step", MethodType(wraps(optimizer.step)(step), optimizer))


def run_closure(closure: Any) -> Any:
    """Do what an optimizer does before its step with the function that it was given: it computes the loss and
    its gradient, as in Lightning. Returns the loss, None without a function.
    """
    if not callable(closure):
        return None
    with torch.enable_grad():
        return closure()


# ------------------------------------------------------------------------------------------ gradient clipping


class Clip(NamedTuple):
    """One call that clips gradients by their norm."""

    parameters: list[Tensor]
    largest_norm: float | Tensor
    norm: Tensor
    """The norm that all gradients have together, by which they are clipped."""

    @property
    def rounding(self) -> float:
        """How far, relatively, the norm may be off: torch computes it in the type of the gradients, which may
        be a low precision.
        """
        return max(4 * torch.finfo(self.norm.dtype).eps, 1e-3)

    @property
    def norm_type(self) -> float:
        """The p of the p-norm that is clipped: infinity or 1 if that is the norm of these gradients, and 2
        otherwise.
        """
        for p in (2.0, math.inf, 1.0):
            if math.isclose(norm_of(self.parameters, p), float(self.norm), rel_tol=self.rounding):
                return p
        return 2.0

    @property
    def share(self) -> float:
        """The share that these gradients have in the norm: below 1 if it is that of further ones, too, as
        where a script clips part after part by the norm of all.
        """
        norm_of_these, norm_of_all = norm_of(self.parameters, self.norm_type), float(self.norm)
        is_smaller = 0 < norm_of_these < norm_of_all * (1 - self.rounding) < math.inf
        return norm_of_these / norm_of_all if is_smaller else 1.0


AroundClip: TypeAlias = Callable[[Clip], AbstractContextManager[Any]]
"""Makes the context in which gradients are clipped."""


def clipping(clip: Callable[..., Any], around: AroundClip) -> Callable[..., Any]:
    """Return what stands in the place of torch's ``clip``, and runs each call inside of what ``around``
    makes.
    """

    @wraps(clip)
    def clipped(parameters: Any, max_norm: Any, total_norm: Tensor, *args: Any, **kwargs: Any) -> Any:
        # a generator could be read only once, and both sides want to
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        with around(Clip(tensors, max_norm, total_norm)):
            return clip(tensors, max_norm, total_norm, *args, **kwargs)

    return clipped


def replace_clipping(stack: ExitStack, around: AroundClip) -> None:
    """Clip by norm inside of what ``around`` makes, whatever name the function was called by."""
    clip = clip_by_norm()
    stack.callback(replace_clip_by_norm, clip)
    replace_clip_by_norm(clipping(clip, around))


def norm_of(parameters: Iterable[Tensor], p: float = 2.0) -> float:
    """Return the p-norm that the gradients of parameters have together."""
    norms = [float(x.grad.double().norm(p)) for x in parameters if x.grad is not None]
    if math.isinf(p):
        return max(norms, default=0.0)
    return sum(norm**p for norm in norms) ** (1 / p)


# ------------------------------------------------------------------------------------ training and evaluation


@contextmanager
def same_modes(model: nn.Module) -> Iterator[None]:
    """Restore the mode of every module after this block."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, before in modes:
            if module.training is not before:
                module.training = before


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model in one mode inside this block, then restore the mode of every module."""
    with same_modes(model):
        try:
            # not if it is in that mode: ``train`` may be the user's own, and do more
            if any(module.training is not training for module in model.modules()):
                model.train(training)
        except RecursionError:  # a module that holds one that holds it
            for module in model.modules():
                module.training = training
        yield
