"""Words for findings, the same in the terminal and on the pages; no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final, get_args

from normlab.base.units import count
from normlab.papers.artefact import Artefact
from normlab.papers.effects import BLEU, RATIO, SHARE
from normlab.papers.estimate import Estimate
from normlab.papers.finding import ANSWERS, Evidence, Reading, Reviewed
from normlab.papers.results import ArtefactStatus
from normlab.papers.trainings import LAPTOP, Scale

SCHEMA_VERSION: Final = 1
"""Of what ``normlab papers --json`` prints."""
LEGEND: Final = """\
Measured: an effect with its 95% interval; n is the number of pairs of runs, or of models. Intervals are not \
adjusted for the number of effects.
An effect agrees if its whole interval is as the sentence expects, contradicts if none of it is, and is open \
if some of it is. Fewer than three seeds decide nothing: their effects are open too.
A finding is supported if what is decided agrees, contradicted if it contradicts, and partly if there are \
both; open effects are counted beside them, and withhold the answer only where they outnumber decided ones \
that all say the same.
Not tested here: nothing is decided, for want of runs; tested, and open: runs are there, and leave it open. \
6+6 are layers of the encoder and of the decoder; ¼ Multi30k is its first quarter; at the start is before \
the first step, in the papers' own models (small, base).""".splitlines()
"""How to read a table of findings: one line each for the effect, its reading, the answer and the regime."""
SEEDS: Final = "seeds (in parentheses: did not train)"
"""The title of a column with the score of each seed."""
TESTED_AND_OPEN: Final = "tested, and open"
"""What an answer of *not tested here* is called where runs are there."""


LEAST_SHOWN: Final = {BLEU.label: 0.5 * 10.0**-BLEU.digits}
"""The score that a score of 0 counts as, half a unit of the last digit that its metric shows."""
MOST_DIGITS: Final = 6
"""A number that needs more decimals is written as a power of ten."""
ROUNDING: Final = 1e-9
"""A relative difference that is none."""
DRAWN: Final = {
    BLEU.label: "differences of BLEU",
    RATIO: "ratios",
    "nats": "differences in nats per token",
    "bits": "differences in bits per byte",
}
"""The units whose effects are drawn, with the title of the axis."""


def number(value: float, digits: int, *, signed: bool = False) -> str:
    """Write a number with so many decimals and a true minus sign; a tiny one as ``5.4e-15``."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "−∞"
    tiny = digits > MOST_DIGITS
    size = f"{abs(value):.1e}".replace("e-0", "e-") if tiny else f"{abs(value):.{digits}f}"
    sign = "−" if value < 0 and float(size) else "+" if signed else ""
    return sign + size


def has_spread(found: Estimate) -> bool:
    """Whether the ends of an interval differ by more than rounding."""
    return found.high - found.low > ROUNDING * abs(found.value)


def digits_of(found: Estimate, equal: float | None = None) -> int:
    """The decimals that an interval deserves: two digits of its width, and more if an end would else be
    written as the value of no difference, which it is not.
    """
    if not has_spread(found) or not math.isfinite(found.high - found.low):
        size = abs(found.value)
        return max(0, 2 - math.floor(math.log10(size))) if size else 0
    digits = max(0, 1 - math.floor(math.log10(found.high - found.low)))
    ends = [end for end in (found.low, found.high) if end != equal]
    while equal is not None and any(round(end, digits) == round(equal, digits) for end in ends):
        digits += 1
    return digits


def estimated(found: Estimate, *, equal: float | None = None) -> str:
    """Write ``+10.8 BLEU [9.7, 11.9]``, ``×0.58 [0.43, 0.77]`` or ``17 of 18 [0.73, 1.00]``.

    A difference, whose value of no effect is 0, has its sign. What no run says anything about is a dash, and
    a value that some runs never reached is a least one.
    """
    if math.isnan(found.value):
        return "–"
    if found.unit == SHARE:
        return f"{round(found.value * found.runs)} of {found.runs} [{found.low:.2f}, {found.high:.2f}]"
    if equal is None and is_least(found, found.unit):
        return f"at most {LEAST_SHOWN[found.unit]:g} {found.unit}"
    digits = digits_of(found, equal)
    value, low, high = (number(end, digits) for end in (found.value, found.low, found.high))
    if equal == 0:
        value = number(found.value, digits, signed=True)
    unit = f" {found.unit}" if found.unit and not found.unit.startswith(RATIO) else ""
    value = f"×{value}" if found.unit.startswith(RATIO) else f"{value}{unit}"
    if math.isinf(found.high):
        value = f"at least {value}"
    return f"{value} [{low}, {high}]" if has_spread(found) else value


def scored(found: Estimate, metric: str) -> str:
    """Write a mean score without its metric, which stands above it."""
    return f"at most {LEAST_SHOWN[metric]:g}" if is_least(found, metric) else estimated(found)


def cells_of(one: ArtefactStatus) -> Mapping[str, Mapping[str, Any]]:
    """The trained cells of an artefact by name: the metric's mean, its ends, each seed, how many trained."""
    cells = one.found.tables.get("cells", ()) if one.found is not None else ()
    return {str(row["cell"]): row for row in cells}


