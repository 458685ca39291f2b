"""How a model lies on the ranks: on one alone, whole on each, or a part on each.

Every rank calls every method, in the same order.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, distributed, nn

from normlab.nn import shards


class Parallel(ABC):
    """A model in training. What is not abstract is said for ranks that have all of every parameter."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        """What a loss is computed with."""
        self.parts: dict[str, nn.Parameter] = dict(model.named_parameters())
        """What this rank has of each parameter: plain tensors that an optimiser can step."""

    @abstractmethod
    def passing(self, *, last: bool) -> AbstractContextManager[None]:
        """Around the forward and backward pass of a micro-batch. After the rank's last one of a step the
        parts have the gradient, summed over the ranks.
        """

    def norms(self, parts: Sequence[Tensor]) -> Tensor:
        """`[P]`: L2 norms of whole tensors, each given by its part."""
        return norms_of(parts)

    def whole(self, index: int, part: Tensor) -> Tensor:
        """A tensor of the shape of the parameter ``index``, from its part."""
        return part

    def plain(
        self, optimiser: torch.optim.Optimizer | None = None
    ) -> tuple[nn.Module, torch.optim.Optimizer | None]:
        """The model, and the optimiser with its state, as one process has them."""
        return self.model, optimiser

    def scaler(self, device: torch.device, *, enabled: bool) -> torch.amp.GradScaler:
        """Of losses, so that gradients in fp16 do not underflow."""
        return torch.amp.GradScaler(device.type, enabled=enabled)


@final
class SingleProcess(Parallel):
    """One process."""

    def passing(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()


@final
class DDP(Parallel):
    """Data parallel: every rank has the model, and gradients are reduced once a step, while the last
    micro-batch's backward pass goes on.

    Li et al. 2020, Section 3 (arXiv 2006.15704).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._plain = model
        ddp: Any = nn.parallel.DistributedDataParallel
        # Buffers are tables that the configuration gives: there is nothing to send. The older name warns.
        names = ("forward_sync_buffers", "broadcast_buffers")
        unsent = next(name for name in names if name in inspect.signature(ddp).parameters)
        self._ddp: nn.parallel.DistributedDataParallel = ddp(model, **{unsent: False})
        self._ddp.register_comm_hook(None, lambda _, bucket: _summed(bucket))
        self.model = self._ddp

    def passing(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._ddp.no_sync()

    def plain(
        self, optimiser: torch.optim.Optimizer | None = None
    ) -> tuple[nn.Module, torch.optim.Optimizer | None]:
        return self._plain, optimiser


@final
class FSDP(Parallel):
    """Fully sharded: weights, gradients and the optimiser's state are cut in ``count`` parts along the first
    axis, and a sublayer's weights are whole while it computes.

    Zhao et al. 2023, Section 3 (arXiv 2304.11277). An optimiser must treat every entry by itself.
    """

    def __init__(self, model: nn.Module, optimiser: torch.optim.Optimizer, count: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        super().__init__(model)
        whole, self._count = self.parts, count
        self._skeleton, self._hollow = _skeleton(model)
        mesh = init_device_mesh(next(iter(whole.values())).device.type, (count,))
        for unit in shards(model):
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        # Logits are a view; nothing is done to them in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        self._sharded: Any = model
        self._cut: dict[str, Any] = dict(model.named_parameters())
        self.parts = {name: nn.Parameter(p.detach().to_local()) for name, p in self._cut.items()}
        self._index = mesh.get_local_rank()
        self._repoint(optimiser, whole)

    @contextmanager
    def passing(self, *, last: bool) -> Generator[None]:
        self._sharded.set_requires_gradient_sync(last)
        yield
        if last:
            for name, cut in self._cut.items():
                self.parts[name].grad = None if cut.grad is None else cut.grad.to_local()
                cut.grad = None

    def norms(self, parts: Sequence[Tensor]) -> Tensor:
        squares = norms_of(parts).square()
        distributed.all_reduce(squares)
        return squares.sqrt()

    def whole(self, index: int, part: Tensor) -> Tensor:
        return self._whole(list(self._cut)[index], part)

    @torch.no_grad()
    def plain(
        self, optimiser: torch.optim.Optimizer | None = None
    ) -> tuple[nn.Module, torch.optim.Optimizer | None]:
        """On the model's device without an optimiser, else on the CPU, where a checkpoint is written."""
        keep = (lambda t: t) if optimiser is None else (lambda t: t.cpu())
        weights = {name: nn.Parameter(keep(self._whole(name, p.detach()))) for name, p in self.parts.items()}
        memo = {id(hollow): weights[name] for name, hollow in self._hollow.items()}
        model = copy.deepcopy(self._skeleton, memo)
        if optimiser is None:
            return model, None
        stepped = torch.optim.SGD(weights.values(), 0.0)
        for name, weight in weights.items():
            state = optimiser.state[self.parts[name]]
            stepped.state[weight] = {
                key: keep(self._whole(name, v)) if isinstance(v, Tensor) else v for key, v in state.items()
            }
        return model, stepped

    def scaler(self, device: torch.device, *, enabled: bool) -> torch.amp.GradScaler:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(device.type, enabled=enabled, process_group=distributed.group.WORLD)

    def _repoint(self, optimiser: torch.optim.Optimizer, whole: dict[str, nn.Parameter]) -> None:
        """Let an optimiser of the whole parameters step the parts, with their part of its state."""
        part_of: dict[Tensor, nn.Parameter] = {whole[name]: part for name, part in self.parts.items()}
        state: dict[Tensor, Any] = {
            part_of[p]: {key: self._part(v, p) if isinstance(v, Tensor) else v for key, v in kept.items()}
            for p, kept in optimiser.state.items()
        }
        optimiser.state.clear()
        optimiser.state.update(state)
        for group in optimiser.param_groups:
            group["params"] = [part_of[p] for p in group["params"]]

    def _part(self, tensor: Tensor, whole: Tensor) -> Tensor:
        """A count of steps belongs to every part."""
        if tensor.shape != whole.shape or not whole.dim():
            return tensor
        chunks = tensor.chunk(self._count)
        return chunks[self._index].clone() if self._index < len(chunks) else tensor[:0].clone()

    def _whole(self, name: str, part: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        cut = self._cut[name]
        if part.shape != self.parts[name].shape:
            return part
        return DTensor.from_local(
            part.detach(), cut.device_mesh, cut.placements, shape=cut.shape, stride=cut.stride()
        ).full_tensor()


def _skeleton(model: nn.Module) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """A copy of a model without its weights, and the parameters that stand in their places."""
    hollow = {
        name: nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        for name, p in model.named_parameters()
    }
    memo = {id(p): hollow[name] for name, p in model.named_parameters()}
    return copy.deepcopy(model, memo), hollow


def _summed(bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
    """The sum over the ranks, where it is the mean by default: the loss is divided already."""
    work = distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """`[P]`: the L2 norm of each, without a wait for the device."""
    return torch.stack(torch._foreach_norm(list(tensors)))
