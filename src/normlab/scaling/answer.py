"""What trials at several sizes say of the learning rate: one answer, its reason, and what it rests on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, Final, NamedTuple

from normlab.config.units import duration, short_rate
from normlab.scaling import FACTOR
from normlab.scaling.decay import Decay
from normlab.scaling.optimum import Fit, Losses, Optimum, Trend, best_of, fit, means_of
from normlab.trials.scale import Scale
from normlab.trials.trials import INTERRUPTED, Trial

CARRIES: Final = "carries"
SHIFTS: Final = "shifts"
UNDECIDED: Final = "cannot say"
LEAST_SIZES: Final = 3
"""Sizes at which a best rate is known, of more than two that were asked for, below which nothing is said."""


class Between(NamedTuple):
    """A number with the ends of its interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, octaves: Sequence[float], unit: float = 1.0) -> Between:
        """From octaves, as multiples of a unit."""
        return cls(*(unit * 2.0**x for x in octaves))

    def __str__(self) -> str:
        return f"{self.value:.2f}x ({self.low:.2f} to {self.high:.2f}x)"


@dataclass(frozen=True)
class Sweep:
    """The trials of all sizes with one weight decay."""

    decay: Decay
    trials: Mapping[int, Mapping[tuple[float, int], Trial]]
    """By size, by octave of the rate and seed."""
    scales: Mapping[int, Scale]
    factor: float = FACTOR

    def losses(self, size: int) -> Losses:
        """By octave and seed, in nats a target where targets are known; infinite where a trial diverged."""
        return {key: self.scales[size].nats(t.loss) for key, t in self.trials.get(size, {}).items()}

    def learns(self, size: int) -> bool:
        """Whether the best rate shows that something was learnt."""
        losses, own = self.losses(size), self.trials.get(size, {})
        best, scale = best_of(losses), self.scales[size]
        error = max((t.error() for (x, _), t in own.items() if x == best), default=0.0)
        return best is not None and scale.learns(means_of(losses)[best], error / scale.weight)

    @cached_property
    def fit(self) -> Fit:
        """The optima of the sizes at which something is learnt, and the line through them."""
        tried = [size for size in self.scales if self.trials.get(size)]
        learnt = {size: self.losses(size) for size in tried if self.learns(size)}
        return fit(learnt)

    def optimum(self, size: int) -> Optimum:
        """That of a size, or why there is none."""
        if (known := self.fit.optima.get(size)) is not None:
            return known
        return Optimum(size, why="nothing is learnt yet" if self.trials.get(size) else "it was not tried")

    @property
    def doublings(self) -> float:
        """Of the size, from the smallest to the largest whose optimum is known."""
        known = self.known
        return math.log2(known[-1] / known[0]) if known else 0.0

    @property
    def known(self) -> list[int]:
        """The sizes whose optimum has an interval."""
        return [size for size in self.scales if self.optimum(size).closed]

    @property
    def trend(self) -> Trend | None:
        """The line through the optima; None where too few of those that were asked for are known."""
        return self.fit.trend if len(self.known) >= min(LEAST_SIZES, len(self.scales)) else None

    @property
    def slope(self) -> Between | None:
        """By what factor the best rate moves with each doubling of the size."""
        return Between.of(self.trend.shift()) if self.trend else None

    @property
    def shift(self) -> Between | None:
        """By what factor it moves over all sizes."""
        return Between.of(self.trend.shift(self.doublings)) if self.trend else None

    @property
    def verdict(self) -> str:
        """Whether the shift lies within the factor; if not, whether it is one at all."""
        shift = self.shift
        if shift is None:
            return UNDECIDED
        if 1 / self.factor <= shift.low and shift.high <= self.factor:
            return CARRIES
        return UNDECIDED if shift.low <= 1 <= shift.high else SHIFTS

    @property
    def shortage(self) -> float:
        """How many times narrower the interval of the shift must be to decide; 1 where it is."""
        trend = self.trend
        if trend is None or self.verdict != UNDECIDED:
            return 1.0
        value, low, _ = trend.shift(self.doublings)
        enough = max(math.log2(self.factor) - abs(value), abs(value))
        return (value - low) / enough

    @property
    def scatters(self) -> bool:
        """Whether optima are farther from a line than their errors explain, so that seeds tell little."""
        trend = self.trend
        return trend is not None and trend.factor > trend.fixed_factor


