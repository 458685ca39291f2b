"""Measure signals of any module while it runs, without changing its outputs or gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from normlab.diagnosis.probing.stats import STATISTICS, measure
from normlab.diagnosis.reading.taps import Place, Side, activations, bare, compiles, unwrapped, watching
from normlab.errors import UserError
from normlab.spec.arguments import validate_arguments

ACTIVATIONS = ("input", "output", "grad_input", "grad_output")
PARAMETERS = ("weight", "grad")
"""Signals of a module: tensors that flow through it, and its own parameters with their gradients."""


class Site(NamedTuple):
    """The place of a signal in a residual stream: ``signal`` is one of ``presets.SIGNALS``, or empty for a
    module inside a branch, whose signal keeps its own name.
    """

    stack: str
    index: int | None
    signal: str = ""


@validate_arguments
@dataclass(frozen=True)
class Probe:
    """One statistic of one signal of every module whose path matches ``modules``, a glob.

    ``input``, ``output``, ``grad_input`` and ``grad_output`` (the gradients of the loss in them) are measured
    at each call of the module, in its first floating tensor `[..., D]`; ``weight`` and ``grad`` when the
    records are fetched, in its first own parameter. ``every_tensor`` measures all of them and marks those
    after the first by a suffix. ``together`` lists modules whose own parameters are measured as one, by their
    ``l2`` norm. ``site`` gives the records their place in a stream.

    Raises UserError for a signal or statistic that does not exist.
    """

    modules: str
    signal: str = "output"
    statistic: str = "rms"
    every_tensor: bool = False
    together: tuple[str, ...] = ()
    site: Site | None = None

    def __post_init__(self) -> None:
        for kind, given, allowed in (
            ("signal", self.signal, (*ACTIVATIONS, *PARAMETERS)),
            ("statistic", self.statistic, tuple(STATISTICS)),
        ):
            if given not in allowed:
                raise UserError(f"unknown {kind} {given!r} in a probe (allowed: {', '.join(allowed)})")
        if self.together and (self.signal not in PARAMETERS or self.statistic != "l2"):
            raise UserError(
                f"{self.signal}.{self.statistic} of several modules together is not defined; only l2 norms "
                "of weight and grad are"
            )

    def of(self, named: Iterable[tuple[Place, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that are measured, each with the suffix of its signal."""
        for i, (place, x) in enumerate(named):
            if i and not self.every_tensor:
                return
            yield (f"[{'.'.join(map(str, place))}]" if i else ""), x

    def key(self, module: str, suffix: str) -> Key:
        """Return the fields of a record of this probe, except its step and value."""
        site = self.site or Site("", None)
        return site.stack or None, site.index, module, (site.signal or self.signal) + suffix, self.statistic


Key: TypeAlias = tuple[str | None, int | None, str, str, str]