def metric_of(row: Mapping[str, Any]) -> str:
    """The metric of a trained cell, its second column."""
    return list(row)[1]


def score(row: Mapping[str, Any]) -> str:
    """Write the mean score of a trained cell with its interval."""
    metric = metric_of(row)
    return scored(Estimate(float(row[metric]), float(row["low"]), float(row["high"])), metric)


def here(one: ArtefactStatus, name: str) -> str:
    """Write what was measured for a printed name: trained cells and measures, each with its own name if it
    has another one. Empty if nothing was.
    """
    cells, parts = cells_of(one), list[str]()
    for own in one.artefact.beside.get(name, (name,)):
        named = "" if own == name else f"{own.replace('_', ' ')}: "
        if own in cells:
            parts.append(f"{named}{score(cells[own])}" + (f" {metric_of(cells[own])}" if named else ""))
        elif own in one.measures:
            parts.append(f"{named}{estimated(one.measures[own])}")
    return "; ".join(parts)


def is_least(found: Estimate, metric: str) -> bool:
    """Whether a mean score is the least that its metric shows, so that it may be anything below."""
    return found.value <= LEAST_SHOWN.get(metric, -math.inf) * (1 + ROUNDING)


def of_evidence(one: Evidence) -> str:
    """Write the estimate of a piece, its number of runs, and how many are missing."""
    value = estimated(one.estimate, equal=one.equal)
    if one.missing:
        there = f"n {one.estimate.runs} so far, " if one.estimate.runs else ""
        return f"{value}, {there}{count(one.missing, 'run')} missing"
    # a share says of how many runs it is
    counts = one.estimate.runs and not one.estimate.share
    return f"{value}, n {one.estimate.runs}" if counts else value


def in_a_line(one: Reviewed) -> str:
    """Write the main estimate of a finding, or what it needs if it names no evidence."""
    main = one.main
    if main is None:
        return f"needs {one.finding.needs}"
    if math.isnan(main.estimate.value):
        return "no runs yet"
    return of_evidence(main)


def beside_expected(one: Reviewed) -> str:
    """Write the main estimate of a finding with what was expected of it, for a list of narrow lines; or what
    is missing of it.
    """
    main = one.main
    if main is None:
        return f"needs {one.finding.needs}"
    if main.missing:
        return f"{count(main.missing, 'run')} missing"
    return f"{estimated(main.estimate, equal=main.equal)} ({main.piece.expects.in_symbols()})"


def expected(one: Evidence) -> str:
    """Say what the sentence expects of the interval, and where a bound of ours comes from."""
    return f"expected {one.piece.expects.in_words()}{origin(one, before=' (', after=')')}"


