"""What short trainings say about learning rates: one sentence, and the trials behind it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

from normlab.base.units import short_rate
from normlab.trials.scale import LEARNT_NATS, Scale
from normlab.trials.search import LAST, highest_usable, is_usable

MODELS, USABLE_ENDS, NEAR_ENDS = 9, 7, 4
"""The number of models, for how many of them the upper end that trials named was usable in a long training,
and for how many it was within 2x of the true one. A test compares these with docs/learning-rate.md.
"""
SAME: Final = 1e-6
"""The relative difference that rounding makes between losses on the same batch."""
EQUAL: Final = 1e-2
"""A mean of losses within this relative distance of ln V counts as equal to it."""
INTERRUPTED: Final = "it was interrupted"


@dataclass(frozen=True)
class Trial:
    """A short training at one rate: the loss before each step, and why it ended early, if it did."""

    rate: float
    steps: int
    losses: tuple[float, ...] = field(repr=False)
    stopped: str = ""
    seconds: float = field(repr=False, default=0.0)

    @property
    def last(self) -> tuple[float, ...]:
        """The losses that count: the last tenth, but at least eight."""
        return self.losses[-max(LAST, self.steps // 10) :]

    @property
    def loss(self) -> float:
        """The mean of the last losses; infinite if it ended early."""
        return math.inf if self.stopped else fmean(self.last)

    def error(self, other: Trial | None = None) -> float:
        """The standard error of the loss, or of its difference from another's on the same batches."""
        gaps = list(self.last)
        if other is not None:
            gaps = [mine - theirs for mine, theirs in zip(self.last, other.last, strict=True)]
        return stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0

    @property
    def falls(self) -> bool:
        """Whether the loss still falls: the last quarter is below the third by two standard errors."""
        quarter = len(self.losses) // 4
        if self.stopped or quarter < 2:
            return False
        third, last = self.losses[-2 * quarter : -quarter], self.losses[-quarter:]
        error = math.hypot(stdev(third), stdev(last)) / quarter**0.5
        return fmean(third) - fmean(last) > 2 * error


