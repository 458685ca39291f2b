"""How parameters are declared to start, and whether one does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import torch
from torch import Tensor, nn

LEVEL: Final = 1e-6
"""Probability of a false alarm over all parameters that are compared."""
LEAST: Final = 64
"""Entries below which the size of a draw is chance."""


@dataclass(frozen=True)
class Start:
    """The declared start of a parameter, or of a slice of it along one axis."""

    path: str
    std: float | None = None
    """Deviation of draws around 0."""
    value: float | None = None
    """The one value of all entries."""
    truncated_at: float | None = None
    """Magnitude of the largest draw, in deviations; ``std`` is then the argument of ``trunc_normal_``, or
    what the truncation leaves of it.
    """
    entries: int | None = None
    """Entries of the draw that ``std`` was measured on; None where it is exact."""
    axis: int = 0
    begin: int | None = None
    end: int | None = None

    def of(self, parameter: Tensor) -> Tensor:
        """The slice of the parameter that is meant."""
        if self.begin is None and self.end is None:
            return parameter
        return parameter[(*(slice(None),) * self.axis, slice(self.begin, self.end))]

    def difference(self, parameter: Tensor, compared: int = 1) -> str:
        r"""Say how a parameter differs from what is declared; empty where chance explains it.

        The logarithm of the root mean square of n draws with kurtosis k has the error
        :math:`\sqrt{(k - 1) / 4n}`; ``compared`` is how many are looked at, by which the level is divided.
        """
        x = self.of(parameter.detach()).double()
        if self.value is not None:
            off = x != torch.tensor(self.value, dtype=parameter.dtype).double().to(x.device)
            few = f"{int(off.sum()):,} of {x.numel():,} entries are not {self.value:g}"
            return f"{few}, as is declared" if bool(off.any()) else ""
        square = float(x.square().mean())
        if self.std is None or x.numel() < LEAST:
            return ""
        other = f"its root mean square is {square**0.5:.4g}, and {self.std:.4g} is declared"
        if not square or not self.std:
            return "" if square == self.std else other
        kurtosis = float(x.pow(4).mean()) / square**2
        spread = (kurtosis - 1) / 4 * (1 / x.numel() + (1 / self.entries if self.entries else 0))
        limit = limit_of(compared) * spread**0.5
        kept = truncated(self.truncated_at) if self.truncated_at else 1.0
        off = min(abs(math.log(square**0.5 / (self.std * share))) for share in {1.0, kept})
        if off > limit:
            return other
        most, largest = (self.truncated_at or math.inf) * self.std / kept, float(x.abs().max())
        far = largest > most * (1 + 1e-6)
        return f"its largest entry is {largest:.4g}, and truncation at {most:.4g} is declared" if far else ""


def limit_of(compared: int) -> float:
    """The largest deviation of so many normal draws, in units of their error, that is still chance."""
    return NormalDist().inv_cdf(1 - LEVEL / 2 / max(compared, 1))


def truncated(at: float) -> float:
    r"""Return the deviation of a standard normal that is cut off at so many deviations on both sides:
    :math:`\sqrt{1 - 2 t \varphi(t) / (2 \Phi(t) - 1)}`, 0.88 for t = 2.
    """
    density = math.exp(-at * at / 2) / math.sqrt(2 * math.pi)
    return math.sqrt(1 - 2 * at * density / math.erf(at / math.sqrt(2)))


def differences(model: nn.Module, starts: Iterable[Start]) -> Iterator[tuple[str, str]]:
    """Yield the path of each parameter that does not start as declared, and how it differs."""
    declared, parameters = list(starts), dict(model.named_parameters())
    for one in declared:
        if one.path in parameters and (how := one.difference(parameters[one.path], len(declared))):
            yield one.path, how
