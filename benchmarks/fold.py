"""Trainings of the demo's model under every method with an exact rewrite, each folded.

    python benchmarks/fold.py             # three steps of one method, to see that it runs
    python benchmarks/fold.py --write     # all methods but those that fold.json holds: half a minute each
    python benchmarks/fold.py --page      # write the tables of docs/fold.md from fold.json, without measuring

A row is written as soon as it is measured, so that a long run can be interrupted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from normlab.cli.presets import demo
from normlab.lab.config import Config, MachineConfig
from normlab.lab.recipes.grammar import resolve
from normlab.lab.runs.folder import read_scores
from normlab.lab.training.fold import BOUND, measure_fold
from normlab.lab.training.train import train
from normlab.nn import Norm, Placement

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/fold.json"
PAGE = ROOT / "docs/fold.md"
STEPS, RATE, DEV = 200, 2e-3, 50

WEIGHTED = (
    "LN(ω ⊙ x + f(x))",
    "gain and bias of the norm before × ω, columns of the maps that read x ÷ ω; the first ω: embeddings × ω",
)
METHODS: dict[str, tuple[str, str]] = {
    "admin": WEIGHTED,
    "admin_code": WEIGHTED,
    "admin_free": WEIGHTED,
    "deepnorm": ("LN(α x + f(x))", "as Admin, with ω = α in every channel"),
    "rezero_post": ("LN(x + α f(x))", "weight and bias of the branch's last map × α"),
    "rezero": ("x + α f(x)", "weight and bias of the branch's last map × α"),
    "skipinit": ("x + α f(x)", "weight and bias of the branch's last map × α"),
    "fixup+untied": (
        "x + α f(x); W (x + b₁) + b₂",
        "weight and bias of the branch's last map × α; b = W b₁ + b₂",
    ),
    "layerscale": ("x + λ ⊙ f(LN(x))", "rows of the weight and bias of the branch's last map × λ"),
    "lnscale": ("x + f(LN(x) / √l)", "columns of the maps that read the norm ÷ √l"),
    "subln": ("x + V LN(φ(W LN(x)))", "nothing: its gains are initial ones"),
    "b2t_code": ("LN(x + f(x) + x_in)", "nothing: its gains are initial ones"),
    "pre+fixnorm": ("w / ‖w‖", "the table of the normalised vectors"),
    "pre+fixedscalenorm": ("√d x / ‖x‖", "g = √d, as a parameter"),
    "pre+headgain": ("γ_h head_h", "columns of the output matrix × γ"),
    "deepnorm+fixnorm+fixedscalenorm": ("all three", "as each of them"),
}
"""The equation of each recipe's method, and where its factors go."""


def configured(recipe: str, steps: int) -> Config:
    """The demo's configuration of a recipe, for so many steps."""
    base = demo()
    train_ = replace(base.train, steps=steps, validate_every_steps=steps, precision="fp32")
    train_ = replace(train_, dev_decode_sentences=DEV)
    machine = MachineConfig(threads=1, probes="")
    optim = replace(base.optim, lr=RATE)
    return resolve(recipe, replace(base, train=train_, machine=machine, optim=optim))


def measure(recipe: str, steps: int, root: Path) -> dict[str, Any]:
    """Train a recipe and fold it; the row says besides what the run scored."""
    run = train(configured(recipe, steps), root)
    found = asdict(measure_fold(run))
    return {**found, "run": "", "kept": list(found["kept"]), "bleu": read_scores(run.scores)["bleu"]}


def kept() -> list[dict[str, Any]]:
    """The rows of ``fold.json``."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))["rows"] if RESULTS.exists() else []


def keep(rows: Sequence[dict[str, Any]]) -> None:
    """Write ``fold.json`` in the order of ``METHODS``."""
    about = {
        "steps": STEPS,
        "rate": RATE,
        "layers": demo().model.encoder_layers,
        "hardware": f"CPU, one thread, torch {torch.__version__}",
    }
    ordered = sorted(rows, key=lambda row: list(METHODS).index(row["before"]))
    lines = ",\n".join(json.dumps(row) for row in ordered)
    RESULTS.write_text(f'{{"about": {json.dumps(about)},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The measured table as Markdown lines."""
    yield "| recipe | BLEU | becomes | float32 | float64 | equal outputs | parameters before | after |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in rows:
        float32, float64 = (f"{row[name] / row['largest_logit']:.1e}" for name in ("float32", "float64"))
        after = row["after"].removesuffix("+constant")
        yield (
            f"| `{row['before']}` | {row['bleu']:.1f} | `{after}` | {float32} | {float64} | "
            f"{row['equal_outputs']} of {row['outputs']} | {row['parameters_before']:,} | "
            f"{row['parameters_after']:,} |"
        )


def refused() -> Iterator[str]:
    """The parts that stay as they are, with the reason that their classes state."""
    unfolded = {name: part for name, part in Placement.registry.items() if part.fold is Placement.fold}
    norms = {name: part for name, part in Norm.registry.items() if getattr(part, "no_fold", "")}
    for name, part in {**unfolded, **norms}.items():
        if part.__module__.startswith("normlab."):
            yield f"- `{name}`: {part.no_fold}."


def page() -> str:
    """``docs/fold.md`` with its tables from what is kept."""
    rows, about = kept(), json.loads(RESULTS.read_text(encoding="utf-8"))["about"]
    worst = [max(row[name] / row["largest_logit"] for row in rows) for name in ("float32", "float64")]
    setting = (
        f"\n{about['layers']} + {about['layers']} layers, {about['steps']} steps at a rate of "
        f"{about['rate']:g}; {about['hardware']}. The largest difference of all is {worst[0]:.1e} in float32 "
        f"and {worst[1]:.1e} in float64; a fold is refused above {BOUND:.0e} in float32."
    )
    rewrites = [f"| `{name}` | `{equation}` | {how} |" for name, (equation, how) in METHODS.items()]
    written = PAGE.read_text(encoding="utf-8")
    for name, lines in {
        "rewrites": ["| recipe | equation | what takes over |", "| --- | --- | --- |", *rewrites],
        "measured": [*table(rows), setting],
        "refused": list(refused()),
    }.items():
        begin, rest = written.split(f"<!-- {name} -->\n")
        _, end = rest.split("<!-- end -->", 1)
        content = "\n".join(lines)
        written = f"{begin}<!-- {name} -->\n\n{content}\n\n<!-- end -->{end}"
    return written


def main() -> None:
    """Measure what is asked for and not kept yet."""
    parser = argparse.ArgumentParser(description="Differences between trained models and their plain forms.")
    parser.add_argument("--write", action="store_true", help="all methods, kept in fold.json")
    parser.add_argument("--page", action="store_true", help="write the tables of docs/fold.md and no more")
    args = parser.parse_args()
    rows = kept()
    done = {row["before"] for row in rows}
    with TemporaryDirectory() as root:
        if args.write:
            for recipe in [name for name in METHODS if name not in done]:
                rows.append(measure(recipe, STEPS, Path(root)))
                print(list(table(rows[-1:]))[-1], flush=True)
                keep(rows)
        elif not args.page:
            print("\n".join(table([measure("admin", 3, Path(root))])))
    if args.write or args.page:
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
