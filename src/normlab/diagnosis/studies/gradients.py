"""Measure gradients in sublayer outputs, in parameters and through a branch, and the updates they lead to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import log
from typing import Final, NamedTuple

import torch
from torch import Tensor

from normlab.base.chart import ByDepth, Strips
from normlab.base.roles import MATRIX_KINDS
from normlab.diagnosis.parameters import ParameterPart
from normlab.diagnosis.probes import measure
from normlab.diagnosis.study import LIU, MINI_BATCHES, XIONG, Finding, Study
from normlab.diagnosis.subject import Subject, split, sublayer_columns
from normlab.diagnosis.tables import Row, Table, Tables, as_float, extremes, floats, mean
from normlab.diagnosis.wording import at_peak, format_number, format_share
from normlab.errors import UserError
from normlab.trace.autograd import FROZEN, trainable
from normlab.trace.tensors import Tap

VANISHED: Final = 0.01
"""Share of a stack's largest gradient below which adaptive optimizers' first steps do not even it out."""
SLOPED: Final = 10.0
"""Ratio of the last layer's gradients to the first's: one learning rate does not suit both under SGD."""

PARTS = 4
"""Mini-batches into which a single batch is split."""


def sublayer_gradients(subject: Subject) -> Table:
    r"""Measure :math:`\|\Delta x_i\| / \max_j \|\Delta x_j\|` with :math:`\Delta x_i = \partial L/\partial
    x_i`, the gradient of the loss in the output of sublayer i.

    The maximum is over the whole model. ``variance`` is :math:`\mathrm{Var}[\Delta x_i]` over the elements of
    tokens that are not padding. An output before which everything is frozen has neither. Raises UserError if
    every parameter is frozen.

    Liu et al. 2020, Figure 3, Theorem 1 and Remark 1 (arXiv 2004.08249).
    """
    views, gradients = subject.structure.sublayers, subject.backward.stream
    if not gradients:
        raise UserError(FROZEN)
    measured: dict[Tap, tuple[float, float]] = {}
    for stack, view in views:
        if view.after in gradients:
            g = subject.tokens(stack, gradients[view.after])
            measured[view.after] = g.norm().item(), g.var(correction=0).item()
    largest = max((length for length, _ in measured.values()), default=0.0) or 1.0
    rows = list[Row]()
    for stack, view in views:
        row = {**sublayer_columns(stack, view), "grad_l2": None, "relative": None, "variance": None}
        if view.after in measured:
            length, variance = measured[view.after]
            row |= {"grad_l2": length, "relative": length / largest, "variance": variance}
        rows.append(row)
    return Table("sublayer_gradients", tuple(rows))


def parameter_gradients(subject: Subject) -> Table:
    r"""Measure :math:`\|\frac{1}{B} \sum_b g_b\|` (``mean_grad_l2``) and :math:`\frac{1}{B} \sum_b \|g_b\|`
    (``grad_l2``) of the gradients of B mini-batches, for every parameter that is trained, by ``kind`` of
    matrix: query, key, value, output, ffn_in, ffn_out, norm, embedding, other. A packed matrix of queries,
    keys and values has a row for each.

    Mini-batches are the subject's ``batches``, or its own batch split by rows into four. A loss that is a
    mean over tokens is taken as one over those of its mini-batch. ``role`` is ``shared`` for what several
    sublayers use and ``other`` outside them. Raises UserError if every parameter is frozen.

    Xiong et al. 2020, Figure 3 and Section 3.4 (arXiv 2002.04745).
    """
    mini_batches = list(subject.batches) or split(subject.batch, PARTS)
    first = subject.small if subject.batches else subject.on(mini_batches[0])
    parts, (forward, slope, _) = first.parts, first.backward
    sums = {path: g.clone() for path, g in slope.gradients.items()}
    sums_of_lengths = {path: _lengths(g, parts[path]) for path, g in sums.items()}
    for batch in mini_batches[1:]:
        for path, g in subject.trace(batch=batch).slope.gradients.items():
            sums[path] += g
            sums_of_lengths[path] += _lengths(g, parts[path])
    rows = list[Row]()
    for path, p in trainable(subject.model).items():
        lengths_of_mean = (_lengths(sums[path], parts[path]) / len(mini_batches)).tolist()
        mean_lengths = (sums_of_lengths[path] / len(mini_batches)).tolist()
        for part, mean_grad_l2, grad_l2 in zip(parts[path], lengths_of_mean, mean_lengths, strict=True):
            rows.append(
                {
                    **forward.owned[path]._asdict(),
                    "kind": part.kind,
                    "parameter": path,
                    "shape": "x".join(map(str, part.of(p).shape)),
                    "mean_grad_l2": mean_grad_l2,
                    "grad_l2": grad_l2,
                }
            )
    return Table("parameter_gradients", tuple(rows))


def _lengths(gradient: Tensor, parts: Sequence[ParameterPart]) -> Tensor:
    """Return the L2 norm of each part of a gradient."""
    return torch.stack([part.of(gradient.to_dense()).norm() for part in parts])


def branch_jacobians(subject: Subject, *, seed: int = 0) -> Table:
    r"""Measure :math:`\mathrm{Var}[\partial a/\partial x] = \|\partial a/\partial x\|_F^2 / n` of a branch
    a(x) of n elements (``jacobian_variance``) beside :math:`\sigma_b^2 = \mathrm{Var}[x + a]`
    (``total_variance``).

    This is the variance that a gradient of variance 1 has after coming back through the branch to the stream
    before it, from one random gradient over the tokens. After a norm of the sum, a gradient's variance scales
    with :math:`(1 + \mathrm{Var}[\partial a/\partial x]) / \sigma_b^2`, and vanishes if that is below 1.
    It is None if no gradient reaches the stream before the branch.

    Liu et al. 2020, Appendix A.3 (arXiv 2004.08249).
    """
    masks, views, rows = subject.masks, subject.structure.sublayers, list[Row]()
    taps = [tap for _, view in views for tap in (view.before, view.branch, view.total)]
    with subject.calls(taps).with_graph() as passed:
        for i, (stack, view) in enumerate(views):
            generator = torch.Generator().manual_seed(seed * len(views) + i)
            before, branch = passed.taps[view.before], passed.taps[view.branch]
            gain = _gain(before, branch, masks[stack], generator)
            variance = subject.tokens(stack, passed.taps[view.total]).var(correction=0).item()
            rows.append(
                {**sublayer_columns(stack, view), "jacobian_variance": gain, "total_variance": variance}
            )
    return Table("branch_jacobians", tuple(rows))


def _gain(before: Tensor, branch: Tensor, mask: Tensor, generator: torch.Generator) -> float | None:
    """Send a random gradient over the tokens back through a branch, and return the growth of its square."""
    if not before.requires_grad or not branch.requires_grad:
        return None
    drawn = torch.randn(branch.shape, generator=generator).to(branch)
    drawn = drawn * mask.to(drawn).reshape(*branch.shape[:-1], 1)
    (back,) = torch.autograd.grad(branch, before, drawn, retain_graph=True, materialize_grads=True)
    return (back.norm() / drawn.norm()).square().item()


def _gradients_of_sublayers(tables: Tables) -> Iterator[Finding]:
    for stack, table in tables.stacks("sublayer_gradients"):
        silent = sum(value == 0 for value in table.column("relative"))
        ends = extremes(table, "relative")
        if ends is None:
            continue
        small, large = ends
        least, most = small["relative"], large["relative"]
        vanished = least / most < VANISHED
        trend = f"stay within a factor of {format_number(most / least)} in {stack}"
        if vanished:
            trend = f"{'vanish' if _small_below(table.rows) else 'grow'} towards the input of {stack}"
        sentence = (
            f"the gradients of sublayer outputs {trend}: that of {tables.module(small)} is "
            f"{format_number(least / most)} times that of {tables.module(large)}"
        )
        if silent:
            sentence += f"; {silent} sublayers receive none"
        yield Finding(
            "sublayer_gradients",
            "warning" if vanished else "note",
            sentence,
            "sublayer_gradients",
            {"smallest": least, "largest": most, "ratio": least / most, "without_gradient": silent},
            LIU.format("Section 3.1, Figure 3"),
        )


def _small_below(rows: Sequence[Row]) -> bool:
    """Return whether gradients in the lower half are smaller, by their geometric means."""
    logs = [log(x) for x in floats(rows, "relative") if x > 0]
    half = len(logs) // 2
    return half > 0 and mean(logs[:half]) <= mean(logs[half:])


def _gradients_of_parameters(tables: Tables) -> Iterator[Finding]:
    for stack, table in tables.stacks("parameter_gradients"):
        squares: dict[int, float] = defaultdict(float)
        for row in table.where(role="ffn"):
            squares[int(as_float(row["layer"]) or 0)] += (as_float(row["grad_l2"]) or 0.0) ** 2
        layers = {layer: square**0.5 for layer, square in squares.items() if square > 0}
        if len(layers) < 2:
            continue
        first, last = layers[min(layers)], layers[max(layers)]
        ratio = last / first
        steep = max(ratio, 1 / ratio) > SLOPED
        yield Finding(
            "parameter_gradients",
            "warning" if steep else "note",
            f"the gradients of the last feed-forward sublayer of {stack} are {format_number(ratio)} times "
            "those of the first",
            "parameter_gradients",
            {"first": first, "last": last, "ratio": ratio},
            XIONG.format("Theorem 1 and Section 3.3"),
        )


SUBLAYER_GRADIENTS: Final = Study(
    "sublayer_gradients",
    sublayer_gradients,
    "cheap",
    rules=(_gradients_of_sublayers,),
    title="Gradients of outputs",
    intro="Gradient of the loss in the output of each sublayer, relative to the largest one of the "
    "model, on a log scale (Liu et al. 2020, Figure 3).",
    charts=(
        ByDepth("sublayer_gradients", "Gradients of outputs", "relative", "relative gradient", log=True),
    ),
    order=10,
)
PARAMETER_GRADIENTS: Final = Study(
    "parameter_gradients",
    parameter_gradients,
    "standard",
    rules=(_gradients_of_parameters,),
    title="Gradients of parameters",
    intro="L2 norm of the gradient of each sublayer's parameters, averaged over mini-batches, on a log "
    "scale (Xiong et al. 2020, Figure 3).",
    charts=(
        ByDepth(
            "parameter_gradients", "Gradients of parameters", "grad_l2", "L2 norm", log=True, sum_squares=True
        ),
    ),
    batch=MINI_BATCHES,
    order=50,
)

GROUPS: Final = (*MATRIX_KINDS, "norm", "embedding", "other")
UNBALANCED: Final = 100.0
"""Ratio between two updates, relative to their matrices, that is too large for one learning rate."""
LARGE_UPDATE: Final = 0.1
"""Share of a matrix's norm that one step changes: ten such steps can replace it."""


