"""Words for findings, the same in the terminal and on the pages; no torch."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Final, get_args

from normlab.base.units import count
from normlab.papers.artefact import Artefact
from normlab.papers.effects import BLEU, RATIO, SHARE
from normlab.papers.estimate import Estimate
from normlab.papers.finding import ANSWERS, Evidence, Reading, Reviewed
from normlab.papers.regimes import ChosenRate, Regime
from normlab.papers.results import ArtefactStatus
from normlab.papers.trainings import LAPTOP, Scale

SCHEMA_VERSION: Final = 1
"""The version of what ``normlab papers --json`` prints."""
LEGEND: Final = """\
The sentences are condensed, and some joined of two; the paper's place stands behind each.
Measured: an effect with its 95% interval; n is the number of pairs of runs, or of models. The variance of \
a pair of cells is moderated by those of the regime's other pairs, as three seeds alone tell little of it. \
Intervals are not adjusted for the number of effects, and effects that share runs are not independent, \
however many agree. \
"A over B" is A minus B, or A divided by B where a × stands before it; of losses, \
in nats a token or bits a byte, the lower one is better.
Means of BLEU are means of its logit, which has no edges; where seeds lie far apart, arithmetic ones differ. \
A run trains if its loss gets well below that of token frequencies and depends on the source; its BLEU may \
still be near 0.
An effect agrees if its whole interval is as the sentence expects, contradicts if none of it is, and is open \
if some of it is. Fewer than three seeds decide nothing: their effects are open too, \
and so is a comparison of two rates whose loser has the lowest or highest of those that were tried, and a \
contradiction by a test that is known to be too weak, such as one of a claim about depth at four layers, or \
by an interval that contains the published effect; the reason then stands beside it.
A finding is supported if what is decided agrees, contradicted if it contradicts, and partly if there are \
both; open effects are counted beside them, and withhold the answer only where they outnumber decided ones \
that all say the same.
Not tested here: nothing is decided, for want of runs; tested, and open: runs are there, and leave it open. \
Each answer is one for the regimes that are named: a small model cannot refute what is said of a large one.
6+6 are layers of the encoder and of the decoder; ¼ Multi30k is its first quarter; at the start is before \
the first step, in the papers' own models (small, base).""".splitlines()
"""How to read a table of findings: one line each for the sentence, the effect, its mean, its reading, the
answer, the lack of an answer, and the abbreviations of the regimes.
"""
SEEDS: Final = "seeds (in parentheses: did not train)"
"""The title of a column with the score of each seed."""
TESTED_AND_OPEN: Final = "tested, and open"
"""What an answer of *not tested here* is called where runs are there."""


LEAST_SHOWN: Final = {BLEU.label: 0.5 * 10.0**-BLEU.digits}
"""The score that a score of 0 counts as, half a unit of the last digit that its metric shows."""
MOST_DIGITS: Final = 6
"""A number that needs more decimals is written as a power of ten, or with these if it is not small."""
ROUNDING: Final = 1e-9
"""A relative difference up to this is rounding, and counts as none."""
DRAWN: Final = {
    BLEU.label: "differences of BLEU",
    RATIO: "ratios",
    "nats": "differences in nats per token",
    "bits": "differences in bits per byte",
}
"""The units whose effects are drawn, with the title of the axis."""


