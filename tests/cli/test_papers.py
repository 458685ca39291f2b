"""``normlab papers`` and ``normlab papers reproduce`` as they are typed; what measures is a stand-in here."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from cli.test_own_paper import PAPER, REGIME
from normlab import papers
from normlab.cli import terminal
from normlab.cli.main import main
from normlab.cli.presets import CONFIGS
from normlab.errors import UserError
from normlab.papers import finding, phrases, regimes
from normlab.papers.artefact import Artefact, Reproduction
from normlab.papers.bases import LAPTOP
from normlab.papers.experiments import kept, planned_for, read_experiment
from normlab.papers.finding import known_findings, reviewed
from normlab.papers.phrases import SCHEMA_VERSION, TESTED_AND_OPEN
from normlab.papers.regimes import RUNS_FILE, read_book
from normlab.papers.results import write_reproduction
from normlab.papers.trainings import Trainings
from planned import TOY
from report import reproductions
from report.reproductions import ARTEFACT
from reviewed_findings import REVIEWED

COLUMNS = 100
"""The list of findings must fit a terminal of this many columns."""
PLAIN = replace(ARTEFACT, drawings=())
"""Its page is quick to make."""
FAILING = replace(PLAIN, id="example.fails")
LARGE = replace(
    PLAIN,
    id="example.large",
    trainings={
        "laptop": Trainings(LAPTOP, {"post": {"recipe": "post"}}, 1, "It is small."),
        "gpu": Trainings(LAPTOP, {"post": {"recipe": "post", "optim.lr": 2e-3}}, 1, "It is large."),
    },
)
PROGRESS = "half of it"
REASON = "nothing to measure on"
"""What measuring says on the way, and why it fails."""
BARE = Artefact("other.bare", "P", "Nothing.", {"a": 1.0})


def found(artefact: Artefact = PLAIN) -> Reproduction:
    """The example's measures without its long tables."""
    return replace(reproductions.found(artefact), tables={"t": [{"x": 1.0}]})


@pytest.fixture
def measured(monkeypatch, tmp_path) -> list[tuple]:
    """Put three artefacts in place of the papers'; return what was measured, with its folders."""
    calls: list[tuple] = []

    def reproduce(artefact, root, say):
        calls.append((artefact.id, os.environ.get("NORMLAB_DATA"), root))
        say(PROGRESS)
        if artefact.id != ARTEFACT.id:
            raise UserError(f"{artefact.id} has no study yet" if not artefact.study else REASON)
        return found(artefact)

    def each(artefacts, root, say, *, jobs, until):
        in_time = artefacts if time.monotonic() <= until else ()
        return ((artefact, partial(reproduce, artefact, root, say)) for artefact in in_time)

    monkeypatch.setitem(sys.modules, "normlab.papers.reproduce", SimpleNamespace(each=each))
    monkeypatch.setattr(papers, "ARTEFACTS", {a.id: a for a in (PLAIN, FAILING, BARE)})
    monkeypatch.setenv("NORMLAB_DATA", "")  # so that what --data makes of it is undone
    monkeypatch.delenv("NORMLAB_DATA")
    monkeypatch.chdir(tmp_path)
    return calls


@pytest.mark.slow
def test_without_a_name_the_list_has_every_finding_and_counts_answers(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["papers"]) == 0
    head, *lines, empty, counted, counts, more = capsys.readouterr().out.splitlines()
    findings = known_findings()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(findings)
    assert counted.startswith(f"{len(findings)} findings: ")
    assert counts.startswith("a/c/o: ")
    assert (head.split()[:3], empty) == (["finding", "answer", "a/c/o"], "")
    assert max(map(len, (head, *lines, counted, counts, more))) <= COLUMNS
    assert not any("…" in line for line in lines)
    assert more.endswith("normlab papers show X1")


