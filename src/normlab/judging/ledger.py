r"""A ledger over proposals: the more is tried, the harder a keep becomes.

Each proposal is judged at a level of its own, by LORD++ (Ramdas, Yang, Wainwright and Jordan 2017, "Online
control of the false discovery rate with decaying memory", after Javanmard and Montanari 2018): the t-th has

.. math:: \alpha_t = \alpha \gamma_t + \alpha \sum_{j \ge 2} \gamma_{t - \tau_j}

where :math:`\tau_j` is the number of the j-th keep, and :math:`\gamma` falls to nothing and adds up to one.
So the levels of proposals that are all without effect add up to at most :math:`\alpha`, and every keep after
the first earns as much again. docs/statistics.md has what comes of it where all share one baseline.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final

from annotated_types import Ge, Le

from normlab.base.files import read_json, write_json_atomic
from normlab.base.io import from_plain, to_plain
from normlab.base.units import count
from normlab.errors import UserError
from normlab.judging.difference import Interval
from normlab.judging.judgement import DISCARD, KEEP, UNDECIDED
from normlab.judging.statistics import LEVEL

FILE: Final = "ledger.json"
LONGEST: Final = 100_000
"""Proposals over which the shares of the level add up to at most one."""


@cache
def _shares() -> tuple[float, ...]:
    r"""The shares :math:`\gamma_t`, in proportion to :math:`\log(\max(t, 2)) / (t e^{\sqrt{\log t}})`, as in
    Javanmard and Montanari 2018, Section 5.
    """
    numbers = range(1, LONGEST + 1)
    sizes = [math.log(max(t, 2)) / (t * math.exp(math.sqrt(math.log(t)))) for t in numbers]
    total = sum(sizes)
    return tuple(size / total for size in sizes)


def share(number: int) -> float:
    """The share of the level for the proposal that comes so many after it was earned; 0 after ``LONGEST``."""
    return _shares()[number - 1] if number <= LONGEST else 0.0


def level_of(number: int, keeps: Sequence[int], level: float = LEVEL) -> float:
    """The level of a proposal by its number, from 1, and by the numbers of the keeps before it."""
    earned = sum(share(number - keep) for keep in sorted(keeps)[1:])
    return level * (share(number) + earned)


@dataclass(frozen=True)
class Question:
    """What is asked about a change, and answered once: with another margin, or on other seeds, it may be kept
    by luck once more, and is another proposal.
    """

    baseline: str
    """The id of the command that it is compared with."""
    candidate: str
    """The id of its command."""
    margin: float = 0.0
    first_seed: int = 1


@dataclass(frozen=True)
class Proposal:
    """One change that was proposed."""

    number: int
    question: Question
    text: str
    """Its command."""
    level: float
    """The chance at which it would be kept by luck."""
    verdict: str = UNDECIDED
    seeds: int = 0
    gain: Interval | None = None
    """As it was judged: that of a kept one is too large on average, because it was kept for it."""
    measured: Interval | None = None
    """The gain on fresh seeds that played no part in the decision, with a 95% interval."""
    fresh_seeds: int = 0


@dataclass(frozen=True)
class Score:
    """What all proposals of a ledger are judged by."""

    metric: str = ""
    """A regular expression."""
    take: str = "last"
    higher_is_better: bool = False

    def __str__(self) -> str:
        better = "higher" if self.higher_is_better else "lower"
        return f"--metric {self.metric!r} --take {self.take}, {better} is better"


@dataclass(frozen=True)
class _Kept:
    """What the file of a ledger holds, beside what follows from it."""

    proposals: tuple[Proposal, ...]
    score: Score
    digits: Annotated[int, Ge(0), Le(sys.float_info.dig)]


@dataclass(frozen=True)
class Ledger:
    """All proposals, in the order in which they were first judged, by one score."""

    proposals: tuple[Proposal, ...] = ()
    score: Score = Score()
    digits: int = 4
    path: Path | None = field(default=None, repr=False)

    @classmethod
    def read(cls, folder: Path) -> Ledger:
        """Read the ledger of a folder; an empty one if there is none."""
        path = folder / FILE
        if not path.is_file():
            return cls(path=path)
        try:
            kept: _Kept = from_plain(_Kept, read_json(path), str(path), more=True)
        except UserError as error:
            raise UserError(f"{error}: it is not a ledger; restore it, or name another --ledger") from error
        return cls(kept.proposals, kept.score, kept.digits, path)

    def judged_by(self, score: Score) -> Ledger:
        """Return the ledger if its proposals are judged by a score. Raises UserError if it is another."""
        if self.proposals and score != self.score:
            raise UserError(
                f"{self.path} is judged by {self.score}, but you typed {score}; type what was typed before, "
                "or name another --ledger"
            )
        return replace(self, score=score)

    def find(self, question: Question, text: str) -> Proposal:
        """Return the proposal of a question, or a new one with the level that it gets."""
        for proposal in self.proposals:
            if proposal.question == question:
                return proposal
        number = len(self.proposals) + 1
        keeps = [proposal.number for proposal in self.kept]
        return Proposal(number, question, text, level_of(number, keeps))

    def without(self, proposal: Proposal) -> None:
        """Forget a proposal that nothing was seen of, if it is the last: it has not spent its level."""
        if self.path is not None and proposal == self.proposals[-1]:
            write_json_atomic(self.path, replace(self, proposals=self.proposals[:-1]).to_dict())

    def written(self, proposal: Proposal, digits: int | None = None) -> Ledger:
        """Write the ledger with a proposal that is new or has changed; return it."""
        others = [other for other in self.proposals if other.number != proposal.number]
        ordered = sorted([*others, proposal], key=lambda p: p.number)
        ledger = replace(self, proposals=tuple(ordered), digits=self.digits if digits is None else digits)
        if self.path is not None:
            write_json_atomic(self.path, ledger.to_dict())
        return ledger

    @property
    def kept(self) -> list[Proposal]:
        return [proposal for proposal in self.proposals if proposal.verdict == KEEP]

    @property
    def lucky(self) -> float:
        """How many of those kept are expected to be luck, at most: the levels of all proposals together."""
        return min(sum(proposal.level for proposal in self.proposals), float(len(self.kept)))

    def lines(self) -> Iterator[str]:
        """What the ledger says, in sentences."""
        number = len(self.proposals)
        if not number:
            yield "Nothing was proposed yet."
            return
        counts = {v: sum(p.verdict == v for p in self.proposals) for v in (KEEP, DISCARD, UNDECIDED)}
        yield (
            f"{count(number, 'proposal')}: {counts[KEEP]} kept, {counts[DISCARD]} discarded, "
            f"{counts[UNDECIDED]} undecided."
        )
        if self.kept:
            yield f"Of those kept, at most {self.lucky:.2g} are expected to be luck."
        measured = [(p.gain.value, p.measured.value) for p in self.kept if p.gain and p.measured]
        if measured:
            seen, real = (sum(values) / len(measured) for values in zip(*measured, strict=True))
            yield (
                f"What was kept gained {seen:+.{self.digits}f} on average as it was judged, and "
                f"{real:+.{self.digits}f} on fresh seeds."
            )
        yield f"The next proposal is judged at a level of {self._next_level():.2g}."

    def _next_level(self) -> float:
        return level_of(len(self.proposals) + 1, [proposal.number for proposal in self.kept])

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON, the page and the file."""
        return {
            "proposals": to_plain(self.proposals),
            "kept": len(self.kept),
            "lucky": self.lucky,
            "next_level": self._next_level(),
            "score": to_plain(self.score),
            "digits": self.digits,
            "lines": list(self.lines()),
        }
