"""The functions of torch that read parameters, and what they would return at other parameter values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from normlab.trace.record import FunctionMode, writes
from normlab.trace.step import Weights
from normlab.trace.tensors import map_tensors, tensors_in


class ParameterReading(NamedTuple):
    """A function of a parameter and something else: a product with an input, a lookup, a norm's gain."""

    parameter: str
    nth: int
    """How many readings of the parameter come before it in the pass."""
    function: str
    result: Tensor
    change: Tensor
    """The result minus what the function returns if only this parameter has its other value."""


class Readings(FunctionMode):
    """Passes each reading of the parameters in ``others`` (other values by path) to ``see``.

    The result of a function of parameters alone, such as a cast, a view or a product of two of them, counts
    as the first of these; the same function gives its other value. Readings in ``instead``, pairs of a
    parameter and its ``nth``, return what they would at the other values.
    """

    def __init__(
        self,
        model: nn.Module,
        others: Weights,
        see: Callable[[ParameterReading], None] | None,
        instead: frozenset[tuple[str, int]] = frozenset(),
    ) -> None:
        super().__init__()
        named = dict(model.named_parameters())
        self._known: dict[int, tuple[str, Tensor, Tensor]] = {
            id(p): (n, p, others[n].detach()) for n, p in named.items() if n in others
        }
        self._see, self._instead, self._counts = see, instead, Counter[str]()

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        given = [x for _, x in tensors_in((args, kwargs))]
        known = {id(x): x for x in given if id(x) in self._known}
        if not known or writes(func, kwargs) or kwargs.get("out") is not None:
            return result  # a second call would write again

        def other(*ids: int) -> Any:
            own, named = map_tensors(
                (args, kwargs), lambda _, x: self._known[id(x)][2] if id(x) in ids else x
            )
            return func(*own, **named)

        if all(id(x) in known for x in given):
            if made := [x for _, x in tensors_in(result) if id(x) not in self._known]:
                first = self._known[next(iter(known))][0]
                twins = [x for _, x in tensors_in(other(*known))]
                self._known |= {id(x): (first, x, y) for x, y in zip(made, twins, strict=False)}
        elif isinstance(result, Tensor) and result.is_floating_point():
            instead = list[int]()
            for i in known:
                parameter = self._known[i][0]
                nth = self._counts[parameter]
                self._counts[parameter] += 1
                if self._see is not None:
                    self._see(ParameterReading(parameter, nth, name, result, result - other(i)))
                if (parameter, nth) in self._instead:
                    instead.append(i)
            return other(*instead) if instead else result
        return result