def updates(subject: Subject) -> Table:
    r"""Measure :math:`\|g\|`, :math:`\|u\|` and :math:`\|u\| / \|w\|` of each parameter w: its gradient g and
    the update u that the subject's optimizer makes of it, in its first step or, during training, in its next.

    ``grad_relative`` and ``update_relative`` are relative to the model's largest; ``update_over_weight``
    is None for weights that are all zero. A packed matrix of queries, keys and values has a row for each.
    Frozen parameters have none.

    Liu et al. 2020, Section 3.2, Figures 5 and 11 (arXiv 2004.08249). Raises UserError for a frozen model
    and a loss that is not finite.
    """
    (_, owned, _), slope, _ = subject.backward
    after = subject.trace().update(subject.optimizer, slope)
    moved = list[_Moved]()
    for path, p in trainable(subject.model).items():
        weight = p.detach()
        tensors = slope.gradients[path], after[path].sub_(weight), weight
        for part in subject.parts[path]:
            lengths = [measure("l2", part.of(x.to_dense())).item() for x in tensors]
            moved.append(_Moved(path, part.kind, *lengths))
    largest_gradient = max(m.gradient for m in moved)
    largest_update = max(m.update for m in moved)
    rows: list[Row] = [
        {
            "parameter": m.path,
            "kind": m.kind,
            "stack": owned[m.path].stack,
            "layer": owned[m.path].layer,
            "grad_l2": m.gradient,
            "update_l2": m.update,
            "grad_relative": m.gradient / largest_gradient if largest_gradient else None,
            "update_relative": m.update / largest_update if largest_update else None,
            "update_over_weight": m.update / m.weight if m.weight else None,
        }
        for m in moved
    ]
    return Table("updates", tuple(rows))


