"""Measure signals of any module while it runs, without changing its outputs or gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from normlab.base.registry import Registry
from normlab.errors import UserError
from normlab.private_torch import runs_compiled
from normlab.trace.facts.stacks import within
from normlab.trace.record import Seen, Want, matching, record
from normlab.trace.tensors import Place, unwrap, unwrapped

Statistic = Callable[[Tensor], Tensor]
STATISTICS: Final[Registry[Statistic]] = Registry("statistic")
"""The statistics by the names that probes use; each makes a number of a tensor."""


def pair_cosines(x: Tensor) -> Tensor:
    r"""Return :math:`\sum_{i \ne j} \cos(x_i, x_j)` of the rows of each sequence `[..., t, d]`, `[...]`."""
    unit = torch.nn.functional.normalize(x, dim=-1)
    return unit.sum(-2).square().sum(-1) - unit.square().sum((-2, -1))


@STATISTICS.register()
def mean(x: Tensor) -> Tensor:
    r""":math:`\bar x = \frac{1}{n} \sum_i x_i`."""
    return x.mean()


@STATISTICS.register()
def variance(x: Tensor) -> Tensor:
    r""":math:`\frac{1}{n} \sum_i (x_i - \bar x)^2`."""
    return x.var(correction=0)


@STATISTICS.register()
def mean_square(x: Tensor) -> Tensor:
    """The mean square of the entries: of rows of width d, their mean squared length over d."""
    return x.square().mean()


@STATISTICS.register()
def rms(x: Tensor) -> Tensor:
    """The root of ``mean_square``."""
    return x.square().mean().sqrt()


@STATISTICS.register()
def l2(x: Tensor) -> Tensor:
    r""":math:`\sqrt{\sum_i x_i^2}`."""
    return torch.linalg.vector_norm(x)


@STATISTICS.register()
def max_abs(x: Tensor) -> Tensor:
    r""":math:`\max_i |x_i|`."""
    return x.abs().amax()


@STATISTICS.register()
def fraction_nonfinite(x: Tensor) -> Tensor:
    """The share of entries that are infinite or not a number."""
    return 1 - x.isfinite().to(x.dtype).mean()


@STATISTICS.register()
def fraction_zero(x: Tensor) -> Tensor:
    """The share of entries that are 0."""
    return (x == 0).to(x.dtype).mean()


@STATISTICS.register()
def entropy(x: Tensor) -> Tensor:
    r"""The mean of :math:`-\sum_i p_i \ln p_i`, in nats, over rows p of probabilities `[..., n]`."""
    return torch.special.entr(x).sum(-1).mean()


@STATISTICS.register()
def similarity(x: Tensor) -> Tensor:
    r""":math:`\frac{1}{t(t-1)} \sum_{i \ne j} \cos(x_i, x_j)` of rows `[..., t, d]`, the mean over sequences;
    not a number if t is 1.
    """
    return pair_cosines(x).mean() / (x.shape[-2] * (x.shape[-2] - 1) or math.nan)


def gathered(x: Tensor) -> Tensor:
    """Return a plain tensor in place of one that may be spread over several ranks."""
    full_tensor: Callable[[], Tensor] | None = getattr(x, "full_tensor", None)
    return x if full_tensor is None else full_tensor()


def measure(statistic: str, x: Tensor) -> Tensor:
    """Compute a statistic of a tensor of any floating type, in float32 if the type is narrower.

    A tensor that is spread over ranks, such as a parameter under ``fully_shard``, is gathered first, so every
    rank has to measure it.
    """
    x = gathered(x.detach())
    return STATISTICS[statistic](x.to(torch.promote_types(x.dtype, torch.float32)))


ACTIVATIONS = ("input", "output", "grad_input", "grad_output")
PARAMETERS = ("weight", "grad")
"""Signals of a module: tensors that flow through it, and its own parameters with their gradients."""


class StreamSignal(NamedTuple):
    """A signal of a residual stream: ``name`` is ``before``, ``branch`` or ``after``, one of these with the
    prefix ``grad_``, or ``weight``, ``grad`` or ``update``. It is empty for a module inside a branch, whose
    signal keeps its own name.
    """

    stack: str = ""
    index: int | None = None
    name: str = ""


@dataclass(frozen=True)
class Probe:
    """One statistic of one signal of every module whose path matches ``modules``, a glob.

    ``input``, ``output``, ``grad_input`` and ``grad_output`` (the gradients of the loss in them) are measured
    at each call of the module, in its first floating tensor `[..., D]`; ``weight`` and ``grad`` when the
    records are fetched, in its first own parameter. ``every_tensor`` measures all of them, with a suffix for
    those after the first. ``together`` lists modules whose own parameters are measured as one, by their
    ``l2`` norm. ``stream`` gives the records their place in a stream.

    Raises UserError for a signal or statistic that does not exist.
    """

    modules: str
    signal: str = "output"
    statistic: str = "rms"
    every_tensor: bool = False
    together: tuple[str, ...] = ()
    stream: StreamSignal = StreamSignal()

    def __post_init__(self) -> None:
        _require_known("signal", self.signal, (*ACTIVATIONS, *PARAMETERS))
        STATISTICS[self.statistic]  # raises UserError for an unknown one
        if self.together and (self.signal not in PARAMETERS or self.statistic != "l2"):
            raise UserError(
                f"{self.signal}.{self.statistic} of several modules together is not defined; only l2 norms "
                "of weight and grad are"
            )

    def want(self, module: str) -> Want:
        side = "input" if self.signal.endswith("input") else "output"
        signal = "grad" if self.signal.startswith("grad") else "value"
        return Want(module, side, signal, partial(measure, self.statistic), first=not self.every_tensor)

    def key(self, module: str, place: Place = ()) -> Key:
        """Return the fields of a record of this probe, except its step and value; ``place`` is that of a
        tensor after the first.
        """
        stack, index, name = self.stream
        suffix = f"[{'.'.join(map(str, place))}]" if place else ""
        return stack or None, index, module, (name or self.signal) + suffix, self.statistic


def _require_known(kind: str, given: str, allowed: Sequence[str]) -> None:
    if given not in allowed:
        raise UserError(f"unknown {kind} {given!r} in a probe (allowed: {', '.join(allowed)})")


Key: TypeAlias = tuple[str | None, int | None, str, str, str]
"""Stack, index, module, signal and statistic of a record."""


class Record(NamedTuple):
    """One measured number: a row of ``probes.jsonl``. Stack and index are None outside all sublayers.
    ``signal`` has a suffix ``[name]`` for tensors after the first.
    """

    step: int
    stack: str | None
    index: int | None
    module: str
    signal: str
    statistic: str
    value: float


Emit = Callable[[Record], None]


class Observer:
    """Collects measurements while a model runs; ``flush`` emits them as records."""

    def __init__(
        self, model: nn.Module, probes: Sequence[tuple[str, Probe]], flowing: Mapping[Want, Probe], emit: Emit
    ) -> None:
        self._modules, self._emit = dict(model.named_modules()), emit
        self._of_parameters = [(path, probe) for path, probe in probes if probe.signal in PARAMETERS]
        self._flowing = flowing
        self.seen: list[Seen] = []
        self._step: int | None = None
        """The last step whose records were emitted."""

    def flush(self, step: int) -> None:
        """Fetch all measurements since the last call, in one transfer per device, and emit them as records of
        ``step``. Weights and their gradients are measured now.
        """
        measured = [(self._key(seen), seen.value) for seen in self.seen]
        self.seen.clear()
        with torch.no_grad():
            for path, probe in self._of_parameters:
                measured += self._measure_parameters(path, probe)
        self._step = step
        values = _fetched([value for _, value in measured])
        for (key, _), value in zip(measured, values, strict=True):
            self._emit(Record(step, *key, value))

    def _key(self, seen: Seen) -> Key:
        place = seen.tap.place if seen.nth else ()
        return self._flowing[seen.want].key(seen.tap.module, place)

    def _measure_parameters(self, path: str, probe: Probe) -> Iterator[tuple[Key, Tensor]]:
        if probe.together:
            inside = [x for inner in probe.together for _, x in self._tensors(inner, probe.signal, deep=True)]
            once_each = {id(x): x for x in inside}.values()
            norms = [measure("l2", x) for x in once_each]
            if norms:
                yield probe.key(path), measure(probe.statistic, torch.stack(norms))
            return
        tensors = self._tensors(path, probe.signal)
        for i, (place, x) in enumerate(tensors if probe.every_tensor else tensors[:1]):
            yield probe.key(path, place if i else ()), measure(probe.statistic, x)

    def _tensors(self, path: str, signal: str, *, deep: bool = False) -> list[tuple[Place, Tensor]]:
        """Return a module's parameters or their gradients by name; if ``deep``, also those inside it."""
        held = [(name, p) for name, p in self._modules[path].named_parameters(recurse=deep) if p.numel()]
        if signal == "weight":
            return [((name,), p) for name, p in held]
        gradients = [((name,), p.grad) for name, p in held if p.grad is not None]
        return [(place, g.to_dense() if g.is_sparse else g) for place, g in gradients]

    def close(self) -> None:
        """Emit what is pending as records of the step after the last."""
        if self.seen or self._step is None:
            self.flush(0 if self._step is None else self._step + 1)


