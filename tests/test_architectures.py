"""The page of transformers' architectures is that of the kept rows, and a row says how a check ended."""

from __future__ import annotations

from typing import Any

import pytest

from scripts import script

pytest.importorskip("transformers", reason="the extra normlab[hf] is not installed")

architectures = script("architectures")


def row_of(model_type: str, name: str) -> Any:
    """The row of a class that is checked in a process of its own."""
    return architectures.in_a_process(architectures.Architecture(model_type, "CausalLM", name))


def test_the_tables_are_those_of_the_results():
    document = architectures.PAGE.read_text(encoding="utf-8")
    assert document == architectures.with_tables(document, architectures.tables())


def test_what_was_seen_first_is_in_the_results():
    first, now = architectures.kept(architectures.FIRST_SIGHT), architectures.kept()
    assert first.keys() <= now.keys()
    assert {row.outcome for row in (*first.values(), *now.values())} <= {*architectures.OUTCOMES}


def test_each_class_of_a_model_type_is_named_once():
    named = [(each.type, each.name) for each in architectures.architectures()]
    assert len(named) == len({*named})
    assert ("bert", "BertForMaskedLM") in named


@pytest.mark.slow
def test_a_type_without_a_default_configuration_is_refused():
    assert row_of("no-such-type", "None").outcome == "refused"


@pytest.mark.slow
def test_a_check_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(architectures, "LIMIT_S", 0.01)
    assert row_of("gpt2", "GPT2LMHeadModel").outcome == "out of time"


@pytest.mark.slow
def test_only_some_types_are_measured_and_printed(capsys):
    architectures.main(["--only", "gpt2"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("gpt2 CausalLM holds")