class Record(NamedTuple):
    """One measured number: a row of ``probes.jsonl``. Stack and index are None outside of all sublayers.
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
OnError = Callable[[Exception], None]


class Observer:
    """Collects measurements while a model runs, and emits them as records by ``flush``."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        probes: Mapping[str, Sequence[Probe]],
        emit: Emit,
        on_error: OnError | None = None,
    ) -> None:
        self._modules, self._probes, self._emit, self._on_error = modules, probes, emit, on_error
        self._pending: list[tuple[Key, Tensor]] = []
        self._handles: list[Any] = []
        self._step: int | None = None

    def flush(self, step: int) -> None:
        """Fetch all measurements since the last call, in one transfer from each device, and emit them as
        records of ``step``. Weights and their gradients are measured now.
        """
        self._measure_parameters()
        rows, self._pending = self._pending, list[tuple[Key, Tensor]]()
        self._step = step
        values: list[float] = [0.0] * len(rows)
        for device in {x.device for _, x in rows}:
            here = [i for i, (_, x) in enumerate(rows) if x.device == device]
            fetched = torch.stack([rows[i][1].float() for i in here]).tolist()
            for i, value in zip(here, fetched, strict=True):
                values[i] = value
        for (key, _), value in zip(rows, values, strict=True):
            self._emit(Record(step, *key, value))
        self._handles = [h for h in self._handles if h.hooks_dict_ref() is not None]

    def see(self, path: str, side: Side, values: Any) -> None:
        """Apply the probes of a module to its inputs or outputs."""
        with self._caught():
            self._see(path, side, values)

    @contextmanager
    def _caught(self) -> Iterator[None]:
        """Give a failure inside the model's own passes to ``on_error``, if there is one."""
        try:
            yield
        except Exception as error:
            if self._on_error is None:
                raise
            self._on_error(error)

    def _see(self, path: str, side: Side, values: Any) -> None:
        again = torch._C._current_graph_task_id() != -1  # a checkpointed layer runs once more in backward
        for probe in self._probes[path]:
            if probe.signal == side and not again:
                self._measure(path, probe, activations(values))
            elif probe.signal == f"grad_{side}" and not (again and side == "input"):
                self._await_gradients(path, probe, values)

    def _measure(self, path: str, probe: Probe, named: Iterable[tuple[Place, Tensor]]) -> None:
        with torch.no_grad():
            for suffix, x in probe.of(named):
                self._pending.append((probe.key(path, suffix), measure(probe.statistic, x)))

    def _await_gradients(self, path: str, probe: Probe, values: Any) -> None:
        for suffix, x in probe.of(activations(values)):
            if x.requires_grad:
                key = probe.key(path, suffix)

                def arrive(gradient: Tensor, key: Key = key) -> None:
                    with self._caught(), torch.no_grad():
                        self._pending.append((key, measure(probe.statistic, gradient)))

                self._handles.append(x.register_hook(arrive))

    def _measure_parameters(self) -> None:
        for path, probes in self._probes.items():
            for probe in probes:
                if probe.signal in PARAMETERS and not probe.together:
                    self._measure(path, probe, self._parameters(path, probe.signal))
                elif probe.signal in PARAMETERS:
                    pairs = (self._parameters(inner, probe.signal, deep=True) for inner in probe.together)
                    norms = [measure("l2", x) for x in {id(x): x for some in pairs for _, x in some}.values()]
                    if norms:
                        self._measure(path, probe, [((), torch.stack(norms))])

    def _parameters(self, path: str, signal: str, *, deep: bool = False) -> list[tuple[Place, Tensor]]:
        """Return a module's parameters or their gradients by name, with ``deep`` also those inside it."""
        own = [(name, p) for name, p in self._modules[path].named_parameters(recurse=deep) if p.numel()]
        if signal == "weight":
            return [((name,), p) for name, p in own]
        gradients = [((name,), p.grad) for name, p in own if p.grad is not None]
        return [(place, g.to_dense() if g.is_sparse else g) for place, g in gradients]

    def close(self) -> None:
        """Remove the hooks that are left, and emit what is pending as records of the step after the last."""
        for handle in self._handles:
            handle.remove()
        if self._pending or self._step is None:
            self.flush(0 if self._step is None else self._step + 1)


@validate_arguments
@contextmanager
def observe(
    model: nn.Module, probes: Sequence[Probe], emit: Emit, *, on_error: OnError | None = None
) -> Iterator[Observer]:
    """Measure a model while it runs inside this block, and call ``emit`` with a record per measurement.

    ``flush(step)`` of the observer that the block receives fetches the records of a step; the rest is fetched
    at the end of the block. Outputs and gradients are bit-identical with and without probes, and no hook
    stays behind. Torch's layers leave their fused inference path, which gradients never take, while they have
    hooks. Compiled modules are not watched, with a warning, since compiled code may not call their hooks.
    A measurement that fails raises where the model runs, unless ``on_error`` takes the error.

    Raises UserError for a probe that matches no module.
    """
    modules = dict(bare(model).named_modules())
    matched: dict[str, list[Probe]] = {path: [] for path in modules}
    for probe in probes:
        exact = probe.modules in modules
        paths = [probe.modules] if exact else [path for path in modules if fnmatchcase(path, probe.modules)]
        if not paths:
            some = ", ".join([path for path in modules if path][:8])
            raise UserError(f"no module matches {probe.modules!r}; the paths begin {some}, …")
        for path in paths:
            matched[path].append(probe)
    observer = Observer(modules, matched, emit, on_error)
    flowing = {p: modules[p] for p, ps in matched.items() if any(q.signal in ACTIVATIONS for q in ps)}
    if unseen := _compiled(model, modules) & set(flowing):
        warnings.warn(
            f"{len(unseen)} of {len(flowing)} watched modules run compiled, and what flows through them is "
            "not recorded (weights and their gradients are); for that, observe the model that was given to "
            "torch.compile, and run that",
            stacklevel=3,
        )
        flowing = {path: module for path, module in flowing.items() if path not in unseen}
    with watching(flowing, observer.see):
        try:
            yield observer
        finally:
            observer.close()


def _compiled(model: nn.Module, modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the paths of the modules that run inside compiled code."""
    if any(compiles(m) for m in unwrapped(model)):
        return set(modules)
    roots = [path for path, module in modules.items() if compiles(module)]
    return {path for path in modules if any(f"{path}.".startswith(f"{root}.") for root in roots)}