def number(value: float, digits: int, *, signed: bool = False) -> str:
    """Write a number with so many decimals and a true minus sign; a tiny one as ``5.4e-15``."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    tiny = digits > MOST_DIGITS and round(abs(value), 2) == 0
    decimals = min(digits, MOST_DIGITS)
    size = f"{abs(value):.1e}".replace("e-0", "e-") if tiny else f"{abs(value):.{decimals}f}"
    sign = "−" if value < 0 and float(size) else "+" if signed else ""
    return sign + size


def has_spread(estimate: Estimate) -> bool:
    """Whether the ends of an interval differ by more than rounding."""
    return estimate.high - estimate.low > ROUNDING * abs(estimate.value)


def digits_of(estimate: Estimate, equal: float | None = None) -> int:
    """The decimals that an interval deserves: two digits of its width, and more if an end would else be
    written as the value of no difference, which it is not.
    """
    if not has_spread(estimate) or not math.isfinite(estimate.high - estimate.low):
        size = abs(estimate.value)
        return max(0, 2 - math.floor(math.log10(size))) if 0 < size < math.inf else 0
    digits = max(0, 1 - math.floor(math.log10(estimate.high - estimate.low)))
    ends = [end for end in (estimate.low, estimate.high) if end != equal]
    while equal is not None and any(round(end, digits) == round(equal, digits) for end in ends):
        digits += 1
    return digits


def estimated(estimate: Estimate, *, equal: float | None = None) -> str:
    """Write ``+10.8 BLEU [9.7, 11.9]``, ``×0.58 [0.43, 0.77]`` or ``17 of 18 [0.73, 1.00]``.

    A difference, whose value of no effect is 0, has its sign. What no run says anything about is a dash, a
    value that some runs never reached is written with *at least*, and one of too few runs without interval.
    """
    if math.isnan(estimate.value):
        return "–"
    if estimate.unit == SHARE:
        digits = max(2, digits_of(estimate))
        counted = f"{round(estimate.value * estimate.runs)} of {estimate.runs:,}"
        return f"{counted} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"
    if equal is None and is_least(estimate, estimate.unit):
        return f"at most {LEAST_SHOWN[estimate.unit]:g} {estimate.unit}"
    digits = digits_of(estimate, equal)
    value, low, high = (number(end, digits) for end in (estimate.value, estimate.low, estimate.high))
    if equal == 0:
        value = number(estimate.value, digits, signed=True)
    unit = f" {estimate.unit}" if estimate.unit and not estimate.unit.startswith(RATIO) else ""
    value = f"×{value}" if estimate.unit.startswith(RATIO) else f"{value}{unit}"
    if not estimate.has_ends or not has_spread(estimate):
        return value
    if math.isinf(estimate.high):
        value = f"at least {value}"
    return f"{value} [{low}, {high}]"


def scored(estimate: Estimate, metric: str) -> str:
    """Write a mean score without its metric, which stands above it."""
    return f"at most {LEAST_SHOWN[metric]:g}" if is_least(estimate, metric) else estimated(estimate)


def cells_of(standing: ArtefactStatus) -> Mapping[str, Mapping[str, Any]]:
    """The trained cells of an artefact by name: the metric's mean, its ends, each seed, how many trained."""
    cells = standing.found.tables.get("cells", ()) if standing.found is not None else ()
    return {str(row["cell"]): row for row in cells}


def metric_of(row: Mapping[str, Any]) -> str:
    """The metric of a trained cell, its second column."""
    return list(row)[1]


def score(row: Mapping[str, Any]) -> str:
    """Write the mean score of a trained cell with its interval."""
    metric = metric_of(row)
    return scored(Estimate(float(row[metric]), float(row["low"]), float(row["high"])), metric)


def here(standing: ArtefactStatus, name: str) -> str:
    """Write what was measured for a printed name: trained cells and measures, each with its own name if it
    has another one. Empty if nothing was.
    """
    cells = cells_of(standing)
    parts: list[str] = []
    for ours in standing.artefact.beside.get(name, (name,)):
        title = "" if ours == name else f"{ours.replace('_', ' ')}: "
        if ours in cells:
            metric = f" {metric_of(cells[ours])}" if title else ""
            parts.append(f"{title}{score(cells[ours])}{metric}")
        elif ours in standing.measures:
            parts.append(f"{title}{estimated(standing.measures[ours])}")
    return "; ".join(parts)


def is_least(estimate: Estimate, metric: str) -> bool:
    """Whether a mean score is the least that its metric shows, so that it may be anything below."""
    return estimate.value <= LEAST_SHOWN.get(metric, -math.inf) * (1 + ROUNDING)


def of_evidence(evidence: Evidence) -> str:
    """Write the estimate of a piece, its number of runs, and how many are missing."""
    value = estimated(evidence.estimate, equal=evidence.equal)
    if evidence.missing:
        so_far = f"n {evidence.estimate.runs} so far, " if evidence.estimate.runs else ""
        return f"{value}, {so_far}{count(evidence.missing, 'run')} missing"
    # a share says of how many runs it is
    counts = evidence.estimate.runs and not evidence.estimate.share
    return f"{value}, n {evidence.estimate.runs}" if counts else value


