"""A paper of the user's own, one module with a claim and its measurement, as it is typed."""

from __future__ import annotations

import json

import pytest

from cli.typed import normlab
from normlab.papers import ARTEFACTS

MODULE = """
import torch

from normlab.papers import Artefact, Claim, Drawing, Measurement, publish


def positive_share(lab, *, dims, seeds):
    from normlab.papers.intervals import mean
    from normlab.papers.lab import generator

    def share(dim, seed):
        return (torch.randn(dim, generator=generator(seed=seed)) > 0).double().mean().item()

    lab.log("drawing")
    rows = [{"d": d, "seed": s, "share": share(d, s)} for d in dims for s in range(seeds)]
    return Measurement({"share": mean(r["share"] for r in rows)}, {"shares": rows})


publish(
    Artefact(
        id="doe2026.lemma1",
        paper="Doe and Roe 2026, Lemma 1 (arXiv 2601.00001)",
        shows="The share of units that a ReLU lets pass at initialisation.",
        published={"share": 0.5},
        asserts="Half of all units pass.",
        study=positive_share,
        settings={"dims": (512, 4096), "seeds": 5},
        claims=(Claim("share of units that pass", "share", at_least=0.48, at_most=0.52, published="1/2"),),
        drawings=(Drawing("shares", "d", "share", "Units that pass", "width", "share"),),
    ),
    Artefact("doe2026.fig1", "Doe and Roe 2026, Figure 1", "A training.", {"BLEU": 1.0}, "It trains."),
)
"""
OWN = ["--import", "own.doe"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.delenv("NORMLAB_IMPORT", raising=False)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "doe.py").write_text(MODULE)
    return tmp_path


@pytest.mark.slow
def test_a_paper_of_ones_own_is_listed_measured_and_drawn(here):
    listed = normlab("papers", *OWN, cwd=here)
    assert listed.returncode == 0, listed.stderr
    assert f"{sum(one.kind == 'artefact' for one in ARTEFACTS.values()) + 2} artefacts" in listed.stdout
    unknown = normlab("papers", "doe2026", cwd=here)
    assert unknown.returncode == 2
    assert "'doe2026'" in unknown.stderr

    shown = normlab("papers", "doe2026.lemma1", *OWN, cwd=here).stdout
    assert shown.startswith("doe2026.lemma1: not run")
    command = shown.splitlines()[-1]
    assert command == "normlab papers reproduce doe2026.lemma1 --import own.doe"

    measured = normlab(*command.split()[1:], cwd=here)
    assert measured.returncode == 0, measured.stderr
    assert "agrees    share of units that pass: 0.4969" in measured.stdout
    page = (here / "runs" / "papers" / "doe2026.lemma1.html").read_text()
    assert "Units that pass" in page
    assert "<svg" in page
    assert "doe2026.lemma1.html" in (here / "runs" / "papers" / "papers.html").read_text()
    (found,) = json.loads(normlab("papers", "doe2026.lemma1", "--json", *OWN, cwd=here).stdout)
    assert (found["state"], found["claims"][0]["verdict"]) == ("agrees", "agrees")


@pytest.mark.slow
def test_it_is_measured_beside_others_in_processes_of_their_own(here):
    names = ["doe2026", "apx.blocks", "liu2020.parameters"]
    measured = normlab("papers", "reproduce", *names, "--again", "--jobs", "2", *OWN, cwd=here)
    assert measured.returncode == 0, measured.stderr
    assert {path.stem for path in (here / "runs" / "papers").glob("*.json")} == {
        "doe2026.lemma1",
        "apx.blocks",
        "liu2020.parameters",
    }


@pytest.mark.slow
def test_a_name_that_is_taken_is_refused(here):
    (here / "own" / "doe.py").write_text(MODULE.replace("doe2026.lemma1", "xiong2020.lemma1"))
    refused = normlab("papers", "reproduce", "doe2026", "--jobs", "1", *OWN, cwd=here)
    assert refused.returncode != 0
    assert "'xiong2020.lemma1'" in refused.stderr
