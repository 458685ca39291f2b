"""Take apart a loss that is a sum: each of its losses that comes from passes of its own is a step to look at.

What a check knows of a step, such as its tokens and targets, is that of one pass of the model. Where a script
adds the loss of another pass, such as one on an older text or a second task, that one is checked as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from normlab.setups.arguments import Number
from normlab.setups.flow import Flow
from normlab.setups.recording import RecordedCall, ancestors, sources

ADDING: Final = ("add", "__add__", "__radd__", "__iadd__", "add_")
SCALING: Final = ("mul", "__mul__", "__rmul__", "div", "__truediv__", "true_divide", "multiply", "divide")


def losses_of_own_passes(flow: Flow) -> list[Flow]:
    """Return a flow for each loss that a flow adds up, none if all of them share calls of the model.

    What a loss is multiplied by on its way into the sum is left out, where that is a plain number.
    """
    parts = [_part(flow, _unscaled(flow, term)) for term in _addends(flow, flow.loss)]
    passes = [_passes(part) for part in parts]
    with_passes = [(part, own) for part, own in zip(parts, passes, strict=True) if own]
    return [part for part, own in with_passes if any(own.isdisjoint(others) for _, others in with_passes)]


def _addends(flow: Flow, number: Number) -> list[Number]:
    """Return the values whose sum a value is; itself, if it is no sum."""
    call = _maker(flow.calls, number)
    if call is None or call.name not in ADDING or len(call.arguments.leaves) != 2:  # a third is a factor
        return [number]
    return [term for operand in call.arguments.references for term in _addends(flow, operand)]


def _unscaled(flow: Flow, number: Number) -> Number:
    """Return the value that was multiplied by plain numbers to make this one."""
    call = _maker(flow.calls, number)
    while call is not None and call.name in SCALING and len(call.arguments.references) == 1:
        (number,) = call.arguments.references
        call = _maker(flow.calls, number)
    return number


def _maker(calls: Sequence[RecordedCall], number: Number) -> RecordedCall | None:
    """Return the function that made a value; None if it is data, or a module's output."""
    made_by = next((call for call in calls if number in call.results), None)
    return None if made_by is None or made_by.module is not None else made_by


def _part(flow: Flow, loss: Number) -> Flow:
    """Return the part of a flow that leads to another loss."""
    calls = tuple(ancestors(flow.calls, loss))
    read = sources(calls, [loss])
    leaves = {number: name for number, name in flow.leaves.items() if number in read}
    values = read | flow.tensors.keys() | flow.parameters.keys()
    escapes = tuple(escape for escape in flow.escapes if values.issuperset(escape.arguments.references))
    return replace(flow, calls=calls, loss=loss, leaves=leaves, escapes=escapes, factor=1.0, scale=1.0)


def _passes(flow: Flow) -> set[int]:
    """Return the calls of the model's modules that take part in a flow with gradients, by ``id``."""
    return {
        id(call) for call in flow.calls if id(call.module) in flow.modules and call.surroundings.gradients
    }
