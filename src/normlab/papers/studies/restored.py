"""The models that runs have learned: their loss on the training text, and Theorem 2's constant."""

from __future__ import annotations

from typing import Final

import torch

from normlab.diagnosis.reading.structure import read_structure
from normlab.papers.lab import subject_on
from normlab.papers.studies.amplification import theorem_constant
from normlab.runs import RunFolder
from normlab.training.subjects import Case, of_config, of_run

FOLLOWED: Final = 64
"""Tokens whose dependency on the branches is followed."""
TRAINING_BATCHES: Final = 16
"""Micro-batches of the training text on which a trained model's loss is measured."""


def constant_ratio(folder: RunFolder, seed: int) -> float:
    """C of Theorem 2 at the best weights on dev over C at initialisation."""
    config = folder.config()
    first = of_config(config, folder.path.parent, tokens=config.train.max_tokens)
    last = of_run(folder, "best", tokens=config.train.max_tokens)
    return _constant(last, seed) / _constant(first, seed)


def _constant(case: Case, seed: int) -> float:
    structure = read_structure(case.model, case.batches[0])
    subject = subject_on(case.model, case.batch, structure)
    return theorem_constant(subject, tokens=FOLLOWED, seed=seed)


@torch.no_grad()
def training_loss(folder: RunFolder) -> float:
    """The label-smoothed loss in nats per token on the first micro-batches of training."""
    case = of_run(folder, "best", tokens=folder.config().train.max_tokens)
    task, model = case.batch.task, case.model.eval()
    batches = [task.batch(i) for i in range(TRAINING_BATCHES)]
    total = sum(float(task.loss(model, batch).loss) for batch in batches)
    return total / sum(int(batch.tokens) for batch in batches)