def _fetched(values: Sequence[Tensor]) -> list[float]:
    """Return the numbers of 0-d tensors, in one transfer per device."""
    numbers = [math.nan] * len(values)
    for device in {x.device for x in values}:
        here = [i for i, x in enumerate(values) if x.device == device]
        fetched = torch.stack([values[i].float() for i in here]).tolist()
        for i, number in zip(here, fetched, strict=True):
            numbers[i] = number
    return numbers


@contextmanager
def observe(
    model: nn.Module,
    probes: Sequence[Probe],
    emit: Emit,
    *,
    on_error: Callable[[Exception], None] | None = None,
    compiled: bool = False,
) -> Iterator[Observer]:
    """Measure a model while it runs inside this block, and call ``emit`` with a record per measurement.

    The block receives the observer, whose ``flush(step)`` fetches the records of a step; the rest is fetched
    at the end of the block. Outputs and gradients are bit-identical with and without probes, and no hook
    stays behind. Torch's layers leave their fused inference path, which gradients never take, while they have
    hooks. Compiled modules are not watched, with a warning, since compiled code may not call their hooks;
    ``compiled`` says that what runs is a compiled wrapper of this model.
    A measurement that fails raises where the model runs, unless ``on_error`` takes the error.

    Raises UserError for a probe that matches no module.
    """
    modules = dict(unwrap(model).named_modules())
    order = {path: i for i, path in enumerate(modules)}
    pairs = [(path, probe) for probe in probes for path in matching(modules, probe.modules)]
    pairs.sort(key=lambda pair: order[pair[0]])
    flowing = {path for path, probe in pairs if probe.signal in ACTIVATIONS}
    unseen = flowing & (set(modules) if compiled else _compiled(model, modules))
    if unseen:
        warnings.warn(
            f"{len(unseen)} of {len(flowing)} watched modules run compiled, and what flows through them is "
            "not recorded (weights and their gradients are); for that, observe the model that was given to "
            "torch.compile, and run that",
            stacklevel=3,
        )
    wants = {
        probe.want(path): probe for path, probe in pairs if probe.signal in ACTIVATIONS and path not in unseen
    }
    observer = Observer(unwrap(model), pairs, wants, emit)
    with record(model, wants, on_error=on_error) as observer.seen:
        try:
            yield observer
        finally:
            observer.close()


def _compiled(model: nn.Module, modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the paths of the modules that run compiled."""
    if any(runs_compiled(m) for m in unwrapped(model)):
        return set(modules)
    roots = [path for path, module in modules.items() if runs_compiled(module)]
    return {path for path in modules if any(within(path, root) for root in roots)}
