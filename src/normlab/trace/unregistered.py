"""Find layers that a model keeps where torch does not look for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn


def unregistered(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the modules that are kept in plain lists, tuples and dicts, by the path of the attribute.

    They are not among the model's modules, nor their parameters among its parameters.
    """
    own, found = set(model.modules()), dict[str, list[nn.Module]]()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if inside := [m for m in _held(value) if m not in own]:
                found[f"{path}.{name}" if path else name] = inside
    return found


def _held(value: Any, depth: int = 3) -> Iterator[nn.Module]:
    items = value.values() if isinstance(value, Mapping) else value
    for item in items if depth and isinstance(value, (Mapping, list, tuple)) else ():
        if isinstance(item, nn.Module):
            yield item
        else:
            yield from _held(item, depth - 1)


def pointed_out(path: str, modules: list[nn.Module]) -> str:
    """Say that the modules of an attribute are not trained, and what to type."""
    kinds = Counter(type(module).__name__ for module in modules)
    counted = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    parameters = sum(p.numel() for p in {p for module in modules for p in module.parameters()})
    return (
        f"{path} holds {counted} in a plain list or dict: their {parameters:,} parameters are not among the "
        "model's, so that no optimiser trains them and no state_dict saves them; make it an nn.ModuleList or "
        "an nn.ModuleDict"
    )
