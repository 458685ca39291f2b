"""Measure a finished run of the survey: the features of its model before its first step and early in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from normlab.diagnosis.rules.features import STUDIES, features
from normlab.diagnosis.rules.finding import Tables
from normlab.errors import UserError
from normlab.examine.subjects import Case, of_config
from normlab.spec.config import Config
from normlab.store.folder import RunFolder
from normlab.survey.design import EARLY
from normlab.training.checkpoint import load_checkpoint
from normlab.training.weights import kept_steps, step_folder

TOKENS: Final = 1024
"""Positions of the batch on which a model is measured."""
LATER: Final = tuple(name for name in STUDIES if name != "rehearsal")
"""Studies of a model that has begun to train: its steps are no rehearsal any more."""


def measured(folder: RunFolder) -> dict[str, dict[str, float]]:
    """Return the features by step, as far as the run came, at the peak of its learning rate and with its
    warm-up before it; after some steps also ``fell``, the share of ln V by which the loss fell.
    """
    config = folder.config()
    case = of_config(config, folder.path.parent, tokens=TOKENS)
    found = {"0": measure(case, config)}
    nll = {int(row["step"]): float(row["nll"]) for row in folder.metrics() if row["kind"] == "train"}
    for step in (step for step in EARLY if step in kept_steps(folder)):
        load_checkpoint(step_folder(folder, step), case.model, run=folder.id())
        try:
            own = measure(case, config, LATER)
        except UserError:  # the weights, or the loss, are not finite
            continue
        scale = nll[min(nll)]
        found[str(step)] = {**own, "fell": (scale - nll.get(step, scale)) / scale}
    return found


def measure(case: Case, config: Config, studies: Sequence[str] = STUDIES) -> dict[str, float]:
    """Return the features of a case. Raises UserError where it cannot be examined."""
    case.plan["studies"] = studies
    found = case.diagnosed("standard")
    if not found.tables:
        raise UserError(found.verdict)
    return features(Tables(found.tables, config.optim.lr), steps=config.train.steps)