class _Moved(NamedTuple):
    """The L2 norms of a part of a parameter, of its gradient and of its update."""

    path: str
    kind: str
    gradient: float
    update: float
    weight: float


def _balance_of_updates(tables: Tables) -> Iterator[Finding]:
    rows = [  # biases have the kind of their matrix, and move differently
        row
        for row in tables.table("updates")
        if row["kind"] in MATRIX_KINDS and not str(row["parameter"]).endswith("bias")
    ]
    gradients, moves = extremes(rows, "grad_l2"), extremes(rows, "update_over_weight")
    if not gradients or not moves:
        return
    (weak, strong), (slow, fast) = gradients, moves
    gradient = strong["grad_l2"] / weak["grad_l2"]
    move = fast["update_over_weight"] / slow["update_over_weight"]
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
    if fast["update_over_weight"] > LARGE_UPDATE:
        yield _large_update(fast, tables)


def _large_update(row: Row, tables: Tables) -> Finding:
    """Judge the first update, which a warm-up makes smaller than the one at the peak."""
    share, steps = row["update_over_weight"], tables.warmup_steps
    first = share * tables.first_share
    first_in_words = at_peak(format_share(first), steps, tables.first_share)
    severity, advice = "note", ""
    if first > LARGE_UPDATE:
        severity = "warning"
        advice = f"; lower the learning rate or {'warm up for longer' if steps else 'warm up'}"
    return Finding(
        "large_update",
        severity,
        f"one step changes {row['parameter']} by {share:.0%} of its norm{first_in_words}{advice}",
        "updates",
        {"update_over_weight": share, "first_update": first},
    )


def _no_gradient(tables: Tables) -> Iterator[Finding]:
    """Report parameters that the loss does not reach; for a packed matrix, the parts that it does not."""
    is_silent: dict[str, dict[str, bool]] = defaultdict(dict)
    for row in tables.table("updates"):
        is_silent[str(row["parameter"])][str(row["kind"])] = row["grad_l2"] == 0
    silent = list[str]()
    for path, parts in is_silent.items():
        kinds = [kind for kind, is_zero in parts.items() if is_zero]
        if len(kinds) == len(parts):
            silent.append(path)
        elif kinds:
            silent.append(f"{path} ({', '.join(kinds)})")
    if silent:
        some = ", ".join(silent[:3]) + (" …" if len(silent) > 3 else "")
        yield Finding(
            "no_gradient",
            "warning",
            f"{len(silent)} of {len(is_silent)} parameters receive no gradient from this batch: {some}; that "
            "is intended where branches start at zero, and a mistake where a part of the model is not used",
            "updates",
            {"without_gradient": len(silent), "parameters": len(is_silent)},
        )


UPDATES: Final = Study(
    "updates",
    updates,
    "standard",
    rules=(_balance_of_updates, _no_gradient),
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
