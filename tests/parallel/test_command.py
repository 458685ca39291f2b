"""``normlab check train.py --ranks 2``: the contract for programs, and what is refused."""

from __future__ import annotations

import json
import re
from importlib.resources import files

import jsonschema
import pytest

from normlab.cli.main import main
from normlab.report import contract
from parallel.planted import SCRIPTS, mistakes

SCHEMA = json.loads(files("normlab.report").joinpath(contract.SCHEMA).read_text(encoding="utf-8"))


@pytest.mark.slow
def test_json_follows_the_contract(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mistake = next(m for m in mistakes() if m.name == "ddp-data-not-split")
    mistake.plant(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["check", "ddp.py", "--ranks", "2", "--budget-s", "240", "--json", "--out", "ranks.html"])
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, SCHEMA)
    assert (ended.value.code, document["exit_code"]) == (3, 3)
    assert [failure["property"] for failure in document["failed"]] == ["ranks_data"]
    assert set(document["statements"]) == {*document["held"], "ranks_data"}
    assert document["failed"][0]["evidence"] in (tmp_path / "ranks.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("source", ["train.py:setup", "hf:folder", "somewhere"])
def test_anything_but_a_script_is_refused(source, capsys):
    assert main(["check", source, "--ranks", "2"]) == 2
    assert "--ranks" in capsys.readouterr().err


def test_flags_that_would_be_ignored_are_refused(capsys):
    assert main(["check", str(SCRIPTS / "ddp.py"), "--ranks", "2", "--shrink", "--optimizer", "2"]) == 2
    assert re.search(r"--ranks .*--optimizer .*--shrink", capsys.readouterr().err)


def test_a_property_of_ranks_is_explained(capsys):
    assert main(["explain", "ranks_ties"]) == 0
    assert "huggingface/accelerate#3154" in capsys.readouterr().out
