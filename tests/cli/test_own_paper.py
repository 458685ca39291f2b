"""A paper of the user's own: one file with regimes and findings, and a function for a new measure."""

from __future__ import annotations

import json

import pytest

from cli.typed import normlab
from normlab.papers import ARTEFACTS
from normlab.papers.finding import known_findings

PAPER = """
[paper]
title = "Half of all units"
authors = "Doe and Roe 2026"
url = ""
about = "A ReLU lets half of its units pass."

[settings.toy]
short = "a toy"
says = "Two recipes on a toy text."
scale = "It is small."

[regimes.toy]
on = "toy"
sources = ["toy"]
says = "Post-LN and Pre-LN."

[[finding]]
id = "E1"
short = "Pre-LN is better"
says = "Pre-LN is better than Post-LN."
where = "Table 1"
published = "30 and 20"
answer = "supported"
because = "By ten BLEU."

[[finding.evidence]]
says = "Pre-LN over Post-LN"
regime = "toy"
effect = "difference"
of = "pre"
over = "post"
above = 0

[[finding.evidence]]
says = "the mean BLEU of Pre-LN"
regime = "toy"
effect = "mean_bleu"
of = "pre"
above = 25
margin = "25 BLEU"
"""
REGIME = """
question = "Which is better?"
findings = ["E1"]
seeds = [1, 2, 3]
[cells.pre]
recipe = "pre"
[cells.post]
recipe = "post"
"""
MODULE = """
import torch

from normlab.papers import Artefact, Lines, Measurement, publish
from normlab.papers.effects import effect
from normlab.papers.estimate import mean


@effect()
def mean_bleu(regime, of):
    \"\"\"The arithmetic mean of the test BLEU of a cell's runs.\"\"\"
    return mean(run.scores["bleu"] for run in regime.cell(of).values())


def positive_share(lab, *, dims, seeds):
    from normlab.papers.estimate import mean
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
        study=positive_share,
        settings={"dims": (512, 4096), "seeds": 5},
        drawings=(Lines("shares", "Units that pass", "d", "share", "width", "share"),),
    ),
    Artefact("doe2026.fig1", "Doe and Roe 2026, Figure 1", "A training.", {"BLEU": 1.0}),
)
"""
OWN = ["--import", "own.doe"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.delenv("NORMLAB_IMPORT", raising=False)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "doe.py").write_text(MODULE)
    (tmp_path / "doe2026.toml").write_text(PAPER)
    (tmp_path / "runs" / "toy").mkdir(parents=True)
    (tmp_path / "runs" / "toy" / "regime.toml").write_text(REGIME)
    rows = [
        {"cell": cell, "seed": seed, "run": f"{cell}{seed}", "outcome": "trained", "dev": [], "train": [],
         "test": {"bleu": level + seed, "nll": 3.0}}
        for cell, level in (("pre", 30.0), ("post", 20.0))
        for seed in (1, 2, 3)
    ]  # fmt: skip
    (tmp_path / "runs" / "toy" / "runs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


@pytest.mark.slow
def test_a_paper_of_ones_own_is_one_file_and_a_function_for_a_new_measure(here):
    listed = normlab("papers", "--paper", "doe2026.toml", *OWN, cwd=here)
    assert listed.returncode == 0, listed.stderr
    assert f"{len(known_findings()) + 1} findings" in listed.stdout
    assert "Roe 2026" in listed.stdout

    shown = normlab("papers", "show", "E1", "--paper", "doe2026.toml", *OWN, cwd=here).stdout
    assert shown.startswith("E1: Pre-LN is better: supported")
    assert shown.count("agrees") == 2
    assert "Pre-LN: 32.0 [29.5, 34.5], n 3" in shown

    unknown = normlab("papers", "show", "E1", cwd=here)
    assert unknown.returncode == 2
    assert "'E1'" in unknown.stderr
    (here / "xiong2020.toml").write_text(PAPER)
    taken = normlab("papers", "--paper", "xiong2020.toml", cwd=here)
    assert taken.returncode == 2
    assert "'xiong2020'" in taken.stderr
    (here / "torn.toml").write_text(PAPER[:300])
    torn = normlab("papers", "--paper", "torn.toml", cwd=here)
    assert torn.returncode == 2
    assert "torn.toml" in torn.stderr


@pytest.mark.slow
def test_a_table_of_ones_own_is_listed_measured_and_drawn(here):
    shown = normlab("papers", "doe2026.lemma1", *OWN, cwd=here).stdout
    assert shown.startswith("doe2026.lemma1: not run")
    command = shown.splitlines()[-1]
    assert command == "normlab papers reproduce doe2026.lemma1 --import own.doe"

    measured = normlab(*command.split()[1:], cwd=here)
    assert measured.returncode == 0, measured.stderr
    assert "share: 0.497" in measured.stdout
    page = (here / "runs" / "papers" / "doe2026.lemma1.html").read_text()
    assert '<div class="chart"' in page
    assert "doe2026.lemma1.html" in (here / "runs" / "papers" / "papers.html").read_text()
    found = json.loads(normlab("papers", "all", "--json", *OWN, cwd=here).stdout)["artefacts"]
    assert len(found) == len(ARTEFACTS) + 2
    assert {one["id"]: one["state"] for one in found}["doe2026.lemma1"] == "measured"
