"""Levels of proposals, and what a ledger remembers of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cases import each
from judging.test_experiment import BASE, METRIC, SCRIPT, begun
from judging.test_judge import VALIDATOR
from normlab.cli.main import main
from normlab.errors import UserError
from normlab.judging.experiment import Request
from normlab.judging.experimenter import experiment
from normlab.judging.ledger import Ledger, level_of
from normlab.judging.sequential import MOST_SEEDS
from normlab.judging.statistics import LEVEL

FOLDER = Path("ledger")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current folder with a training script."""
    shutil.copy(SCRIPT, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def propose(change, **how):
    request = {"jobs": 2, "folder": FOLDER, "ledger": True, "fresh_seeds": 3, **how}
    return experiment(Request(BASE, f"{BASE} {change}", METRIC, **request))


def seeds_of(here, *, gain):
    """The seeds with which the script has run at a gain."""
    words = [line.split() for line in (here / "ran.txt").read_text().splitlines()]
    return {int(seed) for _, of_run, seed in words if float(of_run) == gain}


def test_levels_of_proposals_without_a_keep_add_up_to_the_level():
    levels = [level_of(number, []) for number in range(1, 2001)]
    assert levels == sorted(levels, reverse=True)
    assert 0.5 * LEVEL < sum(levels) < LEVEL


def test_every_keep_after_the_first_earns_as_much_again():
    assert level_of(20, [5]) == level_of(20, [])
    assert level_of(20, [5, 19]) == pytest.approx(level_of(20, []) + level_of(1, []))
    assert level_of(20, [5, 18, 19]) == pytest.approx(level_of(20, [5, 19]) + level_of(2, []))


@pytest.mark.slow
def test_proposals_are_entered_with_their_levels_and_a_keep_is_measured_again(here):
    kept, discarded = propose("--gain=0.08"), propose("--gain=-0.08")
    assert (kept.verdict, discarded.verdict) == ("keep", "discard")
    ledger = Ledger.read(FOLDER)
    assert [p.verdict for p in ledger.proposals] == ["keep", "discard"]
    assert [p.level for p in ledger.proposals] == [level_of(1, []), level_of(2, [1])]
    first, second = ledger.proposals
    assert (first.fresh_seeds, second.fresh_seeds) == (3, 0)
    assert first.measured.value == pytest.approx(0.08, abs=0.03)
    assert seeds_of(here, gain=0.08) >= {MOST_SEEDS + 1, MOST_SEEDS + 2, MOST_SEEDS + 3}
    assert max(seeds_of(here, gain=-0.08)) <= MOST_SEEDS
    assert ledger.lucky == pytest.approx(first.level + second.level)


@pytest.mark.slow
def test_the_same_proposal_keeps_its_number_and_level_and_runs_nothing(here):
    first = propose("--gain=0.08")
    number = begun(here)
    again = propose("--gain=0.08")
    assert begun(here) == number
    assert len(again.ledger.proposals) == 1
    assert (again.verdict, again.fresh) == (first.verdict, first.fresh)


@pytest.mark.slow
def test_a_proposal_that_was_interrupted_has_spent_its_level(here):
    answer = propose("--gain=0.0001", budget_s=0.0)
    assert answer.verdict == "undecided"
    assert propose("--gain=0.08").ledger.proposals[1].level == level_of(2, [])


@pytest.mark.slow
def test_another_question_about_the_same_change_is_another_proposal(here):
    propose("--gain=0.0001", max_seeds=3)
    for number, asked in enumerate([{"margin": 0.05}, {"first_seed": 50}], start=2):
        ledger = propose("--gain=0.0001", max_seeds=3, **asked).ledger
        assert [p.level for p in ledger.proposals] == [level_of(n, []) for n in range(1, number + 1)]
    assert len(propose("--gain=0.0001", max_seeds=4).ledger.proposals) == 3, "more seeds ask the same"


@pytest.mark.slow
@each("asked", [{"take": "best"}, {"higher_is_better": True}, {"metric": "val_loss: +([0-9.]+)"}])
def test_a_ledger_has_one_score(here, asked):
    propose("--gain=-0.08")
    number = begun(here)
    request = {"metric": METRIC, "folder": FOLDER, "ledger": True, **asked}
    with pytest.raises(UserError, match="another --ledger"):
        experiment(Request(BASE, f"{BASE} --gain=0.08", **request))
    assert begun(here) == number


@pytest.mark.slow
def test_a_command_that_does_not_work_spends_no_level(here):
    for broken in ("--crashes=1,2", "--unknown"):
        with pytest.raises(UserError):
            propose(broken)
    assert propose("--gain=0.08").ledger.proposals[0].level == level_of(1, [])


@each("content", ["", "[]", "{}"])
def test_a_damaged_ledger_is_refused(tmp_path, content):
    (tmp_path / "ledger.json").write_text(content)
    with pytest.raises(UserError, match="ledger"):
        Ledger.read(tmp_path)


@pytest.mark.slow
def test_the_ledger_is_shown_with_a_page(here, capsys):
    assert main(["judge", "--ledger", str(here), "--json"]) == 0
    empty = json.loads(capsys.readouterr().out)
    VALIDATOR.validate(empty)
    assert empty["proposals"] == []
    propose("--gain=0.08")
    assert main(["judge", "--ledger", str(FOLDER), "--json"]) == 0
    VALIDATOR.validate(json.loads(capsys.readouterr().out))
    assert main(["judge", "--ledger", str(FOLDER), "--out", "ledger.html"]) == 0
    assert "--gain=0.08" in capsys.readouterr().out
    assert "--gain=0.08" in (here / "ledger.html").read_text(encoding="utf-8")
    assert main(["judge", "--ledger", "nowhere"]) == 2
