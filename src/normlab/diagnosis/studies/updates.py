"""Compare the gradient of each parameter with the update that an optimizer makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from normlab.config.chart import Strips
from normlab.diagnosis.probes import measure
from normlab.diagnosis.reading.parameters import ParameterPart
from normlab.diagnosis.study import LIU, Finding, Study, at_peak, format_number, format_share
from normlab.diagnosis.subject import AnyOptimizer, Subject
from normlab.diagnosis.tables import Row, Table, Tables, extremes
from normlab.trace.step import trainable

MATRICES: Final = ("query", "key", "value", "output", "ffn_in", "ffn_out")
GROUPS: Final = (*MATRICES, "norm", "embedding", "other")
UNBALANCED: Final = 100.0
"""Ratio between updates in proportion to their matrices: too large for one learning rate to suit both."""
LARGE_UPDATE: Final = 0.1
"""Share of a matrix's norm that one step changes: ten such steps can replace it."""


def updates(subject: Subject, optimizer: AnyOptimizer) -> Table:
    r"""Measure :math:`\|g\|`, :math:`\|u\|` and :math:`\|u\| / \|w\|` of each parameter w: its gradient g and
    the update u that the optimizer makes of it, in its first step or, during a training, in its next.

    ``grad_relative`` and ``update_relative`` are relative to the largest of the model, ``update_over_weight``
    is None for weights that are all zero. A packed matrix of queries, keys and values has a row for each.
    Frozen parameters have none. ``optimizer`` as for ``Trace.update``, any class of ``torch.optim``:
    ``partial(torch.optim.AdamW, lr=5e-4)``.

    Liu et al. 2020, Section 3.2, Figures 5 and 11 (arXiv 2004.08249). Raises UserError for a frozen model
    and a loss that is not finite.
    """
    (_, owned, _), slope, _ = subject.backward
    after = subject.trace().update(optimizer, slope)
    lengths: list[tuple[str, ParameterPart, list[float]]] = []
    for path, p in trainable(subject.model).items():
        tensors = slope.gradients[path], after[path].sub_(p.detach()), p.detach()
        for part in subject.parts[path]:
            lengths.append((path, part, [measure("l2", part.of(x.to_dense())).item() for x in tensors]))
    most_g, most_u = (max(norms[i] for _, _, norms in lengths) for i in (0, 1))
    rows: list[Row] = [
        {
            "parameter": path,
            "kind": part.kind,
            "stack": owned[path].stack,
            "layer": owned[path].layer,
            "grad_l2": g,
            "update_l2": u,
            "grad_relative": g / most_g if most_g else None,
            "update_relative": u / most_u if most_u else None,
            "update_over_weight": u / w if w else None,
        }
        for path, part, (g, u, w) in lengths
    ]
    return Table("updates", tuple(rows))


def balance_of_updates(tables: Tables) -> Iterator[Finding]:
    """Compare gradients with updates, and updates with weights, over the matrices of all layers."""
    weights = (row for row in tables.table("updates") if row["kind"] in MATRICES)
    rows = [row for row in weights if not str(row["parameter"]).endswith("bias")]  # which move otherwise
    gradients, moves = extremes(rows, "grad_l2"), extremes(rows, "update_over_weight")
    if not gradients or not moves:
        return
    (weak, strong), (slow, fast) = gradients, moves
    gradient = float(strong["grad_l2"] or 0) / float(weak["grad_l2"] or 1)
    move = float(fast["update_over_weight"] or 0) / float(slow["update_over_weight"] or 1)
    yield Finding(
        "updates",
        "warning" if move > UNBALANCED else "note",
        f"the gradients of matrices differ by a factor of {format_number(gradient)} (smallest: "
        f"{weak['parameter']}, largest: {strong['parameter']}), their updates relative to their weights by a "
        f"factor of {format_number(move)} (smallest: {slow['parameter']}, largest: {fast['parameter']})",
        "updates",
        {"gradient_ratio": gradient, "update_ratio": move},
        LIU.format("Section 3.2, Figure 5"),
    )
    largest, steps = float(fast["update_over_weight"] or 0), tables.warmup_steps
    if largest > LARGE_UPDATE:
        first = largest / max(steps, 1)
        begun = at_peak(format_share(first), steps)
        large = first > LARGE_UPDATE
        advice = f"; lower the learning rate or {'warm up for longer' if steps else 'warm up'}"
        yield Finding(
            "large_update",
            "warning" if large else "note",
            f"one step changes {fast['parameter']} by {largest:.0%} of its norm{begun}{advice * large}",
            "updates",
            {"update_over_weight": largest, "first_update": first},
        )


def no_gradient(tables: Tables) -> Iterator[Finding]:
    """Report parameters that the loss does not reach; of a packed matrix, the parts that it does not."""
    parts: dict[str, dict[str, bool]] = {}
    for row in tables.table("updates"):
        parts.setdefault(str(row["parameter"]), {})[str(row["kind"])] = row["grad_l2"] == 0
    still = {path: [kind for kind, zero in own.items() if zero] for path, own in parts.items()}
    silent = [
        path if len(kinds) == len(parts[path]) else f"{path} ({', '.join(kinds)})"
        for path, kinds in still.items()
        if kinds
    ]
    if silent:
        some = ", ".join(silent[:3]) + (" …" if len(silent) > 3 else "")
        yield Finding(
            "no_gradient",
            "warning",
            f"{len(silent)} of {len(parts)} parameters receive no gradient from this batch: {some}; that is "
            "intended where branches start at zero, and a mistake where a part of the model is not used",
            "updates",
            {"without_gradient": len(silent), "parameters": len(parts)},
        )


UPDATES: Final = Study(
    "updates",
    lambda subject: [updates(subject, subject.optimizer)],
    "standard",
    rules=(balance_of_updates, no_gradient),
    title="Updates",
    intro="A tick per matrix or gain, relative to the model's largest: gradients may differ where one "
    "step of the optimizer moves all alike (Liu et al. 2020, Figure 5).",
    charts=(
        Strips(
            "updates",
            "Gradients and updates",
            "kind",
            "parameter",
            {"gradient": "grad_relative", "update": "update_relative"},
            "relative to the largest",
            order=GROUPS,
            without="bias",
        ),
    ),
    order=60,
)
