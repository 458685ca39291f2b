"""All that normlab uses of torch's private parts, each with the reason why public ones will not do.

A release of torch may move or change any of these without notice. No other module of normlab names one
(``tests/test_private_torch.py`` reads them all), so that this is the only file to mend then. The same tests
ask each part for what is expected of it here, and `make test-oldest` runs them, and those of the instruments,
under the oldest torch that normlab supports.

Not all that begins with an underscore is as private: ``torch.utils._python_dispatch`` and
``torch.utils._pytree`` have been used outside of torch for years. They are here all the same, as torch
promises nothing about them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CellType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._functorch import apis as functorch_apis
from torch._functorch import eager_transforms as functorch_transforms
from torch.nn.modules import module as module_of_modules
from torch.nn.modules.batchnorm import _NormBase as BatchOrInstanceNorm
from torch.nn.modules.dropout import _DropoutNd as AnyDropout
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

__all__ = [
    "AnyDropout",
    "BatchOrInstanceNorm",
    "LoaderIterator",
    "TorchDispatchMode",
    "is_traceable_wrapper_subclass",
    "tree_flatten",
    "tree_map_only",
    "tree_unflatten",
]
# These are used as torch has them:
#
# - TorchDispatchMode sees each operator that a kernel is chosen for, also inside of torch's own functions and
#   of compiled TorchScript; the public TorchFunctionMode sees the calls from Python alone.
# - is_traceable_wrapper_subclass: whether a tensor holds others, such as a sharded one. How it is asked for
#   them, __tensor_flatten__, is documented; who can be asked is not.
# - tree_flatten and so on take arguments apart as torch does, whatever classes have been registered for that.
# - AnyDropout and BatchOrInstanceNorm are what such modules have in common: a list of the public classes
#   would miss those to come.
# - LoaderIterator is what a DataLoader makes its batches in, with workers or without; both kinds are private.


# -------------------------------------------------------------------------------------------------- autograd


def backward_pass() -> int:
    """Return the number of the backward pass that runs in this thread, -1 if none does.

    A checkpointed layer runs its forward pass again inside of one. Hooks are called then as in the first
    pass, and nothing public tells the two apart.
    """
    return torch._C._current_graph_task_id()


def is_in_backward() -> bool:
    """Return whether a backward pass runs in this thread."""
    return backward_pass() != -1


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor's memory has been written to in place, which torch counts for its own checks.

    ``increment_version`` is public; reading the count is not. Raises RuntimeError for a tensor that was made
    in inference mode.
    """
    return tensor._version


def viewed(tensor: Tensor) -> Tensor:
    """Return the tensor whose memory this one is a view of, or itself if it is no view."""
    return tensor if tensor._base is None else tensor._base


def saved(node: Any, name: str, default: Any = None) -> Any:
    """Return what a node of the graph has saved under a name for its backward pass, such as ``"self"``.

    torch's notes on autograd show these attributes, and say that they may change. A graph has nothing else
    that tells what a product multiplied with.
    """
    return getattr(node, f"_saved_{name}", default)


def all_saved(node: Any) -> Iterator[Any]:
    """Yield everything that a node of the graph has saved for its backward pass; lists one by one."""
    for name in dir(node):
        if name.startswith("_saved_"):
            value = getattr(node, name)
            yield from value if isinstance(value, (tuple, list)) else (value,)


GRADIENT_SWITCH: Final[Any] = torch._C._set_grad_enabled
"""What ``no_grad`` and ``enable_grad`` call, as a TorchFunctionMode sees them: it sees no public function
there.
"""


TABLES_OF_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""The attributes of a tensor that hold its hooks, None if there are none; they can be set as well as read."""


def gradient_hooks(leaf: Tensor) -> dict[int, Callable[..., Any]] | None:
    """Return the table of ``register_post_accumulate_grad_hook``, None if the tensor never had such a hook.

    The public handle can only remove the hook that it was returned for, and the user holds it.
    """
    return leaf._post_accumulate_grad_hooks


def tables_of_hooks(tensor: Tensor) -> list[Any]:
    """Return the tables of a tensor's hooks, each None without a hook: what hooks hold is reached from it."""
    return [getattr(tensor, name) for name in TABLES_OF_HOOKS]