def origin(one: Evidence, before: str = "", after: str = "") -> str:
    """Say where a bound of ours comes from; empty for the value of no difference."""
    fixed = ", fixed before the runs" if one.piece.fixed else ""
    return f"{before}{one.piece.margin}{fixed}{after}" if one.piece.margin else ""


def answer(one: Reviewed) -> str:
    """The answer in words: what was not answered may have been tested all the same."""
    return TESTED_AND_OPEN if one.tested_and_open else one.finding.answer


def answer_in_short(one: Reviewed) -> str:
    """The answer in at most a dozen letters, for a list of narrow lines."""
    return {"not tested here": "not tested", TESTED_AND_OPEN: "open"}.get(said := answer(one), said)


def tally(one: Reviewed) -> str:
    """Write ``2 agree, 1 contradicts, 1 open``, and how many effects wait for their runs."""
    words = {"agrees": "agree", "contradicts": "contradict", "open": "open", "waits": "wait"}
    parts = [
        f"{number} {reading if number == 1 else words[reading]}"
        for reading in get_args(Reading)
        if (number := one.counts[reading])
    ]
    return ", ".join(parts) or "no effect counts"


def counted(findings: Iterable[Reviewed]) -> str:
    """Write ``32 findings: 16 supported, 6 partly, 5 contradicted, 5 not tested here``."""
    several = list(findings)
    answers = Counter(one.finding.answer for one in several)
    parts = [f"{answers[answer]} {answer}" for answer in ANSWERS if answers[answer]]
    open_ = sum(one.tested_and_open for one in several)
    tested = f" ({open_} {TESTED_AND_OPEN})" if open_ else ""
    return f"{count(len(several), 'finding')}: {', '.join(parts)}{tested}"


def plain(one: Reviewed) -> dict[str, Any]:
    """Return a finding with all of its evidence as plain data."""
    finding = one.finding
    words = ("id", "paper", "short", "says", "where", "published", "answer", "because", "needs")
    return {
        **{name: getattr(finding, name) for name in words},
        "tested_and_open": one.tested_and_open,
        "counts": {reading: one.counts[reading] for reading in get_args(Reading)},
        "artefacts": list(finding.artefacts),
        "evidence": [_plain_evidence(piece) for piece in one.evidence],
        "left_out": [{**_plain_evidence(piece), "because": piece.piece.because} for piece in one.left_out],
    }


def _plain_evidence(one: Evidence) -> dict[str, Any]:
    piece, found = one.piece, one.estimate
    low, high = piece.expects.bounds
    return {
        "says": piece.says,
        "regime": one.regime.name,
        "sources": list(one.regime.sources),
        "effect": piece.effect,
        "arguments": dict(piece.arguments),
        "value": _finite(found.value),
        "interval": [_finite(found.low), _finite(found.high)],
        "n": found.runs,
        "missing": one.missing,
        "unit": found.unit,
        "no_difference": one.equal,
        "expected": [_finite(low), _finite(high)],
        "margin": piece.margin,
        "fixed_before_the_runs": piece.fixed,
        "reading": one.reading,
    }


def plain_regime(one: Evidence) -> dict[str, Any]:
    """Return what a regime is as plain data."""
    regime = one.regime
    return {
        "name": regime.name,
        "short": regime.setting.short,
        "says": f"{regime.setting.says} {regime.says}",
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
    said = [standing.trouble] if standing.trouble else []
    if standing.found is not None and standing.found.stand_in:
        said.append(
            f"This was measured on the built-in corpus, because {standing.found.stand_in} was not there, and "
            "says nothing about the paper; set NORMLAB_DATA to the folder that has it, and measure it again"
        )
    return said


def command(artefact: Artefact, scale: Scale = LAPTOP) -> str:
    """Return the command that measures the artefact at a scale, with the module of its study if that is the
    user's own.
    """
    module = getattr(artefact.study, "__module__", __name__)
    own = module.partition(".")[0] != __name__.partition(".")[0]
    sized = f" --scale {scale}" if scale != LAPTOP else ""
    return f"normlab papers reproduce {artefact.id}{sized}" + (f" --import {module}" if own else "")
