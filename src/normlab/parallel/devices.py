"""Run a script that asks for CUDA on the CPU, as most scripts for several processes do."""

from __future__ import annotations

from functools import wraps
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

CUDA: Final = "cuda"
KEPT: Final = ("cuda", "pin_memory")
"""Methods that would move a tensor to a CUDA device; they leave it where it is."""
LEFT_OUT: Final = ("set_device", "synchronize")
"""Functions of ``torch.cuda`` that raise where there is no such device, and return nothing."""

DEVICES: Final = ("device_ids", "output_device")
"""The first arguments of ``DistributedDataParallel`` after its module; a module on the CPU must have none."""


class OnTheCpu(TorchFunctionMode):
    """Lets functions of torch take the CPU for each CUDA device that they are given."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in KEPT and args and isinstance(args[0], Tensor):
            return args[0]
        keywords = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*map(on_cpu, args), **keywords)


def on_cpu(value: Any) -> Any:
    """Return the CPU for a CUDA device, as an object or as text; anything else as it is."""
    if isinstance(value, torch.device) and value.type == CUDA:
        return torch.device("cpu")
    if isinstance(value, str) and value.partition(":")[0] == CUDA:
        return "cpu"
    return value


def leave_cuda_out() -> None:
    """Let what chooses among CUDA devices do nothing until the end of the process."""
    for name in LEFT_OUT:
        setattr(torch.cuda, name, _nothing_instead_of(getattr(torch.cuda, name)))
    wrapper: Any = nn.parallel.DistributedDataParallel
    make = wrapper.__init__

    @wraps(make)
    def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        others = {name: value for name, value in kwargs.items() if name not in DEVICES}
        make(self, module, None, None, *args[2:], **others)

    wrapper.__init__ = init


def _nothing_instead_of(function: Any) -> Any:
    """Return a function that does nothing; each has its own, as torch's compiler knows them by identity."""

    @wraps(function)
    def nothing(*args: Any, **kwargs: Any) -> None:
        return

    return nothing
