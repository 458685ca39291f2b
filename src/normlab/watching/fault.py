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
        if one := _forward(record) or _backward(record) or _parameters(record, steps[:at]):
            return one
    sentence = NOWHERE if any(record.seen for record in steps) or not steps else NO_PARAMETER
    return _range(steps) or Fault(sentence, "none", evidence=_nearest(steps))


def _module_label(module: str) -> str:
    """Return the name of a module for a sentence."""
    return module or "the model itself"


def _forward(record: StepRecord) -> Fault | None:
    entered = {r.module for r in record.seen if _is(r, "input", "max_abs") and not math.isfinite(r.value)}
    for r in record.seen:
        if _is(r, "output", "max_abs") and not math.isfinite(r.value) and r.module not in entered:
            weight = _broken_weight(record, r.module)
            largest = [f"{s.value:.3g}" for s in record.seen if s.module == r.module and s.signal == "input"]
            given = f"its input is finite (largest entry {largest[0]})" if largest else "its input is tokens"
            return Fault(
                f"{_module_label(r.module)} is the first module whose output is not finite while its input "
                f"is, in step {record.step}" + (f": its {weight} is not finite" if weight else ""),
                "forward",
                r.module,
                record.step,
                (f"largest entry of its output: {r.value}", given, f"loss of the step: {_loss(record):.4g}"),
            )
    return None


def _broken_weight(record: StepRecord, module: str) -> str:
    """Return the name of a parameter in the module or one inside it that is not finite; else empty."""
    for r in record.seen:
        if within(r.module, module) and _is(r, "weight", "max_abs") and not math.isfinite(r.value):
            name = r.signal.partition("[")[2].rstrip("]") or "weight"
            return name if r.module == module else f"{r.module}.{name}"
    return ""


def _backward(record: StepRecord) -> Fault | None:
    finite: Record | None = None
    for r in record.seen:
        if _is(r, "grad_output", "max_abs"):
            if math.isfinite(r.value):
                finite = r
                continue
            after = "the loss"
            if finite is not None:
                after = f"{_module_label(finite.module)}, {finite.value:.3g} at most"
            return Fault(
                f"the gradient of the output of {_module_label(r.module)} is the first, in backward order, "
                f"that is not finite, in step {record.step}; all outputs are finite",
                "backward",
                r.module,
                record.step,
                (f"largest entry of that gradient: {r.value}", f"the gradient before it: of {after}"),
            )
    return None


def _parameters(record: StepRecord, before: Sequence[StepRecord]) -> Fault | None:
    gradients = record.norms("gradient")
    for what in ("gradient", "update"):
        norms = record.norms(what)
        broken = [name for name, value in norms.items() if not math.isfinite(value)]
        if not broken:
            continue
        name = broken[0 if record.seen else -1]
        more = "all outputs and their gradients are finite"
        if not record.seen:
            more = f"nearest to the loss of {len(broken)} of {len(norms)} parameters for which that is so"
        evidence = [f"L2 norm of its gradient: {gradients[name]:.4g}", f"learning rate: {record.lr:.3g}"]
        if before and not record.seen and name in before[-1].names:
            evidence.append(f"L2 norm of its {what} in the step before: {before[-1].norms(what)[name]:.3g}")
        return Fault(
            f"the {what} of {name} is not finite in step {record.step}; {more}",
            what,
            name.rpartition(".")[0],
            record.step,
            tuple(evidence),
        )
    return None


def _range(steps: Sequence[StepRecord]) -> Fault | None:
    outside = ([one for one in step if one.outside] for step in _against_before(steps))
    left = next(filter(None, outside), None)
    if left is None:
        return None
    record = steps[left[0].at]
    first = left[0] if record.seen else max(left, key=lambda one: one.factor)
    others = sorted((one for one in left if one is not first), key=lambda one: -one.factor)[:3]
    before = "step" if first.before == 1 else f"{first.before} steps"
    name = _module_label(first.name)
    return Fault(
        f"{first.what} {name} left its range first, in step {record.step}: "
        f"{first.factor:.3g} times its median of the {before} before",
        "range",
        first.name if record.seen else first.name.rpartition(".")[0],
        record.step,
        (
            f"{first.what} {name}: {first.value:.3g}, median before {first.median:.3g}",
            *(f"in the same step {o.what} {_module_label(o.name)}: {o.factor:.3g} times" for o in others),
            f"loss of the step: {_loss(record):.4g}, of the step before {_loss(steps[first.at - 1]):.4g}",
        ),
    )


@dataclass(frozen=True)
class _Compared:
    """A statistic of a module or a parameter, and its median over the steps before."""

    at: int
    name: str
    what: str
    value: float
    median: float
    before: int

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
        compared: list[_Compared] = []
        for (name, what), value in sizes[at].items():
            known = [one[name, what] for one in sizes[max(0, at - BEFORE) : at] if one.get((name, what))]
            if known:
                compared.append(_Compared(at, name, what, value, statistics.median(known), len(known)))
        yield compared


def _sizes(record: StepRecord) -> Iterator[tuple[tuple[str, str], float]]:
    """Yield the sizes of outputs, gradients and updates of a step, each in the order of the stream.

    Gradients in outputs are relative to the loss's gradient in the model's output: if that grows, they all
    grow, and the model itself is named. Updates are relative to the learning rate. The gradients of
    parameters count if no module was seen.
    """
    outputs = {r.module: r.value for r in record.seen if (r.signal, r.statistic) == ("output", "rms")}
    arrived = {r.module: r.value for r in record.seen if (r.signal, r.statistic) == ("grad_output", "rms")}
    for module, value in outputs.items():
        yield (module, "the rms of the output of"), value
    scale = arrived.get(MODEL, 0.0)
    if scale:
        yield (MODEL, "the rms of the gradient in the output of"), scale
        for module in [m for m in outputs if m in arrived and m != MODEL]:
            yield (module, "the relative rms of the gradient in the output of"), arrived[module] / scale
    for name, value in {} if record.seen else record.norms("gradient").items():
        yield (name, "the gradient of"), value
    for name, value in record.norms("update").items() if record.lr else ():
        yield (name, "the update, by the learning rate, of"), value / record.lr


def _nearest(steps: Sequence[StepRecord]) -> tuple[str, ...]:
    """Return which statistic came nearest to leaving its range, and how the loss went."""
    best = max((o for step in _against_before(steps) for o in step), key=lambda o: o.factor, default=None)
    if best is None:
        return ()
    name, first, last = _module_label(best.name), steps[0], steps[-1]
    nearest = f"nearest to it: {best.what} {name}, {best.factor:.3g} times its median before"
    return (
        f"{nearest}, in step {steps[best.at].step}",
        f"loss: {_loss(first):.4g} in step {first.step}, {_loss(last):.4g} in step {last.step}",
    )


def _loss(record: StepRecord) -> float:
    return math.nan if record.loss is None else record.loss.item()


def _is(record: Record, signal: str, statistic: str) -> bool:
    return record.signal.partition("[")[0] == signal and record.statistic == statistic
