"""Reproductions as files: written whole, read back, refused where they are damaged or of another claim."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from normlab.papers import ARTEFACTS
from normlab.papers import results as reproductions
from normlab.papers.artefact import Artefact, Reproduction
from normlab.papers.claim import Measure
from normlab.papers.results import (
    KEPT,
    SUPERSEDED,
    ArtefactStatus,
    disagreements,
    folders,
    read_reproduction,
    standing,
    superseded,
    write_reproduction,
    write_superseded,
)
from report.reproductions import ARTEFACT, changed, found


def test_what_is_written_is_read(tmp_path):
    infinite = Measure(math.inf, -math.inf, math.inf)
    rows = [{"name": "a", "n": 1, "x": 0.5, "none": None, "yes": True}, {"name": "b", "x": -math.inf}]
    one = Reproduction("p.a", "f", {"m": infinite}, {"t": rows}, {"text": "multi30k"}, 1.5)
    path = write_reproduction(one, tmp_path / "new" / "papers")
    again = read_reproduction(path)
    assert path.name == "p.a.json"
    assert dict(again.measures) == {"m": infinite}
    assert [dict(row) for row in again.tables["t"]] == rows
    assert (again.id, again.fingerprint, dict(again.facts), again.seconds) == (
        "p.a",
        "f",
        {"text": "multi30k"},
        1.5,
    )
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda text: text[:-40], "is not JSON"),
        (lambda text: "{}", "lacks id"),
        (lambda text: text.replace('"seconds"', '"hours"'), "unknown key 'hours'"),
        (lambda text: text.replace('"seconds": 83.0', '"seconds": "long"'), "seconds must be a number"),
        (
            lambda text: text.replace("example.change", "example.other"),
            "holds the reproduction of example.other",
        ),
    ],
)
def test_a_damaged_or_foreign_file_is_refused(damage, sentence, tmp_path):
    path = write_reproduction(found(), tmp_path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(ValueError, match="normlab papers reproduce example") as refused:
        read_reproduction(path)
    assert sentence in str(refused.value)
    seen = standing(ARTEFACT, [tmp_path])
    assert (seen.state, seen.found, seen.path) == ("damaged", None, path)
    assert seen.trouble == str(refused.value)


def test_the_state_is_the_verdict_or_why_there_is_none(tmp_path):
    runs, kept = tmp_path / "runs", tmp_path / "kept"
    where = [runs, kept]
    assert standing(Artefact("p.a", "P", "s.", {}, "a."), where).state == "no study yet"
    assert standing(ARTEFACT, where).state == "not run"
    write_reproduction(found(), kept)
    assert standing(ARTEFACT, where).state == "disagrees"
    assert standing(ARTEFACT, where).fresh
    assert standing(changed(), where).state == "stale"
    assert not standing(changed(), where).fresh


def test_a_fresh_result_counts_before_a_stale_and_a_stale_before_a_damaged_one(tmp_path):
    runs, kept = tmp_path / "runs", tmp_path / "kept"
    write_reproduction(found(changed()), runs)
    write_reproduction(found(), kept)
    assert standing(ARTEFACT, [runs, kept]).path.parent == kept
    assert standing(changed(), [runs, kept]).path.parent == runs
    assert standing(changed(), [kept, runs]).path.parent == runs
    (kept / "example.change.json").write_text(json.dumps({"id": 1}))
    assert standing(ARTEFACT, [kept, runs]).state == "stale"


def test_runs_come_before_kept_results(tmp_path):
    assert folders(tmp_path) == (tmp_path / "papers", KEPT)
    assert {path.stem for path in KEPT.glob("*.json")} <= {a.id for a in ARTEFACTS.values() if a.study}
    changed = {a.id for a in ARTEFACTS.values() if a.version > 1}
    assert {path.name.rsplit(".", 2)[0] for path in (KEPT / SUPERSEDED).glob("*.json")} == changed


def test_a_result_on_another_text_is_undecided_and_not_fresh(tmp_path):
    write_reproduction(dataclasses.replace(found(), stand_in="iwslt14.de-en"), tmp_path)
    stood = standing(ARTEFACT, [tmp_path])
    assert stood.state == "undecided"
    assert not stood.fresh
    assert stood.found is not None
    assert stood.found.stand_in == "iwslt14.de-en"


def test_an_artefact_whose_claims_are_checks_is_checked_where_they_pass(tmp_path):
    checks = tuple(dataclasses.replace(c, check="by construction") for c in ARTEFACT.claims[:1])
    one = dataclasses.replace(ARTEFACT, claims=checks)
    write_reproduction(found(one), tmp_path)
    assert standing(one, [tmp_path]).state == "checked"
    failing = dataclasses.replace(one, claims=(dataclasses.replace(checks[0], at_least=2.0, at_most=3.0),))
    write_reproduction(found(failing), tmp_path)
    assert standing(failing, [tmp_path]).state == "disagrees"


def test_earlier_versions_are_kept_and_come_with_the_state(tmp_path, monkeypatch):
    monkeypatch.setattr(reproductions, "KEPT", tmp_path)
    assert standing(ARTEFACT, [tmp_path]).before == ()
    dated = dataclasses.replace(ARTEFACT, date="2001-01-01")
    path = write_superseded(dated, found())
    assert path == tmp_path / SUPERSEDED / f"{ARTEFACT.id}.{ARTEFACT.fingerprint()}.json"
    second = dataclasses.replace(changed(), version=2, date="2002-02-02", reason="why")
    write_superseded(second, found(second))
    one, two = standing(second, [tmp_path]).before
    assert (one.version, one.date, one.asserts, one.reason) == (1, "2001-01-01", ARTEFACT.asserts, "")
    assert tuple(one.claims) == ARTEFACT.claims
    assert one.found.verdict(one.claims) == "disagrees"
    assert (two.version, two.reason) == (2, "why")
    path.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        superseded(ARTEFACT.id)


def test_results_that_disagree_about_a_run_are_named_once_for_each_pair(tmp_path):
    def holding(id_: str, *rows: dict[str, object], fresh: bool = True) -> ArtefactStatus:
        artefact = dataclasses.replace(ARTEFACT, id=id_)
        made = dataclasses.replace(found(artefact), tables={"runs": rows})
        one = made if fresh else dataclasses.replace(made, fingerprint="another")
        return standing(artefact, [write_reproduction(one, tmp_path / id_).parent])

    def row(run: str, bleu: float, **others: object) -> dict[str, object]:
        return {"cell": "a", "seed": 1, "run": run, "bleu": bleu, **others}

    first = holding("p.a", row("r1", 1.0, seconds=3.0), row("r2", 2.0))
    same = holding("p.b", {**row("r1", 1.0, seconds=9.0), "cell": "another name"})
    stale = holding("p.d", row("r1", 7.0), fresh=False)
    assert not list(disagreements([first, same, stale]))
    other = holding("p.c", row("r1", 1.5, seconds=4.0), row("r2", 2.5))
    (sentence,) = disagreements([first, same, other])
    assert sentence.startswith("p.a and p.c disagree about run r1, bleu: 1 and 1.5.")


def test_kept_results_agree_about_every_run():
    kept = [standing(artefact, [KEPT]) for artefact in ARTEFACTS.values()]
    shared = [row["run"] for s in kept if s.found for row in s.found.tables.get("runs", ())]
    assert len(shared) > len(set(shared)), "some runs are shared"
    assert not list(disagreements(kept))
