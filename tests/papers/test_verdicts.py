"""No verdict rests on a short failure, on pooled rates, on a failed run in a mean, or another precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from cases import each
from normlab.lab.comparison.result import has_trained
from normlab.papers import ARTEFACTS
from normlab.papers.artefact import Artefact, Reproduction
from normlab.papers.bases import LAPTOP as LAPTOP_BASE
from normlab.papers.claim import Claim, Measure, Verdict, fails, trains
from normlab.papers.measures import (
    BestDifference,
    BestScore,
    DevAt,
    Difference,
    DifferenceSize,
    OfRuns,
    Score,
    ScoreRatio,
    ShareBetter,
    ShareGap,
    ShareTrained,
    StepsRatio,
    TrainPerplexityRatio,
)
from normlab.papers.results import KEPT, read_reproduction, result_name
from normlab.papers.trainings import Trainings, changed

LASTS = 1200
"""Steps after which a failure counts as one."""
MEANS = (Score, BestScore, Difference, DifferenceSize, BestDifference, DevAt, ScoreRatio, StepsRatio,
         TrainPerplexityRatio)  # fmt: skip
"""Measures that average scores of runs, whether these trained or not."""


def measures_of(artefact: Artefact) -> dict[str, OfRuns]:
    """The measures of an artefact's runs, by name."""
    groups = (artefact.settings.get(name, {}) for name in ("measures", "gpu", "paper", "training"))
    return dict(chain.from_iterable(group.items() for group in groups))


def counts_failures(measure: OfRuns, claim: Claim, verdict: Verdict) -> bool:
    """Whether a verdict needs runs that fail; a share of at least one half does where it disagrees."""
    if isinstance(measure, ShareTrained):
        return verdict == ("disagrees" if claim.at_least > 0 else "agrees")
    return isinstance(measure, (ShareBetter, ShareGap))


def objections(artefact: Artefact, found: Reproduction, claim: Claim) -> Iterator[str]:
    """What speaks against the verdict on a claim."""
    measure, verdict = measures_of(artefact).get(claim.measure), claim.verdict(found.measures)
    if claim.check or measure is None or verdict not in ("agrees", "disagrees"):
        return
    trainings = artefact.trainings[found.scale]
    paper = artefact.trainings.get("paper", trainings)
    read = [cell for cell in trainings.cells if cell in measure.reads()]
    configs = [changed(trainings.base, trainings.cells[cell]) for cell in read]
    if counts_failures(measure, claim, verdict) and min(c.train.steps for c in configs) < LASTS:
        yield "a short failure"
    if isinstance(measure, (ShareTrained, ShareGap)) and len({c.optim.lr for c in configs}) > 1:
        yield "pooled rates"
    failed = [row for row in found.tables["runs"] if row["cell"] in read and not has_trained(row["outcome"])]
    if isinstance(measure, MEANS) and failed:
        yield "a failed run in a mean"
    asked = {paper.cells[cell].get("train.precision", "") for cell in read}
    if any(asked - {""}) and {c.train.precision for c in configs} != asked:
        yield "another precision than the sentence is about"


def all_objections() -> dict[str, str]:
    """Artefact and measure to what speaks against a kept verdict."""
    kept = (
        (a, KEPT / f"{result_name(a.id, scale)}.json") for a in ARTEFACTS.values() for scale in a.trainings
    )
    results = [(a, read_reproduction(path)) for a, path in kept if path.exists()]
    every = ((a, c, [*objections(a, found, c)]) for a, found in results for c in a.claims)
    return {f"{a.id} {c.measure}": ", ".join(some) for a, c, some in every if some}


def test_no_verdict_is_one_that_a_referee_would_reject():
    assert all_objections() == {}


MEASURE = ShareTrained(("post", "pre"))
CLAIM = fails("share")


def judged(
    claim=CLAIM, measure=MEASURE, *, steps=LASTS, share=(0.0, 0.4), outcome="trained", paper=None, **changes
):
    """What speaks against a verdict on two cells; ``changes`` are the second one's, ``paper`` the paper's."""
    base = replace(LAPTOP_BASE, train=replace(LAPTOP_BASE.train, steps=steps))
    own = Trainings(base, {"post": {"recipe": "post"}, "pre": {"recipe": "pre", **changes}})
    large = replace(own, cells=dict.fromkeys(own.cells, paper or {}))
    artefact = Artefact(
        "p.a", "P", "S.", {}, "A.", settings={"measures": {"share": measure}}, claims=(claim,),
        trainings={"laptop": own, "paper": large},
    )  # fmt: skip
    rows = [{"cell": cell, "outcome": outcome} for cell in own.cells]
    found = Reproduction("p.a", "", {"share": Measure(0.0, *share)}, {"runs": rows}, {}, 1.0)
    return [*objections(artefact, found, claim)]


@each(
    ("given", "expected"),
    [
        ({}, []),
        ({"steps": 1199}, ["a short failure"]),
        ({"steps": 1199, "share": (0.6, 1.0)}, []),
        ({"steps": 1199, "share": (0.4, 0.6)}, []),
        ({"steps": 1199, "claim": trains("share")}, ["a short failure"]),
        ({"steps": 1199, "measure": ShareBetter("bleu", "post", "pre")}, ["a short failure"]),
        ({"optim.lr": 0.5}, ["pooled rates"]),
        ({"outcome": "stuck"}, []),
        ({"outcome": "stuck", "measure": Difference("nll", "post", "pre")}, ["a failed run in a mean"]),
        ({"measure": Difference("nll", "post", "pre")}, []),
        ({"paper": {"train.precision": "fp16"}}, ["another precision than the sentence is about"]),
        ({"claim": replace(CLAIM, check="it cannot fail"), "steps": 1}, []),
    ],
)
def test_the_objections_bite(given, expected):
    assert judged(**given) == expected
