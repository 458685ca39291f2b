"""Measurements of an optimizer step that stay on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from normlab.diagnosis.probing.observe import Record


class StepRecord(NamedTuple):
    """The numbers of one step; the tensors are on the device."""

    step: int
    lr: float
    loss: Tensor | None
    """None where nobody gave it."""
    names: tuple[str, ...]
    gradients: Tensor
    """`[P]`: the L2 norm of each named parameter's gradient."""
    updates: Tensor
    """`[P]`: the L2 norm of each named parameter's update."""
    seen: tuple[Record, ...] = ()
    """What was measured of every module, in the order in which it was, where the step was observed."""
    nll: Tensor | None = None
    norm: Tensor | None = None
    """The gradient's norm where it is not that of ``gradients``: 0 in a step that was skipped."""

    @property
    def values(self) -> Tensor:
        """`[3]`: loss, negative log-likelihood and gradient norm; not a number where it is not known."""
        norm = torch.linalg.vector_norm(self.gradients) if self.norm is None else self.norm
        unknown = torch.full_like(norm, torch.nan)
        loss, nll = (unknown if x is None else x.to(norm) for x in (self.loss, self.nll))
        return torch.stack([loss, nll, norm])

    def norms(self, what: str) -> dict[str, float]:
        """The L2 norms of each ``gradient`` or ``update`` by parameter."""
        norms = self.gradients if what == "gradient" else self.updates
        return dict(zip(self.names, norms.tolist(), strict=True))


class Parts(Protocol):
    """Parameters by name, as this process holds them, and how to take their norms."""

    @property
    def parts(self) -> Mapping[str, nn.Parameter]: ...

    def norms(self, parts: Sequence[Tensor], /) -> Tensor: ...


P = TypeVar("P", bound=Parts)


class Meter(Generic[P]):
    """Measures the norm of every parameter's gradient and of its update, in every step.

    One copy of the weights is kept for the updates: about 1% of a step's time on a CPU, a quarter of what
    Adam keeps anyway.
    """

    def __init__(self, parallel: P) -> None:
        self.parallel, parts = parallel, parallel.parts
        self.names, self.weights = tuple(parts), tuple(p.detach() for p in parts.values())
        self._parameters = tuple(parts.values())
        self.moved = [torch.empty_like(w) for w in self.weights]
        """Each parameter before the last step minus itself after it."""
        self._moved_here, self._weights_here = local_parts(self.moved), local_parts(self.weights)

    def gradients(self) -> Tensor:
        """`[P]`: the L2 norm of each gradient, 0 where there is none."""
        here = [(i, stored(p.grad)) for i, p in enumerate(self._parameters) if p.grad is not None]
        if not here:
            return torch.zeros(len(self.names), device=self.weights[0].device)
        norms = self.parallel.norms([gradient for _, gradient in here])
        if len(here) == len(self.names):
            return norms
        whole = norms.new_zeros(len(self.names))
        return whole.index_copy_(0, torch.tensor([i for i, _ in here], device=norms.device), norms)

    @torch.no_grad()
    def before(self) -> None:
        """Remember the weights; call it before the optimiser's step."""
        torch._foreach_copy_(self._moved_here, self._weights_here)

    @torch.no_grad()
    def after(self) -> Tensor:
        """`[P]`: the L2 norm of each parameter's update; call it after the optimiser's step."""
        torch._foreach_sub_(self._moved_here, self._weights_here)
        return self.parallel.norms(self.moved)


def local_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return what this process holds of each tensor, which shares its memory: all of it, or the part of one
    that is spread over ranks.
    """
    return [getattr(x, "to_local", lambda x=x: x)() for x in tensors]


def stored(gradient: Tensor) -> Tensor:
    """Return the numbers of a gradient, of a sparse one those that are not zero."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


class Grouping:
    """Adds the norms of parameters up by what holds them: ``owners`` has a name for each parameter."""

    def __init__(self, owners: Sequence[str], device: torch.device) -> None:
        self.names = list(dict.fromkeys(owners))
        self._owner = torch.tensor([self.names.index(o) for o in owners], device=device)

    def together(self, norms: Tensor) -> Tensor:
        """`[G]`: the L2 norms of the groups, given those of the parameters."""
        squares = norms.new_zeros(len(self.names)).index_add_(0, self._owner, norms.square())
        return squares.sqrt()


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """`[P]`: the L2 norm of each, without a wait for the device."""
    return torch.stack(torch._foreach_norm(list(tensors)))
