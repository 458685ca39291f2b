"""How weight decay depends on the learning rate that is swept."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from normlab.errors import UserError

INDEPENDENT: Final = "independent"


@dataclass(frozen=True)
class Decay:
    r"""A factor on the setup's own weight decay :math:`\lambda`.

    An optimizer such as torch's AdamW shrinks weights by :math:`\eta \lambda` per step, which grows with the
    rate :math:`\eta` while that is swept: decay is *coupled*. *Independent* decay keeps :math:`\eta \lambda`
    as it is at today's rate, so that :math:`\lambda` falls as the rate rises. At today's rate both are equal.
    """

    factor: float = 1.0
    independent: bool = False

    @classmethod
    def of(cls, word: str | float) -> Decay:
        """Read a factor, or ``independent`` with or without one. Raises UserError for anything else."""
        kind, _, factor = str(word).rpartition(":")
        if factor == INDEPENDENT:
            kind, factor = INDEPENDENT, "1"
        value = math.nan
        with suppress(ValueError):
            value = float(factor)
        if kind not in ("", INDEPENDENT) or not 0 <= value < math.inf:
            raise UserError(
                f"decays has {word!r}, but must hold factors on the weight decay, such as 0 1 4, or "
                "independent, or independent:4"
            )
        return cls(value, kind == INDEPENDENT)

    def at(self, octave: float) -> float:
        """The factor on the setup's own decay at a rate so many octaves above today's."""
        return self.factor * (2.0**-octave if self.independent else 1.0)

    @property
    def label(self) -> str:
        """Its usual name."""
        if not self.factor:
            return "no weight decay"
        times = "" if self.factor == 1 else f"{self.factor:g}x the "
        return f"{times}weight decay, independent of the rate" if self.independent else f"{times}weight decay"
