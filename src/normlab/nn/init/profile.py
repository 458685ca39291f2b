"""Data-dependent initialisation from one forward pass, without files or a second process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from normlab.errors import UserError
from normlab.nn import Context, ProfiledPlacement, Sublayer
from normlab.nn.model import evaluating


@torch.no_grad()
def profile_(model: nn.Module, forward: Callable[[], Any]) -> dict[str, float]:
    r"""Initialise every placement that depends on data from the variances in one forward pass.

    The sublayers of a stack are followed in the order in which they run, from site 0 on: the placement's
    ``first`` takes the variance of the stack's input, and ``carry`` those of each stream and branch (for
    Admin :math:`\mathrm{Var}[x_0] + \sum_{1 \le j < i} \mathrm{Var}[f_j(x_{j-1})]`, Liu et al. 2020, Section
    4, arXiv 2004.08249). Variances are over all elements that are not padding, without dropout. ``forward``
    runs the model once. Returns the variance passed to each sublayer, by its path; if no placement depends on
    data, the result is empty and the model unchanged.

    Raises UserError if the pass skips a sublayer to be initialised, or runs a stack out of order.
    """
    profiled = {
        name: (module, module.place)
        for name, module in model.named_modules()
        if isinstance(module, Sublayer) and isinstance(module.place, ProfiledPlacement)
    }
    if not profiled:
        return {}
    pass_ = _ProfilingPass()
    hooks = []
    for name, (sublayer, _) in profiled.items():
        hooks.append(sublayer.register_forward_pre_hook(partial(pass_.before, name), with_kwargs=True))
        hooks.append(sublayer.f.register_forward_hook(partial(pass_.after, sublayer), with_kwargs=True))
    before = [(p, p.clone()) for _, place in profiled.values() for p in place.parameters()]
    for _, place in profiled.values():
        place.init_(1.0)  # an initialised model is profiled like a new one
    try:
        with evaluating(model):
            forward()
        missed = profiled.keys() - pass_.given.keys()
        if missed:
            raise UserError(f"the profiling pass did not run {sorted(missed)}; give it a batch that does")
    except BaseException:
        for parameter, value in before:
            parameter.copy_(value)
        raise
    finally:
        for hook in hooks:
            hook.remove()
    for name, (_, place) in profiled.items():
        place.init_(float(pass_.given[name]))
    return {name: float(variance) for name, variance in pass_.given.items()}


def admin_(model: nn.Module, batch: Any) -> dict[str, float]:
    """Run ``profile_`` on a network of your own, built from sublayers that ``nn.wrap`` returned.

    ``batch`` is the model's input: one tensor, a tuple or list of arguments, or a mapping of keywords. Liu
    et al. 2020, Section 4 (arXiv 2004.08249).
    """
    if isinstance(batch, Mapping):
        return profile_(model, lambda: model(**batch))
    if isinstance(batch, (tuple, list)):
        return profile_(model, lambda: model(*batch))
    return profile_(model, lambda: model(batch))


class _ProfilingPass:
    """One profiling pass, with the value carried along the stack that is running."""

    def __init__(self) -> None:
        self.given: dict[str, Tensor] = {}
        self.carried, self.stream = torch.zeros(()), torch.zeros(())
        self.due = 0

    def before(self, name: str, sublayer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sublayer = cast("Sublayer", sublayer)
        place = cast("ProfiledPlacement", sublayer.place)
        stream, *others = args or (kwargs["stream"],)
        self.stream = _variance(stream, tuple(others), kwargs)
        index = sublayer.site.index
        if index != self.due:
            raise UserError(
                f"{name} is at index {index} of its stack, and the sublayer at index {self.due} was due; "
                "wrap all of a stack with one placement, each at its own site, in order (nn.stack_of)"
            )
        self.due = index + 1 if index + 1 < sublayer.site.sublayers else 0
        if index == 0:
            self.carried = place.first(self.stream)
        self.given[name] = self.carried
        if place.in_order:
            place.init_(float(self.carried))

    def after(
        self, sublayer: Sublayer, f: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor
    ) -> None:
        place = cast("ProfiledPlacement", sublayer.place)
        self.carried = place.carry(self.carried, self.stream, _variance(y, args[1:], kwargs))


def _variance(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the variance over the elements of x `[B, T, D]`, without padding if a ``Context`` masks it."""
    for context in (*args, *kwargs.values()):
        if isinstance(context, Context) and context.padding_mask is not None:
            x = x[context.padding_mask]
    return x.to(torch.promote_types(x.dtype, torch.float32)).var(correction=0)
