"""Where the rows of regimes come from: each kind of source, read from files as they are kept."""

from __future__ import annotations

import json

import pytest

from normlab.errors import UserError
from normlab.papers.regimes import RESULTS, read_book, read_source
from reviewed_findings import BOOK


def test_an_artefact_s_tables_become_runs_with_curves_and_gradients():
    source = read_source("papers/nguyen2019.fig2")
    kept = json.loads((RESULTS / "papers/nguyen2019.fig2.json").read_text(encoding="utf-8"))
    first = kept["tables"]["runs"][0]
    run = next(one for one in source.runs if one.id == first["run"])
    assert (run.cell, run.seed, run.scores["bleu"]) == (first["cell"], first["seed"], first["bleu"])
    assert not [name for name in run.scores if name.startswith("dev_")]
    assert len(run.dev["nll"]) == 14
    assert run.gradients[0] == (1, kept["tables"]["gradients"][0]["grad_norm_l2"])


def test_a_study_s_tables_are_kept_as_they_are():
    source = read_source("papers/xiong2020.fig3cd")
    assert not source.runs
    assert {row["placement"] for row in source.tables["gradients"]} == {"post", "pre"}


def test_a_comparison_has_each_recipe_at_its_chosen_rate():
    source = read_source("multi30k-recipes")
    assert {run.seed for run in source.runs} == {2, 3, 4}  # seed 1 chose the rates
    assert len(source.runs) == 15
    post = [run.scores["bleu"] for run in source.runs if run.cell == "post"]
    assert post == pytest.approx([22.278, 21.749, 22.923], abs=1e-3)


def test_a_comparison_has_the_rates_that_it_chose_and_those_that_it_tried():
    rates = BOOK.regime("brown").rates
    assert {cell: rate.value for cell, rate in rates.items() if rate.at_the_edge} == {
        "post": 0.002,
        "post+warmup": 0.002,
        "pre+rmsnorm+rope+swiglu": 0.01,
    }
    assert rates["pre"].tried == (0.002, 0.005, 0.01)
    assert BOOK.regime("dates-warmup").rates == {}


def test_how_far_the_dev_loss_fell_at_the_last():
    falls = BOOK.regime("multi30k").last_falls
    assert len(falls) == 15
    assert {steps for steps, _ in falls} == {500}
    assert min(fall for _, fall in falls) > 0


def test_a_comparison_has_the_dev_scores_of_its_runs():
    """They are those of the runs' own folders, which do not come with the wheel."""
    for run in read_source("multi30k-recipes").runs:
        metrics = (RESULTS / "multi30k-recipes" / run.id / "metrics.jsonl").read_text(encoding="utf-8")
        rows = [row for row in map(json.loads, metrics.splitlines()) if row["kind"] == "dev"]
        for metric in ("nll", "bleu"):
            assert run.dev[metric] == [(row["step"], row[metric]) for row in rows]


def test_a_regime_that_was_fixed_beforehand_knows_what_is_missing():
    source = read_source("quarter-norms")
    assert ("Pre+LN", 13) in source.planned
    assert len(source.planned) == 12
    assert source.margins == {"bleu": 1.0}
    assert {"N3", "N4"} == set(source.findings)
    assert {(run.cell, run.seed) for run in source.runs} <= source.planned


def test_runs_that_were_cut_short_have_their_dev_scores():
    source = read_source("half-precision/section5_3.jsonl")
    run = next(one for one in source.runs if one.cell == "ReZero, dropout" and one.seed == 1)
    assert run.dev["bleu"] == [(300, 6.9), (600, 13.29), (900, 22.66)]
    assert run.dev["nll"][0] == (300, 4.185)
    assert run.last_loss == 2.475
    assert not run.trained


def test_rows_of_no_run_are_a_table():
    source = read_source("amplification.jsonl")
    assert not source.runs
    assert {row["family"] for row in source.tables["amplification"]} == {"encoder", "encoder-decoder"}


def test_several_sources_share_cells_under_new_names():
    regime = BOOK.regime("bert-placement")
    assert {run.cell for run in regime.runs} <= {cell for cell, _ in regime.planned}
    assert set(regime.cell("Pre, 3e-3")) >= {1, 2, 3}
    assert regime.missing(["Pre, 3e-3"]) == 6 - len(regime.cell("Pre, 3e-3"))


def test_runs_of_one_s_own_join_those_that_are_kept(tmp_path):
    (tmp_path / "quarter-norms").mkdir()
    line = (RESULTS / "quarter-norms/runs.jsonl").read_text(encoding="utf-8").splitlines()[0]
    own = {**json.loads(line), "run": "own", "seed": 20}
    (tmp_path / "quarter-norms/runs.jsonl").write_text(f"{line}\n{json.dumps(own)}\n")
    kept = read_source("quarter-norms")
    joined = read_source("quarter-norms", (tmp_path, RESULTS))
    assert {run.id for run in joined.runs} == {run.id for run in kept.runs} | {"own"}


@pytest.mark.parametrize("name", BOOK.regimes)
def test_every_regime_can_be_read_and_says_what_it_is(name):
    regime = BOOK.regime(name)
    assert regime.runs or regime.measures or regime.planned or regime.tables
    assert regime.says.endswith(".")
    assert regime.setting.scale.endswith(".")


def test_what_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"\bnothing\b"):
        read_source("nothing", (tmp_path,))
    with pytest.raises(UserError, match="'multi30k'"):
        BOOK.regime("multi30")
    (tmp_path / "regimes.toml").write_text('[settings]\n[regimes.a]\non = "b"\nsources = ["c"]\nsays = "d"\n')
    with pytest.raises(UserError, match="setting 'b'"):
        read_book(tmp_path / "regimes.toml")
