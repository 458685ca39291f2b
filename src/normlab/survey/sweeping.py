"""Measure models at a grid of learning rates, without training them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import torch

from normlab.diagnosis.rules.features import VERSION
from normlab.errors import UserError
from normlab.examine.subjects import of_config
from normlab.forecast.table import SweptRate, append, compact, read
from normlab.survey.design import Model, models, start_rate
from normlab.survey.measuring import TOKENS, measure

RATES: Final = tuple(4.0**k for k in range(-2, 7))
"""Learning rates over the one that a search begins with."""
SEED: Final = 1


def sweep(
    names: Sequence[str], table: Path, root: Path, *, jobs: int = 1, until: float = math.inf
) -> list[SweptRate]:
    """Measure the models of these names at the rates that are not in a table yet, and add them; return all.

    Texts are prepared below ``root``. None is begun after ``until``, a time of ``time.monotonic``.
    """
    compact(table)  # a row that was cut off goes
    known = {(rate.model, rate.lr) for rate in read(table, SweptRate)}
    named = [model for model in (*models(), *models("deep")) if model.name in names]
    todo = [(model, [lr for lr in grid(model) if (model.name, lr) not in known]) for model in named]
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = [pool.submit(swept, model, rates, root) for model, rates in todo if rates]
        for future in as_completed(futures):
            if time.monotonic() > until:
                for waiting in futures:
                    waiting.cancel()
            if not future.cancelled():
                for rate in future.result():
                    append(table, rate)
    compact(table)
    return read(table, SweptRate)


def grid(model: Model) -> list[float]:
    """Return the rates at which a model is measured."""
    return [float(f"{start_rate(model) * factor:.4g}") for factor in RATES]


def swept(model: Model, rates: Sequence[float], root: Path) -> list[SweptRate]:
    """Measure a model at some rates; one at which it cannot be measured is left out."""
    found = []
    for lr in rates:
        config = model.config(lr, SEED)
        try:
            features = measure(of_config(config, root, tokens=TOKENS), config)
        except UserError:  # the weights, or the loss, are not finite
            continue
        found.append(SweptRate(model.name, lr, features, VERSION))
    return found
