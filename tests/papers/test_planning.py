"""Plans of trainings: each distinct run once, the most informative first, and none twice."""

import re
from dataclasses import replace

import pytest

from cases import each
from normlab.base.units import seconds_of
from normlab.errors import UserError
from normlab.lab.config import DataConfig, run_id
from normlab.lab.runs import RunFolder, Status
from normlab.papers import Artefact, planning
from normlab.papers.bases import LAPTOP
from normlab.papers.planning import plan, train
from normlab.papers.studies import TRAININGS
from normlab.papers.trainings import Trainings, changed

BASE = replace(
    LAPTOP,
    data=DataConfig(builtin="dates-de-en", builtin_pairs=300, vocab_size=200),
    model=replace(LAPTOP.model, dim=16, ffn_dim=16, heads=2, encoder_layers=1, decoder_layers=1),
    train=replace(LAPTOP.train, steps=2, max_tokens=256, validate_every_steps=2, dev_decode_sentences=4),
)


def artefact(name, cells, seeds=2):
    return Artefact(
        id=f"p.{name}",
        paper="P 2001",
        shows="A table.",
        published={},
        study=TRAININGS,
        trainings={"laptop": Trainings(BASE, cells, seeds, "It is small.")},
    )


POST, PRE = {"recipe": "post"}, {"recipe": "pre"}
WIDE = artefact("wide", {"post": POST, "pre": PRE, "admin": {"recipe": "admin"}})
NARROW = artefact("narrow", {"post again": POST})


def done(folder):
    folder.set_status(Status("done"))


def test_a_shared_run_is_planned_once_and_the_least_work_comes_first(tmp_path):
    found = plan([WIDE, NARROW], tmp_path)
    assert len(found.todo) == 6
    recipes = [(config.recipe, config.seeds.init) for config in found.todo.values()]
    assert recipes[:2] == [("post", 1), ("post", 2)], "the artefact with the fewest missing runs"
    assert recipes[2:] == [("pre", 1), ("admin", 1), ("pre", 2), ("admin", 2)], "every cell once, then again"
    assert found.runs("p.narrow").keys() < found.runs("p.wide").keys()


def test_a_run_that_is_done_here_or_kept_is_not_planned(tmp_path, monkeypatch):
    monkeypatch.setattr(planning.results, "RESULTS", tmp_path / "results")
    first, second = plan([NARROW], tmp_path / "runs").todo.values()
    here, kept = tmp_path / "runs" / run_id(first), tmp_path / "results" / "some" / run_id(second)
    for path, config in ((here, first), (kept, second)):
        done(RunFolder.create(path, config))
    found = plan([NARROW], tmp_path / "runs")
    assert not found.todo
    assert [folder.path for folder in found.cells["p.narrow"]["post again"]] == [here, kept]
    assert not found.open_runs("p.narrow")


@pytest.mark.slow
def test_some_seeds_are_enough_where_the_trainings_say_so(tmp_path):
    def planned(least):
        some = replace(WIDE.trainings["laptop"], seeds=3, least=least)
        return plan([replace(WIDE, trainings={"laptop": some})], tmp_path)

    for seed in (1, 2):
        for config in planned(0).todo.values():
            if config.seeds.init == seed and (seed, config.recipe) != (2, "admin"):
                done(RunFolder.create(tmp_path / run_id(config), config))
    assert planned(0).whole("p.wide") == planned(2).whole("p.wide") == {}
    first = planned(1).whole("p.wide")
    assert {cell: len(some) for cell, some in first.items()} == {"post": 1, "pre": 1, "admin": 1}
    assert len(planned(1).open_runs("p.wide")) == 4
    ended = []
    train(planned(1), tmp_path, 1, ended.append, until=0.0)
    assert ended == ["p.wide"]


def test_the_cell_that_cannot_be_built_is_named(tmp_path):
    with pytest.raises(UserError, match=r"p\.wrong, odd: .*pots.*'post'"):
        plan([artefact("wrong", {"odd": {"recipe": "pots"}})], tmp_path)
    with pytest.raises(UserError, match=r"'optim\.rate'"):
        changed(BASE, {"optim.rate": 1.0})


def test_an_artefact_whose_text_is_not_there_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.delenv("NORMLAB_DATA", raising=False)
    own = replace(BASE, task="language_model", data=DataConfig(train_text="$NORMLAB_DATA/x", dev_text="y"))
    own = replace(own, model=replace(own.model, encoder_layers=0))
    lacking = replace(NARROW, id="p.lacking", trainings={"laptop": Trainings(own, {"post": POST})})
    found = plan([lacking, NARROW], tmp_path)
    assert "export NORMLAB_DATA" in found.without_text["p.lacking"]
    assert found.cells.keys() == {"p.narrow"}
    assert len(found.todo) == 2


@pytest.mark.slow
def test_a_budget_starts_no_run_that_would_not_end_and_the_rest_goes_on(tmp_path):
    told, ended = [], []
    train(plan([NARROW], tmp_path), tmp_path, 1, ended.append, until=0.0, log=told.append)
    assert len(told) <= 1
    assert ended == []
    assert not train(plan([NARROW], tmp_path), tmp_path, 1, ended.append, log=told.append)
    assert ended == ["p.narrow"]
    assert len(told) == 2, "no run is trained twice"
    train(plan([NARROW], tmp_path), tmp_path, 1, ended.append, log=told.append)
    assert (ended, len(told)) == (["p.narrow"] * 2, 2)


def test_a_plan_is_trained_by_the_workers_of_its_place(tmp_path):
    asked = []

    class Elsewhere:
        def __init__(self, root):
            assert root == tmp_path

        def train(self, config):
            asked.append(run_id(config))
            return "there is no room"

        def alive(self):
            return True

        def interrupt(self):
            pass

        close = interrupt

    found = plan([NARROW], tmp_path)
    failed = train(found, tmp_path, 1, lambda id_: None, start=Elsewhere)
    assert asked == list(found.todo)
    assert failed == dict.fromkeys(asked, "there is no room")


@each(
    ("text", "seconds"),
    [("2h", 7200.0), ("90min", 5400.0), ("1h 30min", 5400.0), ("1.5 h", 5400.0), ("", None)],
)
def test_durations(text, seconds):
    assert seconds_of(text, "--budget") == seconds


@each("text", ["2", "h", "2 hours", "1..5h", "-2h", "2h x", ".h"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(UserError, match=re.escape(repr(text))):
        seconds_of(text, "--budget")
