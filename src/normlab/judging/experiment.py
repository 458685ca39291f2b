"""What ``normlab judge --baseline CMD --candidate CMD`` is asked, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from normlab.base.io import Amount, Count, Share, Size, to_plain, validated
from normlab.base.metric import Metric
from normlab.base.units import count, duration
from normlab.judging.command import Command
from normlab.judging.difference import Interval
from normlab.judging.ledger import Ledger
from normlab.judging.sequential import MOST_SEEDS, Decision
from normlab.judging.statistics import LEVEL

BASELINE, CANDIDATE = "baseline", "candidate"
SIDES: Final = (BASELINE, CANDIDATE)
MOST_NAMED: Final = 5
"""The files of a command are named if there are no more than so many; the page has all."""


@validated
@dataclass(frozen=True)
class Request:
    """What is run and how it is judged."""

    baseline: str
    candidate: str
    metric: str
    """A regular expression with one group, round the score."""
    margin: Amount = 0.0
    higher_is_better: bool = False
    take: str = "last"
    budget_s: float = math.inf
    """No run begins after so many seconds, or if it would not end by then."""
    max_seeds: Size = MOST_SEEDS
    first_seed: Count = 1
    jobs: Size = 1
    on: str = "local"
    depends: tuple[Path, ...] = ()
    """Files and folders that both commands depend on, beside those that they name."""
    folder: Path = Path("runs/judge")
    level: Share = LEVEL
    patient: bool = False
    """Whether to go on where no likely gain would be decided within ``max_seeds``."""
    ledger: bool = False
    """Whether the folder has a ledger, which sets the level and remembers the answer."""
    fresh_seeds: Count = 5
    """With a ledger: seeds on which the gain of a kept change is measured again."""


@dataclass(frozen=True)
class SideRun:
    """What one run gave."""

    outcome: str
    score: float | None
    seconds: float
    reason: str = ""


@dataclass(frozen=True)
class KilledRun:
    """A run that signals have killed each time that it was tried, as where memory runs out."""

    seed: int
    side: str
    signal: int
    """The number of the last of these signals."""
    times: int

    @property
    def sentence(self) -> str:
        return (
            f"the {self.side} was killed by signal {self.signal} at seed {self.seed}, {self.times} times, "
            "which says nothing about its score; the same command tries it again"
        )


@dataclass(frozen=True)
class Experiment:
    """The answer about one candidate, with every run that it rests on."""

    request: Request
    decision: Decision
    baseline: Command
    candidate: Command
    seeds: tuple[int, ...] = ()
    """The seeds that the decision rests on, in their order."""
    runs: Mapping[str, tuple[SideRun, ...]] = field(default_factory=dict)
    """By side, the runs of these seeds."""
    reused: int = 0
    """How many of these runs had ended before."""
    ran: int = 0
    """How many runs ended now."""
    seconds: float = 0.0
    ended_by: str = ""
    """Why it ended undecided: the budget, the number of seeds, that it is hopeless, an interruption, or a run
    that was killed.
    """
    killed: tuple[KilledRun, ...] = ()
    """The runs without a result because signals killed them."""
    digits: int = 4
    fresh: Interval | None = None
    """The gain on seeds that played no part in the decision, with a 95% interval."""
    fresh_seeds: int = 0
    ledger: Ledger | None = None

    @property
    def verdict(self) -> str:
        return self.decision.verdict

    @property
    def metric(self) -> Metric:
        return Metric("score", "score", higher_is_better=self.request.higher_is_better, digits=self.digits)

    @property
    def sentence(self) -> str:
        """The verdict and why."""
        ended = f"; {self.ended_by}" if self.ended_by else ""
        return f"{self.verdict} after {count(self.decision.seeds, 'seed')}: {self.decision.sentence}{ended}"

    def lines(self) -> Iterator[str]:
        """The answer, then what was run."""
        yield f"{self.sentence}."
        for name, command in ((BASELINE, self.baseline), (CANDIDATE, self.candidate)):
            files = ", ".join(command.files)
            if len(command.files) > MOST_NAMED:
                files = count(len(command.files), "file")
            depends = f"and on {files}" if files else "alone (--depends names files that it reads)"
            yield f"The {name} depends on its words {depends}; its runs are in {command.id}."
        yield (
            f"{count(self.ran, 'run')} now, {self.reused} used again, in {duration(self.seconds)}; "
            f"level {self.request.level:.2g}."
        )
        if self.fresh is not None:
            yield f"On {count(self.fresh_seeds, 'fresh seed')} the gain is {self._shown(self.fresh)}."
        if self.ledger is not None:
            yield from self.ledger.lines()

    def _shown(self, gain: Interval) -> str:
        signed = self.metric.signed
        if gain.low is None or gain.high is None:
            return signed(gain.value)
        return f"{signed(gain.value)}, {signed(gain.low)} to {signed(gain.high)}"

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON and the page."""
        rows = [
            {"seed": seed, **{side: to_plain(self.runs[side][i]) for side in SIDES}}
            for i, seed in enumerate(self.seeds)
        ]
        return {
            "verdict": self.verdict,
            "metric": self.request.metric,
            "take": self.request.take,
            "higher_is_better": self.request.higher_is_better,
            "digits": self.digits,
            "margin": self.request.margin,
            "level": self.request.level,
            "decision": to_plain(self.decision),
            "baseline": {"id": self.baseline.id, **to_plain(self.baseline)},
            "candidate": {"id": self.candidate.id, **to_plain(self.candidate)},
            "rows": rows,
            "ended_by": self.ended_by,
            "killed": to_plain(self.killed),
            "ran": self.ran,
            "reused": self.reused,
            "seconds": round(self.seconds, 3),
            "lines": list(self.lines()),
            "fresh": to_plain(self.fresh),
            "fresh_seeds": self.fresh_seeds,
            "ledger": None if self.ledger is None else self.ledger.to_dict(),
            "source": str(self.request.folder),
            "command": "",
        }

    def page(self, path: str | Path) -> Path:
        """Write the answer as a page, one file that needs no network; return the path."""
        from normlab.report.experiment import experiment_page

        return experiment_page(self).write(Path(path))
