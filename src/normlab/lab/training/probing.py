"""Probes of normlab's models while they train: of activations and gradients by hooks, of updates by norms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import torch
from torch import Tensor, nn

from normlab.diagnosis.presets import PRESETS, SublayerSite, preset_probes
from normlab.diagnosis.probes import PARAMETERS, Emit, Key, Probe, Record, observe
from normlab.lab.training.parallel import Parallel
from normlab.nn.sublayer import Sublayer
from normlab.trace.tensors import Tap, eager
from normlab.watching.meter import Grouping, Meter, StepRecord, norms_of


def activation_probes(model: nn.Module, preset: str) -> list[Probe]:
    """Return the probes of a preset of ``diagnosis.presets`` in this model; none for "".

    Parameters are not probed, since the trainer has their norms.
    """
    probes = preset_probes(_sites(model), preset) if preset else []
    return [probe for probe in probes if probe.signal not in PARAMETERS]


def _sites(model: nn.Module) -> Iterator[SublayerSite]:
    for path, module in model.named_modules():
        if not isinstance(module, Sublayer):
            continue
        stack, _, number = path.rpartition(".")
        branch = f"{path}.f"
        inside = [name for name, _ in module.named_modules(prefix=path) if name.startswith(f"{branch}.")]
        taps = {
            "before": Tap(path, "input", (0,)),
            "branch": Tap(branch, "output"),
            "after": Tap(path, "output"),
        }
        yield SublayerSite(stack, int(number), tuple(inside), taps)


@contextmanager
def probed(model: nn.Module, probes: Sequence[Probe], emit: Emit, step: int) -> Iterator[None]:
    """Within this block, measure a model's passes, uncompiled; the records of ``step`` follow at its end."""
    with eager(), observe(model, probes, emit) as observer:
        yield
        observer.flush(step)


_OF_SUBLAYERS: Final = (("grad", "l2"), ("weight", "l2"), ("update", "ratio"))
"""Signals and statistics of all parameters of a sublayer."""


class Probing:
    """Measures what a preset of ``diagnosis.presets`` names in one model in training, on the first
    micro-batch of every step that is ``due``; nothing for "".

    Gradients are measured before clipping, and updates relative to the weights, for each sublayer and, from
    ``standard`` on, for each kind of matrix. Between the measured steps there are no hooks. A measured step
    waits for the device once, for activations and gradients; ``flush`` fetches what belongs to parameters.
    """

    def __init__(self, model: nn.Module, preset: str, every_steps: int, emit: Emit) -> None:
        self._model, self._emit, self._every_steps = model, emit, every_steps
        self._probes = activation_probes(model, preset)
        self._of_kinds = preset != PRESETS[0]
        self._sublayers = [path for path, module in model.named_modules() if isinstance(module, Sublayer)]
        parameters = dict(model.named_parameters())
        owners = [self._owner_of(name) for name in parameters]
        self._grouping = Grouping(owners, next(iter(parameters.values())).device)
        self._unfetched: list[tuple[int, list[Key], Tensor]] = []
        """The norms of measured steps that are still on the device: step, keys and values."""

    def _owner_of(self, parameter: str) -> str:
        """Return the sublayer that a parameter belongs to, or its module if it is in none."""
        for sublayer in self._sublayers:
            if parameter.startswith(f"{sublayer}."):
                return sublayer
        return parameter.rpartition(".")[0]

    def due(self, step: int) -> bool:
        """Whether a step is measured: the first one, and every multiple of the cadence."""
        return bool(self._probes) and (step == 1 or step % self._every_steps == 0)

    def passing(self, step: int, micro_batch: int) -> AbstractContextManager[None]:
        if micro_batch or not self.due(step):
            return nullcontext()
        return probed(self._model, self._probes, self._emit, step)

    @torch.no_grad()
    def measure_step(self, record: StepRecord, meter: Meter, parallel: Parallel) -> None:
        """Keep the norms of an optimizer step for ``flush`` to fetch."""
        if not self.due(record.step):
            return
        groups = self._grouping
        keys: list[Key] = []
        for signal, statistic in _OF_SUBLAYERS:
            keys += [(*self._place(module), module, signal, statistic) for module in groups.names]
        weights = groups.together(meter.norms(meter.weights))
        values = [groups.together(record.gradients), weights, groups.together(record.updates) / weights]
        if self._of_kinds and parallel.matrices:
            for view in parallel.matrices:
                module = view.module
                keys.append((*self._place(module), module, f"update[{view.kind}]", "ratio"))
            moved = self._matrix_norms(meter.moved, meter, parallel)
            values.append(moved / self._matrix_norms(meter.weights, meter, parallel))
        self._unfetched.append((record.step, keys, torch.cat(values)))

    def _matrix_norms(self, parts: Sequence[Tensor], meter: Meter, parallel: Parallel) -> Tensor:
        """Return the norms of the branches' matrices, `[matrices]`, of this rank's ``parts`` by parameter."""
        matrices = []
        for view in parallel.matrices:
            parameter = parallel.whole(meter.names[view.index], parts[view.index])
            matrices.append(view.of(parameter))
        return norms_of(matrices)

    def flush(self) -> None:
        """Fetch the norms from the device, in one transfer, and emit their records."""
        if not self._unfetched:
            return
        fetched = torch.stack([values for *_, values in self._unfetched]).tolist()
        for (step, keys, _), values in zip(self._unfetched, fetched, strict=True):
            for key, value in zip(keys, values, strict=True):
                self._emit(Record(step, *key, value))
        self._unfetched.clear()

    def _place(self, module: str) -> tuple[str | None, int | None]:
        """Return the stack and the index of a sublayer, None for any other module."""
        if module not in self._sublayers:
            return None, None
        stack, _, number = module.rpartition(".")
        return stack, int(number)
