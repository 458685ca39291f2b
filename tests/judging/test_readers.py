"""Scores are read from the forms that other programs write; what is damaged is refused with a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import normlab
from cases import each
from normlab.errors import UserError
from normlab.judging.naming import change_and_seed
from normlab.judging.run import ScoreOptions, Take
from normlab.judging.scores import read_scores

DATA = Path(__file__).parent / "data"
SCORES = {"base": {"1": 3.312, "2": 3.294, "3": 3.301}, "qknorm": {"1": 3.214, "2": 3.187, "3": None}}
"""What every form below holds; the third run of qknorm diverged or failed."""
LOSS = r"val_loss: ([0-9.]+)"
FORMS = {
    "long.csv": ScoreOptions(),
    "wide_by_seed.csv": ScoreOptions(),
    "wide_by_change.tsv": ScoreOptions(),
    "scores.jsonl": ScoreOptions(metric="loss", by=("variant",)),
    "logs": ScoreOptions(metric=LOSS),
    "nanogpt": ScoreOptions(),
    "huggingface": ScoreOptions(),
    "lightning": ScoreOptions(metric="val_loss"),
    "tensorboard_csv": ScoreOptions(name=r"run-(?P<change>.+)-seed(?P<seed>\d+)-tag"),
    "tensorboard_json": ScoreOptions(),
    "wandb_runs.csv": ScoreOptions(metric="val_loss"),
    "wandb_chart.csv": ScoreOptions(),
    "wandb_runs.json": ScoreOptions(metric="val/loss", by=("config.qk_norm",)),
    "results.tsv": ScoreOptions(metric="val_bpb", by=("description",)),
}


NAMES = {"nanogpt": ("out-base", "out-qknorm"), "wandb_runs.json": ("False", "True")}
"""What the changes are called, where it is not base and qknorm."""


def read(source, options, names=("base", "qknorm")):
    """The scores by change and seed."""
    scores = read_scores(source, options)
    assert scores.changes == names
    by_change = [{run.seed: run.score for run in scores.of(change)} for change in names]
    return dict(zip(SCORES, by_change, strict=False))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_scores(form):
    assert read(DATA / form, FORMS[form], NAMES.get(form, ("base", "qknorm"))) == SCORES


SHEETS = {
    "decimal comma": "change;seed;loss\nbase;1;3,312\nbase;2;3,294\nqknorm;1;3,214\nqknorm;2;3,187\n",
    "named separator": (
        "sep=;\nchange;seed;loss\nbase;1;3.312\nbase;2;3.294\nqknorm;1;3.214\nqknorm;2;3.187\n"
    ),
    "empty rows and columns": (
        "change,seed,loss,\n,,,\nbase,1,3.312,\nbase,2,3.294,\nqknorm,1,3.214,\nqknorm,2,3.187,\n,,,\n"
    ),
    "a column of means": "change,seed 1,seed 2,mean\nbase,3.312,3.294,3.3\nqknorm,3.214,3.187,3.2\n",
    "a column of notes": (
        "change,seed,loss,notes\nbase,1,3.312,\nbase,2,3.294,slow\nqknorm,1,3.214,\nqknorm,2,3.187,\n"
    ),
}


@pytest.mark.parametrize("form", SHEETS)
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_tables_are_read_as_spreadsheets_write_them(tmp_path, form, encoding):
    path = tmp_path / "scores.csv"
    path.write_text(SHEETS[form], encoding=encoding)
    found = read(path, ScoreOptions())
    assert found == {"base": {"1": 3.312, "2": 3.294}, "qknorm": {"1": 3.214, "2": 3.187}}


def test_a_word_among_scores_is_named_with_its_line(tmp_path):
    path = tmp_path / "scores.csv"
    path.write_text("change,seed,loss\n\nbase,1,3.3\nbase,2,N/A\n")
    with pytest.raises(UserError, match=r"line 4: .*'N/A'"):
        normlab.judge(path)


def test_the_ends_of_a_band_are_no_curves(tmp_path):
    path = tmp_path / "chart.csv"
    path.write_text("Step,base-s1 - loss__MIN,base-s1 - loss__MAX\n0,3.1,3.3\n1,3.0,3.2\n")
    with pytest.raises(UserError, match="--metric"):
        read_scores(path, ScoreOptions())


def test_what_is_typed_next_is_quoted_for_the_shell(tmp_path):
    path = tmp_path / "scores.csv"
    path.write_text("change,seed,train loss,val loss\nbase,1,3.3,3.4\n")
    with pytest.raises(UserError, match="'val loss'"):
        normlab.judge(path)


def test_event_files_of_tensorboard_give_the_same_scores(tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    for change, by_seed in SCORES.items():
        for seed, score in by_seed.items():
            with SummaryWriter(str(tmp_path / change / f"seed_{seed}")) as writer:
                writer.add_scalar("val/loss", 3.7, 50)
                writer.add_scalar("val/loss", float("nan") if score is None else score, 100)
    found = read(tmp_path, ScoreOptions(metric="val/loss"))
    assert found["qknorm"].pop("3") is None
    for change, by_seed in found.items():
        assert by_seed == pytest.approx({seed: SCORES[change][seed] for seed in by_seed}, rel=1e-6)


def test_python_gives_the_same_scores():
    rows = [
        {"change": change, "seed": seed, "loss": score}
        for change, by_seed in SCORES.items()
        for seed, score in by_seed.items()
    ]
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    lists = {change: list(by_seed.values()) for change, by_seed in SCORES.items()}
    table = pandas.DataFrame(rows)
    by_seed = {change: pandas.Series(scores).iloc[::-1] for change, scores in SCORES.items()}
    for given in (
        *(rows, table, polars.DataFrame(rows), lists, SCORES, by_seed),
        *(table.set_index(["change", "seed"]), table.set_index(["change", "seed"])["loss"]),
    ):
        assert read(given, ScoreOptions()) == SCORES


def test_a_pivoted_data_frame_is_a_wide_table():
    pandas = pytest.importorskip("pandas")
    rows = [{"change": c, "seed": s, "loss": SCORES[c][s]} for c in SCORES for s in ("1", "2")]
    table = pandas.DataFrame(rows).astype({"seed": int})
    expected = {change: {"1": scores["1"], "2": scores["2"]} for change, scores in SCORES.items()}
    for index, columns in (("change", "seed"), ("seed", "change")):
        assert read(table.pivot(index=index, columns=columns, values="loss"), ScoreOptions()) == expected


def test_runs_that_diverged_and_runs_that_crashed_are_told_apart():
    diverged = read_scores(DATA / "logs", ScoreOptions(metric=LOSS)).of("qknorm")[2]
    crashed = read_scores(DATA / "results.tsv", FORMS["results.tsv"]).of("qknorm")[2]
    assert (diverged.outcome, crashed.outcome) == ("diverged", "failed")
    assert "crash" in crashed.reason


def test_the_best_and_a_mean_of_the_last_may_be_taken(tmp_path):
    (tmp_path / "a_seed1.log").write_text("val_loss: 3.0\nval_loss: 2.0\nval_loss: 2.5\n")
    options = [("last", False, 2.5), ("best", False, 2.0), ("best", True, 3.0), ("mean:2", True, 2.25)]
    for how, higher, score in options:
        scores = read_scores(tmp_path, ScoreOptions(metric=LOSS, take=Take.of(how), higher_is_better=higher))
        assert scores.values("a").tolist() == [score]


@each("how", ["mean", "mean:0", "first", ""])
def test_another_word_for_what_to_take_is_refused(how):
    with pytest.raises(UserError, match=r"last, best, .*mean:5"):
        Take.of(how)


@each(
    ("name", "change", "seed"),
    [
        ("qknorm_seed3.log", "qknorm", "3"),
        ("lr=0.01/seed=2/train.log", "lr=0.01", "2"),
        ("base/2/stdout", "base", "2"),
        ("base-12.txt", "base", "12"),
        ("12l-model-seed007.out", "12l-model", "7"),
        ("seed4/post_norm.log", "post_norm", "4"),
        ("base.log", "base", None),
        ("run.7", "run", "7"),
        ("muon/3f1a2b4c-0d1e-4f5a-8b6c-0123456789ab.txt", "muon", None),
        ("3f1a2b4c-0d1e-4f5a-8b6c-abc123456789.txt", "3f1a2b4c-0d1e-4f5a-8b6c-abc123456789", None),
        ("base/9d8e7f61.log", "base/9d8e7f61", None),
        ("base/20250412.log", "base", "20250412"),
    ],
)
def test_names_of_files_say_change_and_seed(name, change, seed):
    assert change_and_seed(name) == (change, seed)


def test_seeds_that_are_not_named_are_numbered_and_that_is_said():
    judgement = normlab.judge(DATA / "results.tsv", metric="val_bpb", by=["description"])
    assert judgement.seeds_named is False
    assert judgement.seeds == ("1", "2", "3")


DAMAGED = {
    "empty.csv": "",
    "heading.csv": "change,seed,loss\n",
    "short_row.csv": "change,seed,loss\nbase,1\n",
    "long_row.csv": "change,seed,loss\nbase,1,2.0,3.0\n",
    "open_quote.csv": 'change,seed,loss\n"base,1,2.0\n',
    "words.csv": "change,seed,loss\nbase,1,low\n",
    "twice.csv": "change,seed,loss\nbase,1,2.0\nbase,1,2.1\n",
    "two_columns_of_one_name.csv": "change,seed,seed\nbase,1,2\n",
    "two_scores.csv": "change,seed,loss,bpb\nbase,1,2.0,1.0\n",
    "two_changes.csv": "model,data,seed,loss\na,b,1,2.0\n",
    "title.csv": "My runs,,\nchange,seed,loss\nbase,1,2.0\n",
    "no_change.csv": "seed,loss\n1,2.0\n1,2.1\n",
    "no_numbers.csv": "a,b\nx,y\n",
    "seed_left_out.csv": "change,seed,loss\nbase,1,2.0\nbase,,2.1\n",
    "nul.csv": "change,seed,loss\nbase,1,\0\n",
    "cut.jsonl": '{"change": "a", "seed": 1, "loss": 2.0}\n{"change": "a", "se',
    "no_objects.jsonl": "[1, 2]\n3\n",
    "nothing.json": "[]",
    "page.html": "<html></html>",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_table_is_refused(tmp_path, name):
    path = tmp_path / name
    path.write_text(DAMAGED[name])
    with pytest.raises(UserError) as refused:
        normlab.judge(path)
    assert name in str(refused.value)


FOLDERS = {
    "nothing": {},
    "another kind": {"a.png": b"x"},
    "no match": {"a_seed1.log": b"loss 3\n"},
    "nothing printed": {"a_seed1.log": b"", "a_seed2.log": b""},
    "cut trainer state": {"a_seed1/trainer_state.json": b'{"log_history": [{"eval'},
    "no history": {"a_seed1/trainer_state.json": b"{}"},
    "no such key": {"a_seed1/trainer_state.json": json.dumps({"log_history": [{"loss": 1.0}]}).encode()},
    "one seed twice": {"a_seed1.log": b"x", "logs/a_seed1.log": b"x"},
    "cut metrics": {"a/version_0/metrics.csv": b"epoch,step,val_loss\n0,1,2.0\n1,"},
    "no text": {"a_seed1.log": b"\xff\xfe\x00"},
    "damaged events": {"a/1/events.out.tfevents.1.host": b"garbage"},
    "damaged export": {"a1.json": b"[[1, 2, 3], [4]]"},
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_damaged_folder_is_refused(tmp_path, name):
    for place, content in FOLDERS[name].items():
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    with pytest.raises(UserError) as refused:
        normlab.judge(tmp_path)
    assert str(tmp_path) in str(refused.value)


@each(
    "options",
    [
        {"metric": "val_los"},
        {"metric": "val_loss("},
        {"metric": "(a)(b)"},
        {"by": ["chang"]},
        {"seed_column": "sed"},
        {"baseline": "bas"},
        {"margin": -1.0},
        {"mragin": 1.0},
    ],
)
def test_what_is_asked_for_must_be_there(options):
    source = DATA / ("logs" if "(" in options.get("metric", "") else "long.csv")
    with pytest.raises(UserError):
        normlab.judge(source, **options)


@each("scores", [3, "nowhere.csv", {"base": 3.0}, {"base": ["x"]}, [1, 2], {}, []])
def test_what_are_no_scores_is_refused(scores):
    with pytest.raises(UserError):
        normlab.judge(scores)
