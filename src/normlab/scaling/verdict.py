"""What trials at several sizes say about the learning rate: one answer, its reason, and its basis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from normlab.base.units import short_rate
from normlab.scaling.optimum import means_of
from normlab.scaling.remedy import Remedy, remedy_of
from normlab.scaling.sweep import CARRIES, LEAST_SIZES, SHIFTS, Between, Sweep
from normlab.scaling.wording import apart, moves
from normlab.trials.verdict import INTERRUPTED


@dataclass(frozen=True, repr=False)
class Transfer:
    """Whether a learning rate carries over the sizes of a model: ``verdict`` is *carries*, *shifts* or
    *cannot say*.

    ``sweeps`` holds the trials by weight decay; the first one gives the answer. Rates are in octaves from the
    setup's own rate at their size: a trial multiplies all rates of its setup.
    """

    title: str
    axis: str
    sizes: tuple[int, ...]
    """The sizes that were asked for."""
    target: int
    steps: int
    seeds: int
    rates: Mapping[int, float]
    """By size, the largest rate that the setup has today."""
    step_s: Mapping[int, float]
    parameters: Mapping[int, int]
    sweeps: tuple[Sweep, ...]
    coordinates: Mapping[str, Any] = field(default_factory=dict)
    """The coordinate check, as plain values."""
    plan: str = ""
    ended_by: str = ""
    """Why the trials ended before all were done; empty if all were."""
    seconds: float = 0.0
    facts: Mapping[str, str] = field(default_factory=dict)

    # --------------------------------------------------------------------------------------------- numbers
    @property
    def first(self) -> Sweep:
        """The sweep with the first weight decay."""
        return self.sweeps[0]

    @property
    def verdict(self) -> str:
        """*carries*, *shifts* or *cannot say*."""
        return self.first.verdict

    @property
    def current_rate(self) -> float:
        """The setup's own rate at its smallest size."""
        return self.rates[self.sizes[0]]

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the trials."""
        return self.ended_by == INTERRUPTED

    @property
    def scales_itself(self) -> bool:
        """Whether the setup gives each size a rate of its own."""
        return len(set(self.rates.values())) > 1

    @property
    def reason(self) -> str:
        """What the coordinate check finds at fault; empty if it finds nothing."""
        return str(self.coordinates.get("sentence", "")) if self.coordinates.get("fault") else ""

    @property
    def explained(self) -> bool:
        """Whether what the coordinate check finds would move the best rate in the direction seen."""
        slope, fault = self.first.slope, self.coordinates.get("fault")
        if self.verdict != SHIFTS or slope is None or not fault:
            return False
        return moves(fault) == (1 if slope.value > 1 else -1)

    @property
    def remedy(self) -> Remedy | None:
        """What would tell more, and the seconds that it takes besides those already spent; None if the answer
        is known.
        """
        return remedy_of(self, self.first)

    def best_at(self, sweep: Sweep, size: int) -> Between | None:
        """The best rate at a size, by the line through the optima, in multiples of the setup's own there.

        None if there is no line, or if an optimum with only one known end cannot lie on it.
        """
        return None if sweep.trend is None or sweep.contradicted else Between.of(sweep.trend.at(size))

    # ------------------------------------------------------------------------------------------- sentences
    @property
    def sentence(self) -> str:
        """The answer."""
        return self.sentence_of(self.first)

    def sentence_of(self, sweep: Sweep) -> str:
        """The answer with one weight decay."""
        shift, slope, known = sweep.shift, sweep.slope, sweep.known
        cannot = "Cannot say whether the rate carries"
        if shift is None or slope is None:
            where = f"only at {self._at(known)}" if known else f"at no {self.axis}"
            return f"{cannot}: {self._best} is known {where}; {self._unknown(sweep, sweep.unknown)}"
        over, within = f"from {self.axis} {known[0]} to {known[-1]}", f"{sweep.factor:g}x"
        changes = f"{over} {self._best} changes by {shift.factor}"
        if sweep.verdict == CARRIES:
            return f"The rate carries: {changes}, within {within}"
        if sweep.verdict == SHIFTS:
            by = f"falls by {slope.inverse.factor}" if slope.value < 1 else f"rises by {slope.factor}"
            some = "" if sweep.spans else f"{over} "
            return (
                f"The rate does not carry: {some}{self._best} {by} with each doubling of the {self.axis}; "
                f"{self._advice(sweep)}"
            )
        if sweep.steady:
            ends = (self.sizes[0], self.sizes[-1], *sweep.contradicted)
            why = self._unknown(sweep, [size for size in sweep.unknown if size in ends])
            return f"{cannot} from {self.axis} {ends[0]} to {ends[1]}: {changes}, within {within}, but {why}"
        if sweep.contradicted:
            return f"{cannot}: {changes}, and {self._unknown(sweep, sweep.contradicted)}, which does not fit"
        return f"{cannot}: {changes}; the interval must lie within {within}"

    @property
    def _best(self) -> str:
        return "the best multiple of your setup's own rate" if self.scales_itself else "the best rate"

    def _at(self, sizes: Sequence[int]) -> str:
        """Sizes with their noun: width 64, or widths 64 and 128."""
        *most, last = map(str, sizes)
        return f"{self.axis}s {', '.join(most)} and {last}" if most else f"{self.axis} {last}"

    def _advice(self, sweep: Sweep) -> str:
        best, own = self.best_at(sweep, self.target), None if self.scales_itself else self.current_rate
        if best is None:
            return ""
        if own is None:
            times = f"{best.value:.2f} times (95%: {best.low:.2f} to {best.high:.2f})"
            return f"at {self.axis} {self.target} take {times} the rate that your setup gives there"
        value, low, high = (short_rate(own * x) for x in best)
        return f"at {self.axis} {self.target} take {value} (95%: {low} to {high})"

    def _unknown(self, sweep: Sweep, sizes: Sequence[int]) -> str:
        """Why the best rates of sizes are not known."""
        why = dict[str, list[int]]()
        for size in sizes:
            why.setdefault(sweep.optimum(size).why, []).append(size)
        return "; ".join(f"at {self._at(own)} {text}" for text, own in why.items())

    def lines(self) -> Iterator[str]:
        """The sentence, the reason, what would decide, its limits, and the same for each weight decay."""
        first = self.first
        yield f"{self.sentence}."
        yield from self._of_the_check()
        if self.remedy is not None:
            yield f"{self.remedy.sentence}."
        if self.verdict != SHIFTS and self.best_at(first, self.target) is not None:
            yield f"By the line through the best rates, {self._advice(first)}."
        if first.verdict in (CARRIES, SHIFTS) and first.unknown:
            yield f"The best rate is not known everywhere: {self._unknown(first, first.unknown)}."
        if first.trend is not None and len(first.known) < LEAST_SIZES:
            yield f"From two {self.axis}s nothing shows how far best rates scatter about a line: try four."
        if self.ended_by:
            yield f"The trials are not complete: {self.ended_by}."
        for sweep in self.sweeps[1:]:
            text, remedy = self.sentence_of(sweep), remedy_of(self, sweep)
            more = f". {remedy.sentence}" if remedy else ""
            yield f"With {sweep.decay.label}: {text[0].lower()}{text[1:]}{self._differs(sweep)}{more}."

    def _of_the_check(self) -> Iterator[str]:
        """What the check finds, and whether that is why the rate does not carry; or why there is no check."""
        if self.reason:
            says, others = "says why" if self.explained else "finds", apart(self.coordinates)
            more = f", and {others} other{'s' * (others > 1)} that this does not explain" if others else ""
            yield f"The coordinate check {says}: {self.reason}{more}."
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
        """The same facts as plain values, with losses in nats per target if targets are known.

        ``multiple`` holds multiples of the setup's own rate at the same size; other rates are those of
        trials, and None at a target whose own rate is not known.
        """
        names = (
            "title",
            "axis",
            "target",
            "steps",
            "seeds",
            "current_rate",
            "plan",
            "ended_by",
            "seconds",
            "facts",
        )
        remedy = self.remedy
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
                "more": None if remedy is None else remedy._asdict(),
            },
            "coordinates": dict(self.coordinates) or None,
            "decays": [self._plain(sweep) for sweep in self.sweeps],
        }

    def _plain(self, sweep: Sweep) -> dict[str, Any]:
        best = self.best_at(sweep, self.target)
        beyond = () if best is None or self.target in self.sizes else (self.target,)
        return {
            **asdict(sweep.decay),
            "label": sweep.decay.label,
            "verdict": sweep.verdict,
            "sentence": self.sentence_of(sweep),
            "slope": sweep.slope and sweep.slope._asdict(),
            "shift": sweep.shift and sweep.shift._asdict(),
            "at_target": best and self._rates(self.target, best),
            "noise": sweep.fit.noise if sweep.trend else None,
            "sizes": [self._of_size(sweep, size) for size in self.sizes],
            "line": [
                {"size": size, **self._rates(size, Between.of(sweep.trend.at(size)))}
                for size in (*self.sizes, *beyond)
                if sweep.trend
            ],
        }

    def _rates(self, size: int, multiple: Between) -> dict[str, Any]:
        """A rate at a size, with the ends of its interval, and as a multiple. It is None if each size has a
        rate of its own, and this one was not built.
        """
        own = self.rates.get(size, None if self.scales_itself else self.current_rate)
        ends = {name: None if own is None else own * x for name, x in multiple._asdict().items()}
        return {**ends, "multiple": multiple._asdict()}

    def _of_size(self, sweep: Sweep, size: int) -> dict[str, Any]:
        own, losses, today = sweep.optimum(size), sweep.losses(size), self.rates[size]
        means, trials = means_of(losses), sweep.trials.get(size, {})
        known = {name: getattr(own, name) for name in Between._fields}
        multiple = {name: None if octave is None else 2.0**octave for name, octave in known.items()}

        def finite(loss: float | None) -> float | None:
            return loss if loss is not None and math.isfinite(loss) else None

        def rate(octave: float) -> dict[str, float]:
            return {"rate": today * 2.0**octave, "multiple": 2.0**octave}

        return {
            "size": size,
            "optimum": {**{name: x and today * x for name, x in multiple.items()}, "why": own.why},
            "multiple": multiple,
            "rates": [
                {
                    **rate(x),
                    "loss": finite(means.get(x)),
                    "losses": {str(seed): finite(losses[x, seed]) for y, seed in sorted(losses) if y == x},
                    "stopped": next((t.stopped for (y, _), t in trials.items() if y == x and t.stopped), ""),
                }
                for x in sorted({x for x, _ in losses})
            ],
            "curve": [{**rate(x), "loss": loss} for x, loss in sweep.fit.curves.get(size, ())],
            "reference": sweep.scales[size].reference,
        }

    def page(self, path: str | Path) -> Path:
        """Write the answer as a page, one file that needs no network; return the path."""
        from normlab.report.transfer import transfer_page

        return transfer_page(self.to_dict()).write(Path(path))
