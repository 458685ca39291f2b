"""The model on the ranks: on a single one, a whole copy on each, or a part on each.

Every rank calls every method, in the same order.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, distributed, nn

from normlab.errors import UserError
from normlab.nn import TokenModel, shards
from normlab.nn.sublayer import Branch, Sublayer
from normlab.trace.tensors import saved_buffers
from normlab.watching.meter import norms_of


class _MatrixView(NamedTuple):
    """A matrix of a branch, which may be a part of a packed parameter."""

    module: str
    """The path of the sublayer."""
    kind: str
    index: int
    """The index of the parameter."""
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, whole: Tensor) -> Tensor:
        return whole.as_strided(self.size, self.stride, whole.storage_offset() + self.offset)


def _matrix_views(model: nn.Module) -> Iterator[_MatrixView]:
    """The matrices of all branches of a model whose parameters are whole."""
    parameters = list(model.parameters())
    # A matrix shares its memory with the parameter that packs it.
    index_of = {p.untyped_storage().data_ptr(): i for i, p in enumerate(parameters)}
    for path, sublayer in model.named_modules():
        if not isinstance(sublayer, Sublayer) or not isinstance(sublayer.f, Branch):
            continue
        for kind, matrix in sublayer.f.matrices().items():
            index = index_of[matrix.untyped_storage().data_ptr()]
            offset = int(matrix.storage_offset() - parameters[index].storage_offset())
            yield _MatrixView(path, kind, index, matrix.shape, matrix.stride(), offset)


class Parallel(ABC):
    """A model in training. The concrete methods are for ranks that hold whole parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        """The model that computes the loss."""
        self.parts: dict[str, nn.Parameter] = dict(model.named_parameters())
        """This rank's part of each parameter: plain tensors that an optimizer can step."""
        self.buffers = saved_buffers(model)
        self.matrices = tuple(_matrix_views(model))
        """The matrices of the model's branches, as views of whole parameters."""

    @abstractmethod
    def passing(self, *, last: bool) -> AbstractContextManager[None]:
        """Surround the forward and backward pass of a micro-batch. After the rank's last micro-batch of a
        step, the parts have the gradient, summed over the ranks.
        """

    def norms(self, parts: Sequence[Tensor]) -> Tensor:
        """`[P]`: L2 norms of whole tensors, each given by its part."""
        return norms_of(parts)

    def shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in {**self.parts, **self.buffers}.items()}

    def whole(self, name: str, part: Tensor) -> Tensor:
        """Return the whole of a tensor that belongs to the parameter ``name``, given this rank's part."""
        return part

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor that belongs to the parameter ``name``."""
        return whole

    def plain(self) -> nn.Module:
        """Return the model as a single process would have it."""
        return self.model

    @torch.no_grad()
    def state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
        """Whole weights by name, and the optimizer's tensors as ``<name>/<key>``, as in a single process."""
        weights = {name: buffer.cpu() for name, buffer in self.buffers.items()}
        moments: dict[str, Tensor] = {}
        for name, part in self.parts.items():
            weights[name] = self.whole(name, part.detach()).cpu()
            for key, value in optimizer.state[part].items():
                if isinstance(value, Tensor):
                    moments[f"{name}/{key}"] = self.whole(name, value).cpu()
        return {"model": weights, "optimizer": moments}

    def load_state_dict(
        self, state: Mapping[str, Mapping[str, Tensor]], optimizer: torch.optim.Optimizer
    ) -> None:
        """Load weights and the optimizer's tensors, which replace everything the optimizer held before."""
        self.load_weights(state["model"])
        optimizer.state.clear()
        for full_name, tensor in state["optimizer"].items():
            name, key = full_name.rsplit("/", 1)
            part = self.parts[name]
            optimizer.state[part][key] = self.part(name, tensor).to(part.device, copy=True)

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy whole weights into the parameters and buffers of these names; the others stay."""
        for name, part in self.parts.items():
            if name in weights:
                part.copy_(self.part(name, weights[name]))
        for name, buffer in self.buffers.items():
            if name in weights:
                buffer.copy_(weights[name])

    def scaler(self, device: torch.device, *, enabled: bool) -> torch.amp.GradScaler:
        """Return a scaler of losses that keeps fp16 gradients from underflowing."""
        return torch.amp.GradScaler(device.type, enabled=enabled)


@final
class SingleProcess(Parallel):
    """One process."""

    def passing(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext()


@final
class DDP(Parallel):
    """Data parallel: every rank has the model, and gradients are reduced once a step, during the last
    micro-batch's backward pass.

    Li et al. 2020, Section 3 (arXiv 2006.15704).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._plain = model
        ddp: Any = nn.parallel.DistributedDataParallel
        # Buffers are tables, or count steps alike on all ranks: nothing to send. Newer versions of torch have
        # the first of these options, and warn of the second.
        names = ("forward_sync_buffers", "broadcast_buffers")
        option = next(name for name in names if name in inspect.signature(ddp).parameters)
        self._ddp: nn.parallel.DistributedDataParallel = ddp(model, **{option: False})
        self._ddp.register_comm_hook(None, lambda _, bucket: _sum(bucket))
        self.model = self._ddp

    def passing(self, *, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self._ddp.no_sync()

    def plain(self) -> nn.Module:
        return self._plain


@final
class FSDP(Parallel):
    """Fully sharded: weights, gradients and the optimizer's state are split into ``count`` parts along the
    first axis, and a sublayer's weights are whole only while it computes.

    Zhao et al. 2023, Section 3 (arXiv 2304.11277). The optimizer must treat every entry independently.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        _require_entrywise(model, optimizer)
        super().__init__(model)
        whole_parameters = self.parts
        self._count = count
        self._skeleton, self._hollow = _skeleton(model)
        mesh = init_device_mesh(next(iter(whole_parameters.values())).device.type, (count,))
        for unit in shards(model):
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # the loss is divided already
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
        # Logits are a view, but nothing changes them in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        self._sharded: Any = model
        self._sharded_parameters: dict[str, Any] = dict(model.named_parameters())
        self.parts = {
            name: nn.Parameter(p.detach().to_local()) for name, p in self._sharded_parameters.items()
        }
        self._index = mesh.get_local_rank()
        # The optimizer was built for whole parameters, and steps the parts instead.
        part_of = {whole_parameters[name]: part for name, part in self.parts.items()}
        for group in optimizer.param_groups:
            group["params"] = [part_of[p] for p in group["params"]]

    @contextmanager
    def passing(self, *, last: bool) -> Generator[None]:
        self._sharded.set_requires_gradient_sync(last)
        yield
        if not last:
            return
        for name, sharded in self._sharded_parameters.items():
            self.parts[name].grad = None if sharded.grad is None else sharded.grad.to_local()
            sharded.grad = None

    def norms(self, parts: Sequence[Tensor]) -> Tensor:
        squares = norms_of(parts).square()
        distributed.all_reduce(squares)
        return squares.sqrt()

    def shapes(self) -> dict[str, torch.Size]:
        sharded = self._sharded_parameters
        return super().shapes() | {name: parameter.shape for name, parameter in sharded.items()}

    def whole(self, name: str, part: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        if part.shape != self.parts[name].shape:  # a step count is the same for every part
            return part
        sharded = self._sharded_parameters[name]
        return DTensor.from_local(
            part.detach(),
            sharded.device_mesh,
            sharded.placements,
            shape=sharded.shape,
            stride=sharded.stride(),
        ).full_tensor()

    def part(self, name: str, whole: Tensor) -> Tensor:
        if whole.shape != self._sharded_parameters[name].shape or not whole.dim():
            return whole
        chunks = whole.chunk(self._count)
        return chunks[self._index] if self._index < len(chunks) else whole[:0]  # fewer rows than ranks

    @torch.no_grad()
    def plain(self) -> nn.Module:
        # A deep copy takes what its memo holds for an object instead of copying the object.
        memo: dict[int, Any] = {}
        for name, hollow in self._hollow.items():
            memo[id(hollow)] = nn.Parameter(self.whole(name, self.parts[name].detach()))
        return copy.deepcopy(self._skeleton, memo)

    def scaler(self, device: torch.device, *, enabled: bool) -> torch.amp.GradScaler:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(device.type, enabled=enabled, process_group=distributed.group.WORLD)


def _require_entrywise(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError if a part of a parameter cannot be stepped by itself."""
    if isinstance(model, TokenModel) and not model.constraint.by_entry:
        raise UserError(
            f"{model.constraint.name} scales whole vectors of weights, and --shard leaves a part of each "
            "on every process; leave out --shard"
        )
    if any(group.get("use_muon") for group in optimizer.param_groups):
        raise UserError(
            "Muon steps whole matrices, and --shard leaves a part of each on every process; leave out "
            "--shard, or choose an optimizer that treats every entry by itself, such as adamw"
        )


def _skeleton(model: nn.Module) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """Return a copy of a model whose parameters have no memory, and these parameters by name."""
    hollow: dict[str, nn.Parameter] = {}
    memo: dict[int, Any] = {}
    for name, p in model.named_parameters():
        hollow[name] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        memo[id(p)] = hollow[name]
    for buffer in saved_buffers(model).values():  # shared, so that both are up to date
        memo[id(buffer)] = buffer
    return copy.deepcopy(model, memo), hollow


def _sum(bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum a bucket over the ranks; DDP would take the mean, but the loss is divided already."""
    work = distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
