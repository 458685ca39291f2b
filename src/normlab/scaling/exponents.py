"""Which exponents of the size are intended, by a declared parametrisation or for a learning rate to carry."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from normlab.config.model import ModelConfig
from normlab.nn.parametrisation import ONE, Exponents, MuP, Parametrisation
from normlab.scaling.measured import Key, Place

Axis = Literal["width", "depth"]
HALF: Final = 0.5
"""Exponents are multiples of this. Yang and Hu 2021 (2011.14522); Yang et al. 2022 (2203.03466)."""
NEAR: Final = HALF / 2
"""How far a measured slope may be from a multiple of a half and still count as that."""
EXACT: Final = 1e-3
"""How far off an exponent read off an optimizer's own numbers may be: rates are typed with four digits."""
FACTS: Final = ("start", "rate", "decay", "eps", "attention scale")
"""What a declared parametrisation prescribes, causes first."""
STARTING: Final = ("activation", "entry", "logits")
"""What must not grow with the width before the first step."""
HELD: Final = ("rate", "decay", "eps", "beta1", "beta2", "attention scale", "head width")
"""What is exact: the numbers that an optimizer or a model holds."""


@dataclass(frozen=True)
class Meant:
    """One exponent, or anything lower by up to ``falls``."""

    exponent: float
    falls: float = 0.0
    exact: bool = False

    @property
    def low(self) -> float:
        return self.exponent - self.falls

    def holds(self, low: float, high: float) -> bool:
        """Whether some exponent in an interval is nearest to an intended one."""
        if self.exact:
            return low >= self.low - EXACT and high <= self.exponent + EXACT
        return high >= self.low - NEAR and low <= self.exponent + NEAR


def by_table(kind: type[Parametrisation] | None, axis: Axis, key: Key, place: Place) -> Meant | None:
    """What a declared parametrisation prescribes for a start, a rate, a decay, an eps, or a branch.

    A role that the table of decays, or of starts, leaves out is not judged, nor is an eps that it does not
    change: the public µP references differ on both. Decay of vectors is not judged either.
    """
    if kind is None:
        return None

    def along(powers: Exponents) -> float:
        return powers.width if axis == "width" else powers.depth * place.in_block

    quantity, power = key.quantity, None
    if quantity == "rate":
        power = along(kind.rates.get(key.role, ONE))
    elif quantity == "decay" and key.role in kind.decays:
        power = along(kind.decays[key.role])
    elif quantity == "eps" and kind.eps != ONE and (axis == "width" or place.in_block):
        power = along(kind.eps)
    if power is not None:
        return Meant(power, exact=True)
    if quantity == "start" and axis == "width" and key.role in kind.starts:
        return Meant(kind.starts[key.role])
    if quantity == "branch" and axis == "depth" and kind.branch != ONE:
        return Meant(kind.branch.depth)
    return None


def attention_power(kind: type[Parametrisation], narrow: float, wide: float) -> float | None:
    """The exponent of the width of a head in the scale of attention; None without two widths."""
    if narrow == wide:
        return None
    own = kind(ModelConfig())
    scales = (own.attention_scale(None, round(w)) or w**-0.5 for w in (narrow, wide))
    low, high = map(math.log, scales)
    return (high - low) / math.log(wide / narrow)


def to_carry(axis: Axis, key: Key, step: int, place: Place) -> Meant | None:
    r"""What a learning rate needs to carry: updates change everything by the same amount at every size,
    neither growing nor vanishing, and nothing grows at the start.

    A change that is a sum over features may fall by a root of the width: its terms align fully, as the theory
    has it, or not at all. Everett et al. 2024, section 3 (2407.05872). So may one that adds up several steps,
    since the steps of a wider model may agree less. With depth, the updates of all layers add up in the
    stream; the change there counts, not that of a layer, nor that of the logits, which is relative to a
    stream whose own start approaches that of the embeddings.
    """
    wide, quantity = axis == "width", key.quantity
    if quantity == "activation" and key.role in ("embedding", "head"):
        return None  # a multiplier may follow: what counts is what enters the first block, and the logits
    if quantity == "stream change" or (not step and quantity in ("stream", *(STARTING if wide else ()))):
        return Meant(0.0, falls=math.inf)
    if quantity == "logits change" and wide:
        return Meant(0.0, falls=HALF)
    if quantity == "update" and (wide or not place.in_block):
        return Meant(0.0, falls=HALF if wide and (place.product or step > 1) else 0.0)
    return None


def kind_of(key: Key, start: float, rate: float) -> str:
    """What is wrong if this quantity is, given the exponents of its parameter's start and rate: start, rate,
    decay, eps, multiplier, attention scale or branch.

    If the start, or the rate, is right, the multiplier is wrong. Yang et al. 2022, Table 8 (2203.03466).
    """
    match key.quantity:
        case "start" | "rate" | "decay" | "eps" | "attention scale":
            return key.quantity
        case "branch" | "stream" | "stream change":
            return "branch"
        case "activation" | "logits":
            role = "head" if key.role == "logits" else key.role
            return "start" if abs(start - MuP.starts.get(role, start)) > NEAR else "multiplier"
        case "update" if abs(rate - MuP.rates.get(key.role, ONE).width) > NEAR:
            return "rate"
    return "multiplier"
