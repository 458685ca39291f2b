"""Stacks of sublayers. This file knows no placement by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from torch import Tensor, nn

from normlab.config.model import ModelConfig
from normlab.errors import UserError
from normlab.nn.norm import Norm
from normlab.nn.placement.base import Placement
from normlab.nn.site import Site, sites
from normlab.nn.sublayer import BRANCHES, Sublayer


class Stack(nn.Module):
    """``begin``, the sublayers in order, then ``end``: `[B, T, D]` to `[B, T, D]`."""

    def __init__(self, begin: nn.Module, sublayers: Sequence[Sublayer], end: nn.Module) -> None:
        super().__init__()
        self.begin, self.sublayers, self.end = begin, nn.ModuleList(sublayers), end

    @classmethod
    def of(cls, branches: Sequence[nn.Module], placement: type[Placement], first: Site) -> Stack:
        """Build a stack from any branches, one for each site from the first one on.

        Raises UserError if there are not ``first.sublayers`` branches.
        """
        if len(branches) != first.sublayers:
            raise UserError(
                f"{len(branches)} branches for {first.layers} layers of {len(first.roles)} sublayers; "
                f"give {first.sublayers}"
            )
        sublayers = [Sublayer(f, placement(s), s) for f, s in zip(branches, sites(first), strict=True)]
        return cls(placement.begin(first), sublayers, placement.end(first))

    def __iter__(self) -> Iterator[Sublayer]:
        return iter(cast("Iterable[Sublayer]", self.sublayers))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        stream = self.begin(x)
        for sublayer in self.sublayers:
            stream = sublayer(stream, *args, **kwargs)
        return self.end(stream)


def build_stack(name: str, roles: Sequence[str], config: ModelConfig) -> Stack:
    """Build the ``"encoder"`` or ``"decoder"`` of a model, with a sublayer for each role in every layer."""
    chosen = config.encoder_placement if name == "encoder" else config.decoder_placement
    placement = Placement.registry[chosen]
    norm = Norm.registry[config.norm]
    layers = config.encoder_layers, config.decoder_layers
    warmup = config.residual_warmup_steps
    first = Site(name, roles[0], 0, 0, config.dim, *layers, norm, tuple(roles), warmup)
    complete = placement.complete(config)
    branches = [BRANCHES[site.role](complete, site.layer) for site in sites(first)]
    return Stack.of(branches, placement, first)


def shards(model: nn.Module) -> list[list[nn.Module]]:
    """Return the units of a sharded model: call ``fully_shard`` on each of them, and last on the model.

    Each sublayer is a unit; those that share a parameter form one, since no parameter may be in two.
    """
    units: list[list[nn.Module]] = []
    unit_of: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        if isinstance(module, Sublayer):
            alone: list[nn.Module] = []
            unit = next((unit_of[p] for p in module.parameters() if p in unit_of), alone)
            if unit is alone:
                units.append(unit)
            unit.append(module)
            unit_of.update(dict.fromkeys(module.parameters(), unit))
    return units
