"""What a forecast needs to know of the first step: the loss before it, and where it goes."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from normlab.diagnosis.probing.passes import BackwardPass, parts_of
from normlab.diagnosis.probing.step import OptimiserFactory, Twin
from normlab.diagnosis.probing.stepping import LossGradients, trainable
from normlab.diagnosis.reading.subject import Subject, undisturbed
from normlab.diagnosis.reading.taps import activations, call_model
from normlab.diagnosis.study import Study
from normlab.diagnosis.table import Row, Table

LEAST_CLASSES: Final = 8
"""Width of the output below which it need not be one of classes."""


def start(subject: Subject) -> Table:
    r"""Measure the loss before any step (``loss``), :math:`\ln V` for the width V of the output
    (``guessing``), and the deviation of the logits.
    """
    model = subject.model
    with torch.no_grad(), undisturbed(model):
        output = next((x for _, x in activations(call_model(model, subject.batch)) if x.ndim > 1), None)
        loss = float(subject.loss_of(model, subject.batch))
    width = output.shape[-1] if output is not None else 0
    row: Row = {
        "loss": loss,
        "guessing": math.log(width) if width >= LEAST_CLASSES else None,
        "logits_std": None if output is None else output.float().std().item(),
        "width": width,
    }
    return Table("start", (row,))


def first_step(
    subject: Subject, optimiser: Optimizer | OptimiserFactory, backward: BackwardPass, most: float | None
) -> Table:
    r"""Tabulate the cosine of the step of every trainable parameter with the negative gradient (``downhill``),
    after clipping to a global norm of at most ``most``: :math:`g \min(1, c / \|g\|)`.
    """
    found = backward.loss_gradients
    before = {path: p.detach() for path, p in trainable(subject.model).items()}
    after = _stepped(subject, optimiser, found if most is None else _clipped(found, most))
    parts = parts_of(subject, backward.forward)
    rows: list[Row] = []
    for path, p in before.items():
        for part in parts[path]:
            old, new, gradient = (
                _wide(part.of(x.to_dense())) for x in (p, after[path], found.gradients[path])
            )
            rows.append({"parameter": path, "role": part.kind, "downhill": -_cosine(new - old, gradient)})
    return Table("first_step", tuple(rows))


def _stepped(
    subject: Subject, optimiser: Optimizer | OptimiserFactory, first: LossGradients
) -> dict[str, Tensor]:
    """The parameters after one step, or after two where the first changes none, as that of ADOPT."""
    twin, before = Twin(subject.model, optimiser), trainable(subject.model)
    twin.step(subject, first)
    if all(torch.equal(p.to_dense(), before[path].to_dense()) for path, p in twin.weights.items()):
        twin.step(subject)
    return twin.weights


def _wide(x: Tensor) -> Tensor:
    """Return a tensor in float32 at least, in which a step of half precision is exact."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).flatten()


def _cosine(x: Tensor, y: Tensor) -> float:
    lengths = torch.linalg.vector_norm(x) * torch.linalg.vector_norm(y)
    return (torch.dot(x, y) / lengths).item() if lengths else 0.0


def _clipped(found: LossGradients, most: float) -> LossGradients:
    norm = math.sqrt(sum(float(g.to_dense().double().square().sum()) for g in found.gradients.values()))
    factor = min(1.0, most / (norm + 1e-6))
    return LossGradients(found.loss, {path: g * factor for path, g in found.gradients.items()})


START: Final = Study("start", lambda c: [start(c.subject)], "cheap", order=-46)
FIRST_STEP: Final = Study(
    "first_step",
    lambda c: [
        Table("plan", ({"warmup_steps": c.warmup_steps},) if c.warmup_steps else ()),
        first_step(c.subject, c.optimiser, c.backward, c.plan.get("max_grad_norm")),
    ],
    "cheap",
    order=-45,
)
