"""Each command calls one function of the library and prints; the functions are stand-ins here."""

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.cells import cell_len
from rich.console import Console

from normlab.base.io import to_json
from normlab.base.metric import Outcome
from normlab.cli import terminal
from normlab.cli.compare import print_comparison
from normlab.cli.main import main
from normlab.cli.progress import ProgressDisplay
from normlab.cli.run import print_run, print_runs
from normlab.lab.comparison.result import Comparison, Interval, RecipeDifference, RecipeResult, SweepRun
from normlab.lab.config import Config, OptimConfig
from normlab.lab.recipes.grammar import listed
from normlab.lab.runs import RunFolder, Runs, Status
from normlab.lab.runs.folder import write_json_atomic
from normlab.lab.tasks.translation import Translation


@pytest.fixture
def stand_in(monkeypatch):
    """Put functions in the place of a module's."""

    def put(module, **functions):
        home = importlib.import_module(module)
        for name, function in functions.items():
            monkeypatch.setattr(home, name, function)

    return put


@pytest.fixture
def run(tmp_path):
    """A finished run in ``tmp_path/runs``."""
    config = Config(recipe="pre", optim=OptimConfig(lr=2e-3))
    folder = RunFolder.create(tmp_path / "runs" / "abc123", config, Translation.metrics)
    outcome = Outcome("trained", 2000, "NLL 1.2 nats per token")
    folder.set_status(
        Status("done", 2000, outcome, best_step=1500, best_dev={"bleu": 31.25}, train_seconds=90.0)
    )
    write_json_atomic(folder.scores, {"bleu": 30.5, "chrf": 55.0, "bleu_tokenised": 31.0, "signatures": {}})
    return folder


def recipe(name, bleu, outcomes=("trained", "trained")):
    return RecipeResult(
        name=name,
        resolves_to=name,
        trials=(SweepRun(1e-3, "r1", {"bleu": 20.0}, "trained"),),
        lr=1e-3,
        runs=("r1", "r2"),
        outcomes=outcomes,
        scores=dict.fromkeys(("bleu", "chrf", "bleu_tokenised"), (bleu, bleu + 0.5)) if bleu else {},
        means={m: Interval(bleu, bleu - 1, bleu + 1) for m in ("bleu", "chrf", "bleu_tokenised")}
        if bleu
        else {},
        train_seconds=61.0,
        total_seconds=183.0,
    )


COMPARISON = Comparison(
    title="t",
    command="normlab compare",
    date="2026-11-21",
    machine="m",
    data={},
    seeds=(1, 2),
    lrs=(1e-3,),
    task="translation",
    metrics=Translation.metrics,
    best_by="bleu",
    recipes=(recipe("post", None, ("stuck", "stuck")), recipe("admin", 28.0), recipe("pre", 30.0)),
    margin=1.0,
    differences=(
        RecipeDifference(
            "pre",
            "admin",
            2,
            "better",
            "pre is better than admin",
            Interval(2.0, 0.5, 3.5),
            p=0.008,
            p_trains=1.0,
            models=1.93,
            p_models=0.0421,
        ),
    ),
    sentences=("pre reaches 30.0 BLEU", "more seeds would help"),
    samples=(),
    failed=("r9: out of memory",),
)


def test_compare_trains_writes_the_page_and_prints_the_table(stand_in, tmp_path, capsys):
    seen = {}

    def compare(request, watch, publish):
        seen["request"] = request
        watch([])
        publish(COMPARISON)
        return COMPARISON

    def write_page(comparison, root, path):
        assert comparison is COMPARISON
        assert root == tmp_path
        return path

    stand_in("normlab.lab.comparison.compare", compare=compare)
    stand_in("normlab.report.compare", write_compare_page=write_page)
    with pytest.raises(SystemExit) as stopped:
        main(["compare", "--out", str(tmp_path), "--lrs", "1e-3", "--precision", "fp32"])
    assert stopped.value.code == 1, "a run failed"
    assert seen["request"].lrs == (1e-3,)
    assert seen["request"].command.startswith("normlab")
    printed = capsys.readouterr().out
    order = [
        printed.index(name)
        for name in (
            "pre reaches",
            "more seeds",
            "\npre ",
            "\nadmin ",
            "\npost ",
            "pre is better than admin",
            "+1.9",
        )
    ]
    assert order == sorted(order)
    assert all(said in printed for said in ("0 of 2", "30.0, 30.5"))
    assert "p = 0.042" in printed
    assert COMPARISON.failed[0] in printed
    assert f"page: {tmp_path}/comparison.html" in printed


