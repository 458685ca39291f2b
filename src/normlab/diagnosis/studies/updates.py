"""What gradients ask for, and what an optimiser makes of them, parameter by parameter."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from normlab.diagnosis.probing.passes import Pass, examine, parts_of
from normlab.diagnosis.probing.stats import measure
from normlab.diagnosis.probing.step import Make, updated
from normlab.diagnosis.probing.stepping import trainable
from normlab.diagnosis.reading.kinds import Part
from normlab.diagnosis.reading.parameters import Owner
from normlab.diagnosis.reading.subject import Subject
from normlab.diagnosis.table import Row, Table


def updates(subject: Subject, optimiser: Optimizer | Make, *, passed: Pass | None = None) -> Table:
    r""":math:`\|g\|`, :math:`\|u\|` and :math:`\|u\| / \|w\|` of each parameter w: its gradient g and the
    update u that the optimiser makes of it, in its first step or, amid a training, in its next.

    ``grad_relative`` and ``update_relative`` are relative to the largest of the model, ``update_over_weight``
    is None for weights that are all zero. A packed matrix of queries, keys and values has a row for each.
    Frozen parameters have none. ``optimiser`` as for ``step.updated``, any class of ``torch.optim``:
    ``partial(torch.optim.AdamW, lr=5e-4)``. ``passed`` is found by ``examine`` if not given.

    Liu et al. 2020, Section 3.2, Figures 5 and 11 (arXiv 2004.08249). Raises UserError for a frozen model
    and a loss that is not finite.
    """
    passed = passed or examine(subject)
    grads, owned, parts = passed.slope.gradients, passed.seen.owned, parts_of(subject, passed.seen)
    after = updated(subject, optimiser, passed.slope)
    rows: list[Row] = []
    for path, p in trainable(subject.model).items():
        weight, step = p.detach(), after[path].sub_(p.detach())
        rows.extend(
            _row(path, part, owned[path], grad=grads[path], step=step, weight=weight) for part in parts[path]
        )
    return Table("updates", tuple(_with_shares(rows)))


def _row(path: str, part: Part, owner: Owner, *, grad: Tensor, step: Tensor, weight: Tensor) -> Row:
    g, u, w = (measure("l2", part.of(x.to_dense())).item() for x in (grad, step, weight))
    return {
        "parameter": path,
        "kind": part.kind,
        "stack": owner.stack,
        "layer": owner.layer,
        "grad_l2": g,
        "update_l2": u,
        "grad_relative": None,
        "update_relative": None,
        "update_over_weight": u / w if w else None,
    }


def _with_shares(rows: list[Row]) -> list[Row]:
    """The rows with their norms relative to the largest, None where all are zero."""
    most = {name: max(float(row[f"{name}_l2"] or 0) for row in rows) for name in ("grad", "update")}
    return [
        {**row, **{f"{n}_relative": float(row[f"{n}_l2"] or 0) / most[n] if most[n] else None for n in most}}
        for row in rows
    ]
