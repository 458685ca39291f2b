"""Measurements of our own models while they train, by presets that are named by their cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from normlab.diagnosis.probing.observe import Emit, Probe, Record, observe
from normlab.nn.stack import Stack
from normlab.nn.sublayer import Branch, Sublayer
from normlab.training.meter import Meter
from normlab.training.parallel import norms_of

SUBLAYERS: Final = "sublayers"
"""Stands in a probe for the paths of all sublayers; ``sublayers.f`` are their branches."""


class Preset(NamedTuple):
    """Probes of what flows, and whether updates are also measured by kind of matrix."""

    probes: tuple[Probe, ...]
    kinds: bool


_CHEAP = (Probe(SUBLAYERS),)
_STANDARD = (
    *_CHEAP,
    Probe(SUBLAYERS, "input"),
    Probe(f"{SUBLAYERS}.f"),
    Probe(SUBLAYERS, "grad_output"),
)
_FULL = (
    *_STANDARD,
    Probe(SUBLAYERS, statistic="similarity"),
    Probe(f"{SUBLAYERS}.f", "grad_output"),
    Probe(f"{SUBLAYERS}.f.*", statistic="max_abs"),
    Probe(f"{SUBLAYERS}.f.*", statistic="fraction_zero"),
)
PRESETS: Final = {
    "cheap": Preset(_CHEAP, kinds=False),
    "standard": Preset(_STANDARD, kinds=True),
    "full": Preset(_FULL, kinds=True),
}
"""Cheap: the stream after each sublayer, each sublayer's gradient norm, its update relative to its weights.
Standard: also the stream before it, its branch, the gradient of its output, and updates by kind of matrix.
Full: also how alike tokens are, the gradient of branches, and of every module in a branch (projections of
queries and keys, activations) the largest entry and the share of zeros.
"""

NOTHING: Final = Preset((), kinds=False)


def probes_of(preset: Preset, model: nn.Module) -> list[Probe]:
    """The probes of a preset with this model's paths, as few patterns as there can be."""
    most = max((len(list(m)) for m in model.modules() if isinstance(m, Stack)), default=0)
    digits = range(1, len(str(max(0, most - 1))) + 1)
    return [
        probe if not probe.modules.startswith(SUBLAYERS) else _at(probe, count)
        for probe in preset.probes
        for count in (digits if probe.modules.startswith(SUBLAYERS) else (0,))
    ]


def _at(probe: Probe, digits: int) -> Probe:
    path = f"*.sublayers.{'[0-9]' * digits}{probe.modules.removeprefix(SUBLAYERS)}"
    return Probe(path, probe.signal, probe.statistic, probe.every_tensor)


class Probing:
    """Measures a model in training, in the steps of the cadence, on the first micro-batch.

    In between there is no hook. A step that is measured waits for the device once, for the statistics of
    activations and gradients; those of parameters are fetched by ``flush``.
    """

    def __init__(self, model: nn.Module, preset: Preset, every_steps: int, emit: Emit) -> None:
        self._model, self._emit, self._every_steps = model, emit, every_steps
        self._probes = probes_of(preset, model)
        self._groups = _Groups(model, kinds=preset.kinds) if self._probes else None
        self._late: list[tuple[int, Tensor]] = []

    def due(self, step: int) -> bool:
        """Whether a step is measured: the first one, and those that the cadence divides."""
        return bool(self._probes) and (step == 1 or step % self._every_steps == 0)

    @contextmanager
    def passing(self, step: int, micro: int) -> Iterator[None]:
        """Measure the forward and backward pass of a step's micro-batch within this block, if it is due."""
        if micro or not self.due(step):
            yield
            return
        with observe(self._model, self._probes, self._emit) as observer:
            yield
            observer.flush(step)

    def stepped(self, step: int, meter: Meter, gradients: Tensor, updates: Tensor) -> None:
        """Keep the measurements of an optimiser step for ``flush`` to fetch."""
        if self._groups is not None and self.due(step):
            self._late.append((step, self._groups.measured(meter, gradients, updates)))

    def flush(self) -> None:
        """Fetch the measurements that are left on the device, and emit them."""
        if self._groups is None or not self._late:
            return
        fetched = torch.stack([values for _, values in self._late]).tolist()
        for (step, _), values in zip(self._late, fetched, strict=True):
            for (module, probe), value in zip(self._groups.names, values, strict=True):
                self._emit(Record(step, module, probe, value))
        self._late.clear()


class _Groups:
    """Parameters by the sublayer that holds them, or by their module outside of all, and matrices by kind."""

    def __init__(self, model: nn.Module, *, kinds: bool) -> None:
        named = dict(model.named_parameters())
        homes = [path for path, module in model.named_modules() if isinstance(module, Sublayer)]
        owners = [next((h for h in homes if n.startswith(f"{h}.")), n.rpartition(".")[0]) for n in named]
        self._modules = list(dict.fromkeys(owners))
        device = next(iter(named.values())).device
        self._owner = torch.tensor([self._modules.index(o) for o in owners], device=device)
        self._views = list(_matrices(model, list(named.values()))) if kinds else []
        self.names = [
            *((module, "grad.l2") for module in self._modules),
            *((module, "update.ratio") for module in self._modules),
            *((view.module, f"update.ratio[{view.kind}]") for view in self._views),
        ]

    @torch.no_grad()
    def measured(self, meter: Meter, gradients: Tensor, updates: Tensor) -> Tensor:
        """Return a value for each of ``names``: gradient norms, and updates relative to the new weights."""
        whole = meter.parallel.whole
        ratios = self._together(updates) / self._together(meter.parallel.norms(meter.weights))
        values = [self._together(gradients), ratios]
        if self._views:
            moved, weights = (
                norms_of([v.of(whole(v.index, tensors[v.index])) for v in self._views])
                for tensors in (meter.moved, meter.weights)
            )
            values.append(moved / weights)
        return torch.cat(values)

    def _together(self, norms: Tensor) -> Tensor:
        squares = norms.new_zeros(len(self._modules)).index_add_(0, self._owner, norms.square())
        return squares.sqrt()


class _View(NamedTuple):
    """One matrix of a branch, which may be a part of a packed parameter."""

    module: str
    kind: str
    index: int
    """The index of the parameter."""
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, whole: Tensor) -> Tensor:
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)


def _matrices(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[_View]:
    homes = {p.untyped_storage().data_ptr(): i for i, p in enumerate(parameters)}
    for path, sublayer in model.named_modules():
        if isinstance(sublayer, Sublayer) and isinstance(sublayer.f, Branch):
            for kind, matrix in sublayer.f.matrices().items():
                index = homes[matrix.untyped_storage().data_ptr()]
                offset = int(matrix.storage_offset() - parameters[index].storage_offset())
                yield _View(path, kind, index, matrix.shape, matrix.stride(), offset)


def rows_into(rows: list[dict[str, Any]]) -> Callable[[Record], None]:
    """Return an ``emit`` that collects records as rows of ``probes.jsonl``."""

    def emit(record: Record) -> None:
        rows.append(record._asdict())

    return emit