def test_results_of_a_comparison_never_hang_on_its_page(stand_in, tmp_path, capsys):
    def compare(request, watch, publish):
        publish(COMPARISON)
        return replace(COMPARISON, failed=())

    def write_page(comparison, root, path):
        raise ZeroDivisionError("no room")

    stand_in("normlab.lab.comparison.compare", compare=compare)
    stand_in("normlab.report.compare", write_compare_page=write_page)
    assert main(["compare", "--out", str(tmp_path), "--precision", "fp32"]) == 0
    printed = capsys.readouterr()
    assert "page:" not in printed.out
    for fact in ("warning", "no room", f"normlab run report {tmp_path}/comparison.json"):
        assert fact in printed.err


def test_a_plan_says_what_how_long_and_what_it_will_tell(stand_in, capsys, tmp_path):
    runs = [
        SimpleNamespace(recipe="pre", lr=1e-3, seed=1, run="abc", done=True),
        SimpleNamespace(recipe="post", lr=1e-3, seed=1, run="def", done=False),
    ]
    plan = SimpleNamespace(
        sweep=runs,
        seed_runs=2,
        resolves_to={"pre": "pre; layernorm"},
        seconds=SimpleNamespace(step=0.05, validation=1.0, run=30.0),
        total_seconds=75.0,
        metric=Translation.metrics[0],
        power=[SimpleNamespace(seeds=3, sd=4.9, difference=4.41, runs=10, seconds=150.0)],
        basis="By three recipes",
        noun="recipe",
    )
    stand_in("normlab.lab.comparison.plan", plan=lambda request: plan)
    assert main(["compare", "--plan", "--jobs", "2", "--precision", "fp32", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "to train" in printed
    assert f"{plan.seed_runs} runs" in printed
    assert "4.4 BLEU" in printed
    assert plan.basis in printed
    for time in ("50 ms", "30 s", "1 min 15 s"):
        assert time in printed
    assert list(tmp_path.iterdir()) == []


def test_train_prints_the_outcome_and_where_it_is(stand_in, run, capsys):
    def train(config, root, on_row):
        assert (config.recipe, config.optim.lr, root) == ("pre", 2e-3, run.path.parent)
        return run

    stand_in("normlab.lab.training.train", train=train)
    given = ["--recipe", "pre", "--lr", "2e-3", "--precision", "fp32", "--out", str(run.path.parent)]
    assert main(["train", *given]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines() == [
        "trained at step 2000: NLL 1.2 nats per token",
        "best checkpoint: step 1500, dev BLEU 31.2",
        "test BLEU 30.5, chrF 55.0, tokenised BLEU 31.0",
        f"1 min 30 s of training; run folder: {run.path}",
    ]


def test_runs_says_which_are_stale(run, capsys):
    file = run.path / "config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"id": "older"}))
    assert main(["run", "list", "--runs", str(run.path.parent)]) == 0
    printed = capsys.readouterr().out
    assert "trained, stale" in printed
    assert "\nstale: " in printed


@pytest.mark.parametrize("width", [30, 50, 80, 200])
def test_a_narrow_terminal_cuts_nothing_off(width, capsys, monkeypatch):
    name = "enc:post/dec:pre+fixnorm+scalenorm"
    result = replace(COMPARISON, recipes=(*COMPARISON.recipes, recipe(name, 29.0)), differences=(), failed=())
    monkeypatch.setattr(terminal, "console", lambda: Console(width=width))
    print_comparison(result)
    printed = capsys.readouterr().out
    assert "…" not in printed
    names = "".join(line.partition(" ")[0] for line in printed.splitlines())
    assert name in names
    for score in ("28.0", "29.0", "30.0"):
        assert score in printed
    assert ("time" in printed) == (width == 200)
    assert width < 80 or f"{name} " in printed
    assert max(map(len, printed.splitlines())) <= width


def test_a_narrow_terminal_keeps_every_score_of_the_runs(run, capsys, monkeypatch):
    monkeypatch.setattr(terminal, "console", lambda: Console(width=45))
    print_runs(Runs(run.path.parent))
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("abc123", "pre", "2e-3", "trained", "30.5"))
    assert "time" not in printed


def test_runs_lists_good_and_damaged_folders(run, capsys):
    damaged = RunFolder.create(run.path.parent / "zzz", Config())
    (damaged.path / "config.json").write_text("{")
    assert main(["run", "list", "--runs", str(run.path.parent)]) == 0
    first, second = capsys.readouterr().out.splitlines()[1:3]
    assert first.split() == [
        "abc123",
        "pre",
        "2e-3",
        "1",
        "2,000/2,000",
        "trained",
        *("BLEU", "31.2"),
        *("BLEU", "30.5"),
        "1",
        "min",
        "30",
        "s",
    ]
    assert second.startswith("zzz")
    assert "not JSON" in second


EVIL = "\x1b]0;renamed\x07\x9b31m"


@pytest.mark.parametrize("scores", ["[]", "3", '{"bleu": "high"}', '{"bleu": {}}', "[" * 100_000])
def test_runs_names_the_run_whose_scores_are_damaged(run, capsys, scores):
    other = RunFolder.create(run.path.parent / "zzz", Config(), Translation.metrics)
    other.scores.write_text(scores)
    assert main(["run", "list", "--runs", str(run.path.parent)]) == 0
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("abc123")
    assert second.startswith("zzz")
    assert "scores.json" in second


def test_names_and_texts_of_a_run_do_nothing_to_the_terminal(run, capsys, monkeypatch):
    monkeypatch.setattr(terminal.PlainConsole, "is_terminal", property(lambda self: True))
    run.path.rename(run.path.with_name(f"abc{EVIL}"))
    folder = RunFolder(run.path.with_name(f"abc{EVIL}"))
    folder.set_status(replace(folder.status(), stopped=EVIL, error=EVIL))
    config = json.loads((folder.path / "config.json").read_text())
    config["config"] |= {"recipe": f"pre{EVIL}", "forced": EVIL}
    write_json_atomic(folder.path / "config.json", config)
    assert main(["run", "list", "--runs", str(run.path.parent)]) == 0
    print_run(folder)
    assert main(["run", "report", EVIL, "--runs", str(run.path.parent)]) == 2
    with ProgressDisplay() as progress:
        progress.watch([folder])
    said = "".join(capsys.readouterr())
    assert said.count(r"\x1b]0;renamed") >= 5
    assert "\x1b]" not in said
    assert "\x9b" not in said


def test_runs_names_the_host_that_a_run_is_on(run, capsys):
    run.set_status(Status("running", step=5))
    for said, state in (("far-away 77", "running on far-away"), ("", "interrupted")):
        (run.path / "lock").write_text(said)
        print_runs(Runs(run.path.parent))
        printed = capsys.readouterr().out
        assert (state in printed, "running" in printed) == (True, bool(said))


def test_runs_of_an_empty_folder_says_what_to_type(tmp_path, capsys):
    assert main(["run", "list", "--runs", str(tmp_path)]) == 0
    assert "normlab train" in capsys.readouterr().out


class TestReport:
    def test_a_comparison_is_drawn_again(self, stand_in, tmp_path, capsys):
        drawn = []
        stand_in("normlab.report.compare", write_compare_page=lambda *given: drawn.append(given) or given[2])
        (tmp_path / "comparison.json").write_text(to_json(COMPARISON))
        assert main(["run", "report", "--runs", str(tmp_path)]) == 0
        assert drawn == [(COMPARISON, tmp_path, tmp_path / "comparison.html")]
        assert main(["run", "report", str(tmp_path / "comparison.json"), "--page", "x.html"]) == 0
        assert drawn[1] == (COMPARISON, tmp_path, Path("x.html"))
        assert "page: x.html" in capsys.readouterr().out

    def test_a_comparison_that_is_none_is_named(self, tmp_path, capsys):
        for content in ("", "{}", "[]"):
            (tmp_path / "comparison.json").write_text(content)
            assert main(["run", "report", "--runs", str(tmp_path)]) == 2
            assert f"{tmp_path}/comparison.json" in capsys.readouterr().err

    def test_a_single_run_has_a_page(self, stand_in, run):
        stand_in("normlab.report.run", run_page=lambda folder: f"<p>{folder.name}</p>")
        assert main(["run", "report", "abc", "--runs", str(run.path.parent)]) == 0
        assert (run.path / "run.html").read_text() == "<p>abc123</p>"


def test_what_was_forced_is_marked_and_said(run, tmp_path, capsys):
    forced = Config(recipe="deepnorm+smallinit", forced="it is a gain on Xavier")
    RunFolder.create(run.path.parent / "def456", forced)
    assert main(["run", "list", "--runs", str(run.path.parent)]) == 0
    printed = capsys.readouterr().out
    assert "trained, forced" not in printed
    assert "waiting, forced" in printed
    assert f"\nforced: {forced.recipe}: {forced.forced}\n" in printed
    marked = replace(recipe("mix", 29.0), forced="nobody defines it")
    print_comparison(replace(COMPARISON, recipes=(*COMPARISON.recipes, marked)))
    printed = capsys.readouterr().out
    assert "mix (forced)" in printed
    assert printed.count("(forced)") == 1
    assert f"\nforced: {marked.name}: {marked.forced}\n" in printed


@pytest.fixture(params=[80, 120, 160, 200])
def width(request, monkeypatch):
    monkeypatch.setattr(terminal, "console", lambda: Console(width=request.param))
    return request.param


def test_recipes_lists_what_is_registered_with_equation_and_source(width, capsys):
    assert main(["recipes"]) == 0
    printed = capsys.readouterr().out
    for part in listed():
        assert re.search(rf"^  {re.escape(part.name)} ", printed, re.MULTILINE)
    together = " ".join(printed.split())
    for said in ("Post-LN: x ← LN(x + f(x))", "g x / ‖x‖₂", "√(σ² + ϵ)", "m\u0302 / (√v\u0302 + ϵ)"):
        assert said in together
    assert "\\" not in printed
    assert "math:" not in printed
    assert "arXiv 1706.03762" in printed
    assert max(map(cell_len, printed.splitlines())) <= width
    assert "…" not in printed


def test_recipes_of_one_axis(capsys):
    assert main(["recipes", "--axis", "head gain"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert names == ["noheadgain", "headgain"]
    assert main(["recipes", "--axis", "placemnt"]) == 2
    assert "mean 'placement'" in capsys.readouterr().err


def test_a_recipe_is_explained(width, capsys):
    assert main(["recipes", "deepnorm", "pre+rope", "--config", "multi30k_small"]) == 0
    printed = capsys.readouterr().out
    together = " ".join(printed.split())
    assert "x ← LN(α x + f(x))" in together
    assert "no warm-up" in together
    assert "3+3 layers, width 128" in together
    assert together.index("RoPE") > together.index("DeepNorm")
    assert max(map(cell_len, printed.splitlines())) <= width
    assert main(["recipes", "fixup"]) == 2
    assert "type fixup+untied" in capsys.readouterr().err
    assert main(["recipes", "fixup", "--force"]) == 0
    assert "tied embedding" in " ".join(capsys.readouterr().out.split())
