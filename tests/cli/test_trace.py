"""``normlab check --trace``: what is printed, the exit code, and flags that it would ignore."""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from cases import each
from cli.test_check import TRAIN
from normlab.cli.main import main
from normlab.cli.tracing import WIDTH
from normlab.report import contract

SCHEMA = json.loads(files("normlab.report").joinpath(contract.SCHEMA).read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
PAGE = (Path(__file__).parents[2] / "docs" / "contract.md").read_text(encoding="utf-8")
KEPT = Path(__file__).parent / "traced" / "causality.txt"
LEAKY = ["check", "train_of_this_test.py:leaky", "--trace", "causality"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current directory with somebody's training script in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_of_this_test.py").write_text(TRAIN)
    yield tmp_path
    sys.modules.pop("train_of_this_test", None)


def test_what_led_to_the_verdict_is_printed_in_order(here, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(LEAKY)
    assert stopped.value.code == 3
    printed = capsys.readouterr().out
    assert printed == KEPT.read_text(encoding="utf-8")
    assert max(map(len, printed.splitlines())) <= WIDTH


def test_the_same_is_printed_as_data(here, capsys):
    with pytest.raises(SystemExit):
        main([*LEAKY, "--json"])
    document = json.loads(capsys.readouterr().out)
    VALIDATOR.validate(document)
    assert (document["schema_version"], document["exit_code"]) == (contract.SCHEMA_VERSION, 3)
    assert (document["name"], document["verdict"]) == ("causality", "fails")
    assert document["entries"][-1]["module"] == document["failures"][0]["module"] == "blocks.0"


@pytest.mark.slow
@each("name", ["finite", "derivative", "state_dict"])
def test_other_traces_fit_the_schema_and_what_is_no_trace_does_not(here, capsys, name):
    assert main([*LEAKY[:-1], name, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    VALIDATOR.validate(document)
    assert not VALIDATOR.is_valid({**document, "entries": [{"kind": "guess"}]})
    assert not VALIDATOR.is_valid({**document, "verdict": "perhaps"})
    VALIDATOR.validate([document, document])


def test_the_page_of_the_contract_names_every_key():
    of_copies = SCHEMA["$defs"]["trace"]["properties"]["copies"]["anyOf"][1]["properties"]
    of_entries = [key for kind in SCHEMA["$defs"]["entry"]["oneOf"] for key in kind["properties"]]
    for key in (*SCHEMA["$defs"]["trace"]["properties"], *of_copies, *of_entries):
        assert f"`{key}`" in PAGE, key


@each(
    ("typed", "named"),
    [
        ("--trace causalty", "did you mean 'causality'"),
        ("--trace ranks_data", "ranks_data"),
        ("--trace causality --out page.html", "--out"),
        ("--trace causality --allow rows --junit a.xml", "--allow and --junit"),
    ],
)
def test_what_cannot_be_traced_is_refused_before_anything_runs(here, capsys, typed, named):
    assert main(["check", "train_of_this_test.py:leaky", *typed.split()]) == 2
    said = capsys.readouterr().err
    assert named in said
    assert "running" not in said
