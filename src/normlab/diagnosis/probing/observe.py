"""Probes in, records out; the model's code, outputs and gradients stay as they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normlab.diagnosis.probing.stats import STATISTICS, measure
from normlab.diagnosis.reading.taps import Place, Side, activations, bare, compiles, unwrapped, watching
from normlab.errors import UserError

ACTIVATIONS = ("input", "output", "grad_output")
PARAMETERS = ("weight", "grad")
"""Signals: what flows through a module, and its own parameters with their gradients."""


@dataclass(frozen=True)
class Probe:
    """One statistic of one signal of every module whose path matches ``modules``, a glob.

    ``input``, ``output`` and ``grad_output`` (of the loss in the output) are taken at each call of the module
    from its first floating tensor `[..., D]`; ``weight`` and ``grad`` when the records are fetched, from its
    first own parameter. ``every_tensor`` takes all of them, those after the first under a name with a suffix.

    Raises UserError for a signal or statistic that does not exist.
    """

    modules: str
    signal: str = "output"
    statistic: str = "rms"
    every_tensor: bool = False

    def __post_init__(self) -> None:
        for kind, given, allowed in (
            ("signal", self.signal, (*ACTIVATIONS, *PARAMETERS)),
            ("statistic", self.statistic, tuple(STATISTICS)),
        ):
            if given not in allowed:
                raise UserError(f"unknown {kind} {given!r} in a probe (allowed: {', '.join(allowed)})")

    def of(self, named: Iterable[tuple[Place, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are measured, each under the name of its record."""
        for i, (place, x) in enumerate(named):
            if i and not self.every_tensor:
                return
            yield f"{self.signal}.{self.statistic}" + (f"[{'.'.join(map(str, place))}]" if i else ""), x


class Record(NamedTuple):
    """One number: ``probe`` is ``signal.statistic``, with ``[name]`` behind it after the first tensor."""

    step: int
    module: str
    probe: str
    value: float


Emit = Callable[[Record], None]


class Observer:
    """What ``observe`` gives to its body."""

    def __init__(
        self, modules: Mapping[str, nn.Module], probes: Mapping[str, Sequence[Probe]], emit: Emit
    ) -> None:
        self._modules, self._probes, self._emit = modules, probes, emit
        self._pending: list[tuple[str, str, Tensor]] = []
        self._handles: list[Any] = []
        self._step: int | None = None

    def flush(self, step: int) -> None:
        """Fetch all that was measured since the last time, in one transfer from each device, as records of
        ``step``. Weights and gradients are measured now.
        """
        self._measure_parameters()
        rows, self._pending = self._pending, list[tuple[str, str, Tensor]]()
        self._step = step
        values: list[float] = [0.0] * len(rows)
        for device in {x.device for _, _, x in rows}:
            here = [i for i, (_, _, x) in enumerate(rows) if x.device == device]
            fetched = torch.stack([rows[i][2].float() for i in here]).tolist()
            for i, value in zip(here, fetched, strict=True):
                values[i] = value
        for (module, probe, _), value in zip(rows, values, strict=True):
            self._emit(Record(step, module, probe, value))
        self._handles = [h for h in self._handles if h.hooks_dict_ref() is not None]

    def see(self, path: str, side: Side, values: Any) -> None:
        """Measure what the probes of a module ask of its inputs or outputs."""
        again = torch._C._current_graph_task_id() != -1  # a checkpointed layer runs once more in backward
        for probe in self._probes[path]:
            if probe.signal == side and not again:
                self._measure(path, probe, activations(values))
            elif probe.signal == "grad_output" and side == "output":
                self._await_gradients(path, probe, values)

    def _measure(self, path: str, probe: Probe, named: Iterable[tuple[Place, Tensor]]) -> None:
        with torch.no_grad():
            for name, x in probe.of(named):
                self._pending.append((path, name, measure(probe.statistic, x)))

    def _await_gradients(self, path: str, probe: Probe, values: Any) -> None:
        for name, x in probe.of(activations(values)):
            if x.requires_grad:

                def arrive(gradient: Tensor, name: str = name) -> None:
                    with torch.no_grad():
                        self._pending.append((path, name, measure(probe.statistic, gradient)))

                self._handles.append(x.register_hook(arrive))

    def _measure_parameters(self) -> None:
        for path, probes in self._probes.items():
            own = list(self._modules[path].named_parameters(recurse=False))
            weights = [((name,), p) for name, p in own if p.numel()]
            grads = [((name,), p.grad) for name, p in own if p.grad is not None and p.numel()]
            for probe in probes:
                if probe.signal in PARAMETERS:
                    self._measure(path, probe, weights if probe.signal == "weight" else grads)

    def close(self) -> None:
        """Take the hooks off what is still alive and fetch what is left, as of the step after the last."""
        for handle in self._handles:
            handle.remove()
        if self._pending or self._step is None:
            self.flush(0 if self._step is None else self._step + 1)


@contextmanager
def observe(model: nn.Module, probes: Sequence[Probe], emit: Emit) -> Iterator[Observer]:
    """Within this block ``emit`` is called with a record for every measurement; ``flush(step)`` of what the
    block is given says which step they belong to, and what is left is fetched at the end of the block.

    Outputs and gradients are bit-identical with and without, and no hook stays behind. Torch's layers leave
    their fused inference path, which gradients never take, while hooks are on them. Modules that run compiled
    are not watched, with a warning: their hooks may or may not be part of the compiled code.

    Raises UserError for a probe that matches no module.
    """
    modules = dict(bare(model).named_modules())
    matched: dict[str, list[Probe]] = {path: [] for path in modules}
    for probe in probes:
        paths = [path for path in modules if fnmatchcase(path, probe.modules)]
        if not paths:
            some = ", ".join([path for path in modules if path][:8])
            raise UserError(f"no module matches {probe.modules!r}; the paths begin {some}, …")
        for path in paths:
            matched[path].append(probe)
    observer = Observer(modules, matched, emit)
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
    """Paths of the modules that run inside compiled code."""
    if any(compiles(m) for m in unwrapped(model)):
        return set(modules)
    roots = [path for path, module in modules.items() if compiles(module)]
    return {path for path in modules if any(f"{path}.".startswith(f"{root}.") for root in roots)}
