"""The module that went wrong first, found in the records of every module in the steps up to a bad one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from normlab.diagnosis.probing.observe import Probe, Record

LEFT: Final = 10.0
"""A statistic has left its range at so many times its median over many steps before."""

FEW: Final = 4.0
"""After only n steps the limit is 1 + ``FEW`` / n times as high: what begins at zero grows fast at first."""

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
"""The largest entries of every module, which show whether it is finite, and its rms, which shows its size."""

NOWHERE: Final = "no module left its range: look at the data, the labels or the loss"
"""The sentence about steps that went wrong without a module to blame."""

NOTHING: Final = "no module left its range in these steps, and the run trained"
"""The same about steps of a run that trained."""


@dataclass(frozen=True)
class Observed:
    """One step with every module watched. Records are in the order in which they were measured."""

    step: int
    lr: float
    loss: float
    records: tuple[Record, ...]
    gradients: Mapping[str, float]
    """The L2 norm by parameter; the same holds for ``updates``."""
    updates: Mapping[str, float]


@dataclass(frozen=True)
class Verdict:
    """The module to blame, the rule that found it, and the numbers behind it."""

    sentence: str
    rule: str
    """``weight``, ``forward``, ``backward``, ``gradient``, ``update``, ``range`` or ``none``."""
    module: str = ""
    step: int = 0
    evidence: tuple[str, ...] = ()


def blame(steps: Sequence[Observed]) -> Verdict:
    """Blame the first module whose output is not finite while its input is; else the first gradient, in
    backward order, or update that is not finite; else the first statistic that left its range (``LEFT``,
    ``FEW``), within a step in the order of the stream; else nobody.
    """
    for seen in steps:
        for rule in (_forward, _backward, _parameters):
            if verdict := rule(seen):
                return verdict
    return _range(steps) or Verdict(NOWHERE, "none", evidence=_near(steps))


def named(module: str) -> str:
    """The name of a module in a sentence."""
    return module or "the model itself"


def _forward(seen: Observed) -> Verdict | None:
    entered = {r.module for r in seen.records if _is(r, "input", "max_abs") and not math.isfinite(r.value)}
    for r in seen.records:
        if _is(r, "output", "max_abs") and not math.isfinite(r.value) and r.module not in entered:
            weight = _broken_weight(seen, r.module)
            largest = [f"{s.value:.3g}" for s in seen.records if s.module == r.module and s.signal == "input"]
            given = f"its input is finite (largest entry {largest[0]})" if largest else "its input is tokens"
            return Verdict(
                f"{named(r.module)} is the first module whose output is not finite while its input is, in "
                f"step {seen.step}" + (f": its {weight} is not finite" if weight else ""),
                "forward",
                r.module,
                seen.step,
                (f"largest entry of its output: {r.value}", given, f"loss of the step: {seen.loss:.4g}"),
            )
    return None


def _broken_weight(seen: Observed, module: str) -> str:
    """The name of a parameter of the module, or of one inside it, that is not finite; or empty."""
    for r in seen.records:
        inside = r.module == module or f"{r.module}.".startswith(f"{module}.")
        if inside and _is(r, "weight", "max_abs") and not math.isfinite(r.value):
            name = r.signal.partition("[")[2].rstrip("]") or "weight"
            return name if r.module == module else f"{r.module}.{name}"
    return ""


def _backward(seen: Observed) -> Verdict | None:
    finite: Record | None = None
    for r in seen.records:
        if _is(r, "grad_output", "max_abs"):
            if math.isfinite(r.value):
                finite = r
                continue
            after = "the loss" if finite is None else f"{named(finite.module)}, {finite.value:.3g} at most"
            return Verdict(
                f"the gradient of the output of {named(r.module)} is the first, in backward order, that is "
                f"not finite, in step {seen.step}; all outputs are finite",
                "backward",
                r.module,
                seen.step,
                (f"largest entry of that gradient: {r.value}", f"the gradient before it: of {after}"),
            )
    return None


def _parameters(seen: Observed) -> Verdict | None:
    for rule, norms in (("gradient", seen.gradients), ("update", seen.updates)):
        for name, value in norms.items():
            if not math.isfinite(value):
                return Verdict(
                    f"the {rule} of {name} is not finite in step {seen.step}; all outputs and their "
                    "gradients are finite",
                    rule,
                    name.rpartition(".")[0],
                    seen.step,
                    (f"L2 norm of its gradient: {seen.gradients[name]:.4g}", f"learning rate: {seen.lr:.3g}"),
                )
    return None


def _range(steps: Sequence[Observed]) -> Verdict | None:
    beside = ([one for one in all_of_step if one.left] for all_of_step in _against_before(steps))
    left = next(filter(None, beside), None)
    if left is None:
        return None
    first, seen = left[0], steps[left[0].at]
    others = sorted(left[1:], key=lambda one: -one.factor)[:3]
    before = "step" if first.before == 1 else f"{first.before} steps"
    return Verdict(
        f"{first.what} {named(first.module)} left its range first, in step {seen.step}: "
        f"{first.factor:.3g} times its median of the {before} before",
        "range",
        first.module,
        seen.step,
        (
            f"{first.what} {named(first.module)}: {first.value:.3g}, median before {first.median:.3g}",
            *(f"in the same step {o.what} {named(o.module)}: {o.factor:.3g} times" for o in others),
            f"loss of the step: {seen.loss:.4g}, of the step before {steps[first.at - 1].loss:.4g}",
        ),
    )


@dataclass(frozen=True)
class _Beside:
    """A statistic beside its median over the steps before."""

    at: int
    module: str
    what: str
    value: float
    median: float
    before: int

    @property
    def factor(self) -> float:
        return self.value / self.median

    @property
    def left(self) -> bool:
        return self.factor > LEFT * (1 + FEW / self.before)


def _against_before(steps: Sequence[Observed]) -> Iterator[list[_Beside]]:
    """Give each statistic of each step but the first beside its median before, in the order of the stream."""
    sizes = [dict(_sizes(seen)) for seen in steps]
    for at in range(1, len(steps)):
        found: list[_Beside] = []
        for (module, what), value in sizes[at].items():
            known = [one[module, what] for one in sizes[max(0, at - BEFORE) : at] if one.get((module, what))]
            if known:
                found.append(_Beside(at, module, what, value, statistics.median(known), len(known)))
        yield found


def _sizes(seen: Observed) -> Iterator[tuple[tuple[str, str], float]]:
    """Give the sizes of outputs, gradients and updates of a step, each in the order of the stream.

    Gradients are relative to the loss's own in the model's output: where that grows, all grow with it, and it
    is the model itself that is named. Updates are relative to the learning rate.
    """
    outputs = {r.module: r.value for r in seen.records if (r.signal, r.statistic) == ("output", "rms")}
    arrived = {r.module: r.value for r in seen.records if (r.signal, r.statistic) == ("grad_output", "rms")}
    for module, value in outputs.items():
        yield (module, "the rms of the output of"), value
    scale = arrived.get(MODEL, 0.0)
    if scale:
        yield (MODEL, "the rms of the gradient in the output of"), scale
        for module in [m for m in outputs if m in arrived and m != MODEL]:
            yield (module, "the relative rms of the gradient in the output of"), arrived[module] / scale
    if seen.lr:
        for name, value in seen.updates.items():
            yield (name, "the update, by the learning rate, of"), value / seen.lr


def _near(steps: Sequence[Observed]) -> tuple[str, ...]:
    """Say which statistic came nearest to leaving its range, and how the loss went."""
    best = max((o for found in _against_before(steps) for o in found), key=lambda o: o.factor, default=None)
    if best is None:
        return ()
    seen = steps[best.at]
    nearest = f"nearest to it: {best.what} {named(best.module)}, {best.factor:.3g} times its median before"
    return (
        f"{nearest}, in step {seen.step}",
        f"loss: {steps[0].loss:.4g} in step {steps[0].step}, {steps[-1].loss:.4g} in step {steps[-1].step}",
    )


def _is(record: Record, signal: str, statistic: str) -> bool:
    """Whether a record is of this signal, in whichever of its tensors, and of this statistic."""
    return record.signal.partition("[")[0] == signal and record.statistic == statistic
