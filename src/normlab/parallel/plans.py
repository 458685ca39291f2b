"""What is patched in torch while a script runs as a rank, or as the one process that ranks are compared with.

The process ends after the script, so nothing is put back. A script that imports a name, as in ``from
torch.distributed.fsdp import fully_shard``, gets the patched one, because it runs later.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Final

import torch
import torch.distributed.fsdp
import torch.distributed.nn.functional
import torch.distributed.tensor.experimental
import torch.distributed.tensor.parallel
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from normlab.parallel.observed import StepObserver, gathered_tensor
from normlab.private_torch import all_gather_function, attention_kernel, clip_by_norm, replace_clip_by_norm
from normlab.setups.recorder import Recorder
from normlab.trace.patching import Clip, clipping

DROPPING: Final = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
"""Functions that draw which entries to drop, which processes draw differently."""
OF_ATTENTION: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""The arguments of ``scaled_dot_product_attention`` that may be given by their places."""


def use_one_kind_of_process() -> None:
    """Let groups and meshes be those of gloo on the CPU, whatever the script asks for, and stay until the end
    of the process: what a step gave is collected after the script has cleaned up.
    """
    make, make_mesh = distributed.init_process_group, torch.distributed.device_mesh.init_device_mesh

    @wraps(make)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        make("gloo", *args, **kwargs)

    @wraps(make_mesh)
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
        return make_mesh("cpu", *args, **kwargs)

    def destroy_process_group(group: Any = None) -> None:
        return

    _replace(make, init_process_group)
    _replace(make_mesh, init_device_mesh)
    _replace(distributed.destroy_process_group, destroy_process_group)
    # on gloo, its pieces get mixed up if the gradient that arrives is not contiguous; on accelerators, never
    gather: Any = all_gather_function()
    backward = gather.backward
    gather.backward = staticmethod(
        lambda ctx, *gradients: backward(ctx, *(x.contiguous() for x in gradients))
    )


def drop_nothing() -> None:
    """Switch dropout off: ranks draw other numbers than one process does."""
    for name in DROPPING:
        setattr(F, name, wraps(getattr(F, name))(_kept))
    attend: Any = F.scaled_dot_product_attention

    @wraps(attend)
    def attended(*args: Any, **kwargs: Any) -> Tensor:
        arguments = dict(zip(OF_ATTENTION, args, strict=False)) | kwargs
        return attend(**{**arguments, "dropout_p": 0.0})

    F.scaled_dot_product_attention = attended


def _kept(*args: Any, **kwargs: Any) -> Tensor:
    """Return what was to be dropped from, which may be given by its name."""
    return args[0] if args else kwargs["input"]


def note_norms(observer: StepObserver) -> None:
    """Note the norm of all gradients that ``clip_grad_norm_`` computes, and clips by."""

    @contextmanager
    def noted(call: Clip) -> Iterator[None]:
        with observer.paused():
            observer.norms.append(float(gathered_tensor(call.norm)))
        yield

    replace_clip_by_norm(clipping(clip_by_norm(), noted))  # and nothing is put back


