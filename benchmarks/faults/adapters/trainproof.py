"""trainproof: its rules on the log of a short run, and on labels where a batch has them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from training import STEPS_OF_A_LOG, Finding, PublicCase, Training, logged, training

PACKAGE = "trainproof"
HOW = (
    f"`check_records` on the log of {STEPS_OF_A_LOG} steps, `check_objective` on labels; warnings and "
    "failures count"
)
ASKS_PLACE = False
STATES = {
    "TP-NAN": ("finite",),
    "TP-NAN-GRAD": ("finite",),
    "TP-ZERO-LOSS": ("counted", "targets"),
    "TP-ZERO-LOSS-ONSET": ("counted", "targets"),
    "TP-ZERO-GRAD": ("gradients", "frozen", "reach"),
    "TP-FLAT": ("learns",),
    "TP-DIVERGE": ("learns", "start"),
    "TP-DEAD-RUN": ("learns", "update"),
    "TP-GRAD-SPIKE": ("step",),
    "TP-ZERO-LR": ("schedule",),
    "TP-ZERO-LR-PARTIAL": ("schedule",),
    "TP-OBJ-LABEL-SHIFT-DOUBLE": ("targets",),
    "TP-OBJ-TARGET-OUT-OF-RANGE": ("targets", "counted"),
    "TP-OBJ-DEAD-CLASS": ("counted",),
    "TP-OBJ-IGNORE-INDEX-COLLISION": ("counted",),
}


def states(check: str) -> tuple[str, ...]:
    """Return the causes that a rule states."""
    return STATES.get(check, ())


def on_labels(given: Training) -> list[dict[str, Any]]:
    """Return what is said of the labels of a batch, which has token ids and labels of one shape."""
    from trainproof.objective import check_objective

    batch = given.batch
    if not isinstance(batch, dict) or not isinstance(batch.get("labels"), Tensor):
        return []
    ids, labels = batch.get("input_ids", batch.get("ids")), batch["labels"]
    if not isinstance(ids, Tensor) or ids.shape != labels.shape or ids.is_floating_point():
        return []
    classes = max(int(ids.max()), int(labels.max())) + 1
    return check_objective(classes, -100, labels.flatten().tolist(), input_ids=ids.tolist())


def findings(case: PublicCase) -> list[Finding]:
    """Return what is said of the log and of the labels."""
    from trainproof.epoch import check_records

    told = check_records(logged(training(case)))["findings"] + on_labels(training(case))
    counted = [each for each in told if each["level"] in ("WARN", "FAIL")]
    return [
        Finding(each["id"], "", f"{each['message']} {each.get('evidence', '')}"[:300]) for each in counted
    ]
