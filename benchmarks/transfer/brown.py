"""The built-in decoder on the Brown corpus in any width or depth, and what its trials cost.

It is that of the configuration language_model with AdamW's betas (0.9, 0.95) and a weight decay of 0.1 on
matrices, on 512 byte-level tokens, 8 blocks of 64 a step. A fifth of a trial warms up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Final

import normlab
from normlab.cli.presets import language_model
from normlab.lab.config import Config
from normlab.scaling.coordinates import CHECK_SEEDS, Check
from normlab.scaling.family import SetupFamily, family_of
from normlab.scaling.ladder import SEARCHED
from normlab.scaling.optimum import RATES

BROWN: Final = "$NORMLAB_DATA/text/brown.txt.xz"


def base() -> Config:
    """The decoder's configuration at width 64 with 2 layers, before a recipe is chosen."""
    config = language_model()
    texts = {"train_text": f"{BROWN}[:46368]", "dev_text": f"{BROWN}[46368:50518]"}
    return replace(
        config,
        model=replace(config.model, dim=64, ffn_dim=256, decoder_layers=2),
        data=replace(config.data, **texts, test_text=f"{BROWN}[50518:]", vocab_size=512, block_len=64),
        optim=replace(config.optim, lr=4e-3, warmup_steps=40),
        train=replace(config.train, steps=1000, max_tokens=512, precision="fp32"),
        machine=replace(config.machine, threads=1, device="cpu"),
    )


def family(recipe: str, root: Path, *, widths: Sequence[int] = (), depths: Sequence[int] = ()) -> SetupFamily:
    """The decoder in every width with 2 layers, or in every depth at width 64; its text lies in ``root``."""
    sized = normlab.sized(normlab.resolve(recipe, base()), root)
    return family_of(sized, recipe, widths=widths, depths=depths)


def step_s(setup: normlab.Setup) -> float:
    """Core-seconds of a step, the median of a few."""
    optimizer, took = setup.optimizer(setup.model), list[float]()
    for batch in islice(setup.batches, 6):
        began = time.process_time()
        setup.step(setup.model, batch, optimizer, None)
        took.append(time.process_time() - began)
    return median(took)


def cost(own: SetupFamily, steps: int, seeds: int) -> float:
    """Core-seconds of all trials, the making of models and data included, and the seconds by the clock of the
    coordinate check, which are more on a machine in use.
    """
    check = Check(own, range(CHECK_SEEDS))
    check.estimate()
    total = check.seed_s * len(check.seeds)
    for size in own.sizes:
        began = time.process_time()
        setup = own.build(size, seeds)
        made = time.process_time() - began
        rates = RATES + SEARCHED / (1 if size == own.sizes[0] else 2)
        total += step_s(setup) * rates * seeds * steps + made * (seeds + 1)
    return total
