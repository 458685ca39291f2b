from dataclasses import replace

from cases import each
from normlab.papers import ARTEFACTS
from normlab.papers.artefact import Reproduction, Superseded
from normlab.papers.claim import Measure, at_least
from normlab.papers.results import ArtefactStatus
from normlab.papers.words import (
    basis,
    command,
    earlier,
    in_short,
    measured,
    missing,
    overall,
    pace,
    standing_in_words,
    undecided,
)
from report.reproductions import ARTEFACT, changed, found


@each(
    ("measure", "words"),
    [
        (Measure(-0.452, -0.468, -0.436), "-0.452 [-0.468, -0.436]"),
        (Measure.exact(3.0), "3"),
        (Measure.exact(float("nan")), "nan"),
        (Measure(1.0, 0.5, float("inf")), "1 [0.5, inf]"),
        (None, ""),
    ],
)
def test_a_measure_in_words(measure, words):
    assert measured(measure) == words


def test_what_disagrees_comes_first():
    short = in_short(ArtefactStatus(ARTEFACT, "disagrees", found()))
    assert short == (
        "the exponent of Pre-LN: 0.52 [0.45, 0.59]; the exponent of Admin: 0.55 [0.48, 0.62]; and 3 more"
    )
    assert in_short(ArtefactStatus(ARTEFACT, "not run")) == ""
    wanting = replace(ARTEFACT, claims=tuple(replace(c, needs="a GPU") for c in ARTEFACT.claims))
    without = replace(found(), measures={})
    assert in_short(ArtefactStatus(wanting, "undecided", without)) == "to decide it: a GPU"
    assert in_short(ArtefactStatus(changed(), "damaged", trouble="why")) == "why"


def test_how_many_hold_or_why_that_cannot_be_said():
    first, *others = ARTEFACT.claims
    some = replace(ARTEFACT, claims=(replace(first, check="by construction"), *others))
    assert standing_in_words(ArtefactStatus(ARTEFACT, "disagrees", found())) == "1 of 5 hold, 2 undecided"
    assert (
        standing_in_words(ArtefactStatus(some, "disagrees", found(some)))
        == "0 of 4 hold, 2 undecided; 1 of 1 check passes"
    )
    assert standing_in_words(ArtefactStatus(ARTEFACT, "not run")) == "not run"
    assert standing_in_words(ArtefactStatus(changed(), "stale", found())) == "stale"
    elsewhere = replace(found(), stand_in="a text")
    assert standing_in_words(ArtefactStatus(ARTEFACT, "undecided", elsewhere)) == "measured on another text"


def test_all_claims_of_several_are_counted_and_only_those_of_today():
    several = [
        ArtefactStatus(ARTEFACT, "disagrees", found()),
        ArtefactStatus(ARTEFACT, "disagrees", found()),
        ArtefactStatus(changed(), "stale", found()),
        ArtefactStatus(ARTEFACT, "not run"),
    ]
    measured_ = ["2 of 10 claims hold", "2 disagree", "4 undecided", "2 not run"]
    assert overall(several) == [*measured_, "1 artefact not run", "1 artefact stale"]
    assert overall([]) == ["none measured yet"]


def test_a_convention_is_named_with_the_bounds_that_would_change_the_verdict():
    claim = at_least("m", 10.0, "c", convention="multiple magnitudes: at least 10 times")
    named, turning = basis(claim, {"m": Measure(3.0, 2.0, 4.0)})
    assert "multiple magnitudes" in named
    assert {"2", "4"} <= set(turning.replace(",", "").split())
    assert basis(at_least("m", 1.0, "c"), {"m": Measure(3.0, 2.0, 4.0)}) == []
    assert len(basis(replace(claim, derived="d"), {})) == 2


def test_an_undecided_claim_says_how_many_runs_would_decide_it():
    claim, found_ = at_least("m", 0.0, "c"), {"m": Measure(0.3, -0.2, 0.8, 5)}
    assert f"about {claim.runs_to_decide(found_)} " in undecided(claim, found_)
    assert "no number of runs" in undecided(claim, {"m": Measure(0.0, -1.0, 1.0, 5)})
    for other in (Measure(0.3, 0.2, 0.8, 5), Measure(0.3, -0.2, 0.8)):
        assert undecided(claim, {"m": other}) == ""


def test_an_earlier_version_says_what_held():
    one = Superseded(1, "2001-01-01", "", "A.", ARTEFACT.claims, found())
    assert earlier(one) == "Version 1, 2001-01-01: 1 of 5 hold, 2 undecided"


def test_the_command_that_measures_an_artefact():
    assert command(ARTEFACT) == "normlab papers reproduce example.change"


def test_an_undecided_claim_says_what_it_needs():
    claim = at_least("m", 1.0, "c", needs="a GPU")
    assert undecided(claim, {"another": Measure.exact(1.0)}) == "to decide it: a GPU"
    assert undecided(claim, {"m": Measure.exact(1.0)}) == ""


def test_what_is_missing_says_how_long_it_takes_at_the_pace_of_kept_results():
    both = [ARTEFACTS[id_] for id_ in ("xiong2020.loss_vs_bleu", "xiong2020.footnote1")]
    measured_, open_ = (ArtefactStatus(artefact, "not run") for artefact in both)
    assert pace([measured_, open_]) is None
    assert "core" not in in_short(open_)
    runs = measured_.artefact.trainings["laptop"]
    table = [{"run": "r", "cell": cell, "seconds": 100.0} for cell in runs.cells] * runs.seeds
    kept = Reproduction(both[0].id, both[0].fingerprint(), {}, {"runs": table}, {}, 1.0)
    found_ = pace([ArtefactStatus(both[0], "agrees", kept), open_])
    assert found_ is not None
    assert in_short(open_, found_) == missing(open_, found_)
    assert "6 runs to train, about 15 minutes of one core" in in_short(open_, found_)
