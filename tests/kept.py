"""Kept comparisons of results/, as documents quote them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from normlab.lab.runs import RunFolder

ROOT = Path(__file__).parents[1]


class Kept:
    """A kept comparison: recipes by name, and differences by their names."""

    def __init__(self, name: str) -> None:
        self.folder = ROOT / "results" / name
        self.data = json.loads((self.folder / "comparison.json").read_text(encoding="utf-8"))
        self.recipes = {recipe["name"]: recipe for recipe in self.data["recipes"]}
        self.sentences = self.data["sentences"]
        pairs = [(d["a"], d["b"]) for d in self.data["differences"]]
        self.ranked = list(dict.fromkeys(name for pair in pairs for name in pair))

    def dev(self, recipe: str) -> list[float]:
        return [trial["dev"]["nll"] for trial in self.recipes[recipe]["trials"]]

    def bits(self, recipe: str) -> str:
        """Bits per byte of test with seeds 1 to 3, as tables have them."""
        runs = {RunFolder(self.folder / run).config().seeds.init: run for run in self.recipes[recipe]["runs"]}
        scores = (json.loads((self.folder / runs[seed] / "scores.json").read_text()) for seed in (1, 2, 3))
        return " | ".join(f"{score['bits_per_byte']:.3f}" for score in scores)

    def difference(self, a: str, b: str) -> dict[str, Any]:
        """``a`` minus ``b``, as tables have it."""
        for d in self.data["differences"]:
            turn = {(a, b): 1, (b, a): -1}.get((d["a"], d["b"]))
            if turn:
                ends = [turn * d["delta"][end] for end in ("low", "high")] if d["delta"] else []
                value = turn * d["delta"]["value"] if d["delta"] else None
                return {
                    **d,
                    "value": value,
                    "ends": sorted(ends),
                    "models": turn * d["models"] if d["models"] else d["models"],
                }
        raise KeyError((a, b))

    def row(self, recipe: str) -> str:
        """Mean, seeds and dev scores, as tables have them."""
        found = self.recipes[recipe]
        mean = found["means"].get("bleu")
        seeds = ", ".join(f"{score:.1f}" for score in found["scores"]["bleu"])
        dev = ", ".join(f"{nll:.2f}" for nll in self.dev(recipe))
        states = ", ".join(f"{state} ({n})" for state, n in Counter(found["outcomes"]).items())
        return (
            f"{mean['value']:.1f} | {seeds} | {states} | {dev} |"
            if mean
            else f"– | {seeds} | {states} | {dev} |"
        )

    def pair(self, a: str, b: str) -> str:
        """A difference, the seeds that would decide it, and the difference of these very models."""
        d = self.difference(a, b)
        models = f"{d['models']:.1f} | {p(d['p_models'])} |" if d["models"] is not None else "– | – |"
        if d["value"] is None:
            return f"– | – | – | – | {models}"
        needed = {"open": str(d["seeds_needed"] or "over 1,000")}.get(d["answer"], d["answer"])
        low, high = d["ends"]
        return f"{d['value']:.1f} | {low:.1f} to {high:.1f} | {p(d['p'])} | {needed} | {models}"


def p(value: float, digits: int = 3) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.{digits}f}"
