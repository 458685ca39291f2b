"""Find what went wrong first in the steps up to a bad one: a module if all were seen, else a parameter."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from normlab.diagnosis.probes import Probe, Record
from normlab.trace.facts.stacks import within
from normlab.watching.meter import StepRecord

LEFT: Final = 10.0
"""A statistic has left its range at this many times its median over the steps before, if these are many."""
FEW: Final = 4.0
"""After only n steps the limit is 1 + ``FEW`` / n times as high: values that begin at zero grow fast."""
BEFORE: Final = 32
"""The largest number of steps in that median."""
MODEL: Final = ""
"""The path of the model itself."""
EVERYTHING: Final = (
    Probe("*", "input", "max_abs", every_tensor=True),
    Probe("*", "output", "max_abs", every_tensor=True),
    Probe("*", "output"),
    Probe("*", "grad_output", "max_abs", every_tensor=True),
    Probe("*", "grad_output"),
    Probe("*", "weight", "max_abs", every_tensor=True),
)
"""The largest entries of every module, which show whether it is finite, and its rms, which is its size."""
NOWHERE: Final = "no module left its range: look at the data, the labels or the loss"
"""The sentence about steps that went wrong without a module to blame."""
NO_PARAMETER: Final = (
    "no gradient and no update of a parameter left its range: look at the learning rate, the data, the labels"
)
"""The same if only the norms of parameters were recorded."""
NOTHING: Final = "no module left its range in these steps, and the run trained"
"""The same about steps of a run that trained."""


@dataclass(frozen=True)
class Fault:
    """What is to blame, the rule that found it, and the numbers behind it."""

    sentence: str
    rule: str
    """``weight``, ``forward``, ``backward``, ``gradient``, ``update``, ``range`` or ``none``; of the checks
    of a loop, the name of the property.
    """
    module: str = ""
    step: int = 0
    evidence: tuple[str, ...] = ()


def fault(steps: Sequence[StepRecord]) -> Fault:
    """Find the first module whose output is not finite while its input is; else the first gradient, in
    backward order, or update that is not finite; else the first statistic that left its range (``LEFT``,
    ``FEW``), within a step in the order of the stream; else nothing.

    For steps in which no module was seen, only the rules about parameters apply. Of several parameters in one
    step, the one nearest to the loss is named if they are not finite, else the farthest above its median.
    """
    for at, record in enumerate(steps):
        not_finite = _forward(record) or _backward(record) or _parameters(record, steps[:at])
        if not_finite is not None:
            return not_finite
    out_of_range = _range(steps)
    if out_of_range is not None:
        return out_of_range
    only_parameters = bool(steps) and not any(record.seen for record in steps)
    return Fault(NO_PARAMETER if only_parameters else NOWHERE, "none", evidence=_nearest(steps))


def _module_label(module: str) -> str:
    """Return the name of a module for a sentence."""
    return module or "the model itself"


def _forward(record: StepRecord) -> Fault | None:
    broken_inputs = {r.module for r in _not_finite(record, "input")}
    for output in _not_finite(record, "output"):
        if output.module not in broken_inputs:
            return _forward_fault(record, output)
    return None


def _not_finite(record: StepRecord, signal: str) -> Iterator[Record]:
    """Yield the largest entries of a signal that are not finite, in the order in which they were seen."""
    for r in record.seen:
        if _is(r, signal, "max_abs") and not math.isfinite(r.value):
            yield r


def _forward_fault(record: StepRecord, output: Record) -> Fault:
    module = output.module
    sentence = (
        f"{_module_label(module)} is the first module whose output is not finite while its input is, in step "
        f"{record.step}"
    )
    weight = _broken_weight(record, module)
    if weight:
        sentence += f": its {weight} is not finite"
    inputs = [r.value for r in record.seen if r.module == module and r.signal == "input"]
    given = f"its input is finite (largest entry {inputs[0]:.3g})" if inputs else "its input is tokens"
    evidence = f"largest entry of its output: {output.value}", given, f"loss of the step: {_loss(record):.4g}"
    return Fault(sentence, "forward", module, record.step, evidence)


def _broken_weight(record: StepRecord, module: str) -> str:
    """Return the name of a parameter in the module or one inside it that is not finite; else empty."""
    for r in _not_finite(record, "weight"):
        if within(r.module, module):
            name = r.signal.partition("[")[2].rstrip("]") or "weight"
            return name if r.module == module else f"{r.module}.{name}"
    return ""


def _backward(record: StepRecord) -> Fault | None:
    before: Record | None = None
    for r in record.seen:
        if not _is(r, "grad_output", "max_abs"):
            continue
        if not math.isfinite(r.value):
            return _backward_fault(record, r, before)
        before = r
    return None


def _backward_fault(record: StepRecord, gradient: Record, before: Record | None) -> Fault:
    origin = "the loss"
    if before is not None:
        origin = f"{_module_label(before.module)}, {before.value:.3g} at most"
    return Fault(
        f"the gradient of the output of {_module_label(gradient.module)} is the first, in backward order, "
        f"that is not finite, in step {record.step}; all outputs are finite",
        "backward",
        gradient.module,
        record.step,
        (f"largest entry of that gradient: {gradient.value}", f"the gradient before it: of {origin}"),
    )


def _parameters(record: StepRecord, before: Sequence[StepRecord]) -> Fault | None:
    gradients = record.norms("gradient")
    for quantity in ("gradient", "update"):
        norms = record.norms(quantity)
        broken = [name for name, value in norms.items() if not math.isfinite(value)]
        if not broken:
            continue
        # parameters are in the order of the stream
        if record.seen:
            name, more = broken[0], "all outputs and their gradients are finite"
        else:
            name = broken[-1]
            more = f"nearest to the loss of {len(broken)} of {len(norms)} parameters for which that is so"
        evidence = [f"L2 norm of its gradient: {gradients[name]:.4g}", f"learning rate: {record.lr:.3g}"]
        if before and not record.seen and name in before[-1].names:
            evidence.append(
                f"L2 norm of its {quantity} in the step before: {before[-1].norms(quantity)[name]:.3g}"
            )
        return Fault(
            f"the {quantity} of {name} is not finite in step {record.step}; {more}",
            quantity,
            name.rpartition(".")[0],
            record.step,
            tuple(evidence),
        )
    return None


def _range(steps: Sequence[StepRecord]) -> Fault | None:
    for compared in _against_before(steps):
        left = [statistic for statistic in compared if statistic.outside]
        if left:
            return _range_fault(steps, left)
    return None


def _range_fault(steps: Sequence[StepRecord], left: list[_Compared]) -> Fault:
    """Blame one of the statistics that left their ranges in a step."""
    at = left[0].at
    record = steps[at]
    first = left[0] if record.seen else max(left, key=lambda statistic: statistic.factor)
    others = [statistic for statistic in left if statistic is not first]
    others.sort(key=lambda statistic: -statistic.factor)
    before = "step" if first.before == 1 else f"{first.before} steps"
    name = _module_label(first.name)
    return Fault(
        f"{first.words} {name} left its range first, in step {record.step}: "
        f"{first.factor:.3g} times its median of the {before} before",
        "range",
        first.name if record.seen else first.name.rpartition(".")[0],
        record.step,
        (
            f"{first.words} {name}: {first.value:.3g}, median before {first.median:.3g}",
            *(
                f"in the same step {o.words} {_module_label(o.name)}: {o.factor:.3g} times"
                for o in others[:3]
            ),
            f"loss of the step: {_loss(record):.4g}, of the step before {_loss(steps[at - 1]):.4g}",
        ),
    )


@dataclass(frozen=True)
class _Compared:
    """A statistic of a module or a parameter, and its median over the steps before."""

    at: int
    """The place of its step."""
    name: str
    words: str
    """What it is of its module or parameter, for a sentence."""
    value: float
    median: float
    before: int
    """The number of steps in the median."""

    @property
    def factor(self) -> float:
        return self.value / self.median

    @property
    def outside(self) -> bool:
        return self.factor > LEFT * (1 + FEW / self.before)


def _against_before(steps: Sequence[StepRecord]) -> Iterator[list[_Compared]]:
    """Compare each statistic of each step with its median before, in the order of the stream."""
    sizes = [dict(_sizes(record)) for record in steps]
    for at in range(1, len(steps)):
        before = sizes[max(0, at - BEFORE) : at]
        compared: list[_Compared] = []
        for statistic, value in sizes[at].items():
            known = [step[statistic] for step in before if step.get(statistic)]  # zeros have no multiples
            if known:
                median = statistics.median(known)
                compared.append(_Compared(at, *statistic, value, median, len(known)))
        yield compared


def _sizes(record: StepRecord) -> Iterator[tuple[tuple[str, str], float]]:
    """Yield the sizes of outputs, gradients and updates of a step, each in the order of the stream.

    Gradients in outputs are relative to the loss's gradient in the model's output: if that grows, they all
    grow, and the model itself is named. Updates are relative to the learning rate. The gradients of
    parameters count if no module was seen.
    """
    outputs = {r.module: r.value for r in record.seen if (r.signal, r.statistic) == ("output", "rms")}
    gradients = {r.module: r.value for r in record.seen if (r.signal, r.statistic) == ("grad_output", "rms")}
    for module, value in outputs.items():
        yield (module, "the rms of the output of"), value
    scale = gradients.get(MODEL, 0.0)
    if scale:
        yield (MODEL, "the rms of the gradient in the output of"), scale
        for module in outputs:
            if module in gradients and module != MODEL:
                value = gradients[module] / scale
                yield (module, "the relative rms of the gradient in the output of"), value
    if not record.seen:
        for name, value in record.norms("gradient").items():
            yield (name, "the gradient of"), value
    if record.lr:
        for name, value in record.norms("update").items():
            yield (name, "the update, by the learning rate, of"), value / record.lr


def _nearest(steps: Sequence[StepRecord]) -> tuple[str, ...]:
    """Return which statistic came nearest to leaving its range, and how the loss went."""
    compared = [statistic for of_step in _against_before(steps) for statistic in of_step]
    if not compared:
        return ()
    best = max(compared, key=lambda statistic: statistic.factor)
    name, first, last = _module_label(best.name), steps[0], steps[-1]
    nearest = f"nearest to it: {best.words} {name}, {best.factor:.3g} times its median before"
    return (
        f"{nearest}, in step {steps[best.at].step}",
        f"loss: {_loss(first):.4g} in step {first.step}, {_loss(last):.4g} in step {last.step}",
    )


def _loss(record: StepRecord) -> float:
    return math.nan if record.loss is None else record.loss.item()


def _is(record: Record, signal: str, statistic: str) -> bool:
    """Return whether a record is of this statistic, of any tensor of the signal."""
    return record.signal.partition("[")[0] == signal and record.statistic == statistic
