"""The modules of anybody's model: inside its wrappers, what they hold, and how it is called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn

from normlab.trace.tensors import tensors_in

Call = Callable[[nn.Module, Any], Any]
"""``call(model, batch)``: the model's output."""
PARALLEL: Final = (nn.parallel.DistributedDataParallel, nn.DataParallel)
LATER: Final = 10**6
"""A count of steps late in training, when every schedule is over."""


def unwrapped(model: nn.Module) -> list[nn.Module]:
    """Return the model and what its wrappers (data parallel, compiled) hold, the bare model last."""
    models = [model]
    while True:
        outer = models[-1]
        if isinstance(outer, PARALLEL):
            models.append(outer.module)
        elif isinstance(inner := getattr(outer, "_orig_mod", None), nn.Module):
            models.append(inner)
        else:
            return models


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside its wrappers; its module paths are the ones that count."""
    return unwrapped(model)[-1]


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are saved with a model's weights, by name."""
    passing = {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in model.named_buffers() if name not in passing}


def counts(model: nn.Module) -> dict[str, Tensor]:
    """Return the saved buffers that are one integer: they count steps or batches during training."""
    whole = (torch.int32, torch.int64)
    return {n: b for n, b in saved_buffers(model).items() if not b.dim() and b.dtype in whole}


def later_counts(model: nn.Module) -> dict[str, Tensor]:
    """Return the ``counts`` as they are late in training, as new tensors."""
    return {name: count.clamp(min=LATER) for name, count in counts(model).items()}


def loose_tensors(model: nn.Module) -> list[str]:
    """Return the paths of floating tensors that modules hold as plain attributes."""
    own = {id(t) for t in (*model.parameters(), *model.buffers())}
    return [
        f"{path}.{name}".strip(".")
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, nn.Module)
        and any(t.is_floating_point() and id(t) not in own for _, t in tensors_in(value))
    ]


def unregistered(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the modules that are kept in plain lists, tuples and dicts, by the path of the attribute.

    The model counts neither them among its modules nor their parameters among its own.
    """
    own, hidden = set(model.modules()), dict[str, list[nn.Module]]()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if inside := [m for m in _held(value) if m not in own]:
                hidden[f"{path}.{name}" if path else name] = inside
    return hidden


def _held(value: Any, depth: int = 3) -> Iterator[nn.Module]:
    items = value.values() if isinstance(value, Mapping) else value
    for item in items if depth and isinstance(value, (Mapping, list, tuple)) else ():
        if isinstance(item, nn.Module):
            yield item
        else:
            yield from _held(item, depth - 1)


def shared_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several, compared by storage if it has one."""
    names: dict[int, list[str]] = {}
    for n, p in model.named_parameters(remove_duplicate=False):
        key = id(p) if p.is_meta or not p.numel() else p.data_ptr()
        names.setdefault(key, []).append(n)
    return [same for same in names.values() if len(same) > 1]


def compiles(module: nn.Module) -> bool:
    """Return whether calls of the module run compiled code."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call ``model(**batch)``, ``model(*batch)`` or ``model(batch)``, by the type of the batch."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def refusal(who: str, batch: Any, error: Exception, word: str = "") -> str:
    """Say what raised on a batch; with a word, also how batches are passed and how to pass them otherwise."""
    kind = f"keywords {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
    how = (
        ". A dict is passed as keywords, a tuple or list as arguments, anything else as it is; pass "
        f"{word}=lambda model, batch: … to call the model in another way"
    )
    how *= bool(word)
    if isinstance(batch, list):
        how += ". A list of tensors is one batch; give several as a DataLoader, or a list of tuples or dicts"
    return f"{who} raised {type(error).__name__} on the batch ({kind}): {error}{how}"


@contextmanager
def eager() -> Iterator[None]:
    """Inside this block, run modules as they were written, hooks included: without compiled code, and without
    torch's fast path through encoder layers, which packs padded rows into nested tensors.
    """
    compiler = "torch._dynamo" in sys.modules  # without it nothing is compiled, and importing it is slow
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.compiler.set_stance("force_eager") if compiler else nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