@dataclass(frozen=True, repr=False)
class Transfer:
    """Whether a learning rate carries over the sizes of a model: ``verdict`` is *carries*, *shifts* or
    *cannot say*.

    ``sweeps`` holds the trials by weight decay; the first one gives the answer. Rates are in octaves of
    ``today``, which is the setup's own rate at its smallest size: a trial multiplies all rates of its setup.
    """

    title: str
    axis: str
    sizes: tuple[int, ...]
    """Those that were asked for."""
    target: int
    steps: int
    seeds: int
    rates: Mapping[int, float]
    """By size, the largest rate of the setup as it is today."""
    step_s: Mapping[int, float]
    parameters: Mapping[int, int]
    sweeps: tuple[Sweep, ...]
    coordinates: Mapping[str, Any] = field(default_factory=dict)
    """The coordinate check, as plain values."""
    plan: str = ""
    cut: str = ""
    """Why the trials ended before all were done; empty where they were."""
    seconds: float = 0.0
    facts: Mapping[str, str] = field(default_factory=dict)

    # --------------------------------------------------------------------------------------------- numbers
    @property
    def first(self) -> Sweep:
        """That with the first weight decay."""
        return self.sweeps[0]

    @property
    def verdict(self) -> str:
        """*carries*, *shifts* or *cannot say*."""
        return self.first.verdict

    @property
    def today(self) -> float:
        """The setup's own rate at its smallest size."""
        return self.rates[self.sizes[0]]

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the trials."""
        return self.cut == INTERRUPTED

    @property
    def scales_itself(self) -> bool:
        """Whether the setup gives each size a rate of its own."""
        return len(set(self.rates.values())) > 1

    @property
    def reason(self) -> str:
        """What the coordinate check finds at fault; empty where it finds nothing."""
        return str(self.coordinates.get("sentence", "")) if self.coordinates.get("fault") else ""

    def best_at(self, sweep: Sweep, size: int) -> Between | None:
        """The rate to take at a size, by the line through the optima, in multiples of today's."""
        return Between.of(sweep.trend.at(size)) if sweep.trend else None

    @property
    def more(self) -> tuple[int, float] | None:
        """How many seeds would decide, and the seconds that these take beside those that were spent; None
        where the answer is known or seeds do not tell.
        """
        sweep = self.first
        if sweep.verdict != UNDECIDED or sweep.trend is None:
            return None
        seeds = max(math.ceil(self.seeds * sweep.shortage**2), self.seeds + 1)
        rates = {size: len({x for x, _ in own}) for size, own in sweep.trials.items()}
        one = sum(rates[size] * self.steps * self.step_s[size] for size in rates)
        return seeds, (seeds - self.seeds) * one

    # ------------------------------------------------------------------------------------------- sentences
    @property
    def sentence(self) -> str:
        """The answer."""
        return self.sentence_of(self.first)

    def sentence_of(self, sweep: Sweep) -> str:
        """The answer with one weight decay."""
        shift, slope, factor = sweep.shift, sweep.slope, f"{sweep.factor:g}x"
        if shift is None or slope is None:
            return f"Cannot say whether the rate carries: {self._unknown(sweep)}"
        over = f"from {self.axis} {sweep.known[0]} to {sweep.known[-1]}"
        if sweep.verdict == CARRIES:
            return f"The rate carries: {over} the best one moves by {shift}, within {factor}"
        if sweep.verdict == SHIFTS:
            way = "falls" if slope.value < 1 else "rises"
            by = slope if slope.value > 1 else Between(*(1 / x for x in (slope.value, slope.high, slope.low)))
            return (
                f"The rate does not carry: the best one {way} {by} with each doubling of the {self.axis}; "
                f"{self._advice(sweep)}"
            )
        text = f"{over} the best one moves by {shift}, and {factor} is asked"
        return f"Cannot say whether the rate carries: {text}"

    def _advice(self, sweep: Sweep) -> str:
        best = self.best_at(sweep, self.target)
        if best is None:
            return ""
        if self.scales_itself:
            return f"at {self.axis} {self.target} take {best} the rate that your setup gives there"
        value, low, high = (short_rate(self.today * x) for x in best)
        return f"at {self.axis} {self.target} take {value} ({low} to {high})"

    def _unknown(self, sweep: Sweep) -> str:
        """Why there is no line through the optima."""
        why = dict[str, list[str]]()
        for size in self.sizes:
            if not (own := sweep.optimum(size)).closed:
                why.setdefault(own.why, []).append(str(size))
        reasons = "; ".join(f"at {self.axis} {', '.join(sizes)} {text}" for text, sizes in why.items())
        known = ", ".join(map(str, sweep.known))
        return f"the best rate is known {f'at {self.axis} {known} alone' if known else 'nowhere'}: {reasons}"

    def lines(self) -> Iterator[str]:
        """The sentence, the reason, what would decide, what limits it, and the same by weight decay."""
        yield f"{self.sentence}."
        yield from self._of_the_check()
        if self.more is not None:
            seeds, seconds = self.more
            text = f"About {seeds} seeds in place of {self.seeds} would tell, {duration(seconds)} more"
            if self.first.scatters:
                text += (
                    f"; the best rates scatter about a line by more than their errors, so that more "
                    f"{self.axis}s may tell sooner"
                )
            yield f"{text}."
        if self.verdict != SHIFTS and self.first.trend is not None:
            yield f"By the line through the best rates, {self._advice(self.first)}."
        for size in self.sizes:
            if self.first.trend is not None and not (own := self.first.optimum(size)).closed:
                yield f"At {self.axis} {size} the best rate is not known: {own.why}."
        if self.first.trend is not None and len(self.first.known) < LEAST_SIZES:
            yield f"From two {self.axis}s nothing shows how far best rates scatter about a line: try four."
        if self.cut:
            yield f"The trials are not complete: {self.cut}."
        for sweep in self.sweeps[1:]:
            text = self.sentence_of(sweep)
            yield f"With {sweep.decay.label}: {text[0].lower()}{text[1:]}{self._differs(sweep)}."

    def _of_the_check(self) -> Iterator[str]:
        """Why the rate does not carry, where the check says so, or why there is no check."""
        if self.reason:
            yield f"The coordinate check says why: {self.reason}."
        if left_out := self.coordinates.get("left_out"):
            yield f"The coordinate check was left out: {left_out}."

    def _differs(self, sweep: Sweep) -> str:
        """Whether the optima of a weight decay differ from those of the first by more than their errors."""
        apart = list[str]()
        for size in self.sizes:
            one, other = self.first.optimum(size), sweep.optimum(size)
            ends = (one.value, one.low, one.high, other.value, other.low, other.high)
            a, a_low, a_high, b, b_low, b_high = (math.nan if end is None else end for end in ends)
            gap, error = b - a, math.hypot((a_high - a_low) / 2, (b_high - b_low) / 2)
            if abs(gap) > error:
                apart.append(f"{2**gap:.2g}x at {size}")
        if not apart:
            return ""
        return f"; the best rate differs from that with {self.first.decay.label}: {', '.join(apart)}"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return f"Transfer({self.title}: {self.sentence})"

    def _repr_html_(self) -> str:
        return "<br>".join(escape(line) for line in self.lines())

    # ------------------------------------------------------------------------------------------------ plain
    def to_dict(self) -> dict[str, Any]:
        """The same facts as plain values, with losses in nats a target where targets are known."""
        names = ("title", "axis", "target", "steps", "seeds", "today", "plan", "cut", "seconds", "facts")
        more = self.more
        return {
            **{name: getattr(self, name) for name in (*names, "verdict", "sentence", "reason")},
            "sizes": list(self.sizes),
            "factor": self.first.factor,
            "lines": list(self.lines()),
            "models": [
                {
                    "size": size,
                    "rate": self.rates[size],
                    "step_s": self.step_s[size],
                    "parameters": self.parameters[size],
                }
                for size in self.sizes
            ],
            "cost": {
                "trials": sum(len(own) for sweep in self.sweeps for own in sweep.trials.values()),
                "seconds": self.seconds,
                "more": None if more is None else {"seeds": more[0], "seconds": more[1]},
            },
            "coordinates": dict(self.coordinates) or None,
            "decays": [self._plain(sweep) for sweep in self.sweeps],
        }

    def _plain(self, sweep: Sweep) -> dict[str, Any]:
        best = self.best_at(sweep, self.target)

        def plain(between: Between | None, unit: float = 1.0) -> dict[str, float] | None:
            return None if between is None else {k: unit * v for k, v in between._asdict().items()}

        return {
            **asdict(sweep.decay),
            "label": sweep.decay.label,
            "verdict": sweep.verdict,
            "sentence": self.sentence_of(sweep),
            "slope": plain(sweep.slope),
            "shift": plain(sweep.shift),
            "at_target": plain(best, self.today),
            "noise": sweep.fit.noise if sweep.trend else None,
            "sizes": [self._of_size(sweep, size) for size in self.sizes],
            "line": [
                {"size": size, **(plain(self.best_at(sweep, size), self.today) or {})}
                for size in (*self.sizes, *([] if self.target in self.sizes else [self.target]))
                if best is not None
            ],
        }

    def _of_size(self, sweep: Sweep, size: int) -> dict[str, Any]:
        own, losses = sweep.optimum(size), sweep.losses(size)
        means, trials = means_of(losses), sweep.trials.get(size, {})

        def finite(loss: float | None) -> float | None:
            return loss if loss is not None and math.isfinite(loss) else None

        def rate(octave: float | None) -> float | None:
            return None if octave is None else self.today * 2.0**octave

        return {
            "size": size,
            "optimum": {
                **{name: rate(getattr(own, name)) for name in ("value", "low", "high")},
                "why": own.why,
            },
            "rates": [
                {
                    "rate": rate(x),
                    "loss": finite(means.get(x)),
                    "losses": {str(seed): finite(losses[x, seed]) for y, seed in sorted(losses) if y == x},
                    "stopped": next((t.stopped for (y, _), t in trials.items() if y == x and t.stopped), ""),
                }
                for x in sorted({x for x, _ in losses})
            ],
            "curve": [{"rate": rate(x), "loss": loss} for x, loss in sweep.fit.curves.get(size, ())],
            "reference": sweep.scales[size].reference,
        }

    def page(self, path: str | Path) -> Path:
        """Write the answer as a page, one file that needs no network; return the path."""
        from normlab.report.transfer import write_transfer_page

        return write_transfer_page(self.to_dict(), Path(path))
