"""Parameters that join the stream as they are: class and register tokens, prompts, tables of positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from normlab.trace.functions import FunctionCall

APPENDED: Final = ("cat", "concat", "concatenate")
ADDED: Final = ("add", "add_", "where")
"""Functions by which a parameter is added to the stream, or takes the place of some of its tokens."""
JOINING: Final = (*APPENDED, *ADDED)
"""The functions whose calls a pass must record for ``joined``."""
PASSIVE: Final = (
    "Alias", "Clone", "Expand", "Permute", "Repeat", "Reshape", "Select", "Slice", "Squeeze", "ToCopy",
    "Transpose", "Unsqueeze", "UnsafeView", "View",
)  # fmt: skip
"""Beginnings of the names of a graph's nodes that only lay out, copy or cast a tensor."""


class Joined(NamedTuple):
    """How a parameter joins the stream."""

    function: str
    module: str
    """The module that was running."""

    @property
    def is_appended(self) -> bool:
        """Whether it becomes tokens of its own."""
        return self.function in APPENDED


def joined(
    calls: Sequence[FunctionCall], parameters: Mapping[str, nn.Parameter], rows: int, widths: set[int]
) -> dict[str, Joined]:
    """Return how each parameter joins the stream, by its path, for those that the calls of a pass append or
    add to it.

    What is added to other parameters first, such as the position of a class token, joins with them.

    Args:
        calls: The calls of ``JOINING``.
        parameters: The model's, by path.
        rows: B, of a stream `[B, T, D]`.
        widths: What D may be.
    """
    names = {id(p): name for name, p in parameters.items()}
    joined_parameters: dict[str, Joined] = {}
    for call in calls:
        result = call.result
        if call.name not in JOINING or not isinstance(result, Tensor) or result.ndim < 3:
            continue
        if result.shape[-1] not in widths or rows not in result.shape[:2]:
            continue
        sources = [sources_of(part) for part in _parts(call.args)]
        if all(sources):  # parameters alone, whatever the batch holds
            continue
        for parameters_of_part in sources:
            for p in parameters_of_part:
                if id(p) in names and p.ndim > 1 and p.shape[-1] == result.shape[-1]:
                    joined_parameters.setdefault(names[id(p)], Joined(call.name, call.module))
    return joined_parameters


def _parts(args: Sequence[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments, which may be in a list."""
    for value in args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _parts(value)


def sources_of(x: Tensor) -> list[Tensor]:
    """Return the parameters that a tensor is a layout of, or the sum of; none if it is anything else."""
    if x.grad_fn is None:
        return [x] if isinstance(x, nn.Parameter) else []
    sources: list[Tensor] = []
    waiting: list[Any] = [x.grad_fn]
    while waiting:
        node = waiting.pop()
        kind = type(node).__name__
        if kind == "AccumulateGrad":
            sources.append(node.variable)
        elif kind.startswith((*PASSIVE, "AddBackward")):
            behind = [following for following, _ in node.next_functions]
            if None in behind:  # a constant is added
                return []
            waiting += behind
        else:
            return []
    return sources
