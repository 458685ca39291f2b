"""Watch whatever trains in a block, such as a script or a trainer, from its first step on."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from normlab.setups.optimizers import parameters_of
from normlab.setups.together import Together, common_module
from normlab.trace.patching import replace
from normlab.watching.watcher import Watch


def follow(watch: Watch) -> Training:
    """Let a watch attach to what trains from now on: to the model and its optimizers at the first call in
    training, so that the first step is watched whole. What is patched for it is put back when the watch is
    closed.
    """
    training = Training(watch)
    for owner, name, new in training.patches():
        replace(watch.until_closed, owner, name, new)
    return training


class Training:
    """What is seen of a training: its optimizers, its model, and the losses of its backward passes.

    The loss of a step is the sum of what was differentiated since gradients were zeroed: the function whose
    gradient the optimizer gets, whatever a script divides its micro-batches by.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        # by type, since isinstance asks objects for a __class__, which some compute
        self._optimizers = [x for x in gc.get_objects() if issubclass(type(x), Optimizer)]
        self._is_attached = False
        self._loss: Tensor | None = None
        self._scaled: tuple[Any, Any] = (None, None)
        """What a ``GradScaler`` returned last, and what it had scaled."""
        self._depth = 0
        """Calls of ``backward`` in progress: torch's own calls another."""

    def patches(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield what is patched: owner, name, and what stands there instead."""
        for owner, name, instead_of in (
            (nn.Module, "__call__", self._module_call),
            (Optimizer, "__init__", self._make_optimizer),
            (Optimizer, "zero_grad", self._zero),
            (torch.amp.GradScaler, "scale", self._scale),
            (Tensor, "backward", self._backward),
            (torch.autograd, "backward", self._backward),
        ):
            yield owner, name, instead_of(vars(owner)[name])

    def _module_call(self, call: Any) -> Any:
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self._is_attached and module.training and torch.is_grad_enabled():
                self._attach(module, call)
            return call(module, *args, **kwargs)

        return called

    def _attach(self, module: nn.Module, call: Any) -> None:
        """Attach the watch, if an optimizer holds parameters of this module."""
        held = {id(p) for p in module.parameters()}
        optimizers = [o for o in self._optimizers if any(id(p) in held for p in parameters_of(o))]
        if not optimizers:
            return
        self._is_attached = True
        nn.Module.__call__ = call  # type: ignore[method-assign]  # other calls need not be seen
        self._watch.start(0)
        self._watch.attach(_model_of(module, optimizers), optimizers)
        self._watch.count_steps()
        for optimizer in optimizers:  # after the watch's own hooks, which end the step before
            optimizer.register_step_post_hook(lambda *_: self._give_loss())

    def _make_optimizer(self, make: Any) -> Any:
        @wraps(make)
        def made(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            self._optimizers.append(optimizer)

        return made

    def _zero(self, zero: Any) -> Any:
        @wraps(zero)
        def zeroed(*args: Any, **kwargs: Any) -> None:
            self._loss = None
            zero(*args, **kwargs)

        return zeroed

    def _scale(self, scale: Any) -> Any:
        @wraps(scale)
        def scaled(scaler: Any, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            self._scaled = result, outputs
            return result

        return scaled

    def _backward(self, backward: Any) -> Any:
        @wraps(backward)
        def passed(loss: Any, *args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                return backward(loss, *args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth and isinstance(loss, Tensor):
                    scaled, unscaled = self._scaled
                    self._add(unscaled if loss is scaled else loss)

        return passed

    def _add(self, loss: Tensor) -> None:
        if loss.numel() == 1:
            value = loss.detach().reshape(())
            self._loss = value if self._loss is None else self._loss + value

    def _give_loss(self) -> None:
        if self._loss is not None:
            self._watch.loss(self._loss)
            self._loss = None

    @property
    def is_attached(self) -> bool:
        """Whether anything was watched."""
        return self._is_attached


def _model_of(module: nn.Module, optimizers: list[Optimizer]) -> nn.Module:
    """Return the smallest module alive that holds a called module and all that these optimizers train; one
    made for them if there is none.
    """
    parameters = [p for o in optimizers for p in parameters_of(o) if isinstance(p, nn.Parameter)]
    model = common_module([module], parameters, {})
    if not isinstance(model, Together):
        return model
    trained = {id(p) for p in parameters}
    alive = [m for m in gc.get_objects() if issubclass(type(m), nn.Module) and m is not model]
    holders = [m for m in alive if any(id(p) in trained for p in m.parameters())]
    inner = {id(part) for m in holders for part in m.modules() if part is not m}
    outermost = [m for m in holders if id(m) not in inner]
    return common_module(outermost, parameters, {})