@dataclass(frozen=True, repr=False)
class Trials:
    """Trials of one setup: which rates train, and how far up; nothing is claimed about the lower end.

    ``tried`` holds all trials, ``rates`` those with the number of steps that the answer is about, by rate.
    ``usable`` is the lowest rate tried and the highest that is within 5% of the best; ``edge`` says where the
    next rate is worse, or that none was. ``variants`` holds the same with one change.
    """

    model: str
    steps: int
    current_rate: float
    scale: Scale
    tried: tuple[Trial, ...]
    warmup: float = 0.0
    plan: str = ""
    ended_by: str = ""
    """Why the scan ended before it was done; empty if it was done."""
    change: str = ""
    variants: tuple[Trials, ...] = ()
    seconds: float = 0.0
    facts: Mapping[str, str] = field(default_factory=dict)

    # --------------------------------------------------------------------------------------------- numbers
    @property
    def rates(self) -> tuple[Trial, ...]:
        """The trials of ``steps`` steps, by rate."""
        return tuple(sorted((t for t in self.tried if t.steps == self.steps), key=lambda t: t.rate))

    @property
    def whole(self) -> list[Trial]:
        """Those that did not end early."""
        return [t for t in self.rates if not t.stopped]

    @property
    def best(self) -> Trial | None:
        """The trial with the lowest loss; None if all ended early."""
        return min(self.whole, key=lambda t: t.loss, default=None)

    @property
    def losses(self) -> dict[float, float]:
        """By rate, in nats per target if targets are known; infinite if a trial ended early."""
        return {t.rate: self.scale.nats(t.loss) for t in self.rates}

    @property
    def errors(self) -> dict[float, float]:
        """By rate, the standard errors of the losses' differences from the best."""
        return {t.rate: t.error(self.best) / self.scale.weight for t in self.whole}

    @property
    def unigram(self) -> float | None:
        """The entropy of the targets' frequencies in nats, None if no targets are known."""
        return self.scale.unigram

    @property
    def learns(self) -> bool:
        """Whether the best trial shows that something was learnt."""
        best = self.best
        if best is None:
            return False
        return self.scale.learns(self.losses[best.rate], best.error() / self.scale.weight)

    @property
    def usable(self) -> tuple[float, float] | None:
        """The lowest rate tried, and the highest that, like all between, trains within 5% of the best."""
        if not self.learns:
            return None
        return self.rates[0].rate, highest_usable(self.losses, self.scale.reference, self.errors)

    @property
    def above(self) -> float | None:
        """The first rate above the usable ones; None if none was tried."""
        top = self.usable[1] if self.usable else math.inf
        return next((t.rate for t in self.rates if t.rate > top), None)

    @property
    def edge(self) -> str:
        """Where the usable rates end: "seen at" the first that is worse, or "not reached by" the last."""
        if self.usable is None:
            return ""
        if self.above:
            return f"seen at {short_rate(self.above)}"
        return f"not reached by {short_rate(self.usable[1])}"

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the trials."""
        return any(trials.ended_by == INTERRUPTED for trials in (self, *self.variants))

    def is_usable(self, trial: Trial) -> bool:
        """Whether a trial is within 5% of what the best has learnt, as far as its batches can tell."""
        return is_usable(self.losses, trial.rate, self.scale.reference, self.errors)

    # ------------------------------------------------------------------------------------------- sentences
    @property
    def sentence(self) -> str:
        """The answer."""
        if not self.tried:
            return f"{self.ended_by[:1].upper()}{self.ended_by[1:]}" or "Nothing was tried"
        if self.best is None:
            return f"No rate trains for {self.steps} steps: {'; '.join(_fate(t) for t in self.rates)}"
        if self.unmoved:
            return self.unmoved
        return self._range(self.best) if self.learns else self._too_short(self.best)

    def _range(self, best: Trial) -> str:
        low, high = self.usable or (0.0, 0.0)
        above = self._trial_at(self.above)
        end = _fate(above) if above else "no rate that is worse was reached"
        if above is not None and above.rate == self.current_rate:
            end = f"your {end}"
        else:
            end += f"; your {short_rate(self.current_rate)} {self._place(high, best)}"
        return (
            f"Up to {short_rate(high)} trains within 5% of the best in {self.steps} steps; {end}; "
            f"lowest rate tried: {short_rate(low)}"
        )

    def _trial_at(self, rate: float | None) -> Trial | None:
        return next((trial for trial in self.rates if trial.rate == rate), None)

    def _place(self, high: float, best: Trial) -> str:
        """Where the setup's own rate is, beside the highest usable one."""
        current = self._trial_at(self.current_rate)
        if self.current_rate > high:
            return "is above that and ended early" if current and current.stopped else "is above that"
        if current is None:
            return "was not tried"
        if self.is_usable(current):
            return "is inside"
        return f"is slower here than {short_rate(best.rate)}, which a long training may make up for"

    def _too_short(self, best: Trial) -> str:
        loss, where = self.losses[best.rate], f"{short_rate(best.rate)} in {self.steps} steps"
        if self.unigram is None or self.scale.start < self.unigram - LEARNT_NATS:
            seen = f"the best loss is {loss:.4g} at {where}, from {self.scale.start:.4g} at the start"
        else:
            seen = (
                f"the best loss is {loss:.3f} nats at {where}, not {LEARNT_NATS} below the unigram entropy "
                f"of the targets, {self.unigram:.3f}"
            )
        more = "it no longer falls there: run normlab check, or try more steps"
        if best.falls:
            more = f"it still falls there: try {4 * self.steps} steps"
        return f"Too short, or it does not train: {seen}; {more}"

    @property
    def unmoved(self) -> str:
        """The sentence if no rate changes the loss, or all stay at the loss of equal logits; else empty."""
        whole = self.whole
        if not whole:
            return ""
        span = f"at every rate tried, from {short_rate(whole[0].rate)} to {short_rate(whole[-1].rate)}"
        if self._stays_uniform():
            why = "the outputs say nothing about the targets"
            return f"The loss stays at ln V = {self.scale.uniform:.3f} nats {span}: {why}; run normlab check"
        at_steps = zip(*(t.losses for t in whole), strict=True)
        if len(whole) > 1 and all(max(losses) - min(losses) <= SAME * abs(losses[0]) for losses in at_steps):
            return f"The loss is the same {span}: no step changes what it is computed from; run normlab check"
        return ""

    def _stays_uniform(self) -> bool:
        """Whether every loss is that of equal logits, where the targets' frequencies would tell it apart."""
        uniform, unigram = self.scale.uniform, self.unigram
        if uniform is None or unigram is None or unigram >= uniform - LEARNT_NATS:
            return False
        return all(abs(self.losses[t.rate] - uniform) <= EQUAL * uniform for t in self.whole)

    def lines(self) -> Iterator[str]:
        """The sentence, its limits, and the same with one change."""
        yield self.sentence + "."
        if self.usable:
            yield (
                f"When {MODELS} other models were trained for longer, an upper end like this one was usable "
                f"for {USABLE_ENDS} of them, and within 2x of the true one for {NEAR_ENDS} "
                "(docs/learning-rate.md)."
            )
        if self.ended_by and self.tried:
            yield f"The scan is not complete: {self.ended_by}."
        if self.scale.unknown:
            yield (
                f"The targets are not known, because {self.scale.unknown}: losses are compared with the one "
                "at the start, so the trials may have learnt nothing but averages."
            )
        for variant in self.variants:
            yield f"With {variant.change}: {variant.sentence[0].lower()}{variant.sentence[1:]}."

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return f"Trials({self.model}: {self.sentence})"

    def _repr_html_(self) -> str:
        return "<br>".join(escape(line) for line in self.lines())

    def to_dict(self) -> dict[str, Any]:
        """The same facts as plain values, with losses in nats per target if targets are known."""
        names = (
            "model",
            "steps",
            "current_rate",
            "warmup",
            "plan",
            "ended_by",
            "change",
            "seconds",
            "facts",
            "sentence",
        )
        return {
            **{name: getattr(self, name) for name in (*names, "usable", "edge", "unigram")},
            "lines": list(self.lines()),
            "reference": self.scale.reference,
            "uniform": self.scale.uniform,
            "best": self.best.rate if self.best else None,
            "trials": [self._plain(t) for t in sorted(self.tried, key=lambda t: (t.steps, t.rate))],
            "variants": [variant.to_dict() for variant in self.variants],
        }

    def _plain(self, trial: Trial) -> dict[str, Any]:
        return {
            **asdict(trial),
            "loss": None if trial.stopped else self.scale.nats(trial.loss),
            "usable": self.learns and trial in self.rates and self.is_usable(trial),
            "losses": [self.scale.nats(loss) for loss in trial.losses],
        }

    def page(self, path: str | Path) -> Path:
        """Write the answer as a page, one file that needs no network; return the path."""
        from normlab.report.trial import trial_page

        return trial_page(self.to_dict()).write(Path(path))


def _fate(trial: Trial) -> str:
    """What became of a rate that is not usable: ``1.4e-2 ended early (loss not finite at step 3)``."""
    why = f"ended early ({trial.stopped})" if trial.stopped else "is worse"
    return f"{short_rate(trial.rate)} {why}"
