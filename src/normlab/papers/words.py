"""Words for the measurements of an artefact, the same in the terminal and on the pages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from normlab.base.units import count
from normlab.papers.artefact import Artefact, Superseded, Tally
from normlab.papers.claim import VERDICTS, Claim, Measure
from normlab.papers.measures import ShareGap, ShareTrained
from normlab.papers.results import STATES, ArtefactStatus
from normlab.papers.studies import TRAININGS
from normlab.papers.trainings import LAPTOP, Scale, Trainings, work


def number(value: float) -> str:
    """Write a number with four significant digits."""
    return f"{value:.4g}"


def measured(measure: Measure | None) -> str:
    """Write ``-0.452 [-0.468, -0.436]``; the number alone if it is exact; empty if there is none."""
    if measure is None:
        return ""
    if measure.low < measure.high:
        return f"{number(measure.value)} [{number(measure.low)}, {number(measure.high)}]"
    return number(measure.value)


def standing_in_words(standing: ArtefactStatus, *, brief: bool = False) -> str:
    """Say how many claims hold, or why that cannot be said; ``brief`` leaves out checks if all pass."""
    found = standing.found
    if found is None or found.stand_in or standing.state == "stale":
        return "measured on another text" if found is not None and found.stand_in else standing.state
    return tallied(found.tally(standing.artefact.claims), brief=brief)


def tallied(tally: Tally, *, brief: bool = False) -> str:
    """Write ``5 of 9 hold, 3 undecided; 2 of 2 checks pass``; ``brief`` as for an artefact."""
    undecided = tally.verdicts.get("undecided", 0)
    parts = _tallied(tally, str(tally.claims), f", {undecided} undecided" if undecided else "")
    return "; ".join(parts[:1] if brief and tally.passed == tally.checks else parts)


def _tallied(tally: Tally, claims: str, undecided: str = "") -> list[str]:
    holding = [f"{tally.verdicts.get('agrees', 0)} of {claims} hold{undecided}"] if tally.claims else []
    passing = f"{tally.passed} of {count(tally.checks, 'check')} pass{'es' * (tally.checks == 1)}"
    return holding + ([passing] if tally.checks else [])


def tally_of(standings: Sequence[ArtefactStatus]) -> tuple[list[ArtefactStatus], Tally]:
    """Return the artefacts that were measured for their claims, and the tally of all of them together."""
    judged = [(s, s.found) for s in standings if s.found is not None and s.fresh]
    return [s for s, _ in judged], sum((found.tally(s.artefact.claims) for s, found in judged), Tally())


def overall(standings: Sequence[ArtefactStatus]) -> list[str]:
    """Say how many claims of several artefacts of one kind hold or do not, how many checks pass, and how many
    artefacts were not measured for their claims.
    """
    judged, total = tally_of(standings)
    holding, *checks = _tallied(total, count(total.claims, "claim")) or ["none measured yet"]
    counted = ((v.removesuffix("s"), total.verdicts.get(v, 0)) for v in VERDICTS if v != "agrees")
    others = [f"{n} {verdict}" for verdict, n in counted if n]
    states = Counter(s.state for s in standings if s not in judged)
    kind = next((s.artefact.kind for s in standings), "artefact")
    rest = [f"{count(states[state], kind)} {state}" for state in STATES if states[state]]
    return [holding, *others, *checks, *rest]


def by_kind(standings: Iterable[ArtefactStatus]) -> dict[str, list[ArtefactStatus]]:
    """Group what is known of papers' artefacts and of public disputes under "59 artefacts" and the like."""
    kinds: dict[str, list[ArtefactStatus]] = {}
    for one in standings:
        kinds.setdefault(one.artefact.kind, []).append(one)
    return {count(len(some), kind): some for kind, some in kinds.items()}


def basis(claim: Claim, measures: Mapping[str, Measure]) -> list[str]:
    """Say where a claim's bounds come from; for a convention also which bounds would change the verdict."""
    names = "derived", "convention", "check"
    parts = [f"{name}: {text}" for name in names if (text := getattr(claim, name))]
    if claim.convention and claim.measure in measures:
        parts.append(claim.turning(measures[claim.measure]))
    return parts


def undecided(claim: Claim, measures: Mapping[str, Measure]) -> str:
    """Say what number of runs, or hardware or data, would decide a claim; empty if it is decided."""
    found = measures.get(claim.measure)
    if found is None and claim.needs:
        return f"to decide it: {claim.needs}"
    if found is None or claim.verdict(measures) != "undecided" or found.runs < 2:
        return ""
    needed = claim.runs_to_decide(measures)
    if needed is None:
        return f"{found.runs} runs; no number of runs would decide it, if the mean stays"
    stays = "the share stays" if found.share else "mean and spread stay"
    return f"{found.runs} runs; about {needed:,} would decide it, if {stays} (power 80%)"


