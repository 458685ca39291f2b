"""Pilots at initialisation: ``NORMLAB_DATA=... python tools/pilots_start.py [fig4] [theorem2] [fig3ab]``.

Draws are nested, batches and random changes within models, so that a line tells how much of the spread each
causes, and with it how many of each an average needs. Models have seeds from 1000 up; no claim counts them.
One line a model goes to ``results/pilots/B-NAME.jsonl``; a model that has a line is skipped.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from normlab.diagnosis.studies.dependency import dependency, residual_dependency
from normlab.diagnosis.studies.gradients import parameter_gradients
from normlab.diagnosis.subject import Subject
from normlab.papers.intervals import Array
from normlab.papers.lab import Lab, size
from normlab.papers.studies.amplification import encoder_changes, encoder_on_batches
from pilots import FIRST_SEED, KEPT, provenance

DEPTHS: Final = (6, 9, 12, 15, 18)
BATCHES: Final = 4
CHANGES: Final = 4
TEXT: Final = "wmt14.en-de"
Line = Mapping[str, Any]


def _encoders(lab: Lab, placement: str, *, seed: int, tokens: int) -> Iterator[Subject]:
    """One encoder of that seed, of 18 layers, on one batch after the other."""
    draws = {"first": 0, "batches": BATCHES}
    return encoder_on_batches(lab, size("base", placement, 18), TEXT, seed, tokens, draws)


def _rounded(values: Array) -> list[float]:
    return [float(f"{value:.5g}") for value in values.tolist()]


def fig4(lab: Lab, placement: str, seed: int) -> Line:
    """The curve of Figure 4, mean over batches and changes, and the spread of its logarithm at 18 layers by
    change and by batch.
    """
    adam = partial(torch.optim.Adam, lr=1e-5)
    encoders = enumerate(_encoders(lab, placement, seed=seed, tokens=256))
    found = [encoder_changes(subject, batch, CHANGES, adam) for batch, subject in encoders]
    which = [2 * depth - 1 for depth in DEPTHS]
    random = np.array([one["random"] for one in found])[:, :, which]
    update = np.array([one["update"] for one in found])[:, 0, which]
    last = np.log(random[:, :, -1])
    return {
        "depths": DEPTHS,
        "random": _rounded(random.mean((0, 1))),
        "one draw": _rounded(random[0, 0]),
        "update": _rounded(update.mean(0)),
        "spread": {
            "over changes": round(float(last.std(1, ddof=1).mean()), 4),
            "over batches": round(float(last.mean(1).std(ddof=1)), 4),
            "update over batches": round(float(np.log(update[:, -1]).std(ddof=1)), 4),
        },
    }


def theorem2(lab: Lab, placement: str, seed: int) -> Line:
    """1/β_ii² and the change after every sublayer, each a mean over batches (and changes)."""
    inverse: list[list[float]] = []
    changes: list[list[list[float]]] = []
    sums: list[list[float]] = []
    for number, subject in enumerate(_encoders(lab, placement, seed=seed, tokens=512)):
        table = dependency(subject, tokens=32).where(stack=subject.structure.stacks[0].name)
        own = [float(r["beta_sq"] or 0) for r in residual_dependency(subject, table)]
        inverse.append([1 / beta for beta in own])
        sums.append(np.cumsum(own).tolist())
        changes.append(encoder_changes(subject, number, CHANGES)["random"])
    both = np.array(changes)
    return {
        "inverse": _rounded(np.array(inverse).mean(0)),
        "sums": _rounded(np.array(sums).mean(0)),
        "change": _rounded(both.mean((0, 1))),
        "one draw": _rounded(both[0, 0]),
    }


def fig3ab(lab: Lab, placement: str, seed: int) -> Line:
    """‖E ∂L/∂W‖ of both matrices of each feed-forward by stack, over batches that are this model's own."""
    text, tokens = "iwslt14.de-en", 4096
    subject = lab.subject(size("small", placement, 6), text, seed=seed, tokens=tokens)
    for name, parameter in subject.model.named_parameters():
        parameter.requires_grad_(".f.inner.weight" in name or ".f.outer.weight" in name)
    first = BATCHES * (seed - FIRST_SEED)
    batches = lab.random_batches(text, tokens, first + BATCHES)[first:]
    found: dict[str, list[float]] = {}
    for row in parameter_gradients(replace(subject, batches=batches)):
        matrix = "W1" if ".inner." in str(row["parameter"]) else "W2"
        name = f"{str(row['stack']).partition('.')[0]} {matrix}"
        found.setdefault(name, []).append(float(f"{row['mean_grad_l2']:.5g}"))
    return {"by layer": found}


STUDIES: Final = {"fig4": fig4, "theorem2": theorem2, "fig3ab": fig3ab}


def run(name: str, models: int, placements: Sequence[str], runs: Path) -> None:
    """Measure what is missing, one model after the other."""
    lab, path = Lab(runs), KEPT / f"B-{name}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    there = {(row["placement"], row["seed"]) for row in map(json.loads, lines)}
    KEPT.mkdir(parents=True, exist_ok=True)
    for seed in range(FIRST_SEED, FIRST_SEED + models):
        for placement in placements:
            if (placement, seed) in there:
                continue
            start = time.perf_counter()
            found = STUDIES[name](lab, placement, seed)
            seconds = round(time.perf_counter() - start)
            row = {"placement": placement, "seed": seed, **found, "seconds": seconds, **provenance()}
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, separators=(",", ":"), ensure_ascii=False) + "\n")
            print(name, placement, seed, seconds, flush=True)


def main() -> None:
    """Run the named studies."""
    parser = argparse.ArgumentParser(description="Pilots at initialisation.")
    parser.add_argument("study", nargs="+", choices=STUDIES)
    parser.add_argument("--models", type=int, default=4)
    parser.add_argument("--placements", nargs="+", default=["post", "pre"])
    parser.add_argument("--runs", type=Path, default=Path("runs/pilots"), help="folder of the prepared text")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for name in asked.study:
        run(name, asked.models, asked.placements, asked.runs)


if __name__ == "__main__":
    main()
