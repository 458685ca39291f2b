"""What may be changed about a training that is planned, each change with its forecast over learning rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from normlab.forecast.answer import FAILS, STEPS, TRAINS, Answer, Tried
from normlab.spec.serialise import to_plain
from normlab.spec.units import rate

PLAN: Final = "the plan"
NAMED: Final = 4
"""Changes that the sentence names, at most."""


@dataclass(frozen=True)
class Alternative:
    """The plan, or a change of it."""

    name: str
    """What is changed, in a few words."""
    do: str
    """What to type, or to write in a program, for it; empty for the plan."""
    answer: Answer | None
    """Its forecasts; None where there are none."""
    why: str = ""
    """Why there is no forecast."""

    @property
    def probability(self) -> float | None:
        """That it gets going at the planned learning rate; None where the forecaster abstains."""
        return None if self.answer is None else self.answer.probability

    @property
    def stopped(self) -> str:
        """What stops it whatever the forecast says; empty without such a finding."""
        return self.answer.reason if self.answer is not None and self.answer.stopped else ""

    @property
    def tried(self) -> Sequence[Tried]:
        """Its forecasts, the lowest learning rate first."""
        return [] if self.answer is None else sorted(self.answer.tried, key=lambda t: t.lr)

    def highest(self) -> Tried | None:
        """Return the forecast at the highest learning rate of those that are expected to train."""
        found = [t for t in self.tried if t.probability is not None and t.probability >= TRAINS]
        return found[-1] if found and not self.stopped else None


@dataclass(frozen=True)
class Advice:
    """Forecasts for the plan and for changes of it, at several learning rates each."""

    title: str
    """The model, in words."""
    lr: float
    """The planned learning rate."""
    alternatives: tuple[Alternative, ...]
    """The plan first."""

    @property
    def plan(self) -> Alternative:
        """The plan, without a change."""
        return self.alternatives[0]

    @property
    def best(self) -> list[Alternative]:
        """The changes that are expected to train at the planned rate, the most probable first."""
        return self._above(TRAINS)

    def _above(self, least: float) -> list[Alternative]:
        found = [a for a in self.alternatives[1:] if (a.probability or 0.0) >= least and not a.stopped]
        return sorted(found, key=lambda a: -(a.probability or 0.0))

    @property
    def sentence(self) -> str:
        """The advice in a line."""
        return f"{self.verdict}; {self.changes}"

    @property
    def verdict(self) -> str:
        """What is said of the plan."""
        p, at = self.plan.probability, f"at a learning rate of {rate(self.lr)}"
        if self.plan.answer is None:
            return f"there is no forecast for the plan {at}: {self.plan.why}"
        if self.plan.stopped:
            return f"do not train as planned: {self.plan.stopped}"
        if p is None:
            return f"cannot say whether the plan trains {at}"
        return (
            f"{'train as planned' if p >= TRAINS else 'change the plan'}: {at} its first {STEPS} steps "
            f"succeed with a probability of {p:.2f}"
        )

    @property
    def changes(self) -> str:
        """What is said of the changes."""
        likelier = [a for a in self._above(FAILS) if (a.probability or 0.0) > (self.plan.probability or 0.0)]
        for said, found in (("expected to train", self.best), ("likelier, but not sure", likelier)):
            if found:
                return f"{said}: {', '.join(f'{a.name} ({a.probability:.2f})' for a in found[:NAMED])}"
        lower = [(a, t) for a in self.alternatives if (t := a.highest()) is not None and t.lr < self.lr]
        if not lower:
            return "no change that was tried is expected to train"
        one, tried = max(lower, key=lambda pair: (pair[1].lr, pair[1].probability or 0.0))
        return (
            f"no change is expected to train at this rate, but at {rate(tried.lr)} {one.name} is "
            f"({tried.probability:.2f})"
        )

    def to_plain(self) -> dict[str, Any]:
        """Return all of it as dicts, lists and numbers, for JSON."""
        alternatives = [
            {
                "name": a.name,
                "do": a.do,
                "why": a.why,
                "probability": a.probability,
                "answer": None if a.answer is None else a.answer.to_plain(),
            }
            for a in self.alternatives
        ]
        said = {"verdict": self.verdict, "changes": self.changes}
        return {"title": self.title, **said, "lr": self.lr, "alternatives": alternatives}

    def page(self, path: str | Path) -> Path:
        """Draw the advice as a page at this path, with its numbers as JSON beside it; return the path."""
        import normlab

        where = Path(path)
        return normlab.write_advice(to_plain(self.to_plain()), where.parent, where.name.removesuffix(".html"))

    def __str__(self) -> str:
        return "\n".join([self.sentence, *(f"  {a.name}: {told(a)}" for a in self.alternatives)])


def told(alternative: Alternative) -> str:
    """Say the forecasts of an alternative in a line."""
    if alternative.answer is None:
        return f"no forecast: {alternative.why}"
    if alternative.stopped:
        return f"does not train: {alternative.stopped}"
    return ", ".join(f"{probability(t.probability)} at {rate(t.lr)}" for t in alternative.tried)


def probability(p: float | None) -> str:
    """Write a probability; without one the forecaster abstains."""
    return "cannot say" if p is None else f"{p:.2f}"
