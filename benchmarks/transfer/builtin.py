"""Whether the best rate of the built-in decoder carries from width 64 to 512, with and without µP.

    NORMLAB_DATA=... python benchmarks/transfer/builtin.py --plan    # what it costs, and nothing else
    NORMLAB_DATA=... python benchmarks/transfer/builtin.py           # all of it; goes on where it stopped

Expected, written down before any of it ran, from Yang et al. 2022 (arXiv 2203.03466), Figure 1:

- standard parametrisation: *shifts*, the best rate falls with the width;
- mup: *carries*, the best rate at width 512 is within 1.4x of that at width 64.

What is measured stands, *cannot say* included. The decoder is that of ``brown.py`` with 2 layers, Pre-LN.
Trials have 200 steps, and a constant rate after the warm-up. Each width is tried at five rates or more about
its best one, with three seeds. The base of mup is width 64.

Trials lie in ``--folder``, one line each; answers in ``benchmarks/results/transfer.json``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

import torch
from brown import cost, family

import normlab
from normlab.base.files import write_json_atomic
from normlab.base.io import to_plain
from normlab.base.units import duration
from normlab.lab.training.devices import hardware

WIDTHS: Final = (64, 128, 256, 512)
STEPS: Final = 200
SEEDS: Final = 3
EXPECTED: Final = {"pre+warmup": "shifts", "pre+warmup+mup": "carries"}
HERE: Final = Path(__file__).resolve().parent


def main() -> None:
    """Say what it costs, then train what is missing and write the answers."""
    parser = argparse.ArgumentParser(description="Does the best rate carry?", allow_abbrev=False)
    parser.add_argument("--plan", action="store_true", help="say what it costs, and end")
    parser.add_argument("--hours", type=float, default=3.0, help="most hours by the clock for each")
    parser.add_argument("--folder", type=Path, default=Path("runs/transfer"), help="where trials are kept")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.plan:
        whole = 0.0
        for recipe in EXPECTED:
            whole += (own := cost(family(recipe, args.folder, widths=WIDTHS), STEPS, SEEDS))
            print(f"{recipe} takes {duration(own)}", flush=True)
        print(f"all of it takes {duration(whole)} on one core")
        return
    answers = {}
    for recipe, expected in EXPECTED.items():
        found = normlab.transfer(
            family(recipe, args.folder, widths=WIDTHS),
            steps=STEPS,
            seeds=SEEDS,
            budget_s=3600 * args.hours,
            folder=args.folder / recipe,
            target=1024,
            announce=lambda line, recipe=recipe: print(f"{recipe}: {line}", flush=True),
        )
        print(f"{recipe}, expected that it {expected}: {found}\n", flush=True)
        answers[recipe] = {"expected": expected, **found.to_dict()}
        answers[recipe]["coordinates"].pop("rows")  # 3,000, which take a minute to measure again
        answers[recipe]["hardware"] = hardware(torch.device("cpu"))
    write_json_atomic(HERE.parent / "results/transfer.json", to_plain(answers))


if __name__ == "__main__":
    main()
