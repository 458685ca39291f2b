"""Sentences that are answered by the results of other artefacts."""

from dataclasses import replace

import pytest

from normlab.errors import UserError
from normlab.papers import ARTEFACTS
from normlab.papers import results as reproductions
from normlab.papers.artefact import Reproduction
from normlab.papers.claim import Measure
from normlab.papers.lab import Lab
from normlab.papers.studies.trained import answers

ID = "liu2020.warmup"
SHARE = Measure(0.1, 0.0, 0.3, 8)


def test_measures_of_other_artefacts_have_names_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(reproductions, "KEPT", tmp_path / "kept")
    found = Reproduction(ID, ARTEFACTS[ID].fingerprint(), {"trains": SHARE}, {}, {}, 1.0)
    reproductions.write_reproduction(found, tmp_path / "papers")
    rows = {"deep": (ID, "trains")}
    assert answers(Lab(tmp_path), rows=rows).measures == {"deep": SHARE}
    large = replace(found, scale="gpu", fingerprint=ARTEFACTS[ID].fingerprint("gpu"))
    more = {"trains": replace(SHARE, value=0.2), "peak": SHARE}
    both = {**rows, "peak": (ID, "peak"), "nowhere": (ID, "nowhere")}
    assert answers(Lab(tmp_path), rows=both).measures == {"deep": SHARE}
    reproductions.write_reproduction(replace(large, measures=more), tmp_path / "papers")
    assert answers(Lab(tmp_path), rows=both).measures == {"deep": more["trains"], "peak": SHARE}
    (tmp_path / "papers" / f"{ID}@gpu.json").unlink()
    reproductions.write_reproduction(replace(found, fingerprint="older"), tmp_path / "papers")
    with pytest.raises(
        UserError, match=r"rests on liu2020.warmup, which is stale; type first: normlab papers repro"
    ):
        answers(Lab(tmp_path), rows=rows)


def test_an_artefact_that_rests_on_others_names_them_and_their_measures():
    resting = [a for a in ARTEFACTS.values() if a.rests_on]
    assert resting
    for artefact in resting:
        rows = artefact.settings["rows"]
        assert {id_ for id_, _ in rows.values()} == set(artefact.rests_on)
        assert rows.keys() == {claim.measure for claim in artefact.claims}
        for id_, measure in rows.values():
            assert measure in {claim.measure for claim in ARTEFACTS[id_].claims}
