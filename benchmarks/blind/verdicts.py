"""Eight verdicts of normlab on papers that trained their models, found again without it.

    python benchmarks/blind/verdicts.py --runs FOLDER   # trains and decides what is missing, keeps it
    python benchmarks/blind/verdicts.py                 # prints the result

The three scripts here were written from the papers and METHODS.md alone, in plain PyTorch, by an author who
had not read the source. FOLDER holds the runs of ``normlab papers reproduce``: sizes, rates, steps and text
come from there; starts, batches, training, measures and intervals are made here, and ``normlab papers`` is
asked for its verdicts alone. The seeds are others: what is compared are verdicts and intervals, not digits.
A claim is decided once and stays as it was, normlab's side included.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
from scipy import stats
from train import read, run

Values = dict[int, float]
ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks/results/blind.json"
SEEDS = (101, 102, 103)
"""Each gives the start and the order of the text of a run of every cell; cells are compared within a seed."""

CELLS = {
    "clipped": ("xiong2020.clip", "clip 0.5"),
    "large rate": ("xiong2020.clip", "lr 1e-3, warm-up 1"),
    "small rate": ("xiong2020.fig6", "fixed lr 1e-4"),
    "Post-LN": ("nguyen2019.fig2", "Post+LN"),
    "Pre-LN": ("nguyen2019.fig2", "Pre+LN"),
    "Pre-LN, FixNorm, ScaleNorm": ("nguyen2019.fig2", "Pre+FixNorm+ScaleNorm"),
    "rate 7e-4, Pre-LN": ("xiong2020.fig4cd", "lr 7e-4 Pre"),
    "rate 7e-4, Post-LN with warm-up": ("xiong2020.fig4cd", "lr 7e-4 Post, warm-up"),
    "rate 1.5e-3, Pre-LN": ("xiong2020.fig4cd", "lr 1.5e-3 Pre"),
    "rate 1.5e-3, Post-LN with warm-up": ("xiong2020.fig4cd", "lr 1.5e-3 Post, warm-up"),
}
"""The cell of an artefact whose configuration each cell here has."""
MARKS = (200, 360)
"""Steps up to which the best weights are scored: 200 steps at the small rate are the first of its 360."""


@dataclass(frozen=True)
class Claim:
    """A comparison of two cells, in normlab's words, and the range that agrees.

    With ``steps``, one a cell, it is of the NLL: on test of the best weights up to that step, or on dev at
    that step. Without, it is of median gradient norms. ``pairs`` counts the artefact's pairs of cells.
    """

    artefact: str
    measure: str
    cells: tuple[str, str]
    allowed: tuple[float | None, float | None]
    steps: tuple[int, int] | None = None
    text: str = "test"
    pairs: int = 3

    def verdict(self, low: float, high: float) -> str:
        least = -math.inf if self.allowed[0] is None else self.allowed[0]
        most = math.inf if self.allowed[1] is None else self.allowed[1]
        if least <= low and high <= most:
            return "agrees"
        return "disagrees" if high < least or low > most else "undecided"


CLAIMS = (
    Claim(
        "xiong2020.clip",
        "test NLL with clipping minus without",
        ("clipped", "large rate"),
        (None, 0),
        (200, 200),
    ),
    Claim(
        "xiong2020.clip",
        "test NLL with clipping minus that at a fixed tenth of the rate",
        ("clipped", "small rate"),
        (-0.5, 0.5),
        (200, 200),
    ),
    Claim(
        "xiong2020.fig6",
        "test NLL at the large rate without warm-up minus that at the fixed small one",
        ("large rate", "small rate"),
        (0, None),
        (200, 360),
    ),
    Claim(
        "nguyen2019.fig2",
        "median gradient norm of Pre-LN over that of Pre-LN with FixNorm and ScaleNorm",
        ("Pre-LN", "Pre-LN, FixNorm, ScaleNorm"),
        (None, 1),
    ),
    Claim(
        "nguyen2019.fig2",
        "median gradient norm of Post-LN over that of Pre-LN",
        ("Post-LN", "Pre-LN"),
        (1, None),
    ),
    *(
        Claim(
            "xiong2020.fig4cd",
            f"dev NLL of Pre-LN minus that of Post-LN {when}, lr {lr}",
            (f"rate {lr}, Pre-LN", f"rate {lr}, Post-LN with warm-up"),
            (None, 0),
            (step, step),
            "dev",
            pairs=6,
        )
        for when, step, lr in (
            ("after 15% of the training", 20, "7e-4"),
            ("after 15% of the training", 20, "1.5e-3"),
            ("at the end", 200, "7e-4"),
        )
    ),
)
"""The five of clip, fig6 and nguyen2019.fig2 were chosen first; the three of fig4cd when one of the five
had not agreed, and before any of their runs. "After 15%" of 200 steps is the last validation up to step 30,
at step 20: normlab's runs have none at 30. Here dev NLL is kept at both."""


def measured(claim: Claim, found: dict[str, Any], steps: int) -> float:
    """A run's NLL at the claim's step, or its log median gradient norm."""
    if claim.steps is None:
        return math.log(found["median_grad_norm"])
    return found["dev_nll"][str(steps)] if claim.text == "dev" else found["scores"][str(steps)]["nll"]


def here(claim: Claim, runs: list[dict[str, Any]]) -> list[Values]:
    """The claim's measure of our runs: a side, then a seed."""
    return [
        {r["seed"]: measured(claim, r, steps) for r in runs if r["cell"] == cell}
        for cell, steps in zip(claim.cells, claim.steps or (0, 0), strict=True)
    ]


