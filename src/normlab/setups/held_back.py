"""Hold the steps of optimizers back, so that a script goes on with the weights that it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from normlab.setups.arguments import flattened


class HeldBack:
    """Optimizers whose ``step`` calls ``leave_out`` in place of what it does."""

    def __init__(self, leave_out: Callable[[Optimizer], None]) -> None:
        self._leave_out = leave_out
        self._earlier_steps: list[tuple[Optimizer, Any]] = []
        """Each with the ``step`` that its instance had before, if any."""
        self._active = True

    def add(self, optimizer: Optimizer) -> None:
        """Hold back the steps of an optimizer."""
        earlier, real = vars(optimizer).get("step"), optimizer.step

        def step(held: Optimizer, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not self._active:
                return real(*args, **kwargs) if closure is None else real(closure, *args, **kwargs)
            loss = None
            if callable(closure):  # computes the loss and its gradient, as Lightning has it
                with torch.enable_grad():
                    loss = closure()
            if self._holds_others(held):
                return real(*args, **kwargs)  # and their own steps come here
            self._leave_out(held)
            return loss

        self._earlier_steps.append((optimizer, earlier))
        optimizer.step = MethodType(wraps(real)(step), optimizer)  # type: ignore[method-assign]

    def _holds_others(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer is a container of others, whose steps are its own."""
        held = [x for value in vars(optimizer).values() for x in flattened(value)[0]]
        others = [other for other, _ in self._earlier_steps if other is not optimizer]
        return any(x is other for x in held for other in others)

    @contextmanager
    def stepping_freely(self, optimizer: Any) -> Iterator[None]:
        """Put back the real ``step`` of an optimizer inside this block, if it is held back."""
        held = [pair for pair in self._earlier_steps if pair[0] is optimizer]
        for pair in held:
            _put_back(*pair)
            self._earlier_steps.remove(pair)
        try:
            yield
        finally:
            if held:
                self.add(optimizer)

    def release(self) -> None:
        """Put back the ``step`` of every optimizer; one that somebody holds is the real one from now on."""
        self._active = False
        for optimizer, earlier in self._earlier_steps:
            _put_back(optimizer, earlier)
        self._earlier_steps.clear()


def _put_back(optimizer: Optimizer, earlier: Any) -> None:
    if earlier is None:
        del optimizer.step
    else:
        optimizer.step = earlier  # type: ignore[method-assign]
