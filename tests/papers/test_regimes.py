"""Where the rows of regimes come from: each kind of source, read from files as they are kept."""

from __future__ import annotations

import json
import math

import pytest

from normlab.errors import UserError
from normlab.papers.regimes import RESULTS, Book, Declaration, Setting, read_book, read_source
from reviewed_findings import BOOK

PLAN = """
findings = ["Z1"]
seeds = [1, 2]
[cells.a]
recipe = "pre"
[cells.b]
recipe = "post"
"""
ROW = {
    "cell": "a",
    "seed": 1,
    "run": "first",
    "outcome": "trained",
    "test": {"bleu": 9.0},
    "dev": [],
    "train": [],
}


def write_regime(root, *rows, plan=PLAN):
    """Write a regime of two cells and two seeds, with the rows of its runs, into a folder of results."""
    (root / "pair").mkdir(parents=True)
    (root / "pair/regime.toml").write_text(plan)
    (root / "pair/runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


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


def test_runs_of_one_s_own_complete_those_that_are_kept(tmp_path):
    own = write_regime(tmp_path / "own", {**ROW, "run": "again"}, {**ROW, "run": "own", "seed": 2})
    kept = write_regime(tmp_path / "kept", ROW)
    source = read_source("pair", (own, kept))
    assert {(run.cell, run.seed): run.id for run in source.runs} == {("a", 1): "first", ("a", 2): "own"}


@pytest.mark.parametrize(
    "row", [{**ROW, "cell": "c"}, {**ROW, "seed": 3}, {**ROW, "run": "second"}], ids=["cell", "seed", "twice"]
)
def test_a_run_that_has_no_place_of_its_own_in_the_plan_is_refused_with_its_line(tmp_path, row):
    with pytest.raises(UserError, match=r"runs\.jsonl, line 2\b"):
        read_source("pair", (write_regime(tmp_path, ROW, row),))


def test_a_run_that_diverged_has_numbers_wherever_its_line_has_words_for_them(tmp_path):
    diverged = {
        **ROW,
        "outcome": "diverged",
        "test": {"bleu": 0, "nll": "nan"},
        "dev": [[100, "nan", 0], [200, "inf", None]],
        "train": [[100, "nan", "inf"]],
        "measured": [{"step": 200, "gradients": {"encoder": {"ffn": ["-inf", 1.0]}}}],
    }
    (run,) = read_source("pair", (write_regime(tmp_path, diverged),)).runs
    assert run.scores["bleu"] == 0
    assert math.isnan(run.scores["nll"])
    assert [step for step, nll in run.dev["nll"] if not math.isfinite(nll)] == [100, 200]
    assert run.dev["bleu"] == [(100, 0)]
    assert run.gradients == [(100, math.inf)]
    assert run.measured[0]["gradients"]["encoder"]["ffn"] == [-math.inf, 1.0]


def test_a_table_has_numbers_wherever_its_lines_have_words_for_them(tmp_path):
    (tmp_path / "norms.jsonl").write_text(
        '{"family": "encoder", "change": "inf", "by_layer": [1.0, "nan"]}\n'
    )
    (row,) = read_source("norms.jsonl", (tmp_path,)).tables["norms"]
    assert row["change"] == math.inf
    assert math.isnan(row["by_layer"][1])


KEPT_RESULT = json.loads((RESULTS / "papers/xiong2020.fig3cd.json").read_text(encoding="utf-8"))
OWN_RESULT = {**KEPT_RESULT, "measures": {"own": {"value": 1.0, "low": 0.5, "high": 1.5, "runs": 5}}}


@pytest.mark.parametrize(
    ("own", "is_read"),
    [
        (json.dumps(OWN_RESULT), True),
        (json.dumps({**OWN_RESULT, "stand_in": "builtin"}), False),
        ("{", False),
    ],
    ids=["whole", "another text", "damaged"],
)
def test_of_an_artefact_s_results_the_first_whole_one_is_read(tmp_path, own, is_read):
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers/xiong2020.fig3cd.json").write_text(own)
    source = read_source("papers/xiong2020.fig3cd", (tmp_path, RESULTS))
    assert set(source.measures) == ({"own"} if is_read else set(KEPT_RESULT["measures"]))


def test_a_damaged_result_is_refused_if_there_is_no_other(tmp_path):
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers/xiong2020.fig3cd.json").write_text("{")
    with pytest.raises(UserError, match=r"xiong2020\.fig3cd\.json"):
        read_source("papers/xiong2020.fig3cd", (tmp_path,))


@pytest.mark.parametrize(
    ("old", "new"),
    [("findings", "finding"), ("[1, 2]", "1"), ("[1, 2]", '[1, "2"]'), ("[cells.a]", "[cell.a]")],
)
def test_a_plan_with_a_mistake_is_refused(tmp_path, old, new):
    with pytest.raises(UserError, match=r"regime\.toml"):
        read_source("pair", (write_regime(tmp_path, plan=PLAN.replace(old, new)),))


def test_a_regime_renames_only_cells_that_it_has(tmp_path):
    declared = """
        [settings.small]
        short = "small"
        says = "Two cells."
        scale = "It is small."
        [regimes.pair]
        on = "small"
        sources = ["pair"]
        says = "One cell beside the other."
        rename = { a = "Pre" }
    """
    write_regime(tmp_path, ROW)
    (tmp_path / "regimes.toml").write_text(declared)
    assert read_book(tmp_path / "regimes.toml", roots=(tmp_path,)).regime("pair").cells == ["Pre", "b"]
    (tmp_path / "regimes.toml").write_text(declared.replace("a = ", "aa = "))
    with pytest.raises(UserError, match="'aa'"):
        read_book(tmp_path / "regimes.toml", roots=(tmp_path,)).regime("pair")


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


def test_a_run_that_two_sources_have_counts_once(tmp_path):
    for name, run in (("first", "r1"), ("same", "r1"), ("other", "r2")):
        write_regime(tmp_path / name, {**ROW, "run": run})

    def joined(*names):
        sources = tuple(f"{name}/pair" for name in names)
        declared = Declaration("small", sources, "")
        return Book({"small": Setting("small", "", "")}, {"both": declared}, (tmp_path,)).regime("both")

    assert len(joined("first", "same").runs) == 1
    with pytest.raises(UserError, match="two runs of the cell"):
        joined("first", "other")
