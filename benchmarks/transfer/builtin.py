"""Whether the best rate of the built-in decoder carries from width 64 to 512, with and without µP.

    NORMLAB_DATA=... python benchmarks/transfer/builtin.py --plan    # what it costs, and nothing else
    NORMLAB_DATA=... python benchmarks/transfer/builtin.py           # all of it; goes on where it stopped

Expected, written down before any of it ran, from Yang et al. 2022 (arXiv 2203.03466), Figure 1:

- standard parametrisation: *shifts*, the best rate falls with the width;
- mup: *carries*, the best rate at width 512 is within 1.4x of that at width 64.

What is measured stands, *cannot say* included. The decoder is that of the configuration language_model with
2 layers, Pre-LN, AdamW with betas (0.9, 0.95) and a weight decay of 0.1 on matrices, on the Brown corpus in
512 byte-level tokens, 8 blocks of 64 a step. Trials have 200 steps: a fifth warms up, then the rate is
constant. Each width is tried at five rates or more about its best one, with three seeds. The base of mup is
width 64.

Trials lie in ``--folder``, one line each; answers in ``benchmarks/results/transfer.json``.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Final

import torch

import normlab
from normlab.cli.presets import language_model
from normlab.config.config import Config
from normlab.config.io import to_plain
from normlab.config.units import duration
from normlab.runs.files import write_json_atomic
from normlab.scaling.family import SetupFamily, family_of
from normlab.scaling.ladder import CHECK_SEEDS, CHECK_STEPS, RATES
from normlab.training.devices import hardware

WIDTHS: Final = (64, 128, 256, 512)
STEPS: Final = 200
SEEDS: Final = 3
EXPECTED: Final = {"pre+warmup": "shifts", "pre+warmup+mup": "carries"}
BROWN: Final = "$NORMLAB_DATA/text/brown.txt.xz"
HERE: Final = Path(__file__).resolve().parent


def base() -> Config:
    """The decoder's configuration, before a recipe is chosen."""
    config = language_model()
    texts = {"train_text": f"{BROWN}[:46368]", "dev_text": f"{BROWN}[46368:50518]"}
    return replace(
        config,
        model=replace(config.model, dim=WIDTHS[0], ffn_dim=4 * WIDTHS[0], decoder_layers=2),
        data=replace(config.data, **texts, test_text=f"{BROWN}[50518:]", vocab_size=512, block_len=64),
        optim=replace(config.optim, lr=4e-3, warmup_steps=40),
        train=replace(config.train, steps=1000, max_tokens=512, precision="fp32"),
        machine=replace(config.machine, threads=1, device="cpu"),
    )


def family(recipe: str, root: Path) -> SetupFamily:
    """The decoder in every width."""
    return family_of(normlab.resolve(recipe, base()), recipe, widths=WIDTHS, root=root)


def step_s(setup: normlab.Setup) -> float:
    """Core-seconds of a step, the median of a few."""
    optimizer, took = setup.optimizer(setup.model), list[float]()
    for batch in islice(setup.batches, 6):
        began = time.process_time()
        setup.step(setup.model, batch, optimizer, None)
        took.append(time.process_time() - began)
    return median(took)


def cost(recipe: str, root: Path) -> float:
    """Core-seconds that the trials of a recipe take."""
    own, total = family(recipe, root), 0.0
    for width in WIDTHS:
        one, rates = step_s(own.build(width, 0)), RATES + (2 if width == WIDTHS[0] else 1)
        total += one * (rates * SEEDS * STEPS + CHECK_SEEDS * CHECK_STEPS)
        print(f"{recipe}: width {width} takes {one:.3f} s a step", flush=True)
    return total


def main() -> None:
    """Say what it costs, then train what is missing and write the answers."""
    parser = argparse.ArgumentParser(description="Does the best rate carry?", allow_abbrev=False)
    parser.add_argument("--plan", action="store_true", help="say what it costs, and end")
    parser.add_argument("--hours", type=float, default=3.0, help="most hours by the clock for each")
    parser.add_argument("--folder", type=Path, default=Path("runs/transfer"), help="where trials are kept")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.plan:
        whole = sum(cost(recipe, args.folder) for recipe in EXPECTED)
        print(f"all of it takes {duration(whole)} on one core")
        return
    answers = {}
    for recipe, expected in EXPECTED.items():
        found = normlab.transfer(
            family(recipe, args.folder),
            steps=STEPS,
            seeds=SEEDS,
            budget_s=3600 * args.hours,
            folder=args.folder / recipe,
            target=1024,
            announce=lambda line, recipe=recipe: print(f"{recipe}: {line}", flush=True),
        )
        print(f"{recipe}, expected that it {expected}: {found}\n", flush=True)
        answers[recipe] = {"expected": expected, **found.to_dict()}
        answers[recipe]["hardware"] = hardware(torch.device("cpu"))
    write_json_atomic(HERE.parent / "results/transfer.json", to_plain(answers))


if __name__ == "__main__":
    main()
