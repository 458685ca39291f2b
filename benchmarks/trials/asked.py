"""What trials said of three rates of ten language models, beside what plain loops did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from curve import LEARNT_NATS, THIRTY, USABLE, rows
from tables import share, short, table

NAMES: Final = (
    *("GPT-2", "Llama", "Qwen3", "Gemma 2", "OLMo 2", "GPT-NeoX", "Mixtral", "OPT", "Mamba", "nanoGPT"),
)


@dataclass(frozen=True)
class Claim:
    """What the trial says of a rate, and what the loop did there; None for what is not said."""

    name: str
    rate: float
    learns: bool | None
    usable: bool | None
    loss: float
    """Held out, of the loop; infinite where it diverged."""
    learnt: bool
    within: bool

    @property
    def words(self) -> str:
        """The claim."""
        if self.learns is None:
            return "worse" if self.usable is False else "–"
        return "within 5%" if self.usable else "worse" if self.learns else "learns nothing"

    @property
    def wrong(self) -> str:
        """What the loop did, where that is something else."""
        if self.learns not in (None, self.learnt):
            return "learns" if self.learnt else "learns nothing"
        if self.usable not in (None, self.within):
            return "within 5%" if self.within else "worse"
        return ""


def claims(kind: str) -> list[Claim]:
    """Of each model and rate, beside the loops of a kind."""
    every, found = rows(THIRTY), list[Claim]()
    loops = {r["name"]: r for r in every if r["kind"] == kind}
    for said in (r for r in every if r["kind"] == "trial" and r["name"] in loops):
        name, floor = said["name"], said["unigram"] - LEARNT_NATS
        ends = {r[0]: math.inf if r[3] is None else r[3] for r in loops[name]["rates"]}
        limit = min(ends.values()) + USABLE * max(said["unigram"] - min(ends.values()), 0.0)
        for rate, _, loss, usable, stopped in said["rates"]:
            learns = None if stopped.startswith("behind") else not stopped and loss < floor
            known = usable if said["learns"] else None
            found.append(
                Claim(name, rate, learns, known, ends[rate], ends[rate] < floor, ends[rate] <= limit)
            )
    return found


def _seen(one: Claim) -> str:
    loss = "diverges" if math.isinf(one.loss) else f"{one.loss:.2f}"
    return f"{loss} (**{one.wrong}**)" if one.wrong else loss


def _agreement(every: Sequence[Claim]) -> tuple[str, str]:
    """On whether a rate learns anything, and on whether it is within 5% of the best of the three."""
    learns = [c.learns == c.learnt for c in every if c.learns is not None]
    usable = [c.usable == c.within for c in every if c.usable is not None]
    return share(learns), share(usable)


def thirty() -> str:
    """One line a model, and how many sentences agree."""
    same, decayed = (sorted(claims(kind), key=lambda c: c.rate) for kind in ("constant", "loop"))
    body = [
        [name, *(f"{c.words}; {_seen(c)}, {_seen(d)}" for c, d in pairs)]
        for name in NAMES
        if (pairs := [(c, d) for c, d in zip(same, decayed, strict=True) if c.name == name])
    ]
    body += [[name, "–", "–", "–"] for name in NAMES if name not in {c.name for c in same}]
    head = ["model", *(short(r) for r in sorted({c.rate for c in same}))]
    (learns, usable), (then_learns, then_usable) = _agreement(same), _agreement(decayed)
    said = sum(c.words != "–" for c in same)
    agree = (
        f"The trial says something of {said} of {3 * len(NAMES)} rates. The loop without a decay agrees on "
        f"whether a rate learns anything in {learns}, and on whether it is within 5% of the best of the "
        f"three in {usable}; the loop with a decay in {then_learns} and {then_usable}."
    )
    return f"{table(head, body)}\n\n{agree}"
