"""Measure the steps that an optimizer takes; the numbers stay on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from normlab.diagnosis.presets import SublayerSite
from normlab.diagnosis.probes import Record, gathered
from normlab.private_torch import copy_each, norm_of_each, subtract_each


class StepRecord(NamedTuple):
    """The numbers of one step; the tensors are on the device."""

    step: int
    lr: float
    loss: Tensor | None
    """None if nobody gave it."""
    names: tuple[str, ...]
    gradients: Tensor
    """`[P]`: the L2 norm of each named parameter's gradient."""
    updates: Tensor
    """`[P]`: the L2 norm of each named parameter's update."""
    seen: tuple[Record, ...] = ()
    """If the step was observed, what was measured of every module, in the order of measurement."""
    nll: Tensor | None = None
    norm: Tensor | None = None
    """The gradient's norm if it is not that of ``gradients``: 0 in a skipped step."""

    @property
    def values(self) -> Tensor:
        """`[3]`: loss, negative log-likelihood and gradient norm; NaN for what is not known."""
        norm = torch.linalg.vector_norm(self.gradients) if self.norm is None else self.norm
        unknown = torch.full_like(norm, torch.nan)
        loss, nll = (unknown if x is None else x.to(norm) for x in (self.loss, self.nll))
        return torch.stack([loss, nll, norm])

    def norms(self, quantity: str) -> dict[str, float]:
        """Return the L2 norm of each ``gradient`` or ``update``, by parameter."""
        norms = self.gradients if quantity == "gradient" else self.updates
        return dict(zip(self.names, norms.tolist(), strict=True))


class Meter:
    """Measures the norm of every parameter's gradient and of its update, in every step.

    For the updates it keeps a copy of the weights. That takes about 1% of a step's time on a CPU, and a
    quarter of the memory that weights, gradients and Adam's two averages take anyway. ``parts`` are the
    parameters by name as this process holds them; ``norms`` gives the norms of the whole tensors.
    """

    def __init__(
        self, parts: Mapping[str, nn.Parameter], norms: Callable[[Sequence[Tensor]], Tensor]
    ) -> None:
        self.norms, self.names = norms, tuple(parts)
        self.weights = tuple(p.detach() for p in parts.values())
        self._parameters = tuple(parts.values())
        self.moved = [torch.empty_like(w) for w in self.weights]
        """Each parameter's value before the last step minus its value after it."""
        self._moved_here, self._weights_here = local_parts(self.moved), local_parts(self.weights)

    def gradients(self) -> Tensor:
        """`[P]`: the L2 norm of each gradient, 0 if there is none."""
        here = [(i, stored(p.grad)) for i, p in enumerate(self._parameters) if p.grad is not None]
        if not here:
            return torch.zeros(len(self.names), device=self.weights[0].device)
        norms = self.norms([gradient for _, gradient in here])
        if len(here) == len(self.names):
            return norms
        places = torch.tensor([i for i, _ in here], device=norms.device)
        return norms.new_zeros(len(self.names)).index_copy_(0, places, norms)

    @torch.no_grad()
    def before(self) -> None:
        """Remember the weights; call it before the optimizer's step."""
        copy_each(self._moved_here, self._weights_here)

    @torch.no_grad()
    def after(self) -> Tensor:
        """`[P]`: the L2 norm of each parameter's update; call it after the optimizer's step."""
        subtract_each(self._moved_here, self._weights_here)
        return self.norms(self.moved)


def local_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return what this process holds of each tensor, sharing its memory: all of it, or a part if the tensor
    is spread over ranks.
    """
    return [x.to_local() if hasattr(x, "to_local") else x for x in tensors]


def stored(gradient: Tensor) -> Tensor:
    """Return the numbers of a gradient; for a sparse one, those that are not zero."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


class Grouping:
    """Combines the norms of parameters by what holds them: ``owners`` has a name for each parameter."""

    def __init__(self, owners: Sequence[str], device: torch.device) -> None:
        self.names = list(dict.fromkeys(owners))
        self._owner = torch.tensor([self.names.index(o) for o in owners], device=device)

    def together(self, norms: Tensor) -> Tensor:
        """`[G]`: the L2 norms of the groups, given those of the parameters."""
        squares = norms.new_zeros(len(self.names)).index_add_(0, self._owner, norms.square())
        return squares.sqrt()


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """`[P]`: the L2 norm of each tensor, without waiting for the device."""
    return torch.stack(norm_of_each(list(tensors)))