class Plans:
    """The ways in which a script is parallel, as they are made."""

    def __init__(self, observer: StepObserver, *, keep_precision: bool) -> None:
        self.kinds: dict[str, None] = {}
        self.tensors: list[list[int]] = []
        """Groups of ranks among which the tensors of a model are split: all of them read one batch."""
        self.contexts: list[list[int]] = []
        """Groups of ranks among which the sequences of one batch are split."""
        self._observer, self._keep_precision = observer, keep_precision
        self.whole: dict[int, Tensor] = {}
        """By ``id``, what tensors held before a plan left this rank its part of their sequence."""
        self._shared: list[Tensor] = []
        """These tensors, so that no other one gets their ``id``."""

    def watch(self) -> None:
        """Note each plan that the script makes from now on."""
        ddp = nn.parallel.DistributedDataParallel
        make = ddp.__init__

        @wraps(make)
        def init(wrapper: Any, *args: Any, **kwargs: Any) -> None:
            self.kinds["DistributedDataParallel"] = None
            make(wrapper, *args, **kwargs)

        ddp.__init__ = init  # type: ignore[method-assign]
        shard, parallelize, context = _plans()
        _replace(shard, self._sharding(shard))
        _replace(parallelize, self._parallelizing(parallelize))
        _replace(context, self._in_context(context))

    def _sharding(self, shard: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(shard)
        def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
            self.kinds["fully_shard"] = None
            if not self._keep_precision:
                kwargs.pop("mp_policy", None)  # all is in float64
            return shard(module, *args, **kwargs)

        return fully_shard

    def _parallelizing(self, parallelize: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(parallelize)
        def parallelize_module(module: Any, device_mesh: Any = None, *args: Any, **kwargs: Any) -> Any:
            self.kinds["parallelize_module"] = None
            result = parallelize(module, device_mesh, *args, **kwargs)
            _add_group(self.tensors, device_mesh)
            return result

        return parallelize_module

    def _in_context(self, context: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def context_parallel(
            mesh: DeviceMesh, *, buffers: Sequence[Tensor] = (), **kwargs: Any
        ) -> Iterator[None]:
            self.kinds["context_parallel"] = None
            _add_group(self.contexts, mesh)
            dims = kwargs.pop("buffer_seq_dims", ())
            with self._observer.paused():
                for x in buffers:
                    self.whole[id(x)] = x.detach().clone()
                    self._shared.append(x)
                length = buffers[0].shape[dims[0]] if buffers else 0
                places = torch.arange(length)  # split as the script's own buffers are
                plan = context(mesh, buffers=[*buffers, places], buffer_seq_dims=[*dims, 0], **kwargs)
                stack = ExitStack()
                stack.enter_context(plan)
                stack.enter_context(attention_over(mesh, places))
            try:
                yield
            finally:
                with self._observer.paused():
                    stack.close()

        return context_parallel


def _add_group(groups: list[list[int]], mesh: DeviceMesh | None) -> None:
    """Add the ranks of a mesh to these groups, once; all ranks if there is no mesh."""
    ranks = [*range(distributed.get_world_size())] if mesh is None else mesh.mesh.flatten().tolist()
    if ranks not in groups:
        groups.append(ranks)


class Gathered(torch.autograd.Function):
    """The pieces of all ranks of a group, one after the other along an axis.

    In the backward pass, the gradients of all ranks are added up, and each rank gets the part of its own
    piece. Torch's own ``all_gather`` with a gradient mixes pieces up on gloo if that is not contiguous.
    """

    @staticmethod
    # pyrefly: ignore[bad-override]
    def forward(ctx: Any, piece: Tensor, axis: int, mesh: DeviceMesh) -> Tensor:
        group = mesh.get_group()
        pieces = [torch.empty_like(piece, memory_format=torch.contiguous_format) for _ in range(mesh.size())]
        distributed.all_gather(pieces, piece.contiguous(), group=group)
        ctx.axis, ctx.mesh, ctx.length = axis, mesh, piece.shape[axis]
        return torch.cat(pieces, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        total = gradients[0].contiguous().clone()
        distributed.all_reduce(total, group=ctx.mesh.get_group())
        begin = ctx.mesh.get_local_rank() * ctx.length
        return total.narrow(ctx.axis, begin, ctx.length), None, None


@contextmanager
def attention_over(mesh: DeviceMesh, places: Tensor) -> Iterator[None]:
    """Compute attention over a sequence of which each rank of a mesh has the tokens at some ``places``.

    Torch's own kernels for that run on accelerators alone. This one collects all keys and values instead,
    which gives the same.
    """
    all_places = Gathered.apply(places, 0, mesh)
    ring, attend = F.scaled_dot_product_attention, attention_kernel()

    def attended(*args: Any, **kwargs: Any) -> Tensor:
        arguments = dict(zip(OF_ATTENTION, args, strict=False)) | kwargs
        arguments["key"] = Gathered.apply(arguments["key"], -2, mesh)
        arguments["value"] = Gathered.apply(arguments["value"], -2, mesh)
        if arguments.get("is_causal") and len(places):
            arguments |= {"is_causal": False, "attn_mask": places[:, None] >= all_places}
        return attend(**arguments)

    F.scaled_dot_product_attention = attended
    try:
        yield
    finally:
        F.scaled_dot_product_attention = ring


# ------------------------------------------------------------------------------------- without any plan

OF_DTENSORS: Final = ("to_local", "full_tensor", "redistribute")
"""Methods of a tensor that is split among ranks. In one process, they return the tensor itself."""


def leave_plans_out(recorder: Recorder) -> None:
    """Let plans that split a model or a sequence do nothing, in one process, which has all of it."""

    def not_in_context(context: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def context_parallel(mesh: Any, *, buffers: Sequence[Tensor] = (), **kwargs: Any) -> Iterator[None]:
            with recorder.paused(), torch.no_grad():
                for x in buffers:
                    # on ranks they are written to, and the batch begins with what they hold then
                    x.copy_(x.clone())
            yield

        return context_parallel

    shard, parallelize, context = _plans()
    _replace(shard, _not_sharding(shard))
    _replace(parallelize, _not_parallelizing(parallelize))
    _replace(context, not_in_context(context))
    for name in OF_DTENSORS:  # what a plan would have split is whole here, and all of it this process's part
        setattr(Tensor, name, _itself)


def _itself(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return x


def _not_sharding(shard: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(shard)
    def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        for each in [module] if isinstance(module, nn.Module) else module:
            kind = type(each)
            if not issubclass(kind, torch.distributed.fsdp.FSDPModule):
                each.__class__ = type(f"FSDP{kind.__name__}", (Unsharded, kind), {})
        return module

    return fully_shard


def _nothing(module: Any, *args: Any, **kwargs: Any) -> None:
    """Do nothing: there is no shard."""


class Unsharded(torch.distributed.fsdp.FSDPModule):
    """What ``fully_shard`` makes of a module in one process: all its methods are there, and do nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(cls)


for _name in vars(torch.distributed.fsdp.FSDPModule):
    if not _name.startswith("_"):
        setattr(Unsharded, _name, _nothing)


def _not_parallelizing(parallelize: Callable[..., Any]) -> Callable[..., Any]:
    return wraps(parallelize)(lambda module, *args, **kwargs: module)


def _plans() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Return the functions by which a script splits weights, the tensors of layers, and a sequence."""
    return (
        torch.distributed.fsdp.fully_shard,
        torch.distributed.tensor.parallel.parallelize_module,
        torch.distributed.tensor.experimental.context_parallel,
    )


def _replace(original: Callable[..., Any], made: Callable[..., Any]) -> None:
    """Put a function in the place of another one in each module of torch that has it by its name."""
    name = original.__name__
    for module in list(sys.modules.values()):
        is_of_torch = getattr(module, "__name__", "").partition(".")[0] == "torch"
        if is_of_torch and vars(module).get(name) is original:
            setattr(module, name, made)
