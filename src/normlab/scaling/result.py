"""What trials at several sizes say about the learning rate: one answer, its reason, and its basis."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

from normlab.scaling.by_size import TrialsBySize
from normlab.scaling.optimum import Losses, means_of
from normlab.scaling.remedy import Remedy, remedy_of
from normlab.scaling.sentences import answer, answer_lines
from normlab.scaling.sweep import Between, Sweep

_AS_THEY_ARE: Final = (
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
    "verdict",
    "sentence",
    "reason",
)
"""What ``Transfer.to_dict`` holds under its own name."""


@dataclass(frozen=True, repr=False)
class Transfer(TrialsBySize):
    """Whether a learning rate carries over the sizes of a model: ``verdict`` is *carries*, *shifts* or
    *cannot say*.
    """

    @property
    def remedy(self) -> Remedy | None:
        """What would tell more, and the seconds that it takes besides those already spent; None if the answer
        is known.
        """
        return remedy_of(self, self.first)

    @property
    def sentence(self) -> str:
        """The answer."""
        return self.sentence_of(self.first)

    def sentence_of(self, sweep: Sweep) -> str:
        """The answer with one weight decay."""
        return answer(self, sweep)

    def lines(self) -> Iterator[str]:
        """The sentence, the reason, what would decide, its limits, and the same for each weight decay."""
        return answer_lines(self)

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
        remedy = self.remedy
        models = [
            {
                "size": size,
                "rate": self.rates[size],
                "step_s": self.step_s[size],
                "parameters": self.parameters[size],
            }
            for size in self.sizes
        ]
        return {
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
            "sizes": list(self.sizes),
            "factor": self.first.factor,
            "lines": list(self.lines()),
            "models": models,
            "cost": {
                "trials": sum(len(trials) for sweep in self.sweeps for trials in sweep.trials.values()),
                "seconds": self.seconds,
                "more": None if remedy is None else remedy._asdict(),
            },
            "coordinates": dict(self.coordinates) or None,
            "decays": [self._of_sweep(sweep) for sweep in self.sweeps],
        }

    def _of_sweep(self, sweep: Sweep) -> dict[str, Any]:
        best = self.best_at(sweep, self.target)
        on_line = list(self.sizes)
        if best is not None and self.target not in self.sizes:
            on_line.append(self.target)
        line = list[dict[str, Any]]()
        if sweep.trend is not None:
            line = [{"size": size, **self._rates(size, Between.of(sweep.trend.at(size)))} for size in on_line]
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
            "line": line,
        }

    def _rates(self, size: int, multiple: Between) -> dict[str, Any]:
        """A rate at a size, with the ends of its interval, and as a multiple. It is None if each size has a
        rate of its own, and this one was not built.
        """
        today = self.rates.get(size, None if self.scales_itself else self.current_rate)
        ends = {name: None if today is None else today * x for name, x in multiple._asdict().items()}
        return {**ends, "multiple": multiple._asdict()}

    def _of_size(self, sweep: Sweep, size: int) -> dict[str, Any]:
        optimum, today = sweep.optimum(size), self.rates[size]
        octaves = {name: getattr(optimum, name) for name in Between._fields}
        multiple = {name: None if octave is None else 2.0**octave for name, octave in octaves.items()}
        rate = {name: None if x is None else today * x for name, x in multiple.items()}
        curve = [{**_rate(today, octave), "loss": loss} for octave, loss in sweep.fit.curves.get(size, ())]
        return {
            "size": size,
            "optimum": {**rate, "why": optimum.why},
            "multiple": multiple,
            "rates": self._tried_at(sweep, size),
            "curve": curve,
            "reference": sweep.scales[size].reference,
        }

    def _tried_at(self, sweep: Sweep, size: int) -> list[dict[str, Any]]:
        """The rates that were tried at a size, from the lowest on."""
        losses, trials = sweep.losses(size), sweep.trials.get(size, {})
        means = means_of(losses)
        rates = list[dict[str, Any]]()
        for octave in sorted({octave for octave, _ in losses}):
            reasons = [trial.stopped for (x, _), trial in trials.items() if x == octave and trial.stopped]
            rates.append(
                {
                    **_rate(self.rates[size], octave),
                    "loss": _finite(means.get(octave)),
                    "losses": _by_seed(losses, octave),
                    "stopped": reasons[0] if reasons else "",
                }
            )
        return rates

    def page(self, path: str | Path) -> Path:
        """Write the answer as a page, one file that needs no network; return the path."""
        from normlab.report.transfer import transfer_page

        return transfer_page(self.to_dict()).write(Path(path))


def _rate(today: float, octave: float) -> dict[str, float]:
    return {"rate": today * 2.0**octave, "multiple": 2.0**octave}


def _by_seed(losses: Losses, octave: float) -> dict[str, float | None]:
    return {str(seed): _finite(losses[x, seed]) for x, seed in sorted(losses) if x == octave}


def _finite(loss: float | None) -> float | None:
    """A loss, or None if it is not finite: JSON has no infinity."""
    return loss if loss is not None and math.isfinite(loss) else None
