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

    def norms(self, what: str) -> dict[str, float]:
        """Return the L2 norm of each ``gradient`` or ``update``, by parameter."""
        norms = self.gradients if what == "gradient" else self.updates
        return dict(zip(self.names, norms.tolist(), strict=True))


class Meter:
    """Measures the norm of every parameter's gradient and of its update, in every step.

    For the updates it keeps a copy of the weights: about 1% of a step's time on a CPU, a quarter of what Adam
    keeps anyway. ``parts`` are the parameters by name as this process holds them; ``norms`` gives the norms
    of the whole tensors.
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
        whole = norms.new_zeros(len(self.names))
        return whole.index_copy_(0, torch.tensor([i for i, _ in here], device=norms.device), norms)

    @torch.no_grad()
    def before(self) -> None:
        """Remember the weights; call it before the optimizer's step."""
        torch._foreach_copy_(self._moved_here, self._weights_here)

    @torch.no_grad()
    def after(self) -> Tensor:
        """`[P]`: the L2 norm of each parameter's update; call it after the optimizer's step."""
        torch._foreach_sub_(self._moved_here, self._weights_here)
        return self.norms(self.moved)


def local_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return what this process holds of each tensor, sharing its memory: all of it, or a part if the tensor
    is spread over ranks.
    """
    return [getattr(x, "to_local", lambda x=x: x)() for x in tensors]


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
    return torch.stack(torch._foreach_norm(list(tensors)))


def _norms_over_ranks(parts: Sequence[Tensor]) -> Tensor:
    """`[P]`: L2 norms of whole tensors, with one exchange for each way in which ranks share them."""
    is_sum = (any(placed.is_partial() for placed in getattr(part, "placements", ())) for part in parts)
    parts = [gathered(part) if summed else part for part, summed in zip(parts, is_sum, strict=True)]
    ways = [_sums_over(part) for part in parts]
    norms = norms_of(local_parts(parts))
    for way in dict.fromkeys(filter(None, ways)):
        here = torch.tensor([i for i, own in enumerate(ways) if own == way], device=norms.device)
        squares = norms[here].square()
        for group in way:
            distributed.all_reduce(squares, group=group)
        norms = norms.index_copy(0, here, squares.sqrt())
    return norms


def _sums_over(tensor: Any) -> tuple[Any, ...]:
    """Return the groups of ranks over which a tensor's parts are spread; empty if it is whole here."""
    placements = enumerate(getattr(tensor, "placements", ()))
    return tuple(tensor.device_mesh.get_group(dim) for dim, placed in placements if not placed.is_replicate())


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
        owned = self.parameters
        if self._meter is None or len(self._meter.names) != len(owned):
            names = {id(p): name for name, p in self._model.named_parameters()}
            by_name = {names.get(id(p), f"parameter {i} of the optimizer"): p for i, p in enumerate(owned)}
            # in the order of the model, usually that of the stream
            order = {name: i for i, name in enumerate(names.values())}
            parts = dict(sorted(by_name.items(), key=lambda one: order.get(one[0], len(order))))
            self._meter = Meter(parts, _norms_over_ranks)
        return self._meter

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
        assert self._gradients is not None
        assert self._updates is not None
        return StepRecord(step, self._lr, loss, self.meter.names, self._gradients, self._updates)

    def ratios(
        self, sites: Sequence[SublayerSite]
    ) -> Iterator[tuple[tuple[str | None, int | None, str], float]]:
        """Yield stack, index and module of parameter groups, and their updates relative to the weights."""
        assert self._updates is not None
        homes = {path: site for site in reversed(sites) for path in site.modules}
        modules = [name.rpartition(".")[0] for name in self.meter.names]
        owners = [homes[m].module if m in homes else m for m in modules]
        known = {site.module: (site.stack or None, site.index) for site in sites}
        grouping = Grouping(owners, self._updates.device)
        lengths = grouping.together(self.meter.norms(self.meter.weights))
        values = (grouping.together(self._updates) / lengths).tolist()
        for module, value in zip(grouping.names, values, strict=True):
            stack, index = known.get(module, (None, None))
            yield (stack, index, module), value

    def forget(self) -> None:
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
