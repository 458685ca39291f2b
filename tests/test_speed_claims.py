"""Ratios in prose are those that the benchmarks measured."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def ratios(benchmark: str, side: str, field: str, **where: str) -> list[float]:
    """Medians of how many times our own time a side takes."""
    rows = json.loads((ROOT / "benchmarks/results" / f"{benchmark}.json").read_text())["rows"]
    found = [row for row in rows if row["side"] == side]
    return [row[field][1] for row in found if all(row[key] == value for key, value in where.items())]


def written(values: list[float]) -> str:
    """As prose has it: one number, or the least and the largest."""
    ends = f"{min(values):.1f}", f"{max(values):.1f}"
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def prose(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_readme():
    step = written(ratios("step", "torch.nn", "speedup"))
    search = written(ratios("search", "Marian", "slower"))
    text = prose("README.md")
    assert f"a training step of `torch.nn.Transformer` takes {step} times as long as ours" in text
    assert f"beam search by Hugging Face's Marian {search} times" in text


@pytest.mark.parametrize(
    ("side", "sentence"),
    [
        ("torch.nn", "torch.nn takes {fp32} times our time in fp32 and {bf16} in bf16"),
        ("Marian", "Marian {fp32} and {bf16}"),
        ("x-transformers", "x-transformers {fp32} and {bf16}"),
    ],
)
def test_speed_page(side, sentence):
    found = {
        precision: written(ratios("step", side, "speedup", setting="small", precision=precision))
        for precision in ("fp32", "bf16")
    }
    assert sentence.format(**found) in prose("docs/speed.md")
    assert f"Marian's `generate` takes {written(ratios('search', 'Marian', 'slower'))} times" in prose(
        "docs/speed.md"
    )
