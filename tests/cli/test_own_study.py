"""A study of the user's own, with its rule and charts, from a module outside the package, at the prompt."""

from __future__ import annotations

import json

import pytest

from cli.typed import normlab

MODULE = '''
import torch

from normlab.diagnosis import ByDepth, Finding, Lines, Study, Table, register


def kurtosis(subject):
    """Fourth standardised moment of the stream after each sublayer."""
    rows = []
    for stack in subject.structure.stacks:
        for view in stack.sublayers:
            x = subject.backward.forward.tensors[view.after].double()
            z = (x - x.mean()) / x.std(correction=0)
            rows.append({"stack": stack.name, "index": view.index, "kurtosis": z.pow(4).mean().item()})
    return [Table("kurtosis", tuple(rows))]


def heavy(tables):
    for stack, table in tables.stacks("kurtosis"):
        largest = max(table.column("kurtosis"))
        yield Finding(
            "kurtosis", "warning", f"the stream of {stack} has a kurtosis of {largest:.2f}", "kurtosis",
            {"largest": largest}, "Doe and Roe 2026, Section 3 (arXiv 2601.00002)",
        )


register(
    Study(
        "kurtosis", kurtosis, "cheap", rules=(heavy,), title="Heavy tails",
        intro="Fourth moment of the stream; 3 for a normal distribution.",
        charts=(
            ByDepth("kurtosis", "Kurtosis by depth", "kurtosis", "fourth moment"),
            Lines("kurtosis", "Kurtosis of all stacks", "index", "kurtosis", "sublayer", "moment", "stack"),
        ),
    )
)
'''
SIZE = ["--dim", "16", "--ffn-dim", "32", "--heads", "2", "--encoder-layers", "2", "--decoder-layers", "2"]
SIZE += ["--vocab-size", "150", "--threads", "1", "--tokens", "256", "--preset", "cheap"]
OWN = ["--import", "own.tails"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.delenv("NORMLAB_IMPORT", raising=False)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "tails.py").write_text(MODULE)
    return tmp_path


@pytest.mark.slow
def test_a_study_of_ones_own_is_run_judged_and_drawn(here):
    typed = normlab("diagnose", "--recipe", "pre", *SIZE, *OWN, cwd=here)
    assert typed.returncode == 0, typed.stderr
    assert "kurtosis of" in typed.stdout.replace("\n", " ")
    assert "2601.00002" in typed.stdout

    (drawn,) = (here / "runs").glob("diagnosis-pre-*.html")
    diagnosis = json.loads(drawn.with_suffix(".json").read_text())
    rows = diagnosis["tables"]["kurtosis"]
    assert [(r["stack"], r["index"]) for r in rows] == [("encoder.sublayers", i) for i in range(4)] + [
        ("decoder.sublayers", i) for i in range(6)
    ]
    largest = [f["numbers"]["largest"] for f in diagnosis["findings"] if f["name"] == "kurtosis"]
    assert largest[0] == max(r["kurtosis"] for r in rows if r["stack"] == "encoder.sublayers")
    (study,) = [s for s in diagnosis["studies"] if s["name"] == "kurtosis"]
    assert [chart["kind"] for chart in study["charts"]] == ["ByDepth", "Lines"]
    assert diagnosis["seconds"]["kurtosis"] > 0

    page = drawn.read_text()
    for words in ("Heavy tails", "Kurtosis by depth, encoder", "Kurtosis by depth, decoder",
                  "Kurtosis of all stacks", "3 for a normal distribution", "--import own.tails"):  # fmt: skip
        assert words in page
    assert 'data-chart="kurtosis-kurtosis-encoder"' in page

    as_json = normlab("diagnose", "--recipe", "pre", *SIZE, *OWN, "--json", cwd=here)
    assert "kurtosis" in {finding["name"] for finding in json.loads(as_json.stdout)["findings"]}
    plain = normlab("diagnose", "--recipe", "pre", *SIZE, "--json", cwd=here)
    assert "kurtosis" not in json.loads(plain.stdout)["tables"]
