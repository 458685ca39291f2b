"""The answer of a forecast: what to do about a training, and what that rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from normlab.forecast.forecaster import Features, Forecaster, Outside
from normlab.forecast.table import SurveyedRun
from normlab.spec.units import count

Kind: TypeAlias = Literal["train", "warm up", "lower the rate", "do not train", "cannot say"]
STEPS: Final = 200
"""A forecast is about so many steps: the longest runs that it rests on."""
TRAINS: Final = 2 / 3
FAILS: Final = 1 / 3
"""From this probability on a training is said to succeed, and up to this one to fail."""
NEAREST: Final = 5
MOVES: Final = 0.02
"""A feature moves a forecast if the probability with its median in its place differs by so much."""
WORDS: Final[Mapping[str, str]] = {
    "loss": "the loss at the start over that of guessing",
    "logits": "the deviation of the logits",
    "critical": "the learning rate over the one from which a step raises the loss",
    "sharpness": "the preconditioned sharpness",
    "update": "the median update of a matrix over its weights",
    "largest_update": "the largest update of a matrix over its weights",
    "change": "the share of the output that a step changes",
    "first_change": "the share of the output that the first step of the warm-up changes",
    "amplification": "the amplification of a random change",
    "growth": "the exponent with which the output change grows with depth",
    "similarity": "the similarity of tokens at the end of a stack",
    "stream": "the growth of the residual stream in a stack",
    "first_gradient": "the first sublayer's gradient over the last one's",
    "least_gradient": "the least gradient of a sublayer over the largest",
    "agreement": "how far the gradients of mini-batches agree",
    "dependency": "the dependency on residual branches over that of a Pre-LN",
    "attention_logit": "the largest attention logit",
    "attention_entropy": "the entropy of attention over that of uniform attention",
    "downhill": "the cosine of the step with the negative gradient",
    "rehearsed_loss": "the loss over that of guessing, after the rehearsal",
    "rehearsed_worst": "the largest loss over that of guessing, in the rehearsal",
    "rehearsed_similarity": "the similarity of tokens after the rehearsal",
    "rehearsed_logit": "the largest attention logit after the rehearsal",
    "rehearsed_entropy": "the entropy of attention after the rehearsal over that of uniform attention",
    "rehearsed_gradient": "the growth of the gradient in the rehearsal",
    "moved": "how far the matrices moved in the rehearsal",
    "sublayers": "the number of sublayers",
    "warmup": "the steps of the warm-up plus one",
    "warmup_share": "the share of the warm-up in all steps",
    "steps": "the steps",
    "way": "the median update times the number of steps",
}
"""What a feature is, by its name. The rehearsal is some steps at the full learning rate on copies of the
weights.
"""
LOGARITHMS: Final = (
    "critical",
    "sharpness",
    "update",
    "largest_update",
    "change",
    "first_change",
    "amplification",
    "stream",
    "first_gradient",
    "least_gradient",
    "agreement",
    "attention_logit",
    "rehearsed_loss",
    "rehearsed_worst",
    "rehearsed_logit",
    "rehearsed_gradient",
    "moved",
    "sublayers",
    "warmup",
    "steps",
    "way",
)
"""Features that are decimal logarithms of these."""


@dataclass(frozen=True)
class Trial:
    """A learning rate and a warm-up that a model could be trained with."""

    lr: float
    warmup_steps: int
    features: Features


@dataclass(frozen=True)
class Tried:
    """The forecast for a trial."""

    lr: float
    warmup_steps: int
    probability: float | None
    """None where the forecaster abstains."""


@dataclass(frozen=True)
class Effect:
    """A feature that moves a probability."""

    feature: str
    value: float
    by: float
    """The probability less the one with the median of the feature in its place."""

    @property
    def said(self) -> str:
        """The feature and its value in words."""
        return f"{WORDS.get(self.feature, self.feature)} is {_number(self.feature, self.value)}"

    def __str__(self) -> str:
        return f"{self.said} ({self.by:+.2f})"


@dataclass(frozen=True)
class Near:
    """A run of the table that a probability rests on."""

    model: str
    """Its configuration in words."""
    lr: float
    outcome: str
    nearness: float
    """The share of trees in whose leaves it stands beside the model."""


@dataclass(frozen=True)
class Answer:
    """What to do about a training, and what that rests on."""

    kind: Kind
    probability: float | None
    """That the training gets going as it is planned; None where the forecaster abstains."""
    lr: float
    warmup_steps: int
    """What is recommended: the plan's own rate and warm-up, unless the answer is to change them."""
    reason: str
    """Why the forecaster abstains, or what stops the training; empty otherwise."""
    tried: tuple[Tried, ...]
    """The plan, and what was tried in its place."""
    effects: tuple[Effect, ...]
    """What moves the probability of the plan, the strongest first."""
    nearest: tuple[Near, ...]
    rests_on: str
    """The table, in words."""
    stopped: bool = False
    """Whether the reason is a finding that stops the training whatever the forecast says."""

    @property
    def sentence(self) -> str:
        """The answer in a line."""
        plan = self.tried[0]
        best = next((t.probability for t in self.tried if self._is_recommended(t)), None) or 0.0
        rate = f"at a learning rate of {plan.lr:.3g}"
        planned = "" if self.probability is None else f" with a probability of {self.probability:.2f}"
        more = f"succeed with a probability of {best:.2f}, and{planned} at {plan.lr:.3g}"
        return {
            "train": f"train: {rate} its first {STEPS} steps succeed{planned}",
            "warm up": f"train with a warm-up of about {self.warmup_steps} steps: with it the first {STEPS} "
            f"steps {more} without",
            "lower the rate": f"lower the learning rate to {self.lr:.2g}: there the first {STEPS} steps "
            f"{more}",
            "do not train": f"do not train: {self.reason}"
            + (f"; {rate} its first {STEPS} steps succeed{planned}" if planned and not self.stopped else ""),
            "cannot say": f"cannot say whether it trains {rate}: {self.reason}",
        }[self.kind]

    def _is_recommended(self, tried: Tried) -> bool:
        return (tried.lr, tried.warmup_steps) == (self.lr, self.warmup_steps)

    def to_plain(self) -> dict[str, Any]:
        """Return all of it as dicts, lists and numbers, for JSON."""
        told = [effect.said for effect in self.effects]
        return {"sentence": self.sentence, **asdict(self), "because": told, "steps": STEPS}


