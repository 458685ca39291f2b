"""Words for the measurements of an artefact, the same in the terminal and on the pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from normlab.papers import STUDIES
from normlab.spec.artefact import Artefact, Reproduction
from normlab.spec.claim import VERDICTS, Claim, Measure
from normlab.store.reproductions import STATES, Standing, State


def number(value: float) -> str:
    """A number with four significant digits."""
    return f"{value:.4g}"


def measured(measure: Measure | None) -> str:
    """``-0.452 [-0.468, -0.436]``; the number alone where it is exact; empty where there is none."""
    if measure is None:
        return ""
    if measure.low < measure.high:
        return f"{number(measure.value)} [{number(measure.low)}, {number(measure.high)}]"
    return number(measure.value)


def in_short(standing: Standing, most: int = 2) -> str:
    """The number of claims that agree, with the measures of those that do not, or else of the first."""
    found, claims = standing.found, standing.artefact.claims
    if standing.trouble or found is None or not claims:
        return standing.trouble
    agreeing = sum(claim.verdict(found.measures) == "agrees" for claim in claims)
    order = sorted(claims, key=lambda claim: VERDICTS.index(claim.verdict(found.measures)))
    shown = [_named(claim, found) for claim in order[:most] if claim.measure in found.measures]
    more = [] if len(claims) <= most else ["..."]
    return f"{agreeing} of {len(claims)}: " + ", ".join([*shown, *more])


def stood_in(found: Reproduction) -> str:
    """The caution that belongs to a result on another text."""
    return (
        f"This was measured on the built-in corpus, because {found.stand_in} was not there, and decides "
        "nothing of what the paper says; set NORMLAB_DATA to the folder that has it, and measure it again"
    )


def counts(states: Iterable[State]) -> dict[str, int]:
    """The number of artefacts in each state that occurs."""
    counted = Counter(states)
    return {state: counted[state] for state in STATES if counted[state]}


def command(artefact: Artefact) -> str:
    """The command that measures the artefact, with the module of its study where that is the user's own."""
    module = getattr(STUDIES.get(artefact.study), "__module__", __name__)
    own = module.partition(".")[0] != __name__.partition(".")[0]
    return f"normlab reproduce {artefact.id}" + (f" --import {module}" if own else "")


def _named(claim: Claim, found: Reproduction) -> str:
    return f"{claim.measure.replace('_', ' ')} {measured(found.measures[claim.measure])}"
