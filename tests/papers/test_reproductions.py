"""Reproductions as files: written whole, read back, refused where they are damaged."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from normlab.lab.config import Config
from normlab.papers import ARTEFACTS
from normlab.papers.artefact import Artefact, Reproduction
from normlab.papers.estimate import Estimate
from normlab.papers.results import (
    KEPT,
    ArtefactStatus,
    disagreements,
    folders,
    read_reproduction,
    standing,
    write_reproduction,
)
from normlab.papers.trainings import Trainings
from report.reproductions import ARTEFACT, found


def test_what_is_written_is_read(tmp_path):
    infinite = Estimate(math.inf, -math.inf, math.inf)
    rows = [{"name": "a", "n": 1, "x": 0.5, "none": None, "yes": True}, {"name": "b", "x": -math.inf}]
    one = Reproduction("p.a", {"m": infinite}, {"t": rows}, {"text": "multi30k"}, 1.5)
    path = write_reproduction(one, tmp_path / "new" / "papers")
    again = read_reproduction(path)
    assert path.name == "p.a.json"
    assert dict(again.measures) == {"m": infinite}
    assert [dict(row) for row in again.tables["t"]] == rows
    assert (again.id, dict(again.facts), again.seconds) == ("p.a", {"text": "multi30k"}, 1.5)
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
    with pytest.raises(ValueError, match="papers reproduce") as refused:
        read_reproduction(path)
    assert sentence in str(refused.value)
    assert str(refused.value).count("delete") <= 1
    seen = standing(ARTEFACT, [tmp_path])
    assert (seen.state, seen.found, seen.path) == ("damaged", None, path)
    assert seen.trouble == str(refused.value)


RUNS = Trainings(Config(), {"post": {"recipe": "post"}, "pre": {"recipe": "pre"}}, 2, "It is small.")


def with_runs(*places):
    """A result with a row for each cell and seed."""
    rows = [{"cell": cell, "seed": seed, "run": f"{cell}{seed}"} for cell, seed in places]
    return dataclasses.replace(found(), tables={"runs": rows})


def test_the_state_says_whether_all_runs_have_a_row(tmp_path):
    trained = dataclasses.replace(ARTEFACT, trainings={"laptop": RUNS})
    assert standing(Artefact("p.a", "P", "s.", {}), [tmp_path]).state == "answered"
    assert standing(ARTEFACT, [tmp_path]).state == "not run"
    write_reproduction(found(), tmp_path)
    assert standing(ARTEFACT, [tmp_path]).whole
    assert standing(trained, [tmp_path]).state == "not all runs"
    write_reproduction(with_runs(("post", 1), ("pre", 1), ("post", 2)), tmp_path)
    assert standing(trained, [tmp_path]).state == "not all runs"
    write_reproduction(with_runs(("post", 1), ("pre", 1), ("post", 2), ("pre", 2)), tmp_path)
    assert standing(trained, [tmp_path]).whole


def test_a_whole_result_counts_before_one_that_lacks_runs_and_that_before_a_damaged_one(tmp_path):
    trained = dataclasses.replace(ARTEFACT, trainings={"laptop": RUNS})
    runs, kept = tmp_path / "runs", tmp_path / "kept"
    write_reproduction(with_runs(("post", 1)), runs)
    write_reproduction(with_runs(("post", 1), ("pre", 1), ("post", 2), ("pre", 2)), kept)
    assert standing(trained, [runs, kept]).path.parent == kept
    (kept / "example.change.json").write_text(json.dumps({"id": 1}))
    assert standing(trained, [kept, runs]).state == "not all runs"


def test_runs_come_before_kept_results(tmp_path):
    assert folders(tmp_path) == (tmp_path / "papers", KEPT)
    assert {path.stem for path in KEPT.glob("*.json")} <= {a.id for a in ARTEFACTS.values() if a.study}


def test_a_result_on_another_text_is_not_whole(tmp_path):
    write_reproduction(dataclasses.replace(found(), stand_in="iwslt14.de-en"), tmp_path)
    stood = standing(ARTEFACT, [tmp_path])
    assert stood.state == "another text"
    assert not stood.whole
    assert stood.found is not None
    assert stood.found.stand_in == "iwslt14.de-en"


def test_results_that_disagree_about_a_run_are_named_once_for_each_pair(tmp_path):
    def holding(id_: str, *rows: dict[str, object]) -> ArtefactStatus:
        artefact = dataclasses.replace(ARTEFACT, id=id_)
        made = dataclasses.replace(found(artefact), tables={"runs": rows})
        return standing(artefact, [write_reproduction(made, tmp_path / id_).parent])

    def row(run: str, bleu: float, **others: object) -> dict[str, object]:
        return {"cell": "a", "seed": 1, "run": run, "bleu": bleu, **others}

    first = holding("p.a", row("r1", 1.0, seconds=3.0), row("r2", 2.0))
    same = holding("p.b", {**row("r1", 1.0, seconds=9.0), "cell": "another name"})
    assert not list(disagreements([first, same]))
    other = holding("p.c", row("r1", 1.5, seconds=4.0), row("r2", 2.5))
    (sentence,) = disagreements([first, same, other])
    assert sentence.startswith("p.a and p.c disagree about run r1, bleu: 1 and 1.5.")


@pytest.mark.slow
def test_kept_results_agree_about_every_run():
    kept = [standing(artefact, [KEPT]) for artefact in ARTEFACTS.values()]
    shared = [row["run"] for s in kept if s.found for row in s.found.tables.get("runs", ())]
    assert len(shared) > len(set(shared)), "some runs are shared"
    assert not list(disagreements(kept))
