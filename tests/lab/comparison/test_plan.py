"""What a comparison says before it trains: its runs, what they cost, and what they will tell."""

import pytest

from lab.comparison.test_compare import plant, request_of
from normlab.base.files import write_json_atomic
from normlab.errors import UserError
from normlab.judging.statistics import detectable
from normlab.lab.comparison import grid as runs
from normlab.lab.comparison.plan import plan
from normlab.lab.runs import Runs
from normlab.lab.training.timing import Seconds


@pytest.mark.slow
def test_a_plan_counts_what_is_left_and_trains_nothing(text, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "measure_side_by_side", lambda *asked: Seconds(1.0, 1.0, 100.0))
    request = request_of(text, tmp_path, seeds=3, jobs=2)
    planned = plan(request)
    assert [(r.recipe, r.lr, r.seed, r.done) for r in planned.sweep] == [
        ("pre", 1e-3, 0, False),
        ("pre", 1e-2, 0, False),
        ("post", 1e-3, 0, False),
        ("post", 1e-2, 0, False),
    ]
    assert (planned.seed_runs, planned.total_seconds) == (6, 500.0), "ten runs, two at a time"
    assert planned.resolves_to["pre"].startswith("pre; layernorm")
    assert list(Runs(tmp_path)) == []
    assert plan(request_of(text, tmp_path, recipes=("pre",))).power == (), "nothing to tell apart"

    for lr in request.lrs:
        plant(request, "pre", lr, 0, bleu=lr, nll=1 - lr)
    assert plan(request).total_seconds == 400.0
    assert [r.done for r in plan(request).sweep] == [True, True, False, False]
    plant(request, "pre", 1e-2, 2, bleu=1.0, nll=2.0)
    plant(request, "pre", 1e-3, 3, bleu=1.0, nll=2.0)  # at the other learning rate: no use
    assert plan(request).total_seconds == 400.0, "seven are left"
    plant(request, "pre", 1e-2, 3, bleu=1.0, nll=2.0)
    assert plan(request).total_seconds == 300.0
    assert {r.run for r in planned.sweep if r.recipe == "pre"} <= {f.path.name for f in Runs(tmp_path)}


def test_a_plan_says_what_so_many_seeds_will_tell_and_what_they_cost(text, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "measure_side_by_side", lambda *asked: Seconds(1.0, 1.0, 100.0))
    request = request_of(text, tmp_path / "runs", seeds=4, jobs=2)
    nothing = plan(request, kept=())
    assert nothing.spread is None
    assert "standard deviations" in nothing.basis
    assert [(p.seeds, p.difference) for p in nothing.power] == [(n, None) for n in (2, 3, 4, 5, 10)]
    assert [(p.runs, p.seconds) for p in nothing.power][2] == (2 * (2 + 4), 600.0)
    assert [p.sd for p in nothing.power] == [detectable(2, n) for n in (2, 3, 4, 5, 10)]

    elsewhere = request_of(text, tmp_path / "kept")
    for seed, bleu in ((1, 30.0), (2, 31.0), (3, 32.0)):
        folder = plant(elsewhere, "pre", 1e-3, seed, bleu=1.0, nll=2.0)
        write_json_atomic(folder.scores, {"bleu": bleu})
    told = plan(request, kept=(tmp_path / "kept",))
    assert (told.spread.recipes, told.spread.source) == (1, str(tmp_path / "kept"))
    assert "1.0 BLEU" in told.basis
    for power in told.power[1:]:
        assert power.difference == pytest.approx(power.sd, rel=0.15), "a standard deviation is about 1 BLEU"


def test_a_recipe_is_shown_by_its_short_name_and_a_baseline_leaves_what_was_typed(text, tmp_path):
    request = request_of(
        text, tmp_path, recipes=("A=llama+qknorm", "like:llama", "pre"), kept=("weight_decay",)
    )
    grid = runs.RunGrid(request)
    assert [grid.label(name) for name in request.recipes] == ["A", "like:llama", "pre"]
    assert grid.facts("A=llama+qknorm").resolves_to.startswith("llama+qknorm: pre; rmsnorm; ")
    decays = {name: grid.config(name, 1e-3, 1).optim.weight_decay for name in request.recipes}
    assert set(decays.values()) == {request.base.optim.weight_decay}
    assert grid.config("like:llama", 1e-3, 1).optim.max_grad_norm == 1.0
    with pytest.raises(UserError, match="'A=pre' and 'A=post'"):
        runs.RunGrid(request_of(text, tmp_path, recipes=("A=pre", "A=post")))
