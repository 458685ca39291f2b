"""What a pass uses of a model: the modules that it calls, the parameters and buffers that it reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from normlab.private_torch import is_functorch_wrapped, is_traceable_wrapper_subclass
from normlab.trace.tensors import tensors_in


@dataclass
class Use:
    """What ran of a model, and what was read of it."""

    modules: set[str] = field(default_factory=set)
    """Paths of the modules that were called."""
    tensors: set[str] = field(default_factory=set)
    """Paths of the parameters and buffers that functions of torch were given."""

    @property
    def paths(self) -> list[str]:
        """Both, in the order of their names; "" is the model as a whole."""
        return sorted(self.modules | self.tensors)

    def missing_from(self, other: Use) -> set[str]:
        """Return the paths that the other use lacks."""
        return (self.modules - other.modules) | (self.tensors - other.tensors)


@contextmanager
def use_of(model: nn.Module, *, in_graph: bool = False) -> Iterator[Use]:
    """Record, inside this block, what is used of a model, by whatever means it is reached.

    Nothing is attached to the model, which may be somebody else's: the hook is torch's global one.

    Args:
        model: the model to watch.
        in_graph: whether a tensor counts only where a gradient may flow from what is computed of it.
    """
    use = Use()
    paths = {id(module): path for path, module in model.named_modules()}

    def see_call(module: nn.Module, _: Any) -> None:
        if id(module) in paths:
            use.modules.add(paths[id(module)])

    handle = register_module_forward_pre_hook(see_call)
    try:
        with _ReadWatch(model, use, in_graph=in_graph):
            yield use
    finally:
        handle.remove()


class _ReadWatch(TorchFunctionMode):
    """Sees functions of torch that read a model's parameters and buffers, or views of them."""

    def __init__(self, model: nn.Module, use: Use, *, in_graph: bool) -> None:
        super().__init__()
        self._use, self._in_graph = use, in_graph
        self._paths = dict[Any, str]()
        """The path of a parameter or buffer, by each of its marks."""
        for path, x in (*model.named_parameters(), *model.named_buffers()):
            self._paths |= dict.fromkeys(_marks_of(x), path)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        marks = {mark for _, x in tensors_in((args, kwargs or {})) for mark in _marks_of(x)}
        known = marks & self._paths.keys()
        result = func(*args, **kwargs or {})
        if known and _is_reading(result, in_graph=self._in_graph):
            self._use.tensors.update(self._paths[mark] for mark in known)
        return result


def _marks_of(x: Tensor) -> list[Any]:
    """Return what a tensor is known by: itself, and its storage, which its views have, too."""
    storage = storage_of(x)
    return [id(x)] if storage is None else [id(x), storage]


def storage_of(x: Tensor) -> tuple[torch.device, int] | None:
    """Return where the storage of a tensor is; None if it has none of its own, or an empty one."""
    wraps_others = is_traceable_wrapper_subclass(x) or is_functorch_wrapped(x)
    if x.layout is not torch.strided or x.is_meta or wraps_others:
        return None
    storage = x.untyped_storage()
    return (storage.device, storage.data_ptr()) if storage.nbytes() else None


def _is_reading(result: Any, *, in_graph: bool) -> bool:
    """Return whether a function returns numbers of a tensor, and not just its size, type or device."""
    tensors = [x for _, x in tensors_in(result)]
    if in_graph:
        return any(x.grad_fn is not None for x in tensors)
    is_item = isinstance(result, float)  # sizes are integers
    return bool(tensors) or is_item