def answer(
    forecaster: Forecaster,
    runs: Sequence[SurveyedRun],
    trials: Sequence[Trial],
    *,
    cause: str = "",
) -> Answer:
    """Answer for the first trial, the plan; the others are what may be done in its place.

    ``runs`` are those of the forecaster, with features before the first step. ``cause`` is what a diagnosis
    found that stops the training whatever a forecast says. Of what succeeds with a probability of at least
    ``TRAINS``, a warm-up goes before a lower rate, and a higher rate before a lower one.
    """
    planned = trials[0]
    tried = tuple(Tried(t.lr, t.warmup_steps, _probability(forecaster, t.features)) for t in trials)
    p, outside = tried[0].probability, forecaster.outside(planned.features)
    better = sorted(
        (t for t in tried[1:] if t.probability is not None and t.probability >= TRAINS),
        key=lambda t: (-t.lr, t.warmup_steps),
    )
    effects = _effects(forecaster, planned.features) if p is not None else ()
    kind, chosen, reason = _decided(tried[0], better, effects, outside, cause)
    return Answer(
        kind,
        p,
        chosen.lr,
        chosen.warmup_steps,
        reason,
        tried,
        effects,
        _nearest(forecaster, planned.features, runs),
        f"{count(len(runs), 'run')} of {count(len({run.model for run in runs}), 'model')}",
        bool(cause),
    )


def _decided(
    plan: Tried, better: Sequence[Tried], effects: Sequence[Effect], outside: Sequence[Outside], cause: str
) -> tuple[Kind, Tried, str]:
    """Return the kind of answer, what it recommends and its reason."""
    p = plan.probability
    if cause:
        return "do not train", plan, cause
    if p is None:
        return "cannot say", plan, _outside(outside)
    if p >= TRAINS:
        return "train", plan, ""
    if better:
        return "warm up" if better[0].lr == plan.lr else "lower the rate", better[0], ""
    if p <= FAILS:
        worst = min(effects, key=lambda effect: effect.by, default=None)
        return "do not train", plan, "" if worst is None else str(worst)
    return "cannot say", plan, f"a probability of {p:.2f} is too near to chance"


def _probability(forecaster: Forecaster, features: Features) -> float | None:
    return None if forecaster.abstains(features) else forecaster.probability(features)


def _outside(outside: Sequence[Outside]) -> str:
    first, more = outside[0], len(outside) - 1
    others = (
        f", and {count(more, 'other feature')} {'is' if more == 1 else 'are'} outside too" if more else ""
    )
    value, low, high = (_number(first.name, x) for x in (first.value, first.low, first.high))
    return (
        f"{WORDS.get(first.name, first.name)} is {value}, outside of the {low} to {high} of the runs that "
        f"forecasts rest on{others}"
    )


def _number(feature: str, value: float) -> str:
    return f"{10**value if feature in LOGARITHMS else value:.2g}"


def _effects(forecaster: Forecaster, features: Features) -> tuple[Effect, ...]:
    """What moves the probability, the strongest first."""
    names = [name for name in forecaster.names if name in features]
    without = [{other: value for other, value in features.items() if other != name} for name in names]
    p = forecaster.probabilities([features, *without])
    found = [Effect(name, features[name], float(p[0] - q)) for name, q in zip(names, p[1:], strict=True)]
    return tuple(sorted((e for e in found if abs(e.by) >= MOVES), key=lambda e: -abs(e.by)))


def _nearest(forecaster: Forecaster, features: Features, runs: Sequence[SurveyedRun]) -> tuple[Near, ...]:
    there = [run for run in runs if "0" in run.features]
    if not there:
        return ()
    nearness = forecaster.nearness(features, [run.features["0"] for run in there])
    first = np.argsort(-nearness, kind="stable")[:NEAREST]
    return tuple(Near(_told(there[i]), there[i].lr, there[i].outcome, float(nearness[i])) for i in first)


def _told(run: SurveyedRun) -> str:
    """A run's configuration in words."""
    c = run.choices
    warm = f", warm-up of {c['warmup']:g} steps" if c.get("warmup") else ""
    return (
        f"{c['placement']} with {c['norm']}, {count(int(c['layers']), 'layer')} of width {c['width']:g}, "
        f"{c['optimiser']}{warm}, on {c['text']}"
    )
