"""Find the flow in a recorded micro-batch: the model that it trains, its batch and its loss.

A recording only holds numbered values and calls. Which tensors are the batch, and which are constants,
parameters or parts of another model, follows from how they are used.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from normlab.setups.arguments import Number
from normlab.setups.batch import BatchBeginning, named_leaves
from normlab.setups.flow import Flow, NotRepeatableError
from normlab.setups.outlines import Outline
from normlab.setups.recording import Escape, MicroBatch, RecordedCall, ancestors, sources
from normlab.setups.together import common_module
from normlab.trace.tensors import unwrap

PROBES: Final = (1.0, 2.0, -4.0, 0.0, 2.0**100)
"""Numbers, each a multiple of the first, that show whether a call multiplies its argument by a constant. The
largest is above any bound to which a script may clamp its loss.
"""


def flow_of(
    micro_batch: MicroBatch,
    held: Collection[int],
    not_repeated: Sequence[RecordedCall] = (),
    model: nn.Module | None = None,
    scalings: int | None = None,
) -> Flow:
    """Return the flow that leads to the loss of a micro-batch, before the script scaled it for its backward
    pass.

    Its model is what the step trains: modules that no optimizer of the step holds and that get no gradient,
    such as a frozen reference or a teacher, are functions.

    Args:
        micro_batch: What was recorded.
        held: The parameters, by ``id``, that the optimizers of the step hold.
        not_repeated: Calls whose results are not computed again: the batch begins with them.
        model: That of another micro-batch, if it is known already.
        scalings: How many of the last calls scale the loss, if not all that multiply it by a number do.

    Raises NotRepeatableError if no module that is trained takes part in it, or no batch leads to the loss.
    """
    scaling = scaling_calls(micro_batch)[:scalings]
    loss = scaling[-1][0].reads[0] if scaling else micro_batch.loss
    calls = ancestors(micro_batch.calls, loss)
    trained = {*held, *micro_batch.gradients}
    trained_modules = _trained_modules(calls, trained)
    not_computed = {n: micro_batch.tensors[n] for n in _not_computed(calls)}
    if model is None:
        parameters_read = [x for x in not_computed.values() if isinstance(x, nn.Parameter)]
        # one that could be trained, but is not, is somebody else's, such as the head of a teacher
        of_model = [x for x in parameters_read if not x.requires_grad or id(x) in trained]
        model = common_module(trained_modules, of_model, micro_batch.module_names)
    modules = _paths_of_modules(model, calls)
    names = {id(x): path for path, x in [*model.named_buffers(), *model.named_parameters()]}
    parameters = {n: names[id(x)] for n, x in not_computed.items() if id(x) in names}
    beginning = BatchBeginning(calls, parameters, modules, micro_batch, not_repeated)
    calls = ancestors(beginning.kept, loss)
    read = _not_computed(calls) - parameters.keys()
    if read.isdisjoint(beginning.begins):
        raise NotRepeatableError(
            "no batch leads to the loss that the script differentiates; hand it to the model, as in model(x)"
        )
    flow = Flow(
        model=model,
        calls=tuple(calls),
        loss=loss,
        modules=modules,
        parameters={n: path for n, path in parameters.items() if any(n in call.reads for call in calls)},
        leaves=named_leaves([n for n in beginning.begins if n in read], calls, micro_batch.names),
        tensors={n: micro_batch.value(n) for n in read},
        factor=math.prod(factor for _, factor in scaling),
        scale=micro_batch.scale,
        written=_written(micro_batch, calls, read),
    )
    return with_escapes(flow, micro_batch)


def _paths_of_modules(model: nn.Module, calls: Iterable[RecordedCall]) -> dict[int, str]:
    """Return the path in the model of each module that is called, by its ``id``; a wrapper has the path of
    what it wraps. Modules that are no part of the model are left out.
    """
    # reversed, so that of several paths to one module the first wins
    paths = {id(module): path for path, module in reversed([*model.named_modules()])}
    called = [call.module for call in calls if call.module is not None]
    return {id(module): paths[id(unwrap(module))] for module in called if id(unwrap(module)) in paths}


def _trained_modules(calls: Iterable[RecordedCall], trained: Collection[int]) -> list[nn.Module]:
    """Return the modules that are called with gradients and hold a parameter that is trained, by ``id``.

    Raises NotRepeatableError if there are none.
    """
    modules: list[nn.Module] = []
    for call in calls:
        if call.module is None or not call.surroundings.gradients:
            continue
        if any(id(p) in trained for p in call.module.parameters() if p.requires_grad):
            modules.append(call.module)
    if not modules:
        raise NotRepeatableError(
            "no call of a module with parameters leads to the loss that the script differentiates; call the "
            "model, as in model(x)"
        )
    return modules


def _not_computed(calls: Iterable[RecordedCall]) -> set[Number]:
    """Return what the calls read and none of them gives."""
    read, given = set[Number](), set[Number]()
    for call in calls:
        read.update(call.reads)
        given.update(call.results)
    return read - given


def _written(
    micro_batch: MicroBatch, calls: Sequence[RecordedCall], read: Iterable[Number]
) -> frozenset[Number]:
    """Return which of the values ``read`` by the calls a function writes to, directly or through a view: they
    share the memory that it wrote to.
    """
    overwritten = [micro_batch.tensors[n] for call in calls for n in call.overwritten]
    places = {x.place if isinstance(x, Outline) else x.untyped_storage().data_ptr() for x in overwritten}
    written = set[Number]()
    for number in read:
        x = micro_batch.tensors[number]
        if isinstance(x, Tensor) and x.untyped_storage().data_ptr() in places:
            written.add(number)
    return frozenset(written)


# ------------------------------------------------------------------------------------- what leaves torch


def with_escapes(flow: Flow, micro_batch: MicroBatch) -> Flow:
    """Return a flow with the escapes that its loss may depend on: those of values that are computed from its
    batch, before the loss is scaled for the backward pass.
    """
    last_of_loss = ancestors(micro_batch.calls, micro_batch.loss)[-1].results[0]
    escapes, calls = list[Escape](), list(flow.calls)
    for escape in micro_batch.escapes:
        if escape.number > last_of_loss:
            break
        leading = _leading_to(escape, flow, micro_batch)
        numbers = sources([*flow.calls, *leading], escape.arguments.references)
        if numbers.isdisjoint(flow.leaves):
            continue
        escapes.append(escape)
        calls += [call for call in leading if call not in calls]
    read = _not_computed(calls) - flow.leaves.keys() - flow.parameters.keys()
    return replace(
        flow,
        calls=tuple(sorted(calls, key=lambda call: call.results[0])),
        tensors={**{n: micro_batch.value(n) for n in read}, **flow.tensors},
        escapes=tuple(escapes),
    )


def _leading_to(escape: Escape, flow: Flow, micro_batch: MicroBatch) -> list[RecordedCall]:
    """Return the calls that lead from values of a flow to what an escape reads. What is drawn on the way is
    not drawn once more: it would be missing for the loss.
    """
    computed = {n for call in flow.calls for n in call.results}
    known = {*flow.leaves, *flow.parameters, *flow.tensors, *computed}
    needed, leading = set(escape.arguments.references) - known, list[RecordedCall]()
    for call in reversed(micro_batch.calls):
        if not needed.isdisjoint(call.results) and not call.random_states:
            leading.append(call)
            needed.update(set(call.reads) - known)
    return leading[::-1]


# ---------------------------------------------------------------------------------------- how it is scaled


def scaling_calls(micro_batch: MicroBatch) -> list[tuple[RecordedCall, float]]:
    """Return the last calls that only multiply the loss by a number, as ``loss / 4`` does, each with its
    factor; the very last one first.

    A multiplication by a number that the script read out of a tensor, such as a count of targets, does not
    count: it belongs to the loss.
    """
    numbers_read = {escape.read for escape in micro_batch.escapes if not isinstance(escape.read, bool)}
    numbers_read.discard(None)
    loss, scalings = micro_batch.loss, list[tuple[RecordedCall, float]]()
    for call in reversed(ancestors(micro_batch.calls, micro_batch.loss)):
        factor = _factor_of(call) if loss in call.results else None
        is_by_number_read = factor != 1 and not numbers_read.isdisjoint(_constants_of(call))
        if factor is None or is_by_number_read:
            break
        scalings.append((call, factor))
        loss = call.reads[0]
    return scalings


def loss_factor(micro_batch: MicroBatch) -> float:
    """Return what a script multiplies its loss by before the backward pass, such as 1/4 where it accumulates
    over four micro-batches.
    """
    return math.prod(factor for _, factor in scaling_calls(micro_batch))


def _constants_of(call: RecordedCall) -> list[Any]:
    numbers = [x for x in call.arguments.parts if isinstance(x, (int, float))]
    return [x for x in numbers if not isinstance(x, bool)]


def _factor_of(call: RecordedCall) -> float | None:
    """Return k if a call of one value multiplies it by k, which may be 1; None if it does anything else. To
    find out, its function is called on a few numbers.
    """
    if call.function is None or call.random_states or len(call.reads) != 1 or not _constants_of(call):
        return None
    probes = torch.tensor(PROBES, dtype=torch.float64)
    args, kwargs = call.arguments.with_values({call.reads[0]: probes.clone()})
    try:
        result = call.function(*args, **kwargs)
    except Exception:  # it may need other arguments than numbers
        return None
    if not isinstance(result, Tensor) or result.shape != probes.shape:
        return None  # such as a mean over them
    factor = float(result[0])
    return factor if bool((result == factor * probes).all()) else None