def kept(claim: Claim) -> list[Values]:
    """The same from the tables that normlab keeps of its own runs."""
    tables = json.loads((ROOT / f"results/papers/{claim.artefact}.json").read_text())["tables"]
    sides = []
    for name, steps in zip(claim.cells, claim.steps or (0, 0), strict=True):
        cell = CELLS[name][1]
        if claim.steps is None:
            norms: dict[int, list[float]] = {}
            for r in tables["gradients"]:
                if r["cell"] == cell:
                    norms.setdefault(r["seed"], []).append(r["grad_norm_l2"])
            sides.append({seed: math.log(median(its)) for seed, its in sorted(norms.items())})
            continue
        rows = tables["runs"] if claim.text == "test" else [r for r in tables["curves"] if r["step"] == steps]
        sides.append({r["seed"]: r["nll"] for r in rows if r["cell"] == cell})
    return sides


def interval(differences: list[float], comparisons: int) -> tuple[float, float, float]:
    """Mean and 95% interval by t on differences within seeds, with Bonferroni's correction."""
    centre = mean(differences)
    error = stdev(differences) / math.sqrt(len(differences))
    reach = float(stats.t.ppf(1 - 0.025 / comparisons, len(differences) - 1)) * error
    return centre, centre - reach, centre + reach


def decided(claim: Claim, sides: list[Values]) -> dict[str, Any]:
    """Measure and verdict; ``simultaneous`` holds for the artefact's pairs of cells together."""
    differences = [sides[0][seed] - sides[1][seed] for seed in sides[0]]
    rules = {}
    for name, comparisons in {"alone": 1, "simultaneous": claim.pairs}.items():
        value, low, high = interval(differences, comparisons)
        if claim.steps is None:
            value, low, high = math.exp(value), math.exp(low), math.exp(high)
        rules[name] = {"value": value, "low": low, "high": high, "verdict": claim.verdict(low, high)}
    return rules["alone"] | {"simultaneous": rules["simultaneous"]}


def printed(claim: Claim) -> dict[str, Any]:
    """normlab's own measure and verdict, as its command prints them."""
    text = subprocess.run(
        ["normlab", "papers", claim.artefact], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    line = re.search(rf"^(\w+)\s+{re.escape(claim.measure)}: (\S+) \[(\S+), (\S+)\]", text, re.MULTILINE)
    if line is None:
        raise SystemExit(f"normlab papers {claim.artefact} has no claim named: {claim.measure}")
    verdict, *numbers = line.groups()
    return dict(zip(("value", "low", "high"), map(float, numbers), strict=True)) | {"verdict": verdict}


def entry(claim: Claim, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The claim decided from our runs, from normlab's, and as normlab has it."""
    sides = {
        "here": decided(claim, here(claim, runs)),
        "normlab": printed(claim),
        "normlab's runs, decided here": decided(claim, kept(claim)),
    }
    return asdict(claim) | {"same_verdict": sides["here"]["verdict"] == sides["normlab"]["verdict"]} | sides


def train(folder: Path, runs: list[dict[str, Any]], claims: list[dict[str, Any]]) -> None:
    """Train the runs that the result does not have, seed by seed, and keep each as it ends."""
    for seed in SEEDS:
        for cell, (artefact, theirs) in CELLS.items():
            if any((r["cell"], r["seed"]) == (cell, seed) for r in runs):
                continue
            kept = json.loads((ROOT / f"results/papers/{artefact}.json").read_text())["tables"]["runs"]
            name = next(r["run"] for r in kept if r["cell"] == theirs)
            config = json.loads((folder / name / "config.json").read_text())["config"]
            print(f"{cell}, seed {seed}", flush=True)
            runs.append({"cell": cell} | run(config, read(folder, config["data"]["digest"]), seed, MARKS))
            write(runs, claims)


def hardware() -> str:
    """The processor's name where the system tells it, and torch's version."""
    names = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()) or [platform.machine()]
    return f"{names[0]}, {torch.get_num_threads()} thread, torch {torch.__version__}"


def write(runs: list[dict[str, Any]], claims: list[dict[str, Any]]) -> None:
    """Keep the runs and what they decide."""
    about = {"hardware": hardware(), "text": "the built-in corpus dates-de-en", "seeds": SEEDS}
    RESULT.write_text(json.dumps({"about": about, "claims": claims, "runs": runs}, indent=1) + "\n")


def main() -> None:
    """Train, decide, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--runs", type=Path, help="the folder of normlab's runs; without it nothing is trained"
    )
    folder = parser.parse_args().runs
    torch.set_num_threads(1)
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {"runs": [], "claims": []}
    runs, claims = result["runs"], result["claims"]
    if folder:
        train(folder, runs, claims)
    had = {(old["artefact"], old["measure"]) for old in claims}
    claims += [entry(claim, runs) for claim in CLAIMS if (claim.artefact, claim.measure) not in had]
    for found in claims:
        print(f"{found['artefact']}: {found['measure']}")
        for name in ("here", "normlab", "normlab's runs, decided here"):
            numbers = "{value:.3g} [{low:.3g}, {high:.3g}]".format(**found[name])
            print(f"  {name:28} {found[name]['verdict']:10} {numbers}")
    if folder:
        write(runs, claims)


if __name__ == "__main__":
    main()
