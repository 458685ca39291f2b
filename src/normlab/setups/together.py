"""Find the model of a step: the smallest module that holds all that it trains.

A recording shows which modules a script calls, and these may be parts of its model.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from normlab.trace.tensors import unwrap


def common_module(
    modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter], names: Mapping[int, str]
) -> nn.Module:
    """Return the smallest module alive that holds these modules and parameters; one that is made for them if
    there is none, as where an encoder and a decoder are called in turn.

    Args:
        modules: The modules.
        parameters: The parameters.
        names: What the script calls modules, by ``id``.
    """
    wanted = {id(unwrap(m)) for m in modules}
    tensors = {id(p) for p in parameters}
    candidates = [unwrap(module) for module in modules]
    # by their type: asking an object for its class may run code of its own
    candidates += [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
    best: tuple[int, nn.Module] | None = None
    for candidate in candidates:
        try:
            inside = {id(m) for m in candidate.modules()}
        except RecursionError:  # torch cannot walk it, so it is no part of this step
            continue
        holds_all = wanted <= inside and tensors <= {id(p) for p in candidate.parameters()}
        if holds_all and (best is None or len(inside) < best[0]):
            best = len(inside), candidate
    return best[1] if best is not None else _joined(modules, parameters, names)


class Together(nn.Module):
    """Modules that one step calls, and that no module holds."""


def _joined(
    modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter], names: Mapping[int, str]
) -> nn.Module:
    """Return a module that holds these, under the names that the script or their classes give them."""
    together, used = Together(), Counter[str]()
    # a name may be that of one of Module's own attributes, as "train" is
    names = {key: name for key, name in names.items() if not hasattr(together, name)}
    for module in dict.fromkeys(modules):
        if any(_holds(other, module) for other in modules if other is not module):
            continue
        name = names.get(id(module)) or names.get(id(unwrap(module))) or type(module).__name__.lower()
        used[name] += 1
        together.add_module(name if used[name] == 1 else f"{name}_{used[name]}", unwrap(module))
    known = {id(p) for p in together.parameters()}
    for i, parameter in enumerate(p for p in dict.fromkeys(parameters) if id(p) not in known):
        together.register_parameter(f"parameter_{i}", parameter)
    return together


def _holds(outer: nn.Module, inner: nn.Module) -> bool:
    return any(module is inner for module in outer.modules())
