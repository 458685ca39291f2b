"""A process group of one rank without threads or sockets.

A thread of gloo may still hold a Python tensor when its group goes: the process then crashes, or waits for
ever (github.com/pytorch/pytorch/pull/179291).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, distributed
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

BACKEND = "one_rank"


def finished(tensors: Any) -> Any:
    future: Future = Future()
    future.set_result(tensors)
    return _create_work_from_future(future)


class OneRank(distributed.ProcessGroup):
    def getBackendName(self) -> str:
        return BACKEND

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return finished(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return finished(tensors)

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> Any:
        for (output,), x in zip(outputs, tensors, strict=True):
            output.copy_(x)
        return finished(outputs)

    def barrier(self, opts: Any = None) -> Any:
        return finished([])


def create(store: Any, rank: int, size: int, timeout: Any) -> OneRank:
    return OneRank(rank, size)


if not hasattr(distributed.Backend, BACKEND.upper()):
    distributed.Backend.register_backend(BACKEND, create, devices=["cpu"])