def _norms_over_ranks(parts: Sequence[Tensor]) -> Tensor:
    """`[P]`: L2 norms of whole tensors, with one exchange for each way in which ranks share them."""
    parts = [gathered(part) if _is_partial(part) else part for part in parts]
    shared_by = [_sums_over(part) for part in parts]
    norms = norms_of(local_parts(parts))
    for groups in dict.fromkeys(filter(None, shared_by)):
        here = torch.tensor([i for i, by in enumerate(shared_by) if by == groups], device=norms.device)
        squares = norms[here].square()
        for group in groups:
            distributed.all_reduce(squares, group=group)
        norms = norms.index_copy(0, here, squares.sqrt())
    return norms


def _is_partial(tensor: Any) -> bool:
    """Return whether ranks hold terms of a tensor, whose norms say nothing about that of their sum."""
    return any(placed.is_partial() for placed in getattr(tensor, "placements", ()))


def _sums_over(tensor: Any) -> tuple[Any, ...]:
    """Return the groups of ranks over which a tensor's parts are spread; empty if it is whole here."""
    groups = list[Any]()
    for dim, placed in enumerate(getattr(tensor, "placements", ())):
        if not placed.is_replicate():
            groups.append(tensor.device_mesh.get_group(dim))
    return tuple(groups)


class OptimizerSteps:
    """Measures the norms of gradients and updates of an optimizer's parameters in every step.

    It keeps one copy of these weights. Nothing waits for the device.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self.optimizer, self._model = optimizer, model
        self._lr = math.nan
        self._meter: Meter | None = None
        self._gradients: Tensor | None = None
        self._updates: Tensor | None = None
        self.depth = 0
        """Calls of ``step`` in progress: one that calls its parent class's ``step`` counts as two."""

    @property
    def stepped(self) -> bool:
        return self._updates is not None

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def meter(self) -> Meter:
        """The meter of the optimizer's parameters; a new one if some were added, as by unfreezing a layer."""
        if self._meter is None or len(self._meter.names) != len(self.parameters):
            self._meter = Meter(self._named_parameters(), _norms_over_ranks)
        return self._meter

    def _named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by name, in the order of the model, which is usually that of the stream."""
        number = {id(p): i for i, p in enumerate(self.parameters)}
        named = {name: p for name, p in self._model.named_parameters() if id(p) in number}
        known = {id(p) for p in named.values()}
        others = [p for p in self.parameters if id(p) not in known]
        return named | {f"parameter {number[id(p)]} of the optimizer": p for p in others}

    def before(self) -> None:
        """Remember the weights before a step, and its rate, which a scheduler changes afterwards."""
        self.meter.before()
        rates = (group.get("lr") for group in self.optimizer.param_groups)
        self._lr = max((float(rate) for rate in rates if rate is not None), default=math.nan)

    def measure_gradients(self) -> None:
        self._gradients = self.meter.gradients()

    def after(self) -> None:
        if self._gradients is None:  # the step ran a closure, whose gradients still exist
            self.measure_gradients()
        self._updates = self.meter.after()

    def record(self, step: int, loss: Tensor | None) -> StepRecord:
        """Return what was measured of the step."""
        assert self._gradients is not None
        assert self._updates is not None
        return StepRecord(step, self._lr, loss, self.meter.names, self._gradients, self._updates)

    def ratios(
        self, sites: Sequence[SublayerSite]
    ) -> Iterator[tuple[tuple[str | None, int | None, str], float]]:
        """Yield stack, index and module of parameter groups, and their updates relative to the weights."""
        assert self._updates is not None
        home = {path: site.module for site in reversed(sites) for path in site.modules}  # the first site's
        place = {site.module: (site.stack or None, site.index) for site in sites}
        modules = [name.rpartition(".")[0] for name in self.meter.names]
        grouping = Grouping([home.get(module, module) for module in modules], self._updates.device)
        lengths = grouping.together(self.meter.norms(self.meter.weights))
        values = (grouping.together(self._updates) / lengths).tolist()
        for module, value in zip(grouping.names, values, strict=True):
            stack, index = place.get(module, (None, None))
            yield (stack, index, module), value

    def forget(self) -> None:
        """Forget the step, which has been recorded."""
        self._gradients = self._updates = None
        self.depth = 0


def joined(records: Sequence[StepRecord]) -> StepRecord:
    """Merge the steps that several optimizers took into one, with the largest of their rates."""
    first, device = records[0], records[0].gradients.device
    gradients = torch.cat([record.gradients.to(device) for record in records])
    updates = torch.cat([record.updates.to(device) for record in records])
    names = tuple(name for record in records for name in record.names)
    lr = max(record.lr for record in records)
    return first._replace(lr=lr, names=names, gradients=gradients, updates=updates)
