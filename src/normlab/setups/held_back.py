"""Hold the steps of optimizers back, so that a script goes on with the weights that it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.optim import Optimizer

from normlab.setups.arguments import flattened
from normlab.trace.patching import replace_step, run_closure


class HeldBack:
    """Optimizers whose ``step`` calls ``leave_out`` in place of what it does."""

    def __init__(self, leave_out: Callable[[Optimizer], None]) -> None:
        self._leave_out = leave_out
        self._held: list[tuple[Optimizer, ExitStack]] = []
        """Each with what puts its ``step`` back."""
        self._active = True

    def add(self, optimizer: Optimizer) -> None:
        """Hold back the steps of an optimizer."""
        real = optimizer.step

        def step(held: Optimizer, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not self._active:
                return real(*args, **kwargs) if closure is None else real(closure, *args, **kwargs)
            loss = run_closure(closure)
            if self._holds_others(held):
                return real(*args, **kwargs)  # the steps of those come here, each by itself
            self._leave_out(held)
            return loss

        until_released = ExitStack()
        replace_step(until_released, optimizer, step)
        self._held.append((optimizer, until_released))

    def _holds_others(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer is a container of others, whose steps make up its own."""
        inside = [x for value in vars(optimizer).values() for x in flattened(value)[0]]
        others = [other for other, _ in self._held if other is not optimizer]
        return any(x is other for x in inside for other in others)

    @contextmanager
    def stepping_freely(self, optimizer: Any) -> Iterator[None]:
        """Put back the real ``step`` of an optimizer inside this block, if it is held back."""
        was_held = [pair for pair in self._held if pair[0] is optimizer]
        for pair in was_held:
            self._held.remove(pair)
            pair[1].close()
        try:
            yield
        finally:
            if was_held:
                self.add(optimizer)

    def release(self) -> None:
        """Put back the ``step`` of every optimizer; one that somebody holds is the real one from now on."""
        self._active = False
        for _, until_released in self._held:
            until_released.close()
        self._held.clear()