def parts_of_sparse(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices and values that a sparse COO tensor holds.

    The public ``indices()`` and ``values()`` refuse a tensor that was not coalesced, and ``coalesce()`` makes
    another.
    """
    return tensor._indices(), tensor._values()


# ---------------------------------------------------------------------------------------- functions and modes


def is_functorch_wrapped(tensor: Tensor) -> bool:
    """Return whether a tensor is one of ``torch.func``'s, which has no memory of its own: asking for its
    storage raises. There is no public question.
    """
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def without_function_modes() -> Any:
    """Return a context in which no TorchFunctionMode, and no class of tensors, sees what is called.

    ``torch.DisableTorchFunctionSubclass``, which is public, leaves the modes on.
    """
    return torch._C.DisableTorchFunction()


VMAP: Final[tuple[ModuleType, str]] = (functorch_apis, "vmap_impl")
"""The module, and the name in it, of what every call of a function made by ``torch.func.vmap`` goes through.
``torch.func.vmap`` itself has only made that function, perhaps long before.
"""
FUNCTIONAL_GRADIENT: Final[tuple[ModuleType, str]] = (functorch_transforms, "grad_and_value_impl")
"""The same for every call of a function made by ``torch.func.grad`` or ``torch.func.grad_and_value``."""
GROUPED_PRODUCTS: Final = ("grouped_mm", "_grouped_mm")
"""Names of the product of groups of rows with a matrix each: before torch 2.10 only the private one was
there, and models still call it.
"""
SOFTMAX_OPERATORS: Final = frozenset({torch.ops.aten._softmax, torch.ops.aten._safe_softmax})
"""The operators of every softmax, as a TorchDispatchMode sees them: ``aten.softmax`` ends in one of them."""
EMBEDDING_BAG_OPERATORS: Final = (torch.ops.aten._embedding_bag, torch.ops.aten._embedding_bag_forward_only)
"""The operators that ``aten.embedding_bag`` ends in, with and without a gradient."""
UNSAFE_INDEX: Final = torch.ops.aten._unsafe_index
"""What interpolation, and compiled code, read entries with in place of ``aten.index``."""
INDEX_PUT: Final = torch.ops.aten._index_put_impl_
"""What ``aten.index_put_`` ends in."""


def attention_kernel() -> Callable[..., Tensor]:
    """Return torch's own scaled dot-product attention, also while another one stands in its public place."""
    return torch._C._nn.scaled_dot_product_attention


# ---------------------------------------------------------------------------------------------------- modules

TABLES_OF_MODULES: Final = ("_parameters", "_buffers", "_modules")
"""The attributes in which a module holds what is registered with it; the rest of ``vars(module)`` is plain.
"""


def table_of_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the table itself, to put back what it held: ``named_parameters`` yields from it, but an entry
    that is None, or was replaced by another, can be restored in the table alone.
    """
    return module._parameters


def table_of_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the table itself, for the reason that ``table_of_parameters`` gives."""
    return module._buffers


def children_of(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """Return the children of a module by name, every time that one stands there; ``named_children`` leaves
    out those that stand in a second place.
    """
    return module._modules


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Return the names of the buffers that were registered with ``persistent=False``.

    ``state_dict`` leaves them out, but also what the user's own hooks remove from it.
    """
    return module._non_persistent_buffers_set


def tables_of_forward_hooks(module: nn.Module) -> list[dict[int, Callable[..., Any]]]:
    """Return the tables of a module's forward hooks, those before it and those after: a copy has no handle to
    remove the hooks by that it was copied with.
    """
    return [module._forward_hooks, module._forward_pre_hooks]


TABLES_OF_GLOBAL_HOOKS: Final = tuple(
    value
    for kind in (nn.Module, torch.optim.Optimizer)
    for name, value in vars(sys.modules[kind.__module__]).items()
    if name.startswith("_global_") and isinstance(value, dict)
)
"""The tables of hooks that torch calls for every module or optimizer; they are registered publicly, but
nothing tells which there are.
"""
KIND_OF_GLOBAL_HOOKS: Final = (vars(module_of_modules), "_global_is_full_backward_hook")
"""The namespace and the variable in it that say of which kind the backward hooks among them are."""


def forget_global_hook(number: int) -> None:
    """Remove what a global forward hook with keyword arguments leaves behind when it is removed.

    torch 2.13 forgets to, and then warns in ``torch.compile`` that there are global hooks.
    """
    module_of_modules._global_forward_hooks_with_kwargs.pop(number, None)


def inside_compiled(module: nn.Module) -> nn.Module | None:
    """Return the module that ``torch.compile`` was given, if this is what it returned."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


def runs_compiled(module: nn.Module) -> bool:
    """Return whether calls of a module run compiled code, by ``torch.compile(module)`` or
    ``module.compile()``.
    """
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


# ----------------------------------------------------------------------------------- optimizers and schedules


def clip_by_norm() -> Callable[..., Any]:
    """Return what clips gradients by a norm, as ``replace_clip_by_norm`` has left it.

    It is called as ``(parameters, max_norm, total_norm, …)``.
    """
    return place_of_clip().cell_contents


def replace_clip_by_norm(clip: Callable[..., Any]) -> None:
    """Let ``clip`` clip gradients by a norm, whoever asks for that, and under whatever name."""
    place_of_clip().cell_contents = clip


def place_of_clip() -> CellType:
    """Return the cell that holds what ``clip_grads_with_norm_`` calls.

    ``clip_grad_norm_`` ends in that function, and with it the ways to clip of most libraries. Whoever has
    imported it by a name keeps it, so that another function under this name would not be called. What it
    calls can be replaced: torch wraps it to switch gradients off, and the wrapper holds it in a cell.
    """
    wrapper: Any = nn.utils.clip_grads_with_norm_
    return wrapper.__closure__[wrapper.__code__.co_freevars.index("func")]


def forget_unscaled(scaler: torch.amp.GradScaler) -> None:
    """Let a scaler forget what its optimizers did in this step, as ``update`` does at the end, without a
    change of the scale.
    """
    scaler._per_optimizer_states.clear()


def marks_of_infinite(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> Mapping[Any, Tensor]:
    """Return, by device, whether a scaler found a gradient that is not finite; the optimizer reads these."""
    return scaler._found_inf_per_device(optimizer)


def mark_as_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Say that an optimizer has made a step, so that its schedule does not warn that none came before."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def schedulers_in(scheduler: Any) -> Sequence[Any]:
    """Return the schedulers that a chained or sequential one is made of; none if it is a plain one."""
    return getattr(scheduler, "_schedulers", ())


def closed_form(scheduler: Any) -> Callable[[], Sequence[Any]] | None:
    """Return a function that gives a scheduler's rates at its ``last_epoch``, if it has one: ``get_lr``
    counts from the rates before.
    """
    return getattr(scheduler, "_get_closed_form_lr", None)


add_each = torch._foreach_add_
"""Several tensors in one call, as torch's optimizers compute: one kernel for thousands of small parameters.
The operators below are of the same kind, and there is no public one.
"""
subtract_each = torch._foreach_sub_
divide_each = torch._foreach_div_
copy_each = torch._foreach_copy_
interpolate_each = torch._foreach_lerp_
norm_of_each = torch._foreach_norm


# ------------------------------------------------------------------------------------------------ the process

PRECISIONS: Final = [
    (backend, operation)
    for backend in ("generic", "cuda", "mkldnn")
    for operation in ("all", "matmul", "conv", "rnn")
]
"""What torch may have a precision of float32 for."""


def flags() -> Iterator[tuple[Callable[[], Any], Callable[..., Any]]]:
    """Yield how to read and how to write each flag that ``torch.backends`` sets.

    The flags are pairs of functions in torch's core, named alike: ``torch.backends`` has a class of its own
    for each backend, without a list of them, and a flag to come would be missed. Some of these functions may
    raise.
    """
    core = torch._C
    for name in dir(core):
        if not name.startswith("_get_"):
            continue
        setter = name.replace("_get_", "_set_", 1)
        if name.endswith("_sdp_enabled"):  # _get_flash_sdp_enabled, but _set_sdp_use_flash
            setter = f"_set_sdp_use_{name.removeprefix('_get_').removesuffix('_sdp_enabled')}"
        if hasattr(core, setter):
            yield getattr(core, name), getattr(core, setter)


def precision(backend: str, operation: str) -> str:
    """Return the precision of float32 in one of ``PRECISIONS``. Raises RuntimeError if torch has none."""
    return torch._C._get_fp32_precision_getter(backend, operation)


def set_precision(backend: str, operation: str, value: str) -> None:
    """Set what ``precision`` returns."""
    torch._C._set_fp32_precision_setter(backend, operation, value)


def default_device() -> torch.device | None:
    """Return the default device; None if none was set, where ``torch.get_default_device`` says the CPU."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def compiler_is_loaded() -> bool:
    """Return whether what compiles is imported: without it nothing is compiled, and importing it is slow."""
    return "torch._dynamo" in sys.modules


def stance() -> Any:
    """Return whether functions are compiled; None as long as nothing that compiles is imported.

    ``torch.compiler.set_stance`` sets it, but nothing public tells what it is.
    """
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return None if compiler is None else compiler._stance


def set_stance(before: Any) -> None:
    """Set what ``stance`` returned."""
    compiler = sys.modules["torch._dynamo.eval_frame"]
    compiler._set_stance(compiler.DynamoStance() if before is None else before)


def options_of_compiler() -> Any:
    """Return the options of ``torch.compile`` for code with many shapes; they are set by attribute."""
    import torch._dynamo.config as options  # slow, and only what compiles needs it

    return options


JIT_SAVERS: Final[Mapping[str, Sequence[str]]] = {
    "torch.jit._serialization": ("save",),
    "torch.jit._script": ("RecursiveScriptModule.save",),
}
"""Functions that write a compiled TorchScript module, by module: the public ones are these, imported by name.
"""


def all_gather_function() -> Any:
    """Return the autograd function of ``torch.distributed.nn.all_gather``; its methods are the passes."""
    import torch.distributed.nn.functional  # which a build of torch may lack

    return torch.distributed.nn.functional._AllGather


# ----------------------------------------------------------------------------------------------- fast kernels
# Each of these is called once on small numbers before it is used, and its result compared (docs/speed.md): an
# operator that is missing raises AttributeError or RuntimeError, which callers expect.


def multiplies_bf16_fast() -> bool:
    """Return whether this CPU has instructions for products in bf16. Raises AttributeError if torch cannot
    tell.
    """
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def mkldnn_multiplies_bf16() -> bool:
    """Return whether oneDNN has kernels for bf16 on this CPU."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def mkldnn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply as ``F.linear`` does, by oneDNN, where ``F.linear`` would choose a slower library."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def weight_norm(rows: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Scale rows `[N, D]` to lengths `[N, 1]` in one pass, and return the norms that they had, too.

    The public ``weight_norm`` is a hook on a module.
    """
    return torch._weight_norm_interface(rows, lengths, 0)


def weight_norm_backward(
    gradient: Tensor, rows: Tensor, lengths: Tensor, norms: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and lengths in ``weight_norm``."""
    return torch.ops.aten._weight_norm_interface_backward(gradient, rows, lengths, norms, 0)