def in_a_line(review: Reviewed) -> str:
    """Write the main estimate of a finding, or what it needs if it names no evidence."""
    main = review.main
    if main is None:
        return f"needs {review.finding.needs}"
    if math.isnan(main.estimate.value):
        return main.unmeasured or "no runs yet"
    return of_evidence(main)


def beside_expected(review: Reviewed) -> str:
    """Write the main estimate of a finding with what was expected of it, for a list of narrow lines; or what
    is missing of it.
    """
    main = review.main
    if main is None:
        return f"needs {review.finding.needs}"
    if main.missing:
        return f"{count(main.missing, 'run')} missing"
    return f"{estimated(main.estimate, equal=main.equal)} ({main.piece.expects.in_symbols()})"


def reading(evidence: Evidence) -> str:
    """What a piece says of the finding, and why it is open if that is not for its interval."""
    piece = evidence.piece
    if evidence.unmeasured:
        return f"{evidence.reading}: {evidence.unmeasured}"
    match evidence.held_open_by:
        case "untuned":
            return f"open: {evidence.untuned} has the {edge(evidence.regime.rates[evidence.untuned])}"
        case "edge":
            return f"open: {piece.edge}"
        case "weak":
            return f"open: {piece.weak}"
        case "claimed" if piece.claimed is not None:
            return f"open: it contains the published {number(piece.claimed, 3)} {evidence.estimate.unit}"
        case _:
            return evidence.reading


def edge(rate: ChosenRate) -> str:
    """Which end of the rates that were tried a chosen one is."""
    return "lowest rate tried" if rate.value == min(rate.tried) else "highest rate tried"


def rates(regime: Regime) -> str:
    """Write the rate that was chosen for each cell, and if it is at an end of those tried; empty without."""
    chosen = regime.rates
    if not chosen:
        return ""
    cells = [
        f"{cell} {rate.value:g}" + (f" ({edge(rate)})" if rate.at_the_edge else "")
        for cell, rate in chosen.items()
    ]
    tried = ", ".join(f"{rate:g}" for rate in next(iter(chosen.values())).tried)
    return f"Rates, chosen among {tried}: {', '.join(cells)}."


def last_fall(regime: Regime) -> str:
    """Write by how much the dev loss still fell at the end, the median of all runs; a dash without curves."""
    if not regime.last_falls:
        return "–"
    steps, falls = zip(*regime.last_falls, strict=True)
    return f"{number(median(falls), 3)} nats in {count(round(median(steps)), 'step')}"


def expected(evidence: Evidence) -> str:
    """Say what the sentence expects of the interval, and where a bound of ours comes from."""
    return f"expected {evidence.piece.expects.in_words()}{origin(evidence, before=' (', after=')')}"


def origin(evidence: Evidence, before: str = "", after: str = "") -> str:
    """Say where a bound of ours comes from; empty for the value of no difference."""
    fixed = ", fixed before the runs" if evidence.piece.fixed else ""
    return f"{before}{evidence.piece.margin}{fixed}{after}" if evidence.piece.margin else ""


def answer(review: Reviewed) -> str:
    """The answer in words: *not tested here* is ``TESTED_AND_OPEN`` where runs are there."""
    return TESTED_AND_OPEN if review.tested_and_open else review.finding.answer


def answer_in_short(review: Reviewed) -> str:
    """The answer in at most a dozen letters, for a list of narrow lines."""
    in_full = answer(review)
    return {"not tested here": "not tested", TESTED_AND_OPEN: "open"}.get(in_full, in_full)


def tally(review: Reviewed) -> str:
    """Write ``2 agree, 1 contradicts, 1 open``, and how many effects wait for their runs."""
    words = {"agrees": "agree", "contradicts": "contradict", "open": "open", "waits": "wait"}
    parts = [
        f"{number} {reading if number == 1 else words[reading]}"
        for reading in get_args(Reading)
        if (number := review.counts[reading])
    ]
    return ", ".join(parts) or "no effect counts"


def counted(findings: Iterable[Reviewed]) -> str:
    """Write ``8 findings: 3 supported; 2 partly; 1 contradicted; 1 tested, and open; 1 not tested here``."""
    reviews = list(findings)
    answers = Counter(answer(review) for review in reviews)
    in_order = (*ANSWERS[:-1], TESTED_AND_OPEN, ANSWERS[-1])
    parts = [f"{answers[answer]} {answer}" for answer in in_order if answers[answer]]
    return f"{count(len(reviews), 'finding')}: {'; '.join(parts)}"


