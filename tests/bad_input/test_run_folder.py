"""Damaged run folders: the facts of the answer, and nothing else is touched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bad_input.damage import DAMAGED, MODEL, before
from bad_input.prompt import GOOD, copy_of, lacking, refused
from cases import each
from normlab.cli.main import main
from normlab.lab.runs import RunFolder


@pytest.mark.slow
@each(("words", "damage", "facts"), DAMAGED.values(), ids=list(DAMAGED))
def test_a_damaged_run_is_named(place, trained, capsys, words, damage, facts):
    run = copy_of(trained)
    damage(run)
    said = refused([word.replace("{run}", str(run)) for word in words], capsys)
    assert not lacking(said, facts, run=str(run), id=run.name)
    assert not Path("executed").exists()


def test_a_run_without_status_goes_on_from_its_checkpoint(run, trained):
    (run / "status.json").unlink()
    assert main(GOOD) == 0
    assert (run / MODEL).read_bytes() == (trained / run.name / MODEL).read_bytes()


@pytest.mark.slow
def test_a_damaged_line_that_was_deleted_stops_nothing(run, trained, capsys):
    before("metrics.jsonl", "rubbish")(run)
    assert "metrics.jsonl" in refused(GOOD, capsys)
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().partition("\n")[2])
    assert main(GOOD) == 0
    assert (run / MODEL).read_bytes() == (trained / run.name / MODEL).read_bytes()


def test_other_hardware_than_before_is_told(run, capsys):
    """In the terminal, in the log and in the status, which the page shows."""
    status = RunFolder(run).status()
    RunFolder(run).set_status(replace(status, hardware="An older CPU, 2 threads, torch 1.0"))
    assert main(GOOD) == 0
    sentence = "goes on from step 4 on "
    assert not lacking(
        capsys.readouterr().err, f"{sentence} | An older CPU, 2 threads, torch 1.0 | bit for bit"
    )
    assert sentence in RunFolder(run).log.read_text()
    assert RunFolder(run).status().hardware == (
        f"An older CPU, 2 threads, torch 1.0; from step 5 on {status.hardware}"
    )


def test_the_same_hardware_is_not_worth_a_word(run, capsys):
    before = RunFolder(run).status().hardware
    assert main(GOOD) == 0
    assert before not in capsys.readouterr().err
    assert RunFolder(run).status().hardware == before