def test_a_paper_has_its_findings_and_its_tables_and_figures(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["papers", "apx"]) == 0
    first = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert [name for name in first if name.startswith(("A", "apx."))] == [
        "ApX", "A1", "A2", "A3", "A4", "apx.blocks", "apx.claims",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["L9", "l9"])
def test_a_finding_is_shown_with_all_that_was_measured(capsys, name):
    assert main(["papers", "show", name]) == 0
    shown = capsys.readouterr().out
    known = known_findings()["L9"]
    assert shown.startswith("L9: ")
    for piece in (*known.evidence, *known.left_out):
        assert piece.says in shown
    assert known.because in shown
    assert known.published in shown


def test_json_has_every_finding_with_its_effects_and_regimes(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["papers", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["schema_version"] == SCHEMA_VERSION
    assert [one["id"] for one in content["findings"]] == list(known_findings())
    assert [one["id"] for one in content["artefacts"]] == list(papers.ARTEFACTS)
    for told, review in zip(content["findings"], REVIEWED.values(), strict=True):
        answer = TESTED_AND_OPEN if review.tested_and_open else review.finding.answer
        assert told["answer"] == answer
        assert told["counts"] == {reading: review.counts[reading] for reading in told["counts"]}
        for piece, measured in zip(told["evidence"], review.evidence, strict=True):
            estimate, (low, high) = measured.estimate, measured.piece.expects.bounds
            assert (piece["effect"], piece["regime"]) == (measured.piece.effect, measured.regime.name)
            assert (piece["n"], piece["unit"], piece["reading"]) == (
                estimate.runs,
                estimate.unit,
                measured.reading,
            )
            numbers = [piece["value"], *piece["interval"], *piece["expected"]]
            assert numbers == [
                number if math.isfinite(number) else None
                for number in (estimate.value, estimate.low, estimate.high, low, high)
            ]
    named = {one["regime"] for f in content["findings"] for one in (*f["evidence"], *f["left_out"])}
    assert named == {one["name"] for one in content["regimes"]}


def test_an_unknown_one_is_one_sentence(capsys):
    assert main(["papers", "liu2020.fig33"]) == 2
    assert re.search(r"'liu2020\.fig33'.* liu2020\.fig3\b", capsys.readouterr().err)


def test_one_is_shown_whole(measured, capsys, tmp_path):
    write_reproduction(found(), tmp_path / "runs" / "papers")
    assert main(["papers", ARTEFACT.id]) == 0
    said = capsys.readouterr().out
    assert said.startswith("example.change: measured\n")
    assert "1.01 [0.95, 1.07]" in said
    assert PLAIN.discussion in said
    assert "cell 11" in said
    assert said.endswith("normlab papers reproduce example.change\n")


def test_a_table_that_a_paper_has_names_its_findings(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["papers", "show", "xiong2020.fig4ab"]) == 0
    said = capsys.readouterr().out
    assert [name for name in known_findings() if f"\n{name}: " in said] == ["X4", "X5", "X9"]


def test_json_says_everything(measured, capsys, tmp_path):
    write_reproduction(found(), tmp_path / "elsewhere" / "papers")
    assert main(["papers", "example", "--json", "--runs", "elsewhere"]) == 0
    first, second = json.loads(capsys.readouterr().out)["artefacts"]
    assert (first["id"], first["state"], second["state"]) == (ARTEFACT.id, "measured", "not run")
    assert (first["measures"]["post_exponent"]["value"], first["published"]["cell 3"]) == (1.01, 3.0)
    assert first["file"] == "elsewhere/papers/example.change.json"


@pytest.mark.slow
def test_a_damaged_result_says_so(measured, capsys, tmp_path):
    path = write_reproduction(found(), tmp_path / "runs" / "papers")
    path.write_text("{")
    assert main(["papers", "all", "--json"]) == 0
    states = {one["id"]: one["state"] for one in json.loads(capsys.readouterr().out)["artefacts"]}
    assert states[ARTEFACT.id] == "damaged"
    assert main(["papers", "all"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(ARTEFACT.id)]
    assert "damaged" in line


@pytest.mark.slow
def test_what_is_measured_is_kept_shown_and_not_measured_twice(measured, capsys, tmp_path):
    command = ["papers", "reproduce", ARTEFACT.id, "--data", "texts"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "post_exponent: 1.01 [0.95, 1.07]" in out
    assert PROGRESS in err
    folder = tmp_path / "runs" / "papers"
    assert {path.name for path in folder.iterdir()} == {
        "example.change.json",
        "example.change.html",
        "papers.html",
    }
    assert main(command) == 0
    assert "already measured" in capsys.readouterr().out
    assert [(id_, data, str(root)) for id_, data, root in measured] == [
        (ARTEFACT.id, str(tmp_path / "texts"), "runs")
    ]
    assert main([*command, "--again"]) == 0
    (folder / "example.change.json").write_text("{")
    assert main(command) == 0
    assert len(measured) == 3


@pytest.mark.slow
def test_several_go_on_past_one_that_fails(measured, capsys, monkeypatch):
    monkeypatch.setenv("NORMLAB_DATA", "given")
    with pytest.raises(SystemExit) as stopped:
        main(["papers", "reproduce", FAILING.id, "example"])
    assert stopped.value.code == 1
    reason, counted = [
        line.removeprefix("normlab: ")
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("normlab: ")
    ]
    assert reason == REASON
    assert counted.split()[0] == "1"
    assert counted.endswith(f": {FAILING.id}")
    assert [(id_, data) for id_, data, _ in measured] == [(FAILING.id, "given"), (ARTEFACT.id, "given")]


@pytest.mark.slow
def test_debugging_shows_where_it_comes_from_and_goes_on(measured, capsys, monkeypatch):
    monkeypatch.setenv("NORMLAB_DEBUG", "1")
    with pytest.raises(SystemExit):
        main(["papers", "reproduce", "example"])
    assert "Traceback" in capsys.readouterr().err
    assert [id_ for id_, _, _ in measured] == [ARTEFACT.id, FAILING.id]


def test_a_page_that_cannot_be_written_is_a_failure(measured, capsys, monkeypatch):
    assert main(["papers", "reproduce", ARTEFACT.id]) == 0

    def full(*_):
        raise UserError("the disk is full")

    monkeypatch.setattr("normlab.report.reproduction.write_reproduction_page", full)
    with pytest.raises(SystemExit) as stopped:
        main(["papers", "reproduce", ARTEFACT.id])
    assert stopped.value.code == 1
    assert len(measured) == 1


def test_tables_alone_have_no_list_of_findings_and_commands_see_the_same_results(measured, capsys):
    assert main(["papers", ARTEFACT.id, FAILING.id]) == 0
    assert "finding" not in capsys.readouterr().out
    assert main(["papers", "show", ARTEFACT.id, "--runs", "my runs"]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    assert command == f"normlab papers reproduce {ARTEFACT.id} --runs 'my runs'"


@pytest.mark.slow
def test_those_without_a_study_are_left_out_of_several_and_refused_alone(measured, capsys):
    with pytest.raises(SystemExit):
        main(["papers", "reproduce", "all"])
    assert [id_ for id_, _, _ in measured] == [ARTEFACT.id, FAILING.id]
    with pytest.raises(SystemExit):
        main(["papers", "reproduce", BARE.id])
    assert BARE.id in capsys.readouterr().err
    assert main(["papers", "reproduce"]) == 2
    assert "papers reproduce" in capsys.readouterr().err
    assert main(["papers", "reproduce", "other"]) == 2
    assert re.search(r"\bother\b.* example\.change", capsys.readouterr().err)


def test_a_scale_without_trainings_is_refused(capsys):
    assert main(["papers", "reproduce", "xiong2020.lemma1", "--scale", "paper"]) == 2
    assert re.search(r"--scale .*\bpaper\b.* xiong2020\.lemma1", capsys.readouterr().err)
    assert main(["papers", "reproduce", "xiong2020.fig2a", "--budget", "soon"]) == 2
    assert re.search(r"--budget .*'soon'.* 2h", capsys.readouterr().err)


@pytest.mark.slow
def test_what_the_budget_leaves_is_said_and_measured_by_the_same_command(measured, capsys):
    main(["papers", "reproduce", ARTEFACT.id, "--budget", "0s"])
    (said,) = [line for line in capsys.readouterr().out.splitlines() if ARTEFACT.id in line]
    assert measured == []
    main(["papers", "reproduce", ARTEFACT.id, "--budget", "1h"])
    assert said not in capsys.readouterr().out
    assert [id_ for id_, *_ in measured] == [ARTEFACT.id]


@pytest.mark.slow
def test_a_finding_stands_for_its_tables_and_figures(measured, capsys, monkeypatch):
    monkeypatch.setattr(papers, "ARTEFACTS", {"apx.claims": BARE, "xiong2020.fig2a": PLAIN})
    main(["papers", "reproduce", "x2"])
    assert [id_ for id_, *_ in measured] == [PLAIN.id]


@pytest.mark.slow
def test_the_runs_that_were_planned_for_a_finding_are_trained_once(measured, capsys, monkeypatch, tmp_path):
    regime = tmp_path / "runs/toy/regime.toml"
    regime.parent.mkdir(parents=True)
    regime.write_text(TOY, encoding="utf-8")
    planned = [read_experiment(tmp_path / "runs", "toy", CONFIGS)]
    monkeypatch.setattr("normlab.papers.experiments.planned_for", lambda *_: planned)
    monkeypatch.setattr("normlab.report.papers.write_papers_page", lambda *_: "papers.html")
    monkeypatch.setattr(papers, "ARTEFACTS", {"xiong2020.fig2a": PLAIN})
    command = ["papers", "reproduce", "X2"]
    main([*command, "--budget", "0s"])
    assert "toy: 2 of 2 " in capsys.readouterr().out
    main(command)
    assert "toy: 0 of 2 " in capsys.readouterr().out
    rows = list(kept(regime.with_name(RUNS_FILE)).values())
    assert [(row["cell"], row["seed"]) for row in rows] == [("post", 5), ("pre", 5)]
    monkeypatch.setattr("normlab.papers.experiments.train", None)
    main(command)
    assert "toy: 0 of 2 " in capsys.readouterr().out


def test_runs_are_planned_for_a_finding_only_if_regimes_that_it_names_lack_some():
    book = read_book()
    for known in known_findings().values():
        review = reviewed(known, book)
        pieces = (*review.evidence, *review.left_out)
        planned = {experiment.name for experiment in planned_for([known], book, CONFIGS)}
        assert planned <= {source for piece in pieces for source in piece.regime.sources}, known.id
        # a regime may lack runs of cells that the finding does not read
        assert planned or not any(piece.missing for piece in pieces), known.id


def test_what_has_no_study_names_a_few_that_have_one(capsys, monkeypatch):
    monkeypatch.setattr("normlab.papers.experiments.planned_for", lambda *_: [])
    assert main(["papers", "reproduce", "A1"]) == 2
    said = capsys.readouterr().err
    assert "A1" in said
    assert "apx.blocks" in said
    assert sum(id_ in said for id_ in papers.ARTEFACTS) <= 5


@pytest.mark.parametrize("columns", [60, 80, COLUMNS - 1, COLUMNS])
def test_ids_answers_and_counts_are_whole_on_a_narrow_terminal(capsys, monkeypatch, tmp_path, columns):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(terminal, "console", lambda: terminal.PlainConsole(width=columns))
    assert main(["papers", "liu2020"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    for id_, review in REVIEWED.items():
        if review.finding.paper != "liu2020":
            continue
        (line,) = [line for line in lines if line.startswith(f"{id_} ")]
        counts = "/".join(str(review.counts[reading]) for reading in ("agrees", "contradicts", "open"))
        assert f" {phrases.answer_in_short(review)} " in line
        assert counts in line.split()
        assert (phrases.beside_expected(review) in line) == (columns == COLUMNS)
        assert len(line) <= columns


@pytest.fixture
def own_paper(capsys, monkeypatch, tmp_path):
    """Write a paper of one's own with a regime and its runs; return a function that types a command and
    returns its exit code, what it printed and its errors. The paper is known only while a command runs.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "toy").mkdir(parents=True)

    def typed(*words: str, paper: str, regime: str = REGIME, seeds: tuple[int, ...] = (1, 2, 3)):
        (tmp_path / "doe2026.toml").write_text(paper.replace('"mean_bleu"', '"score"'))
        (tmp_path / "runs" / "toy" / "regime.toml").write_text(regime)
        rows = [
            {"cell": cell, "seed": seed, "run": f"{cell}{seed}", "outcome": "trained", "dev": [],
             "train": [], "test": {"bleu": level + seed, "nll": 3.0}}
            for cell, level in (("pre", 30.0), ("post", 20.0))
            for seed in seeds
        ]  # fmt: skip
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (tmp_path / "runs" / "toy" / "runs.jsonl").write_text(lines)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(finding, "FILES", [*finding.FILES])
            patch.setattr(regimes, "FILES", [*regimes.FILES])
            before = dict(papers.PAPERS)
            try:
                code = main(["papers", *words])
            finally:
                papers.PAPERS.clear()
                papers.PAPERS.update(before)
        return code, *capsys.readouterr()

    return typed


OWN = ["--paper", "doe2026.toml"]
WAITING = PAPER.replace('"supported"', '"not tested here"\nneeds = "runs"')
"""A paper whose runs are planned."""


@pytest.mark.parametrize("words", [["E1"], ["apx", "doe2026"], ["X2"], ["doe2026", "--json"]], ids=" ".join)
def test_an_answer_of_ones_own_that_does_not_follow_is_bad_input_once_all_is_shown(own_paper, words):
    code, shown, err = own_paper("show", *words, *OWN, paper=PAPER)
    assert (code, err) == (0, "")
    wrong = PAPER.replace('"supported"', '"contradicted"').replace('margin = "25 BLEU"', "")
    code, still_shown, err = own_paper("show", *words, *OWN, paper=wrong)
    assert code == 2
    assert len(still_shown.splitlines()) == len(shown.splitlines())
    first, second = err.splitlines()
    assert re.search(r"doe2026\.toml: E1: .*'contradicted'.*'supported'", first)
    assert re.search(r"doe2026\.toml: E1: .*25", second)


@pytest.mark.slow
def test_the_command_that_is_recommended_for_missing_runs_trains_them(own_paper, monkeypatch):
    monkeypatch.setattr("normlab.report.papers.write_papers_page", lambda *_: "papers.html")
    code, shown, _ = own_paper("show", "E1", *OWN, paper=WAITING, regime=TOY, seeds=())
    assert code == 0
    command = shlex.split(shown.splitlines()[-1].partition(": ")[2])
    assert command[:2] == ["normlab", "papers"]
    code, said, _ = own_paper(*command[2:], "--budget", "0s", paper=WAITING, regime=TOY, seeds=())
    assert code == 0
    assert "toy: 2 of 2 " in said


def test_runs_that_wait_for_a_pilot_are_not_recommended(own_paper):
    regime = TOY.replace('"ready"', '"pilot first"')
    code, shown, _ = own_paper("show", "E1", *OWN, paper=WAITING, regime=regime, seeds=())
    assert code == 0
    assert "reproduce" not in shown
    assert re.search(r"\btoy\b.*\bpilot\b", shown.splitlines()[-1])


def test_runs_that_are_planned_and_cannot_be_trained_are_not_recommended(own_paper):
    regime = TOY.replace('"demo"', '"demos"')
    code, shown, _ = own_paper("show", "E1", *OWN, paper=WAITING, regime=regime, seeds=())
    assert code == 0
    assert "reproduce" not in shown
    assert "'demos'" in shown.splitlines()[-1]


def test_a_long_name_of_ones_own_is_cut_and_takes_no_column_away(own_paper, monkeypatch):
    monkeypatch.setattr(terminal, "console", lambda: terminal.PlainConsole(width=COLUMNS))
    paper = PAPER.replace("Pre-LN is better", "Pre-LN is better " + 10 * "by far ", 1)
    _, shown, _ = own_paper("show", "apx", "doe2026", *OWN, paper=paper)
    (line,) = [line for line in shown.splitlines() if line.startswith("E1 ")]
    assert "… supported" in line
    assert "+10.0 BLEU" in line


@pytest.mark.slow
def test_results_that_disagree_about_a_run_are_named(measured, capsys, monkeypatch, tmp_path):
    both = [replace(PLAIN, id=id_) for id_ in ("example.one", "example.two")]
    monkeypatch.setattr(papers, "ARTEFACTS", {a.id: a for a in both})
    for artefact, bleu in zip(both, (20.25, 21.5), strict=True):
        rows = [{"cell": "post", "seed": 1, "run": "0123abcd4567", "bleu": bleu}]
        write_reproduction(replace(found(artefact), tables={"runs": rows}), tmp_path / "runs" / "papers")
    assert main(["papers", "all"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for named in ("0123abcd4567", "bleu", "20.25", "21.5", "example.one example.two --again"):
        assert named in said


@pytest.mark.slow
def test_what_is_missing_is_said_once_for_the_artefacts_that_lack_it(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("NORMLAB_DATA", str(tmp_path))
    with pytest.raises(SystemExit):
        main(
            [
                "papers",
                "reproduce",
                "xiong2020.fig2a",
                "xiong2020.fig6",
                "--scale",
                "paper",
                "--runs",
                str(tmp_path),
            ]
        )
    err = capsys.readouterr().err
    assert err.count("iwslt14.de-en lacks train.de") == 1
    assert "normlab: xiong2020.fig2a, xiong2020.fig6: " in err


@pytest.mark.slow
@pytest.mark.parametrize("given", [[], ["--device", "cuda"]])
def test_an_accelerator_that_is_not_there_is_refused_before_a_run_begins(
    capsys, monkeypatch, tmp_path, given
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    trained = replace(LARGE, trainings={"gpu": LARGE.trainings["laptop"]})
    monkeypatch.setitem(papers.ARTEFACTS, LARGE.id, trained)
    assert main(["papers", "reproduce", LARGE.id, "--scale", "gpu", "--runs", str(tmp_path), *given]) == 2
    assert re.search(r"\bcuda\b.* --device cpu", capsys.readouterr().err)
    assert not list(tmp_path.glob("*/status.json"))


@pytest.mark.slow
def test_a_result_of_another_scale_is_listed_shown_and_named(measured, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(papers.ARTEFACTS, LARGE.id, LARGE)
    result = replace(found(LARGE), scale="gpu")
    write_reproduction(result, tmp_path / "runs" / "papers")
    assert main(["papers", LARGE.id]) == 0
    said = capsys.readouterr().out
    assert said.startswith("example.large: not run\n")
    assert LARGE.trainings["laptop"].differs in said
    assert "show example.large --scale gpu\n" in said
    assert main(["papers", LARGE.id, "--scale", "gpu"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("example.large: 0 runs so far\n")
    assert LARGE.trainings["gpu"].differs in said
    assert said.endswith("normlab papers reproduce example.large --scale gpu\n")
    assert main(["papers", "--scale", "gpu", "--json"]) == 0
    plain = {one["id"]: one for one in json.loads(capsys.readouterr().out)["artefacts"]}
    assert {id_: one["scale"] for id_, one in plain.items()}[LARGE.id] == "gpu"
    assert plain[ARTEFACT.id]["scale"] == "laptop"
