"""The public cases as data, and the form of what asks other checkers about them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from cases import each

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "faults"
ADAPTERS = sorted(file.stem for file in (FOLDER / "adapters").glob("[!_]*.py"))
CASE = {"role": "fault", "kind": "resuming", "named_by": ["rows"], "place": "blocks.0*"}
ROWS = {"check": "batch", "place": "", "message": "rows differ by 0.31"}
OTHER = {"check": "decay", "place": "head", "message": "decays"}


@pytest.fixture(autouse=True)
def folder_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of the benchmark import each other as a script's do; none of them stays loaded."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("adapters", "corpora", "run", "training", "worker"):
            del sys.modules[name]


class Tool(ModuleType):
    ASKS_PLACE = False

    def __init__(self, **others: object):
        super().__init__("tool")
        self.__dict__.update(others)

    @staticmethod
    def states(check: str) -> tuple[str, ...]:
        return ("rows",) if check == "batch" else ()


def told(*findings: dict[str, str], error: str = "") -> dict[str, object]:
    return {"findings": list(findings), "error": error}


def test_the_cases_are_those_of_the_lists():
    corpora = import_module("corpora")
    assert corpora.CASES.read_text(encoding="utf-8") == corpora.data(), f"type: {corpora.COMMAND}"


@each("name", ADAPTERS)
def test_an_adapter_says_what_it_is_without_its_tool(name):
    adapter = import_module(f"adapters.{name}")
    assert adapter.PACKAGE
    if hasattr(adapter, "DOES_NOT_APPLY"):
        assert adapter.VERSION
        assert not hasattr(adapter, "findings")
        return
    assert adapter.HOW
    assert isinstance(adapter.ASKS_PLACE, bool)
    assert callable(adapter.findings)
    assert isinstance(adapter.states("no such check"), tuple)


def test_what_a_tool_says_of_the_twin_too_does_not_count():
    run = import_module("run")
    same = ROWS | {"message": "rows differ by 0.29"}
    assert run.verdict(told(ROWS), CASE, told(same), Tool()) == ("missed", None)
    assert run.verdict(told(OTHER, ROWS), CASE, told(OTHER), Tool()) == ("named", ROWS)
    assert run.verdict(told(OTHER), CASE, None, Tool()) == ("flagged", OTHER)


def test_place_counts_where_it_is_asked_for():
    run = import_module("run")
    there = ROWS | {"place": "blocks.0.attn"}
    assert run.verdict(told(ROWS), CASE, None, Tool(ASKS_PLACE=True))[0] == "flagged"
    assert run.verdict(told(there), CASE, None, Tool(ASKS_PLACE=True))[0] == "named"


def test_any_finding_but_advice_on_a_sound_step_is_a_false_alarm():
    run = import_module("run")
    sound = CASE | {"role": "sound"}
    assert run.verdict(told(OTHER), sound, None, Tool()) == ("false alarm", OTHER)
    assert run.verdict(told(OTHER), sound, None, Tool(ADVICE=("decay",))) == ("clean", None)
    assert run.verdict(told(error="TypeError"), sound, None, Tool()) == ("error", None)


def test_results_are_of_these_cases_and_tools():
    results = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))
    cases = {case["name"] for case in json.loads((FOLDER / "cases.json").read_text(encoding="utf-8"))}
    assert {row["case"] for row in results["rows"]} <= cases
    assert {row["tool"] for row in results["rows"]} <= set(ADAPTERS)
