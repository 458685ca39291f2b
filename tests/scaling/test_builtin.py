"""The table of docs/transfer.md is what was measured on the built-in decoder."""

import json
from pathlib import Path

from cases import each

ROOT = Path(__file__).resolve().parents[2]
MEASURED = json.loads((ROOT / "benchmarks/results/transfer.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs/transfer.md").read_text(encoding="utf-8")


def rate(value):
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits}e{int(exponent)}"


@each(("row", "recipe"), [("standard", "pre+warmup"), ("µP", "pre+warmup+mup")])
def test_the_table_shows_the_best_rates(row, recipe):
    answer = MEASURED[recipe]
    (swept,) = answer["decays"]
    best = (one["optimum"] for one in swept["sizes"])
    cells = [f"{rate(o['value'])} ({rate(o['low'])} to {rate(o['high'])})" for o in best]
    moved = swept["shift"]
    cells.append(f"{moved['value']:.2f}x ({moved['low']:.2f} to {moved['high']:.2f})")
    assert f"| {row} | {' | '.join(cells)} | {answer['verdict']} |" in PAGE


def test_the_sentences_beside_it():
    standard, mup = MEASURED["pre+warmup"], MEASURED["pre+warmup+mup"]
    falls = {name: 1 / value for name, value in standard["decays"][0]["slope"].items()}
    assert f"of {falls['value']:.2f} ({falls['high']:.2f} to {falls['low']:.2f})" in PAGE
    lowest = [min(one["rates"], key=lambda r: r["loss"])["rate"] for one in mup["decays"][0]["sizes"]]
    assert {f"{one:.0e}" for one in lowest} == {"8e-03"}
    assert (standard["expected"], mup["expected"]) == ("shifts", "carries")
    fault = standard["coordinates"]["fault"]
    assert (fault["role"], fault["quantity"], round(fault["slope"], 1)) == ("embedding", "update", 0.5)
