"""Refuse indexes out of range before an accelerator's kernel reads them.

A CPU raises IndexError where an id is not in a table, and the next call runs. A kernel of CUDA asserts on the
device instead: after that, every call of the process raises, the user's own included, until it ends. Checks
try longer rows than the model may have positions for, so they must find out before the kernel does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from normlab.private_torch import EMBEDDING_BAG_OPERATORS, INDEX_PUT, UNSAFE_INDEX, TorchDispatchMode

_ATEN: Final = torch.ops.aten


class Lookup(NamedTuple):
    """Whole numbers that choose among ``size`` entries. The least that is allowed is ``first``, which is
    below 0 where negative numbers count from the end.
    """

    index: Tensor
    first: int
    size: int


class LookupsInRange(TorchDispatchMode):
    """Raises IndexError for a lookup out of range, as a CPU would; it waits for the device at each lookup."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        lookups = _LOOKUPS.get(func.overloadpacket)
        for lookup in lookups(*args) if lookups else ():
            _require_in_range(func, lookup)
        return func(*args, **(kwargs or {}))


def lookups_in_range(model: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which a lookup out of range raises before the model's device sees it; a CPU needs
    none, since it raises itself.
    """
    devices = {p.device.type for p in model.parameters()}
    return nullcontext() if devices <= {"cpu", "meta"} else LookupsInRange()


def _require_in_range(func: Any, lookup: Lookup) -> None:
    index, first, size = lookup
    if index.is_meta or not index.numel():
        return
    low, high = torch.stack(index.aminmax()).tolist()
    for entry in (low, high):
        if not first <= entry < size:
            name = func.overloadpacket.__name__
            raise IndexError(f"{name}: index {entry} is out of range for a dimension of {size} entries")


def _rows(table: Tensor, index: Tensor, *_: Any) -> Iterator[Lookup]:
    """``embedding(table, index)``."""
    yield Lookup(index, 0, table.shape[0])


def _along(x: Tensor, dim: int, index: Tensor, *_: Any) -> Iterator[Lookup]:
    """``gather(x, dim, index)``."""
    yield Lookup(index, 0, x.shape[dim] if x.ndim else 1)


def _classes(
    logp: Tensor, target: Tensor, weight: Any = None, reduction: Any = None, ignore_index: int = -100
) -> Iterator[Lookup]:
    """``nll_loss(logp, target)``, where ``ignore_index`` is no class and chooses nothing."""
    yield Lookup(target[target != ignore_index], 0, logp.shape[1 if logp.ndim > 1 else 0])


def _entries(x: Tensor, indices: Sequence[Tensor | None], *_: Any) -> Iterator[Lookup]:
    """``x[indices]``, in which a mask stands for as many dimensions as it has."""
    dim = 0
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            dim += index.ndim
            continue
        if index is not None:
            yield Lookup(index, -x.shape[dim], x.shape[dim])
        dim += 1


_Lookups: TypeAlias = Callable[..., Iterator[Lookup]]
_LOOKUPS: Final[Mapping[Any, _Lookups]] = {
    **dict.fromkeys((_ATEN.embedding, *EMBEDDING_BAG_OPERATORS), _rows),
    **dict.fromkeys((_ATEN.nll_loss_forward, _ATEN.nll_loss2d_forward), _classes),
    **dict.fromkeys((_ATEN.index, UNSAFE_INDEX), _entries),
    **dict.fromkeys((_ATEN.index_put, _ATEN.index_put_, INDEX_PUT), _entries),
    **dict.fromkeys((_ATEN.gather, _ATEN.index_select, _ATEN.index_add, _ATEN.index_add_), _along),
    **dict.fromkeys((_ATEN.index_copy, _ATEN.index_copy_, _ATEN.index_fill, _ATEN.index_fill_), _along),
    **dict.fromkeys((_ATEN.scatter, _ATEN.scatter_, _ATEN.scatter_add, _ATEN.scatter_add_), _along),
    **dict.fromkeys((_ATEN.scatter_reduce, _ATEN.scatter_reduce_), _along),
}
"""The operators whose kernels read numbers as places, and which numbers these are."""
