"""Probes of normlab's own models while they train, by the presets of ``diagnosis.probes``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from normlab.diagnosis.probes import (
    PARAMETERS,
    PRESETS,
    Emit,
    Key,
    Probe,
    Record,
    SublayerSite,
    observe,
    preset_probes,
)
from normlab.nn.sublayer import Sublayer
from normlab.trace.tensors import Tap
from normlab.training.parallel import Parallel
from normlab.watching.meter import Grouping, Meter, StepRecord, norms_of


class Preset(NamedTuple):
    """Probes of activations, and whether updates are also measured by kind of matrix."""

    probes: tuple[Probe, ...]
    kinds: bool


NOTHING: Final = Preset((), kinds=False)


def preset_of(name: str, model: nn.Module) -> Preset:
    """Return what a preset of ``diagnosis.probes`` measures in this model; nothing for "".

    Parameters are not probed, since the trainer has their norms: weights, gradients before clipping, and
    updates relative to the weights, of each sublayer and, from ``standard`` on, of each kind of matrix.
    """
    if not name:
        return NOTHING
    probes = [p for p in preset_probes(_sites(model), name) if p.signal not in PARAMETERS]
    return Preset(tuple(probes), kinds=name != PRESETS[0])


def _sites(model: nn.Module) -> Iterator[SublayerSite]:
    for path, module in model.named_modules():
        if isinstance(module, Sublayer):
            stack, _, number = path.rpartition(".")
            inside = [name for name, _ in module.named_modules(prefix=path) if name.startswith(f"{path}.f.")]
            before, branch, after = Tap(path, "input", (0,)), Tap(f"{path}.f", "output"), Tap(path, "output")
            taps = {"before": before, "branch": branch, "after": after}
            yield SublayerSite(stack, int(number), tuple(inside), taps)


class Probing:
    """Measures one model in training: the steps of the cadence, in their first micro-batch.

    In between there is no hook. A step that is measured waits for the device once, for what flows; what
    belongs to parameters is fetched by ``flush``.
    """

    def __init__(self, model: nn.Module, preset: Preset, every_steps: int, emit: Emit) -> None:
        self._model, self._emit, self._every_steps = model, emit, every_steps
        self._probes = preset.probes
        self._groups = _Groups(model, kinds=preset.kinds) if self._probes else None
        self._late: list[tuple[int, list[Key], Tensor]] = []

    def due(self, step: int) -> bool:
        """Whether a step is measured: the first one, and those that the cadence divides."""
        return bool(self._probes) and (step == 1 or step % self._every_steps == 0)

    @contextmanager
    def passing(self, step: int, micro: int) -> Iterator[None]:
        if micro or not self.due(step):
            yield
            return
        with observe(self._model, self._probes, self._emit) as observer:
            yield
            observer.flush(step)

    def measure_step(self, record: StepRecord, meter: Meter[Parallel]) -> None:
        """Keep the norms of an optimiser step for ``flush`` to fetch."""
        if self._groups is not None and self.due(record.step):
            measured = self._groups.measured(meter, record.gradients, record.updates)
            self._late.append((record.step, *measured))

    def flush(self) -> None:
        if not self._late:
            return
        fetched = torch.stack([values for *_, values in self._late]).tolist()
        for (step, keys, _), values in zip(self._late, fetched, strict=True):
            for key, value in zip(keys, values, strict=True):
                self._emit(Record(step, *key, value))
        self._late.clear()


_WHOLE: Final = (("grad", "l2"), ("weight", "l2"), ("update", "ratio"))
"""Signals and statistics of all parameters of a sublayer."""


class _Groups:
    """Parameters by the sublayer that holds them, or by their module outside of all, and matrices by kind."""

    def __init__(self, model: nn.Module, *, kinds: bool) -> None:
        parameters = dict(model.named_parameters())
        homes = [path for path, module in model.named_modules() if isinstance(module, Sublayer)]
        owners = [next((h for h in homes if n.startswith(f"{h}.")), n.rpartition(".")[0]) for n in parameters]
        self._grouping = Grouping(owners, next(iter(parameters.values())).device)
        self._kinds, self._homes = kinds, homes

    @torch.no_grad()
    def measured(
        self, meter: Meter[Parallel], gradients: Tensor, updates: Tensor
    ) -> tuple[list[Key], Tensor]:
        """Return keys and their values: norms of gradients and weights, and updates relative to weights."""
        whole, views = meter.parallel.whole, meter.parallel.matrices if self._kinds else ()
        keys: list[Key] = [
            *(
                (*_place(m, self._homes), m, signal, how)
                for signal, how in _WHOLE
                for m in self._grouping.names
            ),
            *((*_place(v.module, self._homes), v.module, f"update[{v.kind}]", "ratio") for v in views),
        ]
        together = self._grouping.together
        lengths = together(meter.parallel.norms(meter.weights))
        values = [together(gradients), lengths, together(updates) / lengths]
        if views:
            moved, weights = (
                norms_of([v.of(whole(meter.names[v.index], tensors[v.index])) for v in views])
                for tensors in (meter.moved, meter.weights)
            )
            values.append(moved / weights)
        return keys, torch.cat(values)


def _place(module: str, sublayers: Sequence[str]) -> tuple[str | None, int | None]:
    """Return the stack and the index of a sublayer, None for any other module."""
    stack, _, number = module.rpartition(".")
    return (stack, int(number)) if module in sublayers else (None, None)
