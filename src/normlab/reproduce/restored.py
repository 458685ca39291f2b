"""Measures of the models that runs have learned: their loss on the training text, their plain form, and
Theorem 2's constant.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from normlab.diagnosis.reading.structure import read_structure
from normlab.diagnosis.reading.subject import Subject
from normlab.examine.subjects import Case, mean_loss, of_config, of_run
from normlab.export.fold import measure_fold
from normlab.reproduce.amplification import theorem_constant
from normlab.reproduce.intervals import mean_ratio
from normlab.reproduce.trained import Trained, kind
from normlab.spec.claim import Measure
from normlab.store import RunFolder

FOLLOWED: Final = 64
"""Tokens whose dependency on the branches is followed."""
TRAINING_BATCHES: Final = 16
"""Micro-batches of the training text on which a trained model's loss is measured."""


@kind
def train_perplexity_ratio(runs: Trained, a: str, b: str) -> Measure:
    """The label-smoothed perplexity of ``a`` on its training text over that of ``b``, within seeds, at the
    best weights on dev and without dropout.
    """
    both = zip(runs.cells[a], runs.cells[b], strict=True)
    return mean_ratio(math.exp(_training_loss(first) - _training_loss(second)) for first, second in both)


@kind
def score_ratio(runs: Trained, metric: str, a: str, b: str) -> Measure:
    """The test score of ``a`` over that of ``b``, within seeds."""
    of = runs.metric(metric)
    return mean_ratio(x / y for x, y in zip(runs.scores(of, a), runs.scores(of, b), strict=True))


@kind
def fold_difference(runs: Trained, cell: str) -> Measure:
    """The largest difference of two logits of a run and of its plain form in float32, over the largest logit;
    the largest of all seeds.
    """
    folds = (measure_fold(folder) for folder in runs.cells[cell])
    return Measure.exact(max(found.float32 / found.largest_logit for found in folds))


@kind
def constant_ratio(runs: Trained, cell: str) -> Measure:
    """C of Theorem 2 at the best weights on dev over C at initialisation, within seeds (Liu et al. 2020,
    Section 4.2, arXiv 2004.08249).
    """
    return mean_ratio(_constant_ratio(folder, seed) for seed, folder in enumerate(runs.cells[cell], 1))


def _constant_ratio(folder: RunFolder, seed: int) -> float:
    config = folder.config()
    first = of_config(config, folder.path.parent, tokens=config.train.max_tokens)
    last = of_run(folder, "best", tokens=config.train.max_tokens)
    return _constant(last, seed) / _constant(first, seed)


def _constant(case: Case, seed: int) -> float:
    structure = read_structure(case.model, case.batches[0])
    subject = Subject(case.model, case.batch, mean_loss, structure)
    return theorem_constant(subject, tokens=FOLLOWED, seed=seed)


@torch.no_grad()
def _training_loss(folder: RunFolder) -> float:
    """The label-smoothed loss in nats per token on the first micro-batches of training."""
    case = of_run(folder, "best", tokens=folder.config().train.max_tokens)
    task, model = case.batch.task, case.model.eval()
    batches = [task.batch(i) for i in range(TRAINING_BATCHES)]
    total = sum(float(task.loss(model, batch).loss) for batch in batches)
    return total / sum(int(batch.tokens) for batch in batches)
