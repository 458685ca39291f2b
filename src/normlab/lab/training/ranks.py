"""The processes that share the steps of a run: a single one, or those that torchrun has started.

A step has ``train.grad_accum_steps`` micro-batches, however many ranks compute them: of R ranks, rank r takes
the micro-batches i with i mod R = r. Batches, dropout masks, loss and gradient are those of a single process,
except for the order of sums.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, distributed, nn

from normlab.errors import UserError
from normlab.lab.training.parallel import DDP, FSDP, Parallel, SingleProcess

T = TypeVar("T")

STEP_TIMEOUT: Final = timedelta(minutes=15)
"""How long a rank waits for the others within a step, in which one of them may write a checkpoint."""
TASK_TIMEOUT: Final = timedelta(days=1)
"""How long they wait for work that only the main rank does: preparing data, a validation, the test."""


class OtherRankError(RuntimeError):
    """The main rank has failed, so this one stops too."""


@dataclass(frozen=True)
class Ranks:
    """One process among those of the run. Every rank calls every method, in the same order."""

    index: int = 0
    count: int = 1
    patient: distributed.ProcessGroup | None = None
    """The group for long waits."""

    @property
    def main(self) -> bool:
        """Whether this rank is the one that writes files and messages."""
        return self.index == 0

    def share(self, micro_batches: int) -> range:
        return range(self.index, micro_batches, self.count)

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks, in place if there are several; on a GPU this does not block."""
        if self.count > 1:
            distributed.all_reduce(values)
        return values

    def total(self, *numbers: int) -> list[int]:
        return self.sum(torch.tensor(numbers)).tolist()

    def any(self, flag: bool, /) -> bool:  # noqa: FBT001
        return self.total(int(flag)) != [0]

    def on_main(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function on the main rank; the others go on."""
        if self.main:
            function(*args)

    def from_main(self, function: Callable[[], T]) -> T:
        """Call a function on the main rank and return its result, which must be JSON, on every rank.

        Raises OtherRankError on the other ranks if it failed.
        """
        with self.main_first() as results:
            if self.main:
                results.append(function())
        return results[0]

    @contextmanager
    def main_first(self) -> Generator[list[Any]]:
        """Let the main rank run this block before the others, which then get the list that it has filled.

        Raises what ``from_main`` raises.
        """
        results: list[Any] = []
        if not self.main:
            results = self._shared(None)
            if results is None:
                raise OtherRankError(f"rank {self.index} stops because rank 0 did; rank 0 says why")
            yield results
            return
        try:
            yield results
        except BaseException:
            self._shared(None)
            raise
        self._shared(results)

    def parallel(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, shard: bool) -> Parallel:
        """Spread the model over the ranks: a whole copy on each or, with ``shard``, a part on each."""
        if self.count == 1:
            return SingleProcess(model)
        return FSDP(model, optimizer, self.count) if shard else DDP(model)

    def _shared(self, results: list[Any] | None) -> Any:
        """The main rank's results; None says that it failed. They travel as JSON, which executes no code."""
        if self.count == 1:
            return results
        sent = json.dumps(results).encode() if self.main else b""
        content = torch.tensor(list(sent), dtype=torch.uint8)
        length = torch.tensor(len(content))
        distributed.broadcast(length, 0, group=self.patient)
        content.resize_(int(length))  # the other ranks receive into as much room
        distributed.broadcast(content, 0, group=self.patient)
        return json.loads(bytes(content.tolist()))


SINGLE_PROCESS: Final = Ranks()


def _world() -> int:
    """Return the number of processes that torchrun has started, or 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def leads() -> bool:
    """Whether this process is the one that reports progress."""
    return int(os.environ.get("RANK", "0")) == 0


def check_share(grad_accum_steps: int) -> None:
    """Raise UserError unless every rank gets the same number of a step's micro-batches."""
    count = _world()
    if grad_accum_steps % count == 0:
        return
    next_multiple = -(-grad_accum_steps // count) * count
    divisors = [n for n in range(1, min(count, grad_accum_steps) + 1) if grad_accum_steps % n == 0]
    raise UserError(
        f"grad_accum_steps is {grad_accum_steps}, and {count} processes cannot share "
        f"the micro-batches of a step equally; type --grad-accum-steps {next_multiple}, or torchrun "
        f"--nproc-per-node {max(divisors)}"
    )


@contextmanager
def join_processes(device: torch.device) -> Generator[tuple[Ranks, torch.device]]:
    """Join the processes that torchrun has started; yield this process's ranks and its device. A process that
    is already in a group stays in it.

    Raises UserError if a machine has too few GPUs for its ranks.
    """
    count = _world()
    if count == 1:
        yield SINGLE_PROCESS, device
        return
    device = _device_of_rank(device)
    owns_group = not distributed.is_initialized()
    if owns_group:
        on_gpu = device.type == "cuda"
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        device_id = device if on_gpu else None
        distributed.init_process_group(backend, timeout=STEP_TIMEOUT, device_id=device_id)
    patient: Any = distributed.new_group(backend="gloo", timeout=TASK_TIMEOUT)
    try:
        yield Ranks(distributed.get_rank(), distributed.get_world_size(), patient), device
    except Exception:
        owns_group = False  # the others may be anywhere: leaving the group could take forever
        raise
    finally:
        if owns_group:
            distributed.destroy_process_group()


def _device_of_rank(device: torch.device) -> torch.device:
    """Return the GPU of this process, or the CPU."""
    if device.type != "cuda":
        return device
    if device.index is not None:
        raise UserError(
            f"the device {device} was asked for, and each of {_world()} processes needs one of its own; "
            "type --device cuda"
        )
    local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= gpus:
        raise UserError(
            f"process {local + 1} on this machine has no GPU of its own, since there are {gpus}; "
            f"type torchrun --nproc-per-node {gpus}"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
