"""Strings sublayers together; knows no placement by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import cast

from torch import Tensor, nn

from normlab.nn.context import Context
from normlab.nn.placement import Placement, Site
from normlab.nn.sublayer import BRANCHES, Size, Sublayer


class Stack(nn.Module):
    """``begin``, the sublayers in order, ``end``: `[B, T, D]` to `[B, T, D]`."""

    def __init__(self, begin: nn.Module, sublayers: Sequence[Sublayer], end: nn.Module) -> None:
        super().__init__()
        self.begin, self.sublayers, self.end = begin, nn.ModuleList(sublayers), end

    def __iter__(self) -> Iterator[Sublayer]:
        return iter(cast("Iterable[Sublayer]", self.sublayers))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        stream = self.begin(x)
        for sublayer in self.sublayers:
            stream = sublayer(stream, context)
        return self.end(stream)


def build_stack(
    name: str,
    roles: Sequence[str],
    layers: int,
    size: Size,
    placement: type[Placement],
    norm: Callable[[int], nn.Module],
) -> Stack:
    """A stack of ``layers`` layers, each of the branches that ``roles`` names, under one placement."""
    first = Site(name, roles[0], 0, 0, size.dim, size.encoder_layers, size.decoder_layers, norm)
    sublayers: list[Sublayer] = []
    for layer in range(layers):
        shared: dict[str, nn.Parameter] = {}
        for role in roles:
            site = replace(first, role=role, index=len(sublayers), layer=layer, shared=shared)
            sublayers.append(Sublayer(BRANCHES[role](size), placement(site), site))
    return Stack(placement.begin(first), sublayers, placement.end(first))