def in_short(standing: ArtefactStatus, pace: float | None = None) -> str:
    """Give the measures of the claims that do not agree, or else of the first; if no claim has any, what the
    first needs, and without a result the trainings that the artefact does, with their time at a ``pace``.
    """
    found, claims, most = standing.found, standing.artefact.claims, 2
    if standing.trouble or found is None or not claims:
        return standing.trouble or missing(standing, pace)
    measures = found.measures
    if not (known := [claim for claim in claims if claim.measure in measures]):
        return undecided(claims[0], measures)
    known.sort(key=lambda claim: (bool(claim.check), VERDICTS.index(claim.verdict(measures))))
    shown = [f"{c.says}: {measured(measures[c.measure])}" for c in known[:most]]
    return "; ".join([*shown, *([f"and {len(claims) - most} more"] if len(claims) > most else [])])


def missing(standing: ArtefactStatus, pace: float | None = None) -> str:
    """Say which trainings an artefact needs at the scale that is asked for, with their time at a ``pace`` in
    seconds per work; empty if it needs none.
    """
    trainings = standing.artefact.trainings.get(standing.scale)
    if trainings is None:
        return ""
    runs = count(len(trainings.cells) * trainings.seeds, "run")
    minutes = max(1, round(pace * _work(trainings) / 60)) if pace else 0
    unit = "core" if standing.scale == LAPTOP else "GPU"
    takes = f", about {count(minutes, 'minute')} of one {unit}" if minutes else ""
    return f"{runs} to train{takes}, or fewer if other artefacts share them"


def pace(standings: Iterable[ArtefactStatus]) -> float | None:
    """Return the seconds per ``trainings.work`` in the results of trainings; None if there is none."""
    seconds = works = 0.0
    for artefact, found in ((s.artefact, s.found) for s in standings if s.whole):
        if found is not None and (trainings := artefact.trainings.get(found.scale)):
            planned = [row["seconds"] for row in found.tables["runs"] if row["cell"] in trainings.cells]
            seconds += sum(planned)
            works += _work(trainings) if planned else 0.0  # a study's own runs do not count
    return seconds / works if works else None


def _work(trainings: Trainings) -> float:
    return sum(work(config) for _, _, config in trainings.configs())


def earlier(one: Superseded) -> str:
    """Write ``Version 1, 2026-11-21: 4 of 6 hold``."""
    dated = f"Version {one.version}" + (f", {one.date}" if one.date else "")
    where = "measured on another text" if one.found.stand_in else tallied(one.found.tally(one.claims))
    return f"{dated}: {where}"


def cautions(standing: ArtefactStatus) -> list[str]:
    """Say why a result decides nothing: it is damaged, of another text, or of another claim."""
    artefact, found = standing.artefact, standing.found
    said = [standing.trouble] if standing.trouble else []
    if found is not None and found.stand_in:
        said.append(
            f"This was measured on the built-in corpus, because {found.stand_in} was not there, and decides "
            "nothing of what the paper says; set NORMLAB_DATA to the folder that has it, and measure it again"
        )
    if found is not None and standing.state == "stale":
        said.append(
            f"This was measured for another claim, {found.fingerprint}; today's is "
            f"{artefact.fingerprint(found.scale)}. Its verdicts are not valid. To measure it again: "
            f"{command(artefact, standing.scale)}"
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


def setting(artefact: Artefact, scale: Scale) -> str:
    """Say how the trainings at that scale differ from the paper's, and what they can tell apart."""
    return " ".join(filter(None, (artefact.trainings[scale].differs, resolution(artefact, scale))))


def resolution(artefact: Artefact, scale: Scale) -> str:
    """Say which differences and shares its trainings at that scale can tell apart, in sentences; empty for an
    artefact with a study other than ``trainings``.
    """
    from normlab.lab.comparison.statistics import detectable, share, share_gap

    if artefact.study != TRAININGS or scale not in artefact.trainings:
        return ""
    measures, seeds, parts = artefact.settings["measures"], artefact.trainings[scale].seeds, list[str]()
    if any(one.within_seeds for one in measures.values()):
        least = detectable(2, seeds)
        parts.append(
            f"With {count(seeds, 'seed')} a cell, a difference of {least:.1f} standard deviations over seeds "
            "is found four times in five."
            if math.isfinite(least)
            else "With one seed a cell, no difference between two cells can be tested."
        )
    shares = [one for one in measures.values() if isinstance(one, ShareTrained)]
    pooled = sorted({seeds * len(one.cells) for one in shares})
    paired = sorted({seeds * len(one.a) for one in measures.values() if isinstance(one, ShareGap)})
    parts += [
        f"If all of {count(runs, 'run')} train, the interval of their share begins at "
        f"{share(runs, runs).low:.2f}."
        for runs in pooled
    ]
    parts += [
        f"If both sides of {count(pairs, 'pair')} train alike, their shares are known to differ by "
        f"{share_gap(0, 0, pairs).high:.2f} at most."
        for pairs in paired
    ]
    return " ".join(parts)
