"""The steps that an optimizer really takes, measured by hooks on it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from normlab.diagnosis.probing.observe import whole
from normlab.watching.meter import Grouping, Meter, StepRecord, local_parts, norms_of
from normlab.watching.observation import Place


class _Owned:
    """The parameters of an optimizer by name, whole or as the parts of this rank."""

    def __init__(self, parts: dict[str, nn.Parameter]) -> None:
        self.parts = parts

    def norms(self, parts: Sequence[Tensor], /) -> Tensor:
        """`[P]`: L2 norms of whole tensors, their squares added up over the ranks where these hold parts.

        One exchange for each way in which tensors are spread over ranks, as one for all that FSDP2 shards.
        """
        parts = [whole(part) if _is_sum(part) else part for part in parts]
        ways = [_sums_over(part) for part in parts]
        norms = norms_of(local_parts(parts))
        for way in dict.fromkeys(filter(None, ways)):
            here = torch.tensor([i for i, own in enumerate(ways) if own == way], device=norms.device)
            squares = norms[here].square()
            for group in way:
                distributed.all_reduce(squares, group=group)
            norms = norms.index_copy(0, here, squares.sqrt())
        return norms


def _sums_over(tensor: Tensor) -> tuple[Any, ...]:
    """Return the groups of ranks over which the parts of a tensor are spread, none if it is whole here."""
    spread: Any = tensor
    placements = enumerate(getattr(tensor, "placements", ()))
    return tuple(spread.device_mesh.get_group(dim) for dim, placed in placements if not placed.is_replicate())


def _is_sum(tensor: Tensor) -> bool:
    """Whether a tensor is spread over ranks as terms that are still to be added."""
    return any(placed.is_partial() for placed in getattr(tensor, "placements", ()))


class OptimizerSteps:
    """Measures the norms of gradients and updates of an optimizer's parameters in every step.

    It keeps one copy of these weights. Nothing waits for the device.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self.optimizer, self._model = optimizer, model
        self._lr = math.nan
        self._meter: Meter[_Owned] | None = None
        self._gradients: Tensor | None = None
        self._updates: Tensor | None = None
        self.depth = 0
        """Calls of ``step`` that have begun: one that calls that of its parent class begins two."""

    @property
    def stepped(self) -> bool:
        """Whether a step was taken since ``forget``."""
        return self._updates is not None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimizer has now."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def meter(self) -> Meter[_Owned]:
        """The meter of these parameters."""
        owned = self.parameters
        if self._meter is None or len(self._meter.names) != len(owned):
            names = {id(p): name for name, p in self._model.named_parameters()}
            named = {names.get(id(p), f"parameter {i} of the optimizer"): p for i, p in enumerate(owned)}
            # in the order of the model, which is that of the stream as a rule
            order = {name: i for i, name in enumerate(names.values())}
            self._meter = Meter(
                _Owned(dict(sorted(named.items(), key=lambda one: order.get(one[0], len(order)))))
            )
        return self._meter

    def before(self) -> None:
        """Remember the weights before a step, and its rate, which a scheduler changes after it."""
        self.meter.before()
        rates = (group.get("lr") for group in self.optimizer.param_groups)
        self._lr = max((float(rate) for rate in rates if rate is not None), default=math.nan)

    def measure_gradients(self) -> None:
        """Measure the gradients that the step is given."""
        self._gradients = self.meter.gradients()

    def after(self) -> None:
        """Measure the update; call it after the step."""
        if self._gradients is None:  # the step ran a closure, whose gradients are still there
            self.measure_gradients()
        self._updates = self.meter.after()

    def record(self, step: int, loss: Tensor | None) -> StepRecord:
        """Return the numbers of the step, on the device."""
        assert self._gradients is not None
        assert self._updates is not None
        return StepRecord(step, self._lr, loss, self.meter.names, self._gradients, self._updates)

    def ratios(self, places: Sequence[Place]) -> Iterator[tuple[tuple[str | None, int | None, str], float]]:
        """Yield stack, index and module of groups of parameters, and their updates relative to weights."""
        assert self._updates is not None
        homes = {path: place for place in reversed(places) for path in place.modules}
        modules = [name.rpartition(".")[0] for name in self.meter.names]
        owners = [homes[m].module if m in homes else m for m in modules]
        found = {place.module: (place.stack, place.index) for place in places}
        grouping = Grouping(owners, self._updates.device)
        lengths = grouping.together(self.meter.parallel.norms(self.meter.weights))
        values = (grouping.together(self._updates) / lengths).tolist()
        for module, value in zip(grouping.names, values, strict=True):
            stack, index = found.get(module, (None, None))
            yield (stack, index, module), value

    def forget(self) -> None:
        """Forget the step, which is over."""
        self._gradients = self._updates = None
        self.depth = 0


def joined(records: Sequence[StepRecord]) -> StepRecord:
    """Return the steps that several optimizers took as one, whose rate is the largest."""
    first, device = records[0], records[0].gradients.device
    gradients, updates = (
        torch.cat([norms.to(device) for norms in kind])
        for kind in ([r.gradients for r in records], [r.updates for r in records])
    )
    names = tuple(name for record in records for name in record.names)
    lr = max(record.lr for record in records)
    return first._replace(lr=lr, names=names, gradients=gradients, updates=updates)
