"""What short trainings say of learning rates: one sentence, and the trials behind it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from statistics import stdev
from typing import Any, Final

from normlab.spec.units import count, duration, rate
from normlab.trials.scale import LEARNT_NATS, Scale
from normlab.trials.search import LAST, USABLE, level

ERROR: Final = "within 2x"
"""How well the upper end is known: see docs/learning-rate.md for the evaluation."""
SAME: Final = 1e-3
"""The relative difference of losses below which nothing has moved them."""


@dataclass(frozen=True)
class Trial:
    """A short training at one rate: the loss before each step, and why it ended early, if it did."""

    rate: float
    steps: int
    losses: tuple[float, ...] = field(repr=False)
    stopped: str = ""
    seconds: float = field(repr=False, default=0.0)

    @property
    def loss(self) -> float:
        """The mean of the last tenth of the losses, eight at least; infinite where it ended early."""
        return math.inf if self.stopped else level(self.losses, self.window)

    @property
    def window(self) -> int:
        """How many losses count at the end."""
        return min(max(LAST, self.steps // 10), len(self.losses))

    @property
    def noise(self) -> float:
        """The standard error of ``loss`` by the spread of batches."""
        last = self.losses[-self.window :]
        return stdev(last) / len(last) ** 0.5 if len(last) > 1 else 0.0

    @property
    def falls(self) -> bool:
        """Whether the loss still falls: the last quarter is below the third by two standard errors."""
        quarter = len(self.losses) // 4
        if self.stopped or quarter < 2:
            return False
        third, last = self.losses[-2 * quarter : -quarter], self.losses[-quarter:]
        error = math.hypot(stdev(third), stdev(last)) / quarter**0.5
        return level(third, quarter) - level(last, quarter) > 2 * error


@dataclass(frozen=True)
class Trials:
    """Trials of one setup: which rates train, and how far up; the lower end is not claimed.

    ``tried`` holds all trials, ``rates`` those of the number of steps that the answer is of, in order of the
    rate. ``usable`` is the lowest rate tried and the highest that is within 5% of the best; ``edge`` says
    where the next rate is worse, or that none was. ``beside`` holds the same with one thing changed.
    """

    model: str
    steps: int
    today: float
    scale: Scale
    tried: tuple[Trial, ...] = field(repr=False)
    warmup: float = 0.0
    plan: str = field(repr=False, default="")
    cut: str = ""
    """Why the scan ended before it was done; empty where it was."""
    change: str = ""
    beside: tuple[Trials, ...] = field(repr=False, default=())
    seconds: float = field(repr=False, default=0.0)
    facts: Mapping[str, str] = field(repr=False, default_factory=dict)

    # --------------------------------------------------------------------------------------------- numbers
    @property
    def rates(self) -> tuple[Trial, ...]:
        """The trials of ``steps`` steps, by rate."""
        return tuple(sorted((t for t in self.tried if t.steps == self.steps), key=lambda t: t.rate))

    @property
    def best(self) -> Trial | None:
        """The trial with the lowest loss; None where each ended early."""
        return min((t for t in self.rates if not t.stopped), key=lambda t: t.loss, default=None)

    @property
    def unigram(self) -> float | None:
        """The entropy of the targets' frequencies in nats, None where no targets are known."""
        return self.scale.unigram

    @property
    def learns(self) -> bool:
        """Whether the best trial shows that something was learnt."""
        best = self.best
        return best is not None and self.scale.learns(self.nats(best), best.noise / self.scale.weight)

    @property
    def usable(self) -> tuple[float, float] | None:
        """The lowest rate tried, and the highest that trains within 5% of the best with all below it."""
        if self.best is None or not self.learns:
            return None
        above = [t for t in self.rates if t.rate >= self.best.rate]
        worse = next((i for i, t in enumerate(above) if not self.is_usable(t)), len(above))
        return self.rates[0].rate, above[worse - 1].rate

    @property
    def edge(self) -> str:
        """Where the usable rates end: "seen at" the first that is worse, or "not reached by" the last."""
        if self.usable is None:
            return ""
        above = [t.rate for t in self.rates if t.rate > self.usable[1]]
        return f"seen at {short(above[0])}" if above else f"not reached by {short(self.usable[1])}"

    def nats(self, trial: Trial) -> float:
        """The loss of a trial in nats a target, where targets are known."""
        return self.scale.nats(trial.loss)

    def is_usable(self, trial: Trial) -> bool:
        """Whether a trial is within 5% of what the best has learnt."""
        best = self.nats(self.best) if self.best else -math.inf
        return self.nats(trial) <= best + USABLE * max(self.scale.reference - best, 0.0)

    # ------------------------------------------------------------------------------------------- sentences
    @property
    def sentence(self) -> str:
        """The answer."""
        if self.best is None:
            ends = ", ".join(f"{short(t.rate)} {t.stopped}" for t in self.rates)
            return f"No rate trains for {self.steps} steps: {ends or 'none was tried'}"
        return self.nothing_moves or (self._range() if self.learns else self._too_short())

    def _range(self) -> str:
        assert self.best is not None and self.usable is not None
        low, high = self.usable
        error = f" ({ERROR})" if self.edge.startswith("seen") and not self.cut else ""
        end = (
            f"{self.edge.removeprefix('seen at ')} is worse" if error or self.edge.startswith("seen") else ""
        )
        return "; ".join(
            part
            for part in (
                f"Up to {short(high)} trains within 5% of the best in {self.steps} steps{error}",
                end or f"an upper end was {self.edge}",
                self._today(),
                f"lowest rate tried: {short(low)}",
            )
            if part
        )

    def _today(self) -> str:
        assert self.best is not None and self.usable is not None
        own = next((t for t in self.rates if t.rate == self.today), None)
        name = f"your {short(self.today)}"
        if self.today > self.usable[1]:
            return f"{name} is above that" + (f", and ended {own.stopped}" if own and own.stopped else "")
        if own is None:
            return f"{name} was not tried"
        if self.is_usable(own):
            return f"{name} is inside"
        return f"{name} is slower here than {short(self.best.rate)}, which a long training may make up for"

    def _too_short(self) -> str:
        assert self.best is not None
        best, where = self.nats(self.best), f"{short(self.best.rate)} in {self.steps} steps"
        more = "it still falls there" if self.best.falls else "it no longer falls there"
        advice = f"type --steps {4 * self.steps}" if self.best.falls else "run normlab check, or more steps"
        if self.unigram is None or self.scale.start < self.unigram - LEARNT_NATS:
            what = f"the best loss is {best:.4g} at {where}, from {self.scale.start:.4g} at the start"
        else:
            what = (
                f"the best loss is {best:.3f} nats at {where}, not {LEARNT_NATS} below the unigram entropy of "
                f"the targets, {self.unigram:.3f}"
            )
        return f"Too short, or it does not train: {what}; {more}: {advice}"

    @property
    def nothing_moves(self) -> str:
        """The sentence where no rate changes the loss, or none leaves that of equal logits."""
        whole = [t for t in self.rates if not t.stopped]
        uniform, ends = self.scale.uniform, [self.nats(t) for t in whole]
        far = uniform is not None and self.unigram is not None and self.unigram < uniform - LEARNT_NATS
        if far and all(abs(end - uniform) <= SAME * 10 * uniform for end in ends):
            return (
                f"The loss stays at ln V = {uniform:.3f} nats at every rate: the outputs say nothing of the "
                "targets; run normlab check"
            )
        pairs = zip(*(t.losses for t in whole), strict=True)
        if len(whole) > 1 and all(max(row) - min(row) <= SAME * SAME * abs(row[0]) for row in pairs):
            return (
                "No rate moves the loss: the steps do not reach what it is computed from; run normlab check"
            )
        return ""

    def lines(self) -> Iterator[str]:
        """The sentence, what limits it, and the same with one thing changed."""
        yield self.sentence + "."
        if self.cut:
            yield f"The scan is not complete: {self.cut}."
        if self.scale.unknown:
            yield (
                f"Targets are not known ({self.scale.unknown}): losses are compared with that at the start, so "
                "whether anything but averages was learnt is not known."
            )
        for one in self.beside:
            yield f"With {one.change}: {one.sentence[0].lower()}{one.sentence[1:]}."

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_dict(self) -> dict[str, Any]:
        """The same facts as plain values."""
        best = self.best
        return {
            **{k: v for k, v in asdict(self).items() if k != "beside"},
            "sentence": self.sentence,
            "lines": list(self.lines()),
            "best": best.rate if best else None,
            "usable": self.usable,
            "edge": self.edge,
            "unigram": self.unigram,
            "losses": {short(t.rate): None if t.stopped else self.nats(t) for t in self.rates},
            "beside": [one.to_dict() for one in self.beside],
        }

    def page(self, path: str | Path) -> Path:
        """Write the answer as a page, one file that needs no network; return the path."""
        import normlab

        return normlab.write_trial_page(self.to_dict(), Path(path))

    def _repr_html_(self) -> str:
        return "<br>".join(escape(line) for line in self.lines())


def short(value: float) -> str:
    """A rate in two digits, as people type it."""
    return rate(float(f"{value:.2g}"))


def announced(trials: int, steps: int, step_s: float, budget_s: float, planned: int | None) -> str:
    """What a budget holds and what it can tell, for the reader before the trials begin."""
    whole = steps * step_s
    parts = [
        f"{duration(budget_s)} hold {count(trials, 'trial')} of {steps} steps, {duration(whole)} each",
    ]
    if planned:
        parts.append(f"{trials * steps / planned:.2%} of the {planned:,} steps that are planned")
    return "; ".join(parts)
