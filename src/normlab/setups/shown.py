"""The flow that a recorded micro-batch shows: the model that it trains, its batch, and its loss."""

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
"""Numbers, each a multiple of the first, that show whether a call multiplies its argument by a constant. No
bound that a script sets lies above the largest.
"""


def flow_of(
    micro_batch: MicroBatch,
    held: Collection[int],
    kept: Sequence[RecordedCall] = (),
    model: nn.Module | None = None,
    scalings: int | None = None,
) -> Flow:
    """Return the flow that leads to the loss of a micro-batch, before the script scaled it for its backward
    pass. The model is what the step trains: modules that no optimizer of the step holds and that get no
    gradient, such as a frozen reference or a teacher, are functions; ``model`` is that of another
    micro-batch, if it is known already. What ``kept`` calls returned is not computed again. ``scalings`` says
    how many of the last calls scale the loss, if not all that multiply it by a number do.

    Raises NotRepeatableError if no module that is trained takes part in it.
    """
    calls = ancestors(micro_batch.calls, micro_batch.loss)
    scaling = scaling_calls(micro_batch)[:scalings]
    loss = scaling[-1][0].reads[0] if scaling else micro_batch.loss
    calls = ancestors(calls, loss)
    trained = {*held, *micro_batch.gradients}
    modules = _trained_modules(calls, trained)
    objects = {n: micro_batch.tensors[n] for n in _not_computed(calls)}
    parameters_read = [x for x in objects.values() if isinstance(x, nn.Parameter)]
    # one that could be trained, but is not, is somebody else's, such as the head of a teacher
    read_directly = [x for x in parameters_read if not x.requires_grad or id(x) in trained]
    if model is None:
        model = common_module(modules, read_directly, micro_batch.module_names)
    paths = {id(module): path for path, module in reversed([*model.named_modules()])}
    called = [call.module for call in calls if call.module is not None]
    named = {id(x): path for path, x in [*model.named_buffers(), *model.named_parameters()]}
    parameters = {n: named[id(x)] for n, x in objects.items() if id(x) in named}
    modules_of_model = {id(m): paths[id(unwrap(m))] for m in called if id(unwrap(m)) in paths}
    cut = BatchBeginning(calls, parameters, modules_of_model, micro_batch, kept)
    calls = ancestors(cut.kept, loss)
    read = _not_computed(calls) - parameters.keys()
    if read.isdisjoint(cut.begins):
        raise NotRepeatableError(
            "no batch leads to the loss that the script differentiates; hand it to the model, as in model(x)"
        )
    flow = Flow(
        model=model,
        calls=tuple(calls),
        loss=loss,
        modules=modules_of_model,
        parameters={n: path for n, path in parameters.items() if any(n in call.reads for call in calls)},
        leaves=named_leaves([n for n in cut.begins if n in read], calls, micro_batch.names),
        tensors={n: micro_batch.value(n) for n in read},
        factor=math.prod(factor for _, factor in scaling),
        scale=micro_batch.scale,
        written=_written(micro_batch, calls, read),
    )
    return with_escapes(flow, micro_batch)


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
    """Return what calls read and none of them gives."""
    return {n for call in calls for n in call.reads} - {n for call in calls for n in call.results}


def _written(
    micro_batch: MicroBatch, calls: Sequence[RecordedCall], read: Iterable[Number]
) -> frozenset[Number]:
    """Return those of the values that the calls read which a function writes to: they lie where it wrote."""
    changed = [micro_batch.tensors[n] for call in calls for n in call.overwritten]
    places = {x.place if isinstance(x, Outline) else x.untyped_storage().data_ptr() for x in changed}
    values = {n: micro_batch.tensors[n] for n in read}
    tensors = {n: x for n, x in values.items() if isinstance(x, Tensor)}
    return frozenset(n for n, x in tensors.items() if x.untyped_storage().data_ptr() in places)


# ------------------------------------------------------------------------------------- what leaves torch


def with_escapes(flow: Flow, micro_batch: MicroBatch) -> Flow:
    """Return a flow with the escapes that its loss may depend on: those of values that are computed of its
    batch, before it is scaled for the backward pass.
    """
    last = ancestors(micro_batch.calls, micro_batch.loss)[-1].results[0]
    escapes, calls = list[Escape](), list(flow.calls)
    for escape in micro_batch.escapes:
        if escape.later > last:
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
    known = {*flow.leaves, *flow.parameters, *flow.tensors, *(n for c in flow.calls for n in c.results)}
    needed, leading = set(escape.arguments.references) - known, list[RecordedCall]()
    for call in reversed(micro_batch.calls):
        if not needed.isdisjoint(call.results) and not call.random_states:
            leading.append(call)
            needed.update(set(call.reads) - known)
    return leading[::-1]


# ---------------------------------------------------------------------------------------- how it is scaled


def scaling_calls(micro_batch: MicroBatch) -> list[tuple[RecordedCall, float]]:
    """Return the last calls that only multiply the loss by a number, which is none that the script read out
    of a tensor, each with this factor; the very last one first.
    """
    counts = {escape.read for escape in micro_batch.escapes if not isinstance(escape.read, bool)} - {None}
    loss, found = micro_batch.loss, list[tuple[RecordedCall, float]]()
    for call in reversed(ancestors(micro_batch.calls, micro_batch.loss)):
        factor = _factor_of(call) if loss in call.results else None
        is_count = factor != 1 and not counts.isdisjoint(_constants_of(call))
        if factor is None or is_count:
            break
        found.append((call, factor))
        loss = call.reads[0]
    return found


def loss_factor(micro_batch: MicroBatch) -> float:
    """Return what a script multiplies its loss by before the backward pass, as a division by the number of
    micro-batches does.
    """
    return math.prod(factor for _, factor in scaling_calls(micro_batch))


def _constants_of(call: RecordedCall) -> list[Any]:
    numbers = [x for x in call.arguments.parts if isinstance(x, (int, float))]
    return [x for x in numbers if not isinstance(x, bool)]


def _factor_of(call: RecordedCall) -> float | None:
    """Return k if a call of one number gives k times it, be it once; None if it does anything else."""
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
