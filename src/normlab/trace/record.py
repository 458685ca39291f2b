"""Record what flows through the modules of somebody else's step, and its gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from normlab.errors import UserError
from normlab.private_torch import is_in_backward
from normlab.trace.tensors import Side, Tap, activations, forward_hooks, unwrap

ROOM: Final = 256
"""How many hooks on tensors are held before those of dead tensors are released."""


class Want(NamedTuple):
    """What to record: a tensor that enters or leaves the modules whose path matches a glob, or its gradient.

    ``keep`` runs inside the hook, without gradients: it returns a statistic, a sample of rows, or the tensor
    itself. ``first`` takes only the first tensor of a call.
    """

    module: str
    side: Side = "output"
    signal: Literal["value", "grad"] = "value"
    keep: Callable[[Tensor], Any] = Tensor.detach
    first: bool = False


class Seen(NamedTuple):
    """One recorded value."""

    tap: Tap
    want: Want
    value: Any
    nth: int = 0
    """How many tensors of the call come before this one."""


def matching(modules: Mapping[str, nn.Module], glob: str) -> list[str]:
    """Return the paths that a path or a glob names. Raises UserError if there are none."""
    matched = [glob] if glob in modules else [path for path in modules if fnmatchcase(path, glob)]
    if not matched:
        some = ", ".join([path for path in modules if path][:8])
        raise UserError(f"no module matches {glob!r}; the paths begin {some}, …")
    return matched


@contextmanager
def record(
    model: nn.Module, wants: Iterable[Want], *, on_error: Callable[[Exception], None] | None = None
) -> Iterator[list[Seen]]:
    """Fill the list, in order, with what somebody else's step shows. Nothing waits for the device.

    What is taken out of the list is released. A failure raises where the model runs, unless ``on_error``
    takes it. Raises UserError for a want that matches no module.

    >>> from normlab.trace.record import Want
    >>> with normlab.record(model, [Want("decoder.end", keep=torch.linalg.vector_norm)]) as seen:
    ...     _ = loss(model, batch)
    >>> [(one.tap.module, one.value > 0) for one in seen]
    [('decoder.end', tensor(True))]
    """
    modules = dict(unwrap(model).named_modules())
    wanted: dict[str, list[Want]] = {}
    for want in wants:
        for path in matching(modules, want.module):
            wanted.setdefault(path, []).append(want)
    hooks = _Hooks(wanted, on_error)
    try:
        with forward_hooks({path: modules[path] for path in modules if path in wanted}, hooks.see):
            yield hooks.seen
    finally:
        for handle in hooks.handles:
            handle.remove()


class _Hooks:
    """Applies wants to what modules show, and holds the hooks that wait for gradients."""

    def __init__(self, wants: dict[str, list[Want]], on_error: Callable[[Exception], None] | None) -> None:
        self._wants, self._on_error = wants, on_error
        self._calls = Counter[tuple[str, Side]]()
        self.handles: list[Any] = []
        self._room = ROOM
        self.seen: list[Seen] = []

    def see(self, path: str, side: Side, values: Any) -> None:
        again = is_in_backward()  # a checkpointed layer runs again in backward
        call = self._calls[path, side]
        self._calls[path, side] += not again
        with self._caught():
            for want in self._wants[path]:
                if want.side == side and not (again and (want.signal == "value" or side == "input")):
                    self._apply(want, Tap(path, side, call=call), values)

    def _apply(self, want: Want, where: Tap, values: Any) -> None:
        for nth, (place, x) in enumerate(activations(values)):
            tap = Tap(where.module, where.side, place, where.call)

            def add(value: Tensor, tap: Tap = tap, nth: int = nth) -> None:
                with self._caught(), torch.no_grad():
                    self.seen.append(Seen(tap, want, want.keep(value), nth))

            if want.signal == "value":
                add(x)
            elif x.requires_grad:
                self._await(x, add)
            if want.first:
                return

    def _await(self, x: Tensor, add: Callable[[Tensor], None]) -> None:
        if len(self.handles) >= self._room:
            self.handles = [handle for handle in self.handles if handle.hooks_dict_ref() is not None]
            self._room = ROOM + 2 * len(self.handles)
        self.handles.append(x.register_hook(add))

    @contextmanager
    def _caught(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self._on_error is None:
                raise
            self._on_error(error)
