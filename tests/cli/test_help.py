"""``--help`` of every command: what it prints, how long it is, and that each option is on a page."""

from __future__ import annotations

import re

import pytest

import help_pages
from cases import each
from normlab.base.io import flag_name
from normlab.cli.main import COMMANDS, main
from normlab.cli.options import ConfigFlags
from normlab.lab.config import Config

MOST_LINES = 50
INSTRUMENTS = ("check", "trial", "transfer", "diagnose", "watch")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
OF_CONFIGURATION = {
    flag_name(name) for section in vars(ConfigFlags.of(Config())).values() for name in vars(section)
}


def printed(capsys, *typed: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(typed)
    assert stopped.value.code == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", help_pages.COLUMNS)


@each("name", [name for name in COMMANDS if name not in help_pages.LONG])
def test_a_page_is_what_is_kept(name, capsys):
    """``python tools/help_pages.py`` writes the pages anew: read what changes."""
    kept = (help_pages.FOLDER / f"{name.replace(' ', '-')}.txt").read_text(encoding="utf-8")
    assert printed(capsys, *name.split(), "--help") == kept


@each("name", INSTRUMENTS)
def test_the_page_of_an_instrument_fits_on_a_screen(name, capsys):
    width = int(help_pages.COLUMNS)
    lines = printed(capsys, name, "--help").splitlines()
    assert sum(max(1, -(-len(line) // width)) for line in lines) <= MOST_LINES


@each("name", [name for name in INSTRUMENTS if name != "watch"])
def test_the_options_of_recipes_have_a_page_of_their_own(name, capsys):
    of_command, of_recipes = printed(capsys, name, "--help"), printed(capsys, name, "--help-recipe")
    assert "--help-recipe" in of_command
    steps = {"--steps"} if name in ("trial", "transfer") else set()  # a trial has steps of its own
    assert set(FLAG.findall(of_command)) & OF_CONFIGURATION == steps
    assert set(FLAG.findall(of_recipes)) >= OF_CONFIGURATION - steps


def test_a_configuration_changes_the_defaults_that_are_shown(capsys):
    demo, other = (
        printed(capsys, "check", "--config", config, "--help-recipe") for config in ("demo", "multi30k")
    )
    assert demo != other


def test_what_stands_after_the_dashes_is_for_the_script(capsys, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    assert main(["check", str(script), "--", "--help"]) == 2
    assert "usage: train.py" in capsys.readouterr().err