def plain(review: Reviewed) -> dict[str, Any]:
    """Return a finding with all of its evidence as plain data."""
    finding = review.finding
    sentence = ("id", "paper", "short", "says", "where", "published")
    return {
        **{name: getattr(finding, name) for name in sentence},
        "answer": answer(review),
        "because": finding.because,
        "needs": finding.needs,
        "counts": {reading: review.counts[reading] for reading in get_args(Reading)},
        "artefacts": list(finding.artefacts),
        "evidence": [_plain_evidence(piece) for piece in review.evidence],
        "left_out": [{**_plain_evidence(piece), "because": piece.piece.because} for piece in review.left_out],
    }


def _plain_evidence(evidence: Evidence) -> dict[str, Any]:
    piece, estimate = evidence.piece, evidence.estimate
    low, high = piece.expects.bounds
    return {
        "says": piece.says,
        "regime": evidence.regime.name,
        "sources": list(evidence.regime.sources),
        "effect": piece.effect,
        "arguments": dict(piece.arguments),
        "value": _finite(estimate.value),
        "interval": [_finite(estimate.low), _finite(estimate.high)],
        "n": estimate.runs,
        "missing": evidence.missing,
        "unit": estimate.unit,
        "no_difference": evidence.equal,
        "expected": [_finite(low), _finite(high)],
        "margin": piece.margin,
        "fixed_before_the_runs": piece.fixed,
        "reading": evidence.reading,
        "held_open_by": evidence.held_open_by,
        "unmeasured": evidence.unmeasured,
        "untuned": evidence.untuned,
        "too_weak_to_contradict": piece.weak,
        "at_the_edge": piece.edge,
        "published_effect": piece.claimed,
    }


def plain_regime(evidence: Evidence) -> dict[str, Any]:
    """Return what a regime is as plain data."""
    regime = evidence.regime
    return {
        "name": regime.name,
        "short": regime.setting.short,
        "says": f"{regime.setting.says} {regime.says}",
        "rates": rates(regime),
        "last_fall_of_dev_loss": last_fall(regime),
        "scale": regime.setting.scale,
        "sources": list(regime.sources),
        "runs": len(regime.runs),
        "missing": regime.missing({cell for cell, _ in regime.planned}),
    }


def _finite(value: float) -> float | None:
    """A number that JSON can hold; None for a bound or an end that does not exist."""
    return value if math.isfinite(value) else None


def by_regime(pieces: Iterable[Evidence]) -> Mapping[str, list[Evidence]]:
    """Group pieces by the name of their regime, in the order in which they are named."""
    groups: dict[str, list[Evidence]] = {}
    for piece in pieces:
        groups.setdefault(piece.regime.name, []).append(piece)
    return groups


def state(standing: ArtefactStatus) -> str:
    """Say what is known of an artefact: the number of its runs, or why there is no result."""
    if standing.found is None or standing.state in ("another text", "damaged"):
        return standing.state
    runs = {row["run"] for row in standing.found.tables.get("runs", ())}
    if standing.state == "not all runs":
        return f"{count(len(runs), 'run')} so far"
    return count(len(runs), "run") if runs else "measured"


def cautions(standing: ArtefactStatus) -> list[str]:
    """Say why a result says nothing: its file is damaged, or it is of another text."""
    sentences = [standing.trouble] if standing.trouble else []
    if standing.found is not None and standing.found.stand_in:
        sentences.append(
            f"This was measured on the built-in corpus, because {standing.found.stand_in} was not there, and "
            "says nothing about the paper; set NORMLAB_DATA to the folder that has it, and measure it again"
        )
    return sentences


def command(artefact: Artefact, scale: Scale = LAPTOP, options: Sequence[str] = ()) -> str:
    """Return the command that measures the artefact at a scale, with some more options, and with the module
    of its study if that is the user's own.
    """
    words = ["normlab", "papers", "reproduce", artefact.id]
    if scale != LAPTOP:
        words += ["--scale", scale]
    module = getattr(artefact.study, "__module__", __name__)
    is_normlab_s = module.partition(".")[0] == __name__.partition(".")[0]
    if not is_normlab_s and module not in options:
        words += ["--import", module]
    return shlex.join([*words, *options])
