"""Trials of a training step at several learning rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from normlab.report.results.plain import fields_of


@dataclass(frozen=True)
class TrialResult:
    """A trial at one learning rate."""

    rate: float
    steps: int
    losses: Sequence[float]
    """The loss of each step."""
    loss: float | None
    """The loss at the end; None if the trial ended early."""
    stopped: str
    """Why it ended early; empty if it did not."""
    usable: bool
    """Whether its loss is, but for noise, at most 5% of what the best trial learnt behind the best."""

    @classmethod
    def of(cls, trial: Mapping[str, Any]) -> Self:
        values = fields_of(cls, trial)
        return cls(**values | {"losses": [float(loss) for loss in trial["losses"]]})  # some may be "nan"


@dataclass(frozen=True)
class TrialsResult:
    """``Trials.to_dict()``, with what a command adds: title and command."""

    model: str
    steps: int
    """The length of the trials that the answer is about."""
    current_rate: float
    plan: str
    change: str
    """What sets a variant apart; empty for the setup as it is."""
    seconds: float
    facts: Mapping[str, str]
    sentence: str
    lines: Sequence[str]
    usable: tuple[float, float] | None
    """The lowest rate tried, and the highest that is usable, as are all between it and the best."""
    reference: float
    """The loss of a model that has learnt nothing."""
    unigram: float | None
    """The entropy of the targets, if they are known."""
    best: float | None
    trials: Sequence[TrialResult]
    variants: Sequence[TrialsResult]
    title: str = ""
    command: str = ""

    @classmethod
    def of(cls, trials: Mapping[str, Any]) -> Self:
        """Read plain values."""
        values = fields_of(cls, trials)
        values["reference"] = float(trials["reference"])  # it may be "nan"
        values["trials"] = [TrialResult.of(trial) for trial in trials["trials"]]
        values["variants"] = [cls.of(variant) for variant in trials["variants"]]
        return cls(**values)

    @property
    def setups(self) -> tuple[TrialsResult, ...]:
        """The trials of the setup as it is, and with each change."""
        return (self, *self.variants)

    @property
    def counted(self) -> list[TrialResult]:
        """The trials that the answer is about, by rate: not shorter ones, from which it was planned."""
        return [trial for trial in self.trials if trial.steps == self.steps]

    @property
    def rates(self) -> list[float]:
        """The rates of the trials that the answers are about, over all setups."""
        return sorted({trial.rate for setup in self.setups for trial in setup.counted})

    @property
    def number(self) -> int:
        """The number of all trials, over all setups."""
        return sum(len(setup.trials) for setup in self.setups)

    def at(self, rate: float) -> TrialResult | None:
        """The trial at a rate; None if the rate was not tried."""
        return next((trial for trial in self.counted if trial.rate == rate), None)
